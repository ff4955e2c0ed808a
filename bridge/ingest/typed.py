"""Payloads to typed columns, in the executors: each row gets its values, or the reason why not.

A converter turns the value of a key into what Arrow takes for the column's type, and raises `Misfit` rather
than lose anything: a number must fit exactly, except that fractions round to the nearest DOUBLE (or FLOAT).

| column | takes |
| DOUBLE | numbers; integers up to 2^53 |
| BIGINT and smaller | integers in range, also as 5.0 |
| DECIMAL | numbers with no more digits than the type, also as text |
| BOOLEAN | true, false |
| STRING | text; any other value as JSON |
| BINARY | base64 |
| DATE | ISO 8601 |
| TIMESTAMP | ISO 8601 (UTC if there is no offset), or Unix time in seconds; years 1 to 9999 |
| TIMESTAMP_NTZ | ISO 8601 without an offset |
| ARRAY, STRUCT, MAP | lists and objects, whose values follow the same rules |
| VARIANT | any value; Spark encodes it |

Three paths lead to the same columns. Batches in which every payload is plain take that of `flat`, without an
object of Python per value. Most other rows take the fast one: msgspec decodes them, and whole columns are
checked by the types of their values. A row takes the exact one (`payloads.decoded`, and a converter for each
value) if the fast one meets anything unusual: keys that the schema lacks or that may occur twice, a value
that may not fit, a type that needs converting. Without msgspec no row takes the fast one.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal, DecimalException, Inexact, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bridge.ingest.columns import is_variant
from bridge.ingest.errors import BadOption
from bridge.ingest.flat import FlatReader
from bridge.ingest.payloads import MAX_TEXT, Misfit, decoded, text_of
from bridge.ingest.schema import EXACT, EXTRA, VALUE, Layout, is_scalar

try:
    import msgspec

    _fast: Callable[[bytes], Any] | None = msgspec.json.Decoder().decode
except ImportError:  # compiled: a cluster may lack it
    _fast = None

WIDER = {"double": pa.float64(), "bigint": pa.int64(), "text": pa.string()}  # in the order of preference
NAMED = 100  # keys without a column that a report names, and names of one row
NAME = 100  # characters of them
SLICE = 1000  # rows that are tried again if a batch is not plain
PAUSE = 10  # batches that are not tried after one in which most slices were not plain
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECONDS = (-62_135_596_800, 253_402_300_800)  # years 1 to 9999
DIGITS = 38  # of a DECIMAL
_DECIMAL = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")

Convert = Callable[[Any, list[str]], Any]  # of a value; lists the nested keys that the type lacks
Row = dict[Any, Any]  # by key; of a wider column by (key, type); of `extra` by None


@dataclass(frozen=True, slots=True)
class Rules:
    """How payloads are typed. It travels to the executors.

    `ddl` is the schema as it was given or inferred, `schema` the serialized Arrow schema of the columns of
    `keys`, in this order. If `strict`, a value that does not fit makes its row a reject; otherwise it goes to
    a wider column. If `whole`, the payload itself is the value of the only column.
    """

    ddl: str
    keys: tuple[str, ...]
    schema: bytes
    layout: Layout
    strict: bool
    form: str
    whole: bool = False

    def types(self) -> pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(self.schema))

    def columns(self) -> pa.Schema:
        """Return the columns of the payload in the typed table."""
        fields = list(self.types())
        for kinds in self.layout.wider.values():
            fields += [pa.field(name, WIDER[kind]) for kind, name in kinds.items()]
        if not self.whole:
            fields.append(pa.field(EXTRA, pa.string()))
        return pa.schema(fields)


@dataclass(slots=True)
class Found:
    """What a task has met beside values: keys without a column, by the rows that have them, and new types."""

    extra_rows: int = 0
    keys: Counter[str] = field(default_factory=Counter)
    wider: set[tuple[str, str]] = field(default_factory=set)  # (key, type) of columns that are to be added

    def has_extra(self, names: Sequence[str]) -> None:
        self.extra_rows += 1
        for name in names[:NAMED]:
            short = name if len(name) <= NAME else name[: NAME - 3] + "..."
            if short in self.keys or len(self.keys) < NAMED:
                self.keys[short] += 1


class Typing:
    """Types the payloads of one task; what it meets is in `found`.

    Without `fast`, each payload takes the exact path.
    """

    def __init__(self, rules: Rules, *, fast: bool = True) -> None:
        self.rules, self.found = rules, Found()
        self._types = rules.types()
        self._known = frozenset(rules.keys)
        self._converters = {
            key: converter(field.type) for key, field in zip(rules.keys, self._types, strict=True)
        }
        self._variants = {
            key for key, field in zip(rules.keys, self._types, strict=True) if is_variant(field.type)
        }
        self._wider = [(kind, converter(type_)) for kind, type_ in WIDER.items()]
        names: list[Any] = [*rules.keys]
        names += [(key, kind) for key, kinds in rules.layout.wider.items() for kind in kinds]
        names += [] if rules.whole else [None]
        types = [pa.string() if is_variant(field.type) else field.type for field in rules.columns()]
        self._places = [*zip(names, types, strict=True)]
        self._is_fast = fast and _fast is not None and rules.form == "json" and not rules.whole
        self._flat = FlatReader(rules.keys, self._types)
        self._is_flat = fast and rules.form == "json" and not rules.whole and self._flat.usable
        self._pause = 0

    def columns(self, payloads: pa.Array) -> tuple[list[pa.Array], list[str | None]]:
        """Return the columns of `rules.columns()`, and for each row None or the reason why it is a reject."""
        if not self._is_flat or self._pause or not len(payloads):
            self._pause = max(0, self._pause - 1)
            return self._by_row(payloads)
        if (found := self._flat.columns(payloads)) is not None:
            return self._complete(found), [None] * len(payloads)
        parts: list[list[pa.Array]] = []
        reasons: list[str | None] = []
        plain = 0
        for start in range(0, len(payloads), SLICE):
            part = payloads.slice(start, SLICE)
            if len(payloads) > SLICE and (found := self._flat.columns(part)) is not None:
                parts.append(self._complete(found))
                reasons += [None] * len(part)
                plain += 1
            else:
                columns, why = self._by_row(part)
                parts.append(columns)
                reasons += why
        if 2 * plain < len(parts):
            self._pause = PAUSE
        return [pa.concat_arrays(pieces) for pieces in zip(*parts, strict=True)], reasons

    def _complete(self, columns: list[pa.Array]) -> list[pa.Array]:
        """Append the columns that are not of keys: they are empty."""
        more = self._places[len(columns) :]
        return [*columns, *(pa.nulls(len(columns[0]), kind) for _, kind in more)]

    def _by_row(self, payloads: pa.Array) -> tuple[list[pa.Array], list[str | None]]:
        values = payloads.to_pylist()
        count = len(values)
        reasons: list[str | None] = [None] * count
        columns: dict[Any, list[Any]] = {key: [None] * count for key in self.rules.keys}
        unusual: Sequence[int] = range(count)
        if self._is_fast:
            columns, unusual = self._decoded_fast(payloads, values)
        for index in unusual:
            row: Row = {}
            try:
                row = self._exact(values[index])
            except Misfit as misfit:
                reasons[index] = str(misfit)
            for key in self.rules.keys:
                columns[key][index] = row.pop(key, None)
            for name, value in row.items():
                columns.setdefault(name, [None] * count)[index] = value
        return [
            pa.array(columns[name], kind) if name in columns else pa.nulls(count, kind)
            for name, kind in self._places
        ], reasons

    def _decoded_fast(
        self, payloads: pa.Array, values: Sequence[bytes]
    ) -> tuple[dict[Any, list[Any]], list[int]]:
        """Return the columns of the keys, and the indices of rows that have to take the exact path."""
        assert _fast is not None
        known = self._known
        nothing: Row = {}
        rows: list[Row] = []
        unusual: set[int] = set()
        for index, (payload, colons) in enumerate(zip(values, _colons(payloads, values), strict=True)):
            try:
                row = _fast(payload) if len(payload) <= MAX_TEXT else None
            except Exception:  # of msgspec, which may be absent; the exact path finds the reason
                row = None
            # as many keys as colons that may follow a key: none occurs twice
            if type(row) is dict and (len(row) == colons or _keys(row) == colons) and row.keys() <= known:
                rows.append(row)
            else:
                rows.append(nothing)
                unusual.add(index)
        columns: dict[Any, list[Any]] = {}
        for key, column in zip(self.rules.keys, self._types, strict=True):
            found = columns[key] = [row.get(key) for row in rows]
            kinds = set(map(type, found))
            if int in kinds or not kinds <= _PLAIN.get(column.type, frozenset((type(None),))):
                unusual.update(
                    index for index, value in enumerate(found) if not _is_plain(column.type, value)
                )
        return columns, sorted(unusual)

    def _exact(self, payload: bytes) -> Row:
        value = decoded(payload, self.rules.form)
        if self.rules.whole or is_scalar(value):
            value = {VALUE: value}
        elif not isinstance(value, dict):
            raise Misfit("not an object")
        row: Row = {}
        extra: dict[str, Any] = {}
        unknown: list[str] = []
        for key, item in value.items():
            convert = self._converters.get(key)
            if convert is None:
                extra[key] = item
                unknown.append(key)
            elif item is not None or key in self._variants:
                nested: list[str] = []
                try:
                    row[key] = convert(item, nested)
                except Misfit as misfit:
                    if self.rules.strict:
                        raise Misfit(f"does not fit the schema: {key} {misfit}") from None
                    if not self._widen(row, key, item):
                        extra[key] = item
                        unknown.append(key)
                    continue
                if nested:
                    extra[key] = item
                    unknown += [f"{key}.{name}" for name in nested]
        if extra:
            row[None] = text_of(extra)
            self.found.has_extra(unknown)
        return row

    def _widen(self, row: Row, key: str, value: Any) -> bool:
        """Put a value that does not fit its column into a wider one; return False if there can be none."""
        layout = self.rules.layout
        for kind, convert in self._wider:
            try:
                converted = convert(value, [])
            except Misfit:
                continue
            if kind in layout.wider.get(key, {}):
                row[key, kind] = converted
                return True
            if layout.has_room():
                self.found.wider.add((key, kind))
            return False
        raise AssertionError(key)  # text takes any value


def _colons(payloads: pa.Array, values: Sequence[bytes]) -> list[int]:
    """Return how many colons of each payload follow a quote or space: at least one for each key."""
    joined = b"".join(values)
    spaces = [space for space in (b" ", b"\n", b"\t", b"\r") if space in joined]
    if any(space + b":" in joined for space in spaces):
        counts: list[int] = pc.count_substring_regex(payloads, '["[:space:]]:').to_pylist()
    else:
        counts = [payload.count(b'":') for payload in values]
    return counts


def _keys(value: Any) -> int:
    """Return the number of keys on all levels; msgspec bounds the depth."""
    if type(value) is dict:
        return len(value) + sum(_keys(item) for item in value.values() if type(item) in (dict, list))
    return sum(_keys(item) for item in value if type(item) in (dict, list))


_PLAIN: dict[pa.DataType, frozenset[type]] = {
    pa.float64(): frozenset((float, type(None))),
    pa.bool_(): frozenset((bool, type(None))),
    pa.string(): frozenset((str, type(None))),
}
_INTEGERS = {
    kind: (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1)
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())
}


def _is_plain(kind: pa.DataType, value: Any) -> bool:
    """Return whether Arrow takes the value, and nothing is lost: what the exact path would give."""
    if value is None:
        return True
    of = type(value)
    if of in _PLAIN.get(kind, ()):
        return True
    if of is int:
        low, high = _INTEGERS.get(kind) or ((-EXACT, EXACT) if kind == pa.float64() else (1, 0))
        return bool(low <= value <= high)
    if of is dict and pa.types.is_struct(kind) and not is_variant(kind):
        fields = {field.name: field.type for field in kind}
        return all(name in fields and _is_plain(fields[name], item) for name, item in value.items())
    if of is list and pa.types.is_list(kind):
        return all(_is_plain(kind.value_type, item) for item in value)
    return False


def converter(kind: pa.DataType) -> Convert:
    """Return the converter for a type; raises BadOption for one that no JSON value has."""
    if is_variant(kind):
        return _variant
    if kind in _INTEGERS:
        return _integer(kind, *_INTEGERS[kind])
    if pa.types.is_list(kind):
        return _list(kind)
    if pa.types.is_struct(kind):
        return _struct(kind)
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return _map(kind)
    if pa.types.is_decimal(kind):
        return _decimal(kind)
    if pa.types.is_timestamp(kind):
        return _timestamp if kind.tz else _local_timestamp
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    raise BadOption(f"--schema: a payload cannot have values of the type {kind}; use STRING")


def _misfit(value: Any, kind: str) -> Misfit:
    names = {bool: "a boolean", str: "text", dict: "an object", list: "a list", type(None): "null"}
    return Misfit(f"is {names.get(type(value), 'a number')} that does not fit {kind}")


def _double(value: Any, nested: list[str]) -> Any:
    if type(value) is float or (type(value) is int and -EXACT <= value <= EXACT):
        return float(value)
    if type(value) is Decimal and math.isfinite(found := float(value)):
        return found
    raise _misfit(value, "DOUBLE")


def _float(value: Any, nested: list[str]) -> Any:
    found = _double(value, nested)
    if math.isfinite(found) and abs(found) > 3.4028234e38:
        raise _misfit(value, "FLOAT")
    if type(value) is int and abs(value) > 2**24:
        raise _misfit(value, "FLOAT")
    return found


def _integer(kind: pa.DataType, low: int, high: int) -> Convert:
    name = {8: "TINYINT", 16: "SMALLINT", 32: "INT", 64: "BIGINT"}[kind.bit_width]

    def convert(value: Any, nested: list[str]) -> Any:
        found = value
        if (type(value) is float and abs(value) <= EXACT) or (
            type(value) is Decimal and value.adjusted() < 20
        ):
            found = int(value) if value == value // 1 else None
        if type(found) is not int or not low <= found <= high:
            raise _misfit(value, name)
        return found

    return convert


def _boolean(value: Any, nested: list[str]) -> Any:
    if type(value) is bool:
        return value
    raise _misfit(value, "BOOLEAN")


def _string(value: Any, nested: list[str]) -> Any:
    return value if type(value) is str else text_of(value)


def _variant(value: Any, nested: list[str]) -> Any:
    return text_of(value)


def _binary(value: Any, nested: list[str]) -> Any:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise _misfit(value, "BINARY (base64)") from None


def _decimal(kind: pa.DataType) -> Convert:
    unit = Decimal(1).scaleb(-kind.scale)
    exact = Context(prec=DIGITS, traps=[Inexact, InvalidOperation])

    def convert(value: Any, nested: list[str]) -> Any:
        found = None
        if type(value) is float and math.isfinite(value):
            found = Decimal(repr(value))
        elif type(value) in (int, Decimal) or (type(value) is str and _DECIMAL.fullmatch(value)):
            found = Decimal(value)
        with suppress(DecimalException):  # inexact, or too many digits
            if found is not None and (not found or found.adjusted() < kind.precision - kind.scale):
                return found.quantize(unit, context=exact)
        raise _misfit(value, f"DECIMAL({kind.precision},{kind.scale})")

    return convert


def _date(value: Any, nested: list[str]) -> Any:
    try:
        return date.fromisoformat(value)
    except (TypeError, ValueError):
        raise _misfit(value, "DATE") from None


def _timestamp(value: Any, nested: list[str]) -> Any:
    """Return us since 1970."""
    if type(value) in (int, float, Decimal):
        if SECONDS[0] <= value < SECONDS[1]:  # false for NaN
            return round(value * 1_000_000)
        raise Misfit("is a time outside the years 1 to 9999 (a number is Unix time in seconds)")
    try:
        when = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _misfit(value, "TIMESTAMP") from None
    return _micros(when if when.tzinfo else when.replace(tzinfo=UTC))


def _local_timestamp(value: Any, nested: list[str]) -> Any:
    try:
        when = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise _misfit(value, "TIMESTAMP_NTZ") from None
    if when.tzinfo:
        raise Misfit("is a time with an offset, which TIMESTAMP_NTZ cannot hold")
    return _micros(when.replace(tzinfo=UTC))


def _micros(when: datetime) -> int:
    found = (when - EPOCH) // timedelta(microseconds=1)  # an offset may lead out of the years 1 to 9999
    if SECONDS[0] * 1_000_000 <= found < SECONDS[1] * 1_000_000:
        return found
    raise Misfit("is a time outside the years 1 to 9999 (a number is Unix time in seconds)")


def _list(kind: pa.DataType) -> Convert:
    of = converter(kind.value_type)

    def convert(value: Any, nested: list[str]) -> Any:
        if type(value) is not list:
            raise _misfit(value, "ARRAY")
        return [None if item is None else of(item, nested) for item in value]

    return convert


def _struct(kind: pa.DataType) -> Convert:
    fields = {field.name: converter(field.type) for field in kind}

    def convert(value: Any, nested: list[str]) -> Any:
        if type(value) is not dict:
            raise _misfit(value, "STRUCT")
        found = {}
        for name, item in value.items():
            of = fields.get(name)
            if of is None:
                nested.append(name)
            else:
                found[name] = None if item is None else of(item, nested)
        return found

    return convert


def _map(kind: pa.DataType) -> Convert:
    of = converter(kind.item_type)

    def convert(value: Any, nested: list[str]) -> Any:
        if type(value) is not dict:
            raise _misfit(value, "MAP")
        return [(name, None if item is None else of(item, nested)) for name, item in value.items()]

    return convert


_SIMPLE: dict[pa.DataType, Convert] = {
    pa.float64(): _double,
    pa.float32(): _float,
    pa.bool_(): _boolean,
    pa.string(): _string,
    pa.binary(): _binary,
    pa.date32(): _date,
}
