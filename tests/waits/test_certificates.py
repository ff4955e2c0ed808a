"""What changes while a client with a certificate waits for its session."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.mqtt.settings import TlsSettings
from tests.mqtt.harness import Disk, publish, until
from tests.mqtt.test_access import open_tls

from .house import House, waits_test
from .scheduler import Scheduler

SETTLING = "bridge/mqtt/broker/broker.py _Settling.__init__: broker.runtime.later"


class Gate(Disk):
    """A disk whose writes wait until it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()
        self.opened.set()

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        self.opened.wait(60)
        super().write(fd, parts, offset)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_certificate_that_is_withdrawn_while_its_session_settles_gets_none(
    tmp_path: Path, withdrawn: bool
) -> None:
    authority = Authority(tmp_path / "ca")
    server, ann = authority.issue("server"), authority.issue("ann")
    lists = tmp_path / "lists.pem"
    lists.write_text(authority.revoke(name="none").read_text())
    tls = TlsSettings(cert=server.cert, key=server.key, client_ca=authority.cert, crl_file=lists)

    async def test(house: House, scheduler: Scheduler) -> None:
        house.stream("durable", "durable/#", flush_on_write=True)
        first = await open_tls(house, authority, ann)
        await first.connect("c", clean=False)
        disk.opened.clear()
        first.send(publish("durable/x", b"x", 2, 1))
        await until(lambda: house.store.streams["durable"].pending_bytes)
        first.abort()
        await until(lambda: not house.server.connections.open)
        again = await open_tls(house, authority, ann)
        login = asyncio.ensure_future(again.connect("c", clean=False, expect=5 if withdrawn else 0))
        await until(lambda: scheduler.seen[SETTLING])
        if withdrawn:
            lists.write_text(authority.revoke(ann, name="one").read_text())
        house.reload()
        disk.opened.set()
        await login
        assert await house.payloads("durable") == [b"x"]

    disk = Gate()
    waits_test(test, tmp_path, files=disk, listen=["tls://127.0.0.1:0"], tls=tls)
