"""One object's bytes: what is good is given whole, everything else is refused with a reason."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.export.planning import MAX_RECORDS
from bridge.ingest.columns import MAX_EXTRAS, MESSAGES, TIME
from bridge.ingest.decode import MAX_UNPACKED, NewColumns, decode
from bridge.ingest.errors import BadObject, Unreadable
from bridge.ingest.files import Target
from bridge.ingest.planner import Inventory, RoundLimits, plan
from bridge.ingest.store import ObjectStore, StorageLocation, read
from bridge.ingest.worker import MAX_OBJECT, pack, process
from bridge.objectkeys import ObjectKey, data_key, parse_key
from bridge.plugin import discovery
from tests.ingest.gateway import EPOCH, ndjson, parquet, rows

Reader = Callable[..., pa.Table]
Change = Callable[[list[dict[str, Any]]], Any]
FORMS = {"ndjson.gz": ndjson, "parquet": parquet}


def key(form: str = "ndjson.gz", first: int = 0, last: int = 9) -> ObjectKey:
    found = parse_key(data_key("gw-a", "s0", EPOCH, first, last, EPOCH, form))
    assert found is not None
    return found


def content(**extra: Any) -> list[dict[str, Any]]:
    return rows("gw-a", "s0", range(10), **extra)


def imported_anew(name: str) -> Any:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["compiled", "plain"])
def reader(request: pytest.FixtureRequest) -> Reader:
    """`decode` with msgspec and zlib-ng, and as on a cluster where they are not installed."""
    if request.param == "compiled":
        return decode
    with pytest.MonkeyPatch.context() as patch:
        for package in ("msgspec", "zlib_ng.zlib_ng"):
            patch.setitem(sys.modules, package, None)
        patch.setitem(sys.modules, "bridge.deflate", imported_anew("bridge.deflate"))
        plain = imported_anew("bridge.ingest.decode")
    assert plain.msgspec is None
    assert plain.decompressobj is zlib.decompressobj
    found: Reader = plain.decode
    return found


def test_both_formats_and_both_readers_give_the_same_table(reader: Reader) -> None:
    text = reader(ndjson(content()), key(), {})
    assert text.equals(reader(parquet(content()), key("parquet"), {}))
    assert text["payload"][3].as_py() == b'{"n":3,"temp":20.30}'


def test_gzip_of_several_members_is_one_object(reader: Reader) -> None:
    lines = gzip.decompress(ndjson(content())).splitlines(keepends=True)
    data = b"".join(gzip.compress(line) for line in lines)
    assert reader(data, key(), {}).num_rows == 10


def swap(row: list[dict[str, Any]]) -> None:
    row[3], row[4] = row[4], row[3]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.pop(), "9 rows, but the key promises 10"),
        (lambda r: r[5].update(sequence_number=4), "sequence numbers are not 0..9 in order"),
        (swap, "sequence numbers are not 0..9 in order"),
        (lambda r: r[5].update(gateway="gw-b"), "gateway is"),
        (lambda r: r[0].update(stream="s1"), "stream is 's1' in the rows and 's0' in the key"),
        (lambda r: r[9].update(epoch="7"), "epoch is"),
        (lambda r: r[2].update(topic=None), "null in column topic"),
        (lambda r: r[7].update(ingest_time=-1), "ingest_time is not between the years 1970 and 9999"),
    ],
)
def test_rows_that_are_not_those_of_the_name_are_refused(
    form: str, change: Change, reason: str, reader: Reader
) -> None:
    wrong = content()
    change(wrong)
    with pytest.raises(BadObject, match=reason):
        reader(FORMS[form](wrong), key(form), {})


def test_a_time_that_no_calendar_has_is_refused() -> None:
    """A day of it would be the name of a folder."""
    for far in (253_402_300_800_000, 2**63 // 1000 - 1):
        data = parquet(rows("gw-a", "s0", [0], step_ms=0) + rows("gw-a", "s0", [1], step_ms=far - EPOCH))
        with pytest.raises(BadObject, match="ingest_time is not between the years 1970 and 9999"):
            decode(data, key("parquet", 0, 1), {})


@pytest.mark.parametrize("form", FORMS)
def test_every_truncation_is_refused(form: str, reader: Reader) -> None:
    data = FORMS[form](content())
    for length in range(len(data)):
        with pytest.raises(BadObject):
            reader(data[:length], key(form), {})


@settings(max_examples=300)
@given(st.binary(max_size=300), st.sampled_from(list(FORMS)))
def test_any_bytes_are_refused_and_never_raise_anything_else(data: bytes, form: str) -> None:
    with pytest.raises(BadObject):
        decode(data, key(form), {})


@settings(max_examples=300)
@given(st.integers(0, 10_000), st.integers(0, 7), st.sampled_from(list(FORMS)))
def test_a_flipped_bit_is_refused_or_harmless(place: int, bit: int, form: str) -> None:
    good = FORMS[form](content())
    data = bytearray(good)
    data[place % len(data)] ^= 1 << bit
    try:
        table = decode(bytes(data), key(form), {})
    except (BadObject, NewColumns, Unreadable):  # a length that no memory has may be a lie
        return
    assert table.equals(decode(good, key(form), {}))


@pytest.mark.parametrize("payload", ["not base64!", "QUI", 5, None])
def test_a_payload_that_is_not_base64_is_refused(payload: Any, reader: Reader) -> None:
    lines = [json.loads(line) for line in gzip.decompress(ndjson(content())).splitlines()]
    lines[4]["payload"] = payload
    with pytest.raises(BadObject):
        reader(gzip.compress("\n".join(map(json.dumps, lines)).encode()), key(), {})


def test_an_object_that_unpacks_to_too_much_is_refused(reader: Reader) -> None:
    for form, write in FORMS.items():
        with pytest.raises(BadObject, match="unpacks to more than 1000 bytes"):
            reader(write(content(note="x" * 200)), key(form), {}, 1000)
    members = gzip.compress(b"x" * 1000) + gzip.compress(b"x" * 10_000)  # the first fills all of the room
    with pytest.raises(BadObject, match="unpacks to more than 1000 bytes"):
        reader(members, key(), {}, 1000)


@pytest.mark.parametrize("form", FORMS)
def test_new_columns_are_asked_for_and_then_kept(form: str) -> None:
    data = FORMS[form](content(qos=1, when="2026-01-01T00:00:00Z", ratio=0.5, ok=True))
    with pytest.raises(NewColumns) as asked:
        decode(data, key(form), {})
    assert asked.value.columns == {
        "qos": pa.int64(),
        "when": pa.string(),  # a text that looks like a time is a text
        "ratio": pa.float64(),
        "ok": pa.bool_(),
    }
    table = decode(data, key(form), asked.value.columns)
    assert table.slice(0, 1).to_pylist()[0]["when"] == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"Bad Name": 1}, "not a plain name"),
        ({"object_key": "x"}, "not a plain name"),
        ({"nested": {"a": 1}}, "cannot be added to the table: it holds struct"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_columns_that_the_table_cannot_have_are_refused(
    form: str, extra: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadObject, match=reason):
        decode(FORMS[form](content(**extra)), key(form), {})


def test_an_object_without_new_columns_is_taken_when_the_table_has_too_many(
    reader: Reader,
) -> None:
    extras = {f"column_{number}": pa.int64() for number in range(MAX_EXTRAS + 1)}
    assert reader(ndjson(content()), key(), extras).num_rows == 10
    assert reader(ndjson(content(column_7=1)), key(), extras)["column_7"].to_pylist() == [1] * 10
    with pytest.raises(BadObject, match="1 new columns would make more than 100"):
        reader(ndjson(content(another=1)), key(), extras)


@pytest.mark.parametrize(("days", "repeated"), [(10_000, 3), (10_001, 1)])
def test_an_object_of_very_many_days_is_refused(days: int, repeated: int) -> None:
    """Each day takes a data file. The days need not follow each other, nor the rows their order."""
    count = days * repeated
    rows = content()[:1] * count
    table = pa.Table.from_pylist(rows)
    times = [number % days * 2 * 86_400_000_000 for number in range(count)]
    for name, values in (
        ("sequence_number", pa.array(range(count))),
        ("ingest_time", pa.array(times).cast(TIME)),
    ):
        table = table.set_column(table.column_names.index(name), name, values)
    file = BytesIO()
    pq.write_table(table, file)
    if days <= 10_000:
        assert decode(file.getvalue(), key("parquet", 0, count - 1), {}).num_rows == count
        return
    with pytest.raises(BadObject, match="its rows are of 10001 days, an object may have 10000"):
        decode(file.getvalue(), key("parquet", 0, count - 1), {})


def test_text_that_is_not_utf8_is_refused() -> None:
    table = pa.Table.from_pylist(content())
    table = table.set_column(5, "topic", pa.array([b"\xff"] * 10).view(pa.string()))
    times = table["ingest_time"].cast(pa.timestamp("ms", tz="UTC")).cast(TIME)
    table = table.set_column(4, "ingest_time", times)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with pytest.raises(BadObject, match=r"UTF-?8"):
        decode(sink.getvalue().to_pybytes(), key("parquet"), {})


def test_times_of_another_unit_are_refused() -> None:
    table = pa.Table.from_pylist(content())
    table = table.set_column(4, "ingest_time", table["ingest_time"].cast(pa.timestamp("ns", tz="UTC")))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with pytest.raises(BadObject, match=r"ingest_time holds timestamp\[ns, tz=UTC\], not timestamp\[us"):
        decode(sink.getvalue().to_pybytes(), key("parquet"), {})


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_object_that_a_gateway_makes_is_taken(form: str) -> None:
    fields = msgspec.inspect.type_info(discovery.load().exporters["s3"].Config).fields  # type: ignore[attr-defined]
    (most,) = (field.type.le for field in fields if field.name == "size_hint_bytes")
    part, size = 64, most // MAX_RECORDS  # a part of it: all of it would take long
    numbers = range(MAX_RECORDS // part)
    messages = rows("g" * 255, "s" * 255, numbers, payload=lambda number: os.urandom(size))
    data = FORMS[form](messages)
    assert most < len(data) * part < MAX_OBJECT
    if form == "ndjson.gz":
        assert len(gzip.decompress(data)) * part < MAX_UNPACKED


def test_an_object_of_more_bytes_than_a_worker_holds_is_refused_unread(tmp_path: Path) -> None:
    landing = StorageLocation(str(tmp_path))
    name = data_key("gw-a", "s0", EPOCH, 0, 9, EPOCH, "parquet")
    (tmp_path / name).parent.mkdir(parents=True)
    with (tmp_path / name).open("wb") as file:
        file.truncate(MAX_OBJECT + 1)  # sparse
    work = plan(Inventory(landing.open().list()).pending(), {}, (), RoundLimits()).work
    target = Target(
        StorageLocation(str(tmp_path / "lake")), "data/ingest_day", MESSAGES.serialize().to_pybytes(), ()
    )
    ((kind, outcome),) = process(json.loads(zlib.decompress(pack(work))), landing, target)
    assert (kind, outcome["status"]) == ("object", "bad")
    assert "bytes are more than the" in outcome["reason"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("malloc of size 536870912 failed"),
        pa.lib.ArrowMemoryError("malloc of size 536870912 failed"),
        ImportError("no module named pytz"),
    ],
)
def test_what_the_worker_lacks_is_not_the_fault_of_the_object(
    error: BaseException, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise error

    for form, write in FORMS.items():
        data = write(content())
        with monkeypatch.context() as patch:
            patch.setattr(pa, "table", fail)  # Arrow, where it allocates
            with pytest.raises(Unreadable, match=f"{type(error).__name__}: {error}"):
                reader(data, key(form), {})
        assert reader(data, key(form), {}).num_rows == 10


def test_a_codec_that_this_arrow_was_built_without_is_not_the_fault_of_the_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(file: Any, **options: Any) -> Any:  # as Arrow reports it; the installed one has all codecs
        raise pa.ArrowNotImplementedError("Support for codec 'zstd' not built")

    monkeypatch.setattr(pq.ParquetFile, "read", read)
    with pytest.raises(Unreadable, match="Support for codec 'zstd' not built"):
        decode(parquet(content()), key("parquet"), {})


class Refusing:
    """A store as S3 behaves when it does not hand out an object."""

    def __init__(self, code: str, message: str = "no\n way") -> None:
        self.error = {"Code": code, "Message": message}

    def get(self, key: str, most: int | None = None) -> bytes:
        raise ClientError({"Error": self.error}, "GetObject")


@pytest.mark.parametrize(
    "code", ["InvalidObjectState", "AccessDenied", "InvalidRequest", "KMS.DisabledException"]
)
def test_an_object_that_s3_does_not_return_is_unreadable(code: str) -> None:
    with pytest.raises(Unreadable, match=f"{code}: no way"):
        read(cast(ObjectStore, Refusing(code)), "key", 10, 100)


def test_the_message_of_s3_is_shortened() -> None:
    with pytest.raises(Unreadable) as refused:
        read(cast(ObjectStore, Refusing("AccessDenied", "no way " * 1000)), "key", 10, 100)
    assert len(str(refused.value)) <= 200


@pytest.mark.parametrize("code", ["ExpiredToken", "SlowDown", "InternalError", "NoSuchBucket"])
def test_a_failure_of_s3_that_is_not_about_the_object_is_raised_and_tried_again(code: str) -> None:
    with pytest.raises(ClientError, match=code):
        read(cast(ObjectStore, Refusing(code)), "key", 10, 100)
