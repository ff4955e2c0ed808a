"""The states of a connection, and what changes them.

NEW         nothing has arrived; a TLS handshake is complete before this state
CONNECTING  CONNECT has arrived and the client logs in; what it sends after its CONNECT waits
OPEN        CONNACK 0 was sent
CLOSED      nothing more is read; what was written is still sent

`TRANSITIONS` has a row for each packet and each event. A packet without a row is an error (`FAILED`), and so
is a packet whose handler raises ProtocolError. The figure in the documentation is generated from these rows.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from bridge.mqtt.wire import packets
from bridge.mqtt.wire.packets import CONNECT, DISCONNECT


class State(enum.Enum):
    """The state of a connection."""

    NEW = enum.auto()
    CONNECTING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Event(enum.Enum):
    """A change of state without a packet."""

    ACCEPTED = "the client has its session"
    REFUSED = "wrong credentials, a rule, or a limit"
    FAILED = "a wrong packet, a message not stored, a time-out, a limit, take-over, revocation, or the stop"
    LOST = "the network connection has ended without a DISCONNECT"


class Transition(NamedTuple):
    """One row: a state, a packet or event, what is done, and the next state."""

    state: State
    on: int | Event  # the first byte of a packet (of a PUBLISH the flags vary), or an event
    does: str
    to: State
    handler: str = ""  # the function of `control` that handles the packet


# The hot path compares with these: until Python 3.12, `State.OPEN` costs 50 ns each time.
NEW, OPEN, CLOSED = State.NEW, State.OPEN, State.CLOSED
TRANSITIONS: Final = (
    Transition(State.NEW, CONNECT, "log in", State.CONNECTING),
    Transition(State.NEW, Event.FAILED, "close", State.CLOSED),
    Transition(State.NEW, Event.LOST, "forget it", State.CLOSED),
    Transition(State.CONNECTING, Event.ACCEPTED, "CONNACK 0, then what is queued", State.OPEN),
    Transition(State.CONNECTING, Event.REFUSED, "CONNACK with the reason", State.CLOSED),
    Transition(State.CONNECTING, Event.FAILED, "close", State.CLOSED),
    Transition(State.CONNECTING, Event.LOST, "end the login", State.CLOSED),
    Transition(OPEN, packets.PUBLISH, "store, deliver; answer after the commit", OPEN),
    Transition(OPEN, packets.PUBACK, "forget the message, send the next", OPEN, "puback"),
    Transition(OPEN, packets.PUBREC, "PUBREL", OPEN, "pubrec"),
    Transition(OPEN, packets.PUBREL, "free the packet id; PUBCOMP", OPEN, "pubrel"),
    Transition(OPEN, packets.PUBCOMP, "forget the message, send the next", OPEN, "pubcomp"),
    Transition(OPEN, packets.SUBSCRIBE, "SUBACK, then what is retained", OPEN, "subscribe"),
    Transition(OPEN, packets.UNSUBSCRIBE, "UNSUBACK", OPEN, "unsubscribe"),
    Transition(OPEN, packets.PINGREQ, "PINGRESP", OPEN, "pingreq"),
    Transition(OPEN, DISCONNECT, "close, without the will", State.CLOSED, "disconnect"),
    Transition(OPEN, Event.FAILED, "DISCONNECT with the reason, the will", State.CLOSED),
    Transition(OPEN, Event.LOST, "the will", State.CLOSED),
)

NEXT: Final = {(row.state, row.on): row.to for row in TRANSITIONS}
