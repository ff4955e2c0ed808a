"""What clients may create: streams, exports and memory streams, per definition, per user and in all.

A stream counts for the user that created it, or for the address of a client without a user name. What the
configuration declares, and what the command line creates, counts in all and is never refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import LimitReached
from bridge.model import MIB, MessageStreamDefinition, Persistence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bridge.access.rules import Identity
    from bridge.operations.manager import StreamManager


class Bounds(NamedTuple):
    """The bounds, by the names that refusals give. Exports include consumers; sizes are in bytes."""

    streams: int = 10_000
    streams_per_user: int = 1_000
    exports: int = 20_000
    exports_per_user: int = 2_000
    exports_per_stream: int = 100
    memory_stream_bytes: int = 1024 * MIB
    memory_stream_bytes_per_user: int = 2048 * MIB


def owner_of(caller: Identity) -> str:
    """Return whose stream it is that a caller creates; empty for one that is trusted."""
    return "" if caller.trusted else str(caller.holder)


def check(
    bounds: Bounds,
    manager: StreamManager,
    caller: Identity,
    new: MessageStreamDefinition,
    old: MessageStreamDefinition | None,
) -> None:
    """Raise LimitReached if a definition, valid and about to apply, would pass a bound.

    What a definition had before is not refused, so one above a bound can still be changed.
    """
    if caller.trusted:
        return
    everything = manager.definitions.values()
    mine = owner_of(caller) if old is None else manager.stream(new.name).meta.owner
    own = [one for name, one in manager.definitions.items() if mine and manager.owner(name) == mine]

    def ensure(
        name: str,
        count: Callable[[MessageStreamDefinition], int],
        among: Iterable[MessageStreamDefinition],
    ) -> None:
        before = 0 if old is None else count(old)
        added = count(new) - before
        found = sum(map(count, among)) + added
        most: int = getattr(bounds, name)
        if added > 0 and found > most:
            raise LimitReached(
                f"stream {new.name!r}: {caller.label} would pass the bound {name} = {most:,}, with "
                f"{found:,}; delete what is not needed, or declare the stream in the configuration"
            )

    itself = () if old is None else (old,)
    ensure("exports_per_stream", _exports, itself)
    ensure("memory_stream_bytes", _memory, itself)
    ensure("streams", _one, everything)
    ensure("exports", _exports, everything)
    if mine:
        ensure("streams_per_user", _one, own)
        ensure("exports_per_user", _exports, own)
        ensure("memory_stream_bytes_per_user", _memory, own)


def _one(_definition: MessageStreamDefinition) -> int:
    return 1


def _exports(definition: MessageStreamDefinition) -> int:
    return sum(map(len, definition.export_definition.values()))


def _memory(definition: MessageStreamDefinition) -> int:
    return definition.max_size if definition.persistence is Persistence.Memory else 0
