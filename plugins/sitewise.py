"""Exporter `IotSitewise`: property values, by BatchPutAssetPropertyValue.

A message is one PutAssetPropertyValueEntry in JSON, as the Stream Manager SDK writes it. A request has
up to 10 entries. An entry with a value for the same property and time as an earlier one goes in a later
request, because the service rejects both together. `entryId` need not be unique: requests have their
own numbers.

The service's error codes decide about an entry: throttling, missing rights and internal errors are
retried; an unknown property, an invalid value or a timestamp that the service does not accept (older
than 7 days, or more than 10 minutes ahead) is rejected. The service judges each value of an entry, and
stores those without error. Conflicting entries, for example of one property by its alias and by its ids,
are sent again one after the other; an entry with two values for one time is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    Refused,
    Retry,
    hookimpl,
    send_split,
)
from bridge.plugin.aws import cause, error_code, failure, is_invalid, safe_code

MAX_ENTRIES = 10
# Only these can never succeed; all other errors are retried.
PERMANENT = frozenset(
    {"InvalidRequestException", "ResourceNotFoundException", "TimestampOutOfRangeException"}
)
CONFLICT = "ConflictingOperationException"
# Errors of a request that one entry causes: its entries are sent separately.
REFUSED = frozenset({*PERMANENT, "SerializationException", "ValidationException"})


class SitewiseConfig(AwsBatchedConfig, frozen=True):
    """The SDK's IoTSiteWiseConfig, with endpoint and region."""

    batch_size: Annotated[int, Meta(ge=1, le=MAX_ENTRIES)] | None = None


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
        """The properties and times of the values; a request may have each only once."""
        where = self.property_alias or (self.asset_id, self.property_id)
        return {
            (where, v.timestamp.time_in_seconds, v.timestamp.offset_in_nanos) for v in self.property_values
        }

    def has_conflict(self) -> bool:
        """Return whether it has two values for one time."""
        return len(self.points()) < len(self.property_values)


class SitewiseExporter(Exporter):
    """One stream to IoT SiteWise."""

    kind: ClassVar[str] = "IotSitewise"
    Config: ClassVar[type[ExportConfig]] = SitewiseConfig
    limits: ClassVar[BatchLimits] = BatchLimits(records=MAX_ENTRIES)

    config: SitewiseConfig

    def __init__(self, config: SitewiseConfig, context: Context) -> None:
        super().__init__(config, context)
        self._client = context.client("iotsitewise", config)

    def export(self, batch: Batch) -> Outcome:
        entries: dict[int, Entry] = {}
        rejected: dict[int, str] = {}
        for n, record in enumerate(batch.records):
            try:
                entries[n] = msgspec.json.decode(record.payload, type=Entry)
            except msgspec.MsgspecError as error:
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

        cut = False
        for number, request in enumerate(requests):
            try:
                rejected |= send_split(request, put)
            except Retry as problem:
                if number == 0:
                    raise
                cut = problem.cut
                retry |= {n: str(problem) for rest in requests[number:] for n in rest}
                break
        retry = {n: reason for n, reason in retry.items() if n not in rejected}
        reason = next(iter(retry.values()), "")
        return Outcome(retry=sorted(retry), rejected=rejected, error=reason, cut=cut)

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
            # A conflict of a single entry with another client's request ends soon: retry it.
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
    """The exporter of this file."""
    register(SitewiseExporter)
