"""Puts the simulated machine below the product: what `os`, `time`, `threading` and others do in it.

`install` must run before anything of the product is imported, in a process of its own. Code that does not run
in a simulated process, and files that are not on the simulated disk, get the real thing.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import queue
import random as randomness
import secrets
import select
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

from . import kernel as kernels
from . import loop as loops
from .disk import REAL, Disk
from .kernel import Killed, Lock, Process, RLock, Thread

PAGE = 4096
CLOUD = 1_790_000_000.0  # Unix time of the cloud at the kernel's zero
QUICK, SLOW = 40e-6, 4e-3  # s; a call takes up to so long, a sync a hundred times that


class Machine:
    """What is below the processes: one kernel, one disk, clocks, and what is done with log lines."""

    disk: Disk | None = None
    here = ""  # the working directory, with a slash at its end
    wall = 0.0  # Unix time at the kernel's zero
    boot = "boot"
    synchronised = True
    log: Callable[[Process, logging.LogRecord], object] = staticmethod(lambda process, record: None)
    client: Callable[..., Any]  # makes an exporter's client of AWS
    entropy: randomness.Random
    missing = ""  # the kind of an exporter whose plugin the worker cannot load


MACHINE = Machine()
_get_ident = threading.get_ident


def _alive(kind: str, seconds: float = QUICK) -> bool:
    """Whether the code that runs is simulated."""
    kernel = kernels.KERNEL
    if kernel is None or kernel.process is None:
        return False
    kernel.call(kind, kernel.random.random() * seconds if kernel.thread is not None else 0.0)
    return True


def _path(path: Any) -> str:
    """A path as the disk knows it: relative to the working directory."""
    text: str = path if isinstance(path, str) else os.fspath(path)
    return text.removeprefix(MACHINE.here) if isinstance(text, str) else ""


def _ours(path: Any) -> bool:
    disk = MACHINE.disk
    return disk is not None and not isinstance(path, int) and _path(path).startswith(disk.root)


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if dir_fd is None and _ours(path):
        _alive("open")
        assert MACHINE.disk is not None
        fd = MACHINE.disk.do_open(_path(path), flags, mode)
    else:
        fd = REAL["open"](path, flags, mode, dir_fd=dir_fd)
    process = kernels.KERNEL.process if kernels.KERNEL is not None else None
    if process is not None:
        process.files.add(fd)
    return fd


def _close(fd: int) -> None:
    kernel = kernels.KERNEL
    if kernel is not None and kernel.process is not None:
        process = kernel.process
        if process.dead:
            raise Killed("close")
        process.files.discard(fd)
    if MACHINE.disk is not None:
        MACHINE.disk.open.pop(fd, None)
    REAL["close"](fd)


def close_all(process: Process) -> None:
    """The files of a dead process are closed."""
    for fd in process.files:
        if MACHINE.disk is not None:
            MACHINE.disk.open.pop(fd, None)
        with contextlib.suppress(OSError):
            REAL["close"](fd)
    process.files.clear()


def _dup(fd: int) -> int:
    fresh: int = REAL["dup"](fd)
    if MACHINE.disk is not None and fd in MACHINE.disk.open:
        MACHINE.disk.open[fresh] = MACHINE.disk.open[fd]
    if kernels.KERNEL is not None and kernels.KERNEL.process is not None:
        kernels.KERNEL.process.files.add(fresh)
    return fresh


def _noted(fd: int) -> bool:
    return MACHINE.disk is not None and fd in MACHINE.disk.open


def _pwrite(fd: int, data: Any, offset: int) -> int:
    if not _noted(fd):
        return int(REAL["pwrite"](fd, data, offset))
    _alive("write")
    assert MACHINE.disk is not None
    content = bytes(data)
    kernel = kernels.kernel()
    process = kernel.process
    if process is not None and process.calls_left == 0 and len(content) > 1:
        # Killed in the middle: Linux looks for a signal after each page that it has copied.
        pages = range(-offset % PAGE, len(content), PAGE)
        content = content[: kernel.random.choice((0, *pages))] or content
    return MACHINE.disk.do_write(fd, content, offset)


def _pwritev(fd: int, parts: Any, offset: int, flags: int = 0) -> int:
    return _pwrite(fd, b"".join(parts), offset)


def _write(fd: int, data: Any) -> int:
    if not _noted(fd):
        return int(REAL["write"](fd, data))
    at = REAL["lseek"](fd, 0, os.SEEK_CUR)
    done = _pwrite(fd, data, at)
    REAL["lseek"](fd, at + done, os.SEEK_SET)
    return done


def _sync(fd: int) -> None:
    if _noted(fd):
        disk, kernel = MACHINE.disk, kernels.kernel()
        assert disk is not None
        upto = disk.begin_sync(fd)
        if disk.is_slow(fd):
            with disk.syncs_slowly(lambda: kernel.now):
                _alive("sync", disk.slow)
        else:
            _alive("sync", SLOW)
        disk.do_sync(fd, upto)


def _ftruncate(fd: int, size: int) -> None:
    if not _noted(fd):
        REAL["ftruncate"](fd, size)
        return
    _alive("truncate")
    assert MACHINE.disk is not None
    MACHINE.disk.do_truncate(fd, size)


def _flock(fd: int, operation: int) -> None:
    """Wait for a lock as for one of a thread: who holds it must be able to go on."""
    kernel = kernels.KERNEL
    if not _noted(fd) or operation & (fcntl.LOCK_NB | fcntl.LOCK_UN) or kernel is None:
        _real_flock(fd, operation)
        return
    while True:
        kernel.check_alive()
        try:
            _real_flock(fd, operation | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if kernel.thread is None:
                kernel.step_thread()
            else:
                kernel.thread.pause(QUICK)


def _fadvise(fd: int, offset: int, size: int, advice: int) -> None:
    if _noted(fd) and advice == os.POSIX_FADV_DONTNEED:
        assert MACHINE.disk is not None
        MACHINE.disk.do_drop_cache(fd)


def _rename(source: Any, target: Any, **more: Any) -> None:
    if not _ours(source):
        REAL["rename"](source, target, **more)
        return
    _alive("rename")
    assert MACHINE.disk is not None
    MACHINE.disk.do_rename(_path(source), _path(target))


def _named(name: str) -> Callable[..., None]:
    """The call of this name, which takes a path, and perhaps a mode."""
    real = REAL[name]

    def call(path: Any, *mode: int, dir_fd: int | None = None, **more: int) -> None:
        if dir_fd is not None or not _ours(path):
            real(path, *mode, dir_fd=dir_fd, **more)
            return
        _alive(name)
        getattr(MACHINE.disk, f"do_{name}")(_path(path), *mode, **more)

    return call


_unlink, _mkdir, _rmdir = _named("unlink"), _named("mkdir"), _named("rmdir")


def _symlink(source: Any, target: Any, *more: Any, **others: Any) -> None:
    if not _ours(target):
        REAL["symlink"](source, target, *more, **others)
        return
    _alive("symlink")
    assert MACHINE.disk is not None
    MACHINE.disk.do_symlink(_path(source), _path(target))


def _statvfs(path: Any) -> Any:
    found = REAL["statvfs"](path)
    if MACHINE.disk is not None and MACHINE.disk.full and _ours(path):
        return os.statvfs_result((*found[:3], 0, 0, *found[5:]))
    return found


def _rmtree(path: Any, ignore_errors: bool = False, onerror: Any = None, **more: Any) -> None:
    if not _ours(path):
        _real_rmtree(path, ignore_errors, onerror, **more)
        return
    try:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                _rmtree(entry.path, ignore_errors)
            else:
                _unlink(entry.path)
        _rmdir(path)
    except OSError:
        if not ignore_errors:
            raise


_real_rmtree = shutil.rmtree


def _exit(status: int) -> None:
    kernel = kernels.KERNEL
    if kernel is None or kernel.process is None:
        os.abort()
    process = kernel.process
    kernel.later(0.0, None, kernel.kill, process, status)
    raise Killed("exit")


def _monotonic() -> float:
    return kernels.KERNEL.now if kernels.KERNEL is not None else _real_monotonic()


_real_monotonic = time.monotonic
_real_time_ns = time.time_ns
_real_sleep = time.sleep
_real_urandom = os.urandom


def wall_ns() -> int:
    """Unix time in ns. Only the clock of the gateway is ever wrong, not that of the cloud."""
    kernel = kernels.KERNEL
    if kernel is None:
        return _real_time_ns()
    return int(((CLOUD if kernel.process is None else MACHINE.wall) + kernel.now) * 1e9)


def _sleep(seconds: float) -> None:
    if kernels.KERNEL is None:
        _real_sleep(seconds)
    else:
        kernels.sleep(seconds)


def _urandom(size: int) -> bytes:
    return MACHINE.entropy.randbytes(size) if kernels.KERNEL is not None else _real_urandom(size)


def _ident() -> int:
    kernel = kernels.KERNEL
    if kernel is not None and kernel.thread is not None and kernel.thread.ident is not None:
        return kernel.thread.ident
    return _get_ident()


def _socketpair(*_: Any) -> tuple[loops.Socket, loops.Socket]:
    return loops.Socket.pair(kernels.kernel())


def _eventfd(initial: int = 0, flags: int = 0) -> int:
    return loops.EventFd(kernels.kernel()).number


def _create_server(address: Any, **more: Any) -> loops.Listener:
    return loops.Listener(address[:2])


def _memfd(name: str, flags: int = 0) -> int:
    fd = _real_memfd(name, flags)
    process = kernels.kernel().process
    assert process is not None
    process.files.add(fd)
    return fd


def leave() -> None:
    """End this real process."""
    _real_exit(0)


_real_exit, real_freeze, real_collect = os._exit, gc.freeze, gc.collect
_real_memfd = os.memfd_create
_real_flock = fcntl.flock


def _call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
    """A line goes to the log of the process that writes it."""
    kernel = kernels.KERNEL
    process = kernel.process if kernel is not None else None
    if process is None:
        return
    for handler in process.handlers:
        if record.levelno >= handler.level:
            handler.handle(record)
    MACHINE.log(process, record)


def _add_handler(self: logging.Logger, handler: logging.Handler) -> None:
    kernel = kernels.KERNEL
    if kernel is not None and kernel.process is not None:
        kernel.process.handlers.append(handler)
    else:
        _real_add_handler(self, handler)


_real_add_handler = logging.Logger.addHandler


CHILDREN: list[Process] = []


def install() -> None:
    """Replace what the product calls. Only in a process that does nothing else."""
    loaded = [name for name in sys.modules if name == "bridge" or name.startswith("bridge.")]
    assert not loaded, loaded
    for name, made in {
        "open": _open, "close": _close, "dup": _dup, "pwrite": _pwrite, "pwritev": _pwritev, "write": _write,
        "fsync": _sync, "fdatasync": _sync, "ftruncate": _ftruncate, "rename": _rename, "replace": _rename,
        "unlink": _unlink, "remove": _unlink, "mkdir": _mkdir, "rmdir": _rmdir, "symlink": _symlink,
        "posix_fadvise": _fadvise, "statvfs": _statvfs,
        "_exit": _exit, "urandom": _urandom, "memfd_create": _memfd, "eventfd": _eventfd,
        "eventfd_write": lambda fd, count: loops.EventFd.by_number[fd].write(count),
        "eventfd_read": lambda fd: loops.EventFd.by_number[fd].read(),
    }.items():  # fmt: skip
        setattr(os, name, made)
    fcntl.flock = _flock
    shutil.rmtree = _rmtree  # type: ignore[assignment]
    time.monotonic, time.sleep = _monotonic, _sleep
    time.monotonic_ns = lambda: int(_monotonic() * 1e9)
    time.time_ns = wall_ns
    time.time = lambda: wall_ns() / 1e9
    threading.Thread = Thread  # type: ignore[misc,assignment]
    threading.Lock = Lock  # type: ignore[misc,assignment]
    threading.RLock = RLock  # type: ignore[misc,assignment]
    threading._allocate_lock = Lock  # type: ignore[attr-defined]
    threading.get_ident = _ident
    threading._get_ident = _ident  # type: ignore[attr-defined]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined,misc]
    select.poll = loops.Poll  # type: ignore[misc,assignment]
    socket.socketpair = _socketpair  # type: ignore[assignment]
    socket.create_server = _create_server  # type: ignore[assignment]
    gc.freeze = lambda: None  # type: ignore[assignment]
    gc.set_threshold = lambda *_: None  # type: ignore[assignment]
    gc.collect = lambda *_: 0  # type: ignore[assignment]
    logging.Logger.callHandlers = _call_handlers  # type: ignore[method-assign]
    logging.Logger.addHandler = _add_handler  # type: ignore[method-assign]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.logAsyncioTasks = False
    metadata.version = cache(metadata.version)  # it searches the path
    uuid.uuid4 = lambda: uuid.UUID(bytes=_urandom(16), version=4)
    secrets.randbits = lambda bits: MACHINE.entropy.getrandbits(bits)
    secrets.token_bytes = lambda size=32: _urandom(size)
    loops.CHILDREN.start = _start_child


def _start_child(parent: Process, arguments: list[str]) -> Process:
    """The export worker: its arguments end with the numbers of its socket and of its report."""
    from bridge.export.worker import Worker

    kernel = parent.kernel
    child = kernel.spawn("worker")
    child.at_exit.append(lambda: close_all(child))
    CHILDREN.append(child)
    connection = loops.Socket.by_number[int(arguments[-2])].inherited(child)

    def main() -> None:
        try:
            status = Worker(connection).run()  # type: ignore[arg-type]
        except Exception:  # as in its `main`
            logging.getLogger("bridge.export").exception("internal error; the export worker ends")
            status = 1
        kernel.later(0.0, None, kernel.kill, child, status)

    before = kernel.process, kernel.thread
    kernel.process, kernel.thread = child, None
    try:
        Thread(target=main, name="worker").start()
    finally:
        kernel.process, kernel.thread = before
    return child
