"""The page as a console: one stream in detail, clients, events, filters and order, logins and actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.testbed.local import free_port
from bridge.access.users import hash_password
from bridge.client import MessageStreamDefinition, StrategyOnFull, StreamManagerClient
from tests.http.chromium import Browser
from tests.http.conftest import Service
from tests.http.test_page import row

STREAMS = """
[streams.quiet]
topics = ["quiet/#"]
[[streams.quiet.export.http]]
identifier = "hourly"
uri = "http://127.0.0.1:9/nobody"
linger_millis = "1h"
[streams.pumps]
topics = ["pumps/#"]
description = "All pumps"
[[streams.pumps.export.http]]
identifier = "office"
uri = "http://127.0.0.1:9/nobody"
[streams.ring]
topics = ["ring"]
max_size = "8KiB"
segment_size = "2KiB"
strategy_on_full = "OverwriteOldestData"
[streams.brim]
topics = ["brim"]
max_size = "4KiB"
segment_size = "2KiB"
[[mqtt.acl]]
user = "*"
publish = ["#"]
subscribe = ["#"]
[[mqtt.acl]]
user = "ann"
manage = ["streams/#"]
"""
NAMES = "[...document.querySelectorAll('#streams td:first-child a')].map((name) => name.textContent)"


@pytest.fixture(scope="module")
def service(start: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> Service:
    users = tmp_path_factory.mktemp("users") / "users"
    users.write_text("".join(f"{name}:{hash_password(name.encode())}\n" for name in ("ann", "bob")))
    users.chmod(0o600)
    return start(STREAMS, mqtt=f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{users}"')


@pytest.fixture
def page(service: Service, browser: Browser) -> Browser:
    browser.open("about:blank")
    browser.call("Network.clearBrowserCookies")
    browser.open(f"http://127.0.0.1:{service.port}/")
    browser.until("document.querySelector('#state').dataset.level !== 'unknown'")
    return browser


def go(page: Browser, place: str) -> None:
    page.see(f"location.hash = {json.dumps(place)}")


def fill(page: Browser, selector: str, text: str) -> None:
    page.see(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)});"
        f" box.value = {json.dumps(text)};"
        " box.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def click(page: Browser, expression: str) -> None:
    page.see(f"({expression}).click()")


def test_a_stream_in_detail_shows_its_messages_as_they_come(service: Service, page: Browser) -> None:
    service.publish(("pumps/1/bar", b'{"bar": 4.2}'), ("pumps/2/bar", b"\xff\x00\x01"))
    page.until(row("streams", "pumps"))
    click(page, "[...document.querySelectorAll('#streams a')].find((a) => a.textContent === 'pumps')")
    page.until("document.querySelector('#tail').innerText.includes('ff 00 01')")
    assert '{"bar": 4.2}' in page.text("#tail")
    facts = page.text("#facts")
    for text in ("pumps/#", "First message", "Last message", "256 MiB, then rejects"):
        assert text in facts
    page.until("document.querySelector('#stream-exports').innerText.includes('next in')")
    page.until("document.querySelector('#stream-hour').innerText.includes('Pending for office')")
    page.until("document.querySelector('#stream-events').innerText.includes('an export fails')")
    fill(page, "#tail-topic", "pumps/1/#")
    page.until("document.querySelectorAll('#tail li').length > 0")
    page.until("!document.querySelector('#tail').innerText.includes('pumps/2')")
    service.publish(("pumps/1/bar", b"a new one"), ("pumps/2/bar", b"another"))
    page.until("document.querySelector('#tail').innerText.includes('a new one')")
    assert "another" not in page.text("#tail")
    fill(page, "#tail-topic", "")


def test_markup_in_topics_and_payloads_is_shown_literally(service: Service, page: Browser) -> None:
    evil = "<img src=x onerror=document.title='taken'>"
    service.publish((f"pumps/{evil}", f"{evil}\u202e\x1b[2J".encode()))
    go(page, "#/stream/pumps")
    page.until(f"document.querySelector('#tail').innerText.includes({json.dumps('pumps/' + evil)})")
    text = page.text("#tail code")
    assert text == f"{evil}\\u202e\\x1b[2J"
    go(page, "#/stream/" + "<img src=x onerror=document.title='taken'>")
    page.until("document.querySelector('#stream-text').innerText.startsWith('there is no stream')")
    assert page.see("document.images.length") == 0
    assert "taken" not in page.see("document.title")
    assert page.complaints == [] or all("404" in one for one in page.complaints)


def test_trouble_comes_first_and_rows_are_found_and_sorted(service: Service, page: Browser) -> None:
    with service.device("filler") as client:
        for _ in range(20):
            client.publish("brim", bytes(500)).wait_for_publish(10)
    page.until(f"{row('streams', 'brim')}.innerText.includes('full, rejects messages')")
    page.until(f"{NAMES}[0] === 'brim'")
    click(page, "document.querySelector('#streams th button')")
    page.until(f"{NAMES}.join() === 'brim,pumps,quiet,ring'")
    click(page, "document.querySelector('#streams th button')")
    page.until(f"{NAMES}.join() === 'ring,quiet,pumps,brim'")
    assert page.see("document.querySelector('#streams th').getAttribute('aria-sort')") == "descending"
    fill(page, "#streams input", "all PUMPS")
    page.until(f"{NAMES}.join() === 'pumps'")
    fill(page, "#streams input", "")


def test_an_intended_overwrite_is_no_warning(service: Service, page: Browser) -> None:
    service.publish(*[("ring", bytes(1000))] * 20)
    page.until(f"{row('drops', 'stream ring')}.innerText.includes('as configured')")
    page.until(f"{row('streams', 'ring')}.querySelector('.pill').className === 'pill good'")
    assert page.see(f"{row('streams', 'ring')}.querySelector('meter').high") == 1
    go(page, "#/stream/ring")
    page.until("document.querySelector('#stream-hour').innerText.includes('Dropped per second: overwritten')")
    assert page.see("document.querySelectorAll('#stream-hour [data-level=warn]').length") == 0


def test_a_client_is_shown_with_its_rate_subscriptions_and_queue(service: Service, page: Browser) -> None:
    go(page, "#/clients")
    with service.device("counter") as client, service.device("other"):
        client.subscribe("quiet/+")
        for _ in range(5):
            client.publish("quiet/a", b"1", qos=1).wait_for_publish(10)
        page.until(f"{row('clients', 'counter')}.innerText.includes('5 in total')")
        page.until(f"{row('clients', 'counter')}.innerText.includes('quiet/+')")
        fill(page, "#clients input", "COUNT")
        page.until(f"!{row('clients', 'other')} && {row('clients', 'counter')}")
        fill(page, "#clients input", "")


def test_events_tell_what_failed_and_are_counted_instead_of_repeated(service: Service, page: Browser) -> None:
    go(page, "#/events")
    page.until("document.querySelector('#events-list').innerText.includes('an export fails')")
    count = "document.querySelector('#events-list').innerText.split('an export fails').length"
    assert page.see(count) == 2, "an outage is one event, however many attempts fail"
    fill(page, "#events-find", "ready")
    page.until("document.querySelectorAll('#events-list li').length === 1")
    click(page, "document.querySelector('#events-trouble')")
    page.until("document.querySelectorAll('#events-list li').length === 0")


def log_in(page: Browser, user: str, password: str) -> None:
    page.until("document.querySelector('#login').open")
    fill(page, "#login-user", user)
    fill(page, "#login-password", password)
    click(page, "document.querySelector('#login [type=submit]')")


BUTTON = "[...document.querySelectorAll('#stream-exports button')].find((b) => b.textContent === '{}')"


def test_an_export_is_paused_after_a_login_and_resumed_and_retried(service: Service, page: Browser) -> None:
    go(page, "#/stream/pumps")
    page.until(BUTTON.format("Pause"))
    click(page, BUTTON.format("Pause"))
    log_in(page, "ann", "wrong")
    page.until("document.querySelector('#login-error').innerText === 'Wrong user or password.'")
    log_in(page, "ann", "ann")
    page.until(BUTTON.format("Resume"))
    assert page.text("#user") == "Logged in as ann"
    assert page.see("document.cookie") == ""
    page.call("Page.reload")
    page.until("document.querySelector('#user').innerText === 'Logged in as ann'")
    page.until(BUTTON.format("Resume"))
    click(page, BUTTON.format("Resume"))
    page.until(BUTTON.format("Retry now"))
    click(page, BUTTON.format("Retry now"))
    page.until("document.querySelector('#said').innerText === 'office: tried again.'")
    click(page, "document.querySelector('#log')")
    page.until("document.querySelector('#log').innerText === 'Log in'")
    assert service.logged(r"exports paused: office.*user 'ann' over HTTP")


def test_an_export_that_collects_a_batch_says_when_it_is_sent(service: Service, page: Browser) -> None:
    service.publish(("quiet/a", b"1"))
    shown = f"{row('exports', 'hourly')}.innerText"
    page.until(f"{shown}.includes('collecting') && /sent in (59 min|1 h).* at the latest/.test({shown})")


def test_a_user_without_the_right_is_told_so(service: Service, page: Browser) -> None:
    go(page, "#/stream/pumps")
    page.until(BUTTON.format("Pause"))
    click(page, BUTTON.format("Pause"))
    log_in(page, "bob", "bob")
    page.until("document.querySelector('#said').innerText.includes('has no right `manage`')")
    (paused,) = {e["paused"] for e in service.json("/status.json")["exports"] if e["stream"] == "pumps"}
    assert not paused


def test_the_keyboard_reaches_and_works_everything(service: Service, page: Browser) -> None:
    def press(key: str, code: int = 0, text: str = "") -> None:
        more = {"text": text} if text else {}
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **more)
        page.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    page.until(row("exports", "office"))
    page.see("document.body.focus()")
    seen: list[str] = []
    for _ in range(60):
        press("Tab", 9)
        seen.append(str(page.see("document.activeElement.textContent || document.activeElement.type")))
        if seen[-1] == "office":
            break
    assert seen[0] == "Skip to content"
    assert {"Overview", "Clients", "Events", "Log in", "search", "pumps", "office"} <= set(seen)
    press("Enter", 13, "\r")
    page.until("document.activeElement.id === 'stream-title'")
    page.until(BUTTON.format("Pause"))
    page.see(f"{BUTTON.format('Pause')}.focus()")
    press("Enter", 13, "\r")
    page.until("document.activeElement.id === 'login-user'")
    press("Escape", 27)
    page.until("!document.querySelector('#login').open")
    page.until("document.activeElement.textContent === 'Pause'")


def test_streams_that_a_visitor_may_not_read_show_no_messages(
    start: Callable[..., Service], browser: Browser, tmp_path: Path
) -> None:
    users = tmp_path / "users"
    users.write_text(f"ann:{hash_password(b'ann')}\n")
    users.chmod(0o600)
    rules = '[[mqtt.acl]]\nuser = ""\npublish = ["#"]\n[[mqtt.acl]]\nuser = "ann"\nsubscribe = ["#"]\n'
    service = start(
        '[streams.secret]\ntopics = ["s"]\n' + rules,
        mqtt=f'listen = ["tcp://127.0.0.1:0"]\nusers_file = "{users}"',
    )
    service.publish(("s", b"the secret"))
    browser.open(f"http://127.0.0.1:{service.port}/#/stream/secret")
    browser.until("document.querySelector('#tail-text').innerText === 'Log in to read messages.'")
    click(browser, "document.querySelector('#log')")
    log_in(browser, "ann", "ann")
    browser.until("document.querySelector('#tail').innerText.includes('the secret')")


def test_a_log_out_that_a_login_in_another_window_has_overtaken_says_that_the_session_lives(
    page: Browser,
) -> None:
    click(page, "document.querySelector('#log')")
    log_in(page, "ann", "ann")
    page.until("document.querySelector('#user').innerText === 'Logged in as ann'")
    body = "JSON.stringify({user: 'bob', password: 'bob'})"
    options = f"{{method: 'POST', headers: {{'Content-Type': 'application/json'}}, body: {body}}}"
    page.see(f"fetch('/login', {options}).then((reply) => {{ window.logged = reply.status; }})")
    page.until("window.logged === 200")
    click(page, "document.querySelector('#log')")
    page.until("document.querySelector('#said').innerText.startsWith('Another window has logged in as bob.')")
    assert "bob" in page.text("#user")
    click(page, "document.querySelector('#log')")
    page.until("document.querySelector('#said').innerText === 'Logged out.'")
    assert page.text("#user") == ""


def test_a_page_of_clients_that_have_gone_gives_way_to_the_last_one(service: Service, page: Browser) -> None:
    with service.device("remains"):
        page.see("clientsFrom = 300")
        go(page, "#/clients")
        page.until(row("clients", "remains"))
        assert page.text("#clients-text").startswith("1 to ")


def test_a_restart_and_a_stream_made_anew_begin_the_lists_again(tmp_path: Path, browser: Browser) -> None:
    service = Service(tmp_path, "[streams.pumps]\n", listen=f"127.0.0.1:{free_port()}")
    try:
        service.publish(*(("streams/pumps", b"old %d" % n) for n in range(3)))
        browser.open("about:blank")
        browser.open(f"http://127.0.0.1:{service.port}/#/stream/pumps")
        browser.until("document.querySelector('#tail').innerText.includes('old 2')")
        with StreamManagerClient("127.0.0.1", service.mqtt_port) as client:
            client.delete_message_stream("pumps")
            again = MessageStreamDefinition("pumps", strategy_on_full=StrategyOnFull.RejectNewData)
            client.create_message_stream(again)
            client.append_messages("pumps", [b"new %d" % n for n in range(5)])
        browser.until("document.querySelector('#tail').innerText.includes('new 4')")
        assert "old" not in browser.text("#tail")
        assert "new 0" in browser.text("#tail")

        go(browser, "#/events")
        browser.until("document.querySelectorAll('#events-list li').length > 0")
        before = browser.see("events.started")
        service.process.kill()
        service.process.wait()
        service.start()
        browser.until(f"events.started !== {before} && events.all.length > 0")
        numbers = browser.see("events.all.map(({ number }) => number)")
        assert numbers == sorted(set(numbers), reverse=True)
        assert numbers[-1] == service.json("/events.json")["events"][0]["number"]
    finally:
        service.process.kill()
        service.process.wait()
