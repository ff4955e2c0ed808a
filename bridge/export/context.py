"""The context of an exporter in the worker."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from bridge.plugin.allow import Allow
from bridge.plugin.api import AwsBatchedConfig, AwsConfig, Context, Progress


class Services(Protocol):
    """What all exporters of a worker share."""

    gateway: str
    allow: Allow

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        """An AWS client; raises Retry."""

    def append(self, stream: str, payload: bytes) -> None:
        """Append to a stream of the gateway; raises Retry."""

    def progress(self, kind: str) -> list[Progress]:
        """Snapshots of all exports of a kind; raises Retry while one is unknown."""


class Export(Protocol):
    """The exporter's own export."""

    kind: str

    @property
    def key(self) -> tuple[str, str]:
        """Stream and identifier."""

    def working(self) -> None:
        """Restart the time after which the export counts as hung."""

    def throttle(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""

    def save_state(self, state: bytes) -> None:
        """Keep a state with the cursor; raises ValueError if it is too large, and OSError."""


class WorkerContext(Context):
    """The context of an exporter in the worker."""

    def __init__(self, services: Services, export: Export, epoch: int) -> None:
        super().__init__(services.gateway, export.key[0], epoch)
        self.log = logging.getLogger(f"bridge.plugin.{export.kind}")
        self._services, self._export = services, export

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        return self._services.client(service, config, **options)

    def working(self) -> None:
        self._export.working()

    def throttle(self, size: int) -> None:
        self._export.throttle(size)

    def append(self, stream: str, payload: bytes) -> None:
        self._services.append(stream, payload)

    def save_state(self, state: bytes) -> None:
        self._export.save_state(state)
        self.state = state

    def open(self, path: Path) -> BinaryIO:
        return self._services.allow.open(path)

    def may_write_to(self, bucket: str) -> bool:
        return self._services.allow.bucket(bucket)

    def exports(self) -> list[Progress]:
        return self._services.progress(self._export.kind)
