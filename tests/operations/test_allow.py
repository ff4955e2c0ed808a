"""A client's definition reaches no file, secret or host that the configuration does not allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.access.rules import TRUSTED, Identity
from bridge.errors import InvalidRequest, Unauthorized
from bridge.operations.catalog import Define, Operations, Update
from bridge.plugin.allow import Allow
from bridge.plugin.discovery import load
from tests.greengrass.harness import Raw, Server

CLIENT = Identity("c", None, ())
HTTP = {"identifier": "x", "uri": "https://in.example/readings"}
SDK: dict[str, dict[str, Any]] = {
    "kinesis": {"identifier": "k", "kinesisStreamName": "n"},
    "iotAnalytics": {"identifier": "a", "iotChannel": "n"},
    "IotSitewise": {"identifier": "w"},
    "s3TaskExecutor": {"identifier": "t"},
}


def definition(name: str = "d", **exports: dict[str, Any]) -> dict[str, Any]:
    given = {kind: [config] for kind, config in exports.items()}
    return {"name": name, "strategyOnFull": 0, "exportDefinition": given}


def create(server: Server, allow: Allow, caller: Identity = CLIENT, **exports: dict[str, Any]) -> str:
    """Try it; returns the error, or nothing."""
    operations = Operations(server.manager, allow)

    def work() -> str:
        try:
            operations.call_now("createMessageStream", Define(definition=definition(**exports)), caller)
        except Unauthorized as error:
            return str(error)
        server.manager.delete("d")
        return ""

    return server.call(work)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Server(tmp_path_factory.mktemp("allow")) as running:
        yield running


def test_the_sdks_own_kinds_without_endpoint_need_no_configuration(server: Server) -> None:
    for kind, config in SDK.items():
        assert create(server, Allow(), **{kind: config}) == "", kind


def test_endpoints_are_refused_by_default_and_allowed_by_the_list(server: Server) -> None:
    allow = Allow(endpoints=["https://in.example", "http://10.0.0.1:9000", "*.lan.example"])
    for kind, config in SDK.items():
        evil = {**config, "endpointUrl": "https://evil.example"}
        assert "[export.allow] endpoints" in create(server, Allow(), **{kind: evil}), kind
        good = {**config, "endpointUrl": "http://10.0.0.1:9000/path"}
        assert create(server, allow, **{kind: good}) == "", kind
    assert "endpoints" in create(server, Allow(), http=HTTP)
    assert create(server, allow, http=HTTP) == ""
    assert create(server, allow, http={**HTTP, "uri": "https://a.lan.example/"}) == ""


@pytest.mark.parametrize(
    "uri",
    [
        "http://in.example/",
        "https://in.example:8443/",
        "https://in.example.evil.example/",
        "https://in.example@evil.example/",
        "https://evil.example\\@in.example/",
        "https://evil.example#@in.example/",
        "https://evil.example/?https://in.example",
        "https://lan.example/",
        "https://xlan.example/",
        "https://in.example:443@evil.example/",
        "https://in.exa\tmple/",
    ],
)
def test_no_spelling_of_a_url_leads_elsewhere(uri: str) -> None:
    assert not Allow(endpoints=["https://in.example", "*.lan.example"]).endpoint(uri)


def test_files_with_secrets_are_never_a_clients_to_name(server: Server) -> None:
    allow = Allow(endpoints=["https://in.example"], directories=[Path("/")])
    for key in ("bearerTokenFile", "caFile", "certFile", "keyFile"):
        told = create(server, allow, http={**HTTP, key: "/etc/hostname"})
        assert f"`{key}`" in told
        assert create(server, Allow(), TRUSTED, http={**HTTP, key: "/etc/hostname"}) == ""


def test_kinds_and_buckets_are_held_to_the_lists(server: Server) -> None:
    s3 = {"identifier": "s", "bucket": "fleet-raw"}
    assert "[export.allow] kinds" in create(server, Allow(), s3=s3)
    assert create(server, Allow(kinds=["s3"]), s3=s3) == ""
    assert "buckets" in create(server, Allow(kinds=["s3"], buckets=["fleet-r", "raw"]), s3=s3)
    assert create(server, Allow(kinds=["s3"], buckets=["fleet-*"]), s3=s3) == ""
    assert "kinds" in create(server, Allow(kinds=[]), kinesis=SDK["kinesis"])


def test_another_broker_is_a_destination_like_any_other(server: Server) -> None:
    mqtt = {"identifier": "m", "url": "mqtts://hub.example"}
    assert "[export.allow] kinds" in create(server, Allow(endpoints=["mqtts://hub.example"]), mqtt=mqtt)
    for wrong in ("hub.example", "mqtt://hub.example", "mqtts://hub.example:443", "mqtts://evil.example"):
        assert "endpoints" in create(server, Allow(kinds=["mqtt"], endpoints=[wrong]), mqtt=mqtt), wrong
    allow = Allow(kinds=["mqtt"], endpoints=["mqtts://hub.example", "mqtt://*.lan.example"])
    assert create(server, allow, mqtt=mqtt) == ""
    assert create(server, allow, mqtt={**mqtt, "url": "mqtts://hub.example:8883"}) == ""
    assert create(server, allow, mqtt={**mqtt, "url": "mqtt://a.lan.example"}) == ""
    secret = {**mqtt, "username": "u", "passwordFile": "/etc/hostname"}
    assert "`passwordFile`" in create(server, allow, mqtt=secret)


def test_a_client_may_send_back_what_the_configuration_declared_and_not_redirect_it(server: Server) -> None:
    operations = Operations(server.manager, Allow(endpoints=["https://in.example"]))
    declared = {**HTTP, "uri": "https://office.example/", "bearerTokenFile": "/etc/hostname"}

    def work() -> None:
        operations.call_now("createMessageStream", Define(definition=definition(http=declared)), TRUSTED)

        def update(**changes: Any) -> None:
            changed = definition(http=declared | changes) | {"maxSize": 1 << 29}
            operations.call_now("updateMessageStream", Update(definition=changed), CLIENT)

        update()
        update(priority=2)
        with pytest.raises(Unauthorized, match="bearerTokenFile"):
            update(uri="https://in.example/")  # allowed, but not with the token
        with pytest.raises(Unauthorized):
            update(identifier="another")
        server.manager.delete("d")

    server.call(work)


def test_on_8088_keys_that_are_not_the_sdks_are_ignored(server: Server) -> None:
    with Raw(server) as client:
        evil = {**SDK["s3TaskExecutor"], "endpointUrl": "https://evil.example", "nonsense": 1}
        wanted = definition("ignored", s3TaskExecutor=evil) | {"topics": ["#"], "nonsense": 2}
        assert client.ask(2, definition=wanted, nonsense=3)["status"] == 0
        stored = server.manager.definitions["ignored"]
        assert stored.export_definition["s3TaskExecutor"] == [SDK["s3TaskExecutor"]]
        assert stored.topics == []
        http = {"identifier": "h", "uri": "https://evil.example/"}
        assert client.ask(2, definition=definition("told", http=http))["status"] == 2


def test_a_file_is_opened_only_below_the_directories(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "up", tmp_path / "key.pem"
    (allowed / "sub").mkdir(parents=True)
    secret.write_bytes(b"secret")
    (allowed / "sub" / "fine").write_bytes(b"fine")
    (allowed / "link").symlink_to(secret)
    (allowed / "out").symlink_to(tmp_path)
    (allowed / "inner").symlink_to(allowed / "sub")
    allow = Allow(directories=[allowed])
    for path in ("sub/fine", "inner/fine"):
        with allow.open(allowed / path) as file:
            assert file.read() == b"fine"
    for path in (secret, allowed / "link", allowed / "out" / "key.pem", allowed / ".." / "key.pem"):
        with pytest.raises(ValueError, match="in none of the directories"):
            allow.open(path)
    with pytest.raises(ValueError, match="none of the directories"):
        Allow().open(allowed / "sub" / "fine")
    with pytest.raises(ValueError, match="not a regular file"):
        allow.open(allowed / "sub")


def test_every_key_of_a_shipped_exporter_that_names_a_file_or_a_host_is_guarded() -> None:
    from bridge.operations.allow import guards_of

    for kind, exporter in load().exporters.items():
        guards = guards_of(exporter.Config)
        for field in msgspec.structs.fields(exporter.Config):
            name = field.encode_name
            if name.endswith(("File", "Url")) or name in ("uri", "bucket"):
                assert name in guards, f"{kind}.{name}"


def test_a_mistake_in_the_list_is_named() -> None:
    for wrong in ({"endpoints": ["ftp://x"]}, {"directories": ["relative"]}, {"endpoints": ["https://a b"]}):
        with pytest.raises((msgspec.ValidationError, InvalidRequest), match=r"endpoints|directories"):
            msgspec.convert(wrong, Allow)
