"""The worker process: whatever a plugin does to it, other exports go on and the culprit is named."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge import logs
from bridge.errors import InvalidRequest
from bridge.export.wire import Tuning
from tests.export.harness import FAST, attempted, drop_in, numbers, recorded, running, until


def good(root: Path, **more: Any) -> dict[str, Any]:
    return {"identifier": "good", "path": str(root / "good"), **more}


def bad(root: Path, fault: str, **more: Any) -> dict[str, Any]:
    return {"identifier": "bad", "path": str(root / "bad"), "fault": fault, **more}


def the_good_one_goes_on(
    root: Path, fault: str, word: str, *, tuning: Tuning = FAST, heals: bool = True
) -> None:
    """Two exports of two streams, one with a fault that heals after its first attempt."""

    async def scenario() -> None:
        async with running(root, tuning=tuning) as gateway:
            config = bad(root, fault, once=str(root / "once") if heals else "")
            gateway.create("bad", {"recorder": [config]})
            gateway.create("good", {"recorder": [good(root)]})
            await gateway.append("bad", b"1", b"2")
            for _ in range(5):
                await gateway.append("good", b"x")
                await asyncio.sleep(0.05)
            await until(lambda: word in (gateway.status("bad").error_message or ""))
            await gateway.append("good", b"last")
            await gateway.exported("good", 5)
            if heals:
                await gateway.exported("bad", 1)
                await until(lambda: gateway.status("bad").error_message is None)
                assert numbers(root / "bad") == [0, 1]

    asyncio.run(scenario())
    assert sorted(set(numbers(root / "good"))) == list(range(6))


def test_a_plugin_that_segfaults_is_named_and_waits_while_others_go_on(
    recorder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        the_good_one_goes_on(recorder, "segfault", "killed by signal 11")
    named = [record.message for record in caplog.records if "signal 11" in record.message]
    assert any("export bad of bad" in line and "recorder.py" in line for line in named)
    assert not any("export good" in line for line in named)


def test_a_plugin_that_always_segfaults_never_stops_the_others(recorder: Path) -> None:
    the_good_one_goes_on(recorder, "segfault", "killed by signal 11", heals=False)


def test_a_plugin_that_ends_the_process_is_found_out(recorder: Path) -> None:
    the_good_one_goes_on(recorder, "leave", "ended with status 9")


def test_a_plugin_that_raises_is_tried_again(recorder: Path) -> None:
    the_good_one_goes_on(recorder, "blow", "ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("retry_too_far", "retry has the index 2, but batch.records has 2 records, with the indexes 0 to 1"),
        ("reject_from_the_end", "rejected has the index -1, but batch.records has 2 records"),
        ("reject_by_number", "3 is a sequence number, so use `enumerate(batch.records)`"),
        ("reject_without_a_reason", "rejected[0] is ''; give the reason as a text"),
        ("reject_in_a_list", "rejected is [0], not a mapping from indexes to reasons"),
        ("retry_a_record", "retry has Record("),
        ("say_yes", "returned True, not an Outcome; return ACCEPTED if the destination has confirmed all"),
    ],
)
def test_an_outcome_that_does_not_fit_its_batch_settles_nothing_and_is_explained(
    recorder: Path, fault: str, says: str
) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("bad", {"recorder": [bad(recorder, "")]})
            await gateway.append("bad", b"0", b"1", b"2")
            await gateway.exported("bad", 2)
            gateway.update("bad", {"recorder": [bad(recorder, fault)]})
            await gateway.append("bad", b"3", b"4")
            await until(lambda: gateway.status("bad").error_message)
            error = gateway.status("bad").error_message
            assert "a defect of the plugin: Recorder.export (recorder.py, line " in error
            assert says in error
            assert gateway.status("bad").last_exported_sequence_number == 2
            assert gateway.status("bad").rejected_messages_count == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", ["retry_at_no_time", "retry_in_words", "retry_without_init"])
def test_a_wait_that_is_no_number_is_ignored(recorder: Path, fault: str) -> None:
    the_good_one_goes_on(recorder, fault, "" if fault == "retry_without_init" else "busy")


@pytest.mark.parametrize("fault", ["retry_never", "retry_in_ages", "retry_one_never"])
def test_a_plugin_can_ask_for_a_wait_of_a_day_at_most(recorder: Path, fault: str) -> None:
    async def scenario() -> None:
        async with running(recorder, threads=1) as gateway:
            gateway.create("bad", {"recorder": [bad(recorder, fault)]})
            gateway.create("good", {"recorder": [good(recorder)]})
            await gateway.append("bad", b"1", b"2")
            await until(lambda: gateway.status("bad").failed_attempts)
            status = gateway.status("bad")
            assert 0 < status.next_attempt_time - status.error_since <= 86_400_000 + 60_000
            await gateway.append("good", b"x")
            await gateway.exported("good", 0)
            gateway.update("bad", {"recorder": [bad(recorder, "")]})
            await gateway.exported("bad", 1)
            assert gateway.exports.restarts == 0

    asyncio.run(scenario())


def test_an_error_of_any_length_and_with_any_letters_is_reported(recorder: Path) -> None:
    the_good_one_goes_on(recorder, "babble", "\\udcff is no letter")


def test_a_plugin_that_hangs_is_named_and_the_worker_replaced(recorder: Path) -> None:
    hasty = msgspec.structs.replace(FAST, hang=1.0)
    the_good_one_goes_on(recorder, "hang", "the plugin hangs", tuning=hasty)


def test_a_plugin_that_holds_the_interpreter_is_killed(recorder: Path) -> None:
    quick = Tuning(beat=0.1, silence=4.0, first_backoff=0.4, max_backoff=3.0)
    the_good_one_goes_on(recorder, "hold", "killed by signal 9", tuning=quick)


def test_a_plugin_that_leaks_has_the_worker_replaced_before_the_machine_suffers(recorder: Path) -> None:
    small = Tuning(beat=0.1, first_backoff=2.0, max_backoff=3.0, drain=0.5, max_memory=120 << 20)
    the_good_one_goes_on(recorder, "leak", "the export worker grew to", tuning=small)


def test_a_destination_that_is_down_does_not_cost_memory_at_every_attempt(recorder: Path) -> None:
    attempts: list[socket.socket] = []
    fast = Tuning(beat=0.1, first_backoff=0.02, max_backoff=0.05)

    async def scenario(url: str) -> None:
        async with running(recorder, tuning=fast) as gateway:
            config = {"identifier": "up", "bucket": "away", "endpointUrl": url, "timeHintMillis": 1}
            gateway.create("a", {"s3": [config]})
            await gateway.append("a", *(os.urandom(2000) for _ in range(1000)))
            await until(lambda: len(attempts) >= 3, 60)
            early = gateway.exports.memory
            await until(lambda: len(attempts) >= 15, 60)
            assert gateway.exports.restarts == 0
            assert gateway.exports.memory - early < 25 << 20

    def hang_up(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                attempts.append(connection)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,))
        thread.start()
        try:
            asyncio.run(scenario(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_with_all_threads_hung_other_exports_still_run(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder, threads=2, tuning=msgspec.structs.replace(FAST, hang=1.0)) as gateway:
            for n in range(3):
                gateway.create(f"bad{n}", {"recorder": [bad(recorder, "hang")]})
                await gateway.append(f"bad{n}", b"x")
            await until(lambda: gateway.exports.restarts >= 1)
            gateway.create("good", {"recorder": [good(recorder)]})
            await gateway.append("good", b"x")
            await gateway.exported("good", 0)

    asyncio.run(scenario())


def test_suspects_run_one_at_a_time_until_the_culprit_is_known(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("bad", {"recorder": [bad(recorder, "leave")]})
            names = [f"slow{n}" for n in range(3)]
            for name in names:
                config = {"identifier": name, "path": str(recorder / name), "fault": "wait"}
                gateway.create(name, {"recorder": [config]})
            await gateway.append("bad", b"x")
            for name in names:
                await gateway.append(name, b"x")
            await until(lambda: gateway.exports.restarts >= 4)
            for name in names:
                config = {"identifier": name, "path": str(recorder / name)}
                gateway.update(name, {"recorder": [config]})
                await gateway.exported(name, 0)
            assert "status 9" in (gateway.status("bad").error_message or "")

    asyncio.run(scenario())


def test_a_killed_worker_is_back_and_the_retry_has_the_same_boundaries(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [bad(recorder, "hang", batchSize=7)]})
            await gateway.append("a", *(b"x" for _ in range(10)))
            await until(lambda: attempted(recorder / "bad.attempts"))
            await gateway.append("a", *(b"x" for _ in range(10)))
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            config = bad(recorder, "", batchSize=20)  # the batch that was planned stays as it was
            gateway.update("a", {"recorder": [config]})
            await gateway.exported("a", 19)

    asyncio.run(scenario())
    attempts = (recorder / "bad.attempts").read_text(encoding="utf-8").splitlines()
    assert set(attempts) == {"0 6"}
    batches = [(first, last) for first, last, _, _ in recorded(recorder / "bad")]
    assert batches == [(0, 6), (7, 19)]


def test_what_was_exported_before_a_restart_stays_known_while_the_plugin_crashes(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [bad(recorder, "")]})
            await gateway.append("a", b"1", b"2", b"3")
            await gateway.exported("a", 2)
            gateway.update("a", {"recorder": [bad(recorder, "segfault")]})
        async with running(recorder) as gateway:
            await gateway.append("a", b"4")
            seen: set[tuple[int, int]] = set()

            def crashed_twice() -> bool:
                status = gateway.status("a")
                seen.add((status.last_exported_sequence_number, status.exported_messages_count))
                return gateway.exports.restarts >= 2 and status.error_message is not None

            await until(crashed_twice)
            assert seen == {(2, 3)}

    asyncio.run(scenario())


def test_the_worker_ends_with_its_parent_even_when_a_plugin_hangs(recorder: Path) -> None:
    async def scenario() -> int:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [bad(recorder, "hang")]})
            await gateway.append("a", b"x")
            await until(lambda: attempted(recorder / "bad.attempts"))
            pid = gateway.exports.pid
            assert pid is not None
            gateway.exports._disconnect()  # what the worker sees when the parent has died
            await until(lambda: gateway.exports.pid not in (None, pid))
            return pid

    pid = asyncio.run(scenario())
    assert not Path(f"/proc/{pid}").exists()


def test_stopping_lets_the_batch_in_flight_finish_and_leaves_no_process(recorder: Path) -> None:
    async def scenario() -> int:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [good(recorder)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            pid = gateway.exports.pid
            assert pid is not None
            began = time.monotonic()
            await gateway.exports.stop(30)
            assert time.monotonic() - began < 30  # it does not wait for the time-out
            return pid

    pid = asyncio.run(scenario())
    assert not Path(f"/proc/{pid}").exists()


def test_the_worker_leaves_signals_to_the_service(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [good(recorder)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGTERM)
            os.kill(gateway.exports.pid, signal.SIGINT)
            await gateway.append("a", b"x")
            await gateway.exported("a", 1)
            assert gateway.exports.restarts == 0

    asyncio.run(scenario())


def test_ingest_does_not_notice_a_worker_that_cannot_start(
    recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [good(recorder)]})
            await gateway.append("a", b"x")
            monkeypatch.undo()
            await gateway.exported("a", 0)

    asyncio.run(scenario())


def test_the_worker_starts_with_more_than_a_thousand_files_open(recorder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [good(recorder)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)

    try:
        with contextlib.ExitStack() as held:
            for _ in range(1100):  # as a gateway with that many devices and streams has
                held.enter_context(open(os.devnull, "rb"))
            asyncio.run(scenario())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


HELPED = """
    import threading
    from bridge import ACCEPTED, BatchedConfig, Exporter, hookimpl

    class Helped(Exporter):
        kind = "helped"
        timeout = 0.5

        def export(self, batch):
            helper = threading.Thread(target=self.help)
            helper.start()
            helper.join()  # three times as long as the timeout
            return ACCEPTED

        def help(self):
            for _ in range(15):
                threading.Event().wait(0.1)
                self.context.working()

        def idle(self):
            threading.Thread(target=self.context.working).start()  # nobody waits for this one

    @hookimpl
    def register_exporters(register):
        register(Helped)
"""


def test_a_thread_of_a_plugin_may_report_progress_of_its_export(tmp_path: Path) -> None:
    drop_in(tmp_path, "helped", HELPED)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"helped": [{"identifier": "x"}]})
            for number in range(2):
                await gateway.append("a", b"x")
                await gateway.exported("a", number)  # without a report, each attempt would be one that hangs
            await until(lambda: gateway.status("a").error_message is None)

    asyncio.run(scenario())


BUSY = """
    import time
    from pathlib import Path
    from bridge import ACCEPTED, BatchedConfig, Exporter, hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str

    class Busy(Exporter):
        kind = "busy"
        Config = Config

        def export(self, batch):
            place = Path(self.config.path)
            (place / "begun").touch()
            while not (place / "go").exists():
                time.sleep(0.01)
            return ACCEPTED

        def cancelled(self, records):
            (Path(self.config.path) / "cancelled").touch()

        def close(self):
            (Path(self.config.path) / "closed").touch()

    @hookimpl
    def register_exporters(register):
        register(Busy)
"""


def test_an_export_that_is_deleted_while_it_sends_is_closed_after_that(tmp_path: Path) -> None:
    drop_in(tmp_path, "busy", BUSY)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"busy": [{"identifier": "x", "path": str(tmp_path)}]})
            await gateway.append("a", b"x")
            await until((tmp_path / "begun").exists)
            gateway.update("a", {})
            (other := tmp_path / "other").mkdir()
            (other / "go").touch()
            gateway.create("b", {"busy": [{"identifier": "y", "path": str(other)}]})
            await gateway.append("b", b"x")
            await gateway.exported("b", 0)  # so the worker has heard of both
            (tmp_path / "go").touch()
            await until(lambda: (tmp_path / "cancelled").exists() and (tmp_path / "closed").exists())

    asyncio.run(scenario())


TALKER = """
    import logging
    from bridge import ACCEPTED, BatchedConfig, Exporter, hookimpl

    class Talker(Exporter):
        kind = "talker"
        Config = BatchedConfig

        def export(self, batch):
            for number in range(50):
                logging.getLogger("talker").warning("pump %s is slow", number)
            logging.getLogger("talker").warning("valve %s is stuck", 7)
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Talker)
"""


def test_a_flood_of_one_line_of_a_worker_hides_no_other_line_of_it(tmp_path: Path) -> None:
    drop_in(tmp_path, "talker", TALKER)
    output = io.StringIO()
    handler = logs.CountingHandler(output, logs.LineFormatter(), window=3600)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"talker": [{"identifier": "x"}]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)

    logging.getLogger("talker").addHandler(handler)
    try:
        asyncio.run(scenario())
    finally:
        logging.getLogger("talker").removeHandler(handler)
        handler.close()
    lines = [line.partition("talker ")[2] for line in output.getvalue().splitlines()]
    pumps = [f'msg="pump {number} is slow"' for number in range(20)]
    assert lines == [*pumps, 'msg="valve 7 is stuck"', 'msg="pump 49 is slow" alike=30']


def test_a_failure_is_known_at_once_also_while_the_worker_rests(recorder: Path) -> None:
    slow = msgspec.structs.replace(FAST, beat=60.0, silence=1000.0, first_backoff=4.0, max_backoff=4.0)

    async def scenario() -> None:
        async with running(recorder, tuning=slow) as gateway:
            gateway.create("bad", {"recorder": [bad(recorder, "blow")]})
            await gateway.append("bad", b"1")
            for failed in (1, 2):  # it rests before the second
                await until(lambda failed=failed: gateway.status("bad").failed_attempts == failed)

    asyncio.run(scenario())


CAREFUL = """
    from bridge import *
    from bridge import hookimpl

    class Config(ExportConfig, frozen=True):
        ca: str

    class Careful(Exporter):
        kind = "careful"
        Config = Config

        @classmethod
        def check(cls, config):
            open(config.ca).close()

        def export(self, batch):
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Careful)
"""


def test_an_exporter_whose_check_raises_stops_no_other_export_and_keeps_its_position(recorder: Path) -> None:
    drop_in(recorder, "careful", CAREFUL)
    ca = recorder / "ca.pem"
    ca.touch()

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("bad", {"careful": [{"identifier": "bad", "ca": str(ca)}]})
            gateway.create("good", {"recorder": [good(recorder)]})
            await gateway.append("bad", b"0")
            await gateway.exported("bad", 0)
        ca.unlink()
        async with running(recorder) as gateway:
            with pytest.raises(InvalidRequest, match=r"a defect of the plugin: FileNotFoundError: .*careful"):
                gateway.create("worse", {"careful": [{"identifier": "bad", "ca": str(ca)}]})
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            await gateway.append("bad", b"1")
            await gateway.append("good", b"0")
            await gateway.exported("good", 0)
            await until(lambda: "a defect of the plugin" in (gateway.status("bad").error_message or ""))
            assert gateway.status("bad").last_exported_sequence_number == 0
            assert gateway.exports.restarts == 1
        ca.touch()
        async with running(recorder) as gateway:
            await gateway.exported("bad", 1)

    asyncio.run(scenario())


APPENDER = """
    import time
    from bridge import *
    from bridge import hookimpl

    class Config(ExportConfig, frozen=True):
        what: str

    class Appender(Exporter):
        kind = "appender"
        Config = Config

        def export(self, batch):
            if self.config.what == "state":
                self.context.save_state("text")
            stream, payload = {
                "bytes": ("status", b"x"),
                "text": ("status", "text"),
                "view": ("status", memoryview(b"x")),
                "number": (7, b"x"),
            }[self.config.what]
            self.context.append(stream, payload)
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Appender)
"""


def test_an_exporter_that_saves_something_else_than_bytes_keeps_its_position(recorder: Path) -> None:
    drop_in(recorder, "appender", APPENDER)

    async def scenario() -> None:
        config = {"identifier": "bad", "what": "bytes"}
        async with running(recorder) as gateway:
            gateway.create("status", {})
            gateway.create("bad", {"appender": [config]})
            await gateway.append("bad", b"0")
            await gateway.exported("bad", 0)
            gateway.update("bad", {"appender": [config | {"what": "state"}]})
            await gateway.append("bad", b"1")
            await until(
                lambda: (
                    "TypeError: the state of an export is bytes"
                    in (gateway.status("bad").error_message or "")
                )
            )
        async with running(recorder) as gateway:
            gateway.update("bad", {"appender": [config]})
            await gateway.exported("bad", 1)
            assert gateway.read("status") == [b"x"] * 2

    asyncio.run(scenario())


@pytest.mark.parametrize("what", ["text", "view", "number"])
def test_a_plugin_that_appends_something_else_than_bytes_gets_a_type_error(recorder: Path, what: str) -> None:
    drop_in(recorder, "appender", APPENDER)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("status", {})
            gateway.create("bad", {"appender": [{"identifier": "bad", "what": what}]})
            gateway.create("good", {"recorder": [good(recorder)]})
            await gateway.append("bad", b"0")
            await until(
                lambda: "TypeError: append takes the name" in (gateway.status("bad").error_message or "")
            )
            await gateway.append("good", b"0")
            await gateway.exported("good", 0)
            assert gateway.exports.restarts == 0
            assert gateway.read("status") == []

    asyncio.run(scenario())
