"""The product, as the simulation starts it, and stand-ins for what its exporters talk to.

`boundary.install` comes before the import of this module.
"""

from __future__ import annotations

import base64
import gc
import json
import random as randomness
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import botocore.exceptions

import bridge.clock
import bridge.plugin.aws
from bridge.config import settings
from bridge.control.server import ControlFrontEnd
from bridge.plugin import discovery
from bridge.service.service import Service

from . import boundary
from . import kernel as kernels
from .boundary import MACHINE
from .clients import POISON, PUBLISH, Client, Packet, _text
from .kernel import Kernel

if TYPE_CHECKING:
    from .world import World

import bridge.export.host
import bridge.export.wire
import bridge.export.worker

REGISTRY = discovery.load([])
discovery.load = lambda directories=(): REGISTRY  # type: ignore[assignment]


class System:
    """The machine's clocks (`bridge.clock.System`)."""

    def __init__(self) -> None:
        self.boot = MACHINE.boot

    def wall(self) -> int:
        return boundary.wall_ns()

    def boottime(self) -> int:
        return int(kernels.kernel().now * 1e9)

    def synchronised(self) -> bool:
        return MACHINE.synchronised


async def _no_socket(self: ControlFrontEnd) -> list[str]:
    return []


bridge.export.host.memory_used = bridge.export.worker.memory_used = lambda: 50 << 20
bridge.clock.System = System  # type: ignore[misc]
ControlFrontEnd.start = _no_socket  # type: ignore[method-assign]
bridge.export.wire.Tuning = partial(  # type: ignore[misc]
    bridge.export.wire.Tuning, behind=0.3
)  # the outages of a world are short
bridge.plugin.aws.client = lambda *args, **more: MACHINE.client(*args, **more)


def _load(path: Path, exporters: Any = None) -> Any:
    """Read a configuration, once for each text: a third of a start is spent on it."""
    text = path.read_bytes()
    if text not in _CONFIGS:
        if len(_CONFIGS) > 50:
            _CONFIGS.clear()
        _CONFIGS[text] = _really_load(path, lambda: REGISTRY.exporters)
    return _CONFIGS[text]


_CONFIGS: dict[bytes, Any] = {}
_really_load = settings.load
settings.load = _load


def service(config: Path) -> Service:
    """A service with the configuration of a file."""
    return Service(settings.load(config))


def _modules() -> list[Any]:
    plugins = {cls.__module__ for cls in REGISTRY.exporters.values()}
    return [
        module
        for name, module in list(sys.modules.items())
        if (name.startswith("bridge.") and ".ingest" not in name) or name in plugins
    ]


def _state() -> list[tuple[Any, str, Any]]:
    """What code may have left in modules: a new process has nothing of it."""
    found = []
    for module in _modules():
        for name, value in vars(module).items():
            if name.startswith("__"):
                continue
            if isinstance(value, dict | list | set):
                found.append((module, name, value.copy()))
            elif value is None:
                found.append((module, name, None))
    return found


_FRESH = _state()


def reset() -> None:
    """Make the modules those of a new process."""
    for module, name, value in _FRESH:
        now = getattr(module, name)
        if isinstance(value, dict):
            now.clear()
            now.update(value)
        elif isinstance(value, list):
            now[:] = value
        elif isinstance(value, set):
            now.clear()
            now |= value
        else:
            setattr(module, name, value)
    randomness.seed(0)
    gc.collect(1)


class Slow:
    """A client of AWS whose requests take time: others run meanwhile, and its process may be killed."""

    def __init__(self, kernel: Kernel, random: Random, real: Any, bucket: Any) -> None:
        self._kernel, self._random, self._real, self._bucket = kernel, random, real, bucket

    def __getattr__(self, name: str) -> Callable[..., Any]:
        do = getattr(self._real, name)

        def call(**options: Any) -> Any:
            kernel = self._kernel
            kernel.call("request", self._random.random() * 0.03)
            if kernel.process is not None:
                kernel.check_alive()
            process, thread = kernel.process, kernel.thread
            kernel.process = kernel.thread = None  # it happens elsewhere
            try:
                return do(**options)
            finally:
                kernel.process, kernel.thread = process, thread
                kernel.call("answer", self._random.random() * 0.03)

        return call


class Kinesis:
    """A stream of Kinesis. A record with `POISON` in it can never be accepted, nor any request with it."""

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random = world, random
        self.down, self.faults = False, 0.0
        self.records: list[bytes] = []

    def describe_stream_summary(self, **_: Any) -> dict[str, Any]:
        return {"StreamDescriptionSummary": {"OpenShardCount": 1000}}

    def put_records(self, StreamName: str, Records: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803
        if self.down or self.random.random() < self.faults:
            raise botocore.exceptions.EndpointConnectionError(endpoint_url="https://kinesis.invalid")
        if any(POISON in record["Data"] for record in Records):
            error: Any = {"Error": {"Code": "ValidationException", "Message": "poison"}}
            raise botocore.exceptions.ClientError(
                error | {"ResponseMetadata": {"HTTPStatusCode": 400}}, "PutRecords"
            )
        answer, failed = [], 0
        for record in Records:
            if self.random.random() < self.faults * 2:
                failed += 1
                answer.append(
                    {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "slower"}
                )
            else:
                self.records.append(record["Data"])
                answer.append({"SequenceNumber": str(len(self.records)), "ShardId": "0"})
        if self.random.random() < self.faults:
            raise botocore.exceptions.ReadTimeoutError(endpoint_url="https://kinesis.invalid")
        return {"FailedRecordCount": failed, "Records": answer}


class Appended:
    """One append with an id."""

    def __init__(self, number: int, payload: bytes) -> None:
        self.id, self.payload = f"id-{number}", payload
        self.sent: list[float] = []
        self.acked: float | None = None
        self.number: int | None = None  # in the stream, from the first answer
        self.rest = 0  # how often it is sent again after its answer
        self.answers: list[tuple[float, float, int]] = []  # when it was asked and answered, and the number


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Appender(Client):
    """Appends to the stream `ids` by requests; without an answer it asks again, with the same id."""

    def __init__(self, kernel: Kernel, random: Random) -> None:
        super().__init__(kernel, "appender", random, v5=False, clean=True)
        self.all: list[Appended] = []
        self.open: dict[str, Appended] = {}  # not answered, by request id
        self._sent: set[str] = set()
        self._requests = 0
        self.refusals: list[str] = []
        self._asked: dict[str, Callable[[dict[str, Any]], object]] = {}

    def append(self, number: int, *, again: bool) -> None:
        for _ in range(number):
            one = Appended(len(self.all), f"append {len(self.all)}".encode())
            one.rest = int(again)
            self.all.append(one)
            self._requests += 1
            self.open[f"r{self._requests}"] = one
        self._pump()

    def repeat(self, number: int, *, latest: bool) -> None:
        """Ask again for some that were answered, of all or of the latest."""
        known = [one for one in self.all if one.acked is not None and not one.rest]
        if latest:
            known = known[-2 * number :]
        for one in self._random.sample(known, min(number, len(known))):
            if one not in self.open.values():
                self._requests += 1
                self.open[f"r{self._requests}"] = one
        self._pump()

    def ask(self, operation: str, body: dict[str, Any], done: Callable[[dict[str, Any]], object]) -> None:
        """Make a request; `done` gets the reply, if one comes before the connection ends."""
        if self.connected:
            self._requests += 1
            request = f"q{self._requests}"
            self._asked[request] = done
            data = json.dumps(body | {"requestId": request}).encode()
            self.send(PUBLISH, 0, _text(f"streambridge/appender/{operation}") + data)

    @property
    def idle(self) -> bool:
        return not self.open

    def ready(self) -> None:
        self._sent.clear()
        self._asked.clear()
        self._pump()

    def _pump(self) -> None:
        if not self.connected:
            return
        for request, one in list(self.open.items())[:20]:
            if request not in self._sent:
                self._sent.add(request)
                one.sent.append(self.kernel.now)
                body = {
                    "name": "ids", "payload": _base64(one.payload), "messageId": _base64(one.id.encode()),
                    "requestId": request,
                }  # fmt: skip
                data = json.dumps(body).encode()
                self.send(PUBLISH, 0, _text("streambridge/appender/appendMessage") + data)

    def handle(self, packet: Packet) -> None:
        if packet.kind != PUBLISH:
            return
        at = 2 + int.from_bytes(packet.body[:2], "big")
        qos = packet.flags >> 1 & 3
        answer = json.loads(packet.body[at + (2 if qos else 0) :])
        done = self._asked.pop(str(answer.get("requestId")), None)
        if done is not None:
            done(answer)
        one = self.open.pop(str(answer.get("requestId")), None)
        if one is None:
            return
        if "sequenceNumber" in answer:
            one.answers.append((one.sent[-1], self.kernel.now, answer["sequenceNumber"]))
            if one.acked is None:
                one.acked, one.number = self.kernel.now, answer["sequenceNumber"]
            if one.rest:
                one.rest -= 1
                self._requests += 1
                self.open[f"r{self._requests}"] = one
        else:
            self.refusals.append(str(answer))
            self._requests += 1
            self.kernel.later(0.2, None, self._ask_again, f"r{self._requests}", one)
            self.open[f"r{self._requests}"] = one
            self._sent.add(f"r{self._requests}")
        self._pump()

    def _ask_again(self, request: str, one: Appended) -> None:
        self._sent.discard(request)
        self._pump()
