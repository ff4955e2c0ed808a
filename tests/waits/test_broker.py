"""What changes while a will waits for its delay, and between retained messages."""

from __future__ import annotations

from pathlib import Path

from bridge.mqtt.broker.feeds import LOOK_UPS
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from tests.mqtt.harness import publish, subscribe, until

from .house import House, rule, waits_test
from .scheduler import Scheduler

WILL = "bridge/mqtt/broker/wills.py Wills.wait: self._runtime.later"
FEED = "bridge/mqtt/broker/feeds.py Feeds._go_on: self._runtime.soon"


def test_a_will_is_not_published_if_its_right_is_withdrawn_during_its_delay(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.open()
        client.level = V5
        more = {"properties": {p.SESSION_EXPIRY: 100}, "will_properties": {p.WILL_DELAY: 1}}
        await client.connect("c", user="ann", password=b"a", level=V5, will=("in/will", b"x", 1), **more)
        scheduler.at(WILL, lambda: house.reload(acl=[rule("ann", publish=["other/#"])]))
        client.abort()
        await until(lambda: house.stat("dropped_wills"))
        assert await house.payloads() == []

    waits_test(test, tmp_path)


def test_a_right_to_read_that_is_withdrawn_between_retained_messages_ends_them(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.connect("c", user="ann", password=b"a")
        for number in range(500):
            client.send(publish(f"state/{number:03}", b"x", retain=True))
        assert await client.alive()
        scheduler.at(
            FEED, lambda: house.reload(acl=[rule("ann", publish=["#"], subscribe=["#"], read=["none/#"])])
        )
        client.send(subscribe(1, ("state/#", 0)))
        assert (await client.receive()).head == 0x90
        got = 0
        client.send(b"\xc0\0")
        while (await client.receive()).head == 0x31:
            got += 1
        assert got == LOOK_UPS, "those before"

    waits_test(test, tmp_path)
