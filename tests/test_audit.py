"""`make audit` finds what the advisories know of, and never says that all is well when it could not ask.

pip-audit itself, from the package registry, against a service that answers like osv.dev (the `query` call of
https://google.github.io/osv.dev/api/); what the real ones know today is not tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow  # it installs pip-audit


@contextmanager
def advisories(vulnerable: str, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A service that knows of one flaw in one package; yields its URL, and what it is asked."""
    asked: list[dict[str, Any]] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(query)
            flaw = {
                "id": "PYSEC-2026-1",
                "affected": [
                    {
                        "package": query["package"],
                        "ranges": [
                            {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999.1"}]}
                        ],
                    }
                ],
            }
            body = json.dumps({"vulns": [flaw]} if query["package"]["name"] == vulnerable else {}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        finally:
            server.shutdown()


def audit(url: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PIP_AUDIT_VULNERABILITY_SERVICE": "osv", "PIP_AUDIT_OSV_URL": url}
    return subprocess.run(
        [".ci/audit", sys.executable], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_audit_tells_of_a_flaw_in_what_is_installed() -> None:
    with advisories("msgspec") as (url, asked):
        done = audit(url)
    assert done.returncode == 1, done.stderr
    assert f"msgspec {version('msgspec')}: PYSEC-2026-1, fixed in 999.1" in done.stdout
    assert {"package": {"name": "paho-mqtt", "ecosystem": "PyPI"}, "version": version("paho-mqtt")} in asked
    bill = json.loads((ROOT / "dist" / "streambridge.cdx.json").read_text())
    assert len(asked) == len(bill["components"])


def test_the_audit_ends_well_only_if_every_package_was_looked_up() -> None:
    with advisories("nothing") as (url, asked):
        done = audit(url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(asked)} packages, 0 known vulnerabilities, 0 packages not looked up" in done.stdout
    with advisories("nothing", status=503) as (url, _):
        done = audit(url)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot be reached" in done.stdout
