"""Chromium over the DevTools protocol, on a pipe: no port, no driver, no dependency."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Browser:
    """A browser with one page."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # It talks on descriptors 3 and 4, whatever ours are.
        plumbing = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", plumbing, program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", buffering=0), os.fdopen(ours_in, "rb")
        self._number = 0
        self._session: str | None = None
        self._rest = b""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        (target,) = (one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._notice(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _notice(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of this size and wait for it."""
        self.requests.clear()
        self.complaints.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def see(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true; it is looked at whenever the page is drawn."""
        seen = self.see(
            f"""new Promise((resolve) => {{
              const ends = Date.now() + {seconds * 1000};
              const look = () => {{
                let found = false;
                try {{ found = {expression}; }} catch {{ }}
                if (found || Date.now() > ends) resolve(Boolean(found)); else setTimeout(look, 50);
              }};
              look();
            }})"""
        )
        assert seen, f"never true: {expression}\n" + str(self.see("document.body.innerText"))

    def text(self, selector: str) -> str:
        """What is written in an element."""
        return str(self.see(f"document.querySelector({json.dumps(selector)}).innerText"))

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        self._out.close()
        self._in.close()
        self._process.wait(timeout=30)
