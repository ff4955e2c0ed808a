"""The three protocols are explored exhaustively, and each of their steps is shown to be necessary."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest

from . import commit, export, ingest
from .commit import BOTH, Commit, Kind
from .explorer import Explored, Invariant, Model, Transition, Violation, explore, never_taken
from .export import Exports
from .ingest import BAD, GOOD, OTHER, TAIL, Ingest

ONE_A, ONE_BOTH = Kind(1, (0,)), Kind(1, BOTH)
TWO_A, TWO_B, TWO_BOTH = Kind(2, (0,)), Kind(2, (1,)), Kind(2, BOTH)
MIXED = (TWO_BOTH, ONE_A, TWO_A)
FLUSH, HALF, PLAIN = (True, True), (True, False), (False, False)
MODELS: tuple[Model[Any], ...] = (Commit(MIXED, flush=FLUSH), Exports(), Ingest())
STUCK = "the protocol can always complete"


def explored(model: Model[Any], crashes: int, **limits: int) -> Explored:
    """Explore, and print the size of the model (pytest -rP)."""
    found = explore(model, crashes, **limits)
    print(f"{found.states:,} states, {found.steps:,} steps, the furthest {found.depth} steps from the start")
    return found


# -- they hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "crashes"),
    [
        pytest.param(Commit(MIXED, flush=FLUSH, failures=0, cleans=False), 2, id="synced"),
        pytest.param(Commit(MIXED, flush=PLAIN, failures=0, cleans=False), 2, id="not_synced"),
        pytest.param(Commit(MIXED, flush=HALF, failures=1, cleans=False), 1, id="with_failures"),
        pytest.param(Commit((TWO_A, TWO_A), ids=(1, 1), flush=FLUSH, failures=2), 2, id="clean_session"),
        pytest.param(
            Commit((TWO_BOTH, TWO_BOTH), ids=(1, 1), flush=FLUSH, failures=2, cleans=False, refuses=True),
            1,
            id="refused",
        ),
    ],
)
def test_the_commit_protocol_holds(model: Commit, crashes: int) -> None:
    explored(model, crashes)


@pytest.mark.parametrize(
    ("model", "crashes"),
    [
        pytest.param(Exports((2, 1), lost=0, limited=0), 2, id="two_streams"),
        pytest.param(Exports((2, 0)), 2, id="lost_answers_and_limits"),
        pytest.param(Exports((3, 0), lost=0, limited=0), 2, id="three_messages"),
        pytest.param(Exports((2, 0), newest_first=True), 2, id="newest_first"),
        pytest.param(Exports((2, 0), by_record=True, lost=0), 2, id="by_record"),
        pytest.param(Exports((3, 0), by_record=True, lost=0, limited=0), 1, id="by_record_three_messages"),
        pytest.param(Exports((3, 0), lost=0, newest_first=True), 1, id="newest_first_three_messages"),
    ],
)
def test_the_export_protocol_holds(model: Exports, crashes: int) -> None:
    explored(model, crashes)


@pytest.mark.parametrize(
    ("model", "crashes"),
    [
        pytest.param(Ingest((GOOD, TAIL, OTHER), deletions=0, lost=0), 2, id="two_drivers"),
        pytest.param(Ingest((GOOD, BAD, OTHER), drivers=1), 2, id="one_driver_bad_and_deleted_objects"),
    ],
)
def test_the_ingest_commit_holds(model: Ingest, crashes: int) -> None:
    explored(model, crashes)


@pytest.mark.slow(300)
@pytest.mark.parametrize(
    ("model", "crashes"),
    [
        pytest.param(Commit(MIXED, flush=FLUSH, cleans=False), 2, id="commit_synced"),
        pytest.param(Commit((TWO_A, ONE_A, TWO_A), flush=FLUSH), 2, id="commit_one_stream"),
        pytest.param(Commit((TWO_BOTH, ONE_BOTH, TWO_A), flush=HALF, failures=0), 2, id="commit_both"),
        pytest.param(Exports((2, 1), lost=1, limited=0), 2, id="export"),
        pytest.param(Ingest((GOOD, TAIL, OTHER), deletions=0), 2, id="ingest_two_drivers"),
        pytest.param(Ingest(drivers=1), 2, id="ingest_one_driver"),
    ],
)
def test_the_protocols_hold_with_everything_at_once(model: Model[Any], crashes: int) -> None:
    explored(model, crashes, most=3_000_000)


def test_every_transition_of_a_model_is_taken() -> None:
    small: list[tuple[Model[Any], list[Model[Any]]]] = [
        (MODELS[0], [Commit((TWO_A, TWO_A), ids=(1, 1), flush=FLUSH)]),
        (MODELS[1], [Exports((2, 0))]),
        (MODELS[2], [Ingest((GOOD, OTHER), drivers=1)]),
    ]
    for whole, parts in small:
        assert never_taken(whole, [explore(part, 1) for part in parts]) == []


# -- each step is needed -------------------------------------------------------------------------------

STORED = "an acknowledged message is in each of its streams"
ONCE = "a QoS 2 message is in a stream once"
ORDER = "messages are stored in the order in which they were sent"
STAYS = "a committed message keeps its number"
D, E, G = commit.Defect, export.Defect, ingest.Defect


def one_stream(defect: D, **options: Any) -> Commit:
    return Commit((TWO_A, ONE_A), flush=FLUSH, defect=defect, cleans=False, **options)


def reused_id(defect: D, **options: Any) -> Commit:
    return Commit((TWO_A, TWO_A), ids=(1, 1), flush=FLUSH, defect=defect, **options)


def both_streams(defect: D, **options: Any) -> Commit:
    return Commit((TWO_BOTH, TWO_A), flush=FLUSH, defect=defect, cleans=False, **options)


def refused(defect: D, **options: Any) -> Commit:
    more = {"failures": 2, "refuses": True, "cleans": False, **options}
    return Commit((TWO_BOTH, TWO_BOTH), ids=(1, 1), flush=FLUSH, defect=defect, **more)


def first_one(defect: D, **options: Any) -> Commit:
    return Commit((ONE_A,), flush=FLUSH, defect=defect, cleans=False, **options)


COMMIT: dict[D, tuple[Callable[..., Commit], dict[str, int], int, str]] = {
    D.EARLY: (first_one, {}, 1, STORED),
    D.ONE_OF_TWO: (both_streams, {}, 1, STORED),
    D.UNSYNCED: (first_one, {}, 1, STORED),
    D.SAME_FILE: (first_one, {}, 1, STORED),
    D.LEFT_BEHIND: (one_stream, {}, 1, STAYS),
    D.READS_ON: (both_streams, {}, 0, ORDER),
    D.ID_BEFORE_COMMIT: (one_stream, {}, 1, STORED),
    D.ID_OF_FAILED: (one_stream, {}, 0, STORED),
    D.TAKEOVER: (one_stream, {}, 0, STORED),
    D.EARLY_PUBCOMP: (reused_id, {}, 1, STORED),
    D.LATE_PUBCOMP: (reused_id, {}, 1, STORED),
    D.UNNOTED_END: (reused_id, {"failures": 2}, 1, STORED),
    D.NO_SEARCH: (one_stream, {}, 1, ONCE),
    D.SEARCH_ALL: (reused_id, {}, 1, STORED),
    D.POINT_TOO_FAR: (both_streams, {}, 1, ONCE),
    D.POINT_TOO_LATE: (one_stream, {}, 1, ONCE),
    D.PARTIAL: (both_streams, {}, 0, ONCE),
    D.PARTIAL_BY_ID: (refused, {}, 1, STORED),
    D.IDS_AFTER_CUT: (reused_id, {}, 1, STORED),
    D.UNSYNCED_DUPLICATE: (one_stream, {}, 2, STORED),
}

PASSED = "every number that a cursor on the disk has passed has arrived or is recorded as dropped"
NUMBER = "a number never stands for two messages"
EXPORT = {
    E.UNCOMMITTED: NUMBER,
    E.CURSOR_LATE: NUMBER,
    E.CURSOR_LEADS: PASSED,
    E.LOST_IS_DELIVERED: PASSED,
    E.OTHER_BOUNDARIES: "a batch keeps its boundaries until it is accepted",
    E.NO_FLOOR: NUMBER,
    E.TRIM_EARLY: "retention frees only messages that have arrived",
    E.UNRECORDED: PASSED,
    E.RECORD_LATE: PASSED,
    E.UNRESERVED: NUMBER,
    E.JUMPED: "no number below one that has arrived is skipped without a record",
}

ROWS, COVERS, VERDICT = (
    "a message is in the table once",
    "the state covers exactly what is in the table",
    "a verdict is true",
)
INGEST: dict[G, tuple[Ingest, int, str]] = {
    G.OVERLAP: (Ingest((GOOD, TAIL), drivers=1, defect=G.OVERLAP), 0, ROWS),
    G.FILES_FIRST: (Ingest((GOOD,), drivers=1, defect=G.FILES_FIRST), 1, COVERS),
    G.STATE_FIRST: (Ingest((GOOD,), drivers=1, defect=G.STATE_FIRST), 1, COVERS),
    G.BLIND: (Ingest((GOOD,), deletions=0, lost=0, defect=G.BLIND), 0, ROWS),
    G.DOCUMENT_LATE: (Ingest((GOOD, OTHER), drivers=1, defect=G.DOCUMENT_LATE), 1, STUCK),
    G.TWICE: (Ingest((GOOD,), drivers=1, defect=G.TWICE), 0, ROWS),
    G.DISCARDS: (Ingest((GOOD, OTHER), deletions=0, defect=G.DISCARDS), 0, COVERS),
    G.ORPHANS: (Ingest((GOOD,), drivers=1, defect=G.ORPHANS), 1, ROWS),
    G.BAD_TAKEN: (Ingest((GOOD, BAD), drivers=1, defect=G.BAD_TAKEN), 0, COVERS),
    G.BY_KEY: (Ingest((GOOD, BAD), drivers=1, deletions=0, lost=0, defect=G.BY_KEY), 0, VERDICT),
    G.GONE_WAITS: (Ingest((GOOD, OTHER), drivers=1, defect=G.GONE_WAITS), 0, VERDICT),
    G.LIST_FIRST: (Ingest((GOOD,), drivers=1, defect=G.LIST_FIRST), 0, VERDICT),
}


def sentence(defect: D | E | G) -> str:
    return str(defect.value)


def found(model: Model[Any], crashes: int) -> Violation:
    with pytest.raises(Violation) as caught:
        explore(model, crashes)
    print(caught.value)  # the story
    return caught.value


@pytest.mark.parametrize("defect", COMMIT, ids=sentence)
def test_it_is_found_in_the_commit_protocol_if(defect: D) -> None:
    make, options, crashes, broken = COMMIT[defect]
    assert found(make(defect, **options), crashes).broken == broken


@pytest.mark.parametrize("defect", EXPORT, ids=sentence)
def test_it_is_found_in_the_export_protocol_if(defect: E) -> None:
    by_record = defect is E.UNRESERVED
    model = Exports((2, 0), newest_first=defect is E.JUMPED, by_record=by_record, defect=defect)
    assert found(model, 1).broken == EXPORT[defect]


@pytest.mark.parametrize("defect", INGEST, ids=sentence)
def test_it_is_found_in_the_ingest_commit_if(defect: G) -> None:
    model, crashes, broken = INGEST[defect]
    assert found(model, crashes).broken == broken


def test_every_defect_of_a_model_is_looked_for() -> None:
    for defects, table in ((D, COMMIT), (E, EXPORT), (G, INGEST)):
        assert set(table) == set(defects) - {defects.NONE}


def test_every_invariant_can_fail() -> None:
    known = {one.says for model in MODELS for one in model.invariants}
    broken = {row[3] for row in COMMIT.values()} | {*EXPORT.values()} | {row[2] for row in INGEST.values()}
    assert broken <= known | {STUCK}
    # Another invariant is broken before these, so they are checked alone.
    alone: dict[str, Model[Any]] = {
        "rows in the table stay there": Ingest((GOOD, OTHER), deletions=0, defect=G.DISCARDS),
    }
    assert known - broken == alone.keys()
    for says, model in alone.items():
        model.invariants = tuple(one for one in model.invariants if one.says == says)
        assert found(model, 0).broken == says


# -- the models and the code ---------------------------------------------------------------------------


def is_there(code: str) -> bool:
    """Whether there is such a function, named as `module:Class.method`."""
    module, _, name = code.partition(":")
    try:
        attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def test_every_function_that_a_transition_stands_for_is_there() -> None:
    named = {code for model in MODELS for transition in model.transitions for code in transition.code}
    assert [code for code in sorted(named) if not is_there(code)] == [], (
        "was it renamed? then name it here as it is now"
    )


# -- the explorer --------------------------------------------------------------------------------------


class Counter:
    """Counts to three. A crash sets it back, with a defect to below zero."""

    def __init__(self, back: int, *, ends: int = 3) -> None:
        self.transitions = (
            Transition[int]("count", lambda n: [(f"from {n} to {n + 1}", n + 1)] if n < ends else []),
            Transition[int]("crash", lambda n: [("a crash", n - back)], crash=True),
        )
        self.invariants = (Invariant[int]("never below zero", "", lambda n: n >= 0),)

    def begins(self) -> list[int]:
        return [0]

    def is_over(self, state: int) -> bool:
        return state == 3


def test_the_explorer_visits_each_state_once_and_counts_crashes() -> None:
    found = explore(Counter(0), crashes=2)
    assert (found.states, found.depth) == (12, 5)  # 0..3, with none, one and two crashes
    assert found.taken == {"count": 9, "crash": 8}


def test_the_explorer_tells_a_shortest_story() -> None:
    with pytest.raises(Violation) as caught:
        explore(Counter(2), crashes=2)
    assert caught.value.story == ["begin", "a crash"]
    with pytest.raises(Violation) as caught:
        explore(Counter(0, ends=2), crashes=0)
    assert caught.value.broken == STUCK
    assert caught.value.story == ["begin"]


def test_the_explorer_gives_up_on_a_model_that_is_too_large() -> None:
    with pytest.raises(OverflowError):
        explore(Counter(0), crashes=2, most=11)
