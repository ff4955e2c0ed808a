"""Ten thousand streams on one gateway: what each costs does not depend on how many there are.

No test here asserts a time. They compare the cost per stream with few and with many.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from bridge.config import settings
from bridge.errors import StorageFailed
from bridge.streams.meta import StorageSettings
from bridge.streams.store import StreamStore
from bridge.streams.verify import verify

from .export.harness import RECORDER, drop_in, running
from .fakes.clock import Shifted
from .fakes.measured import least
from .streams.conftest import payloads, put


def test_reading_fragments_costs_the_same_for_each_stream(tmp_path: Path) -> None:
    """A fragment once looked through the positions of all files for each of its keys."""

    def cost(number: int, name: str) -> float:
        root = tmp_path / name
        (root / "conf.d").mkdir(parents=True)
        for name, file in (("a", "bridge.toml"), ("b", "conf.d/more.toml")):
            tables = "".join(f'[streams.{name}{n}]\ntopics = ["{name}/{n}"]\n' for n in range(number))
            (root / file).write_text(tables)
        took = []
        for _ in range(3):
            gc.collect()  # what earlier tests left is not collected within
            began = time.thread_time()
            found = settings.load(root / "bridge.toml", dict)
            took.append((time.thread_time() - began) / number)
            assert len(found.streams) == 2 * number
        return min(took)

    cost(100, "first")
    few, many = cost(100, "few"), cost(2000, "many")
    assert many < 8 * few, "20 times as many would cost 20 times as much each"


class Counting(Shifted):
    """A machine that counts the readings of its clock: `maintain` takes one for each stream."""

    readings = 0

    def boottime(self) -> int:
        self.readings += 1
        return super().boottime()


@asynccontextmanager
async def many(
    root: Path, number: int, machine: Shifted, *, memory: bool = True
) -> AsyncIterator[StreamStore]:
    store = StreamStore(root / "data", root / "memory", on_event=lambda *what: None, system=machine)
    try:
        for n in range(number):
            store.create(f"s{n}", StorageSettings(memory=memory), b"{}")
        yield store
    finally:
        await store.close()


def test_maintaining_many_streams_holds_the_event_loop_no_longer_than_maintaining_few(tmp_path: Path) -> None:
    async def most_in_one_turn(number: int) -> int:
        machine, most = Counting(), 0
        async with many(tmp_path / str(number), number, machine) as store:
            keeping = asyncio.create_task(store.keep(0.01))
            machine.readings = before = 0
            while machine.readings < 3 * number:
                await asyncio.sleep(0)
                most, before = max(most, machine.readings - before), machine.readings
            keeping.cancel()
        return most

    few, more = asyncio.run(most_in_one_turn(250)), asyncio.run(most_in_one_turn(750))
    assert few > 100
    assert more < 1.5 * few


def test_a_start_and_verify_cost_the_same_for_each_stream(tmp_path: Path) -> None:
    def cost(number: int) -> tuple[float, float]:
        root = tmp_path / str(number)

        async def make() -> None:
            async with many(root, number, Shifted(), memory=False) as store:
                await asyncio.gather(*(put(stream, b"a") for stream in store.streams.values()))

        async def start() -> float:
            began = time.process_time()
            async with many(root, 0, Shifted()) as store:
                assert [stream.next_sequence for stream in store.streams.values()] == [1] * number
                return (time.process_time() - began) / number

        def check() -> float:
            began = time.process_time()
            found = verify(root / "data")
            assert [(one.newest, one.problems) for one in found] == [(0, [])] * number
            return (time.process_time() - began) / number

        asyncio.run(make())
        return min(asyncio.run(start()) for _ in range(3)), min(check() for _ in range(3))

    cost(20)
    few, more = cost(50), cost(750)
    assert more[0] < 5 * few[0], "15 times as many would cost 15 times as much each"
    assert more[1] < 5 * few[1], "15 times as many would cost 15 times as much each"


def test_more_streams_than_files_may_be_open_are_refused_and_keep_their_messages(tmp_path: Path) -> None:
    """They once took all files, and then the service could not start."""

    async def scenario() -> None:
        events: list[str] = []

        def store(most: int) -> StreamStore:
            return StreamStore(
                tmp_path / "data",
                tmp_path / "memory",
                on_event=lambda *what: events.append(str(what)),
                most=most,
            )

        opened = store(3)
        for name in "abc":
            await put(opened.create(name, StorageSettings(), b"{}"), name.encode())
        with pytest.raises(StorageFailed, match="3 streams are open"):
            opened.create("d", StorageSettings(), b"{}")
        assert sorted(opened.streams) == ["a", "b", "c"]
        opened.delete("a")
        opened.create("d", StorageSettings(), b"{}")
        await opened.close()
        fewer = store(2)
        assert sorted(fewer.streams) == ["b", "c"]
        assert "2 streams are open" in fewer.unopened["d"].why
        assert len(events) == 1
        await fewer.close()
        again = store(3)
        assert [payloads(again.streams[name]) for name in "bcd"] == [[b"b"], [b"c"], []]
        await again.close()

    asyncio.run(scenario())


@pytest.mark.slow(seconds=30)
def test_an_export_costs_the_worker_the_same_among_few_and_among_many(tmp_path: Path) -> None:
    """The worker once looked through all exports at every step of each."""

    async def cost(number: int) -> float:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        drop_in(root, "recorder", RECORDER)
        async with running(root) as gateway:
            assert gateway.exports.pid is not None
            worker = psutil.Process(gateway.exports.pid)
            for n in range(number):
                exports = {"recorder": [{"identifier": "x", "path": str(root / "out")}]}
                gateway.create(f"s{n}", exports, persistence=1)
                await asyncio.sleep(0)
            for round_number in range(3):
                if round_number == 1:  # all have begun
                    began = worker.cpu_times()
                for n in range(number):
                    gateway.store.streams[f"s{n}"].append(b"t", b"x")
                await asyncio.gather(*(gateway.exported(f"s{n}", round_number, 120) for n in range(number)))
            ended = worker.cpu_times()
        return (ended.user + ended.system - began.user - began.system) / number

    few = asyncio.run(cost(100))
    assert least(lambda: asyncio.run(cost(2000)), 2.5 * few, attempts=3) < 2.5 * few
