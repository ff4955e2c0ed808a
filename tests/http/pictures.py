"""Takes the pictures of the status page in docs/images: `python -m tests.http.pictures`.

Runs a gateway with clients, full streams and a failing export for a minute, and Chromium without a window.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from PIL import Image

from tests.http.chromium import Browser
from tests.http.conftest import Service

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

CONFIG = """
[streams.temperatures]
topics = ["temperatures/#"]
[[streams.temperatures.export.http]]
identifier = "lake"
uri = "http://127.0.0.1:{port}/lake"
[streams.pumps]
topics = ["pumps/#"]
description = "Pressure and flow of all pumps"
[[streams.pumps.export.http]]
identifier = "archive"
uri = "http://127.0.0.1:9/nobody"
[[streams.pumps.export.http]]
identifier = "office"
uri = "http://127.0.0.1:{port}/office"
[streams.alarms]
topics = ["alarms/#"]
limits = {{ max_messages = 10000, max_age = "30d" }}
[streams.camera]
topics = ["camera"]
persistence = "Memory"
max_size = "64KiB"
segment_size = "16KiB"
strategy_on_full = "OverwriteOldestData"
[streams.brim]
topics = ["brim"]
max_size = "8KiB"
segment_size = "4KiB"
"""
SECONDS = 60
TICK = 0.145  # seconds between two rounds of readings


class Office(http.server.BaseHTTPRequestHandler):
    """Takes what is posted."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


def publish(service: Service, until: threading.Event) -> None:
    """Devices publish until the end; the last one is disconnected whenever its stream is full."""
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(service.device(f"device-{n}")) for n in range(1, 14)]
        n = 0
        while not until.wait(TICK):
            for place in range(6):
                value = f'{{"bar": {1 + (7 * n + place) % 83 / 100:.2f}, "n": {n}}}'
                devices[place].publish(f"pumps/{place + 1}/pressure", value, qos=1)
                devices[place + 6].publish(f"temperatures/{place + 1}", f'{{"c": {20 + n % 9}}}', qos=1)
            if n % 7 == 0:
                devices[0].publish("alarms/door", b"open", qos=1)
                devices[12].publish("brim", bytes(900), qos=1)
            if n % 2 == 0:
                devices[2].publish("camera", bytes(2000), qos=1)
            n += 1


def save(browser: Browser, name: str, height: int) -> None:
    """A picture of the page's upper part, of few colours."""
    clip = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
    taken = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
    image = Image.open(io.BytesIO(base64.b64decode(taken))).convert("RGB").quantize(96)
    image.save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program is not None, "install chromium"
    office = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Office)
    threading.Thread(target=office.serve_forever, daemon=True).start()
    ends = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        service = Service(Path(directory), CONFIG.format(port=office.server_port))
        devices = threading.Thread(target=publish, args=(service, ends))
        devices.start()
        (Path(directory) / "profile").mkdir()
        browser = Browser(program, Path(directory) / "profile")
        try:
            browser.open(f"http://127.0.0.1:{service.port}/", height=1250)
            time.sleep(SECONDS)
            save(browser, "status", 1250)
            browser.see("location.hash = '#/stream/pumps'")
            browser.until("document.querySelectorAll('#tail li').length > 9")
            time.sleep(5)
            save(browser, "stream", 1340)
        finally:
            browser.close()
            ends.set()
            devices.join()
            service.stop()
            office.shutdown()


if __name__ == "__main__":
    main()
