"""What an export sends for a message: the option `record` of kinesis, firehose, http, mqtt and any plugin.

    payload    the payload alone
    json       one JSON object, as in the NDJSON of the `s3` exporter: gateway, stream, epoch (string),
               sequence_number, ingest_time (RFC 3339, UTC, milliseconds, `Z`), topic, payload (base64)
    cbor       a map with the same entries in CBOR (RFC 8949), payload as a byte string
    template   any other text with at least one field of `bridge.plugin.keys`, such as
               `{"t":"{topic}","v":{payload}}`

gateway, stream, epoch and sequence_number together identify a message: a destination that remembers them can
store each message once.

A template that begins with `{` or `[` is JSON, unless a field begins there. What it makes is always JSON:

* Between quotes, a value is text, escaped as JSON demands. A value that the message lacks is empty.
* Elsewhere, a value is JSON: text is in quotes, numbers and members of the payload are as they are, and a
  value that the message lacks is null. `{payload}` is the payload itself if that is JSON, without the white
  space between its parts, otherwise its text in quotes.
* A message whose payload is needed and is not UTF-8 is rejected; `{base64}` takes any payload.

In any other template values are put in as they are, `{payload}` byte for byte. Nothing is escaped, and a
value that the message lacks is empty. In both, a brace that no letter follows is itself, as in `{}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cbor2
import msgspec
from msgspec import Struct

from bridge.cbor import head
from bridge.plugin.api import Batch, Record
from bridge.plugin.keys import Field, Message, NoValue, as_text, field, rfc3339

JSON, CBOR, TEXT, BYTES = (
    "application/json",
    "application/cbor",
    "text/plain; charset=utf-8",
    "application/octet-stream",
)
_FIELD = re.compile(r"\{([A-Za-z]\w*(?:[/:][^{}]*)?)\}")
_ESCAPED = re.compile(r"\\.")
# What they lack is null; the payload is a number in one, and text in the other.
_SAMPLES = (Record(0, 0, "", b"0"), Record(0, 0, "", b"text"))
_encoder = msgspec.json.Encoder()


class Row(Struct, gc=False):
    """The entries of a message in `json` and `cbor`, and the columns of the `s3` exporter."""

    gateway: str
    stream: str
    epoch: str
    sequence_number: int
    ingest_time: str
    topic: str
    payload: bytes  # base64 in JSON


def rows(batch: Batch, records: Sequence[Record]) -> list[Row]:
    """The entries of each record of a batch."""
    gateway, stream, epoch = batch.gateway, batch.stream, str(batch.epoch)
    last, text = -1, ""
    found = []
    for record in records:
        if record.ingest_time != last:  # all messages of a commit group have the same time
            last, text = record.ingest_time, rfc3339(record.ingest_time)
        found.append(Row(gateway, stream, epoch, record.sequence_number, text, record.topic, record.payload))
    return found


def lines(batch: Batch, records: Sequence[Record]) -> bytes:
    """Encode records as NDJSON: one JSON object per line."""
    return _encoder.encode_lines(rows(batch, records))


class RecordEncoder:
    """Encodes messages as an export sends them.

    `record` is the value of the option. Raises ValueError if it is wrong. `content_type` is the media type of
    the result.
    """

    def __init__(self, record: str) -> None:
        self.content_type, self._encode = _formats.get(record) or _template(record)

    def encode(self, batch: Batch, most: int | None = None) -> tuple[list[bytes], dict[int, str]]:
        """Return the encoded records of a batch, and the reasons of rejected ones by index.

        A record is rejected if it takes more than `most` bytes, or if its payload does not fit the template.
        The list has b"" in its place.
        """
        encoded, rejected = self._encode(batch)
        if most is not None:
            for n, data in enumerate(encoded):
                if len(data) > most:
                    encoded[n] = b""
                    rejected[n] = f"the record of {len(data)} bytes is larger than {most} bytes"
        return encoded, rejected

    def joined(self, encoded: Sequence[bytes]) -> bytes:
        """Encode several records as one list, in JSON or CBOR. Raises ValueError if they are neither."""
        if self.content_type == JSON:
            return b"[" + b",".join(encoded) + b"]"
        if self.content_type == CBOR:
            return head(4, len(encoded)) + b"".join(encoded)
        raise ValueError("only JSON and CBOR have lists of records")

    def packed(self, encoded: Sequence[bytes]) -> bytes:
        """Concatenate records so that a reader finds where each one ends.

        JSON has one record per line. CBOR is a sequence of items (RFC 8742). Any other format becomes a
        sequence of CBOR byte strings, because it may contain any bytes.
        """
        if self.content_type == JSON:
            return b"".join([one + b"\n" for one in encoded])
        if self.content_type == CBOR:
            return b"".join(encoded)
        return b"".join([head(2, len(one)) + one for one in encoded])


_Encode = Callable[[Batch], tuple[list[bytes], dict[int, str]]]


def _payloads(batch: Batch) -> tuple[list[bytes], dict[int, str]]:
    return [record.payload for record in batch.records], {}


def _json(batch: Batch) -> tuple[list[bytes], dict[int, str]]:
    return [_encoder.encode(row) for row in rows(batch, batch.records)], {}


def _cbor(batch: Batch) -> tuple[list[bytes], dict[int, str]]:
    return [cbor2.dumps(msgspec.structs.asdict(row)) for row in rows(batch, batch.records)], {}


_formats: dict[str, tuple[str, _Encode]] = {
    "payload": (BYTES, _payloads),
    "json": (JSON, _json),
    "cbor": (CBOR, _cbor),
}


# -- templates -----------------------------------------------------------------

_Put = Callable[[Message], bytes]


def _template(template: str) -> tuple[str, _Encode]:
    pieces = _FIELD.split(template)
    if len(pieces) == 1:
        raise ValueError(
            f"record: {template!r} is not `payload`, `json` or `cbor`, and has no field of a template, "
            "such as {topic}"
        )
    is_json = pieces[0].lstrip()[:1] in ("{", "[")
    parts = list(_json_parts(pieces) if is_json else _text_parts(pieces))

    def one(message: Message) -> bytes:
        return b"".join([part if isinstance(part, bytes) else part(message) for part in parts])

    def encode(batch: Batch) -> tuple[list[bytes], dict[int, str]]:
        encoded, rejected = [], {}
        for n, record in enumerate(batch.records):
            try:
                encoded.append(one(Message(batch, record)))
            except NoValue as error:
                encoded.append(b"")
                rejected[n] = str(error)
        return encoded, rejected

    for record in _SAMPLES if is_json else ():
        made = one(Message(Batch("gateway", "stream", 0, 0, 0, [record]), record))
        try:
            msgspec.json.decode(made)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(
                f"record: {template!r} does not make JSON, but for example {made.decode()}: {error}"
            ) from None
    return JSON if is_json else TEXT, encode


def _json_parts(pieces: Sequence[str]) -> Iterator[bytes | _Put]:
    is_quoted = False
    for n, piece in enumerate(pieces):
        if n % 2:
            yield _in_quotes(_field(piece)) if is_quoted else _as_json(_field(piece))
        else:
            plain = _ESCAPED.sub("", piece)
            if plain.endswith("\\") and n + 1 < len(pieces):
                raise ValueError(f"record: a backslash cannot escape the field {{{pieces[n + 1]}}}")
            is_quoted ^= plain.count('"') % 2 == 1
            yield piece.encode()


def _text_parts(pieces: Sequence[str]) -> Iterator[bytes | _Put]:
    for n, piece in enumerate(pieces):
        yield _as_it_is(_field(piece)) if n % 2 else piece.encode()


def _field(name: str) -> Field:
    try:
        return field(name)
    except ValueError as error:
        raise ValueError(f"record: {error}") from None


def _in_quotes(value: Field) -> _Put:
    def put(message: Message) -> bytes:
        found = _value(value, message)
        return b"" if found is None else _encoder.encode(as_text(found))[1:-1]

    return put


def _as_json(value: Field) -> _Put:
    def put(message: Message) -> bytes:
        found = _value(value, message)
        if not isinstance(found, bytes):
            return _encoder.encode(found)
        text = as_text(found)
        try:
            return msgspec.json.format(found, indent=-1)
        except (msgspec.DecodeError, RecursionError):
            return _encoder.encode(text)

    return put


def _as_it_is(value: Field) -> _Put:
    def put(message: Message) -> bytes:
        found = _value(value, message)
        if isinstance(found, bytes):
            return found
        return b"" if found is None else as_text(found).encode()

    return put


def _value(value: Field, message: Message) -> Any:
    """Return a field's value; None if the message lacks it."""
    try:
        return value(message)
    except NoValue:
        return None
