"""A program on the gateway: it appends and reads over the control socket while everything fails around it.

It appends one message after the other, each with an id of its own, and repeats it under that id until it is
answered; now and then once more after that. Then it reads on from where it was, as a consumer does. So it
sees what deduplication, the control socket and reads promise: each message once, in order, under the number
that it was given.
"""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.soak import plan
from bridge.control.client import Control
from bridge.errors import StreamBridgeError

PAUSE = 0.05  # seconds between two messages
AGAIN = 0.1  # of the messages are appended once more after their answer
MOST = 1000  # messages of a read


class App(threading.Thread):
    """Runs until `stop`; then it reads the rest. `wrong` is what should never have been."""

    def __init__(self, data_dir: Path, seed: int) -> None:
        super().__init__()
        self.acknowledged: list[int] = []  # by message, Unix time in ms
        self.wrong: list[str] = []
        self.read: list[int] = []  # by number, the message
        self.unfinished = 0
        self._data_dir, self._chance = data_dir, random.Random(f"{seed}app")
        self._over, self._given_up = threading.Event(), threading.Event()

    def stop(self, seconds: float = 60.0) -> None:
        """Append no more, and wait until the last message is answered and read."""
        self._over.set()
        self.join(seconds)
        self._given_up.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(PAUSE):
            number = self._append(len(self.acknowledged))
            if number is None:
                self.unfinished = 1
                return
            if self._chance.random() < AGAIN and (again := self._append(len(self.acknowledged))) != number:
                self.wrong.append(f"repeated message {len(self.acknowledged)}: number {again}, not {number}")
            self.acknowledged.append(int(time.time() * 1000))
            self._read_on()
        while len(self.read) < len(self.acknowledged) and not self._given_up.wait(PAUSE):
            self._read_on()

    def _append(self, message: int) -> int | None:
        body = b'{"d":%d,"n":%d,"x":""}' % (plan.APP.number, message)
        request = {
            "name": plan.APP_STREAM,
            "payload": base64.b64encode(body).decode(),
            "messageId": base64.b64encode(b"%d" % message).decode(),
        }
        while not self._given_up.is_set():
            reply = self._ask("appendMessage", request)
            if reply is not None and reply["status"] == 0:
                return int(reply["sequenceNumber"])
            self._given_up.wait(4 * PAUSE)
        return None

    def _read_on(self) -> None:
        options = {"desiredStartSequenceNumber": len(self.read), "maxMessageCount": MOST}
        request = {"name": plan.APP_STREAM, "readMessagesOptions": options}
        reply = self._ask("readMessages", request)
        for row in (reply or {}).get("messages", ()):
            if row["sequenceNumber"] != len(self.read):
                self.wrong.append(f"number {row['sequenceNumber']} was read instead of {len(self.read)}")
                return
            self.read.append(int(json.loads(base64.b64decode(row["payload"]))["n"]))

    def _ask(self, operation: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """The reply; None while the service does not answer."""
        with suppress(OSError, StreamBridgeError):
            control = Control.connect(self._data_dir)
            if control is not None:
                with control:
                    found: dict[str, Any] = json.loads(control.ask(operation, json.dumps(request).encode()))
                    return found
        return None

    def result(self) -> dict[str, Any]:
        """As that of a device."""
        counts = {"connects": 0, "sessions_lost": 0, "refused": 0, "stalls": 0}
        return {
            **plan.APP.to_json(),
            "acknowledged": self.acknowledged,
            "unfinished": self.unfinished,
            **counts,
        }
