"""Members of a shared subscription, and what they are promised (`bridge/mqtt/broker/shared.py`).

* A message that was acknowledged while the subscription had a member comes to one of its members, unless a
  power cut took it out of the journal, or a full queue.
* A message that comes while one member is away and the other one is connected does not wait for the one that
  is away.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from .clients import Subscriber
from .settings import QUEUED

if TYPE_CHECKING:
    from .checks import Checks
    from .clients import Message
    from .sessions import SessionChecks
    from .world import World

CROWD = 18
EXPIRY = (5, 65_536)  # s that the session of each member outlives its connection, with MQTT 5


def _filters(seed: int) -> list[tuple[str, int]]:
    return [("$share/group/share/#", 1 + seed % 2), ("others/#", 0)]


def members(world: World, seed: int) -> list[Subscriber]:
    """Two clients; the session of the first one ends soon after it goes, with MQTT 5."""
    return [
        Subscriber(
            world.kernel,
            f"member-{n}",
            Random(f"member {n} {seed}"),
            _filters(seed),
            v5=n == 0,
            expiry=EXPIRY[n],
        )
        for n in range(2)
    ]


def crowd(world: World) -> list[Subscriber]:
    """More members than the broker compares for one message."""
    seed = world.plan.seed
    return [
        Subscriber(
            world.kernel,
            f"one-{n}",
            Random(f"one {n} {seed}"),
            _filters(seed),
            v5=bool(n % 2),
            expiry=EXPIRY[1],
        )
        for n in range(CROWD)
    ]


class ShareChecks:
    """The truth about the shared subscription of one world."""

    def __init__(self, world: World, checks: Checks, sessions: SessionChecks) -> None:
        self.world, self._checks, self._sessions = world, checks, sessions

    def at_rest(self) -> None:
        """Look at everything; all members are connected, and nothing is under way."""
        world = self.world
        since = [one.first for one in world.members if one.first is not None]
        mine = [
            message for device in world.devices for message in device.messages
            if message.topic.startswith("share/") and message.qos
        ]  # fmt: skip
        if not since or (world.plan.tight and sum(len(one.payload) + 100 for one in mine) > QUEUED):
            return
        got = {one.payload for member in (*world.members, *world.crowd) for one in member.got}
        begun = max(since)
        if self._sessions.lost(begun) or self._checks.passes_for_time:  # then sessions may have expired
            return
        for message in mine:
            if (
                message.acked is not None
                and message.sent[0] > begun + 0.1
                and message.payload not in got
                and not self._sessions.lost(message.acked)
                and not self._died_in_flight(message)
            ):
                self._checks.broken(f"no member of the shared subscription got {message.payload!r}")
        if not world.revoked_once:
            self._prefers_those_who_are_there()

    def _died_in_flight(self, message: Message) -> bool:
        """Whether it may have gone with the session that it was sent to (MQTT-4.8.2-5).

        That takes QoS 2, and a connection of the member whose session ends, or a power cut, after which
        nobody knows what was sent.
        """
        if message.qos < 2 or self.world.plan.seed % 2 == 0:
            return False
        mortal = self.world.members[0]
        sent = message.sent[0] - 0.1
        return bool(self.world.cuts) or any(b > sent and b != float("inf") for _, b in mortal.spans)

    def _prefers_those_who_are_there(self) -> None:
        here, gone = self.world.members
        others = [(one, other) for one in self.world.crowd for other in (here, gone)]
        for one, other in ((here, gone), (gone, here), *others):
            early = {each.payload for each in other.got}
            for at, _, payload, _ in one.got:
                message = self._checks.message(payload)
                if message is None or payload in early or message.acked is None or len(message.sent) > 1:
                    continue
                if any(message.sent[0] - 0.5 < cut < at for cut in self.world.cuts):
                    continue
                came = max((span[0] for span in one.spans if span[0] <= at), default=at)
                was_away = all(not (a < came and b > message.sent[0] - 0.1) for a, b in one.spans)
                was_there = any(
                    a < message.sent[0] - 0.5 and b > max(came, message.acked + 0.1) for a, b in other.spans
                )
                if was_away and was_there and came > message.acked + 0.1:
                    self._checks.broken(
                        f"{payload!r} waited for {one.name}, which was away, and {other.name} was there"
                    )
