"""The `headers` of a stored message: what a stream keeps of a PUBLISH besides topic and payload.

They are a msgpack map without the keys that have their default, or b"" if all have it (the usual case).
`decode` skips unknown keys, so keys may be added.

    key            value                                   from
    retain, dup    true                                    flags of the PUBLISH (3.1.1 section 3.3.1)
    client, id     client id, packet id                    QoS 2, to store the message once (4.3.3);
                                                           the client id also if an export needs it;
                                                           from another broker: the name of the
                                                           upstream, and the packet id + 65,536
    user           [[name, value], ...] strings            MQTT 5 User Properties
    type           string                                  MQTT 5 Content Type
    utf8           true                                    MQTT 5 Payload Format Indicator
    reply, token   topic, bytes                            MQTT 5 Response Topic, Correlation Data
    expires        Unix time in ms                         MQTT 5 Message Expiry, made absolute
    refused        "too_large: ..." or "no_stream: ..."    why its own stream can never store it
                                                           (`refused_stream`); `client` is there too
"""

from __future__ import annotations

import msgspec


class Headers(msgspec.Struct, omit_defaults=True, frozen=True):
    """The decoded headers of a stored message."""

    retain: bool = False
    dup: bool = False
    client: str = ""
    id: int = 0
    user: list[tuple[str, str]] = []
    type: str = ""
    utf8: bool = False
    reply: str = ""
    token: bytes = b""
    expires: int = 0
    refused: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Headers)
_NONE = Headers()


def encode(headers: Headers) -> bytes:
    return b"" if headers == _NONE else _encoder.encode(headers)


def decode(raw: bytes) -> Headers:
    return _decoder.decode(raw) if raw else _NONE


# A message with only this flag is common, so it is encoded once.
RETAIN = encode(Headers(retain=True))
DUP = encode(Headers(dup=True))
