"""Wills across restarts (3.1.1 and 5, section 3.1.2.5: a server that stops may publish them later)."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5, V311

from .harness import Bridge, Client, bridge_test, copied, decoded, found_again, until

LASTING: p.Properties = {p.SESSION_EXPIRY: 1000}


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_wills_of_persistent_sessions_are_published_after_a_restart(tmp_path: Path, how: str) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        async def with_will(name: str, delay: int) -> Client:
            return await bridge.connect(
                name,
                level=V5,
                properties=LASTING,
                will=(f"in/{name}", b"gone", 1),
                will_properties={p.WILL_DELAY: delay, p.USER_PROPERTY: [(b"k", b"v")]},
            )

        there = await with_will("there", 0)
        for name, delay in (("waiting", 2), ("later", 1000), ("back", 1000)):
            (await with_will(name, delay)).abort()
        for name in ("polite", "without"):
            client = await with_will(name, 0)
            client.disconnect()
            assert await client.closed()
        without = await bridge.connect("without", level=V5, clean=False, properties=LASTING)
        await until(lambda: bridge.stat("connections") == 2)
        await bridge.server.journaled()
        if how == "stopped":
            await bridge.stop()
        taken = copied(bridge)
        if how == "stopped":
            await bridge.start()
        del there, without  # they were connected until here
        async with found_again(bridge, taken) as again:
            back = await again.connect("back", level=V5, clean=False, properties=LASTING)
            await until(lambda: again.store.streams["s"].next_sequence == 2)
            stored = {message.topic: message for message in await again.stored()}
            assert set(stored) == {b"in/there", b"in/waiting"}
            assert decoded(stored[b"in/there"].headers)["user"] == [["k", "v"]]
            back.disconnect()
            await again.restart()
            assert again.stat("wills") == 0, "none is published twice"
            await again.connect("later", level=V5, clean=True)
            await until(lambda: again.store.streams["s"].next_sequence == 3)
            assert (await again.stored())[-1].topic == b"in/later", "its delay ends with its session"
            await again.connect("back", level=V5, clean=True)
            assert again.stat("wills") == 1

    run(tmp_path)


@bridge_test
async def test_wills_that_do_not_survive_a_restart_are_counted_when_the_bridge_stops(bridge: Bridge) -> None:
    kept: list[Client] = []
    for level, clean in ((V5, True), (V311, True), (V311, False)):
        name = f"{level} {clean}"
        kept.append(await bridge.connect(name, level=level, clean=clean, will=("in/w", b"gone", 1)))
    await bridge.stop()
    assert bridge.stat("dropped_wills") == 3
    await bridge.start()
    assert await bridge.payloads() == []
