"""Clients under a Greengrass nucleus, whose token is for its credentials: who owns them says who they are."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from bridge.access.guesses import AT_A_TIME
from bridge.access.rules import AccessRule
from bridge.mqtt.settings import MqttConfig
from tests.cli.test_check import QUIET, check

from ..fakes.measured import ATTEMPTS
from .harness import CONNECT, Raw, Server
from .test_floods import STRANGER, guess

COMPONENT = 1_000_001  # the id of a local user, such as ggc_user
NUCLEUS = "the-token-that-the-nucleus-gives-its-component"
RULES = MqttConfig(
    acl=[AccessRule(user="line-3", publish=["streams/s"]), AccessRule(user="boss", manage=["#"])]
)
ME = pwd.getpwuid(os.geteuid()).pw_name


def shown(server: Server, token: str) -> str:
    """The user as whom a client with this token comes in, or why it is refused."""
    with guess(server, token) as client:
        answer = client.greeted()
        if answer["status"]:
            return str(answer["errorMessage"])
        (user,) = {
            one.caller.user for one in server.front.connections if one.address == answer["clientIdentifier"]
        }
        return str(user)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.touch(0o600)
    path.write_text("boss the-token-of-the-boss\nline-4 the-token-of-line-4\n")
    return path


def test_an_unknown_token_decides_nothing_and_one_that_was_removed_refuses(
    tmp_path: Path, tokens: Path
) -> None:
    with Server(tmp_path, tokens_file=tokens) as server:
        assert [shown(server, NUCLEUS) for _ in range(AT_A_TIME + 2)] == ["greengrass"] * (AT_A_TIME + 2)
        assert shown(server, "the-token-of-line-4") == "line-4", "a known one says more than the owner"
        assert shown(server, "the-token-of-the-boss") == "boss"
        tokens.write_text("boss the-token-of-the-boss\n")
        assert "removed" in shown(server, "the-token-of-line-4")
        with Raw(server, connect=CONNECT) as client:
            assert client.greeting["status"] == 0


def test_a_token_that_was_removed_refuses_also_if_nobody_has_shown_it(tmp_path: Path, tokens: Path) -> None:
    with Server(tmp_path, tokens_file=tokens) as server:
        tokens.write_text("boss the-token-of-the-boss\n")
        assert "removed" in shown(server, "the-token-of-line-4")


def test_local_users_come_in_as_the_users_that_the_configuration_names(tmp_path: Path, tokens: Path) -> None:
    users = {str(COMPONENT): "line-3"}
    with Server(tmp_path, tokens_file=tokens, access=RULES, owner=COMPONENT, users=users) as server:
        server.stream("s")
        assert shown(server, NUCLEUS) == shown(server, "") == "line-3"
        assert shown(server, "the-token-of-the-boss") == "boss"
        with Raw(server, connect=CONNECT | {"authToken": NUCLEUS}) as client:
            assert client.ask(4, name="s", payload=b"x")["status"] == 0
            assert client.ask(3, name="s")["status"] != 0, "it may not delete it"
        for other in ("", NUCLEUS):
            server.owner = STRANGER
            assert "a token is needed" in shown(server, other)


def test_this_very_user_can_be_mapped_too_by_its_name(tmp_path: Path) -> None:
    with Server(tmp_path, access=RULES, users={ME: "line-3"}) as server:
        assert shown(server, NUCLEUS) == "line-3"


def test_without_rules_a_mapped_user_gets_no_rights_at_all(tmp_path: Path) -> None:
    with Server(tmp_path, owner=COMPONENT, users={str(COMPONENT): "line-3"}) as server:
        assert "there are none" in shown(server, "")


def test_a_local_user_guesses_no_faster_for_needing_no_token(tmp_path: Path, tokens: Path) -> None:
    users = {str(COMPONENT): "line-3"}
    with Server(tmp_path, tokens_file=tokens, access=RULES, owner=COMPONENT, users=users) as server:
        for _ in range(ATTEMPTS):  # on a machine that stands still, all looks are over before the end
            wrong = {shown(server, f"wrong-token-number-{n}") for n in range(AT_A_TIME + 4)}
            assert wrong == {"line-3"}, "whatever it has guessed"
            if shown(server, "the-token-of-the-boss") == "line-3":
                break
        else:
            raise AssertionError("each of any number of tokens is looked at")


def test_no_local_process_needs_a_token_only_where_that_is_asked_for(tmp_path: Path, tokens: Path) -> None:
    with Server(tmp_path / "a", tokens_file=tokens, owner=STRANGER) as server:
        assert "a token is needed" in shown(server, "")
    with Server(tmp_path / "b", tokens_file=tokens, owner=STRANGER, authenticate_clients=False) as server:
        assert shown(server, "") == shown(server, NUCLEUS) == "greengrass"


def test_check_says_what_local_users_may_do(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    rule = '[[mqtt.acl]]\nuser = "line-3"\npublish = ["streams/a"]\n'

    def found(setting: str, more: str = "") -> list[str]:
        given = QUIET.replace('[greengrass]\nlisten = ""', f'[greengrass]\nlisten = "127.0.0.1:0"\n{setting}')
        return [line for line in check(path, given + more) if "greengrass" in line]

    (line,) = found("authenticate_clients = false")
    assert line.startswith(
        "warning: x.toml:9: greengrass.authenticate_clients: every program on this machine"
    )
    (line,) = found(f'users = {{ {ME} = "line-3" }}')
    assert line.startswith(f"error: x.toml:9: greengrass.users.{ME}: without rules")
    assert found(f'users = {{ {ME} = "line-3" }}', rule) == []
    (line,) = found('users = { nobody-of-this-name = "line-3" }', rule)
    assert "this machine has no user" in line
    (line,) = found('users = { 65534 = "line-3" }', rule)
    assert "stands for all users of other namespaces" in line
