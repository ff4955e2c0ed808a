"""No object takes the process that reads it down: it is refused with a reason, in bounded memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import cbor2
import pytest

from bridge.ingest.payloads import Misfit, decoded
from bridge.ingest.schema import MAX_FIELDS, infer
from tests.ingest import hostile

# a crash, 3 GiB on top of what the process has, and minutes end this process and not that of the tests
READ = """
import json, resource, sys
kind, form, plain = sys.argv[1:]
if plain:
    sys.modules["msgspec"] = None
from bridge.ingest.decode import decode
from bridge.objectkeys import data_key, parse_key
from tests.ingest import hostile
from tests.ingest.gateway import EPOCH

for name, (make, rows, _) in getattr(hostile, kind).items():
    data = make()
    room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    try:
        key = parse_key(data_key("gw-a", "s0", EPOCH, 0, rows - 1, EPOCH, form))
        decode(data, key, {})
        outcomes = "taken"
    except Exception as error:
        outcomes = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(json.dumps([name, outcomes]), flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "form", "plain"),
    [("NDJSON", "ndjson.gz", ""), ("NDJSON", "ndjson.gz", "plain"), ("PARQUET", "parquet", "")],
)
def test_hostile_objects_are_refused_with_a_reason_in_bounded_memory(
    kind: str, form: str, plain: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ, kind, form, plain], capture_output=True, text=True, timeout=240
    )
    outcomes = dict(json.loads(line) for line in done.stdout.splitlines())
    cases: dict[str, Any] = getattr(hostile, kind)
    assert (done.returncode, list(outcomes)) == (0, list(cases)), done.stderr[-500:]
    wrong = {
        name: outcomes[name]
        for name, (_, _, reason) in cases.items()
        if not outcomes[name].startswith("BadObject: ") or reason not in outcomes[name]
    }
    assert wrong == {}


def halves() -> bytes:
    """An array of shared arrays, each of two references to the one before: a few bytes for each doubling."""
    parts = [b"\xd8\x1c\x82\x61a\x61a"]
    for at in range(24):
        reference = b"\xd8\x1d" + (bytes((at,)) if at < 24 else bytes((0x18, at)))
        parts.append(b"\xd8\x1c\x82" + reference + reference)
    return b"\x98" + bytes((len(parts),)) + b"".join(parts)


def wide_head(data: bytes) -> bytes:
    """The same, with the tags written as four bytes."""
    return data.replace(b"\xd8\x1c", b"\xda\x00\x00\x00\x1c").replace(b"\xd8\x1d", b"\xda\x00\x00\x00\x1d")


def string_references() -> bytes:
    """A text of 100 KB, and references to it of two bytes each."""
    text = b"\x7a" + (100_000).to_bytes(4, "big") + b"x" * 100_000
    return b"\xd9\x01\x00\x99\x27\x11" + text + b"\xd8\x19\x00" * 10_000


def bignum(length: int) -> bytes:
    """An integer of so many bytes."""
    return b"\xc2\x59" + length.to_bytes(2, "big") + b"\x7f" * length


@pytest.mark.parametrize(
    "payload",
    [
        halves(),
        wide_head(halves()),
        string_references(),
        b"\x81" * 100_000 + b"\x00",
        b"\xa1\x61a" * 500 + b"\x00",
        b"\x9f" * 100_000,
        b"\x9a\x7f\xff\xff\xff\x00",
        b"\x5b\x00\x00\x7f\xff\xff\xff\xff\xff",
        b"\xc2\x5a\x00\x10\x00\x00" + b"\xff" * (1 << 20),
        b"\xc4\x82\x01" + bignum(3000),
        b"\xc4\x82\x01\xc2\xd9\xd9\xf7" + bignum(3000)[1:],
        b"\xc4\x82\x01\xc2\x5f" + bignum(3000)[1:] + b"\xff",
        b"\xd8\x1e\x82" + bignum(3000) + bignum(2999),
        b"\xa2\x61a\x01" + bignum(9) + b"\x01",
        b"\xbf\x61a\x01" + bignum(9) + b"\x01\xff",
        b"\xa1\x82\x01\x02\x01",
        b"\xd9\x01\x02\x82\x01\x02",
        b"\x78" + b"\xff" * 3,
        b"\x59\x80\x00" + b"\x01" * 10,
        b"\x7a\x01\x00\x00\x01" + b"x" * ((16 << 20) + 1),
    ],
)
def test_cbor_that_would_become_much_or_deep_is_no_payload(payload: bytes) -> None:
    with pytest.raises(Misfit):
        decoded(payload, "cbor")


def test_cbor_that_only_looks_like_a_reference_is_read() -> None:
    for value in (
        {"a": b"\xd8\x1d\xd8\x1c"},
        {"a": "\u00d8", "b": [b"\xda\x00\x00\x00\x1d", 1.5]},
        [b"\xd9\x01\x00"],
    ):
        assert decoded(cbor2.dumps(value), "cbor")


def test_cbor_of_all_usual_kinds_is_read() -> None:
    when = datetime(2026, 11, 18, tzinfo=UTC)
    value = {"a": [2**70, -(2**600), Decimal("1.5")], 1: {-3: when, None: Fraction(1, 3)}, 2.5: [True, {}]}
    assert decoded(cbor2.dumps(value), "cbor") == {
        "a": [2**70, -(2**600), "1.5"],
        "1": {"-3": "2026-11-18T00:00:00+00:00", "null": "1/3"},
        "2.5": [True, {}],
    }
    indefinite = b"\xbf\x61a" + bignum(9) + b"\x61b\x9f" + bignum(1785) + b"\xff\xff"
    assert list(decoded(indefinite, "cbor")) == ["a", "b"]


def test_json_that_is_nested_deep_or_very_large_is_no_payload() -> None:
    deep = b'{"a":' * 101 + b"1" + b"}" * 101
    text = b'{"a":"' + b"[" * 1_000 + b'"}'
    for payload in (deep, b"[" * 1_000_000, b" " * ((16 << 20) + 1)):
        with pytest.raises(Misfit, match=r"deeper|larger"):
            decoded(payload)
    assert decoded(deep[5:-1]) == json.loads(deep[5:-1])
    assert decoded(text) == {"a": "[" * 1_000}


def test_a_payload_of_very_many_keys_adds_none_to_the_schema() -> None:
    many = json.dumps({f"k{number}": 1 for number in range(MAX_FIELDS)})
    nested = json.dumps({"a": [{"b": json.loads(many)}]})
    assert infer(['{"temp":1.5}', many, nested, '{"unit":"C"}']) == "`temp` DOUBLE, `unit` STRING"
