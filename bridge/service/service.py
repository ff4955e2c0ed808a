"""The running service: connects the store, the front ends and the export worker.

Start: open the store (recovery), reconcile the declared streams, start the export worker, open the listeners,
and only then report ready. Declared streams are created or updated, never deleted. If that fails for one
stream, the failure is logged and the others run.

Stop (SIGTERM, SIGINT): stop reading from sockets, commit and acknowledge what was read, let batches in flight
finish, sync everything, release the lock. A second signal ends the process at once; acknowledged messages are
stored in either case.

Reload (SIGHUP): read the configuration again. A mistake is logged and changes nothing. Each reload logs the
settings that differ from the start and need a restart. Files of users, keys and certificates that change are
read again without a signal (`watch`). Each of them is for itself: of a broken one, the last good content
holds, and the others apply (`readable.Kept`). Reading and parsing have a thread; the loop applies what they
give.
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
from collections.abc import Awaitable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bridge import audit, books, logs, process
from bridge.access.logins import Access
from bridge.auth.supervisor import Auth
from bridge.config import settings as configuration
from bridge.config import tomlfile
from bridge.config.checks import all_mistakes, blockers
from bridge.config.settings import Config
from bridge.control.server import ControlFrontEnd
from bridge.encryption import Keys
from bridge.errors import ConfigError, CorruptData, EncryptionKeyError, StreamBridgeError
from bridge.export import cursor
from bridge.export.supervisor import ExportSupervisor
from bridge.firehose.frontend import FirehoseFrontEnd
from bridge.greengrass.frontend import GreengrassFrontEnd
from bridge.http.frontend import HttpFrontEnd
from bridge.http.observer import Observer
from bridge.model import changed_defaults
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.broker import journalfile
from bridge.operations.catalog import NewDeliveries, Operations
from bridge.operations.manager import StreamManager, first_free
from bridge.plugin import discovery
from bridge.runtime import tick
from bridge.service.watch import Watch
from bridge.streams.store import StreamStore
from bridge.streams.stream import Stream

log = logging.getLogger("bridge")
STOP_EXPORTS = 10.0  # seconds that batches in flight get at a stop
REFRESH = 1.0
REPORT_LOSSES = 60.0  # seconds
EXPIRES_SOON = 24 * 3600  # seconds
DESCRIPTORS = 65_536  # as in the systemd unit
YOUNG = 10_000  # new objects before a garbage collection; a read of 1,000 messages must not cause one
TWICE = 1.0  # seconds; two signals closer together are one, sent to the process and to its group


def notify(state: str) -> None:
    """Send systemd our state (sd_notify). Does nothing without NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _collect_keys(keys: Keys, store: StreamStore) -> None:
    """Delete the opening keys that nothing needs any more."""

    def used() -> set[int] | None:
        found = store.openings()
        if found is not None:
            found |= cursor.openings(store.data_dir) | journalfile.openings(store.data_dir)
        return found

    def settle() -> None:
        store.settle()
        cursor.settle(store.data_dir)
        journalfile.settle(store.data_dir)

    try:
        if number := keys.collect(used, settle):
            log.info("deleted %d unused encryption keys", number)
    except (OSError, CorruptData) as error:
        log.warning("unused encryption keys cannot be deleted: %s", error)


async def _trim() -> None:
    while True:
        await asyncio.sleep(process.TRIM_INTERVAL)
        await asyncio.to_thread(process.trim_memory)


def start(path: Path) -> None:
    """Run the service with this configuration until a signal stops it.

    Raises StreamBridgeError or OSError if it cannot start; a ConfigError has all mistakes of the
    configuration. Blockers on this machine are found before any file is created.
    """
    try:
        config = configuration.load(path)
        if problems := blockers(path, config):
            raise ConfigError("\n".join(problems))
        run(config)
    except (ConfigError, EncryptionKeyError) as error:
        raise ConfigError("\n".join(all_mistakes(path, str(error)))) from error


def run(config: Config) -> None:
    """Run the service until a signal stops it; raises StreamBridgeError or OSError if it cannot start."""
    logs.setup(config.log.level, config.log.format)
    _raise_descriptors()
    process.use_short_slices()
    process.return_freed_memory(process.MAPPED_IF_TRIMMED, few_heaps=False)
    uvloop.run(Service(config).run())


def _raise_descriptors() -> None:
    """Raise the limit of open files, because each device takes one, and a shell's soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _most_streams() -> int | None:
    """Return the number of streams that leaves a quarter of the open files to clients and everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft * 3 // 4


class Service:
    """One running service."""

    def __init__(self, config: Config) -> None:
        self._config = config  # of the start, even after a reload, because some settings need a restart
        self._applied = config  # of the last reload that could be applied to [mqtt]
        self._named: tuple[Config, list[Path]] | None = None  # the files that a configuration names
        self._watch = Watch(self._watched, self._files_changed)
        self._warned: tuple[datetime | None, int] = (
            None,
            0,
        )  # the end of revocation lists, and whether it was reported
        self._stop = asyncio.Event()
        self._pending: set[asyncio.Future[Any]] = set()
        self._healing: set[str] = set()
        self._refused: dict[str, int] = {}
        self._lost: dict[str, tuple[dict[str, int], float]] = {}  # by export, as logged, and when
        self._ready = self._reload_asked = False
        self._reloading = asyncio.Lock()
        self._signalled = False
        self._failed = False  # by an internal error
        self._mistakes: list[str] = []  # of the current reload, for the audit log
        self._steps = 0  # steps of the wall clock that are in the audit log

    async def run(self) -> None:
        """Start, report ready, and stop on a signal. Raises StreamBridgeError after an internal error."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)  # first: without it, SIGHUP kills
        config = self._config
        registry = discovery.load(config.export.plugin_dirs)
        for found in registry.found:
            if found.error is not None:
                log.warning("plugin not loaded: %s", found.error, extra={"plugin": found.name})
        began = time.monotonic()
        gateway = config.gateway
        keys = Keys(gateway.data_dir, config.encryption.key_file)
        store = StreamStore(
            gateway.data_dir,
            gateway.memory_dir,
            on_event=_on_event,
            floor=lambda name, epoch: first_free(gateway.data_dir, name, epoch),
            most=_most_streams(),
            keys=keys,
            commit_delay=gateway.commit_delay / 1000,
        )
        _collect_keys(keys, store)
        log.info(
            "opened %s in %.3f s",
            _count_streams(len(store.streams)),
            time.monotonic() - began,
            extra={"data_dir": str(gateway.data_dir)},
        )
        unsynced: list[str] = []

        async def close() -> None:
            unsynced.extend(await store.close())
            for name in unsynced:
                log.error(
                    "syncs fail; its newest messages may be lost if the power fails, or at the next start; "
                    "check the disk",
                    extra={"stream": name},
                )

        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(close)
            self._exports = exports = ExportSupervisor(
                gateway.data_dir,
                gateway=gateway.id,
                export=config.export,
                aws=config.aws,
                append_status=self._append_status,
                clock=store.clock,
                damaged=self._damaged,
                keys=keys,
            )
            self._manager = manager = StreamManager(store, registry, exports)
            stack.callback(manager.close)
            audit.begin(config.audit, data_dir=gateway.data_dir)
            stack.callback(audit.end)
            self._reconcile(config)
            manager.report_deleting()
            firehose_streams = NewDeliveries(config.firehose.max_size, config.firehose.flush_on_write)
            operations = Operations(manager, config.export.allow, new_deliveries=firehose_streams)
            self._auth = auth = Auth(
                config.auth, config.export.plugin_dirs, lambda: registry.with_hook("authorize")
            )
            await auth.start()
            stack.push_async_callback(auth.stop)
            self._access = access = Access(config.mqtt)
            stack.callback(access.close)
            self._front_end = front_end = MqttFrontEnd(
                config.mqtt, operations, access, upstreams=config.upstream, gateway=gateway.id, auth=auth
            )
            self._greengrass = greengrass = GreengrassFrontEnd(config.greengrass, operations, access)
            self._firehose = firehose = FirehoseFrontEnd(config.firehose, operations, access)
            control = ControlFrontEnd(operations, gateway.data_dir)
            observer = Observer(
                gateway.id,
                gateway.data_dir,
                manager,
                exports,
                {"mqtt": front_end, "greengrass": greengrass, "firehose": firehose},
                gateway.sync_interval,
                kept=access.kept,
            )
            for number in (signal.SIGTERM, signal.SIGINT):  # before the first listener
                loop.add_signal_handler(number, self._on_stop_signal)
            addresses: list[str] = []
            if config.http.listen:  # opened first and closed last, to show a slow start or stop
                page = HttpFrontEnd(config.http, observer, operations, access, gateway.id)
                addresses += await page.start()
                stack.push_async_callback(page.stop)
            await exports.start()
            stack.push_async_callback(exports.stop, STOP_EXPORTS)
            addresses += await greengrass.start()
            stack.push_async_callback(greengrass.stop)
            addresses += await firehose.start()
            stack.push_async_callback(firehose.stop)
            addresses += await control.start()
            stack.push_async_callback(control.stop)
            addresses += await front_end.start()
            stack.push_async_callback(front_end.stop)
            self._spawn(store.keep(gateway.sync_interval / 1000))
            self._spawn(self._refresh())
            self._spawn(self._watch.run())
            self._spawn(_trim())
            gc.freeze()  # objects of the start live as long as the process, so collections can skip them
            gc.set_threshold(YOUNG, 20, 20)
            observer.phase = "running"
            streams = _count_streams(len(store.streams))
            broker = {"broker": config.mqtt.external.url} if config.mqtt.mode == "external" else {}
            notify(f"READY=1\nSTATUS={', '.join([streams, *addresses, *broker.values()])}")
            audit.record("start", why=f"pid {os.getpid()}")
            log.info("ready", extra={"listen": ",".join(addresses), **broker, "streams": len(store.streams)})
            self._ready = True
            if self._reload_asked:
                self._spawn(self._reload())
            await self._stop.wait()
            observer.phase = "stopping"
            notify("STOPPING=1\nSTATUS=committing received messages")
            log.info("stopping")
            audit.record("stop", why="signal" if self._signalled else "internal error")
            for task in self._pending:
                task.cancel()
        books.check()
        if not (unsynced or front_end.failed):
            log.info("stopped; everything acknowledged is stored")
        if self._failed:
            raise StreamBridgeError("stopped after an internal error; the log has it")

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._pending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        """End the service after an error in a background task; systemd restarts it."""
        self._pending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("internal error, stopping: %r", error, exc_info=error)
            self._failed = True
            self._stop.set()

    def _on_stop_signal(self) -> None:
        if not self._stop.is_set():
            self._stopping_since = time.monotonic()
            self._signalled = True
            self._stop.set()
        elif time.monotonic() - self._stopping_since > TWICE:
            log.warning("second stop signal: ending at once")
            os._exit(1)

    def _on_reload_signal(self) -> None:
        if self._ready:
            self._spawn(self._reload())
        else:
            self._reload_asked = True  # and done once everything runs

    async def _refresh(self) -> None:
        while True:
            await tick(REFRESH)
            await self._manager.refresh()
            if os.environ.get(books.VARIABLE) == "1":
                books.check()
            self._record_clock()
            self._report_expiry()
            self._report_full_streams()
            self._report_losses()
            notify("WATCHDOG=1")  # from the event loop, so that a stuck loop sends none

    def _record_clock(self) -> None:
        clock = self._manager.store.clock
        if clock.steps != self._steps:
            self._steps = clock.steps
            seconds = clock.last_step / 1000
            audit.record("clock", why=f"the wall clock was set by {seconds:+.3f} s; steps: {clock.steps}")

    def _report_expiry(self) -> None:
        """Log once that revocation lists expire soon, and once that they have expired."""
        ends = self._front_end.crls_expire
        left = (ends - datetime.now(UTC)).total_seconds() if ends is not None else float("inf")
        said = 2 if left <= 0 else 1 if left < EXPIRES_SOON else 0
        if (ends, said) != self._warned and said:
            what = (
                "has expired: every client certificate of its CA is refused" if said == 2 else "expires soon"
            )
            text = "a list in mqtt.tls.crl_file %s (%s); replace the file"
            log.log(logging.ERROR if said == 2 else logging.WARNING, text, what, f"{ends:%Y-%m-%d %H:%M} UTC")
        self._warned = ends, said

    # -- streams from the configuration ----------------------------------------------------------
    def _reconcile(self, config: Config) -> list[str]:
        """Create and update the declared streams. Returns the names of those for which that failed.

        An unavailable stream keeps its topics: messages for it are refused, not acknowledged and lost.
        """
        failed = []
        self._manager.declare(config.streams)
        for name, definition in config.streams.items():
            try:
                if name not in self._manager.store.streams:
                    self._manager.create(definition, among=config.streams)
                    log.info("stream created", extra={"stream": name})
                    continue
                stored = self._manager.definitions[name]
                delivery = stored.delivery
                if delivery is not None and delivery.deleting:  # a declared stream is not deleted
                    delivery = msgspec.structs.replace(delivery, deleting=False)
                definition = msgspec.structs.replace(definition, delivery=delivery)
                exports = self._manager.registry.stored(definition.export_definition)
                if stored != msgspec.structs.replace(definition, export_definition=exports):
                    self._manager.update(definition, among=config.streams)
                    log.info("stream updated", extra={"stream": name})
                    for change in changed_defaults(stored, definition):
                        log.warning(
                            "%s was %s and is %s now, the default of declared streams: %s; to undo that, "
                            "set it in [streams.%s]",
                            *change,
                            name,
                            extra={"stream": name},
                        )
            except (StreamBridgeError, OSError) as error:
                failed.append(name)
                why = configuration.explained(error, name)
                extra = {"stream": name, **logs.ANSWER}
                if name in self._manager.store.streams:
                    log.error("stream not updated, its stored definition stays: %s", why, extra=extra)
                else:
                    log.error("stream not created, its messages are refused: %s", why, extra=extra)
                    self._manager.bindings.refuse(definition, why)
        return failed

    async def _reload(self) -> None:
        path = self._config.path
        if path is None:
            return
        async with self._reloading:
            notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                await asyncio.to_thread(self._watch.read)
                await self._apply(await self._load())
            except (ConfigError, OSError) as error:
                log.error("reload failed, the old configuration stays: %s", error, extra=logs.ANSWER)
                audit.record("reload", "failed", why=str(error))
                if failed := await self._read_files(self._applied):  # which do not depend on it
                    self._report_reload(failed)
            except Exception as error:
                self._not_applied(path, error)
            finally:
                notify("READY=1")  # else systemd waits, and then kills the service

    async def _load(self) -> Config:
        """Read the configuration. Raises ConfigError or OSError."""
        path = Path(str(self._config.path))
        return await asyncio.to_thread(configuration.load, path, lambda: self._manager.registry.exporters)

    async def _apply(self, config: Config) -> None:
        """Apply the settings that a reload can change, and log those that it cannot."""
        failed = configuration.needs_restart(self._config, config)
        for key in failed:
            log.warning("changed, but needs a restart: %s", key, extra=logs.ANSWER)
        try:
            audit.reload(config.audit)
        except ConfigError as error:
            log.error("reload of [audit] failed, the old audit log continues: %s", error, extra=logs.ANSWER)
            self._mistakes.append(str(error))
            failed.append("audit")
        failed += await self._read_files(config)
        logs.set_level(config.log.level)
        failed += [f"streams.{name}" for name in self._reconcile(config)]
        self._report_reload(failed)

    def _watched(self) -> Iterator[Path]:
        applied = self._applied
        if self._named is None or self._named[0] is not applied:
            parts = (applied.mqtt, applied.auth, applied.firehose, applied.greengrass)
            self._named = applied, [path for part in parts for path in configuration.files_of(part)]
        yield from self._named[1]
        if self._config.path is not None:
            yield from tomlfile.files_at(Path(self._config.path))

    def _not_applied(self, what: object, error: Exception) -> None:
        """Report an internal error while files are read again: what runs goes on as it is."""
        log.critical("%s: changed, but not applied: internal error: %r", what, error, exc_info=error)
        audit.record("reload", "failed", why=f"internal error: {error!r}")
        self._mistakes.clear()

    async def _files_changed(self, paths: list[Path]) -> None:
        async with self._reloading:
            try:
                await self._apply_changed(paths)
            except Exception as error:
                self._not_applied(", ".join(map(str, paths)), error)

    async def _apply_changed(self, paths: list[Path]) -> None:
        """Apply changed files. Of the configuration, only the rules, roles and users apply now."""
        config, names = self._applied, ", ".join(map(str, paths))
        own = () if config.path is None else tuple(tomlfile.files_at(Path(config.path)))
        if any(path in own for path in paths):
            fresh, lost = config, []
            try:
                fresh = await self._load()
                lost = config.mqtt.rules_lost_in(fresh.mqtt)
            except (ConfigError, OSError) as error:
                log.error("changed, but not applied: %s", error, extra=logs.ANSWER)
                audit.record("reload", "failed", why=str(error))
                if all(path in own for path in paths):
                    return
            if lost:
                log.error(
                    "changed: %s; not applied, because nothing is left of %s; reload the service to apply it",
                    names,
                    " and ".join(lost),
                    extra=logs.ANSWER,
                )
                audit.record("reload", "failed", why=f"nothing is left of {' and '.join(lost)}")
                if all(path in own for path in paths):
                    return
            else:
                config = msgspec.structs.replace(config, mqtt=config.mqtt.with_rules_of(fresh.mqtt))
            if config == self._applied and all(path in own for path in paths):
                log.info("changed: %s; reload the service to apply it", names, extra=logs.ANSWER)
                return
        log.info("changed and read again: %s", names, extra=logs.ANSWER)
        self._report_reload(await self._read_files(config), f"changed: {names}")

    async def _read_files(self, config: Config) -> list[str]:
        """Apply users, rules, keys, certificates and revocation lists. Returns the mistakes.

        Each part is for itself, so that no mistake keeps a revocation from holding.
        """
        failed = []
        if mistakes := await asyncio.to_thread(config.auth.mistakes):
            self._not_reloaded("[auth]", "its old plugins stay", "; ".join(mistakes))
            config = msgspec.structs.replace(config, auth=self._applied.auth)
            failed.append("auth")
        self._auth.reload(config.auth)
        try:
            await self._reload_mqtt(config)
        except Exception as error:
            if not isinstance(error, (ConfigError, OSError)):
                log.critical("internal error: %r", error, exc_info=error)
            kept = "its old listeners, certificates and upstreams stay"
            self._not_reloaded("[mqtt]", kept, str(error))
            failed.append("listeners and certificates of [mqtt]")
            if config.upstream:
                failed.append("upstream")
            rules = self._applied.mqtt.with_rules_of(config.mqtt)
            with contextlib.suppress(ConfigError, OSError):  # which is reported
                await self._reload_mqtt(msgspec.structs.replace(self._applied, mqtt=rules, auth=config.auth))
        with contextlib.suppress(ConfigError):  # it is in `missing`
            await asyncio.to_thread(self._greengrass.read)
        self._greengrass.reload()
        try:
            await asyncio.to_thread(self._firehose.read)
            self._firehose.reload()
        except ConfigError as error:
            self._not_reloaded("[firehose]", "its old keys and certificate stay", str(error))
            failed.append("keys and certificate of [firehose]")
        kept_files = self._access.kept
        broken = kept_files.broken | kept_files.missing
        self._mistakes += broken.values()
        return [*failed, *broken]

    async def _reload_mqtt(self, config: Config) -> None:
        """Apply listeners, users, rules, certificates and upstreams. Raises ConfigError or OSError."""
        plan = await asyncio.to_thread(self._front_end.plan, config.mqtt)
        self._front_end.reload(config.mqtt, config.upstream, plan)
        self._applied = config

    def _not_reloaded(self, section: str, kept: str, why: str) -> None:
        log.error("reload of %s failed, %s: %s", section, kept, why, extra=logs.ANSWER)
        self._mistakes.append(why)

    def _report_reload(self, failed: list[str], why: str = "") -> None:
        if failed:
            names = ", ".join(failed)
            log.warning("reloaded, except: %s; see the lines above", names, extra=logs.ANSWER)
            mistakes = "".join(f"; {one}" for one in self._mistakes)
            audit.record("reload", "failed", why=f"reloaded, except: {names}{mistakes}")
            self._mistakes.clear()
        else:
            log.info("reloaded", extra=logs.ANSWER)
            audit.record("reload", why=why)

    def _damaged(self, name: str, what: str) -> None:
        """Quarantine damage that the export worker has found, so that exports continue after it."""
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
                await asyncio.sleep(0)  # one segment at a time: clients are served in between
        except OSError as error:
            log.error("damaged data cannot be quarantined: %s", error, extra={"stream": stream.name})
        finally:
            self._healing.discard(stream.name)
            await self._manager.refresh()

    async def _append_status(self, stream: str, payload: bytes) -> None:
        """Append to a status or dead-letter stream for an exporter, because only this process writes."""
        await self._manager.keep(stream, payload)

    def _report_full_streams(self) -> None:
        """Report to the plugins which streams have refused messages since the last call."""
        for name, stream in self._manager.store.streams.items():
            refused = stream.counters.get("full", 0)
            if refused > self._refused.get(name, 0):
                self._exports.event("stream_full", name, f"{refused} messages refused since the start")
            self._refused[name] = refused

    def _report_losses(self) -> None:
        """Log what exports have lost, once a minute for each stream, and once at the start."""
        now = time.monotonic()
        for name, stream in self._manager.store.streams.items():
            before, since = self._lost.get(name, ({}, -REPORT_LOSSES))
            if not stream.drops.number or now - since < REPORT_LOSSES:
                continue
            found = [one for one in self._manager.export_statuses(name) if one.last_lost is not None]
            lost = {one.export_config_identifier: one.lost_messages_count for one in found}
            if lost != before and lost:
                what = ", ".join(
                    f"{one.lost_messages_count} for {one.export_config_identifier} (last {one.last_lost})"
                    for one in found
                )
                log.error(
                    "messages were dropped before they were exported, in all %s", what, extra={"stream": name}
                )
                self._lost[name] = lost, now


def _count_streams(number: int) -> str:
    return "1 stream" if number == 1 else f"{number} streams"


def _on_event(stream: str, what: str) -> None:
    log.warning(what, extra={"stream": stream})
