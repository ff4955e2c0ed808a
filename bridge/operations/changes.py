"""Writes the log and the audit log of operations: who changed what, and who was refused.

`catalog` calls this for each operation, so no front end can forget it. A change is the difference between the
states of its stream before and after: definition, paused exports, oldest message.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

import msgspec

from bridge import audit
from bridge.errors import StreamBridgeError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct

    from bridge.access.rules import Identity
    from bridge.operations.catalog import Request
    from bridge.operations.manager import StreamManager

log = logging.getLogger("bridge.operations.catalog")  # the name that log lines have had


def refused(name: str, caller: Identity, on: str, error: Exception) -> None:
    """Record that a caller has no right to an operation."""
    _record(name, "refused", caller, on, why=str(error))


class Change:
    """An operation in progress; `result` is its result.

    `text` makes a sentence from the result. Without it, the operation changes nothing that is worth a line.
    """

    result: Struct | None = None

    def __init__(
        self,
        name: str,
        caller: Identity,
        manager: StreamManager,
        request: Request,
        text: Callable[[Any], str] | None,
    ) -> None:
        self._name, self._caller, self._manager, self._text = name, caller, manager, text
        self._request = request
        self._stream = request.stream if text is not None else ""

    def __enter__(self) -> Self:
        self._before = self._state()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._text is None:
            return
        if error is None:
            self._done(self._text(self.result))
        elif isinstance(error, (StreamBridgeError, OSError)):
            outcome: audit.Outcome = "refused" if isinstance(error, Unauthorized) else "failed"
            _record(self._name, outcome, self._caller, self._request.about, why=str(error))

    def _done(self, what: str) -> None:
        if self._stream:
            log.info("stream %s", what, extra={"stream": self._stream, "by": self._caller.label})
        else:
            log.info(what, extra={"on": self._request.about, "by": self._caller.label})
        before, after = self._before, self._state()
        keys = [key for key in before | after if before.get(key) != after.get(key)]
        _record(
            self._name,
            "ok",
            self._caller,
            self._request.about,
            why=what,
            before={key: before[key] for key in keys if key in before} or None,
            after={key: after[key] for key in keys if key in after} or None,
        )

    def _state(self) -> dict[str, Any]:
        """Return the state that an operation can change; empty without a stream or an audit log."""
        if self._text is None or not audit.active():
            return {}
        definition = self._manager.definitions.get(self._stream)
        stream = self._manager.store.streams.get(self._stream)
        if definition is None or stream is None:
            return {}
        found: dict[str, Any] = msgspec.to_builtins(definition)
        return found | {"paused": list(stream.meta.paused), "oldestSequenceNumber": stream.oldest}


def _record(name: str, outcome: audit.Outcome, caller: Identity, on: str, **more: Any) -> None:
    audit.record(
        name,
        outcome,
        origin=caller.origin,
        user=caller.user,
        client=caller.client_id or caller.label,
        on=on,
        **more,
    )
