"""The running service: wires the store, the front ends and the export worker together.

Start: open the store (recovery), reconcile the declared streams, start the export worker, open the
listeners, and only then say that it is ready. A stream that is declared is created or updated, never
deleted; one that cannot be, is reported, and the others run.

Stop (SIGTERM, SIGINT): stop reading from sockets, commit and acknowledge what was read, let batches
in flight finish, sync everything, give the lock back. A second signal ends at once; what was
acknowledged is stored in either case.

Reload (SIGHUP): read the configuration again; a mistake is reported and changes nothing. What differs from
the start and needs a restart is named at each reload.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

import uvloop

from bridge import logs, process
from bridge.access.logins import Access
from bridge.config import settings as configuration
from bridge.config.settings import Config
from bridge.control.server import ControlFrontEnd
from bridge.errors import ConfigError, StreamBridgeError
from bridge.export.cursor import highest_exported
from bridge.export.supervisor import ExportSupervisor
from bridge.greengrass import GreengrassFrontEnd
from bridge.http import HttpFrontEnd
from bridge.http.observer import Observer
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.server import clients
from bridge.operations.catalog import Operations
from bridge.operations.manager import StreamManager
from bridge.plugin import discovery
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream

log = logging.getLogger("bridge")
STOP_EXPORTS = 10.0  # seconds that batches in flight get at a stop
REFRESH = 1.0
DESCRIPTORS = 65_536  # as in the systemd unit
YOUNG = 10_000  # objects made between two looks for cyclic garbage; a read of 1,000 messages is no reason
TWICE = 1.0  # a second signal sooner than this is the same one, sent to the process and to its group


class FrontEnd(Protocol):
    """A door to the streams."""

    async def start(self) -> list[str]:
        """Open the listeners; returns the addresses they really listen on. Raises OSError."""

    async def stop(self) -> None:
        """Stop reading, see what was read committed and answered, close."""


def notify(state: str) -> None:
    """Tell systemd our state (sd_notify); nothing happens where there is no NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


async def _trim() -> None:
    while True:
        await asyncio.sleep(process.TRIM_INTERVAL)
        await asyncio.to_thread(process.trim_memory)


def run(config: Config) -> None:
    """Run the service until it is told to stop; raises StreamBridgeError or OSError if it cannot start."""
    logs.setup(config.log.level, config.log.format)
    _raise_descriptors()
    process.use_short_slices()
    process.return_freed_memory(few_heaps=False)
    uvloop.run(Service(config).run())


def _raise_descriptors() -> None:
    """A device takes a descriptor; a shell allows 1,024, and more to who asks for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Service:
    """One running service."""

    def __init__(self, config: Config) -> None:
        self._config = config  # of the start, after a reload too: what needs a restart is as it says
        self._stop = asyncio.Event()
        self._pending: set[asyncio.Future[Any]] = set()
        self._healing: set[str] = set()
        self._refused: dict[str, int] = {}

    async def run(self) -> None:
        """Start, say so, and stop when told."""
        loop = asyncio.get_running_loop()
        config = self._config
        registry = discovery.load(config.export.plugin_dirs)
        for found in registry.found:
            if found.error is not None:
                log.warning("plugin not loaded: %s", found.error, extra={"plugin": found.name})
        began = time.monotonic()
        gateway = config.gateway
        store = StreamStore(
            gateway.data_dir,
            gateway.memory_dir,
            on_event=_on_event,
            floor=lambda name, epoch: highest_exported(gateway.data_dir, name, epoch) + 1,
        )
        log.info(
            "opened %d streams in %.3f s",
            len(store.streams),
            time.monotonic() - began,
            extra={"data_dir": str(gateway.data_dir)},
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            self._exports = exports = ExportSupervisor(
                gateway.data_dir,
                gateway=gateway.id,
                export=config.export,
                aws=config.aws,
                append_status=self._append_status,
                damaged=self._damaged,
            )
            self._manager = manager = StreamManager(store, registry, exports)
            self._reconcile(config)
            operations = Operations(manager, config.export.allow)
            access = Access(config.mqtt)
            stack.callback(access.close)
            self._front_end = front_end = MqttFrontEnd(config.mqtt, operations, access)
            self._greengrass = greengrass = GreengrassFrontEnd(config.greengrass, operations, access)
            control = ControlFrontEnd(
                operations, gateway.data_dir, dict.fromkeys(clients.OPERATIONS, front_end.command)
            )
            observer = Observer(
                gateway.id,
                gateway.data_dir,
                manager,
                exports,
                {"mqtt": front_end, "greengrass": greengrass},
            )
            for number in (signal.SIGTERM, signal.SIGINT):  # before anybody can see that we are there
                loop.add_signal_handler(number, self._told_to_stop)
            addresses: list[str] = []
            if config.http.listen:  # opened first and closed last, to show a start and a stop that take time
                page: FrontEnd = HttpFrontEnd(config.http, observer)
                addresses += await page.start()
                stack.push_async_callback(page.stop)
            await exports.start()
            stack.push_async_callback(exports.stop, STOP_EXPORTS)
            addresses += await greengrass.start()
            stack.push_async_callback(greengrass.stop)
            addresses += await control.start()
            stack.push_async_callback(control.stop)
            addresses += await front_end.start()
            stack.push_async_callback(front_end.stop)
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            self._spawn(store.keep(gateway.sync_interval / 1000))
            self._spawn(self._refresh())
            self._spawn(_trim())
            gc.freeze()  # what is there now stays: to walk through it again and again finds nothing
            gc.set_threshold(YOUNG, 20, 20)
            observer.phase = "running"
            streams = "1 stream" if len(store.streams) == 1 else f"{len(store.streams)} streams"
            broker = {"broker": config.mqtt.external.url} if config.mqtt.mode == "external" else {}
            notify(f"READY=1\nSTATUS={', '.join([streams, *addresses, *broker.values()])}")
            log.info("ready", extra={"listen": ",".join(addresses), **broker, "streams": len(store.streams)})
            await self._stop.wait()
            observer.phase = "stopping"
            notify("STOPPING=1\nSTATUS=committing what was read")
            log.info("stopping")
            for task in self._pending:
                task.cancel()
        log.info("stopped; everything acknowledged is stored")

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._pending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        """A background duty that ends by an error ends the service: systemd starts it afresh."""
        self._pending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("internal error, stopping: %r", error, exc_info=error)
            self._stop.set()

    def _told_to_stop(self) -> None:
        if not self._stop.is_set():
            self._told = time.monotonic()
            self._stop.set()
        elif time.monotonic() - self._told > TWICE:
            log.warning("told to stop twice: ending at once")
            os._exit(1)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            self._manager.refresh()
            self._tell_of_full_streams()
            notify("WATCHDOG=1")  # from the loop itself: a loop that is stuck sends none

    # -- streams from the configuration ----------------------------------------------------------
    def _reconcile(self, config: Config) -> list[str]:
        """Create and update the declared streams; returns the names of those that are not as declared.

        One that cannot be had keeps its topics all the same: a message that belongs to it is refused,
        not acknowledged into nowhere.
        """
        lacking = []
        self._manager.keep_refusing(config.streams)
        for name, definition in config.streams.items():
            try:
                if name not in self._manager.store.streams:
                    self._manager.create(definition)
                    log.info("stream created", extra={"stream": name})
                elif self._manager.definitions[name] != definition:
                    self._manager.update(definition)
                    log.info("stream updated", extra={"stream": name})
            except (StreamBridgeError, OSError) as error:
                lacking.append(name)
                why = configuration.explained(error, name)
                extra = {"stream": name, **logs.ANSWER}
                if name in self._manager.store.streams:
                    log.error("stream stays as it was, not as declared: %s", why, extra=extra)
                else:
                    log.error("stream as declared cannot be had: %s", why, extra=extra)
                    self._manager.refuse(definition, why)
        return lacking

    def _reload(self) -> None:
        path = self._config.path
        if path is None:
            return
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            config = configuration.load(Path(path), lambda: self._manager.registry.exporters)
        except (ConfigError, OSError) as error:
            log.error("reload refused, the old configuration stays: %s", error, extra=logs.ANSWER)
        else:
            self._take_over(config)
        notify("READY=1")

    def _take_over(self, config: Config) -> None:
        """Take over what can be, and say what is not."""
        lacking = list(configuration.needs_restart(self._config, config))
        for key in lacking:
            log.warning("changed, but needs a restart: %s", key, extra=logs.ANSWER)
        try:
            self._front_end.reload(config.mqtt)
            self._greengrass.reload()
        except (ConfigError, OSError) as error:
            text = "reload of [mqtt] refused, the old users, rules and certificates stay: %s"
            log.error(text, error, extra=logs.ANSWER)
            lacking.append("users, rules and certificates of [mqtt]")
        logs.set_level(config.log.level)
        lacking += [f"streams.{name}" for name in self._reconcile(config)]
        if lacking:
            names = ", ".join(lacking)
            log.warning("reloaded, but not: %s; see the lines before", names, extra=logs.ANSWER)
        else:
            log.info("reloaded", extra=logs.ANSWER)

    def _damaged(self, name: str, what: str) -> None:
        """The export worker has met damage: set it aside, so that exports go on behind it."""
        stream = self._manager.store.streams.get(name)
        if stream is not None and name not in self._healing:
            log.error("damaged data: %s", what, extra={"stream": name})
            self._healing.add(name)
            self._spawn(self._heal(stream))

    async def _heal(self, stream: Stream) -> None:
        try:
            for base in list(stream.log.sizes):
                await stream.idle()
                if not stream.closed:
                    stream.repair(base)
                await asyncio.sleep(0)  # a segment at a time: others are served in between
        except OSError as error:
            log.error("damaged data cannot be set aside: %s", error, extra={"stream": stream.name})
        finally:
            self._healing.discard(stream.name)
            self._manager.refresh()

    async def _append_status(self, stream: str, payload: bytes) -> None:
        """Exporters append to status and dead-letter streams through us, the only writer."""
        await self._manager.append(stream, payload)

    def _tell_of_full_streams(self) -> None:
        """Plugins hear of a stream that has refused messages since the last look."""
        for name, stream in self._manager.store.streams.items():
            refused = stream.counters.get("full", 0)
            if refused > self._refused.get(name, 0):
                self._exports.event("stream_full", name, f"{refused} messages refused since the start")
            self._refused[name] = refused


def _on_event(stream: str, what: str) -> None:
    log.warning(what, extra={"stream": stream})
