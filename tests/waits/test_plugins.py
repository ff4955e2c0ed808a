"""What changes while a plugin is asked about topics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bridge.auth.supervisor import Auth
from bridge.plugin.auth import Question

from .house import House, waits_test
from .scheduler import Scheduler

TOPICS = "bridge/mqtt/server/asking.py Asking._ask: await self.learn"
WILL = "bridge/mqtt/server/handshake.py _ask_about_will: await asking.learn"


class Plugins(Auth):
    """Plugins that allow all topics or none, in this process."""

    allowed = True

    @property
    def authorizes(self) -> bool:
        return True

    async def allows(self, question: Question) -> bool | None:
        allowed = self.allowed
        await asyncio.sleep(0)
        return allowed


def replaced(house: House) -> None:
    """Another plugin is asked from now on."""
    assert isinstance(house.auth, Plugins)
    house.auth.allowed = False
    house.reload()


@pytest.mark.parametrize("visit", [1, 2])
def test_a_subscription_is_not_granted_by_a_plugin_that_was_replaced_meanwhile(
    tmp_path: Path, visit: int
) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.connect("c", user="ann", password=b"a")
        scheduler.at(TOPICS, lambda: replaced(house), visit)
        assert await client.subscribe(("one/#", 0), ("two/#", 0)) == b"\x80\x80"
        assert await client.alive()

    waits_test(test, tmp_path, auth=Plugins())


def test_nor_is_a_will(tmp_path: Path) -> None:
    async def test(house: House, scheduler: Scheduler) -> None:
        client = await house.open()
        scheduler.at(WILL, lambda: replaced(house))
        await client.connect("c", user="ann", password=b"a", will=("in/will", b"x", 1), expect=5)

    waits_test(test, tmp_path, auth=Plugins())
