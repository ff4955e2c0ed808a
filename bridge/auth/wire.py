"""The messages between `Auth` and its child process; each is a frame of `bridge.frames`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from bridge.plugin.auth import Accepted, Denied, Login, Question


class Message(Struct, frozen=True, array_like=True, tag=True):
    """The base of all messages."""


class Hello(Message, frozen=True, array_like=True, tag=True):
    """To the child, first: the plugins to ask, with their options, in this order."""

    plugin_dirs: list[Path]
    plugins: dict[str, dict[str, Any]]
    threads: int
    level: str  # of the log


class Ask(Message, frozen=True, array_like=True, tag=True):
    """To the child: a question."""

    number: int
    login: Login | None
    topic: Question | None
    until: float  # by time.monotonic, which is the same in all processes; nobody waits longer


class Ready(Message, frozen=True, array_like=True, tag=True):
    """From the child: it is ready. `errors` has the plugins that cannot be asked."""

    errors: list[str]


class Answer(Message, frozen=True, array_like=True, tag=True):
    """From the child. `plugin` is the one that has answered, empty if none did; `error` is why one failed."""

    number: int
    plugin: str = ""
    verdict: Accepted | Denied | None = None
    allowed: bool | None = None
    error: str = ""


TO_WORKER = msgspec.msgpack.Decoder(Hello | Ask, dec_hook=lambda kind, value: kind(value))
FROM_WORKER = msgspec.msgpack.Decoder(Ready | Answer)
