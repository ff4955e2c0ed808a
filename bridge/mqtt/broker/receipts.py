"""What the acknowledgement of a PUBLISH says in MQTT 5 besides its reason code; and message ids.

* A receipt says where a message is stored. A client asks for receipts at CONNECT, with the User Property
  `streambridge-receipts` with the value `true`. Its PUBACK or PUBREC then has three User Properties for each
  stream of the message, in the order of the streams' names: `stream`; `sequence`, the message's number; and
  `duplicate`, which is `true` if the stream already had the message, else `false`.
* A refusal has a Reason String that says why.
* Neither is sent to a client that does not want it (Request Problem Information 0, MQTT-3.1.2-29) or does not
  accept an acknowledgement of that size (MQTT-3.4.2-2 and -3).

The User Property `message-id` of a PUBLISH is its id, of 1 to `LONGEST_ID` bytes. A stream stores a message
once, however often it arrives within the stream's deduplication window (`streams.dedup`), at any QoS. So a
QoS 1 device that did not get its PUBACK may send the message again, even to a gateway that has restarted. An
id belongs to the user who sent it, or for an anonymous client to its client id. So nobody can make messages
of others look like duplicates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import InvalidRequest
from bridge.mqtt.wire import answers
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import PUBACK, PUBREC, SUCCESS
from bridge.streams.dedup import SCOPED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from bridge.access.rules import Identity
    from bridge.mqtt.broker.line import Line
    from bridge.mqtt.broker.store import Stream
    from bridge.mqtt.wire.packets import Publish

ASKED = (b"streambridge-receipts", b"true")
MESSAGE_ID = b"message-id"
LONGEST_ID = 255  # bytes
LONGEST_REASON = 1_000  # characters of an error in a Reason String


def message_id(packet: Publish, identity: Identity) -> bytes:
    """Return the id by which streams know a message; empty if it has none. Raises InvalidRequest.

    It consists of `SCOPED`; "u" and the user name, or "c" and the client id, after its length in two bytes;
    and the message id.
    """
    found = [
        value for name, value in (packet.properties or {}).get(p.USER_PROPERTY, ()) if name == MESSAGE_ID
    ]
    if not found:
        return b""
    if len(found) > 1:
        raise InvalidRequest(f"the message has {len(found)} User Properties message-id; send one")
    if not 0 < len(found[0]) <= LONGEST_ID:
        raise InvalidRequest(
            f"the User Property message-id has {len(found[0])} bytes; it must have 1 to {LONGEST_ID}"
        )
    kind, owner = (b"c", identity.client_id) if identity.user is None else (b"u", identity.user)
    scope = owner.encode()
    return b"".join((SCOPED, kind, len(scope).to_bytes(2, "big"), scope, found[0]))


def stored(line: Line, packet: Publish, places: Mapping[Stream, int], known: AbstractSet[Stream]) -> bytes:
    """Make the PUBACK or PUBREC of a message with these numbers in its streams; `known` had it before."""
    if not places:
        return answers.ack(_kind(packet), packet.packet_id)
    receipt: list[tuple[bytes, bytes]] = []
    for stream, number in sorted(places.items(), key=lambda place: place[0].name):
        duplicate = b"true" if stream in known else b"false"
        receipt += (
            (b"stream", stream.name.encode()),
            (b"sequence", b"%d" % number),
            (b"duplicate", duplicate),
        )
    return _fitting(line, packet, SUCCESS, {p.USER_PROPERTY: receipt})


def refused(line: Line, packet: Publish, reason: int, why: str) -> bytes:
    """Make the PUBACK or PUBREC of a refused message."""
    if not line.explains:
        return answers.ack(_kind(packet), packet.packet_id, reason)
    return _fitting(line, packet, reason, {p.REASON_STRING: why[:LONGEST_REASON].encode()})


def _kind(packet: Publish) -> int:
    return PUBACK if packet.qos == 1 else PUBREC


def _fitting(line: Line, packet: Publish, reason: int, properties: p.Properties) -> bytes:
    answer = answers.ack(_kind(packet), packet.packet_id, reason, properties)
    if len(answer) <= line.max_packet_out:
        return answer
    return answers.ack(_kind(packet), packet.packet_id, reason)
