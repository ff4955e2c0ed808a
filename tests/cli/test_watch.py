"""A running service notices changed users and revocation lists without a signal."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.access.users import hash_password
from bridge.mqtt.wire.packets import V5
from tests.cli.conftest import streambridge
from tests.http.conftest import Service, eventually
from tests.mqtt.harness import connect, publish

ANN, BOB = ("ann:" + hash_password(b"a") + "\n", "bob:" + hash_password(b"b") + "\n")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def service(tmp_path: Path, authority: Authority) -> Iterator[Service]:
    pair = authority.issue("server")
    (tmp_path / "users").write_text(ANN)
    (tmp_path / "users").chmod(0o600)
    (tmp_path / "lists.pem").write_text(authority.revoke().read_text())
    mqtt = f"""listen = ["tls://127.0.0.1:0", "tcp://127.0.0.1:0"]
users_file = "users"
allow_anonymous = false
[mqtt.tls]
cert = "{pair.cert}"
key = "{pair.key}"
client_ca = "{authority.cert}"
crl_file = "lists.pem"
"""
    found = Service(tmp_path, "", mqtt=mqtt)
    yield found
    if found.process.poll() is None:
        found.process.kill()
    found.process.wait()


def log_in(service: Service, user: str, password: bytes) -> int:
    """The return code of a CONNECT on the listener without TLS."""
    found = service.logged(r"mqtt://127.0.0.1:(\d+)")
    assert found is not None
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=30) as sock:
        sock.sendall(connect("c", user=user, password=password))
        return sock.recv(4)[3]


def test_changed_users_and_lists_hold_without_a_signal_and_broken_ones_change_nothing(
    service: Service, authority: Authority, tmp_path: Path
) -> None:
    path = tmp_path / "users"
    assert (log_in(service, "ann", b"a"), log_in(service, "bob", b"b")) == (0, 4)
    path.write_text(ANN + BOB)
    eventually(lambda: log_in(service, "bob", b"b") == 0)
    path.write_text("nonsense\n")
    eventually(lambda: service.logged("users, line 1: .*its last good content stays"))
    assert log_in(service, "ann", b"a") == 0
    path.write_text(BOB)
    eventually(lambda: log_in(service, "ann", b"a") == 4)
    assert service.log.read_text().count("its last good content stays") == 1, "reported once"

    device = authority.issue("device")
    found = service.logged(r"mqtts://127.0.0.1:(\d+)")
    assert found is not None
    context = ssl.create_default_context(cafile=str(authority.cert))
    context.load_cert_chain(device.cert, device.key)
    with (
        socket.create_connection(("127.0.0.1", int(found[1])), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(connect("d"))
        assert secured.recv(4)[3] == 0
        fresh = tmp_path / "fresh.pem"
        fresh.write_text(authority.revoke(device, name="more").read_text())
        fresh.replace(tmp_path / "lists.pem")
        assert secured.recv(4) == b"", "its connection ends"


@pytest.mark.parametrize("how", ["watched", "signal"])
@pytest.mark.parametrize("broken", ["configuration", "tokens", "certificate", "upstream", "plugin"])
def test_a_user_is_out_whatever_is_wrong_with_the_other_files(
    service: Service, tmp_path: Path, authority: Authority, broken: str, how: str
) -> None:
    config, users = tmp_path / "bridge.toml", tmp_path / "users"
    users.write_text(ANN + BOB)
    eventually(lambda: log_in(service, "bob", b"b") == 0)
    match broken:
        case "configuration":
            config.write_text(config.read_text() + "[[[")
        case "upstream":
            text = '[[upstream]]\nname = "up"\nurl = "mqtt://127.0.0.1:1"\npassword_file = "none"\n'
            config.write_text(config.read_text() + text)
        case "plugin":
            config.write_text(config.read_text() + '[auth.plugins.jwt]\njwks_file = "none"\n')
        case "tokens":
            config.write_text(config.read_text().replace("[greengrass]", '[greengrass]\ntokens_file = "t"'))
        case "certificate":
            (tmp_path / "ca" / "server.pem").write_text("broken")
    users.write_text(ANN)
    if how == "signal":
        service.process.send_signal(signal.SIGHUP)
    eventually(lambda: log_in(service, "bob", b"b") == 4)
    assert log_in(service, "ann", b"a") == 0


def test_a_tokens_file_that_is_broken_at_the_start_is_seen_until_it_is_in_order(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("nonsense\n")
    tokens.chmod(0o600)
    service = Service(tmp_path, "")
    try:
        service.process.kill()
        service.process.wait()
        config = tmp_path / "bridge.toml"
        listens = '[greengrass]\ntokens_file = "tokens"\nlisten = "127.0.0.1:0"'
        config.write_text(config.read_text().replace('[greengrass]\nlisten = ""', listens))
        service.start()
        assert service.logged("tokens, line 1: not `user token`; no token in it is right")
        status, _, body = service.request("/readyz")
        assert (status, "line 1" in json.loads(body)["unread"]["greengrass.tokens_file"]) == (503, True)
        part = b'streambridge_part_failing{part="greengrass.tokens_file"} 1.0'
        assert part in service.request("/metrics")[2]
        tokens.write_text("ann 0123456789abcdef\n")
        eventually(lambda: service.request("/readyz")[0] == 200)
        tokens.write_text("nonsense\n")
        eventually(lambda: part in service.request("/metrics")[2])
        assert service.request("/readyz")[0] == 200, "the last good content holds"
        assert (
            "line 1"
            in json.loads(service.request("/status.json")[2])["failingParts"]["greengrass.tokens_file"]
        )
    finally:
        service.process.kill()
        service.process.wait()


def publishes(service: Service, topic: str) -> bool:
    """Whether ann may publish on a topic."""
    found = service.logged(r"mqtt://127.0.0.1:(\d+)")
    assert found is not None
    with socket.create_connection(("127.0.0.1", int(found[1])), timeout=30) as sock:
        sock.sendall(connect("c", user="ann", password=b"a", level=V5))
        sock.recv(100)
        sock.sendall(publish(topic, b"", 1, 1, level=V5))
        return sock.recv(100)[4:5] in (b"", b"\0", b"\x10")


def test_changed_rules_hold_without_a_signal_and_all_else_waits_for_it(
    service: Service, tmp_path: Path
) -> None:
    config = tmp_path / "bridge.toml"
    before = config.read_text()
    assert publishes(service, "open/a")
    config.write_text(before + '[[mqtt.acl]]\npublish = ["open/#"]\n[streams.fresh]\n')
    eventually(lambda: not publishes(service, "secret/a"))
    assert publishes(service, "open/a")
    assert not (tmp_path / "disk" / "streams" / "fresh").exists()
    config.write_text(before + '[[mqtt.acl]]\npublish = ["#"]\nsubscribe = ["a/#/b"]\n')
    eventually(lambda: service.logged("changed, but not applied: .*is not a topic filter"))
    assert not publishes(service, "secret/a")
    (tmp_path / "conf.d").mkdir()
    config.write_text(before)
    (tmp_path / "conf.d" / "rules.toml").write_text('[[mqtt.acl]]\npublish = ["secret/#"]\n')
    eventually(lambda: publishes(service, "secret/a"))
    assert not publishes(service, "open/a")
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.logged("msg=reloaded"))


@pytest.mark.parametrize(
    "nested",
    ["a = " + "[" * 1200 + "]" * 1200, "[" + ".".join("a" * 3000) + "]", ".".join("a" * 20_000) + " = 1"],
)
def test_a_configuration_that_is_nested_too_deeply_changes_nothing(
    service: Service, tmp_path: Path, nested: str
) -> None:
    config = tmp_path / "bridge.toml"
    config.write_text(f"{config.read_text()}\n{nested}\n")
    eventually(
        lambda: service.logged("changed, but not applied: .*bridge.toml: not valid TOML: nested too deeply")
    )
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.logged("reload failed.*nested too deeply"))
    assert log_in(service, "ann", b"a") == 0
    check = streambridge("check", "-c", config)
    assert (check.returncode, "nested too deeply" in check.stdout) == (78, True)


@pytest.mark.parametrize("left", [0, 60])
def test_an_emptied_or_cut_configuration_opens_nothing_until_a_reload(
    service: Service, tmp_path: Path, left: int
) -> None:
    config = tmp_path / "bridge.toml"
    open_to_all = config.read_text()
    ruled = open_to_all + '[[mqtt.role]]\nname = "reader"\n[[mqtt.acl]]\npublish = ["open/#"]\n'
    config.write_text(ruled)
    eventually(lambda: not publishes(service, "secret/a"))
    config.write_text(open_to_all[: open_to_all.index("[mqtt]")] if left else "")
    eventually(
        lambda: service.logged("nothing is left of mqtt.acl and mqtt.role; reload the service to apply it")
    )
    assert not publishes(service, "secret/a")
    (tmp_path / "users").write_text(ANN + BOB)
    eventually(lambda: log_in(service, "bob", b"b") == 0)
    assert not publishes(service, "secret/a")
    config.write_text(open_to_all)
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: publishes(service, "secret/a"))
