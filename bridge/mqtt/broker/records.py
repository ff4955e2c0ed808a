"""The records of the journal: one struct for each change of sessions and retained messages.

A record is a msgpack array that begins with its kind (`tag`). Versions only add kinds, and fields at the end
with a default, so a newer version can read the records of an older one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from bridge.access.rules import Holder
from bridge.decoded import END, Natural, Next
from bridge.mqtt.broker.replay import digest_of
from bridge.topics import is_topic_filter, is_topic_name, unshared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.mqtt.broker.message import Message
    from bridge.mqtt.broker.outbox import Outgoing
    from bridge.mqtt.broker.sessions import Session


# Checked where it is decoded. Those at other brokers are above those of clients; see `joined`.
PacketId = Annotated[int, msgspec.Meta(ge=0, le=0x1FFFF)]


class Record(msgspec.Struct, array_like=True, frozen=True):
    """The base of all records."""


class Opened(Record, frozen=True, tag=1):
    """A persistent session exists. `left` is when its client disconnected, 0 if it is connected.

    Seconds on the age timeline (`bridge.clock`), as `expires` of the others.

    `proof` is what its client logged in with (`access.proofs`), `access` through which access, and `realm`
    whose user it is (`access.rules.Identity`). `network` is where a client without a user name came from.
    """

    client: str
    user: str | None
    expiry: Natural
    left: float
    proof: bytes = b""
    access: str = ""
    realm: str = ""
    network: str = ""


class Ended(Record, frozen=True, tag=2):
    """A session is over."""

    client: str


class Subscribed(Record, frozen=True, tag=3):
    """A session has a subscription: the fields of `message.Subscription`."""

    client: str
    subscription: tuple[str, int, bool, bool, int, int]


class Unsubscribed(Record, frozen=True, tag=4):
    """A session no longer has a subscription."""

    client: str
    filter: str


class Queued(Record, frozen=True, tag=5):
    """A message waits for the sessions in `homes`: client, QoS, retain flag, subscription identifiers.

    `sender` and `id` are the client and its QoS 2 packet id, which is in use from now on. Both are in one
    record, so that a kill during a write never keeps one without the other.

    `shared` has the copies for shared subscriptions: a separate number, because the session may also have an
    ordinary copy; the same fields as `homes`; the filter.

    With `stream`, the payload is that of the message `place` in it, if its `digest` is this one
    (`replay.digest_of`).
    """

    number: Natural
    topic: bytes
    payload: bytes
    qos: int
    properties: dict[int, Any]
    expires: float | None
    homes: list[tuple[str, int, bool, tuple[int, ...]]]
    sender: str = ""
    id: PacketId = 0
    shared: list[tuple[int, str, int, bool, tuple[int, ...], str]] = []
    stream: str = ""
    place: Natural = 0
    digest: int = 0


class Settled(Record, frozen=True, tag=6):
    """A session no longer needs a queued message."""

    client: str
    number: Natural


class Retained(Record, frozen=True, tag=7):
    """The retained message of a topic, and who has set it; an empty payload: there is none."""

    topic: bytes
    payload: bytes
    qos: int
    properties: dict[int, Any]
    expires: float | None
    holder: Holder = Holder()


class Received(Record, frozen=True, tag=8):
    """A QoS 2 packet id is in use by its client."""

    client: str
    id: PacketId


class Released(Record, frozen=True, tag=9):
    """A QoS 2 packet id is free again."""

    client: str
    id: PacketId


class Marked(Record, frozen=True, tag=10):
    """The journal has all that it needs of a stream's QoS 2 messages below `upto`, and of these numbers."""

    stream: str
    upto: Next
    known: list[Natural] = []


class Held(Record, frozen=True, tag=11):
    """Some streams have the message of a QoS 2 id, but others have failed to store it.

    `digest` tells the messages with that id apart (`replay.digest_of`); an older version leaves it out.
    """

    client: str
    id: PacketId
    streams: list[str]
    digest: int = 0


class Booted(Record, frozen=True, tag=12):
    """The records are complete as long as this boot lasts; empty: complete up to here in any case."""

    boot: str


class Willed(Record, frozen=True, tag=13):
    """The will of a session (`packets.Will`); without a topic, it has none."""

    client: str
    topic: str = ""
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: dict[int, Any] = {}


class Sending(Record, frozen=True, tag=14):
    """A session's subscriber may have this QoS 2 packet id, for the message `number`; 0: an unknown one.

    Once the message is settled, the id only needs to be released.
    """

    client: str
    id: PacketId
    number: int = 0


class Freed(Record, frozen=True, tag=15):
    """A session's subscriber has released this QoS 2 packet id."""

    client: str
    id: PacketId


class Fed(Record, frozen=True, tag=16):
    """A subscription has the retained messages up to a topic, and waits for the others; None: for none."""

    client: str
    filter: str
    upto: str | None


class Joined(Record, frozen=True, tag=17):
    """Our session at another broker: see `joined.Joined`. `name` stands for the client in other records.

    The packet ids of these records are above those of clients (`joined.ABOVE`).
    """

    name: str
    at: str
    doubtful: bool
    accepts: int
    refuses_bridges: bool
    granted: dict[str, int]


Any_ = (
    Opened
    | Ended
    | Subscribed
    | Unsubscribed
    | Queued
    | Settled
    | Retained
    | Received
    | Released
    | Marked
    | Held
    | Booted
    | Willed
    | Sending
    | Freed
    | Fed
    | Joined
)


def check(record: Any_) -> None:
    """Raise ValueError for a record that no version writes: the broker could not send what it says."""
    topic, qos = getattr(record, "topic", ""), [getattr(record, "qos", 0)]
    times = (getattr(record, "expires", None) or 0, getattr(record, "left", 0.0))
    sound = not isinstance(topic, bytes) or is_topic_name(topic.decode().removeprefix("$"))
    if isinstance(record, Subscribed):
        qos.append(record.subscription[1])
        sound = is_topic_filter(unshared(record.subscription[0]))
    elif isinstance(record, Fed):
        sound = is_topic_filter(unshared(record.filter))
    elif isinstance(record, Queued):
        qos += [one[1] for one in record.homes] + [one[2] for one in record.shared]
    elif isinstance(record, Marked):
        sound = record.upto <= END
    sound = sound and all(map(math.isfinite, times))
    if not (sound and set(qos) <= {0, 1, 2}):
        raise ValueError("a topic, a QoS, a number or a time that is none")


def _at(message: Message) -> float | None:
    return None if message.expires is None else message.expires.at


def opened_record(session: Session) -> Opened:
    """Make the record of an existing session."""
    who = session.identity
    return Opened(
        session.client_id, who.user, session.expiry, session.left, session.proof, who.access, who.realm,
        who.holder.network,
    )  # fmt: skip


def queued_record(
    message: Message,
    number: int,
    copies: Sequence[tuple[Session, Outgoing]],
    sender: str = "",
    packet_id: int = 0,
    *,
    whole: bool = False,
) -> Queued:
    """Make the record of a message that waits for sessions. It refers to a stream, unless `whole`."""
    homes = [
        (session.client_id, out.qos, out.retain, out.identifiers) for session, out in copies if not out.share
    ]
    shared = [
        (out.number, session.client_id, out.qos, out.retain, out.identifiers, out.share)
        for session, out in copies
        if out.share
    ]
    payload, stream, place, digest = message.payload, "", 0, 0
    if message.place is not None and not whole:
        (stream, place), digest, payload = message.place, digest_of(message.topic, payload), b""
    return Queued(
        number, message.topic, payload, message.qos, message.properties, _at(message), homes, sender,
        packet_id, shared, stream, place, digest,
    )  # fmt: skip


def will_record(session: Session) -> Willed:
    """Make the record of a session's will, if that must survive a restart."""
    will = session.lasting_will
    return Willed(session.client_id, *will) if will is not None else Willed(session.client_id)


def retained_record(message: Message, holder: Holder) -> Retained:
    """The record of a retained message."""
    return Retained(message.topic, message.payload, message.qos, message.properties, _at(message), holder)
