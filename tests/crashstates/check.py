"""Starts the real code on a state of the disk, and judges what it finds by what was promised before."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bridge.encryption import Keys
from bridge.errors import CorruptData, OtherFormat
from bridge.export.cursor import Cursor, CursorFile, Skipped, highest_exported
from bridge.mqtt.settings import MqttConfig
from bridge.operations.manager import committed
from bridge.plugin import discovery
from bridge.streams import drops, formats, layout, segment
from bridge.streams.drops import LOSSES, Drop, DropReason
from bridge.streams.meta import StorageSettings
from bridge.streams.sealing import Sealing
from bridge.streams.segment import Frame
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream
from bridge.streams.verify import Checked, Problem, verify

from ..cli.conftest import COMMAND, environment
from ..fakes.clock import Shifted
from ..mqtt.harness import Bridge, Client, ack, connect, publish
from ..streams.conftest import everything
from .filesystem import KILLED, State, write
from .record import LIMIT, Recording, Sent
from .trace import Call

NEW_BOOT = "the boot after the crash"
DECLARED = {
    "synced": StorageSettings(flush=True, segment_size=4096, max_size=65536),
    "written": StorageSettings(segment_size=2048, max_size=65536),
    "loose": StorageSettings(segment_size=2048),
}
SPARE = b"after the crash"


class Run:
    """What a recording says of its streams: which message has which number."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.keys = Keys(recording.disk / "data", recording.key)
        self._epochs: dict[str, int] = {}  # of segments
        self.written: dict[int, dict[int, tuple[bytes, bytes]]] = {}  # by salt and number
        self.old: dict[str, tuple[int, set[int]]] = {}  # salt and numbers of an earlier version's streams
        self.number: dict[tuple[str, bytes], list[tuple[int, int]]] = {}  # (stream, payload): salt and number
        self.drops: dict[str, list[tuple[int, Drop]]] = {}  # by stream, since which line
        salts: dict[str, int] = {}
        before = [
            Call(-1, -1, "write", str(path), data=path.read_bytes())
            for path in sorted(recording.initial.rglob("*"))
            if path.is_file() and not path.is_symlink()
        ]
        for call in [*before, *recording.calls]:
            if call.name == "write" and ".seg" in call.path:
                self._segment(call, salts)
            elif call.name == "write" and Path(call.path).name.startswith(drops.NAME):
                found, _ = drops.examine(call.data)
                self.drops.setdefault(_stream(call.path), []).extend((call.begin, drop) for drop in found)

    def keys_in(self, data: Path) -> Keys:
        """The keys of a state."""
        return Keys(data, self.recording.key)

    def _segment(self, call: Call, salts: dict[str, int]) -> None:
        stream, data = _stream(call.path), call.data
        if call.begin < 0 and (header := segment.decode_header(formats.present_header(data))) is not None:
            data = formats.upgraded(data, header[2])  # as it is if it has the present format
        place = call.path.rpartition("/streams/")[2]
        if (header := segment.decode_header(data)) is not None:
            salts[place], self._epochs[place] = header[2], header[1]
            data = data[segment.HEADER.size :]
        salt = salts[place]
        for one in segment.scan(data, 0, salt):
            for message in segment.messages(*self._opened(call.path, place, data, one)):
                self.written.setdefault(salt, {})[message.sequence_number] = message.topic, message.payload
                self.number.setdefault((stream, message.payload), []).append((salt, message.sequence_number))
                if call.begin < 0:
                    self.old.setdefault(stream, (salt, set()))[1].add(message.sequence_number)

    def _opened(self, path: str, place: str, data: bytes, frame: Frame) -> tuple[bytes, Frame]:
        """A frame as it was before it was encrypted."""
        if not frame.columns & segment.SEALED:
            return data, frame
        base = layout.base_of(Path(path).name.removesuffix(layout.TEMPORARY)) or 0
        opened = Sealing(self.keys, Path(path).parent.name).opener(self._epochs[place], base)(data, frame)
        assert opened is not None
        return opened


def _stream(path: str) -> str:
    return Path(path).parent.name.removeprefix(".new-")


class Promised:
    """What was promised up to some call. `flushed` streams are synced before they acknowledge."""

    def __init__(self, run: Run, model: str) -> None:
        self.run, self.model = run, model
        self.streams: set[str] = set()  # that must be there
        self.required: dict[int, set[int]] = {}  # numbers that must be there, by salt
        self.gone: dict[int, set[int]] = {}  # numbers that must not
        self.deleted: set[int] = set()  # salts of streams that are gone for good
        self.dropping: dict[str, set[int]] = {}  # numbers that were dropped on purpose, by stream
        self.batches: dict[str, list[tuple[int, int]]] = {}  # that were sent, by stream
        self.accepted: dict[str, set[int]] = {}
        self.subscribed = False
        self.waiting: set[bytes] = set()  # messages for the subscriber who is away
        self.taken = False  # it may have taken some
        self.kept = -1  # the index of the retained message that is there at the least
        self.exact: dict[int, tuple[Sent, bool]] = {}  # under way at QoS 2: by id, and whether received
        self.used: list[int] = []  # ids whose messages are complete
        self._unsettled: list[tuple[str, Sent]] = []
        self._pings: dict[int, int] = {}
        self._buffers: dict[int, bytes] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._drops = [(line, name, drop) for name, found in run.drops.items() for line, drop in found]
        self._drops.sort(key=lambda one: one[0])
        self._salts: dict[str, int] = {}
        self._closing: set[str] = set()
        for name, (salt, numbers) in run.old.items():
            self.streams.add(name)
            self._salts[name] = salt
            self.required[salt] = set(numbers)
        if (before := run.recording.before) is not None:
            self.subscribed, self.waiting, self.kept = True, set(before.waiting), before.kept
            self.exact = {packet_id: (sent, True) for packet_id, sent in before.exact.items()}

    def apply(self, call: Call) -> None:
        """Take note of a call that begins."""
        while self._drops and self._drops[0][0] <= call.begin:
            _, name, drop = self._drops.pop(0)
            self.dropping.setdefault(name, set()).update(range(drop.first, drop.last + 1))
        if call.name == "send":
            for head, packet_id in self._packets(call):
                self._acknowledged(call.peer, head, packet_id)
        elif call.name == "write" and call.path.startswith(str(self.run.recording.told)):
            name = call.path.rsplit("-", 1)[1]
            for line in call.data.decode().splitlines():
                what, first, last = line.split()
                if what == "sent":
                    self.batches.setdefault(name, []).append((int(first), int(last)))
                else:
                    self.accepted.setdefault(name, set()).update(range(int(first), int(last) + 1))
        elif call.name == "write" and call.path.endswith(".seg"):
            header = segment.decode_header(call.data)
            if header is not None:
                self._salts[_stream(call.path)] = header[2]

    def _packets(self, call: Call) -> Iterator[tuple[int, int]]:
        """The acknowledgements in what is sent to a client."""
        data = self._buffers.pop(call.peer, b"") + call.data
        while len(data) >= 2:
            length, at = data[1] & 127, 2
            while data[at - 1] & 128 and at < len(data):
                length, at = length | (data[at] & 127) << 7 * (at - 1), at + 1
            if len(data) < at + length:
                break
            if data[0] in (0x40, 0x50, 0x70):
                yield data[0], int.from_bytes(data[at : at + 2], "big")
            data = data[at + length :]
        self._buffers[call.peer] = data

    def _acknowledged(self, peer: int, head: int, packet_id: int) -> None:
        key = peer, packet_id
        known = self.run.recording.sent.get(key)
        if known is None:
            return
        number = self._seen.get(key, 0)
        if head == 0x70:
            self.exact.pop(packet_id, None)
            self.used.append(packet_id)
            return
        if number >= len(known):
            return
        self._seen[key] = number + 1
        sent = known[number]
        if sent.qos == 2:
            self.exact[packet_id] = sent, True
        if sent.topic.startswith("mark/"):
            self._marked(sent.topic.removeprefix("mark/"))
            return
        name = sent.topic.split("/")[0]
        if name in ("plain", "kept"):
            if self.model == KILLED:
                self._settled(name, sent)
            else:
                self._unsettled.append((name, sent))
        elif (
            name == "made"
            or DECLARED.get(name, StorageSettings(flush=name != "over")).flush
            or self.model == KILLED
        ):
            self._stored(name, sent)
            self.streams |= {name} - self._closing
        else:
            self._unsettled.append((name, sent))

    def _stored(self, name: str, sent: Sent) -> None:
        for salt, number in self.run.number[name, sent.payload][-1:]:
            self.required.setdefault(salt, set()).add(number)

    def _settled(self, name: str, sent: Sent) -> None:
        if name == "plain":
            self.waiting.add(sent.payload)
        elif name == "kept":
            self.kept = int(sent.payload.split(b"-")[1])
        else:
            self._stored(name, sent)
            self.streams.add(name)

    def _marked(self, mark: str) -> None:
        what, *rest = mark.split(":")
        name = rest[0] if rest else ""
        match what:
            case "begins":
                peer, packet_id = int(rest[0]), int(rest[1])
                sent = self.run.recording.sent[peer, packet_id][self._seen.get((peer, packet_id), 0)]
                self.exact[packet_id] = sent, False
                self.used = [one for one in self.used if one != packet_id]
            case "quiet":
                for one, sent in self._unsettled:
                    self._settled(one, sent)
                self._unsettled = []
                self.subscribed = self.subscribed or self._was_subscribed
            case "subscribed":
                self._was_subscribed = True
                self.subscribed = self.model == KILLED
            case "taking":
                self._unsettled = [(one, sent) for one, sent in self._unsettled if one != "plain"]
                self.waiting = set()
            case "purging":
                self.dropping.setdefault(name, set()).update(range(int(rest[1])))
            case "purged":
                self.gone.setdefault(self._salts[name], set()).update(range(int(rest[1])))
            case "created":
                self.streams.add(name)
                self._closing.discard(name)
            case "deleting":
                self.streams.discard(name)
                self._closing.add(name)
                self.required.pop(self._salts[name], None)
            case "deleted":
                self.deleted.add(self._salts[name])
            case _:
                raise ValueError(mark)

    _was_subscribed = False

    def under_way(self) -> tuple[tuple[int, bytes, bool], ...]:
        """The QoS 2 messages that a client has to go on with."""
        return tuple(sorted((n, sent.payload, done) for n, (sent, done) in self.exact.items()))


class FoundStream(NamedTuple):
    """A stream after a start."""

    salt: int
    next: int
    present: frozenset[int]
    drops: tuple[Drop, ...]


class Found(NamedTuple):
    """What starts on a state have found."""

    problems: tuple[str, ...]  # that no promise can excuse
    streams: dict[str, FoundStream]
    cursors: dict[str, tuple[Cursor | None, tuple[tuple[int, int, str], ...]]]
    received: tuple[bytes, ...] | None = None  # by the subscriber; None: it has no session
    fresh: bool = False  # whether it gets new messages
    kept: bytes = b""
    exact: tuple[bytes, ...] = ()  # what the stream of the QoS 2 client has in the end


@cache
def _plugins() -> discovery.Registry:
    return discovery.load([])


def _system(model: str) -> Shifted:
    return Shifted(None if model == KILLED else NEW_BOOT)


async def start(state: State, root: Path, run: Run, model: str) -> Found:
    """Start on a state, twice, in an empty directory that is removed again."""
    problems: list[str] = []
    write(state, root)
    data = root / "data"
    try:
        if (data / "streams").is_dir():
            with _noted(problems, "verify"), contextlib.suppress(OtherFormat):  # it says to start the service
                verify(data, keys=run.keys_in(data))
        cursors = dict(_cursors(data))
        first: dict[str, FoundStream] = {}
        with _noted(problems, "the first start"):
            first = await _open(data, root / "memory", run, model, problems)
        second: dict[str, FoundStream] = {}
        with _noted(problems, "the second start"):
            second = await _again(data, root / "memory", run, model, problems)
        for name, stream in first.items():
            after = second.get(name)
            if after is None:
                problems.append(f"{name}: gone at the second start")
            elif (after.salt, after.next) != (stream.salt, stream.next + 1):
                problems.append(f"{name}: next is {after.next} at the second start, after {stream.next} + 1")
            elif not stream.present | {stream.next} <= after.present and not _is_limited(name):
                problems.append(f"{name}: lost by the second start: {stream.present - after.present}")
        with _noted(problems, "verify at the end"):
            for checked in verify(data, keys=run.keys_in(data)):
                problems += [
                    f"verify: {checked.name}: {Path(one.path).name}: {one.what}" for one in damage(checked)
                ]
        return Found(tuple(problems), first, cursors)
    finally:
        shutil.rmtree(root)


def _is_limited(name: str) -> bool:
    return name in ("limited", "over")


@contextlib.contextmanager
def _noted(problems: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        problems.append(f"{what}: {error!r}")


def _cursors(data: Path) -> Iterator[tuple[str, tuple[Cursor | None, tuple[tuple[int, int, str], ...]]]]:
    for path in sorted(data.glob("exports/*/*.cursor")):
        found: Cursor | None = None
        with contextlib.suppress(CorruptData):
            found = CursorFile.read(path)
        yield path.parent.name, (found, tuple(Skipped(path.with_suffix(".skipped")).ranges))


def _opened(data: Path, memory: Path, run: Run, model: str, events: list[str]) -> StreamStore:
    system = _system(model)
    return StreamStore(
        data,
        memory,
        on_event=lambda stream, what: events.append(f"{stream}: {what}"),
        floor=lambda name, epoch: highest_exported(data, name, epoch, system.boot) + 1,
        system=system,
        keys=run.keys_in(data),
    )


def _look(stream: Stream, problems: list[str]) -> FoundStream:
    messages = everything(stream)
    numbers = [message.sequence_number for message in messages]
    present = frozenset(numbers)
    if numbers != sorted(present):
        problems.append(f"{stream.name}: numbers come twice or out of order: {numbers}")
    missing = {n for n in range(stream.next_sequence) if n not in present}
    missing -= {n for drop in stream.drops.ranges for n in range(drop.first, drop.last + 1)}
    if missing:
        problems.append(f"{stream.name}: missing, and no drop is recorded: {sorted(missing)[:20]}")
    return FoundStream(stream.meta.salt, stream.next_sequence, present, tuple(stream.drops.ranges))


async def _open(
    data: Path, memory: Path, run: Run, model: str, problems: list[str]
) -> dict[str, FoundStream]:
    found: dict[str, FoundStream] = {}
    store = _opened(data, memory, run, model, [])
    try:
        for name, stream in store.streams.items():
            found[name] = _look(stream, problems)
            written = run.written.get(stream.meta.salt, {})
            problems += [
                f"{name}: number {one.sequence_number} is {one.payload[:40]!r}, never written as that"
                for one in everything(stream)
                if written.get(one.sequence_number) != (one.topic, one.payload)
            ]
        for name, unopened in store.unopened.items():
            problems.append(f"{name}: not opened: {unopened.why}")
        for name, settings in DECLARED.items():
            if name not in store.streams and name not in store.unopened:
                store.create(name, settings, b"{}")
                found[name] = _look(store.streams[name], problems)
        for stream in store.streams.values():
            if (number := stream.append(b"t", SPARE)) != found[stream.name].next:
                problems.append(f"{stream.name}: the next message is {number}")
            await committed(stream)
    finally:
        await store.close()
    return found


async def _again(
    data: Path, memory: Path, run: Run, model: str, problems: list[str]
) -> dict[str, FoundStream]:
    events: list[str] = []
    store = _opened(data, memory, run, model, events)
    try:
        problems += [f"reported at the second start: {event}" for event in events]
        return {name: _look(stream, problems) for name, stream in store.streams.items()}
    finally:
        await store.close()


# -- sessions ------------------------------------------------------------------------------------
async def converse(state: State, root: Path, promised: Promised) -> Found:
    """Start the broker on a state, and have the clients go on where they were."""
    problems: list[str] = []
    write(state, root)
    received: tuple[bytes, ...] | None = None
    fresh, kept, exact = False, b"", ()
    try:
        with _noted(problems, "the broker"):
            config = MqttConfig(listen=["tcp://127.0.0.1:0"])
            bridge = Bridge(root, config, system=_system(promised.model), registry=_plugins())
            await bridge.start()
            try:
                if "synced" not in bridge.store.streams:
                    bridge.stream("synced", "synced/#", flush_on_write=True)
                away = await bridge.open()
                away.send(b"\x10\x10\0\4MQTT\4\0\0\0\0\4away")
                if (await away.receive()).body[0]:
                    got = await _drained(away)
                    sender = await bridge.connect("sender")
                    await sender.exchange(publish("plain/a", SPARE, 1, 1))
                    fresh = (new := await _drained(away)) == [SPARE]
                    received = tuple(got)
                    problems += [f"delivered twice, or made up: {one!r}" for one in new[1:]]
                looking = await bridge.connect("looking")
                await looking.subscribe(("kept/#", 0))
                if retained := await _drained(looking):
                    kept = retained[0]
                await _go_on(bridge, promised)
                exact = tuple(message.payload for message in everything(bridge.store.streams["synced"]))
                for client in (away, looking):
                    client.disconnect()
            finally:
                await bridge.stop()
        return Found(tuple(problems), {}, {}, received, fresh, kept, exact)
    finally:
        shutil.rmtree(root)


async def _drained(client: Client) -> list[bytes]:
    """All that comes before the answer to a ping."""
    found = []
    client.send(b"\xc0\0")
    while (packet := await client.receive()).head != 0xD0:
        message = client.parse(*packet)
        found.append(message.payload)
        if message.qos:
            client.send(ack(0x40, message.packet_id))
    return found


# -- a whole service -----------------------------------------------------------------------------
def serve(state: State, root: Path, run: Run) -> list[str]:
    """Run the service itself on a state, store a message and stop it; what went wrong."""
    write(state, root)
    log = root / "log"
    try:
        config = root / "bridge.toml"
        config.write_text(CONFIG.format(root=root))
        if (key := run.recording.key) is not None:
            config.write_text(
                f'{CONFIG.format(root=root)}encryption = true\n[encryption]\nkey_file = "{key}"\n'
            )
        with log.open("w") as said:
            process = subprocess.Popen([*COMMAND, "run", "-c", str(config)], env=environment(), stderr=said)
            try:
                while not (ready := re.search(r"msg=ready .*mqtt://\S+:(\d+)", log.read_text())):
                    if process.poll() is not None:
                        return [f"the service does not start: {log.read_text()[-500:]}"]
                    time.sleep(0.02)
                with socket.create_connection(("127.0.0.1", int(ready[1])), timeout=30) as client:
                    client.sendall(connect("after") + publish("synced/a", SPARE, 1, 1))
                    answer = b""
                    while len(answer) < 8 and (part := client.recv(8)):
                        answer += part
                if answer != b"\x20\2\0\0\x40\2\0\1":
                    return [f"the service does not acknowledge: {answer!r}"]
                process.send_signal(signal.SIGTERM)
                if process.wait(60):
                    return [f"the service ends with {process.returncode}: {log.read_text()[-500:]}"]
            finally:
                process.kill()
                process.wait()
        return [
            f"verify: {one.path}: {one.what}"
            for stream in verify(root / "data", keys=run.keys_in(root / "data"))
            for one in damage(stream)
        ]
    finally:
        shutil.rmtree(root)


def damage(checked: Checked) -> list[Problem]:
    """What `verify` finds, but for indexes: hints, not synced, and made anew when they are used."""
    return [problem for problem in checked.problems if not problem.path.endswith(layout.INDEX)]


CONFIG = """
[gateway]
id = "checked"
data_dir = "{root}/data"
memory_dir = "{root}/memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[streams.synced]
topics = ["synced/#"]
flush_on_write = true
segment_size = 4096
max_size = 65536
"""


async def _go_on(bridge: Bridge, promised: Promised) -> None:
    """The QoS 2 client takes up its messages, and sends new ones under ids that it had used."""
    client = await bridge.connect("exact", clean=False)
    for packet_id, (sent, received) in sorted(promised.exact.items()):
        if not received:
            await client.exchange(publish(sent.topic, sent.payload, 2, packet_id, dup=True))
        await client.exchange(ack(0x62, packet_id))
    for packet_id in sorted(set(promised.used)):
        await client.exchange(publish("synced/q", b"new-%d" % packet_id, 2, packet_id))
        await client.exchange(ack(0x62, packet_id))
    client.disconnect()


# -- judgement -----------------------------------------------------------------------------------
def judge(found: Found, promised: Promised) -> list[str]:
    """What of a start breaks what was promised; nothing if all is well."""
    problems = list(found.problems)
    by_salt = {stream.salt: (name, stream) for name, stream in found.streams.items()}
    problems += [f"{name}: the stream is gone" for name in sorted(promised.streams - found.streams.keys())]
    for salt, numbers in promised.required.items():
        if salt not in by_salt:
            problems.append(f"a stream with {len(numbers)} acknowledged messages is gone")
            continue
        name, stream = by_salt[salt]
        lost = numbers - stream.present - promised.dropping.get(name, set()) - _by_limits(name, stream)
        if lost:
            problems.append(f"{name}: acknowledged, and not there: {sorted(lost)[:20]}")
        damaged = {
            n for drop in stream.drops if drop.reason in LOSSES for n in range(drop.first, drop.last + 1)
        }
        if wrong := damaged & numbers:
            problems.append(f"{name}: acknowledged, and recorded as lost: {sorted(wrong)[:20]}")
    for salt, numbers in promised.gone.items():
        if salt in by_salt and (back := numbers & by_salt[salt][1].present):
            problems.append(f"{by_salt[salt][0]}: purged, and back: {sorted(back)[:20]}")
    problems += [f"{by_salt[salt][0]}: deleted, and back" for salt in promised.deleted & by_salt.keys()]
    for name, batches in promised.batches.items():
        problems += _of_export(name, batches, promised, found)
    return problems


def _by_limits(name: str, stream: FoundStream) -> set[int]:
    """What a limit lets the start itself drop."""
    reason = {"limited": DropReason.LIMITS, "over": DropReason.OVERWRITTEN}.get(name)
    dropped = {n for drop in stream.drops if drop.reason == reason for n in range(drop.first, drop.last + 1)}
    return {n for n in dropped if n < stream.next - LIMIT} if name == "limited" else dropped


def _of_export(name: str, batches: list[tuple[int, int]], promised: Promised, found: Found) -> Iterator[str]:
    cursor, skipped = found.cursors.get(name, (None, ()))
    if cursor is None:
        yield f"{name}: the cursor is lost, and {batches[-1]} was sent"
        return
    passed = {n for first, last, _ in skipped for n in range(first, last + 1)}
    accepted = promised.accepted.get(name, set())
    ahead = [n for n in range(cursor.position) if n not in accepted and n not in passed]
    if ahead:
        yield f"{name}: the cursor is at {cursor.position}, and not accepted nor skipped: {ahead[:20]}"
    # A power cut may take what was not synced of the position of an export by record.
    by_record = name == "loose" and promised.model != KILLED
    for first, last in batches if not by_record else ():
        if cursor.planned != (first, last) and cursor.position <= last:
            yield f"{name}: {first} to {last} was sent, the cursor has {cursor.position}, {cursor.planned}"
        if cursor.reached < last:
            yield f"{name}: {last} was sent, and the cursor says {cursor.reached}"
    stream = found.streams.get(name)
    if stream is not None and stream.next <= max(last for _, last in batches):
        yield f"{name}: a number that was sent would be given again: {stream.next}"


def judge_sessions(found: Found, promised: Promised) -> list[str]:
    """The same for what the clients met."""
    problems = list(found.problems)
    recording = promised.run.recording
    published = {sent.payload for known in recording.sent.values() for sent in known} | {SPARE}
    published |= recording.before.waiting if recording.before is not None else set()
    if promised.subscribed and (found.received is None or not found.fresh):
        problems.append(f"the subscription is gone: {found.received}, {found.fresh}")
    if found.received is not None:
        if promised.subscribed and (lost := promised.waiting - set(found.received)):
            problems.append(f"waited for the subscriber, and is gone: {sorted(lost)}")
        if made_up := set(found.received) - published:
            problems.append(f"delivered, and never published: {made_up}")
    if promised.kept >= 0 and (not found.kept or int(found.kept.split(b"-")[1]) < promised.kept):
        problems.append(f"retained: {found.kept!r}, older than number {promised.kept}")
    must = [sent.payload for sent, _ in promised.exact.values() if sent.topic.startswith("synced/")]
    must += [b"new-%d" % packet_id for packet_id in set(promised.used)]
    for payload in must:
        number = found.exact.count(payload)
        if not number or (promised.model == KILLED and number > 1):
            problems.append(f"QoS 2: {payload!r} is stored {number} times")
    return problems
