"""Secrets in the URLs of exports: never shown, and kept when a client sends back their masks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bridge.access.rules import TRUSTED
from bridge.errors import InvalidDefinition
from bridge.operations.catalog import Define, Named, Operations, Update
from bridge.plugin.allow import Allow
from bridge.printable import masked
from tests.greengrass.harness import Server

URI = "https://ann:hunter2@127.0.0.1:9/in?api_key=hunter3&db=plant"
SHOWN = "https://***@127.0.0.1:9/in?api_key=***&db=***"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URI, SHOWN),
        ("mqtts://tok@host:8883", "mqtts://***@host:8883"),
        ("https://host/in?tok#frag", "https://host/in?***#***"),
        ("https://ann:12/34@host/in", "https://***"),
        ("https://ann:a?b@host/in", "https://***"),
        ("https://[::1]:8443/in", "https://[::1]:8443/in"),
        ("no url with a?question=mark", "no url with a?question=mark"),
    ],
)
def test_a_url_is_masked_where_a_secret_may_be(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert masked(shown) == shown


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Server(tmp_path_factory.mktemp("secrets")) as running:
        yield running


def test_a_secret_is_never_described_and_survives_describe_change_update(server: Server) -> None:
    operations = Operations(server.manager, Allow(endpoints=["https://127.0.0.1:9"]))
    web = {"identifier": "web", "uri": URI}
    given = {"name": "round", "strategyOnFull": 0, "exportDefinition": {"http": [web]}}

    def call(name: str, request: Any) -> Any:
        return server.call(lambda: operations.call_now(name, request, TRUSTED))

    call("createMessageStream", Define(definition=given))
    described = call("describeMessageStream", Named(name="round")).message_stream_info.definition
    assert described.export_definition["http"][0]["uri"] == SHOWN
    assert "hunter" not in msgspec.json.encode(described).decode()
    changed = msgspec.to_builtins(described)
    changed["topics"] = ["plant/#"]
    call("updateMessageStream", Update(definition=changed))
    now = server.manager.definitions["round"]
    assert (now.topics, now.export_definition["http"][0]["uri"]) == (["plant/#"], URI)
    changed["exportDefinition"]["http"][0]["uri"] = SHOWN.replace("/in", "/elsewhere")
    with pytest.raises(InvalidDefinition, match="write the secret itself"):
        call("updateMessageStream", Update(definition=changed))
    assert server.manager.definitions["round"] == now
