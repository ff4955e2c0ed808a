"""The head object: what a gateway says of its streams, beside the data in S3.

Contract with the ingest job. Key: `objectkeys.report_key(gateway)` under the prefix. JSON:

    {"gateway": "gw-1",
     "updated": 1767225600000,                         Unix time in ms
     "streams": [
       {"stream": "plant",                             its name, not escaped
        "epoch": 1767222000000,                        as in the keys of its objects
        "oldest": 0,                                   oldest number still on the gateway
        "newest": 1041,                                newest committed number; -1 if none ever was
        "exported": 999,                               all numbers up to here are uploaded or in `dropped`
        "dropped": [[17, 20, "overwritten"], ...]}]}   never uploaded: [first, last, reason], ascending

* `dropped` is complete up to `exported`: a number up to `exported` that is in no object and in no range
  of `dropped` was lost after its upload. The newest thousand ranges are exact. Older ones may be joined
  over what was uploaded between them, with the reason `joined:<count>`: so many numbers of the range were
  dropped, for legal reasons. If more of them are in no object, some were lost after their upload, and
  which ones nobody knows: a reader must take all of them for lost.
* Reasons: `overwritten`, `expired`, `purged`, `limits`, `memory`, `skipped`, `exported` (freed after
  an earlier upload), `filtered` (by a plugin), `before_start` (before the export's
  `startSequenceNumber`), `joined:<count>`: all legal. `damaged` (stored bytes failed their check) and
  `unknown` (gone, and nobody knows why) are losses, and never joined.
* Numbers from `exported` + 1 to `newest` wait on the gateway.
* A range may be in `dropped` and in an object, when an upload's answer was lost and the messages
  were dropped before the next attempt: what is in an object counts. Where such ranges are joined, as many
  others could be lost there unnoticed; that takes both, and a range behind the newest thousand.
* A stream is listed as long as it exists on the gateway and is exported there. Several exports to one
  place are listed as the one that is furthest.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bridge.plugin.api import Progress


def head_document(gateway: str, updated: int, exports: Iterable[Progress]) -> bytes:
    """The head object's content."""
    furthest: dict[tuple[str, int], Progress] = {}
    for export in exports:
        known = furthest.get((export.stream, export.epoch))
        if known is None or known.exported < export.exported:
            furthest[export.stream, export.epoch] = export
    return msgspec.json.encode(
        {
            "gateway": gateway,
            "updated": updated,
            "streams": [
                {
                    "stream": export.stream,
                    "epoch": export.epoch,
                    "oldest": export.oldest,
                    "newest": export.newest,
                    "exported": export.exported,
                    "dropped": export.skipped,
                }
                for _, export in sorted(furthest.items())
            ],
        }
    )
