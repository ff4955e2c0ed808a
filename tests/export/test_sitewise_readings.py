"""Plain readings such as `{"temp": 21.5}` become property values of IoT SiteWise."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.aws import FakeAws
from bridge import Batch, Context, Exporter, Record
from bridge.plugin import discovery
from bridge.plugin.api import convert_config
from bridge.plugin.testing import deliver, make_batch
from tests.export.harness import running

SITEWISE = discovery.load().exporters["IotSitewise"]
NOW = int(time.time()) * 1000


@pytest.fixture
def fake() -> Iterator[FakeAws]:
    server = FakeAws()
    yield server
    server.close()


def sitewise(fake: FakeAws, **config: Any) -> Exporter:
    base = {"identifier": "x", "endpointUrl": fake.url, "propertyAlias": "/plant/{topic/1}"}
    return SITEWISE(convert_config(SITEWISE, base | config), Context())


def batch_of(*payloads: bytes, first: int = 41, at: int = NOW) -> Batch:
    records = [Record(first + n, at, "plant/press-7/temp", payload) for n, payload in enumerate(payloads)]
    return Batch("gw", "plant", 1, first, first + len(records) - 1, records)


def value_of(fake: FakeAws, payload: bytes, **config: Any) -> dict[str, Any]:
    """The value that arrives for a payload."""
    assert deliver(sitewise(fake, **config), batch_of(payload), attempts=1) == {}
    (point,) = fake.taken[-1]["propertyValues"]
    value: dict[str, Any] = point["value"]
    return value


def reason_of(fake: FakeAws, payload: bytes, **config: Any) -> str:
    """Why a payload is rejected, without a request."""
    rejected = deliver(sitewise(fake, **config), batch_of(payload), attempts=1)
    assert fake.requests == []
    return rejected[41]


def test_a_reading_is_a_value_of_the_property_that_its_topic_names(fake: FakeAws) -> None:
    assert deliver(sitewise(fake, value="{json:/temp}"), batch_of(b'{"temp": 21.5}')) == {}
    (entry,) = fake.taken
    assert entry["propertyAlias"] == "/plant/press-7"
    assert entry["propertyValues"] == [
        {
            "value": {"doubleValue": 21.5},
            "timestamp": {"timeInSeconds": NOW // 1000, "offsetInNanos": NOW % 1000 * 10**6 + 41},
        }
    ]


def test_readings_of_one_millisecond_have_times_of_their_own_and_share_a_request(fake: FakeAws) -> None:
    batch = batch_of(*[b"%d" % n for n in range(5)])
    for _ in range(2):  # a crash, and the same batch again
        assert deliver(sitewise(fake), batch) == {}
    assert [len(parameters["entries"]) for _, parameters in fake.requests] == [5, 5]
    times = [entry["propertyValues"][0]["timestamp"]["offsetInNanos"] for entry in fake.taken]
    assert times[:5] == sorted(set(times)) == times[5:]


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b"21.5", {"doubleValue": 21.5}),
        (b"21", {"doubleValue": 21.0}),
        (b"true", {"booleanValue": True}),
        (b'"on"', {"stringValue": "on"}),
        (b"on", {"stringValue": "on"}),
    ],
)
def test_the_type_of_a_value_is_that_of_json(fake: FakeAws, payload: bytes, value: dict[str, Any]) -> None:
    assert value_of(fake, payload) == value
    assert (
        value_of(fake, b'{"v": [0, %s]}' % (payload if payload != b"on" else b'"on"'), value="{json:/v/1}")
        == value
    )


@pytest.mark.parametrize(
    ("payload", "kind", "value"),
    [
        (b"21", "integer", {"integerValue": 21}),
        (b"21.0", "integer", {"integerValue": 21}),
        (b'"21"', "integer", {"integerValue": 21}),
        (b'"2.5e1"', "double", {"doubleValue": 25.0}),
        (b"1", "boolean", {"booleanValue": True}),
        (b'"false"', "boolean", {"booleanValue": False}),
        (b"21.50", "string", {"stringValue": "21.5"}),
        (b"true", "string", {"stringValue": "true"}),
    ],
)
def test_an_option_demands_a_type(fake: FakeAws, payload: bytes, kind: str, value: dict[str, Any]) -> None:
    assert value_of(fake, payload, valueType=kind) == value


def test_a_value_of_text_and_fields_is_text(fake: FakeAws) -> None:
    assert value_of(fake, b"4", value="{topic/2}: {payload}") == {"stringValue": "temp: 4"}
    assert value_of(fake, b"4", value="{payload}{payload}", valueType="integer") == {"integerValue": 44}


@pytest.mark.parametrize(
    ("payload", "config", "reason"),
    [
        (b"{}", {"value": "{json:/temp}"}, "value: {json:/temp}: the payload has no such member"),
        (b"on", {"value": "{json:/temp}"}, "value: {json:/temp}: the payload is not JSON"),
        (b"1", {"propertyAlias": "/{topic/5}"}, "propertyAlias: {topic/5}: the topic has no such level"),
        (b"1", {"propertyAlias": "{client}"}, "propertyAlias: {client}: the publisher is unknown"),
        (b"null", {}, "value: null is no value of a property"),
        (b'{"temp": 21.5}', {}, "value: a list or an object is no value of a property"),
        (b"\xff", {}, "value: {payload}: the payload is not UTF-8; {base64} takes any"),
        (b"on", {"valueType": "double"}, "value: it is no double"),
        (b"true", {"valueType": "double"}, "value: it is no double"),
        (b"9" * 400, {}, "value: it is no double"),
        (b"21.5", {"valueType": "integer"}, "value: it is no integer"),
        (b'"x"', {"valueType": "integer"}, "value: it is no integer"),
        (b"2", {"valueType": "boolean"}, "value: it is no boolean"),
        (b"4000000000", {"valueType": "integer"}, "<= 2147483647 - at `$.propertyValues[0].value"),
        (b"1", {"propertyAlias": "{json:/a}" + "x" * 2048, "value": "1"}, "the payload has no such member"),
        (b"1", {"propertyAlias": "x" * 2049}, "length <= 2048 - at `$.propertyAlias`"),
        (b'{"q": "fine"}', {"value": "1", "quality": "{json:/q}"}, "Invalid enum value 'fine'"),
        (b"{}", {"value": "1", "time": "{json:/t}"}, "time: {json:/t}: the payload has no such member"),
        (b'{"t": "2026-01-01T00:00:00"}', {"value": "1", "time": "{json:/t}"}, "time: it has no zone"),
        (b'{"t": "now"}', {"value": "1", "time": "{json:/t}"}, "time: it is neither a number nor a time"),
        (b'{"t": true}', {"value": "1", "time": "{json:/t}"}, "time: it is neither a number nor a time"),
        (b'{"t": 1e300}', {"value": "1", "time": "{json:/t}"}, "$.propertyValues[0].timestamp.timeInSeconds"),
        (b'{"t": -5}', {"value": "1", "time": "{json:/t}"}, "$.propertyValues[0].timestamp.timeInSeconds"),
    ],
)  # fmt: skip
def test_what_has_no_value_is_rejected_with_the_reason(
    fake: FakeAws, payload: bytes, config: dict[str, Any], reason: str
) -> None:
    assert reason in reason_of(fake, payload, **config)


def test_a_reading_without_a_value_costs_only_itself(fake: FakeAws) -> None:
    rejected = deliver(sitewise(fake, value="{json:/temp}"), batch_of(b'{"temp": 1}', b"{}", b'{"temp": 2}'))
    assert list(rejected) == [42]
    assert [entry["propertyValues"][0]["value"] for entry in fake.taken] == [
        {"doubleValue": 1.0},
        {"doubleValue": 2.0},
    ]


@pytest.mark.parametrize(
    ("made", "unit"),
    [
        (lambda seconds: seconds, "s"),
        (lambda seconds: seconds + 0.0, "s"),
        (lambda seconds: seconds * 1000, "ms"),
        (lambda seconds: str(seconds * 1000), "ms"),
        (lambda seconds: seconds * 10**6, "us"),
        (lambda seconds: seconds * 10**9, "ns"),
        (lambda seconds: datetime.fromtimestamp(seconds, UTC).isoformat(), "ms"),
        (lambda seconds: f"{datetime.fromtimestamp(seconds + 3600, UTC):%Y-%m-%dT%H:%M:%S}+01:00", "ms"),
    ],
)
def test_the_time_may_be_that_of_the_device(fake: FakeAws, made: Any, unit: str) -> None:
    seconds = NOW // 1000 - 3600
    payload = json.dumps({"temp": 1, "at": made(seconds), "q": "BAD"}).encode()
    options = {"value": "{json:/temp}", "time": "{json:/at}", "timeUnit": unit, "quality": "{json:/q}"}
    assert deliver(sitewise(fake, **options), batch_of(payload)) == {}
    (point,) = fake.taken[0]["propertyValues"]
    assert point["timestamp"].get("offsetInNanos", 0) == 0
    assert (point["timestamp"]["timeInSeconds"], point["quality"]) == (seconds, "BAD")


def test_a_unix_time_in_text_is_a_number_even_if_its_digits_look_like_a_date(fake: FakeAws) -> None:
    deliver(sitewise(fake, value="1", time="{json:/at}"), batch_of(b'{"at": "1776053012345"}'))
    ((_, request),) = fake.requests
    (point,) = request["entries"][0]["propertyValues"]
    assert point["timestamp"] == {"timeInSeconds": 1776053012, "offsetInNanos": 345_000_000}


def test_a_reading_without_a_quality_has_none(fake: FakeAws) -> None:
    assert deliver(sitewise(fake, quality="{json:/q}"), batch_of(b"1")) == {}
    assert "quality" not in fake.taken[0]["propertyValues"][0]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"propertyAlias": ""}, "propertyAlias: it is empty"),
        ({"propertyAlias": "/{topik}"}, r"propertyAlias: \{topik\} is not a field"),
        ({"value": "{json:/temp"}, "value: .* unbalanced brace"),
        ({"value": ""}, "value: it is empty"),
        ({"time": "{at}"}, r"time: \{at\} is not a field"),
        ({"quality": "FINE"}, "quality: 'FINE' is none of GOOD, BAD, UNCERTAIN, and has no field"),
        ({"propertyAlias": None, "value": "{json:/temp}"}, "value: it needs propertyAlias"),
        ({"propertyAlias": None, "time": "{json:/temp}"}, "time: it needs propertyAlias"),
    ],
)
def test_a_wrong_option_is_refused_when_it_is_configured(
    fake: FakeAws, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        sitewise(fake, **config)


def test_a_stream_of_readings_arrives_and_the_dead_letter_says_what_was_missing(
    fake: FakeAws, tmp_path: Path
) -> None:
    config = {
        "identifier": "w",
        "endpointUrl": fake.url,
        "propertyAlias": "/{stream}/temp",
        "value": "{json:/temp}",
        "deadLetterStream": "dead",
    }

    async def scenario() -> list[bytes]:
        async with running(tmp_path) as gateway:
            gateway.create("dead", {})
            gateway.create("plant", {"IotSitewise": [config]})
            await gateway.append("plant", b'{"temp": 21.5}', b'{"humidity": 40}', b'{"temp": 22}')
            await gateway.exported("plant", 2)
            return gateway.read("dead")

    (dead,) = map(json.loads, asyncio.run(scenario()))
    assert dead["reason"] == "value: {json:/temp}: the payload has no such member"
    assert dead["sequenceNumber"] == 1
    assert [entry["propertyValues"][0]["value"]["doubleValue"] for entry in fake.taken] == [21.5, 22.0]


def test_entries_are_still_entries_without_an_alias(fake: FakeAws) -> None:
    exporter = sitewise(fake, propertyAlias=None)
    assert list(deliver(exporter, make_batch([b'{"temp": 21.5}']), attempts=1)) == [0]
