"""The gateway report: an object next to the data in S3 that lists the streams of a gateway.

It is part of the contract with the ingest job. Key: `objectkeys.report_key(gateway)` under the prefix. JSON:

    {"gateway": "gw-1",
     "updated": 1767225600000,                         Unix time in ms
     "version": "0.2.1",                               of streambridge; 0.2.0 does not write it
     "streams": [
       {"stream": "plant",                             its name, not escaped
        "epoch": 1767222000000,                        as in the keys of its objects
        "oldest": 0,                                   oldest number stored on the gateway
        "newest": 1041,                                newest committed number; -1 if none
        "exported": 999,                               all numbers up to here are uploaded or in `dropped`
       "ahead": [[1020, 1031], ...],                  these, too; only with `order = "newest first"`
       "dropped": [[17, 20, "overwritten"], ...]}]}   never uploaded: [first, last, reason], ascending

* `dropped` is complete up to `exported` and in the ranges of `ahead`: a number there that is in no object
  and in no range of `dropped` was lost after its upload. The newest thousand ranges are exact. Older ranges
  may be joined across uploaded numbers, with the reason `joined:<count>`: `count` numbers of the range were
  legitimately dropped. If more than `count` are in no object, some were lost after their upload. Nobody can
  tell which, so a reader must count all of them as lost.
* Reasons: `overwritten`, `expired`, `purged`, `limits`, `memory`, `skipped`, `exported` (freed after
  an earlier upload), `filtered` (left out by `topics`, `reduce` or a plugin, where no object covers the
  numbers: see `bridge.filtered`), `before_start` (before the export's `startSequenceNumber`),
  `joined:<count>`: all legitimate. `damaged` (stored bytes failed their check) and
  `unknown` (missing without a known reason) are losses, and never joined.
* Numbers from `exported` + 1 to `newest` are pending on the gateway, except those in `ahead`.
* `ahead` is present, perhaps empty, if newer messages may be uploaded before older ones. The exporter writes
  a report with it before it uploads the first object. Then numbers above `newest` that are missing between
  later objects may be pending; without `ahead`, they are lost. Versions up to 0.2.1 do not write it, and
  readers of those versions take numbers that are pending above `newest` for lost until the next report.
* A range may be both in `dropped` and in an object, if the answer to an upload was lost and the messages were
  dropped before the next attempt. Then the object counts. If such a range is joined, the same number of other
  losses in it could go unnoticed. This requires both events, in a range older than the newest thousand.
* A stream is listed while it exists on the gateway and is exported to this place. If several exports have the
  same place, the most advanced one is listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import msgspec

from bridge.plugin.api import Progress


def gateway_report(gateway: str, updated: int, exports: Iterable[Progress]) -> bytes:
    """Return the content of a gateway report; `updated` is Unix time in ms."""
    exports = list(exports)
    ranged = {(e.stream, e.epoch) for e in exports if e.config.newest_first or e.exported_ahead}
    most_advanced: dict[tuple[str, int], Progress] = {}
    for export in exports:
        known = most_advanced.get((export.stream, export.epoch))
        if known is None or known.exported < export.exported:
            most_advanced[export.stream, export.epoch] = export
    return msgspec.json.encode(
        {
            "gateway": gateway,
            "updated": updated,
            "version": _version(),
            "streams": [
                {
                    "stream": export.stream,
                    "epoch": export.epoch,
                    "oldest": export.oldest,
                    "newest": export.newest,
                    "exported": export.exported,
                    **({"ahead": export.exported_ahead} if stream in ranged else {}),
                    "dropped": export.skipped,
                }
                for stream, export in sorted(most_advanced.items())
            ],
        }
    )


@cache
def _version() -> str:
    try:
        return version("streambridge")
    except PackageNotFoundError:  # it runs from the sources, without an installation
        return "unknown"
