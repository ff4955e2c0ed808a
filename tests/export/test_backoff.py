"""How long a failed export waits, second by second: growth, bounds, outages of the link, changed files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridge.export.backoff import LONGEST_ASKED, LOOK, OUTAGE_PARTS, Backoff

FIRST, LONGEST = 1.0, 60.0


class Failing:
    """A backoff with a clock of its own."""

    def __init__(self, *files: Path) -> None:
        self.now = 1000.0
        self.backoff = Backoff(FIRST, LONGEST, lambda: self.now)
        self.backoff.files = [str(file) for file in files]
        assert self.backoff.attempt()

    def fail(self, *, cut: bool = False, after: float | None = None) -> float:
        """Fail once; return the wait. Moves the clock to its end, and makes an attempt there."""
        wait = self.backoff.failed(after, cut=cut)
        assert self.backoff.until == pytest.approx(self.now + wait)
        self.pass_until(self.backoff.until)
        return wait

    def pass_until(self, time: float) -> None:
        """No attempt is made before a time, and one is then."""
        while self.now < time:
            assert not self.backoff.attempt()
            assert self.now < self.backoff.due <= time
            self.now = self.backoff.due
        assert self.backoff.attempt()


@pytest.mark.parametrize("files", [False, True])
def test_waits_double_up_to_the_longest_and_begin_anew_when_a_part_arrives(
    tmp_path: Path, files: bool
) -> None:
    export = Failing(*([tmp_path / "secret"] if files else []))
    for _ in range(3):
        for number in range(12):
            bound = min(FIRST * 2**number, LONGEST)
            assert bound / 2 <= export.fail() <= bound
            assert export.backoff.attempts == number + 1
        export.backoff.progressed()
        assert export.backoff.attempts == 0


def test_many_waits_of_one_length_are_spread() -> None:
    waits = [Failing().fail() for _ in range(100)]
    assert max(waits) - min(waits) > FIRST / 4


def test_in_an_outage_of_the_link_a_wait_is_a_share_of_its_length_and_a_busy_server_is_asked_soon() -> None:
    export = Failing()
    began = export.now
    for _ in range(60):
        down = export.now - began
        assert export.fail(cut=True) <= min(LONGEST, max(FIRST, down / OUTAGE_PARTS))
        assert export.backoff.is_down
    assert export.fail(cut=True) > 2 * FIRST, "an hour of outage is not asked every second"
    assert export.fail() <= FIRST, "the first refusal by the server"
    assert not export.backoff.is_down
    assert FIRST <= export.fail() <= 2 * FIRST
    assert export.fail(cut=True) <= FIRST, "an outage that has just begun"
    export.backoff.recovered()
    assert (export.backoff.is_down, export.backoff.attempts) == (False, 0)
    export.now += 10_000
    for _ in range(3):
        assert export.fail(cut=True) <= FIRST, "another outage"
    assert export.fail(cut=False) <= FIRST


@pytest.mark.parametrize("cut", [False, True])
def test_a_wait_that_is_asked_for_is_kept_up_to_a_day(cut: bool) -> None:
    export = Failing()
    assert export.fail(cut=cut, after=500.0) == 500.0
    assert export.fail(cut=cut, after=10 * LONGEST_ASKED) == LONGEST_ASKED == 24 * 3600
    assert export.fail(cut=cut, after=0.001) >= FIRST / 2


@pytest.mark.parametrize("change", ["written", "created", "replaced", "deleted"])
def test_a_secret_file_that_changes_ends_a_long_wait_within_two_seconds_and_once(
    tmp_path: Path, change: str
) -> None:
    file, other = tmp_path / "secret", tmp_path / "other"
    if change != "created":
        file.write_text("old")
    export = Failing(other, file)
    export.backoff.failed(3600.0, cut=False)
    for _ in range(5):
        export.now += LOOK
        assert not export.backoff.attempt()
        assert export.backoff.due == export.now + LOOK == export.now + 2
    if change == "replaced":
        other_file = tmp_path / "new"
        other_file.write_text("old")
        other_file.replace(file)
    elif change == "deleted":
        file.unlink()
    else:
        file.write_text("new")
        os.utime(file, ns=(7, 7))  # at another time, however coarse the times of the file system are
    assert not export.backoff.attempt()
    export.now += LOOK
    assert export.backoff.attempt()
    export.backoff.failed(3600.0, cut=False)
    export.pass_until(export.now + 3600)
    export.backoff.failed(3600.0, cut=False)
    export.backoff.hold(100.0)  # as after the end of a worker
    file.write_text("newer still")
    export.now += 99
    assert not export.backoff.attempt()
    export.now += 1
    assert export.backoff.attempt()
