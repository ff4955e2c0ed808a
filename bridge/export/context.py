"""What an exporter's calls of its context come to in the worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, BinaryIO

from bridge.plugin.api import AwsBatchedConfig, AwsConfig, Context, Progress

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.export.scheduler import Scheduler
    from bridge.export.task import Task


class WorkerContext(Context):
    """The context of an exporter in the worker."""

    def __init__(self, task: Task, scheduler: Scheduler) -> None:
        super().__init__(scheduler.gateway, task.source.name, task.source.epoch)
        self.log = logging.getLogger(f"bridge.plugin.{task.kind}")
        self._task, self._scheduler = task, scheduler

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        return self._scheduler.client(service, config, **options)

    def working(self) -> None:
        self._scheduler.working(self._task)

    def throttle(self, size: int) -> None:
        self._scheduler.throttle(size, self._task)

    def append(self, stream: str, payload: bytes) -> None:
        self._scheduler.append(stream, payload)

    def save_state(self, state: bytes) -> None:
        self._task.save_state(state)
        self.state = state

    def open(self, path: Path) -> BinaryIO:
        return self._scheduler.allow.open(path)

    def may_write_to(self, bucket: str) -> bool:
        return self._scheduler.allow.bucket(bucket)

    def exports(self) -> list[Progress]:
        return self._scheduler.progress(self._task.kind)
