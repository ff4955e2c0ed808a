"""Exporter `IotSitewise`: puts property values, with BatchPutAssetPropertyValue.

Without `propertyAlias`, a message is one PutAssetPropertyValueEntry in JSON, as the Stream Manager SDK writes
it. With it, a message is a reading such as `{"temp": 21.5}`: one value of one property. `propertyAlias`,
`value`, `quality` and `time` are then templates (see `bridge.plugin.keys`):

* `value`, `{payload}` by default, is a boolean, a number or text, as it is in JSON; a payload that is not
  JSON is text. A number is a double, because JSON does not distinguish 21 from 21.0. `valueType` requires
  one type; numbers and booleans may then be in text.
* `time` is text in RFC 3339 with a zone, or a Unix time in `timeUnit`. By default it is the time at which the
  message was stored, in ms, with nanoseconds from its sequence number: two messages never have the same time,
  and a message that is sent again replaces itself.
* `quality` is GOOD, BAD or UNCERTAIN; an entry has none if the message lacks it.

A message that lacks its alias, value or time is rejected.

A request has up to 10 entries. An entry with a value for the same property and time as an earlier one goes in
a later request, because the service rejects both together. `entryId` need not be unique: requests have their
own numbers.

The service's error codes decide what happens to an entry: throttling, missing rights and internal errors are
retried; an unknown property, an invalid value or a timestamp that the service does not accept (older
than 7 days, or more than 10 minutes ahead) is rejected. The service judges each value of an entry, and
stores those without error. Conflicting entries, for example of one property by its alias and by its ids,
are sent again one after the other; an entry with two values for one time is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from bridge import (
    AwsBatchedConfig,
    Batch,
    BatchLimits,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    Record,
    Refused,
    Retry,
    hookimpl,
    send_split,
)
from bridge.plugin.aws import cause, error_code, failure, is_invalid, probe, safe_code
from bridge.plugin.keys import Message, NoValue, Template, as_text

MAX_ENTRIES = 10
QUALITIES = ("GOOD", "BAD", "UNCERTAIN")
NANOS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # of each `timeUnit`
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Only these can never succeed; all other errors are retried.
PERMANENT = frozenset(
    {"InvalidRequestException", "ResourceNotFoundException", "TimestampOutOfRangeException"}
)
CONFLICT = "ConflictingOperationException"
# Errors of a request that one entry can cause; then the entries are sent separately.
REFUSED = frozenset({*PERMANENT, "SerializationException", "ValidationException"})


class SitewiseConfig(AwsBatchedConfig, frozen=True):
    """The SDK's IoTSiteWiseConfig, with endpoint, region, and templates for plain readings."""

    batch_size: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] | None = None
    property_alias: str | None = None
    value: str | None = None
    value_type: Literal["boolean", "integer", "double", "string"] | None = None
    quality: str | None = None
    time: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] = "ms"


class Variant(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    """A value: exactly one of these, or nullValue."""

    string_value: str | None = None
    integer_value: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    double_value: float | None = None
    boolean_value: bool | None = None
    null_value: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) != 1:
            raise ValueError("a value has exactly one of stringValue, integerValue, doubleValue, ...")


class TimeInNanos(Struct, rename="camel", omit_defaults=True):
    """A time."""

    time_in_seconds: Annotated[int, Meta(ge=1, le=31_556_889_864_403_199)]
    offset_in_nanos: Annotated[int, Meta(ge=0, le=999_999_999)] = 0


class PropertyValue(Struct, rename="camel", omit_defaults=True):
    """A value at a time."""

    value: Variant
    timestamp: TimeInNanos
    quality: Literal["GOOD", "BAD", "UNCERTAIN"] | None = None


class Entry(Struct, rename="camel", omit_defaults=True):
    """PutAssetPropertyValueEntry of the SDK."""

    entry_id: str
    property_values: Annotated[list[PropertyValue], Meta(min_length=1, max_length=10)]
    asset_id: str | None = None
    property_id: str | None = None
    property_alias: Annotated[str, Meta(min_length=1, max_length=2048)] | None = None

    def __post_init__(self) -> None:
        if self.property_alias is None and (self.asset_id is None or self.property_id is None):
            raise ValueError("an entry has propertyAlias, or assetId and propertyId")

    def points(self) -> set[tuple[Any, ...]]:
        """Return the properties and times of the values; a request may have each pair only once."""
        where = self.property_alias or (self.asset_id, self.property_id)
        return {
            (where, v.timestamp.time_in_seconds, v.timestamp.offset_in_nanos) for v in self.property_values
        }

    def has_conflict(self) -> bool:
        """Return whether it has two values for one time."""
        return len(self.points()) < len(self.property_values)


class Readings:
    """Makes entries from plain readings. Raises ValueError for a wrong option."""

    def __init__(self, config: SitewiseConfig) -> None:
        self._alias = _template("propertyAlias", config.property_alias or "")
        self._value = _template("value", "{payload}" if config.value is None else config.value)
        self._type, self._nanos = config.value_type, NANOS[config.time_unit]
        self._time = None if config.time is None else _template("time", config.time)
        self._quality = None if config.quality is None else _template("quality", config.quality)
        if self._quality is not None and not self._quality.fields and config.quality not in QUALITIES:
            raise ValueError(
                f"quality: {config.quality!r} is none of {', '.join(QUALITIES)}, and has no field"
            )

    def entry(self, batch: Batch, record: Record) -> Entry:
        """Return the entry of a message. Raises NoValue, or ValidationError if SiteWise cannot store it."""
        nanos = self._time_of(batch, record)
        point: dict[str, Any] = {
            "value": _variant(_found("value", self._value, batch, record), self._type),
            "timestamp": {"timeInSeconds": nanos // 10**9, "offsetInNanos": nanos % 10**9},
        }
        if self._quality is not None:
            with suppress(NoValue):  # it is optional
                point["quality"] = self._quality.render(batch, record)
        alias = _found("propertyAlias", self._alias, batch, record)
        return msgspec.convert({"entryId": "", "propertyAlias": alias, "propertyValues": [point]}, Entry)

    def _time_of(self, batch: Batch, record: Record) -> int:
        """Return the time of a reading as Unix time in ns."""
        if self._time is None:
            return record.ingest_time * 10**6 + record.sequence_number % 10**6
        # Numbers in text come first: 1776053012345 is also a date and time in ISO 8601's basic format.
        found = _unpacked(_found("time", self._time, batch, record))
        if isinstance(found, str):
            with suppress(ValueError):
                when = datetime.fromisoformat(found)
                if when.tzinfo is None:
                    raise NoValue("time: it has no zone, such as Z")
                return (when - EPOCH) // timedelta(microseconds=1) * 1000
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise NoValue("time: it is neither a number nor a time in RFC 3339")
        return round(found * self._nanos)


def _template(option: str, text: str) -> Template:
    if not text:
        raise ValueError(f"{option}: it is empty")
    try:
        return Template(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _found(option: str, template: Template, batch: Batch, record: Record) -> Any:
    """Evaluate a template. A single field keeps its JSON type, except in `propertyAlias`."""
    try:
        if template.only is None or option == "propertyAlias":
            return template.render(batch, record)
        found = template.only(Message(batch, record))
        if not isinstance(found, bytes):
            return found
        try:
            return msgspec.json.decode(found)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return as_text(found)
    except NoValue as error:
        raise NoValue(f"{option}: {error}") from None


def _unpacked(value: Any) -> Any:
    """Convert text to the number or boolean that it contains."""
    if isinstance(value, str):
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            return msgspec.json.decode(value)
    return value


def _variant(value: Any, kind: str | None) -> dict[str, Any]:
    """Return a value with the type `kind`, or with its own type. Raises NoValue if that is impossible."""
    if not isinstance(value, bool | int | float | str):
        name = "null" if value is None else "a list or an object"
        raise NoValue(f"value: {name} is no value of a property")
    if kind is None:
        kind = "string" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "double"
    if kind == "string":
        return {"stringValue": as_text(value)}
    found = _unpacked(value)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if kind == "boolean" and found in (False, True):
        return {"booleanValue": bool(found)}
    if kind == "double" and is_number:
        with suppress(OverflowError):
            return {"doubleValue": float(found)}
    if kind == "integer" and is_number and found == int(found):
        return {"integerValue": int(found)}
    raise NoValue(f"value: it is no {kind}")


class SitewiseExporter(Exporter):
    """Exports one stream to IoT SiteWise."""

    kind: ClassVar[str] = "IotSitewise"
    Config: ClassVar[type[ExportConfig]] = SitewiseConfig
    limits: ClassVar[BatchLimits] = BatchLimits(records=MAX_ENTRIES, by_record=True)
    any_order: ClassVar[bool] = True

    config: SitewiseConfig

    def __init__(self, config: SitewiseConfig, context: Context) -> None:
        super().__init__(config, context)
        self._client = context.client("iotsitewise", config)
        self._readings = None if config.property_alias is None else Readings(config)

    @classmethod
    def check(cls, config: SitewiseConfig) -> None:
        if config.property_alias is not None:
            Readings(config)
            return
        for option in ("value", "value_type", "quality", "time"):
            if getattr(config, option) is not None:
                raise ValueError(f"{option}: it needs propertyAlias; without that, messages are entries")

    @classmethod
    def probe(cls, config: SitewiseConfig, context: Context) -> str:
        client = context.client("iotsitewise", config)
        probe(lambda: client.list_asset_models(maxResults=1), "listing the asset models")
        return "could list the asset models"

    def export(self, batch: Batch) -> Outcome:
        entries: dict[int, Entry] = {}
        rejected: dict[int, str] = {}
        for n, record in enumerate(batch.records):
            try:
                if self._readings is None:
                    entries[n] = msgspec.json.decode(record.payload, type=Entry)
                else:
                    entries[n] = self._readings.entry(batch, record)
            except NoValue as error:
                rejected[n] = str(error)
            except (msgspec.MsgspecError, OverflowError) as error:
                rejected[n] = f"not a PutAssetPropertyValueEntry: {error}"
        retry: dict[int, str] = {}
        requests = list(_without_conflicts(entries))

        def put(part: Sequence[int]) -> None:
            for n, (reason, codes) in self._put(entries, part).items():
                if CONFLICT in codes and len(part) > 1:
                    rejected.update(send_split([n], put))
                elif codes <= PERMANENT or (CONFLICT in codes and entries[n].has_conflict()):
                    rejected[n] = reason
                else:
                    retry[n] = reason

        after, cut = None, False
        for number, request in enumerate(requests):
            try:
                rejected |= send_split(request, put)
            except Retry as problem:
                if number == 0:
                    raise
                after, cut = problem.after, problem.cut
                retry |= {n: str(problem) for rest in requests[number:] for n in rest}
                break
        retry = {n: reason for n, reason in retry.items() if n not in rejected}
        reason = next(iter(retry.values()), "")
        return Outcome(retry=sorted(retry), rejected=rejected, error=reason, after=after, cut=cut)

    def _put(self, entries: dict[int, Entry], part: Sequence[int]) -> dict[int, tuple[str, set[str]]]:
        """Send one request; return the failed entries with reason and error codes."""
        request = [msgspec.to_builtins(entries[n]) | {"entryId": str(n)} for n in part]
        self.context.working()
        try:
            answer = self._client.batch_put_asset_property_value(
                enablePartialEntryProcessing=True, entries=request
            )
        except Exception as error:
            code = error_code(error)
            # A single entry can conflict with another client's request; that ends soon, so retry it.
            conflict = code == CONFLICT and (len(part) > 1 or entries[part[0]].has_conflict())
            if code in REFUSED or conflict or is_invalid(error):
                raise Refused(" ".join(cause(error).split())) from error
            raise failure(error, "putting property values") from error
        failed = {}
        for entry in answer.get("errorEntries", ()):
            codes = dict.fromkeys(error["errorCode"] for error in entry["errors"])
            failed[int(entry["entryId"])] = "; ".join(map(safe_code, codes)), set(codes)
        return failed


def _without_conflicts(entries: dict[int, Entry]) -> Iterator[list[int]]:
    """Split entries, in order, into requests without two values for one property and time."""
    request: list[int] = []
    taken: set[tuple[Any, ...]] = set()
    for n, entry in entries.items():
        points = entry.points()
        if points & taken:
            yield request
            request, taken = [], set()
        request.append(n)
        taken |= points
    if request:
        yield request


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this file."""
    register(SitewiseExporter)
