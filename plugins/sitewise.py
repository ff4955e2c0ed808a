"""Exporter `IotSitewise`: property values, by BatchPutAssetPropertyValue.

A message is one PutAssetPropertyValueEntry in JSON, as the Stream Manager SDK writes it. Up to 10
entries go in a request. An entry with a value for the same property and time as one before it goes
in a later request, since the service refuses both together. `entryId` need not be unique: requests
carry numbers of their own.

What becomes of an entry follows the service's error codes: throttling, missing rights and the
service's own faults are tried again; an unknown property, an invalid value or a timestamp that the
service no longer takes (older than 7 days, or over 10 minutes ahead) is rejected. The values of an
entry are judged one by one: those without error are stored. Entries that the service finds in
conflict, such as of one property by its alias and by its ids, are sent again one after the other; one
that is in conflict with itself, by two values for one time, is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from bridge import (
    AwsBatchedConfig,
    Batch,
    Batching,
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
# Whatever else the service may answer is tried again: only these can never succeed.
HOPELESS = frozenset({"InvalidRequestException", "ResourceNotFoundException", "TimestampOutOfRangeException"})
CONFLICT = "ConflictingOperationException"
# For a whole request: it is one entry's fault, so the entries are tried apart.
REFUSED = frozenset({*HOPELESS, "SerializationException", "ValidationException"})


class SitewiseConfig(AwsBatchedConfig, frozen=True):
    """The SDK's IoTSiteWiseConfig, and where to send."""

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
            raise ValueError("a value holds exactly one of stringValue, integerValue, doubleValue, ...")


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
            raise ValueError("an entry names propertyAlias, or assetId and propertyId")

    def points(self) -> set[tuple[Any, ...]]:
        """What may be in a request only once."""
        where = self.property_alias or (self.asset_id, self.property_id)
        return {
            (where, v.timestamp.time_in_seconds, v.timestamp.offset_in_nanos) for v in self.property_values
        }

    def contradicts_itself(self) -> bool:
        """Whether there are two values for one time."""
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

    @classmethod
    def batching(cls, config: SitewiseConfig) -> Batching:
        base = super().batching(config)
        return Batching(records=base.records or MAX_ENTRIES, millis=base.millis)

    def export(self, batch: Batch) -> Outcome:
        entries: dict[int, Entry] = {}
        rejected: dict[int, str] = {}
        for n, record in enumerate(batch.records):
            try:
                entries[n] = msgspec.json.decode(record.payload, type=Entry)
            except msgspec.MsgspecError as error:
                rejected[n] = f"no PutAssetPropertyValueEntry: {error}"
        retry: dict[int, str] = {}
        requests = list(_without_conflicts(entries))

        def put(part: Sequence[int]) -> None:
            for n, (reason, codes) in self._put(entries, part).items():
                if CONFLICT in codes and len(part) > 1:
                    rejected.update(send_split([n], put))
                elif codes <= HOPELESS or (CONFLICT in codes and entries[n].contradicts_itself()):
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
        """Send one request; the entries that failed, why, and with which error codes."""
        request = [msgspec.to_builtins(entries[n]) | {"entryId": str(n)} for n in part]
        self.context.working()
        try:
            answer = self._client.batch_put_asset_property_value(
                enablePartialEntryProcessing=True, entries=request
            )
        except Exception as error:
            code = error_code(error)
            # A conflict of one entry alone, with what others send, is over in a moment.
            conflict = code == CONFLICT and (len(part) > 1 or entries[part[0]].contradicts_itself())
            if code in REFUSED or conflict or is_invalid(error):
                raise Refused(" ".join(cause(error).split())) from error
            raise failure(error, "putting property values") from error
        failed = {}
        for entry in answer.get("errorEntries", ()):
            codes = dict.fromkeys(error["errorCode"] for error in entry["errors"])
            failed[int(entry["entryId"])] = "; ".join(map(safe_code, codes)), set(codes)
        return failed


def _without_conflicts(entries: dict[int, Entry]) -> Iterator[list[int]]:
    """Cut entries into requests in which no property has two values for one time, keeping their order."""
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
