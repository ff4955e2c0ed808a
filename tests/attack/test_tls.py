"""Attacks below the protocols: handshakes that stop half-way by the thousand. 3 s together."""

from __future__ import annotations

import psutil

from ..http.conftest import eventually
from .conftest import Attacker, Gateway
from .test_floods import hello


def test_handshakes_that_never_end_leave_no_memory_behind(gateway: Gateway) -> None:
    """Each left 50 KB until the next collection of garbage: 10,000 took 340 MB, above any limit of ours."""
    said, port = hello(), gateway.port["mqtts"]
    process = psutil.Process(gateway.process.pid)

    def accepted() -> int:
        return sum(one.laddr.port == port and one.status != "LISTEN" for one in process.net_connections())

    def flood() -> None:
        attackers = [Attacker(port) for _ in range(800)]
        for attacker in attackers:
            attacker.send(said)
        for attacker in attackers:
            attacker.read(1)  # its half of the handshake is done, or it is displaced
        for attacker in attackers:
            attacker.close()
        eventually(lambda: not accepted())

    flood()
    before = gateway.memory()
    for _ in range(4):
        flood()
    assert gateway.memory() - before < 64 << 20
