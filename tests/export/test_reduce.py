"""The rules of `reduce`: what they leave of messages, and that a batch sent again has the same ones."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bridge import ExportConfig, Record, TransformState, objectkeys
from bridge.errors import InvalidDefinition
from bridge.export.wire import Tuning
from bridge.operations.manager import committed
from bridge.plugin import discovery
from bridge.plugin.transform import MAX_STATE
from tests.export.harness import Bucket, Gateway, drop_in, running, until

QUICK = Tuning(beat=0.1, silence=20.0, first_backoff=0.02, max_backoff=0.05, drain=1.0)
REGISTRY = discovery.load()
HOUR = 3_600_000


def config(*rules: dict[str, Any]) -> ExportConfig:
    raw = {"identifier": "k", "kinesisStreamName": "s", "reduce": list(rules)}
    return REGISTRY.config("kinesis", raw)


def sent(
    rows: list[tuple[str, Any]], *rules: dict[str, Any], times: list[int] | None = None
) -> list[tuple[int, bytes]]:
    """The numbers and payloads that the rules leave; a payload that is no bytes is published as JSON."""
    records = [
        Record(
            n,
            times[n] if times else n * 1000,
            topic,
            payload if isinstance(payload, bytes) else json.dumps(payload).encode(),
        )
        for n, (topic, payload) in enumerate(rows)
    ]
    return [(r.sequence_number, r.payload) for r in transformed(records, config(*rules), TransformState())]


def transformed(records: list[Record], rules: ExportConfig, state: TransformState) -> list[Record]:
    """What the hooks of the shipped plugins leave."""
    found = REGISTRY.hook.transform_records(
        records=records, stream="plant", kind="kinesis", config=rules, state=state
    )
    return next((result for result in found if result is not None), records)


def payloads(rows: list[Any], *rules: dict[str, Any]) -> list[bytes]:
    return [payload for _, payload in sent([("a", row) for row in rows], *rules)]


def positions(rows: list[Any], *rules: dict[str, Any], times: list[int] | None = None) -> list[int]:
    return [number for number, _ in sent([("a", row) for row in rows], *rules, times=times)]


# -- what a rule leaves ---------------------------------------------------------------------------


def test_fields_are_kept_dropped_and_renamed_at_any_depth_and_values_stay_digit_by_digit() -> None:
    row = b'{"ts": 1.50, "motor": {"speed": 1e3, "id": 123456789012345678901, "raw": [1, 2]}, "debug": "x"}'
    assert payloads([row], {"keep": ["/motor/speed", "/ts"]}) == [b'{"ts":1.50,"motor":{"speed":1e3}}']
    assert payloads([row], {"drop": ["/debug", "/motor/raw"]}) == [
        b'{"ts":1.50,"motor":{"speed":1e3,"id":123456789012345678901}}'
    ]
    assert payloads([row], {"keep": ["/motor"], "rename": {"/motor/speed": "rpm", "/motor": "m"}}) == [
        b'{"m":{"rpm":1e3,"id":123456789012345678901,"raw":[1, 2]}}'
    ]


def test_names_with_slashes_and_tildes_are_escaped_as_in_json_pointers() -> None:
    assert payloads([{"a/b": 1, "c~d": 2, "e": 3}], {"drop": ["/a~1b", "/c~0d"]}) == [b'{"e":3}']


def test_a_new_name_that_another_field_has_is_not_given_and_names_can_be_exchanged() -> None:
    assert payloads([{"a": 1, "b": 2}], {"rename": {"/a": "b"}}) == [b'{"a":1,"b":2}']
    assert payloads([{"a": 1, "b": 2}], {"rename": {"/a": "b", "/b": "a"}}) == [b'{"b":1,"a":2}']


def test_a_payload_of_which_nothing_is_left_out_is_sent_byte_by_byte() -> None:
    row = b'{ "a" : 1 ,\n "b":[ ] }'
    assert payloads([row], {"drop": ["/c", "/b/0"]}) == [row]


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\xff\xfe", b"21.5 C", b"[1,2]", b"[" * 100_000, b'{"a":' * 5000, b'{"a":1', b'"a"', b"null"),
        *(b'{"\xff":1}', b'{"\\ud800":1}', b"\x82\xa1a\x01"),
    ],
)
def test_what_is_no_json_object_passes_unchanged(payload: bytes) -> None:
    rule = {"keep": ["/a/b", "/c"], "rename": {"/a": "x"}, "deadband": {"/a": 1, "/c": "2%"}}
    assert payloads([payload, payload], rule) == [payload, payload]


def test_hostile_payloads_never_fail_a_batch() -> None:
    chance = random.Random(5)
    pieces = [
        b'{"a":',
        b"1e999",
        b"-0",
        b"}",
        b"[",
        b"]",
        b",",
        b'"\\u0000"',
        b"9" * 400,
        b"\xff",
        b"null",
        b'"b":',
    ]
    rules = [{"deadband": {"": "1%", "/a": 0}, "drop": ["/a/b"], "rename": {"/b": "c"}, "sample": 2}]
    rows = [b"".join(chance.choices(pieces, k=chance.randint(1, 8))) for _ in range(5000)]
    assert 2000 < len(payloads(rows, *rules)) <= 2500  # a few are JSON, and repeat the last value


def test_one_of_n_messages_of_each_topic_is_sent_whatever_they_are() -> None:
    rows: list[tuple[str, Any]] = [("a", b"\0"), ("b", {"x": 1})] * 10
    assert [n for n, _ in sent(rows, {"sample": 4})] == [0, 1, 8, 9, 16, 17]


def test_a_message_is_sent_when_a_value_leaves_the_band_around_the_last_one_that_was_sent() -> None:
    rows = [{"t": t} for t in (20, 20.5, 20.9, 21.0, 21.1, 20.2, 20.0, 22)]
    assert positions(rows, {"deadband": {"/t": 1}}) == [0, 4, 6, 7]
    rows = [{"t": t} for t in (100, 101, 102.1, 100.1, 100, 0, 0.001)]
    assert positions(rows, {"deadband": {"/t": "2%"}}) == [0, 2, 4, 5, 6]


def test_topics_have_their_own_last_values_and_the_first_rule_that_matches_counts() -> None:
    rows = [("p/1/t", 20), ("p/2/t", 50), ("p/1/t", 20.4), ("p/2/t", 52), ("x", 1), ("p/1/door", 1), ("x", 1)]
    rules = [{"topics": ["p/+/t"], "deadband": {"": 0.5}}, {"topics": ["p/#"], "sample": 9}]
    assert [number for number, _ in sent(rows, *rules)] == [0, 1, 3, 4, 5, 6]


def test_a_band_around_an_object_holds_for_each_value_in_it_and_a_longer_pointer_has_its_own() -> None:
    rule = {"deadband": {"": 0, "/ts": "ignore", "/plc/temp": 0.5}}
    rows = [
        {"ts": 1, "plc": {"temp": 20, "run": True, "w": [1, 2]}},
        {"ts": 2, "plc": {"temp": 20.4, "run": True, "w": [1, 2]}},
        {"ts": 3, "plc": {"temp": 20.4, "run": False, "w": [1, 2]}},
        {"ts": 4, "plc": {"temp": 20.4, "run": False, "w": [1, 3]}},
        {"ts": 5, "plc": {"temp": 21, "run": False, "w": [1, 3]}},
        {"ts": 6, "plc": {"temp": 21, "w": [1, 3]}},
    ]
    assert positions(rows, rule) == [0, 2, 3, 4]


def test_texts_and_large_integers_are_sent_when_they_differ() -> None:
    rows = [
        {"s": "open"},
        {"s": "open"},
        {"s": "shut"},
        {"s": None},
        {"s": 2**60},
        {"s": 2**60 + 1},
        {"s": 1},
        {},
    ]
    assert positions(rows, {"deadband": {"/s": 5}}) == [0, 2, 3, 4, 5, 6, 7]


def test_after_the_longest_silence_by_their_own_time_messages_are_sent_in_any_case() -> None:
    rule = {"deadband": {"/t": 1}, "longestSilenceMillis": HOUR}
    times = [0, HOUR - 1, HOUR, HOUR + 1, 2 * HOUR, 5 * HOUR, 4 * HOUR]
    assert positions([{"t": 1}] * 7, rule, times=times) == [
        0,
        2,
        4,
        5,
        6,
    ]  # the last: a clock that was set back
    assert positions([{"t": 1}] * 4, {"sample": 100, "longestSilenceMillis": 2000}) == [0, 2]


def test_a_message_with_too_many_values_to_compare_is_sent() -> None:
    rows = [{"v": list(range(size))} for size in (150, 150, 250, 250)]
    assert positions(rows, {"deadband": {"/v": 0}}) == [0, 2, 3]


def test_the_topics_that_are_beyond_the_bound_are_sent_again() -> None:
    rules, state = config({"deadband": {"": 0}}), TransformState()
    records = [Record(n, 0, f"t/{n}", b"1") for n in range(5000)]
    assert transformed(records, rules, state) == records
    state.advance(5000)
    assert MAX_STATE - 100 < len(state.stored()) <= MAX_STATE
    assert transformed(records[-1500:], rules, state) == []  # the newest are known
    assert transformed(records[:1500], rules, state) == records[:1500]


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        ({"keep": ["temp"]}, "JSON pointer"),
        ({"drop": [""]}, "whole payload"),
        ({"keep": ["/a"], "drop": ["/b"]}, "keep"),
        ({"rename": {"/a": "/b"}}, "not a pointer"),
        ({"deadband": {"/a": "2 percent"}}, "percentage"),
        ({"deadband": {"/a": -1}}, "number from 0"),
        ({"topics": ["a/#/b"]}, "topic filter"),
        ({"keep": ["/a"], "rename": {"/b": "c"}}, "`keep` does not name it"),
        ({"drop": ["/a"], "rename": {"/a/b": "c"}}, "`drop` leaves it out"),
        ({"topics": ["a"]}, "changes nothing"),
        ({}, "changes nothing"),
        ({"longestSilenceMillis": 1000}, "needs `sample` or `deadband`"),
        ({"sample": 0}, ">= 1"),
        ({"smaple": 2}, "unknown field"),
        ({"drop": ["/" + "x" * 20_000]}, "16384"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_with_the_remedy(rule: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidDefinition) as error:
        config(rule)
    assert word in error.value.sentence("")


def test_a_rule_behind_rules_for_all_of_its_topics_is_refused_and_an_exemption_before_others_is_not() -> None:
    exempt, every = {"topics": ["alarms/#"]}, {"sample": 10}
    config(exempt, every)
    with pytest.raises(InvalidDefinition, match="rule 2 is never used"):
        config(every, exempt | {"sample": 2})


def test_a_consumer_has_no_rules() -> None:
    with pytest.raises(InvalidDefinition, match="consumer"):
        REGISTRY.config("consumer", {"identifier": "c", "reduce": [{"sample": 2}]})


# -- the same messages in every attempt ------------------------------------------------------------

RULES = [
    {"topics": ["s/0"], "sample": 3, "drop": ["/x"]},
    {"deadband": {"/v": 2}, "longestSilenceMillis": 9000, "rename": {"/v": "value"}},
]


def readings(count: int, seed: int = 3) -> list[tuple[str, bytes]]:
    chance, values = random.Random(seed), [20.0] * 5
    rows = []
    for n in range(count):
        device = chance.randrange(5)
        values[device] += chance.gauss(0, 1)
        rows.append((f"s/{device}", b'{"n":%d,"v":%.2f,"x":1}' % (n, values[device])))
    return rows


def test_however_the_messages_are_cut_into_batches_and_repeated_the_same_ones_are_sent() -> None:
    rules, chance = config(*RULES), random.Random(9)
    records = [Record(n, n * 500, topic, payload) for n, (topic, payload) in enumerate(readings(1000))]
    expected = transformed(records, rules, TransformState())
    assert 200 < len(expected) < 800
    for _ in range(20):
        state, position, found = TransformState(), 0, []
        while position < len(records):
            ahead = records[position : position + chance.randint(1, 60)]
            state.rewind()
            kept = transformed(ahead, rules, state)
            cut = chance.choice([r.sequence_number for r in kept] or [ahead[-1].sequence_number])
            stored = state.stored()
            for _ in range(chance.randint(0, 2)):  # a retry, or a start after a kill
                if chance.random() < 0.5:
                    state = TransformState(stored)
                state.rewind()
                again = transformed(records[position : cut + 1], rules, state)
                assert again == [record for record in kept if record.sequence_number <= cut]
            found += [record for record in kept if record.sequence_number <= cut]
            state.advance(cut + 1)
            position = cut + 1
        assert found == expected


# An exporter that records its attempts. At a step after which it is to die, its process is killed.
MORTAL = '''
    import json, os, signal
    from bridge import *
    from bridge import hookimpl
    from bridge.export import cursor

    class Config(BatchedConfig, frozen=True):
        path: str

    steps, limit = 0, None

    def step():
        """One step of this life of the worker; life n ends at its step n * EVERY."""
        global steps, limit
        if limit is None:
            with open("{root}/lives", "ab") as lives:
                lives.write(b"x")
                limit = lives.tell() * {every}
        steps += 1
        if steps == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    real_sync = os.fdatasync

    class Mortal(cursor.Files):
        def write(self, fd, parts, offset):
            data = b"".join(parts)
            step()
            os.pwrite(fd, data[: len(data) // 2], offset)
            step()
            super().write(fd, [data], offset)
            step()

    def sync(fd):
        real_sync(fd)
        step()

    class Recorder(Exporter):
        kind = "mortal"
        Config = Config

        def export(self, batch):
            cursor.os.fdatasync = sync
            cursor.Files = Mortal
            step()
            rows = [[record.sequence_number, record.payload.decode()] for record in batch.records]
            with open(self.config.path, "a") as out:
                out.write(json.dumps([batch.first, batch.last, rows]) + chr(10))
            step()
            if os.path.exists(self.config.path + ".down"):
                raise Retry("down")
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Recorder)
'''


async def publish(gateway: Gateway, name: str, rows: list[tuple[str, bytes]]) -> None:
    stream = gateway.store.streams[name]
    for topic, payload in rows:
        stream.append(topic.encode(), payload)
    await committed(stream)


def attempts(path: Path) -> list[tuple[int, int, list[tuple[int, str]]]]:
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return [(first, last, [(number, payload) for number, payload in rows]) for first, last, rows in lines]


def killed_at_every(step: int, root: Path, count: int) -> None:
    """The worker dies at its step 1, 2, 3 ... (times `step`), and each attempt has what it should."""
    drop_in(root, "mortal", MORTAL.replace("{root}", str(root)).replace("{every}", str(step)))
    rows = readings(count)

    async def scenario() -> list[int]:
        async with running(root, tuning=QUICK) as gateway:
            export = {"identifier": "m", "path": str(root / "out"), "batchSize": 8, "reduce": RULES}
            gateway.create("a", {"mortal": [export]})
            await publish(gateway, "a", rows)
            await gateway.exported("a", count - 1, 300)
            status = gateway.status("a")
            assert status.exported_messages_count + status.skipped_messages_count == count
            return [row.ingest_time for row in (await gateway.manager.read("a", max_bytes=2**30))[:1]]

    (time,) = asyncio.run(scenario())
    records = [Record(n, time, topic, payload) for n, (topic, payload) in enumerate(rows)]
    kept = transformed(records, config(*RULES), TransformState())
    expected = [(r.sequence_number, r.payload.decode()) for r in kept]
    lives = (root / "lives").stat().st_size
    assert lives > 3
    found: dict[int, tuple[int, list[tuple[int, str]]]] = {}
    for first, last, sent_rows in attempts(root / "out"):
        assert found.setdefault(first, (last, sent_rows)) == (last, sent_rows), "a retry was another batch"
    assert [row for _, (_, sent_rows) in sorted(found.items()) for row in sent_rows] == expected


def test_a_worker_that_is_killed_sends_the_same_batches_again(tmp_path: Path) -> None:
    killed_at_every(11, tmp_path, 80)


@pytest.mark.slow
def test_a_worker_that_is_killed_at_every_step_sends_the_same_batches_again(tmp_path: Path) -> None:
    killed_at_every(1, tmp_path, 160)


def test_a_batch_that_waits_keeps_the_rules_with_which_it_was_made(tmp_path: Path) -> None:
    drop_in(tmp_path, "mortal", MORTAL.replace("{root}", str(tmp_path)).replace("{every}", "100000"))
    path, down = tmp_path / "out", tmp_path / "out.down"
    old, new = {"drop": ["/x"], "deadband": {"/v": 1}}, {"drop": ["/n"], "sample": 2}

    def export(rule: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
        return {"mortal": [{"identifier": "m", "path": str(path), "reduce": [rule]}]}

    async def scenario() -> None:
        async with running(tmp_path, tuning=QUICK) as gateway:
            gateway.create("a", export(old))
            down.touch()
            await publish(gateway, "a", [("s", b'{"n":%d,"v":%d,"x":1}' % (n, n // 2)) for n in range(5)])
            await until(lambda: len(attempts(path)) > 1)
            gateway.update("a", export(new))
            before = len(attempts(path))
            await until(lambda: len(attempts(path)) > before + 1)
        async with running(tmp_path, tuning=QUICK) as gateway:
            before = len(attempts(path))
            await until(lambda: len(attempts(path)) > before + 1)
            down.unlink()
            await gateway.exported("a", 4)
            await publish(gateway, "a", [("s", b'{"n":9,"v":9,"x":1}')] * 4)
            await gateway.exported("a", 8)

    asyncio.run(scenario())
    *first, last = attempts(path)
    assert {json.dumps(attempt) for attempt in first} == {
        json.dumps([0, 4, [[0, '{"n":0,"v":0}'], [4, '{"n":4,"v":2}']]])
    }
    assert [payload for _, payload in last[2]] == ['{"v":9,"x":1}'] * 2


def test_what_is_left_out_is_in_no_row_and_only_counted_on_the_gateway(
    tmp_path: Path, bucket: Bucket
) -> None:
    rule = {"topics": ["s/#"], "deadband": {"/v": 0}}

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"s3": [bucket.config(reduce=[rule])]})
            await publish(gateway, "a", [("s/1", b'{"v":%d}' % v) for v in (1, 1, 2, 3, 3, 3)])
            await gateway.exported("a", 5)
            await until(lambda: bucket.reported_exported() == [5])
            await until(lambda: gateway.status("a").skipped_messages_count == 3)
            assert bucket.report()["streams"][0]["dropped"] == []

    asyncio.run(scenario())
    rows = sorted(row["sequence_number"] for key in bucket.data_keys() for row in bucket.rows(key))
    assert rows == [0, 2, 3]
    assert [name.stream for key in bucket.data_keys() if (name := objectkeys.parse_key(key))] != []
