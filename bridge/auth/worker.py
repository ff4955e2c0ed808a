"""The child process that asks plugins: `python -P -m bridge.auth.worker <socket fd>`.

It ends at once when the other end of the socket closes. SIGTERM and SIGINT, which a service manager or a
terminal sends to all processes, are for the service.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pluggy

from bridge import frames, logs, process
from bridge.auth import wire
from bridge.plugin import discovery
from bridge.plugin.auth import Accepted, Denied

ORPHANED = 3
_PR_SET_PDEATHSIG = 1

log = logging.getLogger("bridge.auth")


class Worker:
    """The plugins, and the threads that call them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._asked: queue.SimpleQueue[wire.Ask] = queue.SimpleQueue()
        self._hooks: dict[str, list[tuple[str, pluggy.HookImpl, Any]]] = {"authenticate": [], "authorize": []}

    def run(self) -> None:
        """Answer until the other end closes."""
        received = frames.Frames(wire.TO_WORKER)
        while data := self._connection.recv(64 * 1024):
            for message in received.feed(data):
                if isinstance(message, wire.Hello):
                    self._begin(message)
                else:
                    self._asked.put(message)
        os._exit(ORPHANED)

    def _begin(self, hello: wire.Hello) -> None:
        logs.setup(hello.level)
        registry = discovery.load(hello.plugin_dirs)
        errors = []
        for name, options in hello.plugins.items():
            try:
                kind = registry.auth_options[name]
                read = msgspec.convert(options, kind, dec_hook=lambda kind, value: kind(value))
            except (KeyError, msgspec.ValidationError) as error:
                errors.append(f"{name}: {error}")
                continue
            if mistakes := read.mistakes():
                errors.append(f"{name}: {'; '.join(mistakes)}")
                continue
            for hook, implementations in self._hooks.items():
                caller = getattr(registry.hook, hook)
                implementations += [
                    (name, one, read) for one in caller.get_hookimpls() if one.plugin_name == name
                ]
        for number in range(hello.threads):
            threading.Thread(target=self._work, name=f"auth-{number}", daemon=True).start()
        self._send(wire.Ready(errors))

    def _work(self) -> None:
        while True:
            ask = self._asked.get()
            if time.monotonic() < ask.until:
                self._send(_sound(self._answer(ask)))

    def _answer(self, ask: wire.Ask) -> wire.Answer:
        """Return the first answer of a plugin; the error of a plugin that fails counts as a refusal."""
        hook, asked = ("authenticate", "login") if ask.login is not None else ("authorize", "question")
        values: dict[str, Any] = {asked: ask.login if ask.login is not None else ask.topic}
        for name, implementation, options in self._hooks[hook]:
            values["options"] = options
            try:
                said = implementation.function(*(values[each] for each in implementation.argnames))
            except BaseException as error:  # even SystemExit, which would end the thread
                return wire.Answer(ask.number, name, error=f"{hook} failed: {error!r:.300}")
            if said is None:
                continue
            if ask.login is not None and isinstance(said, (Accepted, Denied)):
                return wire.Answer(ask.number, name, verdict=said)
            if ask.login is None and isinstance(said, bool):
                return wire.Answer(ask.number, name, allowed=said)
            return wire.Answer(ask.number, name, error=f"{hook} returned {said!r:.100}")
        return wire.Answer(ask.number)

    def _send(self, message: wire.Message) -> None:
        try:
            with self._sending:
                self._connection.sendall(frames.encode(message))
        except OSError:
            os._exit(ORPHANED)


def _sound(answer: wire.Answer) -> wire.Answer:
    """Make an answer that the service can read, whatever a plugin has put into a verdict."""
    try:
        wire.FROM_WORKER.decode(frames.encode(answer)[4:])
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError, OverflowError) as error:
        return wire.Answer(answer.number, answer.plugin, error=f"a verdict that is none: {error!s:.200}")
    return answer


def main() -> None:
    """Run the process on the file descriptor given by the service."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # a sandbox may forbid it; the closed socket usually suffices
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    process.lower_priority()  # ingest comes first on a small machine
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    Worker(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
