"""The soak's verdict finds the faults that it is there for; a short soak holds, and fails when it must."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.soak import plan, verdict
from benchmarks.soak.plan import Device
from benchmarks.soak.verdict import Check, Rows, Sample, Seen

ROOT = Path(__file__).parent.parent
KILL = 1_000_000.0  # when Mosquitto was killed, s


def device(number: int, link: str = "tcp0", level: int = 4, qos: int = 1) -> Device:
    where = "yard/0" if link == "broker" else "plant/0"
    return Device(number, link, level, qos, 1.0, 80, f"{where}/device{number}")


DEVICES = [
    Seen(device(1, qos=1), np.arange(1, 11) * 1000),
    Seen(device(2, qos=2), np.arange(1, 11) * 1000),
    Seen(device(3, qos=0), np.zeros(10, dtype=np.int64)),
    Seen(device(4, link="broker"), np.arange(10) * 10_000 + int(KILL * 1000) - 91_000),
]
STREAMS = [(plan.EMBEDDED, "plant0", "7"), (plan.EXTERNAL, "yard0", "8")]
ENDS = {(plan.EMBEDDED, "plant0"): 30, (plan.EXTERNAL, "yard0"): 10}


def table(*changes: Callable[[list[list[int]]], Any]) -> Rows:
    """What the devices have sent, message by message in turns, after some changes."""
    made = [[0, 3 * n + d - 1, d, n] for n in range(10) for d in (1, 2, 3)]
    made += [[1, n, 4, n] for n in range(10)]
    for change in changes:
        change(made)
    return Rows(STREAMS, *np.array(made).T)


def at(stream: int, number: int) -> Callable[[list[list[int]]], int]:
    return lambda made: next(n for n, row in enumerate(made) if row[:2] == [stream, number])


def lose(stream: int, number: int) -> Callable[[list[list[int]]], Any]:
    return lambda made: made.pop(at(stream, number)(made))


def put(*row: int) -> Callable[[list[list[int]]], Any]:
    return lambda made: made.append(list(row))


def checks(
    devices: list[Seen], rows: Rows, ends: dict[tuple[str, str], int] | None = None
) -> dict[str, bool]:
    found: list[Check] = [
        verdict.all_acknowledged(devices),
        verdict.sessions_kept(devices),
        verdict.none_missing(devices, rows, [(KILL - 2, KILL)]),
        verdict.none_twice(rows),
        verdict.contiguous(rows, ENDS if ends is None else ends),
        verdict.once_at_qos_2(devices, rows),
        verdict.nothing_invented(devices, rows),
        verdict.in_order(devices, rows),
    ]
    return {check.what: check.good for check in found}


def failing(devices: list[Seen], rows: Rows, ends: dict[tuple[str, str], int] | None = None) -> set[str]:
    return {what for what, good in checks(devices, rows, ends).items() if not good}


MISSING = "every acknowledged message is in the table"
HOLE = "numbers are contiguous from 0"


def test_a_run_in_which_everything_holds_passes() -> None:
    assert failing(DEVICES, table()) == set()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lose(0, 12), {MISSING, HOLE}),
        (lose(0, 29), {HOLE}),  # of QoS 0: not promised, but its number is
        (lose(1, 5), {MISSING, HOLE}),
        (put(0, 12, 1, 4), {"no stored message is in the table twice"}),
        (put(0, 31, 1, 4), {HOLE}),
        (put(0, 30, 2, 4), {HOLE, "QoS 2 is stored once"}),
        (put(0, 30, 9, 0), {HOLE, "the table has no message that no device sent"}),
        (put(0, 30, 1, 10), {HOLE, "the table has no message that no device sent"}),
        (put(1, 10, 1, 4), {HOLE, "the table has no message that no device sent"}),
    ],
)
def test_a_planted_fault_is_found(change: Callable[[list[list[int]]], Any], found: set[str]) -> None:
    assert failing(DEVICES, table(change)) == found


def test_a_message_stored_again_after_a_lost_connection_is_no_fault_at_qos_1() -> None:
    assert failing(DEVICES, table(put(0, 30, 1, 4)), {**ENDS, (plan.EMBEDDED, "plant0"): 31}) == set()


def test_messages_stored_in_another_order_than_sent_are_found() -> None:
    def swap(made: list[list[int]]) -> None:
        a, b = at(0, 3)(made), at(0, 6)(made)
        made[a][3], made[b][3] = made[b][3], made[a][3]

    assert failing(DEVICES, table(swap)) == {"order of each device is kept"}


def test_only_what_mosquitto_acknowledged_just_before_its_kill_is_excused() -> None:
    assert failing(DEVICES, table(lose(1, 9)), {**ENDS, (plan.EXTERNAL, "yard0"): 9}) == set()
    assert failing(DEVICES, table(lose(1, 8))) == {MISSING, HOLE}


def test_devices_that_wait_in_vain_or_lose_their_session_are_found() -> None:
    never = DEVICES[0].acknowledged.copy()
    never[3] = 0
    waiting = dataclasses.replace(DEVICES[0], acknowledged=never)
    assert failing([waiting, *DEVICES[1:]], table()) == {"every device got all its acknowledgements"}
    lost = dataclasses.replace(DEVICES[0], sessions_lost=1)
    assert failing([lost, *DEVICES[1:]], table()) == {"no persistent session was forgotten"}
    assert verdict.all_acknowledged([]).good is False


def test_a_message_that_never_arrived_at_a_service_is_found() -> None:
    arrived = {1: [1] * 10, 2: [1] * 9 + [2], 3: [1] * 10}
    assert verdict.delivered("kinesis", table(), arrived).good
    arrived[3][5] = 0
    assert not verdict.delivered("kinesis", table(), arrived).good
    assert not verdict.delivered("kinesis", table(), {}).good
    assert not verdict.delivered("http", Rows([], *np.zeros((4, 0), dtype=int)), {}).good


def test_an_app_that_reads_something_else_than_it_appended_is_found() -> None:
    assert verdict.read_back(3, [0, 1, 2], []).good
    for read in ([0, 1], [0, 2, 1], [0, 1, 1, 2], [0, 1, 2, 3]):
        assert not verdict.read_back(3, read, []).good
    assert not verdict.read_back(3, [0, 1, 2], ["repeated message 1: number 2, not 1"]).good
    assert not verdict.read_back(0, [], []).good


def test_a_stream_that_does_not_keep_to_its_limits_is_found() -> None:
    each = plan.KEPT_PER_TOPIC
    assert verdict.limited(["a"] * each + ["b"]).good
    assert verdict.limited([str(n) for n in range(plan.KEPT)]).good
    assert not verdict.limited([]).good
    assert not verdict.limited(["a"] * (each + 1)).good
    assert not verdict.limited([str(n) for n in range(plan.KEPT + 1)]).good
    assert not verdict.limited(["a"] * (each - 1)).good


def test_a_new_password_that_ends_no_connection_is_found() -> None:
    assert verdict.thrown_out(2, 5).good
    assert verdict.thrown_out(0, 0).good
    assert not verdict.thrown_out(3, 0).good


def life(pid: int, seconds: int, **grow: float) -> list[Sample]:
    """A process that takes more by so much each second, and now and then a lot for a moment."""
    usual = {"rss": 100 << 20, "threads": 8, "files": 30, "sockets": 200}
    return [
        Sample(
            float(n),
            "gw",
            pid,
            **{
                what: int(value + grow.get(what, 0) * n + value * (n % 30 == 0))
                for what, value in usual.items()
            },
        )
        for n in range(seconds)
    ]


@pytest.mark.parametrize(
    ("grow", "flat"),
    [
        ({}, True),
        ({"rss": 30_000.0}, False),  # 105 MB in an hour
        ({"rss": 3_000.0}, True),
        ({"threads": 0.02}, False),
        ({"files": 0.05}, False),
        ({"sockets": 0.1}, False),
    ],
)
def test_a_leak_is_found_and_a_peak_is_none(grow: dict[str, float], flat: bool) -> None:
    assert all(check.good for check in verdict.flat(life(1, 400, **grow), "gw")) is flat


def test_only_the_last_life_of_a_process_is_judged_and_a_short_one_is_not() -> None:
    leaking, short = life(1, 400, rss=1e6), life(2, 40, rss=1e6)
    assert verdict.flat(leaking + short, "gw") == [
        Check("gw: flat", True, "not judged: 29 s are too short"),
    ]
    assert not all(check.good for check in verdict.flat(short + leaking, "gw"))
    assert not verdict.flat([], "gw")[0].good


def test_an_ingest_report_that_is_not_complete_or_an_internal_error_fails_the_run() -> None:
    complete = {"report": {"total": {"missing": 0, "waiting": 0, "trimmed": 0}}}
    assert verdict.ingested(0, complete).good
    assert not verdict.ingested(3, complete).good
    assert not verdict.ingested(0, {"report": {"total": {"missing": 0, "waiting": 1, "trimmed": 0}}}).good
    assert not verdict.ingested(0, {}).good
    assert verdict.clean([]).good
    assert not verdict.clean(["gw ended by itself"]).good


@pytest.mark.slow(seconds=80)
@pytest.mark.spark
@pytest.mark.timeout(400)
@pytest.mark.parametrize("planted", [False, True])
def test_a_short_soak_holds_and_fails_when_an_object_is_lost(tmp_path: Path, planted: bool) -> None:
    for name in ("java", "mosquitto"):
        if shutil.which(name) is None and shutil.which(name, path="/usr/sbin") is None:
            pytest.skip(f"{name} is missing")
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.5", "--devices", "50"]
    command += ["--output", str(tmp_path / "soak"), *(["--plant"] if planted else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == planted, done.stdout + done.stderr
    document = json.loads((tmp_path / "soak" / "soak.json").read_text())
    wrong = {check["what"] for check in document["checks"] if not check["good"]}
    lost = {MISSING, HOLE, "the ingest report says complete"}
    assert wrong == (lost if planted else set())
    assert (tmp_path / "soak" / "soak-counts.png").stat().st_size > 10_000
