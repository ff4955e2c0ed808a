"""`streambridge support`: what helps is in the archive, and no secret, wherever one stands."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.access.users import hash_password
from bridge.cli.scrub import Scrubber
from tests.cli.conftest import streambridge
from tests.cli.test_run import Service

# Each of these must not be in the archive.
SECRETS = {
    "url password": "hunter-url-7",
    "url query": "query-token-8",
    "url path": "hook-path-secret-9",
    "header": "header-value-10",
    "bearer": "bearer-of-file-11",
    "broker user": "access-token-as-user-12",
    "template": "templated-key-13",
    "description": "described-secret-14",
    "tag": "tagged-secret-15",
    "misplaced": "misplaced-token-16",
    "environment": "environment-secret-17",
    "greengrass": "greengrass-token-18",
    "payload": "payload-of-a-message-19",
    "comment": "commented-password-20",
    "log": "logged-password-21",
    "unknown key": "unknown-key-secret-22",
    "private key": "cHJpdmF0ZSBrZXkgbGluZSBvbmU23",
    "client": "request-client-secret-24",
    "environment file": "environment-of-the-unit-25",
    "firehose": "secret-of-a-firehose-key-26",
    "credential": "credential-of-the-unit-27",
    "url password with a slash": "1234/hunter-tail-28",
    "words": "correct horse battery staple 29",
    "pwd": "pwd-in-the-log-30",
    "pass": "pass-in-the-log-31",
    "passphrase": "passphrase-in-the-log-32",
    "shared access key": "c2hhcmVkLWtleQ33==",
    "unquoted": "with,comma;and-more-34",
    "logged url": "hunter/tail-of-the-log-35",
}
CONFIG = """
# the old password was {comment}
[gateway]
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
users_file = "users"
[mqtt.external]
url = "mqtt://broker.example:1883"
username = "{broker user}"
[greengrass]
listen = ""
token_file = "greengrass-token"
[http]
listen = ""
[firehose]
access_keys_file = "firehose-keys"
[streams.sensors]
topics = ["sensors/#"]
description = "{description}"
tags = {{ site = "{tag}" }}
[[streams.sensors.export.http]]
identifier = "web"
disabled = true
uri = "https://user:{url password}@host.example:8443/{url path}/in?key={url query}"
headers = {{ X-Api = "{header}" }}
bearer_token_file = "bearer"
record = '{{"key":"{template}","v":{{payload}}}}'
[[streams.sensors.export.mqtt]]
identifier = "up"
disabled = true
url = "mqtt://127.0.0.1:1"
topic = "up/{{topic}}"
username = "{misplaced}"
password_file = "${{CREDENTIALS_DIRECTORY}}/mqtt"
[[streams.sensors.export.http]]
identifier = "slash"
disabled = true
uri = "https://user:{url password with a slash}@host.example/in"
"""


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A configuration full of secrets, whose service has run and stores a message."""
    (tmp_path / "bearer").write_text(SECRETS["bearer"] + "\n")
    (tmp_path / "greengrass-token").write_text(SECRETS["greengrass"] + "\n")
    (tmp_path / "environment").write_text(f"STREAMBRIDGE_PASS='{SECRETS['environment file']}'\n")
    (tmp_path / "firehose-keys").write_text(f"AKID {SECRETS['firehose']} ann\n")
    users = tmp_path / "users"
    users.write_text(f"ann:{hash_password(b'x')}\n")
    for secret in tmp_path.iterdir():
        secret.chmod(0o600)
    config = tmp_path / "streambridge.toml"
    config.write_text(CONFIG.format(**SECRETS))
    service = Service(config)
    try:
        service.wait_for("ready")
        done = streambridge("streams", "append", "sensors", SECRETS["payload"], "-c", config)
        assert done.returncode == 0, done.stderr
        yield config
    finally:
        assert service.stop() == 0


def bundle(config: Path, target: Path, **env: str) -> dict[str, str]:
    done = streambridge("support", "-c", config, "--output", target, env=env)
    assert done.returncode == 0, done.stderr
    assert target.stat().st_mode & 0o777 == 0o600
    with tarfile.open(fileobj=io.BytesIO(target.read_bytes())) as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {
            name.partition("/")[2]: file.read().decode() for name, file in found.items() if file is not None
        }


def journal(directory: Path, *lines: str) -> str:
    """A PATH with a journalctl that prints these lines."""
    directory.mkdir()
    script = directory / "journalctl"
    script.write_text("#!/bin/sh\ncat <<'LINES'\n" + "\n".join(lines) + "\nLINES\n")
    script.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def test_no_secret_is_in_the_archive_and_what_helps_is(installed: Path, tmp_path: Path) -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{SECRETS['private key']}\n-----END PRIVATE KEY-----"
    lines = (
        f"cannot log in: password={SECRETS['log']}",
        f"GET https://h.example/a?client_secret={SECRETS['client']} failed",
        f"the header was {SECRETS['header']}, the user {SECRETS['broker user']}",
        f"env {SECRETS['environment']} bearer {SECRETS['bearer']} token {SECRETS['greengrass']}",
        f"it was {SECRETS['environment file']} or {SECRETS['firehose']}, or {SECRETS['credential']}",
        f"cannot log in with password: {SECRETS['words']}",
        f"pwd={SECRETS['pwd']} db.pass={SECRETS['pass']} passphrase={SECRETS['passphrase']} n=1",
        f"Endpoint=sb://h.example;SharedAccessKey={SECRETS['shared access key']}",
        f"password={SECRETS['unquoted']}",
        f"mqtt://user:{SECRETS['logged url']}@h.example:1883 failed, bypass: 3 passed: 4",
        key,
        "export web of sensors: no route to host",
    )
    path = journal(tmp_path / "bin", *lines)
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "mqtt").write_text(SECRETS["credential"])
    files = bundle(
        installed,
        tmp_path / "a.tar.gz",
        PATH=path,
        STREAMBRIDGE_X=SECRETS["environment"],
        CREDENTIALS_DIRECTORY=str(tmp_path / "unit"),
    )
    hashed = (tmp_path / "users").read_text().strip().rpartition(":")[2]
    for name, text in files.items():
        for what, secret in {**SECRETS, "hash": hashed}.items():
            assert secret not in text, f"{what} is in {name}"
    assert json.loads(files["versions.json"])["packages"]["msgspec"]
    config: dict[str, Any] = json.loads(files["config.json"])
    assert config["gateway"]["data_dir"] == "data"
    web, slash = config["streams"]["sensors"]["export"]["http"]
    assert slash["uri"] == "https://host.example/<removed>"
    assert (web["identifier"], web["uri"]) == ("web", "https://host.example:8443/<removed>")
    (stream,) = json.loads(files["streams.json"])["streams"]
    assert (stream["messages"], stream["definition"]["topics"]) == (1, ["sensors/#"])
    assert len(stream["exportStatuses"]) == 3
    assert files["verify.txt"].startswith("sensors: 1 messages")
    assert "no route to host" in files["log.txt"]
    assert "@h.example:1883 failed, bypass: 3 passed: 4" in files["log.txt"]
    assert "exit code" in files["check.txt"]


def test_an_archive_is_made_of_a_broken_installation_and_overwrites_nothing(tmp_path: Path) -> None:
    config = tmp_path / "broken.toml"
    token = tmp_path / "token"
    token.write_text(SECRETS["greengrass"])
    config.write_text(
        f'[greengrass]\ntoken_file = "{token}"\n[mqtt]\npasword = "{SECRETS["unknown key"]}"\n[gateway\n'
    )
    path = journal(tmp_path / "bin", f"refused {SECRETS['greengrass']}")
    files = bundle(config, tmp_path / "a.tar.gz", PATH=path)
    for secret in (SECRETS["unknown key"], SECRETS["greengrass"]):
        assert all(secret not in text for text in files.values())
    assert "broken.toml" in files["config.json"] + files["check.txt"]
    again = streambridge("support", "-c", config, "--output", tmp_path / "a.tar.gz")
    assert (again.returncode, "exists" in again.stderr) == (1, True)


def test_unknown_keys_lose_their_values(tmp_path: Path) -> None:
    config = tmp_path / "odd.toml"
    config.write_text(f'[mqtt]\npasword = "{SECRETS["unknown key"]}"\n[gateway]\nid = "plant"\n')
    files = bundle(config, tmp_path / "a.tar.gz", PATH=journal(tmp_path / "bin", "x"))
    assert all(SECRETS["unknown key"] not in text for text in files.values())
    assert json.loads(files["config.json"])["gateway"]["id"] == "plant"


def test_hosts_ports_listeners_filters_and_paths_stay_everywhere(tmp_path: Path) -> None:
    config, users = tmp_path / "here.toml", tmp_path / "users"
    lost = tmp_path / "lost.pem"
    kept = {
        "mqtt://broker.example:1884": "url",
        "tcp://127.0.0.1:18830": "listen",
        "http://127.0.0.1:5999": "endpoint_url",
        "abc.credentials.iot.eu-west-1.amazonaws.com": "endpoint",
        "commands/press-7/#": "filter",
        str(users): "users_file",
        str(lost): "ca",
    }
    url, listen, endpoint_url, endpoint, topic_filter, *_ = kept
    config.write_text(f"""
[mqtt]
listen = ["{listen}"]
users_file = "{users}"
[[upstream]]
name = "head"
url = "{url}"
ca = "{lost}"
[[upstream.mapping]]
filter = "{topic_filter}"
[aws]
endpoint_url = "{endpoint_url}"
[aws.credentials.iot]
endpoint = "{endpoint}"
""")
    users.write_text(f"ann:{hash_password(b'x')}\n")
    path = journal(tmp_path / "bin", *kept, f"configured by {config}")
    files = bundle(config, tmp_path / "a.tar.gz", PATH=path, STREAMBRIDGE_CONFIG=str(config))
    for text, key in kept.items():
        assert json.dumps(text) in files["config.json"], key
        assert text in files["log.txt"], key
    assert f"configured by {config}" in files["log.txt"]


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "passw",
        "passw=x ",
        "a.",
        "a-",
        "eyJ-",
        "a://",
        "://",
        "a?",
        "password",
        'password="',
        "Bearer ",
        "$7$1$",
    ],
)
def test_the_time_to_clean_a_log_grows_with_its_length_alone(tmp_path: Path, piece: str) -> None:
    """A client chooses its user name, which is in the log: no name may keep the command busy for hours."""
    scrubber = Scrubber(tmp_path)

    def least(size: int) -> float:
        text = piece * (size // len(piece))
        times = []
        for _ in range(5):
            began = time.process_time()
            scrubber.text(text)
            times.append(time.process_time() - began)
        return min(times)

    for short, long in ((60, 240), (1_000, 32_000)):
        grown = long // short
        assert least(long) < 8 * grown * max(least(short), 1e-4), "eight times what the length explains"
