"""The status page, as a person sees it in a browser."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import paho.mqtt.client as paho
import pytest

from tests.http.chromium import Browser
from tests.http.conftest import Service

LONG = "a-stream-with-a-name-as-long-as-the-rules-allow-" * 5
STREAMS = f"""
[streams.sensors]
topics = ["sensors/#"]
[[streams.sensors.export.http]]
identifier = "office"
uri = "http://127.0.0.1:9/nobody"
[streams.small]
topics = ["small"]
max_size = "8KiB"
segment_size = "2KiB"
strategy_on_full = "OverwriteOldestData"
[streams.small.limits]
max_age = "7d"
[streams.{LONG}]
"""
ROW = "[...document.querySelectorAll('#{table} tbody tr')].find((row) => row.innerText.includes({text}))"


@pytest.fixture(scope="module")
def service(start: Callable[..., Service]) -> Service:
    return start(STREAMS)


@pytest.fixture
def page(service: Service, browser: Browser) -> Browser:
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.until("document.querySelector('#state').dataset.level !== 'unknown'")
    return browser


def row(table: str, text: str) -> str:
    return ROW.format(table=table, text=json.dumps(text))


def test_it_shows_what_is_stored_without_being_loaded_again(service: Service, page: Browser) -> None:
    assert page.text("h1") == "plant-7"
    messages = f"{row('streams', 'sensors')}.children[3].innerText.split('\\n')[0]"
    before = int(page.see(messages))
    service.publish(*[("sensors/a", b"21.5")] * 7)
    page.until(f"{messages} === '{before + 7}'")
    page.until(f"{row('exports', 'office')}.children[2].innerText === '{before + 7}'")


def test_a_failing_export_shows_its_error(service: Service, page: Browser) -> None:
    service.publish(("sensors/a", b"21.5"))
    page.until(f"{row('exports', 'office')}.innerText.includes('cannot connect')")
    page.until("document.querySelector('#tiles').innerText.includes('1 of 1 exports retrying')")


def test_a_full_stream_and_an_unavailable_stream_differ_from_the_good_ones(
    start: Callable[..., Service], browser: Browser
) -> None:
    service = start(
        '[streams.brim]\nmax_size = "4KiB"\nsegment_size = "2KiB"\n[streams.wrong]\ntopics = ["a/#/b"]\n'
    )
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.until("document.querySelector('#state').innerText === '1 stream cannot store'")
    assert "Messages for wrong are not stored" in browser.text("#notices")
    with service.device("filler") as client:
        for _ in range(20):
            client.publish("streams/brim", bytes(500)).wait_for_publish(10)
        browser.until(f"{row('streams', 'brim')}.innerText.includes('full, rejects messages')")
    assert browser.text("#state") == "2 streams cannot store"


def test_drops_are_shown_by_stream_and_reason(service: Service, page: Browser) -> None:
    service.publish(*[("small", bytes(1000))] * 20)
    page.until(f"{row('drops', 'stream small')}.innerText.includes('dropped: overwritten')")
    assert "age 7d" in page.see(f"{row('streams', 'small')}.innerText")


def test_the_page_counts_messages_as_rejected_and_connections_as_refused_as_the_metrics_do(
    start: Callable[..., Service], browser: Browser
) -> None:
    service = start("[streams.s]\n[mqtt.limits]\nretained_messages = 1\n")
    browser.open(f"http://127.0.0.1:{service.port}/")
    with socket.create_connection(("127.0.0.1", service.mqtt_port)) as nameless:
        nameless.sendall(b"\x10\x0c\x00\x04MQTT\x04\x00\x00\x3c\x00\x00")  # no client id, no clean session
        assert nameless.recv(4) == b"\x20\x02\x00\x02"
    with service.device("display") as client:
        client.publish("kept/a", b"1", qos=1, retain=True).wait_for_publish(60)
        client.publish("kept/c", b"1", qos=1, retain=True).wait_for_publish(60)
        browser.until(f"{row('drops', 'taken, but not retained')}")
        browser.see("location.hash = '#/clients'")
        browser.until(row("unmatched", 'topics = ["kept/c"]'))
        browser.see("location.hash = '#/'")
        client.publish("streams/typo", b"1", qos=1)
        browser.until(f"{row('drops', 'rejected: no stream')}")
    assert browser.see(f"{row('drops', 'refused: connects')}.children[0].innerText") == "mqtt"
    metrics = service.request("/metrics")[2].decode()
    assert 'streambridge_rejected_messages_total{front_end="mqtt",reason="no_stream"}' in metrics
    assert 'streambridge_refused_total{front_end="mqtt",reason="connects"}' in metrics
    tile = "[...document.querySelectorAll('#tiles > div')].find((one) => one.innerText.includes('Lost'))"
    browser.until(f"!{tile}.innerText.includes('\\n0\\n')")
    assert "none by limits of streams" in browser.see(f"{tile}.innerText")


def test_sessions_that_a_limit_ends_are_shown_with_the_messages_that_were_lost(
    start: Callable[..., Service], browser: Browser
) -> None:
    service = start("[mqtt.limits]\nsessions = 1\n")
    for client_id in ("first", "second"):
        client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id, clean_session=False)
        subscribed = threading.Event()
        client.on_subscribe = lambda *_, done=subscribed: done.set()
        client.connect("127.0.0.1", service.mqtt_port)
        client.loop_start()
        client.subscribe("commands", 1)
        assert subscribed.wait(60)
        client.disconnect()
        client.loop_stop()
        if client_id == "first":
            service.publish(*[("commands", b"open")] * 3)
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.until(row("drops", "sessions ended by a limit"))
    assert browser.see(f"{row('drops', 'sessions ended by a limit')}.children[2].innerText") == "1"
    assert browser.see(f"{row('drops', 'dropped: session ended')}.children[2].innerText") == "3"
    assert "Lost or rejected\n3" in browser.text("#tiles")


def test_connected_devices_are_listed_as_they_come_and_go(service: Service, page: Browser) -> None:
    page.see("location.hash = '#/clients'")
    with service.device("thermometer"):
        page.until(f"{row('clients', 'thermometer')}")
    page.until(f"!{row('clients', 'thermometer')}")


def test_a_fresh_page_shows_the_backlog_of_the_time_before_it(service: Service, page: Browser) -> None:
    service.publish(("sensors/a", b"1"))
    page.until("document.querySelector('#backlogs figure').innerText.includes('Now ')")
    label = page.see("document.querySelector('#backlogs svg').getAttribute('aria-label')")
    assert label.startswith("sensors → office: Now ")
    past = service.json("/history.json")
    assert len(past["pending"]) == len(past["exports"][0]["pending"]) == len(past["times"]) > 0


def test_the_chart_of_stored_messages_shows_what_was_stored_in_each_step(page: Browser) -> None:
    label = page.see(
        "(showHour({times: [0, 20000, 40000, 30000, 50000], stored: [0, 3000, 3000, 3100, 3100],"
        " size: [0, 0, 0, 0, 0], pending: [0, 0, 0, 0, 0], lost: [0, 0, 0, 0, 0], exports: []},"
        " {time: 51000, totals: {rate: 0, pending: 0, size: 0}, exports: []}),"
        " document.querySelector('#hour svg').getAttribute('aria-label'))"
    )
    assert label == "Messages stored per second: Now 0/s, at most 150/s"


def test_a_name_with_markup_is_shown_literally(service: Service, page: Browser) -> None:
    name = "<img src=x onerror=document.title='taken'>"
    page.see("location.hash = '#/clients'")
    with service.device(name):
        page.until(row("clients", name))
    assert page.see("document.images.length") == 0
    assert "taken" not in page.see("document.title")


def test_it_loads_nothing_from_elsewhere_and_breaks_no_rule_of_its_own(
    service: Service, page: Browser
) -> None:
    origin = f"http://127.0.0.1:{service.port}/"
    page.until("document.querySelectorAll('#backlogs svg').length > 0")
    assert page.requests
    assert [url for url in page.requests if not url.startswith((origin, "data:"))] == []
    assert page.complaints == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_it_fits_the_width_of_a_phone(service: Service, browser: Browser, width: int) -> None:
    browser.open(f"http://127.0.0.1:{service.port}/", width=width)
    browser.until(row("streams", "a-stream-with"))
    assert browser.see("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(service: Service, page: Browser, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.until(row("drops", "stream small"))
    assert page.see(FAINT) == []


# WCAG 2.2, 1.4.3: at least 4.5 to 1. What is see-through counts as its colour on the ground below it.
FAINT = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const rgba = (text) => [...numbers(text), 1].slice(0, 4);
  const over = ([r, g, b, a], under) => [r, g, b].map((c, i) => c * a + under[i] * (1 - a));
  const ground = (node) => {
    const below = node.parentElement ? ground(node.parentElement) : [255, 255, 255];
    return over(rgba(getComputedStyle(node).backgroundColor), below);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node), back = ground(node);
    const ink = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(over(rgba(ink), back)), light(back)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push(`${node.tagName} ${walker.currentNode.data.trim()}`);
  }
  return faint;
})()"""


def test_a_screen_reader_finds_its_way(service: Service, page: Browser) -> None:
    page.until(row("streams", "sensors"))
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and "role" in node
    ]
    names: dict[str, list[str]] = {}
    for role, name in found:
        names.setdefault(role, []).append(name)
    assert {"Since the start", "Streams", "Exports"} <= set(names["heading"])
    assert {"Streams", "Exports"} <= set(names["table"])
    assert all(names["table"]), "every table has a name"
    assert all(names["meter"]), "every bar has a name"
    assert "columnheader" in names
    assert "main" in names
    assert page.see("document.documentElement.lang") == "en"


def test_a_disk_that_cannot_be_written_is_seen_at_once(service: Service, page: Browser) -> None:
    service.mount("/dev/null")
    try:
        page.until("document.querySelector('#state').innerText === 'Cannot store'")
        page.until("document.querySelector('#notices').innerText.includes('cannot be written')")
    finally:
        service.mount("disk")
    page.until("document.querySelector('#state').innerText !== 'Cannot store'")
    page.until("document.querySelector('#notices').innerText === ''")


def test_the_page_shows_when_the_gateway_does_not_answer(
    start: Callable[..., Service], browser: Browser
) -> None:
    service = start("")
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.until("document.querySelector('#state').innerText === 'All is well'")
    assert "No streams yet" in browser.text("#streams")
    assert service.stop() == 0
    browser.until("document.querySelector('#state').innerText.startsWith('No answer since')")
    browser.until("document.querySelector('#stale').innerText.startsWith('What you see is not current')")
    assert browser.see("getComputedStyle(document.querySelector('main')).filter") == "grayscale(1)"
