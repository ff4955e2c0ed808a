"""An IPv4 address within IPv6 is the IPv4 address, wherever addresses are compared, in both directions."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import pytest

from bridge.access.accounts import Account, Accounts
from bridge.access.rules import TRUSTED
from bridge.mqtt.settings import ListenerTable, parse_address
from bridge.net.addresses import host_and_port, is_loopback, is_within, network_of, normal, parse_network
from bridge.net.budgets import Budget
from bridge.operations.catalog import OfClients
from bridge.plugin.allow import Allow
from tests.cli.test_check import QUIET, check
from tests.greengrass.harness import CONNECT, DEADLINE, Raw, Server, frame
from tests.mqtt.harness import Bridge
from tests.mqtt.test_access import with_bridge
from tests.mqtt.test_proxy import header, seen, through

PLAIN, MAPPED, HEXADECIMAL = "127.0.0.1", "::ffff:127.0.0.1", "::ffff:7f00:1"
BOTH = pytest.mark.parametrize("address", [PLAIN, MAPPED, HEXADECIMAL, "0:0:0:0:0:ffff:7f00:0001"])
ROOT = Path(__file__).parent.parent


def test_a_client_on_a_dual_stack_socket_needs_no_token_where_another_of_its_user_needs_none(
    tmp_path: Path,
) -> None:
    """As every JVM connects, unless it is told to prefer IPv4."""
    file = tmp_path / "token"
    file.write_text("a-token-of-somebody")
    with Server(tmp_path, token_file=file) as server:
        for host in (PLAIN, MAPPED):
            with Raw(server, connect=None) as client:
                client.socket.close()
                client.socket = socket.create_connection((host, server.port), timeout=DEADLINE)
                assert client.socket.family == (socket.AF_INET6 if ":" in host else socket.AF_INET)
                client.socket.sendall(b"\x01" + frame(1, CONNECT))
                assert client.greeted()["status"] == 0, host


@BOTH
def test_a_host_in_any_spelling_is_this_machine_and_one_place_to_listen_at(address: str) -> None:
    assert is_loopback(address)
    assert not is_loopback("::ffff:192.0.2.1")
    assert normal(address) == PLAIN
    assert host_and_port(f"[{address}]:80" if ":" in address else f"{address}:80") == (PLAIN, 80)
    found = parse_address(f"tcp://[{address}]:80" if ":" in address else f"tcp://{address}:80")
    assert found.host == PLAIN
    assert found.loopback


@BOTH
def test_networks_know_addresses_of_either_form(address: str) -> None:
    for network in ("127.0.0.0/8", "::ffff:127.0.0.0/104", "::ffff:127.0.0.1", "::ffff:0:0/96"):
        assert is_within(address, [parse_network(network)]), network
    assert not is_within(address, [parse_network("::ffff:10.0.0.0/104")])
    assert not is_within(address, [parse_network("::/0")])
    assert network_of(address) == PLAIN
    assert Budget(name="b", per="prefix", connections=1).key_of(None, address) == "127.0.0.0/24"
    assert Budget(name="b", per="address", connections=1).key_of(None, address) == PLAIN


@BOTH
def test_a_certificate_and_an_account_name_one_address_in_either_form(address: str) -> None:
    for listed in (PLAIN, MAPPED):
        accounts = Accounts([Account(name="pump", certificates=[f"ip:{listed}"])])
        assert accounts.user_of({"subjectAltName": (("IP Address", address),)}, b"") is not None


@BOTH
def test_an_endpoint_is_allowed_in_either_form(address: str) -> None:
    host = f"[{address}]" if ":" in address else address
    assert Allow(endpoints=[f"http://[{MAPPED}]:1"]).endpoint(f"http://{host}:1/x")
    assert Allow(endpoints=[f"http://{PLAIN}:1"]).endpoint(f"http://{host}:1/x")


def test_proxies_and_their_clients_are_known_in_either_form(tmp_path: Path) -> None:
    table = ListenerTable(
        name="proxied",
        listen=["tcp://127.0.0.1:0"],
        proxy_protocol=["::ffff:127.0.0.0/104"],
        allow_anonymous=True,
    )

    async def test(bridge: Bridge) -> None:
        client, code = await through(bridge, header("::ffff:198.51.100.1"))
        assert code == 0
        assert seen(bridge) == ["198.51.100.1"]
        found = bridge.operations.call_now(
            "disconnectClients", OfClients(address="::ffff:198.51.100.0/120"), TRUSTED
        )
        assert list(found.clients) == ["c"]  # type: ignore[union-attr]
        assert await client.closed()

    with_bridge(tmp_path, test, listener=[table])


def test_check_knows_that_two_spellings_are_one_address(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    with socket.create_server((PLAIN, 0)) as probe:
        port = probe.getsockname()[1]
    text = QUIET.replace("127.0.0.1:0", f"[{MAPPED}]:{port}").replace(
        '[http]\nlisten = ""', f'[http]\nlisten = "[{HEXADECIMAL}]:{port}"'
    )
    (line,) = check(path, text)
    assert f"http.listen: cannot listen at 127.0.0.1:{port}: mqtt.listen" in line
    everybody = (
        '[[mqtt.listener]]\nname = "p"\nlisten = ["tcp://127.0.0.1:0"]\nproxy_protocol = ["::ffff:0:0/96"]\n'
    )
    assert any("lets every machine claim any address" in line for line in check(path, QUIET + everybody))


def test_only_one_module_takes_addresses_apart() -> None:
    """Whatever compares addresses elsewhere would have to know both forms again."""
    found = {
        str(path.relative_to(ROOT))
        for directory in ("bridge", "plugins")
        for path in (ROOT / directory).rglob("*.py")
        if any(
            word in path.read_text()
            for word in ("import ipaddress", "from ipaddress", "inet_pton", "ipv4_mapped")
        )
    }
    assert found == {"bridge/net/addresses.py"}
    assert ipaddress.ip_address(MAPPED) != ipaddress.ip_address(PLAIN), "so Python does not"
