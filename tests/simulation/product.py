"""The product, as the simulation starts it, and stand-ins for what its exporters talk to.

`boundary.install` comes before the import of this module.
"""

from __future__ import annotations

import random as randomness
import sys
from collections.abc import Callable
from copy import copy
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
from .clients import POISON

if TYPE_CHECKING:
    from .world import World

import bridge.export.host
import bridge.export.wire
import bridge.export.worker

REGISTRY = discovery.load([])


def _plugins(directories: Any = ()) -> Any:
    """The plugins that this process can load."""
    process = kernels.KERNEL.process if kernels.KERNEL is not None else None
    if MACHINE.missing and process is not None and process.name == "worker":
        found = copy(REGISTRY)
        found.exporters = {kind: cls for kind, cls in REGISTRY.exporters.items() if kind != MACHINE.missing}
        return found
    return REGISTRY


discovery.load = _plugins


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
    boundary.real_collect(1)


class Slow:
    """A client of AWS whose requests take time: others run meanwhile, and its process may be killed."""

    def __init__(self, world: World, service: str, real: Any) -> None:
        self._world, self._service, self._real = world, service, real
        self._kernel, self._random = world.kernel, world.random

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
                self._world.requested(self._service)
                self._world.checks.hands.attempted(name, options)
                answer = do(**options)
            finally:
                kernel.process, kernel.thread = process, thread
                kernel.call("answer", self._random.random() * 0.03)
            if name == "head_object":
                self._world.checks.exports.told(options["Key"])
            return answer

        return call


class Kinesis:
    """A stream of Kinesis, or of Firehose.

    Kinesis never accepts a record with `POISON` in it, nor any request with one.
    """

    def __init__(self, world: World, random: Random) -> None:
        self.world, self.random = world, random
        self.down, self.faults, self.cut = False, 0.0, False
        self.records: list[bytes] = []  # of the export of kin
        self.odd: list[bytes] = []  # of the export of odd

    def describe_stream_summary(self, **_: Any) -> dict[str, Any]:
        return {"StreamDescriptionSummary": {"OpenShardCount": 1000}}

    def put_records(self, StreamName: str, Records: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803
        self._connect()
        if any(POISON in record["Data"] for record in Records):
            error: Any = {"Error": {"Code": "ValidationException", "Message": "poison"}}
            raise botocore.exceptions.ClientError(
                error | {"ResponseMetadata": {"HTTPStatusCode": 400}}, "PutRecords"
            )
        into = self.odd if StreamName == "odd" else self.records
        failed, answers = self._put(Records, "ProvisionedThroughputExceededException", into)
        return {"FailedRecordCount": failed, "Records": answers}

    def put_record_batch(self, DeliveryStreamName: str, Records: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: N803
        """Of Firehose, which takes any record."""
        self._connect()
        failed, answers = self._put(Records, "ServiceUnavailableException", self.records)
        return {"FailedPutCount": failed, "RequestResponses": answers}

    def _connect(self) -> None:
        if self.cut:
            self.cut = False
            raise botocore.exceptions.ConnectionClosedError(endpoint_url="https://kinesis.invalid")
        if self.down or self.random.random() < self.faults:
            raise botocore.exceptions.EndpointConnectionError(endpoint_url="https://kinesis.invalid")

    def _put(
        self, records: list[dict[str, Any]], code: str, into: list[bytes]
    ) -> tuple[int, list[dict[str, str]]]:
        """Take some of the records, or lose the answer; returns how many failed, and the answers."""
        answers, failed = [], 0
        for record in records:
            if self.random.random() < self.faults * 2:
                failed += 1
                answers.append({"ErrorCode": code, "ErrorMessage": "slower"})
            else:
                into.append(record["Data"].removesuffix(b"\n"))
                self.world.checks.exports.arrived(into[-1])
                answers.append({"RecordId": str(len(into))})
        if self.random.random() < self.faults:
            raise botocore.exceptions.ReadTimeoutError(endpoint_url="https://kinesis.invalid")
        return failed, answers
