"""What must hold at the end, as functions of the observations. Nothing here runs or reads anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from benchmarks.soak import plan
from benchmarks.soak.plan import Device

MARGIN = 0.2  # seconds: a save takes time, and so does an acknowledgement that is on its way
SHORTEST = 60.0  # seconds of a process's life after its start, below which there is no trend
# Allowed growth over the observed time; pools start their threads on demand.
GROWTH = {"rss": 6 << 20, "threads": 4, "files": 6, "sockets": 10}
SHARE = 0.05  # or this share of the value, if that is more


class Check(NamedTuple):
    """One thing that must hold, and what was found."""

    what: str
    good: bool
    found: str


@dataclass(frozen=True)
class Sample:
    """One look at one process."""

    time: float
    name: str  # the gateway's, with " worker" for its export worker
    pid: int
    rss: int
    threads: int
    files: int  # open descriptors that are no sockets
    sockets: int


@dataclass(frozen=True)
class Seen:
    """What a device knows: `acknowledged` has for each of its messages when it was (ms), or 0."""

    device: Device
    acknowledged: np.ndarray[Any, Any]
    unfinished: int = 0
    sessions_lost: int = 0


@dataclass(frozen=True)
class Rows:
    """What the table holds: of each row the stream (index in `streams`), its number, device and message."""

    streams: list[tuple[str, str, str]]  # gateway, stream, epoch
    stream: np.ndarray[Any, Any]
    number: np.ndarray[Any, Any]
    device: np.ndarray[Any, Any]
    message: np.ndarray[Any, Any]

    def of(self, gateway: str, stream: str) -> np.ndarray[Any, Any]:
        """Which rows are of a stream, whatever its epoch; in the order of their numbers."""
        wanted = [n for n, one in enumerate(self.streams) if one[:2] == (gateway, stream)]
        found = np.flatnonzero(np.isin(self.stream, wanted))
        return found[np.lexsort((self.number[found], self.stream[found]))]


def copies(seen: Seen, rows: Rows, stream: str) -> np.ndarray[Any, Any]:
    """How often each message of a device is in a stream."""
    found = rows.of(seen.device.gateway, stream)
    messages = rows.message[found[rows.device[found] == seen.device.number]]
    size = len(seen.acknowledged)
    return np.bincount(messages[messages < size], minlength=size)


def all_acknowledged(devices: Sequence[Seen]) -> Check:
    """In the end every message at QoS 1 and 2 was acknowledged."""
    sent = sum(len(one.acknowledged) for one in devices if one.device.qos)
    done = sum(int(np.count_nonzero(one.acknowledged)) for one in devices)
    left = sum(one.unfinished for one in devices)
    return Check(
        "every device got all its acknowledgements", 0 < done == sent and not left, f"{done:,} of {sent:,}"
    )


def sessions_kept(devices: Sequence[Seen]) -> Check:
    """The embedded broker never forgot a persistent session."""
    lost = sum(one.sessions_lost for one in devices if one.device.gateway == plan.EMBEDDED)
    return Check("no persistent session was forgotten", not lost, f"{lost} forgotten")


def none_missing(devices: Sequence[Seen], rows: Rows, unsaved: Iterable[tuple[float, float]] = ()) -> Check:
    """What was acknowledged is in the table, in each stream that it belongs to.

    `unsaved` are the times between Mosquitto's last save of its database and its SIGKILL. What it
    acknowledged then and lost is its own: it saves when a message was queued, and not while messages are
    only in flight, so that before a lull the last one may stay unsaved for as long as that lasts.
    """
    missing: list[str] = []
    excused = 0
    spans = [((saved - MARGIN) * 1000, (killed + MARGIN) * 1000) for saved, killed in unsaved]
    for one in devices:
        for stream in one.device.streams:
            absent = np.flatnonzero((one.acknowledged > 0) & (copies(one, rows, stream) == 0))
            if one.device.gateway == plan.EXTERNAL:
                times = one.acknowledged[absent]
                last = [any(begin <= time <= end for begin, end in spans) for time in times]
                excused += sum(last)
                absent = absent[~np.array(last, dtype=bool)]
            missing += [f"device {one.device.number} message {n} in {stream}" for n in absent]
    found = f"{len(missing):,} missing" + "".join(f"; {one}" for one in missing[:5])
    if excused:
        found += f" ({excused} that Mosquitto acknowledged between its last save and its SIGKILL, and lost)"
    return Check("every acknowledged message is in the table", not missing, found)


def none_twice(rows: Rows) -> Check:
    """No stored message is in the table twice."""
    pairs = np.stack([rows.stream, rows.number])
    twice = pairs.shape[1] - np.unique(pairs, axis=1).shape[1]
    return Check(
        "no stored message is in the table twice", not twice, f"{twice:,} twice in {len(rows.number):,} rows"
    )


def contiguous(rows: Rows, ends: Mapping[tuple[str, str], int]) -> Check:
    """The numbers of each stream go from 0 to where its gateway says that it ends, without a hole."""
    wrong = []
    for (gateway, stream), end in ends.items():
        numbers = np.unique(rows.number[rows.of(gateway, stream)])
        if len(numbers) != end or (end and (numbers[0], numbers[-1]) != (0, end - 1)):
            wrong.append(f"{stream}: {len(numbers):,} numbers, and the gateway has given {end:,}")
    epochs = len(rows.streams) == sum(end > 0 for end in ends.values())
    if not epochs:
        wrong.append(f"{len(rows.streams)} streams in the table, {len(ends)} on the gateways")
    return Check("numbers are contiguous from 0", not wrong, "; ".join(wrong) or f"{len(ends)} streams")


def once_at_qos_2(devices: Sequence[Seen], rows: Rows) -> Check:
    """The embedded broker stores a QoS 2 message once, whatever was killed or cut."""
    chosen = [one for one in devices if one.device.qos == 2 and one.device.gateway == plan.EMBEDDED]
    extra = sum(int((copies(one, rows, s) > 1).sum()) for one in chosen for s in one.device.streams)
    total = sum(len(one.acknowledged) for one in chosen)
    return Check("QoS 2 is stored once", not extra, f"{extra:,} of {total:,} stored more than once")


def nothing_invented(devices: Sequence[Seen], rows: Rows) -> Check:
    """Every row is a message that a device has sent, in a stream that it belongs to."""
    known = np.zeros(len(rows.number), dtype=bool)
    for one in devices:
        for stream in one.device.streams:
            found = rows.of(one.device.gateway, stream)
            fits = (rows.device[found] == one.device.number) & (rows.message[found] < len(one.acknowledged))
            known[found[fits]] = True
    strange = int((~known).sum())
    return Check("the table has no message that no device sent", not strange, f"{strange:,} rows")


def in_order(devices: Sequence[Seen], rows: Rows) -> Check:
    """The messages of a device are first stored in the order in which it sent them.

    Not with MQTT 5, where a refused message is sent again behind others, nor behind a foreign broker.
    """
    wrong = []
    for one in devices:
        if one.device.level != 4 or one.device.gateway != plan.EMBEDDED:
            continue
        for stream in one.device.streams:
            found = rows.of(one.device.gateway, stream)
            messages = rows.message[found[rows.device[found] == one.device.number]]
            _, first = np.unique(messages, return_index=True)
            if (np.diff(first) < 0).any():
                wrong.append(f"device {one.device.number} in {stream}")
    return Check("order of each device is kept", not wrong, "; ".join(wrong[:5]) or "kept")


def read_back(sent: int, read: Sequence[int], wrong: Sequence[str]) -> Check:
    """An app has read each of its messages once, in order, while it appended them again and again."""
    same = list(read) == list(range(sent))
    found = f"{len(read):,} read of {sent:,}" + "".join(f"; {one}" for one in wrong[:5])
    return Check("an app reads what it appended, once and in order", sent > 0 and same and not wrong, found)


def limited(topics: Sequence[str]) -> Check:
    """The limited stream holds no more than its limits allow, and not less; `topics` are of its messages."""
    most = max(Counter(topics).values(), default=0)
    good = 0 < len(topics) <= plan.KEPT and most <= plan.KEPT_PER_TOPIC
    good = good and (most == plan.KEPT_PER_TOPIC or len(topics) == plan.KEPT)
    return Check("the limited stream keeps to its limits", good, f"{len(topics)} messages, {most} on a topic")


def thrown_out(events: int, connections: int) -> Check:
    """A new password ended the connections that the old one had admitted.

    Once or twice their link may be cut at that moment.
    """
    good = connections > 0 or events < 3
    return Check("a new password ends old connections", good, f"{connections} at once, {events} times")


def delivered(kind: str, rows: Rows, counts: Mapping[int, Sequence[int]]) -> Check:
    """Everything that is in the streams exported to a service has arrived there."""
    streams = {name for name, kinds in plan.ALSO.items() if kind in kinds}
    missing = total = again = 0
    for number, (_, stream, _) in enumerate(rows.streams):
        if stream not in streams:
            continue
        chosen = rows.stream == number
        for device, message in zip(rows.device[chosen].tolist(), rows.message[chosen].tolist(), strict=True):
            arrived = counts.get(device, ())
            total += 1
            missing += not (message < len(arrived) and arrived[message])
    again = sum(sum(one) for one in counts.values()) - total
    found = f"{missing:,} of {total:,} missing; {max(again, 0):,} arrived again"
    return Check(f"every stored message arrived at {kind}", not missing and total > 0, found)


def flat(samples: Sequence[Sample], name: str) -> list[Check]:
    """The last life of a process neither grew, nor leaked threads, files or sockets.

    The first quarter of that life is not looked at, since caches fill then. The growth is Theil and Sen's:
    the median of the slopes between all pairs of points, which no single peak moves.
    """
    mine = [one for one in samples if one.name == name]
    if not mine:
        return [Check(f"{name} was seen", False, "no sample")]
    life = [one for one in mine if one.pid == mine[-1].pid]
    begin = life[0].time + (life[-1].time - life[0].time) / 4
    life = [one for one in life if one.time >= begin]
    seconds = life[-1].time - life[0].time
    if seconds < SHORTEST:
        return [Check(f"{name}: flat", True, f"not judged: {seconds:.0f} s are too short")]
    life = life[:: max(1, len(life) // 200)]
    times = np.array([one.time for one in life])
    first, second = np.triu_indices(len(times), 1)
    checks = []
    for what, allowed in GROWTH.items():
        values = np.array([getattr(one, what) for one in life], dtype=float)
        slope = float(np.median((values[second] - values[first]) / (times[second] - times[first])))
        growth, usual = slope * seconds, float(np.median(values))
        good = growth <= max(allowed, SHARE * usual)
        unit, scale = ("MiB", 1 << 20) if what == "rss" else ("", 1)
        found = f"{usual / scale:.0f} {unit}, {growth / scale:+.1f} {unit} in {seconds:.0f} s"
        checks.append(Check(f"{name}: {what} flat", good, " ".join(found.split()).replace(" ,", ",")))
    return checks


def clean(faults: Sequence[str]) -> Check:
    """No process ended or failed to start, no internal errors, no workers left behind."""
    return Check("nothing ended, hung or failed by itself", not faults, "; ".join(faults[:10]) or "nothing")


def ingested(code: int, document: Mapping[str, Any]) -> Check:
    """The last ingest run says itself that the table is complete."""
    total = document.get("report", {}).get("total", {})
    holes = {name: total.get(name) for name in ("missing", "waiting", "trimmed")}
    found = f"exit code {code}, " + ", ".join(f"{name} {value}" for name, value in holes.items())
    return Check("the ingest report says complete", code == 0 and set(holes.values()) == {0}, found)
