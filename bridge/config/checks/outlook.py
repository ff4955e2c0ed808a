"""What happens to each declared stream at a power cut, when full, and when nothing is delivered for a day.

The rate and the size of the messages are the operator's guess. The size of a stream is computed from the file
format, with each message in a frame of its own, as at low rates.
"""

from __future__ import annotations

from msgspec import Struct

from bridge.model import Limits, MessageStreamDefinition, StrategyOnFull
from bridge.operations.definitions import power_cut
from bridge.streams.segment import FRAME, RECORD_OVERHEAD
from bridge.units import format_duration, format_size

DAY = 86_400  # seconds
TOPIC = 32  # bytes


class Outlook(Struct, frozen=True, rename="camel"):
    """One stream, in words. Without exports, nothing is said of an outage.

    `lasts` is the number of seconds after which it drops or rejects messages while nothing is delivered.
    """

    name: str
    when_full: str
    outage: str
    power_cut: str
    lasts: int


def outlook(stream: MessageStreamDefinition, rate: float, size: int, sync_interval: int) -> Outlook:
    """Return the outlook of a stream at `rate` messages per second of `size` bytes.

    `sync_interval` is the gateway's, in ms.
    """
    raws = [raw for configs in stream.export_definition.values() for raw in configs]
    exports = [str(raw.get("identifier")) for raw in raws if not raw.get("disabled")]
    limits, stored = stream.limits or Limits(), size + TOPIC + RECORD_OVERHEAD + FRAME.size
    by_bytes = limits.max_bytes and limits.max_bytes // (size + TOPIC)
    ages = [age for age in (stream.time_to_live_millis, limits.max_age_millis) if age]
    numbers = [number for number in (stream.max_size // stored, limits.max_messages, by_bytes) if number]
    lasts = min([min(numbers, default=0) / rate, *(age / 1000 for age in ages)])
    overwrites = stream.strategy_on_full is StrategyOnFull.OverwriteOldestData
    drops = overwrites or bool(ages or (limits.discard == "old" and len(numbers) > 1))
    if overwrites:
        full = "overwrites its oldest messages" + (", exported or not" if exports else "")
    elif stream.retention == "exported" and exports:
        full = (
            f"frees what {' and '.join(exports)} delivered; only if that is not enough, rejects new messages"
        )
    else:
        why = "no enabled export frees messages; time_to_live, [limits], OverwriteOldestData or a purge does"
        if stream.retention == "limits":
            why = 'retention = "limits" frees nothing that was exported; retention = "exported" does'
        full = f"rejects new messages {'until older ones expire' if drops else 'for good'}: {why}"
    needed, outage = int(DAY * rate * stored), ""
    if exports and lasts >= DAY:
        outage = f"holds a day without the link ({format_size(needed)} of {format_size(stream.max_size)})"
    elif exports:
        then = "loses its oldest messages" if drops else "rejects new messages"
        outage = f"without the link, after {format_duration(int(lasts * 1000))} it {then}"
        if needed > stream.max_size:
            outage += f'; a day takes max_size = "{format_size(needed).replace(" ", "")}"'
    return Outlook(stream.name, full, outage, power_cut(stream, sync_interval), int(lasts))
