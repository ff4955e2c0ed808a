"""Payloads as typed columns, without Spark: every row has all its values somewhere, or a reason."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from random import Random
from typing import Any

import cbor2
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.ingest.errors import BadOption
from bridge.ingest.payloads import Misfit, decoded, text_of
from bridge.ingest.schema import Layout
from bridge.ingest.topicpattern import TopicPattern
from bridge.ingest.typed import Rules, Typing

STRUCT = pa.struct([("a", pa.float64()), ("b", pa.string())])
COLUMNS = {
    "d": pa.float64(),
    "i": pa.int64(),
    "s": pa.string(),
    "o": pa.bool_(),
    "r": STRUCT,
    "l": pa.list_(pa.float64()),
}


def rules(columns: dict[str, pa.DataType], *, strict: bool = False, form: str = "json") -> Rules:
    layout = Layout()
    layout.add(columns, ())
    schema = pa.schema([(layout.columns[key], kind) for key, kind in columns.items()])
    return Rules("", tuple(columns), schema.serialize().to_pybytes(), layout, strict, form)


def refined(
    rules: Rules, *payloads: bytes, exact: bool = False
) -> tuple[list[dict[str, Any]], list[str | None], Typing]:
    """Type the payloads, again when wider columns are needed, as a round does."""
    while True:
        typing = Typing(rules, fast=not exact)
        columns, reasons = typing.columns(pa.array(payloads, pa.binary()))
        if not typing.found.wider:
            table = pa.table(columns, schema=rules.columns())
            rows = [{k: v for k, v in row.items() if v is not None} for row in table.to_pylist()]
            return rows, reasons, typing
        for key, kind in sorted(typing.found.wider):
            rules.layout.widen(key, kind, ())


def one(kind: pa.DataType, payload: str, form: str = "json") -> Any:
    """The value of the column `x`, or the reason why the row is a reject."""
    rows, reasons, _ = refined(rules({"x": kind}, strict=True, form=form), b'{"x":%s}' % payload.encode())
    return reasons[0] or rows[0].get("x")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(['"x":1', " :", "\\", '"', "\ud800", "\u0000", "🌡"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c", "A"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["d", "i", "s", "o", "r", "l", "D", "x.y", "", "a b", "🌡", 'q"', "e:"])
TEXTS = st.one_of(
    st.builds(
        lambda value, spaced: json.dumps(value, separators=(" , ", " : ") if spaced else (",", ":")).encode(),
        st.dictionaries(KEYS, VALUES, max_size=5) | VALUES,
        st.booleans(),
    ),
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(  # keys may occur twice
        lambda pairs: ("{" + ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in pairs) + "}").encode()
    ),
    st.binary(max_size=12),
)


def whole(row: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The payload put together again from the columns of a row; `extra` has the complete value of a key."""
    found = {key: row[column] for key, column in layout.columns.items() if column in row}
    for key, kinds in layout.wider.items():
        for column in kinds.values():
            if column in row:
                found[key] = row[column]
    return found | json.loads(row.get("extra", "{}"))


def same(one: Any, other: Any) -> bool:
    """Equal, if a number may be an integer or a float, and null may be absent or in a column of text."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {key for key in {*one, *other} if one.get(key) is not None or other.get(key) is not None}
        return all(same(one.get(key), other.get(key)) for key in keys)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, str) and not isinstance(other, str):  # STRING takes any value, as JSON
        return same(json.loads(one), other)
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


@settings(max_examples=400)
@given(st.lists(TEXTS, min_size=1, max_size=5), st.booleans())
@example([b'{"a":null,"a":1}', b'{"d" :1,"d":2}', b'{"r":{"a":1,"a":2}}'], False)
@example([b'{"i":9223372036854775808}', b'{"d":9007199254740993}', b'{"d":1e400}', b'{"d":-0.0}'], True)
def test_the_fast_path_gives_what_the_exact_path_gives_and_nothing_is_lost(
    payloads: list[bytes], strict: bool
) -> None:
    rows, reasons, fast = refined(rules(COLUMNS, strict=strict), *payloads)
    again, why, exact = refined(rules(COLUMNS, strict=strict), *payloads, exact=True)
    assert (rows, reasons, fast.found) == (again, why, exact.found)
    for payload, row, reason in zip(payloads, rows, reasons, strict=True):
        try:
            value = json.loads(payload, object_pairs_hook=list)
        except ValueError:
            assert reason == "not JSON" or payload == b""
            continue
        if reason is None:
            value = json.loads(payload)
            sent = value if isinstance(value, dict) else {"value": value}
            assert same(whole(row, fast.rules.layout), sent), (row, sent)
        else:
            assert row == {}


FLAT = {"d": pa.float64(), "i": pa.int64(), "t": pa.int8(), "s": pa.string(), "o": pa.bool_()}
FITTING = st.fixed_dictionaries(
    {},
    optional={
        "d": st.none() | st.floats(-1e9, 1e9),
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "t": st.none() | st.integers(-128, 127),
        "s": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        "o": st.none() | st.booleans(),
    },
).map(lambda row: json.dumps(row, ensure_ascii=False).encode())
TRAPS = st.sampled_from(
    [
        b'{"d":NaN}',
        b'{"d":-Infinity}',
        b'{"d":9007199254740993}',
        b'{"d":1e400}',
        b'{"d":1,"d":2}',
        b'{"t":128}',
        b'{"d":1}{"d":2}',
        b'{"d":1}\n{"d":2}',
        b"",
        b" ",
        b"{",
        b"}",
        b'{"s":"',
        b'{"s":"\xff"}',
        b'{"s":"\\ud800"}',
        b'{"i":5.0}',
        b'{"i":1e2}',
        b'{"s":1.50}',
        b'{"x":1}',
        b'{"d":{"a":1}}',
        b'{"d":1}\x00',
        b' {"d":1}',
        b"1",
    ]
)


@settings(max_examples=400)
@given(st.lists(FITTING, max_size=6), st.lists(TRAPS, max_size=2), st.randoms(), st.booleans())
@example([b'{"d":1}{"d":2}', b""], [], Random(0), True)
@example([b'{"s":"x', b'{"}'], [], Random(0), False)
def test_batches_of_plain_payloads_give_what_the_exact_path_gives(
    fitting: list[bytes], traps: list[bytes], random: Random, strict: bool
) -> None:
    payloads = [*fitting, *traps]
    random.shuffle(payloads)
    rows, reasons, fast = refined(rules(FLAT, strict=strict), *payloads)
    again, why, exact = refined(rules(FLAT, strict=strict), *payloads, exact=True)
    assert (rows, reasons, fast.found) == (again, why, exact.found)


@pytest.mark.parametrize("odd", [1, 7], ids=["one odd payload", "odd ones in most slices"])
def test_odd_payloads_among_many_plain_ones_change_no_other_row(odd: int) -> None:
    payloads = [b'{"d":%d.5,"s":"%d"}' % (at, at) for at in range(10_000)]
    for at in range(odd):
        payloads[at * 1200 + 5] = b'{"d":%d,"s":"%d","more":1}' % (at, at)
    rows, reasons, fast = refined(rules(FLAT), *payloads)
    again, why, exact = refined(rules(FLAT), *payloads, exact=True)
    assert (rows, reasons, fast.found) == (again, why, exact.found)
    assert fast.found.extra_rows == odd


def test_a_value_goes_to_the_first_wider_column_that_holds_it_whatever_came_before() -> None:
    of = {
        b'{"d":20}': {"d": 20.0},
        b'{"d":9007199254740992}': {"d": 2.0**53},
        b'{"d":9007199254740993}': {"d_bigint": 2**53 + 1},
        b'{"d":36893488147419103232}': {"d_text": "36893488147419103232"},
        b'{"d":1e999}': {"d_text": "1E+999"},
        b'{"d":"hot"}': {"d_text": "hot"},
        b'{"d":[1,{"a":2.50}]}': {"d_text": '[1,{"a":2.50}]'},
        b'{"o":1}': {"o_double": 1.0},
        b'{"i":1.0}': {"i": 1},
        b'{"i":1.5}': {"i_double": 1.5},
        b'{"i":9223372036854775808}': {"i_text": "9223372036854775808"},
        b'{"s":1.50}': {"s": "1.50"},
        b'{"r":{"a":"hot"}}': {"r_text": '{"a":"hot"}'},
        b'{"d":' + b"9" * 5000 + b"}": {"d_text": "9" * 5000},
    }
    for payloads in (list(of), list(of)[::-1]):
        rows, reasons, _ = refined(rules(COLUMNS), *payloads)
        assert rows == [of[payload] for payload in payloads]
        assert set(reasons) == {None}


def test_keys_without_a_column_are_kept_and_counted() -> None:
    payloads = [
        b'{"d":1,"D":2,"":3,"a.b":4.10,"\xf0\x9f\x8c\xa1":null}',
        b'{"r":{"a":1,"more":2}}',
        b"21.5",
        b'{"d":1}',
    ]
    rows, reasons, typing = refined(rules(COLUMNS), *payloads)
    assert rows == [
        {"d": 1.0, "extra": '{"D":2,"":3,"a.b":4.10,"🌡":null}'},
        {"r": {"a": 1.0, "b": None}, "extra": '{"r":{"a":1,"more":2}}'},
        {"extra": '{"value":21.5}'},
        {"d": 1.0},
    ]
    assert set(reasons) == {None}
    assert typing.found.extra_rows == 3
    assert dict(typing.found.keys) == {"D": 1, "": 1, "a.b": 1, "🌡": 1, "r.more": 1, "value": 1}


def test_millions_of_keys_are_kept_and_only_some_are_named() -> None:
    payloads = [json.dumps({f"k{n}-{'x' * 200}": n for n in range(at, at + 500)}).encode() for at in (0, 500)]
    rows, _, typing = refined(rules({"d": pa.float64()}), *payloads)
    assert [len(json.loads(row["extra"])) for row in rows] == [500, 500]
    assert (typing.found.extra_rows, len(typing.found.keys)) == (2, 100)
    assert max(map(len, typing.found.keys)) == 100


def test_a_table_has_room_for_a_limited_number_of_wider_columns() -> None:
    columns = {f"k{n:03d}": pa.bool_() for n in range(120)}
    payload = json.dumps(dict.fromkeys(columns, "text")).encode()
    rows, _, typing = refined(rules(columns), payload)
    kept = json.loads(rows[0].pop("extra"))
    assert (len(rows[0]), len(kept)) == (100, 20)
    assert set(typing.found.keys) == set(kept)
    assert {name.removesuffix("_text") for name in rows[0]} | set(kept) == set(columns)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "empty"),
        (b"on", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"d":NaN}', "not JSON"),
        (b'{"d":1}{"d":2}', "not JSON"),
        (b"null", "not an object"),
        (b"[1,2]", "not an object"),
        (b'{"d":1,"d":2}', "an object has a key twice"),
        (b'{"x":{"y":1,"y":1}}', "an object has a key twice"),
        (b'{"d":' + b"[" * 101 + b"]" * 101 + b"}", "nested deeper than 100 levels"),
        (b'{"s":"\\ud800"}', "its text has an unpaired surrogate"),
        (b'"' + b"x" * (16 << 20) + b'"', "larger than 16 MiB"),
    ],
)
def test_what_is_no_row_is_a_reject_with_the_reason(payload: bytes, reason: str) -> None:
    assert refined(rules(COLUMNS), payload)[:2] == ([{}], [reason])


SECONDS = "is a time outside the years 1 to 9999 (a number is Unix time in seconds)"
UTC = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("kind", "payload", "found"),
    [
        (pa.int32(), "2147483648", "is a number that does not fit INT"),
        (pa.int8(), "-128", -128),
        (pa.int64(), "1e3", 1000),
        (pa.int64(), "1.50", "is a number that does not fit BIGINT"),
        (pa.int64(), "true", "is a boolean that does not fit BIGINT"),
        (pa.float64(), "1e999", "is a number that does not fit DOUBLE"),
        (pa.float64(), '"1"', "is text that does not fit DOUBLE"),
        (pa.float32(), "1e39", "is a number that does not fit FLOAT"),
        (pa.float32(), "16777217", "is a number that does not fit FLOAT"),
        (pa.decimal128(5, 2), "123.45", Decimal("123.45")),
        (pa.decimal128(5, 2), "123.450", Decimal("123.45")),
        (pa.decimal128(5, 2), '"-1.5"', Decimal("-1.50")),
        (pa.decimal128(5, 2), "123.456", "is a number that does not fit DECIMAL(5,2)"),
        (pa.decimal128(5, 2), "1234", "is a number that does not fit DECIMAL(5,2)"),
        (pa.decimal128(38, 0), "9" * 38, Decimal("9" * 38)),
        (pa.decimal128(5, 2), "1e999999999", "is a number that does not fit DECIMAL(5,2)"),
        (pa.decimal128(5, 2), "1e-999999999", "is a number that does not fit DECIMAL(5,2)"),
        (pa.binary(), '"AP8="', b"\x00\xff"),
        (pa.binary(), '"?"', "is text that does not fit BINARY (base64)"),
        (pa.date32(), '"2026-13-01"', "is text that does not fit DATE"),
        (UTC, "1795000000000", SECONDS),
        (UTC, "-62135596801", SECONDS),
        (UTC, '"9999-12-31T23:59:59-01:00"', SECONDS),
        (UTC, '"noon"', "is text that does not fit TIMESTAMP"),
        (
            pa.timestamp("us"),
            '"2026-01-01T00:00:00Z"',
            "is a time with an offset, which TIMESTAMP_NTZ cannot hold",
        ),
        (pa.map_(pa.string(), pa.float64()), '{"a":1,"b":null}', [("a", 1.0), ("b", None)]),
        (pa.list_(pa.date32()), "[5]", "is a number that does not fit DATE"),
    ],
)
def test_a_value_fits_exactly_or_the_row_is_a_reject(kind: pa.DataType, payload: str, found: Any) -> None:
    reason = isinstance(found, str)
    assert one(kind, payload) == (f"does not fit the schema: x {found}" if reason else found)


def test_times_are_text_or_seconds() -> None:
    for payload in ("1795000000.25", '"2026-11-18T11:06:40.25Z"', '"2026-11-18T12:06:40.250+01:00"'):
        assert one(UTC, payload).timestamp() == 1_795_000_000.25


def test_cbor_may_have_numbers_that_json_lacks() -> None:
    payload = cbor2.dumps({"d": math.nan, "x": math.inf, "s": b"\x00", "value": {1: 2}})
    rows, reasons, _ = refined(rules(COLUMNS, form="cbor"), payload, cbor2.dumps({1: 1, "1": 2}), b"\xff")
    assert math.isnan(rows[0].pop("d"))
    assert rows[0] == {"s": "AA==", "extra": '{"x":"Infinity","value":{"1":2}}'}
    assert reasons == [None, "an object has a key twice", "not CBOR"]


@settings(max_examples=200)
@given(VALUES.filter(lambda value: "\\ud800" not in json.dumps(value)), st.booleans())
def test_any_cbor_has_the_value_of_its_json(value: Any, indefinite: bool) -> None:
    payload = cbor2.dumps(value)
    if indefinite and isinstance(value, dict):  # a map that ends with a break
        pairs = b"".join(cbor2.dumps(key) + cbor2.dumps(item) for key, item in value.items())
        payload = b"\xbf" + pairs + b"\xff"
    assert same(json.loads(text_of(decoded(payload, "cbor"))), value)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xa2\x61a\x01\x61a\x02", "an object has a key twice"),
        (b"\xbf\x61a\x01\x61a\x02\xff", "an object has a key twice"),
        (b"\x81\xa2\x61a\x01\x61a\x01", "an object has a key twice"),
        (b"\x01\x02", "not CBOR"),
        (b"\xa1\x61a", "not CBOR"),
        (b"\xff", "not CBOR"),
        (b"\x9b" + b"\xff" * 8, "not CBOR"),
        (b"\x81" * 100_000 + b"\x00", "not CBOR"),
        (b"\xd8\x1c\x81\xd8\x1d\x00", "CBOR whose parts refer to each other"),
    ],
)
def test_cbor_that_loses_something_when_it_is_read_is_a_reject(payload: bytes, reason: str) -> None:
    assert refined(rules(COLUMNS, form="cbor"), payload)[:2] == ([{}], [reason])


def test_a_column_of_a_type_that_json_cannot_have_is_refused() -> None:
    with pytest.raises(BadOption, match="a payload cannot have values of the type duration"):
        Typing(rules({"x": pa.duration("us")}))


def test_text_of_a_value_has_the_numbers_as_they_were_written() -> None:
    text = '{"a":[1.50,1E+400,0.1,12345678901234567890123.5],"ü":"\\n"}'
    assert text_of(decoded(text.encode())) == text
    with pytest.raises(Misfit, match="not JSON"):
        decoded(b"{")


def test_topics_are_matched_and_their_levels_are_columns() -> None:
    pattern = TopicPattern.parse("plant/{line}/+/{sensor}/#")
    assert pattern.names == ("line", "sensor")
    assert pattern.match("plant/1/x/temp") == pattern.match("plant/1/x/temp/raw/9") == ("1", "temp")
    assert [pattern.match(topic) for topic in ("plant/1/x", "site/1/x/temp", "plant")] == [None] * 3
    assert TopicPattern.parse("").match("$SYS/x") == ()
    assert TopicPattern.parse("+/x").match("$SYS/x") is None
    assert TopicPattern.parse("a/b").match("a/b/c") is None


@pytest.mark.parametrize(
    "text", ["a/{B}", "a/x{b}", "{a}/{a}", "{topic}", "a+/b", "a/#/b", "{extra}", "a/{}"]
)
def test_a_wrong_topic_pattern_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="--topic"):
        TopicPattern.parse(text, ("topic", "extra"))
