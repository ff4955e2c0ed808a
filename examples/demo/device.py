"""One device of the demo: publishes readings of this machine at QoS 1, and records acknowledgements.

    python examples/demo/device.py KIND PORT SECONDS RESULT

KIND is one of `readings.KINDS`. Every reading is one message with a unique id. The id distinguishes a reading
that was sent again (the bridge was killed before it acknowledged) from two readings. At the end, the device
waits for pending acknowledgements and writes RESULT: how many readings it sent, which were acknowledged and
when, and how often it connected.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
from readings import KINDS

WINDOW = 200  # readings in flight
PATIENCE = 60  # seconds to wait for the last acknowledgements


class Device:
    """A paho client that publishes as fast as acknowledgements arrive."""

    def __init__(self, kind: str, port: int) -> None:
        self.kind, self.sent, self.connects = kind, 0, 0
        self.waiting: dict[int, int] = {}  # message id -> reading
        self.arrived: deque[tuple[int, float]] = deque()  # acknowledgements, as the network thread sees them
        self.acknowledged: dict[int, float] = {}  # reading -> when, on the machine's monotonic clock
        self.room = threading.Semaphore(WINDOW)
        # A persistent session: unacknowledged messages are sent again after a reconnect.
        self.client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id=f"device-{kind}", clean_session=False
        )
        self.client.max_inflight_messages_set(WINDOW)
        self.client.reconnect_delay_set(1, 1)
        self.client.on_connect = self.on_connect
        self.client.on_publish = self.on_publish
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def on_connect(self, *_: Any) -> None:
        """Count connections: more than one means that the bridge was restarted."""
        self.connects += 1

    def on_publish(self, _client: object, _data: object, message_id: int, *_: Any) -> None:
        """The bridge has stored a reading."""
        self.arrived.append((message_id, time.monotonic()))
        self.room.release()

    def settle(self) -> None:
        """Match the acknowledgements that have arrived to readings, before a message id is reused."""
        while self.arrived:
            message_id, when = self.arrived.popleft()
            self.acknowledged[self.waiting.pop(message_id)] = when

    def publish(self, topic: str, reading: dict[str, Any]) -> None:
        """Send one reading; wait while the window is full."""
        self.room.acquire()
        body = json.dumps({"id": f"{self.kind}-{self.sent}", **reading}, separators=(",", ":"))
        self.settle()  # before publishing: the acknowledgement of this message may arrive at once
        self.waiting[self.client.publish(f"machine/{topic}", body, qos=1).mid] = self.sent
        self.sent += 1

    def finish(self) -> bool:
        """Wait for messages in flight; return whether all were acknowledged."""
        deadline = time.monotonic() + PATIENCE
        for _ in range(WINDOW):
            if not self.room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return False
        self.settle()
        self.client.disconnect()
        self.client.loop_stop()
        return True


def main(kind: str, port: str, seconds: str, result: str) -> int:
    """Publish for some seconds; returns 0 if everything was acknowledged."""
    device = Device(kind, int(port))
    read = KINDS[kind]
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        now = time.time()
        for topic, fields in read():
            device.publish(topic, {"time": now, **fields})
    complete = device.finish()
    Path(result).write_text(
        json.dumps(
            {
                "kind": kind,
                "sent": device.sent,
                "acknowledged": list(device.acknowledged),
                "times": list(device.acknowledged.values()),
                "connects": device.connects,
            }
        )
    )
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
