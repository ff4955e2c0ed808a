"""A gateway without front ends: the real store, the real supervisor, a real worker process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import subprocess
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from bridge import Context, objectkeys
from bridge.clock import System
from bridge.encryption import Keys
from bridge.export.settings import ExportSettings
from bridge.export.supervisor import ExportSupervisor, highest_exported
from bridge.export.wire import Tuning
from bridge.operations.manager import StreamManager
from bridge.plugin import discovery
from bridge.plugin.allow import Allow
from bridge.plugin.aws import AwsSettings
from bridge.streams.store import StreamStore

FAST = Tuning(beat=0.1, silence=20.0, first_backoff=0.4, max_backoff=3.0, drain=2.0)


class Gateway:
    """One running gateway of a test."""

    def __init__(
        self, root: Path, store: StreamStore, exports: ExportSupervisor, manager: StreamManager
    ) -> None:
        self.root, self.store, self.exports, self.manager = root, store, exports, manager
        self.refused: set[str] = set()  # streams whose appends by exporters are refused

    def create(self, name: str, exports: dict[str, list[dict[str, Any]]], **more: Any) -> None:
        self.manager.create({"name": name, "strategyOnFull": 0, "exportDefinition": exports, **more})

    def update(self, name: str, exports: dict[str, list[dict[str, Any]]], **more: Any) -> None:
        self.manager.update({"name": name, "strategyOnFull": 0, "exportDefinition": exports, **more})

    async def append(self, name: str, *payloads: bytes) -> None:
        await self.manager.append_all(name, list(payloads))

    async def append_status(self, name: str, payload: bytes) -> None:
        if name in self.refused:
            raise OSError(f"{name} is full")
        await self.manager.keep(name, payload)

    def heal(self, name: str) -> None:
        """Set damage aside, as the service does when an export has met it."""
        stream = self.store.streams[name]
        for base in list(stream.log.sizes):
            stream.repair(base)

    def flip(self, name: str, payload: bytes) -> None:
        """Flip a bit of a stored message."""
        (path,) = self.store.streams[name].directory.glob("*.seg")
        data = bytearray(path.read_bytes())
        data[data.index(payload)] ^= 1
        path.write_bytes(data)

    def read(self, name: str) -> list[bytes]:
        stream = self.store.streams[name]
        with closing(stream.reader()) as reader:
            rows = reader.read(0, end=stream.next_sequence, max_messages=10**6, max_bytes=2**40)
        return [row.payload for row in rows]

    def status(self, name: str, number: int = 0) -> Any:
        return self.exports.statuses(name)[number]

    async def exported(self, name: str, upto: int, within: float = 60.0) -> None:
        """Wait until all exports of a stream have passed number `upto`."""
        await until(
            lambda: all(s.last_exported_sequence_number >= upto for s in self.exports.statuses(name)),
            within,
            lambda: f"exported {name}: {self.exports.statuses(name)}",
        )


async def until(
    condition: Callable[[], Any], within: float = 60.0, describe: Callable[[], str] = str
) -> None:
    """Wait for a condition; fail with a description."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not in {within} s: {describe()}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    root: Path,
    *,
    tuning: Tuning = FAST,
    system: System | None = None,
    key_file: Path | None = None,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """A gateway on the data directory `root/data`, with drop-in plugins from `root/plugins`.

    `system` has other clocks than the machine; the worker uses the machine's. With a `key_file`, streams may
    be encrypted.
    """
    settings.setdefault("allow", Allow(directories=[root]))
    data_dir, drop_in = root / "data", root / "plugins"
    drop_in.mkdir(exist_ok=True, mode=0o755)
    gateway: Gateway
    export, keys = ExportSettings(plugin_dirs=[str(drop_in)], **settings), Keys(data_dir, key_file)
    store = StreamStore(
        data_dir,
        root / "memory",
        on_event=lambda stream, what: None,
        floor=lambda name, epoch: highest_exported(data_dir, name, epoch) + 1,
        system=system,
        keys=keys,
    )
    exports = ExportSupervisor(
        data_dir,
        gateway="gw-1",
        export=export,
        aws=AwsSettings(),
        append_status=lambda name, payload: gateway.append_status(name, payload),
        clock=store.clock,
        damaged=lambda name, what: gateway.heal(name),
        tuning=tuning,
        keys=keys,
    )
    gateway = Gateway(root, store, exports, StreamManager(store, discovery.load([drop_in]), exports))
    try:
        await exports.start()
        yield gateway
    finally:
        await exports.stop(5)
        await store.close()


def drop_in(root: Path, name: str, source: str) -> None:
    """Put a plugin file in place."""
    directory = root / "plugins"
    directory.mkdir(exist_ok=True, mode=0o755)
    path = directory / f"{name}.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    path.chmod(0o644)


# An exporter that appends its records to a file, after an optional fault.
RECORDER = '''
    import json, os, threading, time
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str
        fault: str = ""          # what to do instead of exporting ...
        once: str = ""           # ... as long as this file does not exist

    class Recorder(Exporter):
        kind = "recorder"
        Config = Config
        any_order = True
        def export(self, batch):
            config = self.config
            if config.fault and not (config.once and os.path.exists(config.once)):
                with open(config.path + ".attempts", "a") as out:
                    print(batch.first, batch.last, file=out)
                if config.once:
                    open(config.once, "w").close()
                outcome = globals()[config.fault](batch, config)
                if outcome is not None:
                    return outcome
            numbers = [record.sequence_number for record in batch.records]
            with open(config.path, "a") as out:
                out.write(json.dumps([batch.first, batch.last, numbers, time.time()]) + chr(10))
            return ACCEPTED

    class Whole(Recorder):
        kind = "whole"
        limits = BatchLimits(contiguous=True)

    def segfault(batch, config):
        import ctypes
        ctypes.string_at(0)

    def ask_for(after):
        raise Retry("busy", after=after)

    def retry_never(batch, config):
        ask_for(float("inf"))

    def retry_in_ages(batch, config):
        ask_for(10 ** 400)

    def retry_at_no_time(batch, config):
        ask_for(float("nan"))

    def retry_in_words(batch, config):
        ask_for("30")

    def retry_one_never(batch, config):
        return Outcome(retry=[0], error="busy", after=float("inf"))

    def retry_without_init(batch, config):
        class Bare(Retry):
            def __init__(self):
                pass
        raise Bare

    def leave(batch, config):
        os._exit(9)

    def until_released(batch, config):
        """Occupy the thread until there is a file for it."""
        while not os.path.exists(config.path + ".release"):
            time.sleep(0.01)

    def hang(batch, config):
        threading.Event().wait()

    def hold(batch, config):
        """Hold the interpreter itself: nothing else in the process can run."""
        import re
        re.match("(a*)*b", "a" * 100)

    def blow(batch, config):
        raise ZeroDivisionError("division by zero")

    def babble(batch, config):
        raise RuntimeError(chr(0xdcff) + " is no letter" + chr(0x20ac) * 3000)

    def wait(batch, config):
        raise Retry("the link is down")

    def retry_too_far(batch, config):
        return Outcome(retry=[2], error="busy")

    def reject_all(batch, config):
        return Outcome(rejected={n: "never" for n in range(len(batch.records))})

    def reject_from_the_end(batch, config):
        return Outcome(rejected={-1: "too large"})

    def reject_by_number(batch, config):
        return Outcome(rejected={batch.records[0].sequence_number: "too large"})

    def reject_without_a_reason(batch, config):
        return Outcome(rejected={0: ""})

    def reject_in_a_list(batch, config):
        return Outcome(rejected=[0])

    def retry_a_record(batch, config):
        return Outcome(retry=batch.records, error="busy")

    def say_yes(batch, config):
        return True

    kept = []

    def leak(batch, config):
        kept.append(bytearray(os.urandom(1)) * (100 << 20))
        threading.Event().wait()

    @hookimpl
    def register_exporters(register):
        register(Recorder)
        register(Whole)
'''


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """A data root with the recording exporter dropped in."""
    drop_in(tmp_path, "recorder", RECORDER)
    return tmp_path


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A key and a self-signed certificate for 127.0.0.1."""
    key, cert = directory / f"{name}.key", directory / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


def attempted(path: Path) -> bool:
    """Whether a recorder has noted an attempt in this file."""
    return path.exists() and path.stat().st_size > 0


def recorded(path: Path) -> list[list[Any]]:
    """The batches that a recorder wrote: [first, last, numbers, time]."""
    with suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return []


def numbers(path: Path) -> list[int]:
    """All sequence numbers that a recorder wrote, in order."""
    return [number for batch in recorded(path) for number in batch[2]]


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of a moto server."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for the fakes; nothing of this machine's own is read."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)


class Impatient(Context):
    """A context whose AWS clients give up after `patience` seconds without an answer."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self._patience = patience

    def client(self, service: str, config: Any, **options: Any) -> Any:
        timeouts = {"connect_timeout": self._patience, "read_timeout": self._patience}
        return super().client(service, config, **timeouts, **options)


class Bucket:
    """A bucket of the moto server, read as the ingest job would."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.client = boto3.client("s3", endpoint_url=url)
        self.make()

    def make(self) -> None:
        where = {"LocationConstraint": "eu-central-1"}
        self.client.create_bucket(Bucket=self.name, CreateBucketConfiguration=where)

    def remove(self) -> None:
        for key in self.names():
            self.client.delete_object(Bucket=self.name, Key=key)
        self.client.delete_bucket(Bucket=self.name)

    def config(self, **more: Any) -> dict[str, Any]:
        base = {"identifier": "up", "bucket": self.name, "prefix": "raw", "endpointUrl": self.url}
        return {**base, "timeHintMillis": 50, "reportIntervalMillis": 20, **more}

    def names(self) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def body(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read())

    def data_keys(self) -> list[str]:
        return [key for key in self.names() if objectkeys.parse_key(key)]

    def arrivals(self) -> list[str]:
        """The data keys in the order of their uploads; S3 itself tells times in whole seconds."""
        stored = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[self.name].keys
        return sorted(self.data_keys(), key=lambda key: stored[key].last_modified)

    def rows(self, key: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in gzip.decompress(self.body(key)).splitlines()]

    def reported_exported(self) -> list[int]:
        """`exported` of each stream in the gateway report; empty before it exists."""
        there = "raw/" + objectkeys.report_key("gw-1") in self.names()
        return [stream["exported"] for stream in self.report()["streams"]] if there else []

    def report(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body("raw/" + objectkeys.report_key("gw-1")))
        return document


@pytest.fixture
def bucket(moto: str, request: pytest.FixtureRequest) -> Bucket:
    """A fresh bucket."""
    return Bucket(moto, f"test-{os.getpid()}-{abs(hash(request.node.nodeid)) % 10**9}")
