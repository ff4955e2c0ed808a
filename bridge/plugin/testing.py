"""The exporter contract, as tests to inherit.

    class TestKafka(ExporterContract):
        exporter = KafkaExporter

        def config(self): return {"identifier": "k", "brokers": [...]}
        def payload(self, number): return b"message %d" % number
        def delivered(self): return [int(m.split()[1]) for m in the_topic()]

        @contextmanager
        def unreachable(self): ...          # one context manager for each fault of the destination
        faults = ("unreachable",)
        delays = ()                         # and for each way in which it is slow

pytest finds the inherited tests; nothing here needs pytest itself. The suite calls the exporter as
the export worker does: from one thread, with batches in order, and with retries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import msgspec

from bridge.plugin.api import Batch, Context, Exporter, Outcome, Record, Retry, convert_config

ATTEMPTS = 10


def make_batch(payloads: Sequence[bytes], first: int = 0, topic: str = "plant/1/temperature") -> Batch:
    """Make a batch of one record per payload, numbered from `first`."""
    now = time.time_ns() // 1_000_000
    records = [Record(first + n, now, topic, payload) for n, payload in enumerate(payloads)]
    return Batch("gateway", "stream", 1_700_000_000_000, first, first + len(records) - 1, records)


def attempt(exporter: Exporter, batch: Batch) -> Outcome:
    """Call `export` once; a `Retry` becomes an outcome."""
    try:
        return exporter.export(batch)
    except Retry as error:
        return Outcome(retry=range(len(batch.records)), error=str(error), after=error.after)


def deliver(exporter: Exporter, batch: Batch, attempts: int = ATTEMPTS) -> dict[int, str]:
    """Export and retry until all records are settled. Return the rejected ones by sequence number."""
    rejected: dict[int, str] = {}
    for number in range(1, attempts + 1):
        outcome = attempt(exporter, batch)
        check_outcome(outcome, batch)
        again = set(outcome.retry)
        rejected |= {
            batch.records[n].sequence_number: why for n, why in outcome.rejected.items() if n not in again
        }
        if not again:
            return rejected
        if not exporter.limits.contiguous:
            batch = msgspec.structs.replace(batch, records=[batch.records[n] for n in sorted(again)])
        batch = msgspec.structs.replace(batch, attempt=number + 1)
    raise AssertionError(f"not delivered in {attempts} attempts: {outcome.error}")


def check_outcome(outcome: object, batch: Batch) -> None:
    """Raise AssertionError if an outcome does not match its batch."""
    assert isinstance(outcome, Outcome), f"export returned {outcome!r}, not an Outcome"
    mistake = outcome.mistake(batch)
    assert mistake is None, f"export returned an Outcome whose {mistake}"
    assert not set(outcome.retry) & outcome.rejected.keys(), f"both retried and rejected: {outcome}"
    assert not outcome.retry or outcome.error, f"retried without an error: {outcome}"


class ExporterContract:
    """Inherit this class, and override its first part."""

    exporter: ClassVar[type[Exporter]]  # the class to test
    faults: ClassVar[Sequence[str]] = ()  # names of context managers that break the destination
    delays: ClassVar[Sequence[str]] = ()  # names of those that slow it down, within its time-outs
    poison: ClassVar[bytes | None] = None  # a payload that the destination can never accept
    ordered: ClassVar[bool] = True  # whether records arrive in the order of their numbers

    def config(self) -> Mapping[str, Any]:
        """Return a configuration in wire format (camelCase)."""
        raise AssertionError("config() is missing")

    def payload(self, number: int) -> bytes:
        """Return a payload that the exporter accepts."""
        return b"message %d" % number

    def delivered(self) -> list[int]:
        """Return the numbers whose payloads are at the destination, in order of arrival."""
        raise AssertionError("delivered() is missing")

    def context(self) -> Context:
        """Return the context that exporters get."""
        return Context()

    def make(self) -> Exporter:
        """Make an exporter with the configuration."""
        return self.exporter(convert_config(self.exporter, self.config()), self.context())

    def payloads(self, count: int, first: int = 0) -> list[bytes]:
        """Return `count` valid payloads."""
        return [self.payload(first + n) for n in range(count)]

    def batch_size(self) -> int:
        """Return the size of the test batches: as many records as the exporter accepts, up to 20."""
        return min(self.exporter.limits.records or 20, 20)

    # --- the contract

    def test_the_configuration_is_read_and_unknown_keys_are_errors(self) -> None:
        """A mistake in a definition is found at once, not when data waits."""
        convert_config(self.exporter, self.config())
        try:
            convert_config(self.exporter, {**self.config(), "noSuchKey": 1})
        except msgspec.ValidationError:
            return
        raise AssertionError("an unknown key was accepted; use forbid_unknown_fields=True")

    def test_every_record_arrives_and_in_order(self) -> None:
        """Three batches, one after the other."""
        exporter, size = self.make(), self.batch_size()
        for first in range(0, 3 * size, size):
            assert deliver(exporter, make_batch(self.payloads(size, first), first)) == {}
        exporter.close()
        found = self.delivered()
        assert sorted(found) == list(range(3 * size)), f"{3 * size} were sent, {sorted(found)} arrived"
        assert not self.ordered or found == sorted(found), f"out of order: {found}"

    def test_a_batch_may_be_sent_twice(self) -> None:
        """After a crash, a new instance gets the last batch again."""
        size = self.batch_size()
        batch = make_batch(self.payloads(size))  # made only once, so that its times stay the same
        for _ in range(2):
            exporter = self.make()
            assert deliver(exporter, batch) == {}
            exporter.close()
        assert set(self.delivered()) == set(range(size))

    def test_a_batch_may_lack_what_filters_leave_out(self) -> None:
        """At its ends and in the middle, if the exporter declares it, and even if it is sent twice."""
        if not self.exporter.limits.declares_filtered:
            return
        size = self.batch_size()
        batch = make_batch(self.payloads(size))
        kept = [record for record in batch.records if record.sequence_number % 3 == 1]
        batch = msgspec.structs.replace(batch, records=kept)
        for _ in range(2):
            exporter = self.make()
            assert deliver(exporter, batch) == {}
            exporter.close()
        assert set(self.delivered()) == {record.sequence_number for record in kept}

    def test_a_full_batch_goes_through(self) -> None:
        """As many records as the limits allow."""
        size = min(self.exporter.limits.records or 1000, 1000)
        exporter = self.make()
        assert deliver(exporter, make_batch(self.payloads(size))) == {}
        exporter.close()
        assert set(self.delivered()) == set(range(size))

    def test_faults_are_retried_and_nothing_is_rejected(self) -> None:
        """The records arrive once the destination or the link has recovered."""
        first, size = 0, self.batch_size()
        for fault in self.faults:
            exporter = self.make()
            batch = make_batch(self.payloads(size, first), first)
            breaking: AbstractContextManager[object] = getattr(self, fault)()
            with breaking:
                outcome = attempt(exporter, batch)
            check_outcome(outcome, batch)
            assert not outcome.rejected, f"{fault}: rejected {outcome.rejected}"
            assert outcome.retry, f"{fault}: counted as delivered"
            # The same batch, as after a crash: accepted records may arrive twice.
            assert deliver(exporter, batch) == {}, fault
            exporter.close()
            arrived = set(self.delivered())
            assert set(range(first, first + size)) <= arrived, f"{fault}: only {sorted(arrived)} arrived"
            first += size

    def test_slow_answers_are_awaited(self) -> None:
        """A batch with a late answer is not sent twice."""
        first, size = 0, self.batch_size()
        for delay in self.delays:
            exporter = self.make()
            batch = make_batch(self.payloads(size, first), first)
            slow: AbstractContextManager[object] = getattr(self, delay)()
            with slow:
                outcome = attempt(exporter, batch)
            check_outcome(outcome, batch)
            exporter.close()
            assert not outcome.retry, f"{delay}: {outcome.error}"
            assert not outcome.rejected, f"{delay}: rejected {outcome.rejected}"
            arrived = sorted(number for number in self.delivered() if number >= first)
            assert arrived == list(range(first, first + size)), f"{delay}: {arrived} arrived"
            first += size

    def test_a_record_that_can_never_succeed_is_rejected_alone(self) -> None:
        """The other records of its batch arrive."""
        if self.poison is None:
            return
        size = self.batch_size()
        bad = size // 2
        payloads = [self.poison if n == bad else self.payload(n) for n in range(size)]
        exporter = self.make()
        rejected = deliver(exporter, make_batch(payloads))
        exporter.close()
        assert rejected.keys() == {bad}, f"rejected: {rejected}"
        assert set(self.delivered()) == set(range(size)) - {bad}

    def test_closing_always_works(self) -> None:
        """Even before the first batch, after a failed one, and while the destination is down."""
        self.make().close()
        for fault in self.faults:
            exporter = self.make()
            breaking: AbstractContextManager[object] = getattr(self, fault)()
            with breaking:
                attempt(exporter, make_batch(self.payloads(1)))
                exporter.close()
