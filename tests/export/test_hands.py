"""Exports in hand: paused, resumed and retried by operators, with the real worker."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import ExportNotFound, InvalidRequest
from bridge.export.wire import Tuning
from tests.export.harness import attempted, drop_in, numbers, recorded, running, until

# A destination that fails, or stops its export, as long as a file exists.
SWITCHED = """
    import os
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str
        error: type_ = "retry"

    class Switched(Exporter):
        kind = "switched"
        Config = Config

        def export(self, batch):
            with open(self.config.path + ".attempts", "a") as out:
                print(batch.first, file=out)
            if os.path.exists(self.config.path + ".down"):
                raise (Stopped if self.config.error == "stop" else Retry)("the tank is full")
            with open(self.config.path, "a") as out:
                print(batch.first, batch.last, file=out)
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Switched)
""".replace("type_", "str")
SLOW = Tuning(beat=0.1, silence=20.0, first_backoff=3600.0, max_backoff=3600.0, drain=2.0)


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(**fixtures: Path) -> None:
        asyncio.run(test(**fixtures))

    return run


def to(path: Path, identifier: str = "out", **more: Any) -> dict[str, Any]:
    return {"identifier": identifier, "path": str(path), **more}


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@scenario
async def test_a_paused_export_sends_nothing_until_it_is_resumed(recorder: Path) -> None:
    out, other = recorder / "out", recorder / "other"
    async with running(recorder) as gateway:
        gateway.create("s", {"recorder": [to(out), to(other, "other")]})
        await gateway.append("s", b"0")
        await gateway.exported("s", 0)
        assert gateway.manager.pause("s", "out", paused=True) == ["out"]
        await gateway.append("s", b"1", b"2")
        await until(lambda: numbers(other) == [0, 1, 2])
        assert numbers(out) == [0]
        paused, running_ = gateway.manager.export_statuses("s")
        assert (paused.paused, running_.paused) == (True, False)
        assert gateway.manager.pause("s", None, paused=False) == ["out"]
        await gateway.exported("s", 2)
    assert numbers(out) == [0, 1, 2]


@scenario
async def test_a_pause_survives_restarts_and_updates_and_ends_with_its_export(recorder: Path) -> None:
    out = recorder / "out"
    async with running(recorder) as gateway:
        gateway.create("s", {"recorder": [to(out)]})
        gateway.manager.pause("s", "out", paused=True)
    async with running(recorder) as gateway:
        await gateway.append("s", b"0")
        gateway.update("s", {"recorder": [to(out, lingerMillis=1), to(recorder / "new", "new")]})
        await until(lambda: numbers(recorder / "new") == [0])
        (status, _) = gateway.manager.export_statuses("s")
        assert (status.paused, numbers(out)) == (True, [])
        gateway.update("s", {})
        gateway.update("s", {"recorder": [to(out)]})
        await gateway.exported("s", 0)
    assert numbers(out) == [0]


@scenario
async def test_a_paused_export_holds_data_back_and_a_disabled_one_does_not(recorder: Path) -> None:
    async with running(recorder) as gateway:
        gateway.create("s", {"recorder": [to(recorder / "out"), to(recorder / "off", "off", disabled=True)]})
        await gateway.append("s", b"0")
        await until(lambda: gateway.exports.exported_upto("s") == 1)
        gateway.manager.pause("s", None, paused=True)
        await gateway.append("s", b"1")
        assert gateway.exports.exported_upto("s") == 1


@scenario
async def test_a_retry_ends_a_long_wait_and_everything_about_the_failure_is_shown(tmp_path: Path) -> None:
    drop_in(tmp_path, "switched", SWITCHED)
    out, down = tmp_path / "out", tmp_path / "out.down"
    down.touch()
    async with running(tmp_path, tuning=SLOW) as gateway:
        gateway.create("s", {"switched": [to(out)]})
        await gateway.append("s", b"0")
        await until(lambda: gateway.status("s").failed_attempts == 1)
        first = gateway.status("s")
        assert first.error_message == "the tank is full"
        assert first.next_attempt_time > first.error_since > 0
        assert gateway.manager.retry("s", "out") == ["out"]
        await until(lambda: gateway.status("s").failed_attempts == 2)
        assert gateway.status("s").error_since == first.error_since
        down.unlink()
        gateway.manager.retry("s", None)
        await gateway.exported("s", 0)
        await until(lambda: gateway.status("s").error_message is None)
        done = gateway.status("s")
        assert (done.failed_attempts, done.next_attempt_time, done.error_since) == (0, 0, 0)
    assert lines(Path(f"{out}.attempts")) == ["0", "0", "0"]


@scenario
async def test_an_export_that_collects_a_batch_says_when_it_is_sent_at_the_latest(recorder: Path) -> None:
    async with running(recorder) as gateway:
        before = time.time() * 1000
        gateway.create("s", {"recorder": [to(recorder / "out", batchSize=2, lingerMillis=600_000)]})
        await until(lambda: gateway.exports.statuses("s"))
        assert gateway.status("s").next_attempt_time == 0
        await gateway.append("s", b"0")
        await until(lambda: gateway.status("s").next_attempt_time)
        at = gateway.status("s").next_attempt_time
        assert before + 590_000 < at < time.time() * 1000 + 601_000
        assert gateway.status("s").error_message is None
        await gateway.append("s", b"1")
        await gateway.exported("s", 1)
        assert gateway.status("s").next_attempt_time == 0
    assert numbers(recorder / "out") == [0, 1]


@scenario
async def test_a_retry_sends_what_is_stored_without_waiting_for_a_full_batch(recorder: Path) -> None:
    out, other = recorder / "out", recorder / "other"
    async with running(recorder) as gateway:
        slow = {"batchSize": 100, "lingerMillis": 3_600_000}
        gateway.create("s", {"recorder": [to(out, **slow), to(other, "other", **slow)]})
        await gateway.append("s", b"0", b"1")
        await until(lambda: all(one.next_attempt_time for one in gateway.manager.export_statuses("s")))
        # What is appended just before the command is sent too.
        await gateway.append("s", b"2")
        assert gateway.manager.retry("s", "out") == ["out"]
        await until(lambda: numbers(out) == [0, 1, 2])
        await gateway.append("s", b"3")
        await until(lambda: gateway.manager.export_statuses("s")[0].next_attempt_time)
        assert numbers(out) == [0, 1, 2], "the next batch is collected as ever"
        assert numbers(other) == []
        assert gateway.manager.retry("s", None) == ["out", "other"]
        await until(lambda: numbers(out) == numbers(other) == [0, 1, 2, 3])


@scenario
async def test_the_age_of_an_error_survives_a_restart(tmp_path: Path) -> None:
    drop_in(tmp_path, "switched", SWITCHED)
    (tmp_path / "out.down").touch()
    async with running(tmp_path) as gateway:
        gateway.create("s", {"switched": [to(tmp_path / "out")]})
        await gateway.append("s", b"0")
        await until(lambda: gateway.status("s").error_since)
        since = gateway.status("s").error_since
    async with running(tmp_path) as gateway:
        assert gateway.status("s").error_since == since
        await until(lambda: gateway.status("s").failed_attempts)
        assert gateway.status("s").error_since == since


@scenario
async def test_a_retry_resumes_an_export_that_has_stopped(tmp_path: Path) -> None:
    drop_in(tmp_path, "switched", SWITCHED)
    out, down = tmp_path / "out", tmp_path / "out.down"
    down.touch()
    async with running(tmp_path) as gateway:
        gateway.create("s", {"switched": [to(out, error="stop")]})
        await gateway.append("s", b"0")
        await until(lambda: gateway.status("s").stopped)
        assert gateway.status("s").next_attempt_time == 0
        gateway.manager.retry("s", "out")  # the reason is still there: it stops again
        await until(lambda: len(lines(Path(f"{out}.attempts"))) == 2 and gateway.status("s").stopped)
        down.unlink()
        gateway.manager.retry("s", "out")
        await gateway.exported("s", 0)
        await until(lambda: not gateway.status("s").stopped)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_retry_while_no_worker_runs_reaches_the_next_one(tmp_path: Path, noticed: bool) -> None:
    drop_in(tmp_path, "switched", SWITCHED)
    down = tmp_path / "out.down"
    down.touch()

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("s", {"switched": [to(tmp_path / "out", error="stop")]})
            await gateway.append("s", b"0")
            await until(lambda: gateway.status("s").stopped)
            down.unlink()
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            if noticed:
                await until(lambda: gateway.exports.pid is None)
            assert gateway.manager.retry("s", "out") == ["out"]
            await gateway.exported("s", 0)

    asyncio.run(scenario())


@scenario
async def test_a_retry_resumes_a_stopped_export_whose_position_is_not_read_yet(recorder: Path) -> None:
    drop_in(recorder, "switched", SWITCHED)
    down = recorder / "out.down"
    down.touch()
    busy = to(recorder / "busy", "busy", priority=1, fault="until_released")
    exports = {"recorder": [busy], "switched": [to(recorder / "out", error="stop")]}
    async with running(recorder) as gateway:
        gateway.create("s", exports)
        await gateway.append("s", b"0")
        await until(lambda: gateway.status("s", 1).stopped)
    down.unlink()
    attempts = recorder / "busy.attempts"
    attempts.unlink()
    async with running(recorder, threads=1) as gateway:
        await until(lambda: attempted(attempts))  # it has the only thread
        assert gateway.manager.retry("s", "out") == ["out"]
        (recorder / "busy.release").touch()
        await gateway.exported("s", 0)


@scenario
async def test_what_cannot_be_retried_or_is_unknown_is_refused_by_name(recorder: Path) -> None:
    async with running(recorder) as gateway:
        exports = {
            "recorder": [to(recorder / "out"), to(recorder / "off", "off", disabled=True)],
            "consumer": [{"identifier": "jobs"}],
        }
        gateway.create("s", exports)
        gateway.manager.pause("s", "out", paused=True)
        for name, why in (("out", "resume it"), ("off", "disabled by its definition"), ("jobs", "consumer")):
            with pytest.raises(InvalidRequest, match=why):
                gateway.manager.retry("s", name)
        assert gateway.manager.retry("s", None) == []
        with pytest.raises(ExportNotFound, match="did you mean 'out'"):
            gateway.manager.pause("s", "outt", paused=True)


@scenario
async def test_a_paused_consumer_hands_out_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        gateway.create("s", {"consumer": [{"identifier": "jobs"}]})
        await gateway.append("s", b"0")
        gateway.manager.pause("s", "jobs", paused=True)
        with pytest.raises(InvalidRequest, match="paused"):
            await gateway.manager.fetch("s", "jobs", 1, wait=0, holder="c")
        (status,) = gateway.manager.export_statuses("s")
        assert status.paused
        gateway.manager.pause("s", "jobs", paused=False)
        assert len(await gateway.manager.fetch("s", "jobs", 1, wait=0, holder="c")) == 1


@scenario
async def test_a_pause_ends_a_waiting_fetch_with_an_error(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        gateway.create("s", {"consumer": [{"identifier": "jobs"}]})
        waiting = asyncio.create_task(gateway.manager.fetch("s", "jobs", 1, wait=600, holder="c"))
        await asyncio.sleep(0)
        gateway.manager.pause("s", None, paused=True)
        with pytest.raises(InvalidRequest, match="paused"):
            await asyncio.wait_for(waiting, 60)


@scenario
async def test_a_pause_reaches_a_worker_that_was_killed(recorder: Path) -> None:
    async with running(recorder) as gateway:
        gateway.create("s", {"recorder": [to(recorder / "out")]})
        await gateway.append("s", b"0")
        await gateway.exported("s", 0)
        gateway.manager.pause("s", "out", paused=True)
        before, pid = gateway.exports.restarts, gateway.exports.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: gateway.exports.restarts > before and gateway.exports.pid is not None)
        await gateway.append("s", b"1")
        gateway.create("t", {"recorder": [to(recorder / "t")]})
        await gateway.append("t", b"0")
        await gateway.exported("t", 0)  # the new worker works
        assert [row[0] for row in recorded(recorder / "out")] == [0]


@scenario
async def test_an_error_shows_no_credentials_of_a_url(tmp_path: Path) -> None:
    source = SWITCHED.replace('"the tank is full"', 'f"POST {self.config.path}://u:S3@host/in?k=S3: no"')
    drop_in(tmp_path, "switched", source.replace('self.config.path + ".down"', '"/"'))
    async with running(tmp_path) as gateway:
        gateway.create("s", {"switched": [{"identifier": "out", "path": str(tmp_path / "out")}]})
        await gateway.append("s", b"0")
        await until(lambda: gateway.status("s").error_message)
        assert gateway.status("s").error_message == f"POST {tmp_path / 'out'}://host/in: no"
