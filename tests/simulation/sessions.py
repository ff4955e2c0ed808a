"""What is promised of sessions, wills and retained messages, compared with what their clients got.

A power cut may take what the journal had not synced: about the last second of it. What was there for longer
must survive it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .clients import WILL_DELAY, WILL_TOPIC, Device, Message, Subscriber, Will
from .settings import KEPT, QUEUED, RETAINED
from .shares import ShareChecks

if TYPE_CHECKING:
    from .checks import Checks
    from .world import World

NOTICED = 0.1  # s after which the broker knows that a connection is gone
JOURNAL_SYNC = 1.0  # s between syncs of the journal
SLACK = 0.5  # s, of a sync that is under way


class SessionChecks:
    """The truth about the clients of one world."""

    def __init__(self, world: World, checks: Checks) -> None:
        self.world, self._checks = world, checks
        self._shares = ShareChecks(world, checks, self)
        self.displaced = False  # a client has made room for a retained message of another

    def at_rest(self) -> None:
        """Look at everything; no client has anything left to do."""
        world = self.world
        self._sessions(world.subscriber)
        if not (world.cuts or self._checks.clocked):
            self._wills(world.subscriber)
        self._withdrawn(world.subscriber)
        self._retained()
        self._shares.at_rest()
        for subscriber, family in ((world.subscriber, "live/"), (world.slow, "flood/")):
            self._got(subscriber)
            self._got_all(subscriber, family)

    def counted(self) -> None:
        """A queue takes no more room than what is in it."""
        server = self.world.service._front_end._server
        for session in server.broker.sessions.all():
            size, there = session.outbox.size, sum(out.message.size for out in session.outbox.pending())
            if size > there:
                self._checks.broken(f"the queue of {session.client_id} has {there} bytes, and counts {size}")

    def lost(self, at: float) -> bool:
        """Whether a power cut may have taken what the journal was given then."""
        checks, world = self._checks, self.world
        if world.cuts and any("/mqtt" in path for path in world.disk.failed_at):
            return True
        calm = JOURNAL_SYNC + SLACK
        return any(
            checks.longest_calm(at, cut) < calm + world.disk.syncing(at, cut)
            for cut in world.cuts
            if cut > at - 0.01
        )

    def _got(self, subscriber: Subscriber) -> None:
        """What a subscriber got was sent, in order, in time, and with QoS 2 once."""
        world, checks = self.world, self._checks
        newest: dict[tuple[str, int], int] = {}
        first: set[bytes] = set()
        for at, _, payload, left in subscriber.got:
            if payload.startswith(b"will of "):
                continue
            message = checks.message(payload)
            if message is None:
                checks.broken(f"the subscriber got what nobody sent: {payload[:100]!r}")
                continue
            if message.expiry and not checks.clocked and not world.cuts:
                age = at - message.sent[-1]
                # One that was on its way before may be sent again at any time (MQTT 5 section 3.3.2.3.3). The
                # broker learns later that a subscriber has left.
                started = not any(
                    left + NOTICED <= message.sent[0] and back > at - 1
                    for back, left, *_ in subscriber.returns
                )
                if (age > message.expiry + 1 and not started) or (left and left > message.expiry - age + 1.5):
                    checks.broken(f"the subscriber got {payload!r} after {age:.1f} s, with {left} s left")
            if payload in first:
                if message.qos == 2 and not world.cuts:
                    checks.broken(f"the subscriber got {payload!r}, of QoS 2, twice")
                continue
            first.add(payload)
            if message.retain:
                continue
            key = message.client, message.qos
            if newest.get(key, -1) > message.number and not world.cuts:
                checks.broken(
                    f"the subscriber got {payload!r} after message {newest[key]} of {message.client}"
                )
            newest[key] = max(message.number, newest.get(key, -1))

    def _got_all(self, subscriber: Subscriber, family: str) -> None:
        """A persistent session gets what was acknowledged after it subscribed, if no power cut took that."""
        if subscriber.subscribed_at is None or self.lost(subscriber.subscribed_at):
            return
        mine = [message for message in self._messages() if message.topic.startswith(family) and message.qos]
        if self.world.plan.tight and sum(len(one.payload) + 100 for one in mine) > QUEUED:
            return  # the oldest may have been dropped
        got = {one.payload for one in subscriber.got}
        for message in mine:
            if (
                message.acked is not None
                and not message.expiry
                and message.sent[0] > subscriber.subscribed_at + 0.1
                and message.payload not in got
                and not self.lost(message.acked)
            ):
                self._checks.broken(f"the {subscriber.name} never got {message.payload!r}")

    def _messages(self) -> Iterator[Message]:
        for device in self.world.devices:
            yield from device.messages

    def _since(self, at: float) -> float:
        """When a connection ended, as the broker knows: if it died about then, its next start."""
        world = self.world
        if any(at - 1 < end < at + 1 for end in (*world.kills, *world.stops)):
            return min((start for start in world.starts if start > at), default=world.kernel.now)
        return at

    def _sessions(self, subscriber: Subscriber) -> None:
        """A session is there until it expires, and no longer."""
        checks, world = self._checks, self.world
        if checks.filled:
            return  # the journal could keep neither the session nor when its client left
        for back, left, present, subscribed in subscriber.returns:
            over = subscriber.v5 and back - left > subscriber.expiry - 1
            if not present and not over and not (world.cuts and checks.clocked) and not self.lost(subscribed):
                checks.broken(f"the subscriber's session was gone after {back - left:.1f} s")
            timed = subscriber.v5 and not world.cuts and not checks.clocked
            if present and timed and back - self._since(left) > subscriber.expiry + 1:
                checks.broken(f"the subscriber's session was still there after {back - left:.1f} s")

    # -- wills

    def _wills(self, subscriber: Subscriber) -> None:
        """A will is published if its client goes without a word, and stays away for the delay."""
        world, checks = self.world, self._checks
        if subscriber.subscribed_at is None or world.sync_failures or world.revoked_once:
            return
        if checks.filled or any(step.do == "passwords" for step in world.plan.steps):
            return
        got = {one.payload for one in subscriber.got}
        for device in world.devices:
            for will in device.wills or ():
                if will.left is None:
                    continue
                since = self._since(will.left)
                back = will.back if will.back is not None else world.kernel.now
                if will.payload in got and since == will.left:
                    if will.politely or back - will.left < WILL_DELAY - 0.5:
                        checks.broken(f"{will.payload!r} was published")
                    continue
                due = not will.politely and back - since > WILL_DELAY + 1
                if due and will.payload not in got and subscriber.subscribed_at < will.left - 1:
                    checks.broken(f"{will.payload!r} on {WILL_TOPIC} was never published")

    def password_changed(self, device: Device) -> None:
        """A reload is about to change a client's password: its wills that are not due yet are dropped."""
        now = self.world.kernel.now
        for will in device.wills or ():
            if self._pending(will, device, now):
                will.withdrawn = True

    def _pending(self, will: Will, device: Device, now: float) -> bool:
        if will.left is None:
            wills = device.wills or []
            return device.connected and will is wills[-1]
        return will.back is None and now - will.left < WILL_DELAY - 0.5

    def _withdrawn(self, subscriber: Subscriber) -> None:
        """Nothing is published for somebody whose password has changed."""
        got = {one.payload for one in subscriber.got}
        for device in self.world.devices:
            for will in device.wills or ():
                if will.withdrawn and will.payload in got:
                    self._checks.broken(f"{will.payload!r} was published after its password had changed")

    # -- retained messages

    def _retained(self) -> None:
        """A topic keeps the newest message that was acknowledged, or one that was sent after it.

        Unless the client with most of them has made room for another, or got none (docs/adr/0034).
        """
        world, checks = self.world, self._checks
        filters = [("live/1/kept/#", 1), *((f"{family}/kept/#", 1) for family in KEPT)]
        late = Subscriber(world.kernel, "late", world.random, filters, v5=bool(world.plan.seed % 2), expiry=0)
        late.start()
        world.kernel.run(lambda: late.subscribed_at is not None, 10)
        world.kernel.pass_time(0.5)
        late.leave(politely=True)
        kept = {one.payload for one in late.got}
        if world.plan.tight and len(kept) > RETAINED:
            checks.broken(f"{len(kept)} messages are retained, and the limit is {RETAINED}")
        for device in world.devices:
            topics = dict.fromkeys(message.topic for message in device.messages if message.retain)
            for topic in topics:
                sent = [one for one in device.messages if one.retain and one.topic == topic and one.sent]
                acked = [
                    n for n, one in enumerate(sent) if one.acked is not None and not self.lost(one.acked)
                ]
                may = {message.payload for message in sent[acked[-1] if acked else 0 :]}
                if acked and not may & kept and not self.displaced:
                    checks.broken(f"{sent[acked[-1]].payload[:100]!r} on {topic} is not retained")
