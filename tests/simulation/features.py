"""Steps that use features of the product which most clients never touch, or break what surrounds them.

Each method is a step (`steps.WORDS` says what it does); what must be true then is in the checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .boundary import MACHINE
from .settings import KEPT, KIN_SEGMENT
from .shares import crowd

if TYPE_CHECKING:
    from .clients import Client
    from .world import World

LARGE = 900_000  # bytes


class Features:
    """The steps of one world."""

    def __init__(self, world: World) -> None:
        self.world = world

    # -- faults

    def slow(self, seconds: float, where: str = "") -> None:
        self.world.disk.slow, self.world.disk.slow_at = seconds, where

    lag = slow

    def repair(self) -> None:
        world = self.world
        world._do_full(False)
        world._do_link(False)
        world.disk.failing = world.disk.refusing = 0
        world.disk.slow = 0.0

    def plugin(self, gone: bool) -> None:
        MACHINE.missing = self.world.plan.sink if gone else ""

    # -- clients

    def stall(self, on: bool) -> None:
        link = self.world.slow.link
        if link is not None:
            link.stall(on)

    def slowly(self) -> None:
        slow = self.world.slow
        if slow.away:
            slow.start()
        else:
            slow.leave(politely=False)

    def flood(self, device: int, number: int) -> None:
        who = self.world.devices[device]
        for _ in range(number):
            body = f"{who.name} {len(who.messages)} flood ".encode()
            who.publish(f"flood/{device}", body + b"." * 8000, 0)

    def hoard(self, device: int, number: int) -> None:
        who = self.world.devices[device]
        for n in range(number):
            body = f"{who.name} {len(who.messages)} hoarded".encode()
            who.publish(f"{KEPT[n % len(KEPT)]}/kept/{device}/{n}", body, 1, retain=True)

    def churn(self, device: int, number: int) -> None:
        who = self.world.devices[device]
        for n in range(number):
            body = f"{who.name} {len(who.messages)} large ".encode()
            who.publish(
                f"state/kept/{device}", body + b"." * (LARGE if n < number - 1 else 0), 1, retain=True
            )

    def attempt(self, operation: str) -> None:
        world = self.world
        stream = world.random.choice(("safe", "both", "ids", "dead"))
        world.guest.attempt(operation, stream, rules=not world.plan.open)

    def hire(self, number: int) -> None:
        self._toggle(self.world.workers[number])

    def rehire(self) -> None:
        self.world.labour.start_over()

    def member(self, number: int) -> None:
        self._toggle(self.world.members[number])

    def members(self, here: bool) -> None:
        for who in self.world.members:
            if who.away == here:
                self._toggle(who)

    def crowd(self, here: bool) -> None:
        world = self.world
        if here and not world.crowd:
            world.crowd = crowd(world)
            world.clients += world.crowd
        for who in world.crowd:
            if who.away == here:
                self._toggle(who)

    def _toggle(self, who: Client) -> None:
        if who.away:
            who.start()
        else:
            who.leave(politely=self.world.random.random() < 0.5)

    # -- exports

    def redefine(self, stream: str, share: float) -> None:
        self.world.checks.exports.start_over(stream, share)

    def shrink(self, share: float) -> None:
        world, sizes = self.world, (4 * KIN_SEGMENT, 20 * KIN_SEGMENT)
        world.kin_size = sizes[world.kin_size == sizes[0]]
        world.checks.exports.start_over("kin", share)

    def rest(self, stream: str) -> None:
        self.world.checks.hands.rest(stream)

    def resume(self) -> None:
        self.world.checks.hands.resume()

    # -- the lake

    def query(self) -> None:
        self.world.checks.lake.query.trigger()

    def prune(self) -> None:
        self.world.checks.lake.tend()
