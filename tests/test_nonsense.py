"""Files whose checksums are right and whose content makes no sense: damage, never a traceback."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.client as paho
import pytest

from bridge.client import StreamManagerClient
from tests.http.conftest import Service, eventually

CONFIG = """
[streams.s]
topics = ["s/#"]
[[streams.s.export.http]]
identifier = "e"
endpoint_url = "http://127.0.0.1:1/"
[[streams.s.export.consumer]]
identifier = "c"
"""
MARK = "@@@@"  # where bytes that are no UTF-8 come
Change = Callable[[Any], Any]


def changed(value: Any, of: type, to: Any) -> Any:
    """A value in which everything of a type is replaced, except keys."""
    match value:
        case dict():
            return {key: changed(one, of, to) for key, one in value.items()}
        case list() | tuple():
            return [changed(one, of, to) for one in value]
    return to if type(value) is of else value


def nonsense(what: str, body: bytes, kept: int = 0) -> bytes:
    """A body of msgpack that decodes, or nearly so, to something else. So many first elements stay."""
    value = msgspec.msgpack.decode(body)
    first, rest = (value[:kept], value[kept:]) if kept else ([], value)

    def made(other: Any) -> bytes:
        return msgspec.msgpack.encode([*first, *other] if kept else other)

    match what:
        case "text":
            return made(changed(rest, str, MARK)).replace(MARK.encode(), b"\xff\xfe\xfd\xfc")
        case "negative":
            return made(changed(rest, int, -5))
        case "huge":
            return made(changed(rest, int, 2**64 - 1))
        case "bytes":
            return made(changed(rest, bytes, b"\xff"))
        case "shape":
            return made([[{"a": rest}]])
        case "deep":
            return b"\x91" * 3000 + b"\xc0"
    raise AssertionError(what)


def cursor(what: str, data: bytes) -> bytes:
    """Both slots: magic, generation u64, length u32, crc u32, body."""
    found = b""
    for start in (0, 4096):
        magic, generation, length = struct.unpack_from(">8sQI", data, start)
        body = nonsense(what, data[start + 24 : start + 24 + length])
        head = struct.pack(">8sQI", magic, generation, len(body))
        slot = head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "big") + body
        found += slot[:4096].ljust(4096, b"\0")
    return found + data[8192:]


def consumer(what: str, data: bytes) -> bytes:
    """Two halves: magic, generation u64, crc u32, then records: length u32, crc u32, body."""
    half, found = len(data) // 2, b""
    for start in (0, half):
        head = data[start : start + 16]
        seed = zlib.crc32(head)
        length = int.from_bytes(data[start + 20 : start + 24], "big")
        if not length:
            found += data[start : start + half]
            continue
        body = nonsense(what, data[start + 28 : start + 28 + length])
        size = len(body).to_bytes(4, "big")
        record = size + zlib.crc32(body, zlib.crc32(size, seed)).to_bytes(4, "big") + body
        found += (head + seed.to_bytes(4, "big") + record)[:half].ljust(half, b"\0")
    return found


def journal(what: str, data: bytes) -> bytes:
    """Frames: length u32, crc u32, body."""
    found, at = b"", 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        body = nonsense(what, data[at + 8 : at + 8 + length], kept=1)
        found += len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body
        at += 8 + length
    return found


def meta(what: str, data: bytes) -> bytes:
    """Magic, length u32, crc u32, body."""
    body = nonsense(what, data[16:])
    return data[:8] + struct.pack("<II", len(body), zlib.crc32(body)) + body


def anchor(what: str, data: bytes) -> bytes:
    """Magic, crc u32, body."""
    body = nonsense(what, data[12:])
    return data[:8] + struct.pack("<I", zlib.crc32(body)) + body


def drops(what: str, data: bytes) -> bytes:
    """The second record, after the random bytes: first, last, time u64, reason u8, crc u32."""
    first, last, reason = {"negative": (9, 2, 3), "huge": (0, 2**64 - 1, 3)}.get(what, (0, 0, 99))
    head = struct.pack("<QQQBxxx", first, last, 1, reason)
    return data[:32] + head + zlib.crc32(head).to_bytes(4, "little") + data[64:]


FILES: dict[str, Callable[[str, bytes], bytes]] = {
    "exports/*/*.cursor": cursor,
    "consumers/*/*.consumer": consumer,
    "mqtt/sessions.journal": journal,
    "clock": anchor,
    "streams/*/drops.log": drops,
    "streams/*/meta.[01]": meta,
}
KINDS = ("text", "negative", "huge", "bytes", "shape", "deep")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that has stopped, with a file of each kind."""
    service = Service(tmp_path_factory.mktemp("service"), CONFIG)
    try:
        service.publish(("s/a", b"1"), ("s/b", b"2"), ("s/a", b"3"))
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, "keeps", clean_session=False)
        client.will_set("s/will", b"gone", 1)
        client.connect("127.0.0.1", service.mqtt_port)
        client.loop_start()
        client.subscribe("plain/#", 1)
        client.publish("plain/kept", b"x", 1, retain=True).wait_for_publish(60)
        client.publish("s/two", b"x", 2).wait_for_publish(60)
        client.loop_stop()
        client.disconnect()
        service.publish(("plain/queued", b"y"))
        with StreamManagerClient(f"mqtt://127.0.0.1:{service.mqtt_port}") as operator:
            operator.fetch_messages("s", "c")
            operator.purge_message_stream("s", upto=1)
        eventually(lambda: list((service.directory / "data").glob("exports/*/*.cursor")))
        assert service.stop() == 0
        yield service
    finally:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()


@pytest.fixture
def again(stored: Service, tmp_path: Path) -> Iterator[Service]:
    """The same service with a copy of its data, which is not yet running."""
    shutil.copy2(stored.directory / "bridge.toml", tmp_path)
    shutil.copytree(stored.directory / "disk", tmp_path / "disk", symlinks=True)
    service = Service.__new__(Service)
    service.directory, service.log = tmp_path, tmp_path / "log"
    service.mount("disk")
    try:
        yield service
    finally:
        if hasattr(service, "process") and service.process.poll() is None:
            service.process.kill()
            service.process.wait()


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.parametrize("definitions", [False, True])
def test_a_start_takes_nonsense_with_a_good_checksum_for_damage(
    again: Service, definitions: bool, what: str
) -> None:
    """The definitions apart from all else, for a stream without one is not opened."""
    for pattern, make in FILES.items():
        if ("meta" in pattern) is definitions:
            paths = sorted(again.directory.glob(f"data/{pattern}"))
            assert paths, f"there is no {pattern}"
            for path in paths:
                path.write_bytes(make(what, path.read_bytes()))
    again.start()
    assert again.request("/status.json")[0] == 200
    if not definitions:
        again.publish(("s/after", b"x"))
        if what != "bytes":  # a cursor may have any
            eventually(lambda: again.logged("it has no valid cursor"))
    assert again.stop() == 0
    log = again.log.read_text()
    assert "Traceback" not in log, log
    assert "internal error" not in log, log
    if what == "text" and not definitions:
        for said in ("it has no valid position", "a record cannot be read", "data/clock is damaged"):
            assert said in log, log


@pytest.mark.parametrize("content", [b"", bytes(4096)])
def test_an_emptied_journal_of_sessions_is_said_at_the_start(again: Service, content: bytes) -> None:
    path = again.directory / "data" / "mqtt" / "sessions.journal"
    path.write_bytes(content)
    again.start()
    assert "sessions.journal: it is empty: the sessions" in again.log.read_text()
    assert again.stop() == 0
    again.start()
    assert again.stop() == 0
    assert "it is empty" not in again.log.read_text(), "nor is one that has never had a session"
