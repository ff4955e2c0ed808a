"""axe-core finds no violation, on any page, at both widths, in both schemes, nor in what is stale.

axe-core is installed from the npm registry into `.sdks/` the first time.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bridge.access.users import hash_password
from tests.fakes.sdks import node_modules
from tests.http.chromium import Browser
from tests.http.conftest import Service
from tests.http.test_page import row

AXE_VERSION = "axe-core@4.10.2"
STREAMS = """
[streams.pumps]
topics = ["pumps/#"]
description = "All pumps"
[[streams.pumps.export.http]]
identifier = "office"
uri = "http://127.0.0.1:9/nobody"
[[streams.pumps.export.http]]
identifier = "off"
uri = "http://127.0.0.1:9/nobody"
disabled = true
[streams.ring]
topics = ["ring"]
max_size = "8KiB"
segment_size = "2KiB"
strategy_on_full = "OverwriteOldestData"
[streams.brim]
topics = ["brim"]
max_size = "4KiB"
segment_size = "2KiB"
"""
RUN = """axe.run({runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]})
  .then((found) => found.violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html}`)))"""
READY = {
    "#/": row("exports", "retrying"),
    "#/stream/pumps": "document.querySelectorAll('#tail li').length && " + row("stream-exports", "retrying"),
    "#/clients": row("clients", "thermometer"),
    "#/events": "document.querySelectorAll('#events-list li').length > 1",
}


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return (node_modules(AXE_VERSION) / "axe-core" / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def service(start: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> Service:
    users = tmp_path_factory.mktemp("users") / "users"
    users.write_text(f"ann:{hash_password(b'ann')}\n")
    users.chmod(0o600)
    service = start(STREAMS, mqtt=f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{users}"')
    with service.device("filler") as client:
        for topic in ("ring", "pumps/1", "brim"):
            for _ in range(20):
                client.publish(topic, bytes(500)).wait_for_publish(10)
    return service


def violations(browser: Browser, axe: str) -> list[str]:
    browser.see(axe + ";0")
    found: list[str] = browser.see(RUN)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_violation(
    service: Service, browser: Browser, axe: str, width: int, scheme: str
) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    with service.device("thermometer"):
        browser.open(f"http://127.0.0.1:{service.port}/", width=width)
        for place, ready in READY.items():
            browser.see(f"location.hash = {json.dumps(place)}")
            browser.until(ready)
            assert violations(browser, axe) == [], place
            assert browser.see("document.documentElement.scrollWidth") <= width, place
        browser.see("document.querySelector('#log').click()")
        browser.until("document.querySelector('#login').open")
        assert violations(browser, axe) == []


def test_axe_finds_no_violation_in_what_is_no_longer_current(
    start: Callable[..., Service], browser: Browser, axe: str
) -> None:
    service = start(STREAMS)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.until(row("exports", "office"))
    service.stop()
    browser.until("document.body.dataset.stale === 'true'")
    assert violations(browser, axe) == []
