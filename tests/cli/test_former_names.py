"""`endpoint_url`, the one name of a destination's address, and the names that it had before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.testbed.web import Web
from bridge.access.rules import Identity
from bridge.errors import InvalidDefinition, Unauthorized
from bridge.operations.catalog import Define, Named, Operations
from bridge.plugin import discovery
from bridge.plugin.allow import Allow
from bridge.settingtypes import Means, meanings
from tests.cli.conftest import streambridge
from tests.cli.test_check import QUIET, check
from tests.cli.test_run import Service
from tests.greengrass.harness import Server
from tests.http.conftest import eventually

FORMER = {"http": "uri", "mqtt": "url"}
URLS = {"http": "http://127.0.0.1:1/in", "mqtt": "mqtt://127.0.0.1:1"}


def export(kind: str, name: str, number: int = 0) -> str:
    address = f'{name} = "{URLS[kind]}"' if name else ""
    return f'[[streams.a.export.{kind}]]\nidentifier = "{kind}{number}"\n{address}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.toml"


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.close()


def test_every_shipped_exporter_calls_its_address_endpoint_url() -> None:
    named = {
        kind: [one.name for one in msgspec.structs.fields(cls.Config) if Means.ENDPOINT in meanings(one.type)]
        for kind, cls in discovery.load().exporters.items()
    }
    assert {kind: names for kind, names in named.items() if names not in ([], ["endpoint_url"])} == {}
    assert {kind for kind, names in named.items() if not names} == {"consumer"}


def test_check_names_the_new_name_once_for_each_kind(path: Path) -> None:
    assert check(path, QUIET + "".join(export(kind, "endpoint_url") for kind in FORMER)) == []
    text = "".join(export(kind, name, n) for n in range(3) for kind, name in FORMER.items())
    many = "the former name of `endpoint_url`, still accepted (2 other exports of this kind too); write"
    assert check(path, QUIET + text) == [
        f"warning: x.toml:13: streams.a.export.http[0].uri: {many} `endpoint_url` instead",
        f"warning: x.toml:16: streams.a.export.mqtt[0].url: {many} `endpoint_url` instead",
    ]


@pytest.mark.parametrize("kind", FORMER)
def test_both_names_at_once_are_an_error_that_names_both(path: Path, kind: str) -> None:
    former = FORMER[kind]
    text = export(kind, former) + f'endpoint_url = "{URLS[kind]}"\n'
    (found,) = check(path, QUIET + text)
    assert found.endswith(
        f'[0].{former} = "{URLS[kind]}": the former name of `endpoint_url`; remove one of the two'
    )
    raw = {"identifier": "x", former: URLS[kind], "endpointUrl": URLS[kind]}
    with pytest.raises(InvalidDefinition, match=f"`{former}` is the former name of `endpointUrl`; remove"):
        discovery.load().config(kind, raw)


@pytest.mark.parametrize("kind", FORMER)
@pytest.mark.parametrize("new", [True, False], ids=["endpoint_url", "former"])
def test_a_mistake_is_told_with_the_name_in_the_file(path: Path, kind: str, new: bool) -> None:
    name, other = ("endpoint_url", FORMER[kind]) if new else (FORMER[kind], "endpoint_url")
    for wrong in ("ftp://h/", f"{kind}://"):
        text = export(kind, name).replace(URLS[kind], wrong)
        (found,) = (line for line in check(path, QUIET + text) if line.startswith("error"))
        assert name in found
        assert not re.search(rf"\b{other}\b", found)


def test_an_address_that_is_missing_or_misspelt_is_asked_for_by_the_new_name(path: Path) -> None:
    (missing,) = check(path, QUIET + export("http", ""))
    assert "`endpoint_url` is missing" in missing
    (unknown,) = check(path, QUIET + export("http", "url"))
    assert unknown.endswith("unknown key; did you mean `endpoint_url`?")


def test_a_renamed_option_leaves_the_running_export_as_it_is(path: Path, web: Web) -> None:
    for name in ("uri", "endpoint_url"):
        path.write_text(
            f'{QUIET}[streams.a]\ntopics = ["a"]\n{export("http", name).replace(URLS["http"], web.url)}'
        )
        service = Service(path)
        service.wait_for("ready")
        assert streambridge("streams", "append", "a", name, "-c", path).returncode == 0
        eventually(lambda name=name: web.bodies[-1:] == [name.encode()])
        assert service.stop() == 0
        assert not any("stream updated" in line or "ERROR" in line for line in service.log)
    assert web.bodies == [b"uri", b"endpoint_url"], "the second export went on behind the first"
    shown = streambridge("streams", "describe", "a", "--toml", "-c", path).stdout
    assert f'endpoint_url = "{web.url}"' in shown
    assert "uri" not in shown


def test_a_command_gives_the_address_by_either_name(path: Path) -> None:
    path.write_text(QUIET)
    service = Service(path)
    service.wait_for("ready")

    def changed(*arguments: str) -> Any:
        assert streambridge(*arguments, "-c", path).returncode == 0
        shown = json.loads(streambridge("streams", "describe", "s", "--json", "-c", path).stdout)
        return shown["definition"]["exportDefinition"]["http"][0]["uri"]

    one = 'export.http=[{identifier = "w", endpoint_url = "http://one/"}]'
    assert changed("streams", "create", "s", one) == "http://one/"
    assert changed("streams", "update", "s", "--export", "w", "endpoint_url=http://two/") == "http://two/"
    assert changed("streams", "update", "s", "--export", "w", "uri=http://three/") == "http://three/"
    assert service.stop() == 0


def test_a_clients_definition_is_held_to_the_endpoints_by_either_name_and_described_as_before(
    tmp_path: Path,
) -> None:
    caller = Identity("c", None, ())
    with Server(tmp_path) as server:
        allow = Allow(kinds=["http", "mqtt"], endpoints=["http://good.example", "mqtt://good.example"])
        operations = Operations(server.manager, allow)

        def create(kind: str, name: str, host: str) -> Any:
            exports = {kind: [{"identifier": "x", name: f"{kind}://{host}"}]}
            given = {"name": f"{kind}-{name}", "strategyOnFull": 0, "exportDefinition": exports}
            operations.call_now("createMessageStream", Define(definition=given), caller)
            described: Any = operations.call_now("describeMessageStream", Named(name=given["name"]), caller)
            return described.message_stream_info.definition.export_definition[kind][0]

        for kind, former in FORMER.items():
            for name in (former, "endpointUrl"):
                with pytest.raises(Unauthorized, match="endpoints"):
                    server.call(lambda kind=kind, name=name: create(kind, name, "evil.example"))
                made = server.call(lambda kind=kind, name=name: create(kind, name, "good.example"))
                assert made == {"identifier": "x", former: f"{kind}://good.example"}
