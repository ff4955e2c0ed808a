"""The store against a plain list: hypothesis drives both through appends, drops, crashes and faults."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bridge.errors import StreamError
from bridge.operations.manager import committed
from bridge.streams.drops import DropReason
from bridge.streams.meta import MessageLimits, StorageSettings
from bridge.streams.store import StreamStore

from .conftest import everything
from .test_faults import Faulty

TOPICS = st.sampled_from([b"a", b"b", b"c/d"])
PAYLOADS = st.binary(max_size=300)


class Against(RuleBasedStateMachine):
    """`model` maps the numbers of live messages to (topic, payload); `next` is the next number."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.files = Faulty()
        self.loop = asyncio.new_event_loop()
        self.model: dict[int, tuple[bytes, bytes]] = {}
        self.next = 0
        self.store: StreamStore | None = None

    def teardown(self) -> None:
        self.files.fails = lambda call: 0
        if self.store is not None:
            self.loop.run_until_complete(self.store.close())
        self.loop.close()
        shutil.rmtree(self.root)

    @initialize(
        flush=st.booleans(),
        overwrite=st.booleans(),
        segment_size=st.sampled_from([1024, 4096]),
        most=st.none() | st.integers(1, 20),
        per_topic=st.none() | st.integers(1, 5),
        most_bytes=st.none() | st.integers(1, 2000),
    )
    def begin(
        self,
        flush: bool,
        overwrite: bool,
        segment_size: int,
        most: int | None,
        per_topic: int | None,
        most_bytes: int | None,
    ) -> None:
        self.limits = MessageLimits(max_messages=most, max_bytes=most_bytes, max_messages_per_topic=per_topic)
        self._open()
        assert self.store is not None
        self.stream = self.store.create(
            "s",
            StorageSettings(
                flush=flush,
                overwrite=overwrite,
                segment_size=segment_size,
                max_size=20_000,
                limits=self.limits,
            ),
            b"{}",
        )

    def _open(self) -> None:
        async def work() -> StreamStore:
            return StreamStore(
                self.root / "data", self.root / "memory", on_event=lambda *what: None, files=self.files
            )

        self.store = self.loop.run_until_complete(work())
        self.stream = self.store.streams.get("s")  # type: ignore[assignment]

    async def _append(self, rows: list[tuple[bytes, bytes]]) -> None:
        taken: list[tuple[int, tuple[bytes, bytes]]] = []
        before = self.next
        try:
            for topic, payload in rows:
                taken.append((self.stream.append(topic, payload), (topic, payload)))
        except StreamError:
            pass
        try:
            await committed(self.stream)
        except StreamError:
            assert self.stream.next_sequence == before
            return
        assert [number for number, _ in taken] == list(range(before, before + len(taken)))
        self.next += len(taken)
        self.model |= dict(taken)
        self._limit()

    def _limit(self) -> None:
        """What the message limits leave, computed the slow way; then what the segments have left."""
        limits = self.limits
        if limits.max_messages_per_topic is not None:
            for topic in (b"a", b"b", b"c/d"):
                mine = [n for n, (t, _) in sorted(self.model.items()) if t == topic]
                for number in mine[: -limits.max_messages_per_topic]:
                    del self.model[number]
        while limits.max_messages is not None and len(self.model) > limits.max_messages:
            del self.model[min(self.model)]
        while (
            limits.max_bytes is not None
            and sum(len(t) + len(p) for t, p in self.model.values()) > limits.max_bytes
        ):
            del self.model[min(self.model)]
        if self.stream.settings.overwrite:  # by segments: the model takes the range from the store
            overwritten = [d for d in self.stream.drops.ranges if d.reason == DropReason.OVERWRITTEN]
            for drop in overwritten:
                for number in [n for n in self.model if drop.first <= n <= drop.last]:
                    del self.model[number]

    @rule(rows=st.lists(st.tuples(TOPICS, PAYLOADS), min_size=1, max_size=12))
    def append(self, rows: list[tuple[bytes, bytes]]) -> None:
        self.loop.run_until_complete(self._append(rows))

    @rule(
        call=st.sampled_from(["write", "sync", "create .seg", "truncate", "unlink"]),
        skip=st.integers(0, 3),
        data=st.data(),
    )
    def append_while_a_call_fails(self, call: str, skip: int, data: st.DataObject) -> None:
        left = [skip]

        def fails(name: str) -> int:
            if name == call:
                left[0] -= 1
                return errno.EIO if left[0] < 0 else 0
            return 0

        self.files.fails = fails
        with contextlib.suppress(OSError):
            self.loop.run_until_complete(
                self._append(data.draw(st.lists(st.tuples(TOPICS, PAYLOADS), max_size=12)))
            )
        self.files.fails = lambda name: 0

    @rule(share=st.floats(0, 1))
    def purge_up_to(self, share: float) -> None:
        number = int(self.next * share)
        self.stream.drop_upto(number, DropReason.PURGED)
        self.model = {n: row for n, row in self.model.items() if n >= number}

    @rule(topic=TOPICS)
    def purge_a_topic(self, topic: bytes) -> None:
        gone = [n for n, (t, _) in self.model.items() if t == topic]
        self.stream.drop([(n, n) for n in gone], DropReason.PURGED)
        for number in gone:
            del self.model[number]

    @rule()
    def sync_and_maintain(self) -> None:
        assert self.store is not None
        self.loop.run_until_complete(self.store.committer.sync([self.stream]))
        self.stream.maintain(self.stream.clock.now())

    @rule()
    def restart(self) -> None:
        assert self.store is not None
        self.loop.run_until_complete(self.store.close())
        self._open()

    @rule()
    def crash(self) -> None:
        """The process dies: its files stay as they are, its lock and its memory are gone."""
        assert self.store is not None
        self.store._unlock()
        self.store.runtime.close()
        for stream in self.store.streams.values():
            stream.log.close()
            stream.closed = True  # what its threads still report to the loop is ignored
        self._open()

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        if self.store is None or self.stream is None:
            return
        found = {m.sequence_number: (m.topic, m.payload) for m in everything(self.stream)}
        assert found == self.model
        assert self.stream.next_sequence == self.next
        assert self.stream.live_messages() == len(self.model)


Against.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestTheStoreIsAPlainList = Against.TestCase
