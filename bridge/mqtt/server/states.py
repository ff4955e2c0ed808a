"""The states of a connection, and what changes them: the table that `Connection` runs by.

NEW         nothing has come yet. A TLS handshake is over before this state
CONNECTING  CONNECT has come and the client logs in. What it sends behind its CONNECT waits
OPEN        CONNACK 0 has been sent
CLOSED      nothing is read any more; what was written still goes out

`TRANSITIONS` has a row for each packet that is handled and for each event. A packet without a row is an
error, and so is one whose handler raises ProtocolError: the connection has FAILED then. The figure in the
documentation is made from these rows.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from bridge.mqtt.wire import packets
from bridge.mqtt.wire.packets import CONNECT, DISCONNECT


class State(enum.Enum):
    """Where a connection is in its life."""

    NEW = enum.auto()
    CONNECTING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Event(enum.Enum):
    """What changes a connection's state without a packet."""

    ACCEPTED = "the client has its session"
    REFUSED = "wrong credentials, a rule, or a limit"
    FAILED = "a wrong packet, a message not stored, a time-out, a limit, take-over, revocation, or the stop"
    LOST = "the network connection has ended without a DISCONNECT"


class Transition(NamedTuple):
    """One row: what happens in a state, what is done then, and the state after it."""

    state: State
    on: int | Event  # the first byte of a packet (of a PUBLISH the flags vary), or an event
    does: str
    to: State
    handler: str = ""  # the method of `Connection` that handles the packet


# The hot path compares with these: until Python 3.12, `State.OPEN` costs 50 ns each time.
NEW, OPEN, CLOSED = State.NEW, State.OPEN, State.CLOSED
TRANSITIONS: Final = (
    Transition(State.NEW, CONNECT, "log in", State.CONNECTING, "_connect"),
    Transition(State.NEW, Event.FAILED, "close", State.CLOSED),
    Transition(State.NEW, Event.LOST, "forget it", State.CLOSED),
    Transition(State.CONNECTING, Event.ACCEPTED, "CONNACK 0, then what is queued", State.OPEN),
    Transition(State.CONNECTING, Event.REFUSED, "CONNACK with the reason", State.CLOSED),
    Transition(State.CONNECTING, Event.FAILED, "close", State.CLOSED),
    Transition(State.CONNECTING, Event.LOST, "end the login", State.CLOSED),
    Transition(OPEN, packets.PUBLISH, "store, deliver; answer after the commit", OPEN, "_packets"),
    Transition(OPEN, packets.PUBACK, "forget the message, send the next", OPEN, "_puback"),
    Transition(OPEN, packets.PUBREC, "PUBREL", OPEN, "_pubrec"),
    Transition(OPEN, packets.PUBREL, "free the packet id; PUBCOMP", OPEN, "_pubrel"),
    Transition(OPEN, packets.PUBCOMP, "forget the message, send the next", OPEN, "_pubcomp"),
    Transition(OPEN, packets.SUBSCRIBE, "SUBACK, then what is retained", OPEN, "_subscribe"),
    Transition(OPEN, packets.UNSUBSCRIBE, "UNSUBACK", OPEN, "_unsubscribe"),
    Transition(OPEN, packets.PINGREQ, "PINGRESP", OPEN, "_pingreq"),
    Transition(OPEN, DISCONNECT, "close, without the will", State.CLOSED, "_disconnect"),
    Transition(OPEN, Event.FAILED, "DISCONNECT with the reason, the will", State.CLOSED),
    Transition(OPEN, Event.LOST, "the will", State.CLOSED),
)

NEXT: Final = {(row.state, row.on): row.to for row in TRANSITIONS}
