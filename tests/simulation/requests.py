"""Clients that make requests: one that appends with ids, and one that has no right to anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from random import Random
from typing import Any

from .clients import HERE, PUBACK, PUBLISH, SUBACK, SUBSCRIBE, Client, Packet, _text
from .kernel import Kernel
from .settings import GUEST

UNAUTHORIZED = 2  # the status of a reply
NOT_AUTHORIZED = 0x87  # in a PUBACK or a SUBACK
MANAGED = ("createMessageStream", "updateMessageStream", "deleteMessageStream", "purgeMessageStream")


class Appended:
    """One append with an id."""

    def __init__(self, number: int, payload: bytes) -> None:
        self.id, self.payload = f"id-{number}", payload
        self.sent: list[float] = []
        self.acked: float | None = None
        self.number: int | None = None  # in the stream, from the first answer
        self.rest = 0  # how often it is sent again after its answer
        self.answers: list[tuple[float, float, int]] = []  # when it was asked and answered, and the number


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Asker(Client):
    """Makes requests."""

    _requests = 0

    def ask(self, operation: str, body: dict[str, Any], done: Callable[[dict[str, Any]], object]) -> None:
        """Make a request; `done` gets the reply, if one comes before the connection ends."""
        if self.connected:
            self._requests += 1
            request = f"q{self._requests}"
            self._asked[request] = done
            self.request(operation, body | {"requestId": request})

    def request(self, operation: str, body: dict[str, Any]) -> None:
        """Send a request, with QoS 0."""
        data = (b"\0" if self.v5 else b"") + json.dumps(body).encode()
        self.send(PUBLISH, 0, _text(f"streambridge/{self.name}/{operation}") + data)

    def ready(self) -> None:
        self._asked: dict[str, Callable[[dict[str, Any]], object]] = {}

    def answered(self, packet: Packet) -> dict[str, Any]:
        """The reply in a PUBLISH; who has made the request gets it."""
        at = 2 + int.from_bytes(packet.body[:2], "big")
        at += 2 if packet.flags >> 1 & 3 else 0
        at += 1 + packet.body[at] if self.v5 else 0
        answer: dict[str, Any] = json.loads(packet.body[at:])
        done = self._asked.pop(str(answer.get("requestId")), None)
        if done is not None:
            done(answer)
        return answer


class Appender(Asker):
    """Appends to the stream `ids` by requests; without an answer it asks again, with the same id."""

    def __init__(self, kernel: Kernel, random: Random) -> None:
        super().__init__(kernel, "appender", random, v5=False, clean=True, peer=HERE)
        self.all: list[Appended] = []
        self.open: dict[str, Appended] = {}  # not answered, by request id
        self._sent: set[str] = set()
        self.refusals: list[str] = []

    def append(self, number: int, *, again: bool) -> None:
        for _ in range(number):
            one = Appended(len(self.all), f"append {len(self.all)}".encode())
            one.rest = int(again)
            self.all.append(one)
            self._requests += 1
            self.open[f"r{self._requests}"] = one
        self._pump()

    def repeat(self, number: int, *, latest: bool) -> None:
        """Ask again for some that were answered, of all or of the latest."""
        known = [one for one in self.all if one.acked is not None and not one.rest]
        if latest:
            known = known[-2 * number :]
        for one in self._random.sample(known, min(number, len(known))):
            if one not in self.open.values():
                self._requests += 1
                self.open[f"r{self._requests}"] = one
        self._pump()

    @property
    def idle(self) -> bool:
        return not self.open

    def ready(self) -> None:
        super().ready()
        self._sent.clear()
        self._pump()

    def _pump(self) -> None:
        if not self.connected:
            return
        for request, one in list(self.open.items())[:20]:
            if request not in self._sent:
                self._sent.add(request)
                one.sent.append(self.kernel.now)
                body = {
                    "name": "ids", "payload": _base64(one.payload), "messageId": _base64(one.id.encode()),
                    "requestId": request,
                }  # fmt: skip
                self.request("appendMessage", body)

    def handle(self, packet: Packet) -> None:
        if packet.kind != PUBLISH:
            return
        answer = self.answered(packet)
        one = self.open.pop(str(answer.get("requestId")), None)
        if one is None:
            return
        if "sequenceNumber" in answer:
            one.answers.append((one.sent[-1], self.kernel.now, answer["sequenceNumber"]))
            if one.acked is None:
                one.acked, one.number = self.kernel.now, answer["sequenceNumber"]
            if one.rest:
                one.rest -= 1
                self._requests += 1
                self.open[f"r{self._requests}"] = one
        else:
            self.refusals.append(str(answer))
            self._requests += 1
            self.kernel.later(0.2, None, self._ask_again, f"r{self._requests}", one)
            self.open[f"r{self._requests}"] = one
            self._sent.add(f"r{self._requests}")
        self._pump()

    def _ask_again(self, request: str, one: Appended) -> None:
        self._sent.discard(request)
        self._pump()


class Guest(Asker):
    """A client of another machine. With rules, they allow its requests, and nothing that these ask for.

    Without rules, it may not change streams. `allowed` has what was done for it all the same.
    """

    def __init__(self, kernel: Kernel, random: Random) -> None:
        super().__init__(kernel, "guest", random, v5=True, clean=True, user=GUEST, password=GUEST)
        self.allowed: list[str] = []
        self._tried = ""

    def attempt(self, operation: str, stream: str, *, rules: bool) -> None:
        """Ask for something, if it is forbidden."""
        if not self.connected or not (rules or operation in MANAGED):
            return
        self._tried = f"{operation} of {stream}"
        match operation:
            case "PUBLISH":
                self.send(PUBLISH, 2, _text(f"{stream}/guest") + b"\0\1\0from a guest")
            case "SUBSCRIBE":
                self.send(SUBSCRIBE, 2, b"\0\1\0" + _text(f"{stream}/#") + b"\1")
            case _:
                self.ask(operation, BODIES[operation](stream), self._refused(operation, stream))

    def _refused(self, operation: str, stream: str) -> Callable[[dict[str, Any]], None]:
        def done(answer: dict[str, Any]) -> None:
            nothing = operation == "listStreams" and answer.get("streams") == []
            if answer.get("status") != UNAUTHORIZED and not nothing:
                self.allowed.append(f"{operation} of {stream}: {answer}")

        return done

    def handle(self, packet: Packet) -> None:
        if packet.kind == PUBLISH:
            if packet.body[2:].startswith(f"streambridge/{self.name}/".encode()):
                self.answered(packet)
            else:
                self.allowed.append(f"it got {packet.body[:80]!r}")
        elif packet.kind in (PUBACK, SUBACK):
            reason = packet.body[2 if packet.kind == PUBACK else 3]
            if reason != NOT_AUTHORIZED:
                self.allowed.append(f"{self._tried}: reason code {reason}")


def _defined(stream: str) -> dict[str, Any]:
    return {"definition": {"name": stream, "strategyOnFull": 0}}


def _named(stream: str, **more: Any) -> dict[str, Any]:
    return {"name": stream, **more}


BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "createMessageStream": lambda stream: _defined(f"{stream}2"),
    "updateMessageStream": _defined,
    "deleteMessageStream": _named,
    "purgeMessageStream": _named,
    "describeMessageStream": _named,
    "readMessages": _named,
    "appendMessage": lambda stream: _named(stream, payload="AAAA"),
    "appendMessages": lambda stream: _named(stream, payloads=["AAAA"]),
    "fetchMessages": lambda stream: _named(stream, consumer="any"),
    "ackMessages": lambda stream: _named(stream, consumer="any", ack=[0]),
    "listStreams": lambda stream: {},
}
