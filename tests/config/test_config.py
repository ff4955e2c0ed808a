"""The configuration file, as `bridge.config.load` reads it."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from bridge.config import settings
from bridge.errors import ConfigError, InvalidDefinition
from bridge.model import Persistence, StrategyOnFull


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "streambridge.toml"


def load(path: Path, text: str) -> settings.Config:
    path.write_text(text)
    return settings.load(path)


def mistakes(path: Path, text: str) -> list[str]:
    """The lines of the error, without the directory."""
    with pytest.raises(ConfigError) as caught:
        load(path, text)
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


def test_an_empty_file_gives_every_default(path: Path) -> None:
    settings = load(path, "")
    assert settings.gateway.id == socket.gethostname()
    assert settings.gateway.data_dir == Path("/var/lib/streambridge")
    assert settings.mqtt.listen == ["tcp://127.0.0.1:1883"]
    assert settings.streams == {}
    assert settings.path == path


def test_sizes_and_durations_are_numbers_or_texts(path: Path) -> None:
    settings = load(
        path,
        """
        [gateway]
        sync_interval = "1.5s"
        [mqtt]
        max_packet = "2 MiB"
        limits.connect_timeout = 250
        [streams.a]
        max_size = "1GB"
        time_to_live = "7d"
        limits = { max_age = "10m", max_bytes = 4096 }
        """,
    )
    assert settings.gateway.sync_interval == 1500
    assert settings.mqtt.max_packet == 2 * 1024 * 1024
    assert settings.mqtt.limits.connect_timeout == 250
    stream = settings.streams["a"]
    assert (stream.max_size, stream.time_to_live_millis) == (10**9, 7 * 86_400_000)
    assert stream.limits is not None
    assert (stream.limits.max_age_millis, stream.limits.max_bytes) == (600_000, 4096)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("export.max_bandwidth = 99999999999999999999", "must be at most 9223372036854775807"),
        ("export.max_bandwidth = 9223372036854775808", "must be at most 9223372036854775807"),
        (
            'mqtt.limits.session_bytes = "10000000TB"',
            "must be at most 9223372036854775807 bytes (8.389e+06 TiB)",
        ),
        ("gateway.sync_interval = 9223372036855", "must be at most 9223372036854 ms (1.068e+05d)"),
        ('gateway.sync_interval = "106752d"', "must be at most 9223372036854 ms (1.068e+05d)"),
        (f'mqtt.limits.session_bytes = "{"9" * 400}TB"', "is too large"),
        (f'gateway.sync_interval = "{"9" * 400}d"', "is too large"),
    ],
)
def test_a_number_that_no_part_can_hold_is_a_mistake(path: Path, text: str, what: str) -> None:
    [mistake] = mistakes(path, text)
    assert mistake.endswith(what)


@pytest.mark.parametrize(
    "text",
    [
        'gateway.data_dir = "~nobody-here/data"',
        'mqtt.users_file = "~nobody-here/users"',
        'streams.a.export.http = [{identifier = "h", uri = "http://h.example", ca_file = "~nobody-here/ca"}]',
    ],
)
def test_a_home_directory_that_is_unknown_is_a_mistake(path: Path, text: str) -> None:
    [mistake] = mistakes(path, text)
    assert mistake.endswith("the home directory ~nobody-here is unknown; write the path without ~nobody-here")


def test_a_path_with_nul_is_a_mistake(path: Path) -> None:
    assert mistakes(path, 'gateway.data_dir = "a\\u0000b"') == [
        'streambridge.toml:1: gateway.data_dir = "a\\u0000b": no path contains the character NUL; remove it'
    ]


def test_a_text_in_place_of_a_list_is_reported_with_the_list_to_write(path: Path) -> None:
    (line,) = mistakes(path, '[mqtt]\nlisten = "tcp://127.0.0.1:1883"')
    assert line.endswith('must be a list, not a text; write ["tcp://127.0.0.1:1883"]')


PLUGIN = """
from bridge import ACCEPTED, BatchedConfig, Bytes, Exporter, Millis, hookimpl
from msgspec import Struct

class Inner(Struct, rename="camel", frozen=True):
    grace: Millis = 0

class Config(BatchedConfig, kw_only=True, frozen=True):
    patience: Millis | None = None
    room: Bytes = 0
    window_bytes: str = ""
    flush_millis: int = 0
    deep: Inner = Inner()

class Mine(Exporter):
    kind, Config = "mine", Config
    def export(self, batch):
        return ACCEPTED

@hookimpl
def register_exporters(register):
    register(Mine)
"""


def test_an_option_of_a_plugin_is_read_by_its_type_whatever_its_name(path: Path) -> None:
    plugins = path.parent / "plugins"
    plugins.mkdir()
    (plugins / "mine.py").write_text(PLUGIN)
    text = """
        [[streams.a.export.mine]]
        identifier = "x"
        patience = "1.5s"
        room = "2KiB"
        window_bytes = "2KiB"
        flush_millis = "2s"
        deep = { grace = "1m" }
        [export]
        plugin_dirs = ["plugins"]
        """
    (export,) = load(path, text).streams["a"].export_definition["mine"]
    assert (export["patience"], export["room"], export["deep"]) == (1500, 2048, {"grace": 60_000})
    assert (export["windowBytes"], export["flushMillis"]) == ("2KiB", "2s")  # no such types: as they are
    (line,) = mistakes(path, text.replace('"1.5s"', '"1.5 parsecs"'))
    assert line.startswith(
        'streambridge.toml:4: streams.a.export.mine[0].patience = "1.5 parsecs": expected a dur'
    )


def test_a_stream_becomes_the_definition_that_a_client_would_send(path: Path) -> None:
    settings = load(
        path,
        """
        [streams."line 1"]
        topics = ["sensors/#", "alarms/+"]
        strategy_on_full = "OverwriteOldestData"
        persistence = "Memory"
        flush_on_write = true
        segment_size = "1MiB"
        retention = "exported"
        deduplication_window = "2m"
        [[streams."line 1".export.s3]]
        identifier = "lake"
        bucket = "b"
        status_config = { status_level = "INFO" }
        [[streams."line 1".export.s3]]
        identifier = "archive"
        time_hint_millis = "60s"
        """,
    )
    stream = settings.streams["line 1"]
    assert stream.name == "line 1"
    assert stream.topics == ["sensors/#", "alarms/+"]
    assert stream.strategy_on_full is StrategyOnFull.OverwriteOldestData
    assert stream.persistence is Persistence.Memory
    assert stream.stream_segment_size == 1024 * 1024
    assert stream.deduplication_window_millis == 120_000
    assert stream.export_definition == {
        "s3": [
            {"identifier": "lake", "bucket": "b", "statusConfig": {"statusLevel": "INFO"}},
            {"identifier": "archive", "timeHintMillis": 60_000},
        ]
    }


def test_a_stream_of_the_configuration_rejects_when_full_and_has_segments_that_fit(path: Path) -> None:
    stream = load(path, '[streams.small]\nmax_size = "64KiB"').streams["small"]
    assert stream.strategy_on_full is StrategyOnFull.RejectNewData
    assert (stream.max_size, stream.stream_segment_size) == (65536, 8192), "an eighth can be freed"


def test_fragments_are_merged_in_the_order_of_their_names(path: Path) -> None:
    fragments = path.parent / "conf.d"
    fragments.mkdir()
    (fragments / "20-b.toml").write_text('[gateway]\nid = "second"\n[streams.b]\n')
    (fragments / "10-a.toml").write_text('[gateway]\nid = "first"\n[streams.a]\ntopics = ["x"]\n')
    settings = load(path, '[gateway]\nid = "main"\nsync_interval = 5\n[streams.a]\ntopics = ["a", "b"]\n')
    assert settings.gateway.id == "second"
    assert settings.gateway.sync_interval == 5
    assert list(settings.streams) == ["a", "b"]
    assert settings.streams["a"].topics == ["x"]  # a list replaces, it is not appended to


def test_a_mistake_in_a_fragment_names_the_fragment(path: Path) -> None:
    fragments = path.parent / "conf.d"
    fragments.mkdir()
    (fragments / "mqtt.toml").write_text("\n[mqtt]\nmax_packet = true\n")
    assert mistakes(path, '[mqtt]\nmax_packet = "1MiB"\n') == [
        "conf.d/mqtt.toml:3: mqtt.max_packet = true: must be a whole number, not true or false"
    ]


def test_a_fraction_where_a_whole_number_is_needed_is_called_that(path: Path) -> None:
    (line,) = mistakes(path, "[export]\nthreads = 1.5\n")
    assert line.endswith("export.threads = 1.5: must be a whole number")


def test_relative_paths_are_relative_to_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        monkeypatch.chdir(elsewhere)
        settings = load(
            path,
            """
            gateway.data_dir = "data"
            mqtt.users_file = "users"
            export.plugin_dirs = ["plugins", "/opt/plugins"]
            """,
        )
    assert settings.gateway.data_dir == path.parent / "data"
    assert settings.mqtt.users_file == path.parent / "users"
    assert settings.export.plugin_dirs == [path.parent / "plugins", Path("/opt/plugins")]


def test_a_relative_file_of_an_export_is_relative_to_the_configuration_too(path: Path) -> None:
    text = """[[streams.a.export.http]]
identifier = "x"
uri = "https://office.example/a"
bearer_token_file = "token"
ca_file = "/etc/ca.pem"
"""
    (export,) = load(path, text).streams["a"].export_definition["http"]
    assert export["bearerTokenFile"] == str(path.absolute().parent / "token")
    assert export["caFile"] == "/etc/ca.pem"


def test_two_data_directories_never_share_a_memory_directory(path: Path) -> None:
    first = load(path, 'gateway.data_dir = "a"').gateway.memory_dir
    second = load(path, 'gateway.data_dir = "b"').gateway.memory_dir
    assert first != second
    assert load(path, 'gateway.memory_dir = "m"').gateway.memory_dir == path.parent / "m"


def test_every_mistake_is_reported_at_once_with_file_line_value_and_remedy(path: Path) -> None:
    assert mistakes(
        path,
        """\
[gateway]
sync_intervall = "1s"
[mqtt]
mode = "embeded"
max_packet = "10m"
listen = [
  "tcp://127.0.0.1:1883",
]
[mqtt.tls]
cert = "a.pem"
[[mqtt.acl]]
publish = ["ok/#"]
[[mqtt.acl]]
publish = ["a/#/b"]
[streams.c]
persistence = "file"
max_size = 2
limits = { max_mesages = 3 }
[streams."c/d"]
[exports]
threads = 3
""",
    ) == [
        'streambridge.toml:2: gateway.sync_intervall = "1s": unknown key; did you mean `sync_interval`?',
        'streambridge.toml:4: mqtt.mode = "embeded": must be "embedded" or "external"; '
        'did you mean "embedded"?',
        'streambridge.toml:5: mqtt.max_packet = "10m": expected a size such as 512, "64KiB" or "1.5GB" '
        "(units: B, kB, KiB, MB, MiB, GB, GiB, TB, TiB)",
        "streambridge.toml:9: mqtt.tls: `key` is missing; add key = ...",
        "streambridge.toml:14: mqtt.acl[1].publish = [\"a/#/b\"]: 'a/#/b' is not a topic filter: "
        "level 2 of 3 is `#`, which may only be the last; write a/# or a/+/b",
        'streambridge.toml:16: streams.c.persistence = "file": must be "File" or "Memory"; '
        'did you mean "File"?',
        "streambridge.toml:17: streams.c.max_size = 2: must be at least 1024 bytes (1 KiB)",
        "streambridge.toml:18: streams.c.limits.max_mesages = 3: unknown key; did you mean `max_messages`?",
        'streambridge.toml:19: streams."c/d": a stream\'s name is 1 to 255 letters, digits, spaces and any '
        "of _ - , .",
        "streambridge.toml:20: exports: unknown key; did you mean `export`?",
    ]


def test_a_key_like_no_other_is_reported_with_the_valid_ones(path: Path) -> None:
    assert mistakes(path, "[greengrass]\nxyz = 1") == [
        "streambridge.toml:2: greengrass.xyz = 1: unknown key; valid keys: authenticate_clients, "
        "connections, connections_per_address, idle_timeout, listen, retention, token_file, tokens_file, "
        "user, users"
    ]


def test_a_whole_struct_that_contradicts_itself_is_reported_at_the_key_that_it_names(path: Path) -> None:
    found = mistakes(path, '[mqtt]\nmode = "embedded"\nlisten = ["tls://0.0.0.0:8883"]')
    assert [line.partition("]: ")[0] for line in found] == [
        'streambridge.toml:3: mqtt.listen = ["tls://0.0.0.0:8883"'
    ] * 2
    assert "needs a certificate: add [mqtt.tls]" in found[0]
    assert "nobody could log in" in found[1]


def test_a_mistake_does_not_make_others_out_of_what_depends_on_it(path: Path) -> None:
    text = '[mqtt]\nlisten = ["tls://0.0.0.0:8883"]\nallow_anonymous = true\n[mqtt.tls]\ncert = "a.pem"\n'
    assert mistakes(path, text) == ["streambridge.toml:4: mqtt.tls: `key` is missing; add key = ..."]


def test_a_file_that_cannot_be_read_does_not_hide_the_mistakes_of_the_others(path: Path) -> None:
    fragments = path.parent / "conf.d"
    fragments.mkdir()
    (fragments / "1.toml").write_text("[[[")
    (fragments / "2.toml").write_text("[gateway]\nids = 1\n")
    first, second = mistakes(path, "")
    assert first.startswith("conf.d/1.toml:1: not valid TOML")
    assert second == "conf.d/2.toml:2: gateway.ids = 1: unknown key; did you mean `id`?"


def test_a_segment_larger_than_its_stream_is_refused(path: Path) -> None:
    assert mistakes(path, '[streams.a]\nmax_size = "1MiB"\nsegment_size = "2MiB"') == [
        'streambridge.toml:3: streams.a.segment_size = "2MiB": is larger than max_size; make it at most that'
    ]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[gateway]\nid = \n", "streambridge.toml:2: not valid TOML: Invalid value"),
        ('[gateway]\nid = "a"\nid = "b"\n', "streambridge.toml:3: not valid TOML: a key is set twice"),
        ("gateway = 1", "streambridge.toml:1: gateway = 1: must be a table, [gateway]"),
        ("[streams]\na = 1", "streambridge.toml:2: streams.a = 1: must be a table, [streams.a]"),
        (
            "[streams.a.export]\ns3 = 5",
            "streambridge.toml:2: streams.a.export.s3 = 5: must be a list of tables: [[streams.a.export.s3]]",
        ),
    ],
)
def test_a_text_that_is_not_a_configuration_is_reported_in_one_line(
    path: Path, text: str, reported: str
) -> None:
    assert mistakes(path, text) == [reported]


def test_a_file_that_is_missing_or_not_a_text_is_reported_in_one_line(path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file; give another one with --config"):
        settings.load(path)
    path.write_bytes(b"# \n# \xff")
    with pytest.raises(ConfigError, match=r":2: not valid UTF-8"):
        settings.load(path)


def test_a_secret_comes_from_the_environment_and_is_never_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMBRIDGE_PROXY_PASSWORD", "hunter2")
    text = '[aws]\nproxies = { https = "http://me:${STREAMBRIDGE_PROXY_PASSWORD}@proxy:3128" }\n'
    assert load(path, text).aws.proxies == {"https": "http://me:hunter2@proxy:3128"}
    lines = mistakes(path, text + "region = 7\n")
    assert "hunter2" not in "\n".join(lines)
    monkeypatch.delenv("STREAMBRIDGE_PROXY_PASSWORD")
    (line,) = mistakes(path, text)
    assert "the environment variable STREAMBRIDGE_PROXY_PASSWORD is not set" in line


def test_credentials_of_systemd_are_named_by_their_directory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/streambridge.service")
    settings = load(path, '[mqtt.external]\npassword_file = "${CREDENTIALS_DIRECTORY}/password"')
    assert settings.mqtt.external.password_file == Path("/run/credentials/streambridge.service/password")


def test_a_secret_in_a_stream_is_refused_because_definitions_are_shown(path: Path) -> None:
    (line,) = mistakes(path, '[[streams.a.export.http]]\nuri = "https://x/${STREAMBRIDGE_TOKEN}"')
    assert line.startswith("streambridge.toml:2: streams.a.export.http[0].uri")
    assert "put the secret in a file" in line


def test_an_error_of_the_manager_about_a_declared_stream_uses_the_keys_of_the_file() -> None:
    error = InvalidDefinition(("streamSegmentSize",), "is larger than", "lower it", other="maxSize")
    assert str(error) == "definition.streamSegmentSize: is larger than maxSize; lower it"
    assert settings.explained(error, "a b") == 'streams."a b".segment_size: is larger than max_size; lower it'
    error = InvalidDefinition(("limits", "maxAgeMillis"), "no")
    assert settings.explained(error, "a") == "streams.a.limits.max_age: no"
    error = InvalidDefinition(("exportDefinition", "s3Mine", 1, "statusConfig", "statusStreamName"), "no")
    assert settings.explained(error, "a") == "streams.a.export.s3Mine[1].status_config.status_stream_name: no"


def test_the_keys_that_a_reload_cannot_apply_are_named(path: Path) -> None:
    running = load(path, "")
    new = load(
        path,
        """
        [gateway]
        id = "other"
        [mqtt]
        users_file = "users"
        allow_anonymous = false
        listen = ["tcp://127.0.0.1:1884"]
        max_packet = "2MiB"
        [log]
        level = "debug"
        [streams.a]
        """,
    )
    assert settings.needs_restart(running, new) == ["gateway.id", "mqtt.max_packet"]
    assert settings.needs_restart(running, running) == []


def test_mistakes_between_users_and_roles_are_reported_with_their_lines(path: Path) -> None:
    found = mistakes(
        path,
        """
        [[mqtt.role]]
        name = "reader"
        operations = ["readMesages"]
        deny.operations = ["purge"]
        [[mqtt.role]]
        name = "reader"
        [[mqtt.user]]
        name = "ann"
        roles = ["reder"]
        client_ids = ["pump-7"]
        certificates = ["sha256:DIGITS"]
        [[mqtt.user]]
        name = "bob"
        client_ids = ["pump-7"]
        certificates = ["SHA256:PAIRS"]
        [[mqtt.user]]
        name = "ann"
        """.replace("DIGITS", "ab" * 32).replace("PAIRS", ":".join(["AB"] * 32)),
    )
    assert [line.partition(": ")[0] for line in found] == [
        f"streambridge.toml:{line}" for line in (4, 5, 7, 10, 15, 16, 18)
    ]
    assert "did you mean 'readMessages'?" in found[0]
    assert found[3].endswith("there is no role 'reder'; known: reader")


def test_a_mistake_in_a_role_is_reported_alone(path: Path) -> None:
    (line,) = mistakes(
        path,
        """
        [[mqtt.role]]
        name = "reader"
        page = "lok"
        [[mqtt.user]]
        name = "ann"
        roles = ["reader"]
        """,
    )
    assert line.startswith("streambridge.toml:4: ")
    assert 'did you mean "look"?' in line
