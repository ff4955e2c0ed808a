"""Reads the results of a run: the records of the devices, the table, the logs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from benchmarks.soak.plan import Device
from benchmarks.soak.services import identify
from benchmarks.soak.verdict import Rows, Seen
from bridge.ingest.table import TableOptions, read

INTERNAL = re.compile(
    r"internal error|Traceback|Z critical |a task of the MQTT front end failed", re.IGNORECASE
)


def devices(path: Path) -> list[Seen]:
    """What the devices say."""
    found = []
    for one in json.loads(path.read_text()):
        device = Device(**{name: one[name] for name in Device.__dataclass_fields__})
        acknowledged = np.array(one["acknowledged"], dtype=np.int64)
        found.append(Seen(device, acknowledged, one["unfinished"], one["sessions_lost"]))
    return found


def rows(warehouse: Path) -> Rows:
    """The whole table, without what the verdict does not need."""
    columns = ["gateway", "stream", "epoch", "sequence_number", "payload"]
    table = read(TableOptions(warehouse=str(warehouse)), columns)
    names = list(zip(*(table[name].to_pylist() for name in columns[:3]), strict=True))
    streams = sorted(set(names))
    index = {name: number for number, name in enumerate(streams)}
    messages = np.array([identify(payload) for payload in table["payload"].to_pylist()], dtype=np.int64)
    messages = messages.reshape(-1, 2)
    return Rows(
        streams,
        np.array([index[name] for name in names], dtype=np.int64),
        table["sequence_number"].to_numpy(),
        messages[:, 0],
        messages[:, 1],
    )


def internal_errors(log: Path) -> list[str]:
    """Lines of a gateway's log that must never be there."""
    lines = log.read_text(errors="replace").splitlines()
    return [f"{log.name}: {line[:200]}" for line in lines if INTERNAL.search(line)]
