"""Expiry of messages, sessions and wills: time that passes counts, and steps of the wall clock do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.mqtt.settings import Limits
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5

from ..fakes.clock import Shifted
from .harness import Bridge, Client, bridge_test, publish, until

YEAR = 365 * 86_400.0
STEPS = [50 * YEAR, -50 * YEAR]
LASTING: p.Properties = {p.SESSION_EXPIRY: 1000}


async def client_of(bridge: Bridge, name: str, **options: object) -> Client:
    return await bridge.connect(name, level=V5, properties=LASTING, **options)


async def restarted(bridge: Bridge, how: str, step: float) -> None:
    """The wall clock is stepped, and the service or the machine starts anew."""
    bridge.system.step(step)
    if how == "another boot":
        await bridge.stop()
        then, bridge.system = bridge.system, Shifted("another", synchronised=False)
        bridge.system.passed, bridge.system.stepped = then.passed, then.stepped
        await bridge.start()
    elif how == "restart":
        await bridge.restart()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["running", "restart", "another boot"])
def test_queued_and_retained_messages_outlive_a_step_of_the_wall_clock(
    tmp_path: Path, how: str, step: float
) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        away = await client_of(bridge, "away")
        await away.subscribe(("plain/#", 1))
        away.disconnect()
        assert await away.closed()
        publisher = await bridge.connect("p", level=V5)
        for topic, seconds in (("plain/short", 50), ("plain/long", 900)):
            sent = publish(topic, b"x", 1, 1, level=V5, retain=True, properties={p.MESSAGE_EXPIRY: seconds})
            assert (await publisher.exchange(sent)).head == 0x40
        bridge.system.sleep(40)
        await restarted(bridge, how, step)
        reader = await bridge.connect("r", level=V5)
        await reader.subscribe(("plain/#", 1))
        assert {(await reader.message()).topic for _ in range(2)} == {"plain/short", "plain/long"}
        bridge.system.sleep(20)
        away = await client_of(bridge, "away", clean=False)
        assert (await away.message()).topic == "plain/long"
        assert await away.silent()

    run(tmp_path)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["restart", "another boot"])
def test_sessions_and_wills_outlive_a_step_of_the_wall_clock(tmp_path: Path, how: str, step: float) -> None:
    @bridge_test
    async def run(bridge: Bridge) -> None:
        will = {"will": ("in/will", b"gone", 1), "will_properties": {p.WILL_DELAY: 500}}
        client = await client_of(bridge, "c", **will)
        client.abort()
        client = await client_of(bridge, "d")
        await client.subscribe(("plain/#", 1))
        client.disconnect()
        assert await client.closed()
        await bridge.server.journaled()
        await restarted(bridge, how, step)
        assert bridge.stat("sessions") == 2
        assert await bridge.payloads() == []
        bridge.system.sleep(499)
        await bridge.restart()
        assert await bridge.payloads() == []
        bridge.system.sleep(2)
        await bridge.restart()
        await until(lambda: bridge.manager.describe("s").storage_status.newest_sequence_number == 0)
        assert await bridge.payloads() == [b"gone"]
        assert bridge.stat("sessions") == 2
        bridge.system.sleep(500)
        await bridge.restart()
        assert bridge.stat("sessions") == 0

    run(tmp_path)


def test_a_session_lasts_a_leap_year_of_clock_changes_and_reboots_and_no_longer(tmp_path: Path) -> None:
    """NTP and summer time step the clock by an hour, the machine starts anew each quarter."""
    leap_year = 366 * 86_400
    lasting: p.Properties = {p.SESSION_EXPIRY: leap_year}

    @bridge_test(limits=Limits(session_expiry_interval=2 * leap_year * 1000))
    async def run(bridge: Bridge) -> None:
        async def pass_time(days: float) -> None:
            for month in range(12):
                bridge.system.sleep(days * 86_400 / 12)
                step = 3600.0 if month % 2 else -3600.0
                await restarted(bridge, "another boot" if month % 3 == 0 else "running", step)

        away = await bridge.connect("away", level=V5, properties=lasting)
        await away.subscribe(("plain/#", 1))
        for days, kept in ((365.9, True), (366.1, False)):
            away.disconnect()
            assert await away.closed()
            publisher = await bridge.connect("p", level=V5)
            assert (await publisher.exchange(publish("plain/a", b"x", 1, 1, level=V5))).head == 0x40
            await pass_time(days)
            away = await bridge.connect("away", level=V5, properties=lasting, clean=False)
            if kept:
                assert (await away.message()).topic == "plain/a"
            assert await away.silent()

    run(tmp_path)
