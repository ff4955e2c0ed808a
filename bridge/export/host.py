"""What the worker offers all exports: AWS clients, appends to streams, hooks. Reports which plugin runs.

It identifies exports by stream and identifier, and knows nothing of tasks or threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bridge import clock
from bridge.export import wire
from bridge.export.planning import Transform
from bridge.model import MIB
from bridge.plugin import aws
from bridge.plugin.api import AwsBatchedConfig, AwsConfig, ExportConfig, Progress, Record, Retry
from bridge.plugin.discovery import Registry
from bridge.plugin.hooks import Event
from bridge.plugin.link import Link
from bridge.plugin.transform import TransformState

APPEND_TIMEOUT = 30.0
IDLE_MEMORY = 96 * MIB  # more than the process uses without any batch
LEAST_BATCH = 5 * MIB
_PAGE = os.sysconf("SC_PAGE_SIZE")

Key = tuple[str, str]  # of an export: stream and identifier


class TooLarge(Retry):
    """Raised for a message that is larger than its stream can store."""


def memory_used() -> int:
    """Return the resident size of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


class Parent(Protocol):
    """The worker process, as the host uses it."""

    def send(self, message: wire.WorkerMessage) -> None:
        """Send a message to the supervisor."""

    def append(self, stream: str, payload: bytes, timeout: float) -> None:
        """Append to a stream through the supervisor. Raises Retry, or TooLarge if it can never be stored."""

    def changed(self, stream: str) -> None:
        """The statuses of a stream have changed."""

    def event(self, event: Event) -> None:
        """Queue an event for the `handle_event` hooks."""


class Host:
    """May be called from any pool thread. `progress` returns the snapshots of all exports of a kind."""

    def __init__(
        self,
        hello: wire.Hello,
        registry: Registry,
        parent: Parent,
        memory: int,
        link: Link,
        progress: Callable[[str], list[Progress]],
    ) -> None:
        """`memory` is the limit of the process in bytes."""
        # Each thread may have three copies of a batch: as records, as a request, and during a conversion.
        self.batch_bytes = max((memory - IDLE_MEMORY) // (3 * hello.export.threads), LEAST_BATCH)
        self.data_dir, self.gateway, self.tuning = hello.data_dir, hello.gateway, hello.tuning
        self.allow, self.link, self.progress = hello.export.allow, link, progress
        self.boot = clock.System().boot
        self.failures = 0  # failed attempts so far
        self._aws, self._hook, self._parent = hello.aws, registry.hook, parent
        self._grown: dict[Key, int] = {}  # bytes of growth in each export's plugin
        self._inside: dict[Key, int] = {}  # the memory in use when a plugin was called

    @contextmanager
    def in_plugin(self, key: Key, doing: str) -> Iterator[None]:
        """Wrap every call of a plugin, so that the supervisor can name it if the process dies in it."""
        before = self._inside[key] = memory_used()
        self._parent.send(wire.Began(*key, threading.get_ident(), doing))
        try:
            yield
        finally:
            self._parent.send(wire.Ended(*key))
            self._inside.pop(key, None)
            self._grown[key] = self._grown.get(key, 0) + memory_used() - before

    def most_grown(self) -> dict[Key, int]:
        """Return the exports in whose plugins this process has grown most, with the bytes.

        Plugins that run at the same time cannot be distinguished, so all that come close to the largest are
        included.
        """
        grown, used = dict(self._grown), memory_used()
        for key, before in list(self._inside.items()):
            grown[key] = grown.get(key, 0) + used - before
        largest = max(grown.values(), default=0)
        return {key: size for key, size in grown.items() if size * 2 > largest}

    def append(self, stream: str, payload: bytes) -> None:
        """Append to a stream of the gateway. Raises Retry, or TooLarge if it can never be stored."""
        self._parent.append(stream, payload, APPEND_TIMEOUT)

    def client(self, service: str, config: AwsConfig | AwsBatchedConfig, **options: Any) -> Any:
        """Return an AWS client with the configured settings. Raises Retry."""
        try:
            return aws.client(self._aws, service, config.region, config.endpoint_url, self.link, **options)
        except Exception as error:
            raise aws.failure(error, f"making the {service} client") from error

    def transform(self, key: Key, kind: str) -> Transform | None:
        """Return the transformation of an export's records by hooks; None if no plugin has the hook."""
        hooks = self._hook.transform_records.get_hookimpls()

        def transform(
            records: list[Record], stream: str, config: ExportConfig, state: TransformState
        ) -> list[Record]:
            wanted = [impl for impl in hooks if _applies(impl.function, config)]
            if not wanted:
                return records
            # In the order of loading. Each plugin gets the records that the one before it returned.
            with self.in_plugin(key, "transforming records"):
                for impl in wanted:
                    values = {
                        "records": records, "stream": stream, "kind": kind, "config": config, "state": state
                    }  # fmt: skip
                    try:
                        changed = impl.function(*(values[name] for name in impl.argnames))
                    except Exception as error:
                        raise Retry(
                            f"the plugin {impl.plugin_name} failed to transform: {error!r}"
                        ) from error
                    records = records if changed is None else changed
            return records

        return transform if hooks else None

    def changed(self, stream: str) -> None:
        """The statuses of a stream have changed."""
        self._parent.changed(stream)

    def damaged(self, stream: str, detail: str) -> None:
        """Report that stored data of a stream failed its check."""
        self._parent.send(wire.Damaged(stream, detail))

    def event(self, name: str, key: Key, detail: str) -> None:
        """Queue an event of an export for the hooks."""
        self._parent.event(Event(name=name, stream=key[0], export=key[1], detail=detail))


def _applies(function: Callable[..., object], config: ExportConfig) -> bool:
    """Return whether a hook applies to an export; a hook for an `option` needs a value in it."""
    option = getattr(function, "option", None)
    return option is None or bool(getattr(config, option, None))
