"""Messages between this process and its children over a socketpair.

frame = length u32 (big-endian) | msgpack of one message (an array, its first element the tag)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

_encoder = msgspec.msgpack.Encoder(enc_hook=str)  # for paths


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


class Frames:
    """Splits received bytes into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add received bytes; yield the messages that are complete."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) >= start + 4:
                end = start + 4 + int.from_bytes(self._buffer[start : start + 4], "big")
                if len(self._buffer) < end:
                    break
                body, start = self._buffer[start + 4 : end], end
                yield self._decoder.decode(body)
        finally:
            del self._buffer[:start]
