"""What happens to each declared stream when it is full, and when its exports deliver nothing for a day.

The rate and the size of the messages are the operator's guess. The size of a stream is computed from the file
format, with each message in a frame of its own, as at low rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from bridge.model import MessageStreamDefinition, StrategyOnFull
from bridge.streams.segment import FRAME, RECORD_OVERHEAD
from bridge.units import format_duration, format_size

DAY = 86_400  # seconds
TOPIC = 32  # bytes


class Outlook(Struct, frozen=True, rename="camel"):
    """One stream. Without exports, nothing is said of an outage.

    `lasts` is the number of seconds after which it drops or rejects messages while nothing is delivered.
    """

    name: str
    when_full: str
    outage: str
    lasts: int


def outlooks(streams: Iterable[MessageStreamDefinition], rate: float, size: int) -> Iterator[Outlook]:
    """Yield an outlook for each stream at `rate` messages per second of `size` bytes."""
    for stream in streams:
        exports = [
            str(raw.get("identifier"))
            for configs in stream.export_definition.values()
            for raw in configs
            if not raw.get("disabled")
        ]
        lasts = _lasts(stream, rate, size)
        outage = _outage(stream, lasts, rate, size) if exports else ""
        yield Outlook(stream.name, _when_full(stream, exports), outage, int(lasts))


def _stored(size: int) -> int:
    return size + TOPIC + RECORD_OVERHEAD + FRAME.size


def _ages(stream: MessageStreamDefinition) -> list[int]:
    """Return the time limits, in ms."""
    ages = stream.time_to_live_millis, None if stream.limits is None else stream.limits.max_age_millis
    return [age for age in ages if age is not None]


def _drops_old(stream: MessageStreamDefinition) -> bool:
    """Return whether limits drop messages before the stream is full, perhaps."""
    limits = stream.limits
    by_number = limits is not None and limits.discard == "old" and (limits.max_messages or limits.max_bytes)
    return bool(by_number or _ages(stream))


def _lasts(stream: MessageStreamDefinition, rate: float, size: int) -> float:
    """Return after how many seconds the first limit is reached."""
    numbers = [stream.max_size // _stored(size)]
    if stream.limits is not None:
        numbers += [stream.limits.max_messages] if stream.limits.max_messages is not None else []
        numbers += [stream.limits.max_bytes // (size + TOPIC)] if stream.limits.max_bytes is not None else []
    return min([min(numbers) / rate, *(age / 1000 for age in _ages(stream))])


def _when_full(stream: MessageStreamDefinition, exports: list[str]) -> str:
    if stream.strategy_on_full is StrategyOnFull.OverwriteOldestData:
        return "overwrites its oldest messages" + (", exported or not" if exports else "")
    if stream.retention == "exported" and exports:
        return (
            f"frees what {' and '.join(exports)} delivered; only if that is not enough, rejects new messages"
        )
    if stream.retention == "exported":
        why = "no enabled export holds or frees messages"
        remedy = "time_to_live, [limits], OverwriteOldestData, an export or a purge makes room"
    else:
        why = 'retention = "limits" frees nothing that was exported'
        remedy = 'retention = "exported" does'
    until = "until older ones expire" if _drops_old(stream) else "for good"
    return f"rejects new messages {until}: {why}; {remedy}"


def _outage(stream: MessageStreamDefinition, lasts: float, rate: float, size: int) -> str:
    """Return what a day costs on which nothing is delivered."""
    needed = int(DAY * rate * _stored(size))
    if lasts >= DAY:
        return f"holds a day without the link ({format_size(needed)} of {format_size(stream.max_size)})"
    drops = stream.strategy_on_full is StrategyOnFull.OverwriteOldestData or _drops_old(stream)
    then = "loses its oldest messages" if drops else "rejects new messages"
    text = f"without the link, after {format_duration(int(lasts * 1000))} it {then}"
    if needed > stream.max_size:
        text += f"; a day takes max_size = {format_size(needed).replace(' ', '')!r}".replace("'", '"')
    return text
