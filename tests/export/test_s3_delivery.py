"""The `s3Delivery` exporter: objects and names as Data Firehose makes them."""

from __future__ import annotations

import gzip
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import Context, Exporter, Stopped
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.prefixes import ObjectName, parse
from bridge.plugin.testing import make_batch
from tests.export.harness import Bucket

CLS = discovery.load().exporters["s3Delivery"]
NOON = 1_767_268_800_123  # 2026-01-01T12:00:00.123Z
SUFFIX = r"plant-3-2026-01-01-12-00-00-[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def make(bucket: Bucket, **more: Any) -> Exporter:
    config = {"identifier": "up", "bucket": bucket.name, "endpointUrl": bucket.url, **more}
    return CLS(convert_config(CLS, config), Context(stream="plant"))


def named(prefix: str, zone: str = "UTC", extension: str = "") -> str:
    made = ObjectName(prefix, stream="plant", version=3, extension=extension, zone=zone)
    return made.name(NOON, "gw/plant/1/0-9")


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", "2026/01/01/12/"),
        ("raw/", "raw/2026/01/01/12/"),
        ("raw", "raw2026/01/01/12/"),
        ("d=!{timestamp:yyyy-MM-dd}/", "d=2026-01-01/"),
        ("dt=!{timestamp:yyyy'-'MM'-'dd}/h=!{timestamp:HH}/", "dt=2026-01-01/h=12/"),
        ("!{timestamp:'year='yyyy'/o''clock='H}/", "year=2026/o'clock=12/"),
        ("!{timestamp:yy/M/d/D/m/s/SSS}/", "26/1/1/1/0/0/123/"),
    ],
)
def test_names_are_those_that_firehose_makes(prefix: str, expected: str) -> None:
    assert re.fullmatch(re.escape(expected) + SUFFIX, named(prefix))


def test_a_time_zone_changes_the_times_in_a_name() -> None:
    name = named("!{timestamp:yyyy/MM/dd/HH}/", zone="Asia/Tokyo", extension=".gz")
    assert name.startswith("2026/01/01/21/plant-3-2026-01-01-21-00-00-")
    assert name.endswith(".gz")


def test_random_strings_differ_in_a_name_and_are_the_same_for_the_same_batch() -> None:
    prefix = "!{firehose:random-string}/!{firehose:random-string}/!{timestamp:yyyy}/"
    first, second, *_ = named(prefix).split("/")
    assert re.fullmatch("[0-9A-Za-z]{11}", first)
    assert first != second
    assert named(prefix) == named(prefix)
    other = ObjectName(prefix, stream="plant", version=3, extension="").name(NOON, "gw/plant/1/10-19")
    assert other.split("/")[0] not in (first, second)


@pytest.mark.parametrize(
    "prefix",
    [
        "!{timestamp:}/",
        "!{timestamp:YYYY}/",
        "!{timestamp:yyyyy}/",
        "!{timestamp:MMM}/",
        "!{timestamp:'open}/",
        "!{partitionKeyFromQuery:customer}/",
        "!{firehose:error-output-type}/",
        "!{other:x}/",
        "!{timestamp:yyyy",
    ],
)
def test_prefixes_that_cannot_be_made_are_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        parse(prefix)


@given(st.text(max_size=40))
def test_any_prefix_is_refused_or_makes_a_name(prefix: str) -> None:
    try:
        made = ObjectName(prefix, stream="s", version=1, extension="")
    except ValueError:
        return
    assert made.name(NOON, "x") == made.name(NOON, "x")


def test_an_object_has_the_payloads_each_followed_by_the_delimiter(bucket: Bucket) -> None:
    exporter = make(bucket, delimiter="\n", prefix="raw/", version=2)
    exporter.export(make_batch([b"a", b"\0\xff", b""], first=7))
    (key,) = bucket.names()
    assert key.startswith("raw/")
    assert "/plant-2-" in key
    assert bucket.body(key) == b"a\n\0\xff\n\n"
    found = bucket.client.head_object(Bucket=bucket.name, Key=key)["Metadata"]
    assert (found["first"], found["last"], found["epoch"]) == ("7", "9", "1700000000000")


def test_gzip_and_an_extension(bucket: Bucket) -> None:
    make(bucket, compression="gzip").export(make_batch([b"a", b"b"]))
    make(bucket, compression="gzip", fileExtension=".json.gz").export(make_batch([b"c"], first=5))
    bodies = {key.rpartition(".")[0][-5:]: gzip.decompress(bucket.body(key)) for key in bucket.names()}
    assert sorted(bodies.values()) == [b"ab", b"c"]
    assert sorted(key.endswith(".json.gz") for key in bucket.names()) == [False, True]


def test_a_batch_that_is_sent_again_is_one_object_and_another_one_of_its_name_stops_the_export(
    bucket: Bucket,
) -> None:
    exporter, batch = make(bucket), make_batch([b"a", b"b"])
    assert exporter.landed(batch) is False
    exporter.export(batch)
    exporter.export(batch)
    assert exporter.landed(batch) is True
    (key,) = bucket.names()
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"other")
    assert exporter.landed(batch) is None
    with pytest.raises(Stopped, match="without a digest"):
        exporter.export(batch)
    assert bucket.body(key) == b"other"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("prefix", "!{x}"),
        ("timeZone", "Mars/Olympus"),
        ("timeZone", "../../etc/passwd"),
        ("fileExtension", "gz"),
        ("timeHintMillis", 900_001),
        ("compression", "zip"),
    ],
)
def test_options_that_are_wrong_are_refused(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        convert_config(CLS, {"identifier": "up", "bucket": "bucket", option: value})
