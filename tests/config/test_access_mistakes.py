"""Mistakes in users, rules, proxies, lists and keys: each is one error, with its line and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from benchmarks.testbed.certificates import Authority
from bridge.config.checks import examine

jwt = pytest.importorskip("jwt")
LISTENER = '[[mqtt.listener]]\nname = "a"\nlisten = ["tcp://127.0.0.1:0"]\n'
MISTAKES: dict[str, tuple[str, int, str]] = {
    "a deny that denies nothing": ("[[mqtt.acl]]\ndeny = {}\n", 2, "it denies nothing"),
    "a deny of no filters": ("[[mqtt.acl]]\n[mqtt.acl.deny]\nread = []\n", 2, "it denies nothing"),
    "roles that are no list": ("[mqtt]\nrole = 5\n", 2, "mqtt.role = 5: must be a list"),
    "a group in a rule": ('[[mqtt.acl]]\nsubscribe = ["$share/g/a"]\n', 2, "has $share/<group>/; write a"),
    "a group in a deny": ('[[mqtt.acl]]\ndeny.subscribe = ["$share/g/#"]\n', 2, "<group>/; write #"),
    "a placeholder that is none": ('[[mqtt.acl]]\npublish = ["in/%x/#"]\n', 2, "there is no placeholder %x"),
    "a placeholder in capitals": ('[[mqtt.acl]]\nsubscribe = ["in/%U"]\n', 2, "no placeholder %U; write %u"),
    "a placeholder of another broker": (
        '[[mqtt.role]]\nname = "r"\nread = ["in/${username}/#"]\n', 3, "no placeholder ${username}; write %u",
    ),
    "a misspelt placeholder": ('[[mqtt.acl]]\nmanage = ["streams/{user}"]\n', 2, "no placeholder {user}"),
    "a deny with a placeholder that is none": (
        '[[mqtt.acl]]\nuser = "ann"\ndeny.publish = ["in/a", "in/{{clientid}}/#"]\n', 3,
        "no placeholder {{clientid}}",
    ),
    "a rule of a listener with a placeholder that is none": (
        f'{LISTENER}[[mqtt.listener.acl]]\npublish = ["in/%n"]\n', 5, "no placeholder %n",
    ),
    "certificates that nobody asks for": (
        '[[mqtt.user]]\nname = "ann"\ncertificates = ["cn:ann"]\n', 3, "no listener asks for certificates",
    ),
    "a certificate of two users": (
        '[[mqtt.user]]\nname = "ann"\ncertificates = ["cn:x"]\n'
        '[[mqtt.user]]\nname = "bob"\ncertificates = ["cn:x"]\n', 6, "already belongs to user 'ann'",
    ),
    "everybody is a proxy": (f'{LISTENER}proxy_protocol = ["::/0"]\n', 4, "claim any address"),
    "a budget without a limit": ('[[mqtt.budget]]\nname = "b"\nper = "user"\n', 1, "it limits nothing"),
}  # fmt: skip


def found(root: Path, text: str) -> list[str]:
    """What is wrong with a configuration, without what does not matter here."""
    path = root / "c.toml"
    path.write_text(f'{text}[gateway]\ndata_dir = "d"\n[greengrass]\nlisten = ""\n[http]\nlisten = ""\n')
    findings = [one.what for one in examine(path)[1] if one.level == "error"]
    return [what for what in findings if "cannot listen" not in what]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_users_rules_or_budgets_is_reported_with_its_line(tmp_path: Path, name: str) -> None:
    text, line, wanted = MISTAKES[name]
    reported = found(tmp_path, text)
    assert any(f"c.toml:{line}: " in one and wanted in one for one in reported), reported
    assert all(one.count("\n") == 0 for one in reported)


def test_a_login_plugin_can_let_clients_in_where_there_are_no_users(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir(mode=0o700)
    for hook, argument in (("authenticate", "login"), ("authorize", "question")):
        plugin = plugins / f"{hook[:6]}.py"
        plugin.write_text(f"from bridge import hookimpl\n@hookimpl\ndef {hook}({argument}, options): ...\n")
        plugin.chmod(0o600)
    closed = '[mqtt]\nlisten = ["tcp://0.0.0.0:0"]\n[export]\nplugin_dirs = ["plugins"]\n'
    listener = f'{LISTENER.replace("127.0.0.1", "0.0.0.0")}[export]\nplugin_dirs = ["plugins"]\n'
    for text, line in ((closed, 2), (listener, 3)):
        for auth in ("", "[auth]\n", "[auth.plugins.author]\n"):
            (what,) = found(tmp_path, text + auth)
            assert f"c.toml:{line}: " in what
            assert "nobody could log in" in what
            assert "a plugin in [auth.plugins]" in what
        assert found(tmp_path, text + "[auth.plugins.authen]\n") == []
        (what,) = found(tmp_path, text + "[auth.plugins.authen]\nhost = 1\n")  # the plugin would, without it
        assert "host" in what


def test_rules_that_lock_every_device_out_of_the_streams_are_a_warning(tmp_path: Path) -> None:
    stream = '[streams.a]\ntopics = ["sensors/+/#", "logs"]\n'
    role = '[[mqtt.role]]\nname = "r"\npublish = ["sensors/1"]\n'
    given = '[[mqtt.user]]\nname = "*"\nroles = ["r"]\n'
    upstream = '[[upstream]]\nname = "b"\nurl = "mqtt://b"\n[[upstream.mapping]]\nfilter = "#"\n'

    def warned(text: str) -> list[str]:
        assert found(tmp_path, text) == []
        findings = [one.what for one in examine(tmp_path / "c.toml", remote=False)[1]]
        return [what for what in findings if "lets a client publish" in what]

    for text, line in (
        (f'{stream}[[mqtt.acl]]\npublish = ["streams/a"]\n', 3),
        (f"{stream}{role}", 3),
        (f'{stream}{LISTENER}[[mqtt.listener.acl]]\nsubscribe = ["#"]\n', 3),
    ):
        (what,) = warned(text)
        assert f"c.toml:{line}: " in what
        assert 'add publish = ["sensors/+/#"] to a rule' in what
    for text in (
        stream,
        '[[mqtt.acl]]\npublish = ["streams/a"]\n[streams.a]\n',
        f'{stream}[[mqtt.acl]]\npublish = ["sensors/%u/x"]\n',
        f'{stream}[[mqtt.acl]]\npublish = ["logs"]\n',
        f"{stream}{role}{given}",
        f'{stream}{LISTENER}[[mqtt.listener.acl]]\npublish = ["logs"]\n',
        f'{stream}[[mqtt.acl]]\npublish = ["streams/a"]\n{upstream}',
    ):
        assert warned(text) == [], text


def test_topics_with_signs_of_placeholders_are_no_mistake(tmp_path: Path) -> None:
    assert found(tmp_path, '[[mqtt.acl]]\npublish = ["50%/%u/%c", "%/a", "{}/a", "a}", "{1}"]\n') == []


def test_a_revocation_list_of_another_ca_is_reported(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path / "ours", "ours"), Authority(tmp_path / "other", "other")
    pair = ours.issue("server")

    def tls(crl: Path) -> list[str]:
        return found(
            tmp_path,
            '[mqtt]\nlisten = ["tls://127.0.0.1:0"]\n'
            f'[mqtt.tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\nclient_ca = "{ours.cert}"\n'
            f'crl_file = "{crl}"\n',
        )

    assert tls(ours.revoke()) == []
    (what,) = tls(other.revoke())
    assert "c.toml:7: mqtt.tls.crl_file" in what
    assert "no list of 1 of the CAs" in what


def test_a_file_of_keys_with_a_private_key_two_of_a_name_or_open_to_others_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    private = {**json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key)), "kid": "a"}
    public = {name: value for name, value in private.items() if name != "d"}
    path = tmp_path / "keys.json"

    def check(content: Any, mode: int = 0o644) -> list[str]:
        path.write_text(json.dumps(content))
        path.chmod(mode)
        return found(tmp_path, '[auth.plugins.jwt]\njwks_file = "keys.json"\nissuer = "i"\naudience = "a"\n')

    assert check({"keys": [public]}) == []
    for content, mode, wanted in (
        ({"keys": [private]}, 0o644, "private key"),
        ({"keys": [public, public]}, 0o644, "two keys with the id 'a'"),
        ({"keys": [public]}, 0o666, "chmod go-w"),
        (public, 0o644, "is not a set of keys"),
    ):
        (what,) = check(content, mode)
        assert "c.toml:2: auth.plugins.jwt.jwks_file: " in what
        assert wanted in what
        assert private["d"] not in what
