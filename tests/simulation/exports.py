"""What is promised of exports, compared with what arrived: numbers, positions, reports, rejected records."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bridge.ingest.planner import StreamId
from bridge.objectkeys import JOINED, LOSSES, parse_key
from bridge.ranges import Ranges

from .clients import POISON
from .settings import SAMPLE

if TYPE_CHECKING:
    from .checks import Checks
    from .world import World

WRITTEN = 3.0  # s after which a reported position is in its file
SYNCED = 8.0  # s after which it is on the disk


class ExportChecks:
    """The truth about the exports of one world."""

    def __init__(self, world: World, checks: Checks) -> None:
        self.world, self._checks = world, checks
        self.uploaded: dict[tuple[str, int], Ranges] = {}  # by stream and epoch: what was ever in the bucket
        self.rows: set[tuple[str, int, bytes]] = set()  # of all objects: stream, number, payload
        self._due: dict[int, tuple[bytes, int]] = {}  # of kin: to be sent again, and since which record
        self._passed: list[tuple[float, int]] = []  # when, and how far, the export of kin had come
        self._numbers: dict[bytes, int] = {}  # of kin
        self._latest: dict[str, int] = {}
        self._told: set[tuple[str, int]] = set()  # data objects: a gateway knows what is there, at that start

    # -- positions

    def looked(self) -> None:
        """Somebody has looked at all streams."""
        world = self.world
        for number, payload in self._checks.seen["kin"].items():
            self._numbers.setdefault(payload, number)
        upto = (
            world.service._exports.exported_upto("kin") if world.process and not world.process.dead else None
        )
        if upto and self.calm and not self._checks.lied:
            self._passed.append((world.kernel.now, upto))

    @property
    def calm(self) -> bool:
        """Whether the disk has worked, and not slowly, since the service was started."""
        disk, start = self.world.disk, self.world.starts[-1]
        troubles = self.world.troubles
        return not (
            disk.full or disk.failing or disk.refusing or disk.slow or (troubles and troubles[-1][0] > start)
        )

    def forget_positions(self) -> None:
        """The export of kin starts over."""
        self._passed.clear()

    def arrived(self, payload: bytes) -> None:
        """A record has come to Kinesis or Firehose: an export does not go back behind what it has passed."""
        if self._checks.lied:
            return
        message = self._checks.message(payload)
        if message is None or len(message.sent) > 1:  # it may be there twice, and the other one come now
            return
        number = self._numbers.get(payload)
        if number is None:
            return
        passed = max((upto for at, upto in self._passed if upto > number and self._is_safe(at)), default=0)
        if passed:
            self._checks.broken(f"kin: number {number} is sent again, and the export had come to {passed}")

    def _is_safe(self, at: float) -> bool:
        """Whether a position that was reported then is in its file, whatever has failed since."""
        world = self.world
        written, synced = at + WRITTEN, at + SYNCED + world.disk.syncing(at, at + SYNCED)
        failed = [*world.cuts, *(when for when, _ in world.troubles)]
        return written < world.kernel.now and not any(at < when < synced for when in failed)

    # -- exports that start over

    def start_over(self, stream: str, share: float) -> None:
        """A reload moves the start of an export back to a share of what it has passed.

        What the stream has from there on is sent again: with retention = "exported" nothing of it is freed.
        """
        world, checks = self.world, self._checks
        if world.process is None or world.process.dead or checks.lied:
            world.reload()
            return
        upto = world.service._exports.exported_upto(stream) or 0
        start, before = int(upto * share), world.export_starts.get(stream, 0)
        if start == before:
            start = start + 1 if upto > start else max(start - 1, 0)
        if start > upto:
            start = before
        exact = stream == "kin" and start != before and world.process.calls_left is None
        if exact and world.random.random() < 0.5:
            world.kernel.run(lambda: all(device.idle for device in world.devices), 0.5)
        had = checks.rows("kin") if exact else {}
        world.export_starts[stream] = start
        self._latest[stream] = max(start, self.latest_start(stream))
        if stream == "kin":
            self.forget_positions()
        process, quiet = world.process, all(device.idle for device in world.devices)
        world.reload()
        if not exact or not world.kernel.run(lambda: process.dead or self.starts_at(stream, start), 1.0):
            return
        has = {} if process.dead else checks.rows("kin")
        if not has:
            return
        gone = [number for number in had if number >= start and number not in has]
        if gone and quiet and self.calm:
            checks.broken(f"kin: a reload starts the export over at {start}, and freed number {gone[0]}")
        self._due = {number: one for number, one in self._due.items() if number >= start}
        sent = len(world.kinesis.records)
        self._due |= {number: (payload, sent) for number, payload in has.items() if number >= start}

    def latest_start(self, stream: str) -> int:
        """The highest number that a stream's export ever began at: a report explains those below."""
        return self._latest.get(stream, 0)

    def starts_at(self, stream: str, start: int) -> bool:
        definition = self.world.service._manager.definitions.get(stream)
        if definition is None:  # it could not be opened
            return False
        configs = [config for kind in definition.export_definition.values() for config in kind]
        return all(config.get("startSequenceNumber", 0) == start for config in configs)

    def at_rest(self) -> None:
        """All exports have caught up: what they passed has arrived."""
        checks, world = self._checks, self.world
        for name in ("safe", "plain"):
            for number, payload in checks.seen[name].items():
                if number not in checks.exported[name] and checks.wanted(name, payload):
                    checks.broken(f"{name}: number {number} ({payload!r}) is not in the cloud")
        records = world.kinesis.records
        dead = set(checks.dead())
        arrived = set(records) | dead
        for number, payload in checks.seen["kin"].items():
            if payload not in arrived:
                checks.broken(f"kin: number {number} ({payload!r}) has not arrived")
        again = {since: set(records[since:]) for since in {since for _, since in self._due.values()}}
        for number, (payload, since) in self._due.items():
            if payload not in again[since] and payload not in dead:
                checks.broken(
                    f"kin: number {number} ({payload!r}) was not sent again by an export that starts over"
                )
        for payload in dead:
            message = checks.message(payload)
            taken = world.plan.sink == "firehose" and not (message and message.topic.startswith("odd/"))
            if POISON not in payload or taken:
                checks.broken(f"dead: {payload!r} was rejected, and its destination takes it")
        self._in_order()
        self._sampled()

    def _sampled(self) -> None:
        """A sample has the same messages, however they were cut into batches, sent again, and rejected."""
        checks, world = self._checks, self.world
        kept, counts = set[bytes](), Counter[str]()
        for _, payload in sorted(checks.seen["odd"].items()):
            message = checks.message(payload)
            if message is None or checks.fails("odd"):
                return  # it may have been there
            if counts[message.topic] % SAMPLE == 0:
                kept.add(payload)  # at one of its numbers, if it was stored again
            counts[message.topic] += 1
        arrived, dead = set(world.kinesis.odd), set(checks.dead())
        for payload in kept - arrived - dead:
            checks.broken(f"odd: {payload!r} is of the sample, and was not sent or kept as a dead letter")
        for payload in arrived - kept:
            checks.broken(f"odd: {payload!r} was sent, and is not of the sample")

    def _in_order(self) -> None:
        """With a partition key, the records of a key come in their order, but for those sent again."""
        world = self.world
        if world.plan.sink != "kinesis" or not world.plan.keyed:
            return
        newest: dict[str, int] = {}
        for payload in dict.fromkeys(world.kinesis.records):
            message = self._checks.message(payload)
            number = self._numbers.get(payload)
            if message is None or number is None or len(message.sent) > 1:  # it may be there twice
                continue
            if number < newest.get(message.topic, -1):
                self._checks.broken(
                    f"kin: number {number} came to Kinesis after number {newest[message.topic]} of its key"
                )
            newest[message.topic] = number

    # -- gateway reports

    def upload(self, stream: str, epoch: int, first: int, last: int) -> None:
        """An object has come."""
        self.uploaded.setdefault((stream, epoch), Ranges()).add(first, last)

    def told(self, key: str) -> None:
        """The gateway has asked for the object of a batch, and knows what is there."""
        self._told.add((key, len(self.world.starts)))

    def numbers_are_taken(self, key: str, rows: dict[int, bytes]) -> None:
        """An object has come: its gateway did not know that other messages have these numbers.

        It asks by the name of a batch. So another name would be a way around the answer.
        """
        name, starts = parse_key(key), len(self.world.starts)
        if name is None or name.stream not in ("safe", "plain") or name.stream in self.world.export_starts:
            return
        for other, start in self._told:
            known = parse_key(other)
            if other == key or start != starts or known is None or other in self.world.bucket.harmed:
                continue
            same = (known.stream, known.epoch) == (name.stream, name.epoch)
            if same and known.first <= name.last and known.last >= name.first:
                there = rows_of(self.world.bucket.objects[other].body)
                if any(there.get(number, payload) != payload for number, payload in rows.items()):
                    self._checks.broken(
                        f"{name.stream}: the gateway knew that {other} has other messages, and uploaded {key}"
                    )

    def report(self, body: bytes) -> None:
        """A gateway report has come: each number that an export has passed was uploaded, or is explained.

        An object's numbers include those that it declares as left out.
        """
        checks = self._checks
        if checks.lied:
            return
        losses = bool(checks.losses)
        for stream in json.loads(body)["streams"]:
            name, exported = stream["stream"], stream["exported"]
            uploaded = self.uploaded.get((name, int(stream["epoch"])), Ranges())
            passed = [(0, exported), *stream.get("ahead", ())]
            omitted = checks.left_out[StreamId("g", name, int(stream["epoch"]))]
            absent = [hole for first, last in passed for hole in uploaded.missing(first, last)]
            for first, last, why in stream["dropped"]:
                if why in LOSSES:
                    # What was seen since something may have been lost, and was not uploaded, is not lost.
                    there = checks.seen[name].keys() - checks.exported[name].keys()
                    known = [n for n in there if first <= n <= last and not omitted.covers(n, n)]
                    if known or not losses:
                        checks.broken(f"{name}: the report says {why} of {first} to {last}, {known[:3]}")
                count = int(why.removeprefix(JOINED)) if why.startswith(JOINED) else last - first + 1
                absent = list(_without(absent, first, last, count))
            if absent:
                checks.broken(
                    f"{name}: the report says that the export has passed {passed}, and numbers "
                    f"{absent[0][0]} to {absent[0][1]} were neither uploaded nor explained"
                )

    # -- two gateways in turn, with one id

    def nothing_passed_in_vain(self) -> None:
        """An old copy of the data directory has come back: what its exports pass has arrived all the same.

        Not what is before the start of an export, which a reload may have moved.
        """
        world, checks = self.world, self._checks
        if world.lies or not world.process or world.process.dead:
            return
        for name in ("safe", "plain"):
            upto = world.service._exports.exported_upto(name) or 0
            for number, payload in checks.rows(name).items():
                arrived = (name, number, payload) in self.rows or not checks.wanted(name, payload)
                if self.latest_start(name) <= number < upto and not arrived:
                    checks.broken(f"{name}: the export has passed number {number}, and it is in no object")


def rows_of(body: bytes) -> dict[int, bytes]:
    """The messages of a data object, by number."""
    rows = [json.loads(line) for line in gzip.decompress(body).splitlines()]
    return {row["sequence_number"]: base64.b64decode(row["payload"]) for row in rows}


def _without(ranges: list[tuple[int, int]], first: int, last: int, most: int) -> Iterator[tuple[int, int]]:
    """The ranges without those numbers, if there are no more than `most` of them."""
    inside = [(max(a, first), min(b, last)) for a, b in ranges if a <= last and b >= first]
    if sum(b - a + 1 for a, b in inside) > most:
        yield from ranges
        return
    for a, b in ranges:
        if a < first:
            yield a, min(b, first - 1)
        if b > last:
            yield max(a, last + 1), b
