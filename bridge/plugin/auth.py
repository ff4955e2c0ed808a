"""Logins and rights that plugins decide: the arguments and results of `authenticate` and `authorize`.

A plugin with such a hook may have a class `Options`, which inherits `AuthOptions`. Its fields are the keys of
`[auth.plugins.NAME]`, where NAME is the plugin's. Only plugins with such a table are asked.
`Options.__post_init__` may raise ValueError with the key in backticks: `streambridge check` and
a reload report it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from msgspec import Struct


class AuthOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a plugin that has none; inherit it to add some."""

    def mistakes(self) -> list[str]:
        """What keeps the plugin from working on this machine, such as a missing file.

        Each mistake begins with its key in backticks. `streambridge check` and a reload call this. A plugin
        with mistakes is not asked, and the clients that it would know are refused.
        """
        return []

    def files(self) -> list[Path]:
        """The files that decisions depend on.

        The service notices when one changes, and calls `mistakes` and `bases` again.
        """
        return []

    def bases(self) -> Collection[str]:
        """What the plugin accepts logins by now, as in `Accepted.basis`.

        The service calls this at its start and at a reload, and ends the connections that were accepted by
        anything else. If it raises an exception, those of the last call hold.
        """
        return ("",)


class Login(Struct, frozen=True, kw_only=True):
    """A client that wants to log in. `user` and `password` are None if it sends none."""

    client_id: str
    user: str | None
    password: bytes | None
    address: str


class Accepted(Struct, frozen=True, kw_only=True, tag=True):
    """The client is this user. At `expires`, in seconds of Unix time, its connection is closed.

    `basis` names what the decision rests on and what may be withdrawn, such as the key of a token. The
    connection ends when `AuthOptions.bases` no longer contains it. It is not secret, and may have any length.
    """

    user: str
    expires: float | None = None
    basis: str = ""


class Denied(Struct, frozen=True, kw_only=True, tag=True):
    """The client is refused. `why` is for the log; the client does not get it."""

    why: str


class Question(Struct, frozen=True, kw_only=True):
    """Whether a client may publish on a topic, or subscribe to a topic filter."""

    client_id: str
    user: str | None
    address: str
    action: Literal["publish", "subscribe"]
    topic: str
