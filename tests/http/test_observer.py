"""What the observer counts as what, and when the disk hangs: it says so, and holds nobody up."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from bridge.http import metrics
from bridge.http.observer import Observer
from bridge.model import Delivery, MessageStreamDefinition, StrategyOnFull
from bridge.operations.manager import StreamManager
from bridge.plugin.discovery import Registry
from bridge.streams.store import StreamStore
from tests.fakes.clock import NOON_2026, Machine
from tests.mqtt.harness import NoExports, NoWorker


def test_a_disk_that_hangs_is_reported_in_time_and_only_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, asked = threading.Event(), []

    def hang(_: int) -> None:
        asked.append(threading.get_ident())
        released.wait(30)

    async def look() -> None:
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None)
        manager = StreamManager(store, Registry(), NoExports())
        watching = Observer("plant-7", tmp_path / "data", manager, NoWorker(), {}, probe_timeout=0.05)
        monkeypatch.setattr(os, "fdatasync", hang)
        try:
            assert await watching.storage_error() == f"{tmp_path / 'data'} does not answer"
            assert await watching.storage_error() == f"{tmp_path / 'data'} does not answer"
            assert len(asked) == 1
            assert watching.state(fresh=True).storage_error is not None
            released.set()
            while await watching.storage_error() is not None:
                assert len(asked) == 1
        finally:
            released.set()
            monkeypatch.undo()
            watching.close()
            await store.close()

    asyncio.run(look())


class Door:
    """A front end that only has numbers."""

    def stats(self) -> dict[str, int]:
        return {"ended_sessions": 1, "waiting": 3}


def test_a_stream_that_is_being_deleted_is_shown_and_logged_at_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def look() -> None:
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None)
        manager = StreamManager(store, Registry(), NoExports())
        for name in ("goes", "stays"):
            manager.create(
                MessageStreamDefinition(
                    name=name,
                    strategy_on_full=StrategyOnFull.RejectNewData,
                    delivery=Delivery(deleting=name == "goes"),
                )
            )
        manager.report_deleting()
        watching = Observer("plant-7", tmp_path / "data", manager, NoWorker(), {"mqtt": Door()})
        try:
            assert {s.name: s.deleting for s in watching.state().streams} == {"goes": True, "stays": False}
        finally:
            watching.close()
            await store.close()

    asyncio.run(look())
    (logged,) = [record for record in caplog.records if "still being deleted" in record.message]
    assert vars(logged)["stream"] == "goes"
    assert "AllowForceDelete" in logged.message


def test_only_messages_that_were_dropped_or_refused_are_counted_as_such(tmp_path: Path) -> None:
    async def look() -> None:
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None)
        manager = StreamManager(store, Registry(), NoExports())
        manager.create(MessageStreamDefinition(name="s", strategy_on_full=StrategyOnFull.RejectNewData))
        for what in ("overwritten", "full", "too_large", "failed", "delete_failed", "corrupt_reads"):
            manager.stream("s").count(what)
        watching = Observer("plant-7", tmp_path / "data", manager, NoWorker(), {"mqtt": Door()})
        try:
            state = watching.state()
        finally:
            watching.close()
            await store.close()
        assert state.streams[0].dropped == {"overwritten": 1}
        assert state.streams[0].rejected == {"full": 1, "too_large": 1, "failed": 1}
        assert state.streams[0].failures == {"delete_failed": 1, "corrupt_reads": 1}
        told = metrics.render(state).decode()
        assert 'streambridge_stream_file_failures_total{reason="corrupt_reads",stream="s"} 1.0' in told
        assert 'streambridge_waiting_messages{front_end="mqtt"} 3.0' in told
        assert 'streambridge_events_total{event="ended_sessions",front_end="mqtt"} 1.0' in told
        assert "streambridge_dropped_messages_total{" not in told

    asyncio.run(look())


def test_a_burst_between_two_steps_of_the_history_counts_whatever_streams_come_and_go(tmp_path: Path) -> None:
    async def look() -> None:
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None)
        manager = StreamManager(store, Registry(), NoExports())
        watching = Observer("plant-7", tmp_path / "data", manager, NoWorker(), {}, history_step=0)

        async def step() -> None:
            known = len(watching.history.times())
            running = asyncio.create_task(watching.run())  # begins with a step
            while len(watching.history.times()) == known:
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        async def put(name: str, number: int) -> None:
            for _ in range(number):
                manager.stream(name).append(b"t", b"21.5")
            await manager.stream(name).idle()

        def create(name: str) -> None:
            manager.create(MessageStreamDefinition(name=name, strategy_on_full=StrategyOnFull.RejectNewData))

        try:
            create("goes")
            create("stays")
            await put("goes", 50)
            await step()
            await put("stays", 3000)
            await step()
            await step()
            manager.delete("goes")
            await put("stays", 10)
            await step()
            create("goes")
            await put("goes", 7)
            await step()
            assert watching.history.column("stored") == [0, 3000, 3000, 3010, 3017]
        finally:
            watching.close()
            await store.close()

    asyncio.run(look())


def test_a_wall_clock_that_ntp_sets_is_shown(tmp_path: Path) -> None:
    async def look() -> None:
        machine = Machine(40, synchronised=False)
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None, system=machine)
        watching = Observer(
            "plant-7", tmp_path / "data", StreamManager(store, Registry(), NoExports()), NoWorker(), {}
        )
        try:
            before = metrics.render(watching.state()).decode()
            machine.set_wall(NOON_2026)
            store.clock.watch()
            after = watching.state(fresh=True)
        finally:
            watching.close()
            await store.close()
        assert "streambridge_clock_synchronised 0.0" in before
        assert "streambridge_clock_steps_total 0.0" in before
        assert (after.clock_synchronised, after.clock_steps, after.clock_step) == (
            True,
            1,
            int(NOON_2026 - 40) * 1000,
        )
        assert "streambridge_clock_steps_total 1.0" in metrics.render(after).decode()

    asyncio.run(look())
