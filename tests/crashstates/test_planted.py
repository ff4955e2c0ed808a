"""A mistake in the order of writes, syncs and renames is found, whatever it is; without one, nothing is."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .explore import Result, explore
from .faults import acknowledged_first, renamed_first, without
from .filesystem import KILLED, MODELS, ORDERED, UNJOURNALED, WRITEBACK
from .record import AREAS, Recording, record

Record = Callable[[str], Recording]
Fault = Callable[[Recording], Recording]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A function that gives the recording of an area, made once."""
    if shutil.which("strace") is None:
        assert not os.environ.get("CI"), "strace is missing"
        pytest.skip("strace is missing: apt-get install strace")

    @cache
    def recorded_area(area: str) -> Recording:
        return record(area, Path(tmp_path_factory.mktemp("recorded")))

    return recorded_area


def look(recording: Recording, model: str, fault: Fault) -> Result:
    return explore(fault(recording), model, 60, seed=1, first=True)


def lacks(name: str, pattern: str, *, after: str = "", kept: int = 0) -> Fault:
    return lambda recording: without(recording, name, pattern, after=after, kept=kept)


SLOW = pytest.mark.slow(seconds=15)
SEGMENT = r"/synced/\d+\.seg$"
FAULTS: dict[str, tuple[str, str, Fault, str]] = {
    "a message is acknowledged without a sync": (
        "first start",
        ORDERED,
        lacks("fdatasync", SEGMENT),
        "acknowledged",
    ),
    "a message is acknowledged before the sync": (
        "first start",
        ORDERED,
        lambda recording: acknowledged_first(recording, SEGMENT),
        "acknowledged",
    ),
    "the name of a new segment is not synced": (
        "first start",
        UNJOURNALED,
        lacks("fsync", "/streams/synced$"),
        "acknowledged",
    ),
    "the name of a new stream is not synced": (
        "first start",
        UNJOURNALED,
        lacks("fsync", "/streams$"),
        "is gone",
    ),
    "the name of the directory of streams is not synced": (
        "first start",
        UNJOURNALED,
        lacks("fsync", "/data$"),
        "is gone",
    ),
    "a definition is not synced": (
        "first start",
        WRITEBACK,
        lacks("fdatasync", r"/meta\.[01]\.tmp$"),
        "not opened",
    ),
    "messages are not synced in the background": (
        "first start",
        ORDERED,
        lacks("fdatasync", r"/written/\d+\.seg$"),
        "acknowledged",
    ),
    "a purge is answered before it is synced": (
        "store",
        ORDERED,
        lacks("fdatasync", r"/synced/drops\.log$"),
        "purged, and back",
    ),
    "segments are removed before their drops are synced": (
        "store",
        ORDERED,
        lacks("fdatasync", r"/limited/drops\.log$"),
        "recorded as lost",
    ),
    "a deleted stream's new name is not synced": (
        "store",
        ORDERED,
        lacks("fsync", "/streams$", after=r"/\.deleted-"),
        "deleted, and back",
    ),
    "an export sends before its boundaries are synced": (
        "cursors",
        ORDERED,
        lacks("fdatasync", r"\.cursor$"),
        "was sent",
    ),
    "numbers are sent that no cursor on the disk has reserved": (
        "cursors",
        ORDERED,
        lacks("fdatasync", r"/loose/out\.cursor$", kept=3),
        "would be given again",
    ),
    "the name of a cursor is not synced": (
        "cursors",
        UNJOURNALED,
        lacks("fsync", "/exports/(synced|written)$"),
        "the cursor is lost",
    ),
    "the reasons for skipped numbers are not synced": (
        "cursors",
        ORDERED,
        lacks("fdatasync", r"\.skipped$"),
        "not accepted nor skipped",
    ),
    "the journal is not synced": (
        "journal",
        ORDERED,
        lacks("fdatasync", r"/sessions\.(journal|new)$"),
        "is gone",
    ),
    "a new journal's name is not synced": (
        "journal",
        UNJOURNALED,
        lacks("fsync", "/mqtt$", kept=1),
        "QoS 2",
    ),
    "a new journal is renamed before its sync": (
        "journal",
        ORDERED,
        lambda recording: renamed_first(recording, r"/sessions\.new$"),
        "is gone",
    ),
    "the journal is not written": ("journal", KILLED, lacks("write", r"/sessions\.journal$"), "is gone"),
}
FAST = 2  # of them are for every run


@pytest.mark.parametrize("model", [KILLED, ORDERED])
def test_a_first_start_that_is_cut_off_anywhere_loses_nothing(recorded: Record, model: str) -> None:
    result = explore(recorded("first start"), model, 60, seed=1)
    assert result.states > 30
    assert result.examples == []


@pytest.mark.parametrize(
    "fault",
    [*list(FAULTS)[:FAST], *(pytest.param(name, marks=SLOW) for name in list(FAULTS)[FAST:])],
)
def test_a_fault_is_found(recorded: Record, fault: str) -> None:
    area, model, planted, expected = FAULTS[fault]
    assert expected in "".join(look(recorded(area), model, planted).examples)


@pytest.mark.slow(seconds=55)
@pytest.mark.parametrize("area", AREAS)
def test_no_state_that_a_crash_may_leave_breaks_a_promise(recorded: Record, area: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    for model in MODELS:
        result = explore(recorded(area), model, 120, seed, service=model == ORDERED, every=8)
        assert result.examples == []
        assert result.states > 5
