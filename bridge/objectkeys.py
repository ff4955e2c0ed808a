"""The names of exported objects: the contract between gateways and the ingest job.

A data object has exactly the messages first..last of one stream, except those that it declares as left out
(`bridge.filtered`). It is never overwritten with other content:

    <prefix>/gateway=<id>/stream=<escaped name>/epoch=<ms>/date=YYYY-MM-DD/hour=HH/<first>-<last>.<ext>

* `epoch` is the time at which the stream was created (Unix time in ms). If a stream is deleted and created
  again under the same name, it gets a new epoch, and its numbers start at 0 again. If the clock was not
  synchronised at that time, `epoch` is a random time in the 35 years that follow. So use it to tell streams
  apart, not as a time.
* `first` and `last` are sequence numbers, zero-padded to 20 digits, so keys sort by number.
* `date` and `hour` come from the ingest time (UTC) of the first message that was not left out, so a retry of
  the same batch has the same key.
* `ext` is `ndjson.gz` or `parquet`.

The object's user metadata has `rows-sha256`, the SHA-256 of its rows as uncompressed `ndjson`, in hex.

Each gateway also has one gateway report, `<prefix>/_gateway/<escaped id>.json`. It states how far the streams
go, and which numbers were dropped on purpose before they could be exported.

This module has no dependencies, because Spark executors import it too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote, unquote

REPORTS = "_gateway/"
MAX_SEQUENCE = 2**63 - 1
# Reasons in a gateway report (see `bridge.plugin.reports`): those that are losses, never joined with others;
# and the prefix of the reason of a joined range, before the number of its ranges.
LOSSES = ("damaged", "unknown")
JOINED = "joined:"

_KEY = re.compile(
    r"(?:^|/)gateway=([^/]+)/stream=([^/]+)/epoch=(\d{1,19})/date=(\d{4}-\d{2}-\d{2})/hour=(\d{2})"
    r"/(\d{20})-(\d{20})\.(ndjson\.gz|parquet)\Z",
    re.ASCII,
)
# A gateway may write only below its own folder: a key there that looks like another's data is not.
_OTHER = re.compile(r"(?:^|/)(?:gateway=|_gateway/)")


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The content of a data object according to its key."""

    gateway: str
    stream: str
    epoch: int
    first: int
    last: int
    date: str
    hour: int
    format: str


def escape(name: str) -> str:
    """Percent-escape the name of a gateway or a stream, for use as one level of a key or a path.

    ASCII letters, digits, `_`, `-` and all dots but a leading one are kept. The result is never `.` or `..`,
    and has no `/` and no `=`. `unquote` reverts it.
    """
    escaped = quote(name, safe="")
    return "%2E" + escaped[1:] if escaped.startswith(".") else escaped


def data_key(
    gateway: str, stream: str, epoch: int, first: int, last: int, ingest_ms: int, extension: str
) -> str:
    """The key, relative to the prefix, of the object that holds first..last.

    `ingest_ms` is the ingest time of its first message, Unix time in ms.
    """
    return f"{hour_prefix(gateway, stream, epoch, ingest_ms)}{first:020d}-{last:020d}.{extension}"


def folder_prefix(gateway: str) -> str:
    """The prefix of all data objects of a gateway, relative to that of the export."""
    return f"gateway={escape(gateway)}/"


def epoch_prefix(gateway: str, stream: str, epoch: int) -> str:
    """The prefix of all data objects of one stream."""
    return f"{folder_prefix(gateway)}stream={escape(stream)}/epoch={epoch}/"


def hour_prefix(gateway: str, stream: str, epoch: int, ingest_ms: int) -> str:
    """The prefix of those data objects whose first message came in the same hour."""
    when = datetime.fromtimestamp(ingest_ms / 1000, UTC)
    return f"{epoch_prefix(gateway, stream, epoch)}date={when:%Y-%m-%d}/hour={when:%H}/"


def report_key(gateway: str) -> str:
    """The key, relative to the prefix, of the gateway report."""
    return f"{REPORTS}{escape(gateway)}.json"


def parse_key(key: str) -> ObjectKey | None:
    """Parse a data object's key; None for any other key."""
    match = _KEY.search(key)
    if match is None or _OTHER.search(key, 0, match.start(1) - len("gateway=")):
        return None
    gateway, stream, epoch, date, hour, first, last, extension = match.groups()
    low, high = int(first), int(last)
    if low > high or high > MAX_SEQUENCE or int(hour) > 23:
        return None
    return ObjectKey(unquote(gateway), unquote(stream), int(epoch), low, high, date, int(hour), extension)
