"""Outages of destinations: what the log says, and a worker that gets no processor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge import process
from bridge.export.supervisor import STARVED
from bridge.export.wire import Tuning
from bridge.logs import Outage
from tests.export.harness import running, until
from tests.export.test_worker import good
from tests.http.conftest import Service, eventually

STREAM = """
[streams.s]
topics = ["in/#"]
[[streams.s.export.http]]
identifier = "out"
uri = "http://127.0.0.1:1/"
[[streams.s.export.http]]
identifier = "other"
uri = "http://127.0.0.1:2/"
"""


def exports(service: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(service.request("/status.json")[2])["exports"]
    return found


def test_an_outage_is_one_line_for_each_export_and_reason(tmp_path: Path) -> None:
    service = Service(tmp_path, STREAM)
    try:
        service.publish(("in/a", b"x"))
        eventually(lambda: all(one["failedAttempts"] >= 4 for one in exports(service)))
        lines = [line for line in service.log.read_text().splitlines() if "retrying in" in line]
        assert len(lines) == 2, lines
    finally:
        assert service.stop() == 0


def test_a_cause_is_told_when_it_is_new_and_again_after_a_while() -> None:
    outage = Outage(repeat=3600)
    first = "HTTP 503 (RequestId: 0F3A9B22C1D4E5F6, waited 1.25 s)"
    assert outage.is_news(first)
    assert not outage.is_news(first.replace("0F3A9B22C1D4E5F6", "1111222233334444").replace("1.25", "7"))
    assert outage.is_news("connection refused")
    assert not outage.is_news(first)
    outage.ended()
    assert outage.is_news(first)
    impatient = Outage(repeat=0)
    assert impatient.is_news(first)
    assert impatient.is_news(first)


@contextmanager
def spinning(count: int, processor: int) -> Iterator[list[int]]:
    """Processes that keep one processor busy; the last of them gets what the others leave."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        for one in spinners:
            os.sched_setaffinity(one.pid, {processor})
        os.sched_setscheduler(spinners[-1].pid, os.SCHED_IDLE, os.sched_param(0))
        yield [one.pid for one in spinners]
    finally:
        for one in spinners:
            one.kill()
            one.wait()


def test_a_process_that_waits_for_a_processor_is_told_from_one_that_sleeps() -> None:
    with spinning(2, min(os.sched_getaffinity(0))) as (_, starved):
        eventually(process.Processor(starved).lacks, pause=0.2)
    asleep = subprocess.Popen(["sleep", "600"])
    try:
        sleeping = process.Processor(asleep.pid)
        eventually(lambda: not sleeping.lacks(), pause=0.2)
        assert not process.Processor(2**22 + 1).lacks(), "there is no such process"
    finally:
        asleep.kill()
        asleep.wait()


def test_a_worker_without_a_processor_is_spared_and_one_that_stands_still_is_killed(recorder: Path) -> None:
    tuning = Tuning(beat=0.1, silence=2.0)
    processor = min(os.sched_getaffinity(0))

    async def scenario() -> None:
        async with running(recorder, tuning=tuning) as gateway:
            gateway.create("a", {"recorder": [good(recorder)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            worker = gateway.exports.pid
            assert worker is not None
            threads = [int(task.name) for task in Path(f"/proc/{worker}/task").iterdir()]
            with spinning(4, processor):
                for thread in threads:
                    os.sched_setaffinity(thread, {processor})
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                ends = time.monotonic() + 3 * tuning.silence
                await until(lambda: time.monotonic() > ends)
                assert gateway.exports.pid == worker
                assert gateway.exports.restarts == 0
            os.kill(worker, signal.SIGSTOP)
            stopped = time.monotonic()
            await until(lambda: gateway.exports.restarts == 1)
            assert time.monotonic() - stopped < STARVED / 2 * tuning.silence

    asyncio.run(scenario())
