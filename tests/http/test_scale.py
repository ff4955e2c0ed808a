"""The page with 200 streams and 5,000 clients: documents and tables stay small, and everything is found."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.http.chromium import Browser
from tests.http.conftest import Service, eventually
from tests.http.test_page import row

STREAMS, CLIENTS = 200, 5_000
EXPORT = (
    '[[streams.s{n:03}.export.http]]\nidentifier = "e"\nuri = "http://127.0.0.1:9/nobody"\ndisabled = true\n'
)
CONFIG = "".join(f'[streams.s{n:03}]\ntopics = ["s{n:03}"]\n{EXPORT.format(n=n)}' for n in range(STREAMS))
MQTT = f"""listen = ["tcp://127.0.0.1:0"]
[mqtt.limits]
connections = {2 * CLIENTS}
connections_per_address = {2 * CLIENTS}
"""


@pytest.fixture
def files() -> Iterator[None]:
    """So many open files, here and in the service that is started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3 * CLIENTS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs a limit of {wanted} open files; here it is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def crowd(port: int) -> Iterator[list[socket.socket]]:
    """`CLIENTS` connected clients of MQTT 3.1.1, with keep-alive off."""
    sockets = []
    try:
        for n in range(CLIENTS):
            client = socket.create_connection(("127.0.0.1", port), timeout=60)
            sockets.append(client)
            name = f"device-{n:04}".encode()
            body = b"\x00\x04MQTT\x04\x02\x00\x00" + len(name).to_bytes(2, "big") + name
            client.sendall(bytes((0x10, len(body))) + body)
        for client in sockets:
            assert client.recv(4) == b"\x20\x02\x00\x00"
        yield sockets
    finally:
        for client in sockets:
            client.close()


@pytest.mark.slow(30)
def test_200_streams_and_5000_clients_are_shown_in_parts(
    files: None, start: Callable[..., Service], browser: Browser
) -> None:
    service = start(CONFIG, mqtt=MQTT)
    with crowd(service.mqtt_port):
        page = service.json("/clients.json")
        assert (page["connected"], page["found"], len(page["clients"])) == (CLIENTS, CLIENTS, 100)
        last = service.json(f"/clients.json?sort=id&offset={CLIENTS - 100}")["clients"]
        assert last[-1]["id"] == f"device-{CLIENTS - 1:04}"
        found = service.json("/clients.json?find=DEVICE-0042")
        assert (found["found"], found["clients"][0]["id"]) == (1, "device-0042")
        assert len(service.request("/clients.json")[2]) < 100 * 1_000
        assert len(service.request("/status.json")[2]) < 2 * STREAMS * 1_000
        assert len(service.request("/history.json")[2]) < 10 * 180 * 20

        browser.open(f"http://127.0.0.1:{service.port}/")
        browser.until("document.querySelectorAll('#streams tbody tr').length === 50")
        browser.see("document.querySelector('#streams .more').click()")
        browser.until(f"document.querySelectorAll('#streams tbody tr').length === {STREAMS}")
        browser.see("location.hash = '#/clients'")
        browser.until("document.querySelectorAll('#clients tbody tr').length === 100")
        browser.until(f"document.querySelector('#clients-text').innerText.includes('of {CLIENTS:,}')")
        browser.see("document.querySelector('#clients-next').click()")
        browser.until("document.querySelector('#clients-text').innerText.startsWith('101 to 200')")
        browser.see(
            "(() => { const box = document.querySelector('#clients input'); box.value = 'device-4321';"
            " box.dispatchEvent(new Event('input')); })()"
        )
        browser.until(
            f"document.querySelectorAll('#clients tbody tr').length === 1 && {row('clients', 'device-4321')}"
        )


@pytest.mark.slow(30)
def test_messages_are_acknowledged_while_everything_is_looked_at(
    files: None, start: Callable[..., Service]
) -> None:
    """Looking without a pause takes turns with devices: neither waits for the end of the other."""
    service = start(CONFIG, mqtt=MQTT)
    stop, looks = threading.Event(), [0, 0]

    def look(number: int, path: str) -> None:
        while not stop.is_set():
            assert service.request(path)[0] == 200
            looks[number] += 1

    with crowd(service.mqtt_port) as clients:
        paths = ("/clients.json?sort=rate", "/status.json")
        threads = [threading.Thread(target=look, args=pair) for pair in enumerate(paths)]
        for thread in threads:
            thread.start()
        try:
            for n in range(200):
                packet_id = (n + 1).to_bytes(2, "big")
                clients[n].sendall(b"\x32\x09\x00\x04s000" + packet_id + b"1")
                assert clients[n].recv(4) == b"\x40\x02" + packet_id
            eventually(lambda: min(looks) > 0)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        eventually(lambda: service.json("/status.json")["totals"]["messages"] == 200)
