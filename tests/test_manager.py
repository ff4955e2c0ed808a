"""The operations of StreamManager: definitions, update rules, describe's numbers, reads, purge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.errors import (
    InvalidDefinition,
    InvalidRequest,
    StorageFailed,
    StreamFull,
    StreamNotFound,
    UpdateNotAllowed,
)
from bridge.model import ExportStatus, MessageStreamDefinition, plain_definition
from bridge.operations.manager import PURGE_STEP, StreamManager
from bridge.operations.reading import ReadMessagesOptions
from bridge.plugin import discovery
from bridge.streams import verify
from bridge.streams.meta import StorageSettings
from bridge.streams.store import StreamStore

REGISTRY = discovery.load()


class NoExports:
    """The export side, when nothing is exported."""

    def define(self, *_: object) -> None: ...
    def pending(self, name: str) -> dict[str, list[Any]]:
        return {}

    def forget(self, name: str, pending: object = None) -> None: ...
    def committed(self, *_: object) -> None: ...
    def statuses(self, name: str) -> list[ExportStatus]:
        return []

    def exported_upto(self, name: str, holding: object = None) -> int | None:
        return None


@asynccontextmanager
async def opened(root: Path) -> AsyncIterator[StreamManager]:
    store = StreamStore(root / "data", root / "memory", on_event=lambda *what: None)
    try:
        yield StreamManager(store, REGISTRY, NoExports())
    finally:
        await store.close()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def definition(**more: Any) -> dict[str, Any]:
    return {"name": "s", "strategyOnFull": 0, **more}


def test_defaults_are_those_of_the_sdk(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
            found = manager.describe("s")
            assert found.definition.max_size == 268_435_456
            assert found.definition.stream_segment_size == 16_777_216
            assert found.definition.time_to_live_millis is None
            assert (found.definition.persistence, found.definition.flush_on_write) == (0, False)
            status = found.storage_status
            assert (status.oldest_sequence_number, status.newest_sequence_number) == (0, -1)

    run(work())


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"name": ""}, "definition.name"),
        ({"name": "a/b"}, "definition.name"),
        ({"name": "x" * 256}, "definition.name"),
        ({"strategyOnFull": 2}, "definition.strategyOnFull"),
        ({"maxSize": 1023}, "definition.maxSize"),
        ({"maxSize": 2**63}, "definition.maxSize"),
        ({"streamSegmentSize": 1023}, "definition.streamSegmentSize"),
        ({"streamSegmentSize": 2**31}, "definition.streamSegmentSize"),
        (
            {"maxSize": 4096, "streamSegmentSize": 8192},
            "definition.streamSegmentSize: is larger than maxSize; make it at most that",
        ),
        ({"timeToLiveMillis": 59_999}, "definition.timeToLiveMillis"),
        ({"persistence": "Disk"}, "definition.persistence"),
        ({"topics": ["a/#/b"]}, r"definition.topics\[0\]"),
        ({"topics": ["ok", "$SYS/#"]}, r"definition.topics\[1\]"),
        ({"topics": ["streambridge/x"]}, "belong to the broker"),
        ({"limits": {"maxMessages": 0}}, "definition.limits.maxMessages"),
        ({"limits": {"maxMesages": 1}}, "maxMesages"),
        ({"retention": "forever"}, "definition.retention"),
        ({"exportDefinition": {"kinessis": [{"identifier": "x"}]}}, "did you mean 'kinesis'"),
        ({"exportDefinition": {"s3": [{"identifier": "x"}]}}, "bucket"),
        (
            {"exportDefinition": {"s3TaskExecutor": [{"identifier": "x", "deadLetterStream": "s"}]}},
            r"exportDefinition\.s3TaskExecutor\[0\]\.deadLetterStream: 's' is the exported stream itself",
        ),
        (
            {
                "exportDefinition": {
                    "s3TaskExecutor": [
                        {"identifier": "x", "statusConfig": {"statusStreamName": "other"}},
                        {"identifier": "y", "statusConfig": {"statusStreamName": "s"}},
                    ]
                }
            },
            r"exportDefinition\.s3TaskExecutor\[1\]\.statusConfig\.statusStreamName: 's'",
        ),
    ],
)
def test_a_wrong_definition_is_refused_with_the_place_of_the_mistake(
    tmp_path: Path, more: dict[str, Any], complaint: str
) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            with pytest.raises(InvalidRequest, match=complaint):
                manager.create(definition(**more))
            assert manager.names() == []

    run(work())


def leads(name: str, to: str = "", key: str = "deadLetterStream") -> dict[str, Any]:
    """A definition with an export that appends to another stream."""
    appends = {"deadLetterStream": to} if key == "deadLetterStream" else {"statusConfig": {key: to}}
    exports = [{"identifier": "x", **appends}] if to else []
    return {"name": name, "strategyOnFull": 0, "exportDefinition": {"s3TaskExecutor": exports}}


@pytest.mark.parametrize("key", ["deadLetterStream", "statusStreamName"])
def test_streams_whose_exports_append_to_each_other_in_a_circle_are_refused(tmp_path: Path, key: str) -> None:
    why = r"s3TaskExecutor\[0\].*: exports lead from 'b' back to this stream \(b -> c -> a\)"

    async def work() -> None:
        async with opened(tmp_path) as manager:
            for raw in (leads("c"), leads("b", "c"), leads("a", "b")):
                manager.create(raw)
            with pytest.raises(InvalidDefinition, match=r"exports lead from 'a' back .* \(a -> b -> c\)"):
                manager.update(leads("c", "a", key))
            manager.update(leads("a"))
            manager.update(leads("c", "a", key))
            with pytest.raises(InvalidDefinition, match=why):
                manager.update(leads("a", "b"))
            manager.delete("a")
            with pytest.raises(InvalidDefinition, match=why):
                manager.create(leads("a", "b"))
            # What is about to apply counts, and not what it replaces.
            manager.create(leads("a", "b"), among={"c": manager.check(leads("c"))})

    run(work())


def test_a_mistake_in_a_definition_has_its_path_what_is_wrong_and_the_remedy(tmp_path: Path) -> None:
    exports = {"s3TaskExecutor": [{"identifier": "x"}, {"identifier": "y", "priority": 11}]}

    async def work() -> None:
        async with opened(tmp_path) as manager:
            with pytest.raises(InvalidDefinition) as caught:
                manager.create(definition(limits={"maxAgeMillis": 0}))
            assert (caught.value.path, caught.value.remedy) == (("limits", "maxAgeMillis"), "")
            with pytest.raises(InvalidDefinition) as caught:
                manager.create(definition(exportDefinition=exports))
            assert caught.value.path == ("exportDefinition", "s3TaskExecutor", 1, "priority")
            with pytest.raises(InvalidDefinition) as caught:
                manager.create(definition(exportDefinition={"s3TaskExecutor": [{"identifier": "x"}] * 2}))
            assert caught.value.result == {
                "path": ["exportDefinition", "s3TaskExecutor", 1, "identifier"],
                "what": "another export has the identifier 'x' too",
                "remedy": "choose another",
                "other": "",
            }

    run(work())


def test_the_strategy_on_full_must_be_given_and_unknown_keys_are_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            with pytest.raises(InvalidRequest, match="strategyOnFull"):
                manager.create({"name": "s"})
            with pytest.raises(InvalidRequest, match="unknownKey"):
                manager.create(definition(unknownKey=1))

    run(work())


def test_create_refuses_a_name_that_exists_and_others_need_one_that_does(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
            with pytest.raises(InvalidRequest, match="exists already"):
                manager.create(definition())
            for call in (manager.delete, manager.describe):
                with pytest.raises(StreamNotFound, match="'x'"):
                    call("x")  # type: ignore[operator]
            with pytest.raises(StreamNotFound, match="'x'"):
                await manager.purge("x")
            with pytest.raises(StreamNotFound):
                manager.update(definition(name="x"))

    run(work())


def test_an_update_replaces_the_whole_definition_and_survives_a_restart(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition(maxSize=65536, streamSegmentSize=4096, flushOnWrite=True))
            manager.update(definition(strategyOnFull=1, topics=["a/#"]))
        async with opened(tmp_path) as manager:
            found = manager.describe("s").definition
            assert found == MessageStreamDefinition(name="s", strategy_on_full=1, topics=["a/#"])  # type: ignore[arg-type]
            assert [stream.name for stream in manager.bound("a/b")] == ["s"]
            assert [stream.name for stream in manager.bound("streams/s/x")] == ["s"]
            assert manager.bound("b") == ()

    run(work())


def test_an_update_may_not_change_persistence(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition(maxSize=65536, streamSegmentSize=4096))
            with pytest.raises(UpdateNotAllowed, match=r"definition\.persistence"):
                manager.update(definition(persistence=1))

    run(work())


def test_a_size_below_what_is_stored_takes_effect_at_once_and_loses_nothing_that_must_stay(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition(maxSize=65536, streamSegmentSize=4096))
            stream = manager.stream("s")
            await manager.append_all("s", [b"x" * 1000] * 30)
            small = {"maxSize": 8192, "streamSegmentSize": 1024}
            manager.update(definition(**small))
            assert (stream.oldest, stream.live_messages()) == (0, 30), "it rejects: nothing stored goes"
            with pytest.raises(StreamFull, match="max_size 8192"):
                await manager.append("s", b"x")
            manager.update(definition(**small, retention="exported"))
            assert stream.oldest == 0
            stream.exported_upto = 10
            stream.maintain(0)
            assert 6 < stream.oldest <= 10, "what is exported goes, and no more"
            assert stream.counters == {"full": 1, "exported": stream.oldest}
            exported = stream.oldest
            manager.update(definition(**small, strategyOnFull=1))
            assert stream.total_bytes <= 8192
            assert stream.counters["overwritten"] == stream.oldest - exported > 10
            await manager.append("s", b"x")

    run(work())


def test_a_changed_start_of_an_export_must_be_below_the_newest_number(tmp_path: Path) -> None:
    def with_start(start: int) -> dict[str, Any]:
        http = {"identifier": "e", "uri": "http://127.0.0.1:1/", "startSequenceNumber": start}
        return definition(exportDefinition={"http": [http]})

    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(with_start(0))
            await manager.append_all("s", [b"x"] * 10)
            manager.update(with_start(8))
            manager.update(with_start(8))
            with pytest.raises(InvalidRequest, match="must be less than the newest sequence number 9"):
                manager.update(with_start(9))

    run(work())


def test_describe_counts_what_is_there_and_list_names_all(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
            manager.create(definition(name="a"))
            assert await manager.append_all("s", [b"1", b"2", b"3"]) == [0, 1, 2]
            assert await manager.purge("s", upto=1) == 1
            status = manager.describe("s").storage_status
            assert (status.oldest_sequence_number, status.newest_sequence_number) == (1, 2)
            files = sum(path.stat().st_size for path in (tmp_path / "data/streams/s").glob("*.seg"))
            assert status.total_bytes == files
            assert manager.names() == ["a", "s"]

    run(work())


def test_purge_drops_all_or_up_to_a_number_or_by_topic_and_numbers_go_on(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            stream = manager.create(definition(topics=["t/#"]))
            for n in range(10):
                stream.append(b"t/%d" % (n % 2), b"%d" % n)
            assert await manager.append("s", b"last") == 10
            assert await manager.purge("s", topic="t/1") == 5
            assert stream.live_messages() == 6
            assert await manager.purge("s", upto=4) == 2
            assert await manager.purge("s") == 4
            assert stream.live_messages() == 0
            assert await manager.append("s", b"x") == 11
            with pytest.raises(InvalidRequest, match="is not a topic filter"):
                await manager.purge("s", topic="a/#/b")

    run(work())


@pytest.mark.parametrize("topic", ["a/#/b", ""])
def test_a_read_by_a_topic_that_is_no_filter_is_refused_and_does_not_wait(tmp_path: Path, topic: str) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
            options = ReadMessagesOptions(topic=topic, read_timeout_millis=60_000)
            with pytest.raises(InvalidRequest, match="is not a topic filter"):
                await manager.read("s", options)

    run(work())


@pytest.mark.parametrize("wait", [0, 3_600_000])
def test_a_read_whose_stream_is_deleted_before_its_turn_ends_at_once(tmp_path: Path, wait: int) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
            await manager.append("s", b"x")

            @asynccontextmanager
            async def turn() -> AsyncIterator[None]:
                manager.delete("s")
                yield

            read = manager.read("s", ReadMessagesOptions(read_timeout_millis=wait), turn=turn)
            with pytest.raises(StreamNotFound):
                await asyncio.wait_for(read, 30)

    run(work())


def test_a_purge_by_topic_lets_others_have_their_turn_and_spares_what_comes_meanwhile(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            stream = manager.create(definition(topics=["t/#"]))
            for _ in range(25_000):
                stream.append(b"t/1", b"x")
            await manager.append("s", b"last")
            purge = asyncio.create_task(manager.purge("s", topic="t/1"))
            await asyncio.sleep(0)
            assert not purge.done()
            stream.append(b"t/1", b"meanwhile")
            assert await purge == 25_000
            assert await manager.append("s", b"x") == 25_002
            assert stream.live_messages() == 3
            again = asyncio.create_task(manager.purge("s", topic="t/1"))
            stream.append(b"t/1", b"x")
            await asyncio.sleep(0)
            manager.delete("s")
            with pytest.raises(StreamNotFound, match="deleted during the purge"):
                await again

    run(work())


def test_a_purge_by_topic_drops_little_by_little_and_counts_all(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            stream = manager.create(definition(topics=["t/#"]))
            for n in range(65_000):
                stream.append(b"t/%d" % (n % 2), b"x")
            await manager.append("s", b"last")
            before, steps = stream.live_messages(), []
            purge = asyncio.create_task(manager.purge("s", topic="t/1"))
            while not purge.done():
                await asyncio.sleep(0)
                steps.append(before - stream.live_messages())
                before = stream.live_messages()
            assert await purge == sum(steps) == 32_500
            assert max(steps) <= PURGE_STEP
            assert await manager.append("s", b"x") == 65_001

    run(work())


@pytest.mark.parametrize("limits", [{"maxMessages": 10**6}, {"maxMessagesPerTopic": 10**6}])
def test_a_purge_by_topic_from_a_stream_with_limits_spares_what_the_limits_allow(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            stream = manager.create(definition(topics=["t/#"], limits=limits))
            for n in range(25_000):
                stream.append(b"t/%d" % (n % 2), b"x")
            await manager.append("s", b"last")
            purge = asyncio.create_task(manager.purge("s", topic="t/1"))
            while not purge.done():
                stream.append(b"t/0", b"x")
                await asyncio.sleep(0)
            assert await purge == 12_500
            await manager.append("s", b"last")
            assert stream.live_messages() == stream.next_sequence - 12_500

    run(work())


def test_a_stream_that_cannot_be_opened_is_refused_by_every_front_end_and_never_denied(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
        for path in (tmp_path / "data/streams/s").glob("meta.*"):
            path.write_bytes(b"?")
        async with opened(tmp_path) as manager:
            reason = "exists, but could not be opened: .*`streambridge repair`"
            for attempt in (manager.create, manager.update):
                with pytest.raises(StorageFailed, match=reason):
                    attempt(definition())
            for ask in (manager.describe, manager.delete):
                with pytest.raises(StorageFailed, match=reason):
                    ask("s")
            assert list(manager.bindings.refused) == ["s"]
            manager.bindings.refuse(manager.check(definition(topics=["t/#"])), "declared")
            for topic in ("streams/s/x", "t/1"):
                with pytest.raises(StorageFailed):
                    manager.bound(topic)[0].append(topic.encode(), b"x")
            manager.declare({})
            assert manager.bound("t/1") == ()
            with pytest.raises(StorageFailed):
                manager.bound("streams/s")[0].append(b"streams/s", b"x")

    run(work())


def test_a_foreign_directory_keeps_neither_the_service_nor_a_repair_from_starting(
    tmp_path: Path,
) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
        (tmp_path / "data/streams/lost+found").mkdir()
        async with opened(tmp_path) as manager:
            assert (list(manager.bindings.refused), manager.names()) == (["lost+found"], ["s"])

    run(work())
    verify.repair(tmp_path / "data", lambda name: msgspec.json.encode(plain_definition(name)))

    async def repaired() -> None:
        async with opened(tmp_path) as manager:
            assert (manager.bindings.refused, sorted(manager.names())) == ({}, ["lost-found", "s"])
            manager.delete("lost-found")

    run(repaired())


def test_a_stored_definition_that_cannot_be_read_gives_way_to_the_default(tmp_path: Path) -> None:
    async def work() -> None:
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *what: None)
        store.create("s", StorageSettings(), b'{"name": "s", "strategyOnFull": 7}')
        await store.close()
        async with opened(tmp_path) as manager:
            assert manager.describe("s").definition.strategy_on_full == 0

    run(work())


def test_an_empty_payload_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.create(definition())
            with pytest.raises(InvalidRequest, match="at least one byte"):
                await manager.append("s", b"")

    run(work())


def test_a_refused_stream_accepts_messages_as_soon_as_it_is_created(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened(tmp_path) as manager:
            manager.bindings.refuse(manager.check(definition(topics=["a/#"])), "the disk said no")
            (refusal,) = manager.bound("a/b")
            with pytest.raises(StorageFailed, match="is unavailable: the disk said no"):
                refusal.append(b"a/b", b"x")
            stream = manager.create(definition(topics=["a/#"]))
            assert manager.bound("a/b") == (stream,)
            assert manager.bound("streams/s") == (stream,)

    run(work())
