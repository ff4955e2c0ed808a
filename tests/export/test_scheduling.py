"""When exports run: priority, batches, intervals, bandwidth, pauses, updates, many at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from bridge.errors import InvalidRequest
from bridge.export.cursor import CursorFile
from bridge.export.supervisor import UPDATE_EVERY
from bridge.export.wire import Tuning
from bridge.model import ExportStatus
from bridge.streams import meta
from bridge.streams.layout import Files
from tests.export.harness import attempted, drop_in, numbers, recorded, running, until
from tests.fakes.clock import DAY, Shifted

QUICK = Tuning(beat=0.1, silence=20.0, first_backoff=0.02, max_backoff=0.1, drain=2.0)


def to(root: Path, name: str = "out", **more: Any) -> dict[str, Any]:
    return {"identifier": name, "path": str(root / name), **more}


def test_one_thread_serves_the_most_urgent_export_first(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder, threads=1) as gateway:
            # The thread is busy until the worker has handled what is sent about all of them.
            gateway.create("marker", {"recorder": [to(recorder, "marker")]})
            await gateway.append("marker", b"x")
            await gateway.exported("marker", 0)
            gateway.create("holder", {"recorder": [to(recorder, "holder", fault="until_released")]})
            await gateway.append("holder", b"x")
            await until(lambda: attempted(recorder / "holder.attempts"))
            for name, priority in (("last", None), ("low", 9), ("high", 1)):
                config = to(recorder, name, batchSize=10)
                gateway.create(name, {"recorder": [config | ({"priority": priority} if priority else {})]})
                await gateway.append(name, *(b"x" for _ in range(50)))
            # A loop runs its timers in the order of their times: after this one, all updates are sent. The
            # removal of an export is sent at once, and handled after them.
            await asyncio.sleep(2 * UPDATE_EVERY)
            gateway.update("marker", {})
            await until(lambda: not list((recorder / "data" / "exports" / "marker").glob("*.cursor")))
            (recorder / "holder.release").touch()
            for name in ("last", "low", "high"):
                await gateway.exported(name, 49)

    asyncio.run(scenario())
    order = sorted((row[3], name) for name in ("last", "low", "high") for row in recorded(recorder / name))
    assert [name for _, name in order] == ["high"] * 5 + ["low"] * 5 + ["last"] * 5


def test_without_an_interval_messages_go_at_once_and_in_order(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder)]})
            await gateway.append("a", b"x")
            await until(lambda: numbers(recorder / "out") == [0])
            for _ in range(20):
                await gateway.append("a", b"x", b"y", b"z")
            await gateway.exported("a", 60)

    asyncio.run(scenario())
    assert numbers(recorder / "out") == list(range(61))


def test_a_lingering_export_waits_for_a_full_batch_or_for_age(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            patient = to(recorder, "patient", batchSize=10, lingerMillis=3_600_000)
            gateway.create("a", {"recorder": [patient, to(recorder, batchSize=100, lingerMillis=1000)]})
            began = time.time()
            for _ in range(13):
                await gateway.append("a", b"x")
            await until(lambda: numbers(recorder / "patient") == list(range(10)))  # full: not by age
            await until(lambda: numbers(recorder / "out") == list(range(13)))
            assert recorded(recorder / "out")[0][3] - began >= 1 - 0.05  # not full: by age
            assert numbers(recorder / "patient") == list(range(10))

    asyncio.run(scenario())


def test_the_interval_counts_from_the_oldest_waiting_message(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder, lingerMillis=600)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)  # the worker runs
            began = time.time()
            while len(recorded(recorder / "out")) < 2:  # messages that keep coming put nothing off
                assert time.time() - began < 60
                await gateway.append("a", b"x")
                await asyncio.sleep(0.1)
            assert recorded(recorder / "out")[1][3] - began >= 0.55

    asyncio.run(scenario())


YEAR = 365 * DAY


@pytest.mark.parametrize("stepped", [YEAR, -56 * YEAR], ids=["set back", "set forward from 1970"])
@pytest.mark.parametrize("boot", ["the same", "another"])
def test_the_interval_counts_the_time_that_has_passed_whatever_the_wall_clock_does(
    recorder: Path, stepped: float, boot: str
) -> None:
    machine = Shifted("the same")
    machine.sleep(-5000)
    machine.step(stepped / 2)  # until the service starts again

    def export(name: str, seconds: float) -> dict[str, Any]:
        return {"recorder": [to(recorder, name, lingerMillis=int(seconds * 1000))]}

    async def first() -> None:
        async with running(recorder, system=machine) as gateway:
            machine.step(stepped / 2)
            gateway.create("old", export("old", 4000))
            await gateway.append("old", b"x")
            machine.sleep(3000)
            gateway.create("young", export("young", 4000))
            await gateway.append("young", b"x")
            machine.sleep(2000)

    async def second() -> None:
        async with running(recorder, system=Shifted(boot, synchronised=False)) as gateway:

            def left() -> float:
                return float(gateway.status("young").next_attempt_time) / 1000 - time.time()

            await gateway.exported("old", 0)
            await until(lambda: 1000 < left() <= 2000)
            killed = gateway.exports.pid
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            await until(lambda: gateway.exports.pid not in (None, killed) and 1000 < left() <= 2000)
            gateway.update("young", export("young", 3000))
            await until(lambda: 0 < left() <= 1000)
            gateway.update("young", export("young", 2000))
            await gateway.exported("young", 0)

    asyncio.run(first())
    asyncio.run(second())


def test_the_bandwidth_ceiling_holds_over_all_exports(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder, max_bandwidth=800_000) as gateway:  # 100 kB/s
            for name in ("a", "b"):
                gateway.create(name, {"recorder": [to(recorder, name, batchSize=5)]})
                await gateway.append(name, *(bytes(2000) for _ in range(50)))
            await gateway.exported("a", 49)
            await gateway.exported("b", 49)

    asyncio.run(scenario())
    # Each batch is a tenth of a second of the ceiling. A link makes up for half a second, which is five of
    # them; of each export one is on its way, and one may have waited for the machine before it was noted.
    at = sorted(row[3] for name in ("a", "b") for row in recorded(recorder / name))
    assert len(at) == 20
    for first, last in combinations(range(20), 2):
        assert at[last] - at[first] >= (last - first - 8) * 0.1, (first, last, at)


def test_a_dead_destination_uses_nothing_of_the_bandwidth_of_others(recorder: Path) -> None:
    async def scenario(port: int) -> None:
        async with running(recorder, max_bandwidth=80_000) as gateway:  # 10 kB/s
            gateway.create("dead", {"http": [{"identifier": "up", "uri": f"http://127.0.0.1:{port}/"}]})
            await gateway.append("dead", *(bytes(5000) for _ in range(100)))  # 50 s
            await until(lambda: gateway.status("dead").error_message)
            gateway.create("live", {"recorder": [to(recorder)]})
            await gateway.append("live", b"alarm")
            await gateway.exported("live", 0)

    with socket.socket() as unheard:  # bound and not listening: refused
        unheard.bind(("127.0.0.1", 0))
        asyncio.run(scenario(unheard.getsockname()[1]))


UNREACHABLE = """
    import os, time
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str

    class Unreachable(Exporter):
        kind = "unreachable"
        Config = Config
        attempts = 0

        def export(self, batch):
            self.attempts += 1
            if self.attempts > 1:
                with open(self.config.path + ".waiting", "a") as out:
                    print(self.context.stream, file=out)
                while not os.path.exists(self.config.path + ".up"):
                    time.sleep(0.01)
                return ACCEPTED
            raise Retry("no connection", unsent=True, cut=True)

    @hookimpl
    def register_exporters(register):
        register(Unreachable)
"""


@pytest.mark.parametrize("threads", [2, 3])
def test_exports_without_a_connection_leave_a_thread_to_the_others(recorder: Path, threads: int) -> None:
    drop_in(recorder, "unreachable", UNREACHABLE)
    waiting, names = recorder / "out.waiting", [f"cloud{n}" for n in range(4)]

    def are_due(statuses: list[ExportStatus]) -> bool:
        now = time.time() * 1000
        return all(status.failed_attempts and status.next_attempt_time + 200 < now for status in statuses)

    async def scenario() -> None:
        async with running(recorder, threads=threads, tuning=QUICK) as gateway:
            for name in names:
                gateway.create(name, {"unreachable": [to(recorder)]})
                await gateway.append(name, b"x")
            gateway.create("near", {"recorder": [to(recorder, "near", priority=10)]})
            await until(lambda: are_due([gateway.status(name) for name in names]))
            for number in range(5):
                await gateway.append("near", b"x")
                await gateway.exported("near", number)
            assert len(waiting.read_text().splitlines()) == threads - 1
            (recorder / "out.up").touch()
            for name in names:
                await gateway.exported(name, 0)

    asyncio.run(scenario())


def test_a_disabled_export_whose_position_cannot_be_written_waits_between_attempts(tmp_path: Path) -> None:
    drop_in(tmp_path, "faulty", FAULTY)
    attempts, broken = tmp_path / "attempts", tmp_path / "broken"

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            faulty = {"identifier": "out", "path": str(tmp_path)}
            gateway.create("a", {"faulty": [faulty]})
            broken.touch()  # the disk goes bad before the position is written
            await gateway.append("a", b"x")
            await until(attempts.exists)
            gateway.update("a", {"faulty": [faulty | {"disabled": True}]})
            tried = attempts.stat().st_size
            await until(lambda: attempts.stat().st_size >= tried + 2)
            began = attempts.stat().st_size
            await asyncio.sleep(1)
            assert attempts.stat().st_size - began < 20
            broken.unlink()

    asyncio.run(scenario())


# An exporter after whose first batch the disk fails as long as there is a file `broken`.
FAULTY = """
    import os
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str

    class Faulty(Exporter):
        kind = "faulty"
        Config = Config

        def export(self, batch):
            real = os.fdatasync
            def sync(fd):
                if os.path.exists(self.config.path + "/broken"):
                    with open(self.config.path + "/attempts", "a") as out:
                        out.write("x")
                    raise OSError(5, "Input/output error")
                real(fd)
            os.fdatasync = sync
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Faulty)
"""


def test_a_disabled_export_keeps_its_place_and_goes_on_when_enabled(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder)]})
            await gateway.append("a", b"0", b"1")
            await gateway.exported("a", 1)
            gateway.update("a", {"recorder": [to(recorder, disabled=True)]})
            await gateway.append("a", b"2", b"3")
            gateway.create("b", {"recorder": [to(recorder, "other")]})
            await gateway.append("b", b"x")
            await gateway.exported("b", 0)
            assert numbers(recorder / "out") == [0, 1]
            assert gateway.exports.exported_upto("a") is None  # nothing enabled holds data back
            gateway.update("a", {"recorder": [to(recorder)]})
            await gateway.exported("a", 3)

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [0, 1, 2, 3]


def test_an_export_starts_at_its_start_sequence_number(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {})
            await gateway.append("a", *(b"x" for _ in range(10)))
            gateway.update("a", {"recorder": [to(recorder, startSequenceNumber=7)]})
            await gateway.exported("a", 9)
            assert numbers(recorder / "out") == [7, 8, 9]
            gateway.update("a", {"recorder": [to(recorder, startSequenceNumber=8)]})
            await until(lambda: numbers(recorder / "out") == [7, 8, 9, 8, 9])

    asyncio.run(scenario())


def test_a_start_that_is_moved_and_moved_back_makes_an_export_start_over_once(recorder: Path) -> None:
    out, there, sent = to(recorder), to(recorder, startSequenceNumber=1), list(range(5))

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [out]})
            await gateway.append("a", *(b"x" for _ in sent))
            await gateway.exported("a", 4)
            gateway.update("a", {"recorder": [there]})
            gateway.update("a", {"recorder": [out]})  # before the worker hears of the first update
            await until(lambda: numbers(recorder / "out") == sent * 2)
            await gateway.exported("a", 4)
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            await until(lambda: gateway.exports.pid is None)
            gateway.update("a", {"recorder": [there]})
            gateway.update("a", {"recorder": [out]})  # while there is no worker
            await until(lambda: numbers(recorder / "out") == sent * 3)
            gateway.update("a", {"recorder": [{**there, "disabled": True}]})
        async with running(recorder) as gateway:
            gateway.update("a", {"recorder": [out]})
            await until(lambda: numbers(recorder / "out") == sent * 4)
            await gateway.exported("a", 4)
            gateway.manager.pause("a", None, paused=True)
            gateway.update("a", {"recorder": [{**out, "batchSize": 7}]})
            gateway.manager.pause("a", None, paused=False)
        async with running(recorder) as gateway:
            await gateway.append("a", b"x")
            await gateway.exported("a", 5)

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [*sent * 4, 5]


@pytest.mark.parametrize("written", ["position", "definition"])
def test_what_an_older_version_has_written_does_not_make_an_export_start_over(
    recorder: Path, written: str
) -> None:
    """An older version does not write when the start was moved."""

    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder)]})
            await gateway.append("a", b"x", b"y", b"z")
            await gateway.exported("a", 2)
            gateway.update("a", {"recorder": [to(recorder, startSequenceNumber=1)]})
            await until(lambda: numbers(recorder / "out") == [0, 1, 2, 1, 2])
            stream = gateway.store.streams["a"]
        if written == "definition":
            meta.save(Files(), stream.home, msgspec.structs.replace(stream.meta, begun={}))
        else:
            (path,) = (recorder / "data" / "exports" / "a").glob("*.cursor")
            known = CursorFile.read(path)
            assert known is not None
            file = CursorFile(path)
            for _ in range(2):
                file.write(msgspec.structs.replace(known, begun=UNSET))
            file.close()
        async with running(recorder) as gateway:
            await gateway.append("a", b"x")
            await gateway.exported("a", 3)
            assert numbers(recorder / "out") == [0, 1, 2, 1, 2, 3]
            gateway.update("a", {"recorder": [to(recorder, startSequenceNumber=2)]})
            gateway.update("a", {"recorder": [to(recorder, startSequenceNumber=1)]})
            await until(lambda: numbers(recorder / "out") == [0, 1, 2, 1, 2, 3, 1, 2, 3])

    asyncio.run(scenario())


def test_an_update_changes_an_export_and_keeps_its_position(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            gateway.update("a", {"recorder": [to(recorder, path=str(recorder / "new"))]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 1)

    asyncio.run(scenario())
    assert (numbers(recorder / "out"), numbers(recorder / "new")) == ([0], [1])


def test_a_deleted_export_is_forgotten_and_starts_over_when_it_comes_back(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [to(recorder)]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            gateway.update("a", {})
            assert gateway.exports.statuses("a") == []
            await until(lambda: not list((recorder / "data" / "exports" / "a").glob("*.cursor")))
            gateway.update("a", {"recorder": [to(recorder)]})
            await until(lambda: numbers(recorder / "out") == [0, 0])

    asyncio.run(scenario())


def test_an_export_deleted_while_the_worker_is_down_is_forgotten_too(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            exports = [to(recorder, "v1.2"), to(recorder, "other")]
            gateway.create("a", {"recorder": exports})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            gateway.update("a", {"recorder": exports[1:]})
            directory = recorder / "data" / "exports" / "a"
            await until(lambda: [path.name for path in directory.iterdir()] == ["other.cursor"])
            gateway.update("a", {"recorder": exports})
            await gateway.exported("a", 0)

    asyncio.run(scenario())
    assert numbers(recorder / "v1.2") == [0, 0]


def test_a_stream_made_again_under_its_name_is_exported_from_its_beginning(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            for _ in range(2):
                gateway.create("a", {"recorder": [to(recorder)]})
                await gateway.append("a", b"x", b"y")
                await gateway.exported("a", 1)
                gateway.manager.delete("a")

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [0, 1, 0, 1]


def test_a_hundred_exports_run_side_by_side(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            for n in range(20):
                exports = [to(recorder, f"e{n}-{i}") for i in range(5)]
                gateway.create(f"s{n}", {"recorder": exports})
                await gateway.append(f"s{n}", b"1", b"2", b"3")
            for n in range(20):
                await gateway.exported(f"s{n}", 2)

    asyncio.run(scenario())
    assert all(numbers(recorder / f"e{n}-{i}") == [0, 1, 2] for n in range(20) for i in range(5))


def test_dropped_messages_are_passed_over(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            exports = {"recorder": [to(recorder, disabled=True)]}
            gateway.create("a", exports, limits={"maxMessages": 3})
            await gateway.append("a", *(b"x" for _ in range(10)))
            await gateway.manager.refresh()
            exports = {"recorder": [to(recorder)]}
            gateway.update("a", exports, limits={"maxMessages": 3})
            await gateway.exported("a", 9)
            await until(lambda: gateway.status("a").skipped_messages_count == 7)

    asyncio.run(scenario())
    assert numbers(recorder / "out") == [7, 8, 9]


PATIENT = """
    import json, os
    from bridge import *

    class Config(BatchedConfig, frozen=True):
        path: str

    class Patient(Exporter):
        kind = "patient"
        Config = Config

        def export(self, batch):
            path, given = self.config.path, [record.sequence_number for record in batch.records]
            if os.path.exists(path + ".down"):
                self.note("tried", given)
                raise Retry("the link is down")
            if os.path.exists(path + ".half"):
                os.rename(path + ".half", path + ".down")
                self.note("half", given[::2])
                return Outcome(retry=range(1, len(given), 2), error="half of it")
            self.note("sent", given)
            return ACCEPTED

        def dropped(self, first, last, reason):
            self.note(reason, [first, last])

        def note(self, what, numbers):
            with open(self.config.path, "a") as out:
                print(json.dumps([what, numbers]), file=out)

    @hookimpl
    def register_exporters(register):
        register(Patient)
"""

WITHOUT_NOISE = """
    @hookimpl
    def transform_records(records):
        return [record for record in records if record.payload != b"noise"]
"""


@pytest.mark.parametrize("fault", ["down", "half", "kill"])
def test_what_is_dropped_out_of_a_batch_between_two_attempts_is_reported_and_counted(
    tmp_path: Path, fault: str
) -> None:
    drop_in(tmp_path, "patient", PATIENT + WITHOUT_NOISE)
    out = tmp_path / "out"
    (tmp_path / ("out.half" if fault == "half" else "out.down")).touch()

    def notes() -> list[Any]:
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            exports = {"patient": [{"identifier": "x", "path": str(out)}]}
            gateway.create("a", exports, limits={"maxMessages": 10})
            await gateway.append("a", *(b"noise" if n == 8 else b"x" for n in range(10)))
            await until(lambda: notes() and gateway.status("a").error_message)
            await gateway.append("a", *(b"x" for _ in range(6)))  # 0 to 5 make room for these
            await gateway.manager.refresh()
            if fault == "kill":
                assert gateway.exports.pid is not None
                os.kill(gateway.exports.pid, signal.SIGKILL)
            await until(lambda: any(what == "limits" for what, _ in notes()))
            (tmp_path / "out.down").unlink()
            await gateway.exported("a", 15)
            status = gateway.status("a")
            gone = 3 if fault == "half" else 6  # of the others, 0, 2 and 4 had been sent before
            assert status.skipped_messages_count == gone + 1
            assert status.exported_messages_count == 16 - 1 - gone

    asyncio.run(scenario())
    reported = [
        number for what, ends in notes() if what == "limits" for number in range(ends[0], ends[1] + 1)
    ]
    assert sorted(reported) == ([1, 3, 5] if fault == "half" else [0, 1, 2, 3, 4, 5])
    filtered = [ends for what, ends in notes() if what == "filtered"]
    assert filtered == [[8, 8]] * (2 if fault == "kill" else 1)  # a new worker may report it again
    sent = {number for what, given in notes() if what in ("sent", "half") for number in given}
    assert sent == set(range(16)) - set(reported) - {8}


@pytest.mark.parametrize("fault", ["down", "half", "kill"])
@pytest.mark.parametrize(
    ("rule", "payloads", "planned", "chosen"),
    [
        ({"sample": 2}, list(range(12)), [0, 2, 4, 6, 8, 10], [[1, 3, 5, 7, 9], [2, 4, 6, 8, 10]]),
        ({"deadband": {"": 1}}, [10, 10.8, 11.6, 11.6], [0, 2], [[1], [2]]),
    ],
)
def test_when_a_message_is_dropped_out_of_a_batch_what_the_rules_choose_without_it_is_sent(
    tmp_path: Path,
    fault: str,
    rule: dict[str, Any],
    payloads: list[float],
    planned: list[int],
    chosen: list[list[int]],
) -> None:
    drop_in(tmp_path, "patient", PATIENT)
    out, count = tmp_path / "out", len(payloads)
    (tmp_path / ("out.half" if fault == "half" else "out.down")).touch()

    def notes(*kinds: str) -> list[Any]:
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        return [given for what, given in lines if not kinds or what in kinds]

    async def scenario() -> None:
        async with running(tmp_path, tuning=QUICK) as gateway:
            exports = {"patient": [{"identifier": "x", "path": str(out), "reduce": [rule]}]}
            gateway.create("a", exports, limits={"maxMessages": count})
            await gateway.append("a", *(b"%g" % payload for payload in payloads))
            await until(lambda: notes("tried") and gateway.status("a").error_message)
            assert (notes("half") or notes("tried"))[0] == (planned[::2] if fault == "half" else planned)
            done = {number for given in notes("half") for number in given}
            for n, numbers in enumerate(chosen):
                await gateway.append("a", b"%g" % payloads[-1])  # number n makes room
                await gateway.manager.refresh()
                if fault == "kill" and n == 0:
                    assert gateway.exports.pid is not None
                    os.kill(gateway.exports.pid, signal.SIGKILL)
                wanted = [number for number in numbers if number not in done]
                await until(lambda wanted=wanted: notes("tried")[-1] == wanted)
            (tmp_path / "out.down").unlink()
            await gateway.exported("a", count + len(chosen) - 1)
            status = gateway.status("a")
            sent = {number for given in notes("sent", "half") for number in given}
            assert status.exported_messages_count == len(sent)
            assert status.exported_messages_count + status.skipped_messages_count == count + len(chosen)

    asyncio.run(scenario())


def test_mistakes_in_an_export_definition_are_named_with_path_and_remedy(recorder: Path) -> None:
    async def scenario() -> None:
        async with running(recorder) as gateway:
            for exports, words in [
                ({"recoder": [{}]}, ["recoder", "did you mean 'recorder'"]),
                (
                    {"recorder": [to(recorder), to(recorder)]},
                    ["recorder[1].identifier", "another export has the identifier"],
                ),
                ({"recorder": [to(recorder, batchSize=0)]}, ["recorder[0].batchSize", ">= 1"]),
                ({"recorder": [to(recorder, batchsize=1)]}, ["batchsize", "did you mean `batchSize`"]),
                ({"recorder": [{"identifier": "x"}]}, ["recorder[0]", "path"]),
                (
                    {"s3": [{"identifier": "x", "bucket": "bbb", "kmsKeyId": "k"}]},
                    ["s3[0]", "kmsKeyId needs"],
                ),
                (
                    {"firehose": [{"identifier": "x", "deliveryStreamName": "s", "endpointUrl": "host:80"}]},
                    ["firehose[0].endpointUrl", "https?://"],
                ),
            ]:
                with pytest.raises(InvalidRequest) as caught:
                    gateway.create("a", exports)
                assert all(word in str(caught.value) for word in words), caught.value

    asyncio.run(scenario())


@pytest.mark.slow(seconds=15)
def test_a_backlog_of_a_gibibyte_drains_with_bounded_memory(recorder: Path) -> None:
    async def scenario() -> int:
        async with running(recorder) as gateway:
            config = to(recorder, disabled=True)
            gateway.create("a", {"recorder": [config]}, maxSize=2 << 30)
            body = bytes(4096)
            for _ in range(1024):
                await gateway.append("a", *[body] * 256)
            gateway.update("a", {"recorder": [{**config, "disabled": False}]}, maxSize=2 << 30)
            largest = 0
            while gateway.status("a").last_exported_sequence_number < 1024 * 256 - 1:
                largest = max(largest, gateway.exports.memory)
                await asyncio.sleep(0.05)
            return largest

    assert 0 < asyncio.run(scenario()) < 150 << 20
    assert numbers(recorder / "out") == list(range(1024 * 256))
