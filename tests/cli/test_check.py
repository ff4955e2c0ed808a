"""`streambridge check`: what is wrong with the configuration and this machine."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bridge.config.settings import load
from bridge.errors import ConfigError
from tests.cli.conftest import Fill, streambridge

# No listener of its own, so that tests need no free port.
QUIET = """
[gateway]
data_dir = "data"
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
"""
OFFLINE = {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
# Root without the right to pass over file modes.
WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.toml"


def check(path: Path, text: str, **env: str) -> list[str]:
    """The findings as `level: what`, without the directory; the exit code must agree with them."""
    path.write_text(text)
    done = streambridge("check", "-c", path, "--json", env=OFFLINE | env)
    result = json.loads(done.stdout)
    found = [f"{finding['level']}: {finding['what']}" for finding in result["findings"]]
    assert result["ok"] == (not any(line.startswith("error") for line in found))
    assert done.returncode == (0 if result["ok"] else 78)
    return [line.replace(f"{path.parent}/", "") for line in found]


def certificate(directory: Path, begins: datetime, ends: datetime, name: str = "server") -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(begins)
        .not_valid_after(ends)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    cert_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return cert_file, key_file


def tls(cert: Path, key: Path) -> str:
    return f'{QUIET}\n[mqtt.tls]\ncert = "{cert}"\nkey = "{key}"\n'


def test_a_good_configuration_is_ok_and_says_what_its_streams_do(path: Path) -> None:
    path.write_text(QUIET + '[streams.a]\ntopics = ["a/#"]\n')
    done = streambridge("check", "-c", path)
    assert (done.returncode, done.stderr) == (0, "")
    said, stream, verdict = done.stdout.splitlines()
    assert said.startswith("with 10/s of 200B")
    assert stream.startswith("  a: a power cut costs nothing; when full, ")
    assert verdict == f"{path}: ok (1 stream, 0 exports, 0 warnings)"
    assert sorted(path.parent.iterdir()) == [path]  # nothing was made


def test_mistakes_of_the_text_are_errors_with_their_lines(path: Path) -> None:
    assert check(path, "[mqtt]\nlisen = 1\n") == [
        "error: x.toml:2: mqtt.lisen = 1: unknown key; did you mean `listen`?"
    ]


def test_a_misspelt_key_shows_no_credentials_of_a_url(path: Path) -> None:
    export = '[[streams.a.export.http]]\nidentifier = "x"\nurii = "http://ann:S3CR3T@host/in?token=S3CR3T"\n'
    found = "\n".join(check(path, f"[streams.a]\n{export}"))
    assert 'urii = "http://host/in": unknown key; did you mean `endpoint_url`?' in found
    assert "S3CR3T" not in found


def test_a_port_that_is_taken_is_an_error_unless_the_service_itself_runs(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = QUIET.replace("127.0.0.1:0", f"127.0.0.1:{port}")
        (line,) = check(path, text)
        assert line.startswith(
            f"error: x.toml:6: mqtt.listen: cannot listen at 127.0.0.1:{port}: another program"
        )
        lock = path.parent / "data" / "lock"
        lock.parent.mkdir()
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert check(path, text) == []


def test_two_listeners_of_ours_on_one_port_are_an_error(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = QUIET.replace("127.0.0.1:0", f"127.0.0.1:{port}").replace(
        '[http]\nlisten = ""', f'[http]\nlisten = "127.0.0.1:{port}"'
    )
    (line,) = check(path, text)
    assert line.startswith(f"error: x.toml:10: http.listen: cannot listen at 127.0.0.1:{port}")


def test_a_data_directory_that_cannot_be_written_is_an_error(path: Path) -> None:
    (path.parent / "data").mkdir(mode=0o500)
    path.write_text(QUIET)
    done = streambridge("check", "-c", path, prefix=WITHOUT_RIGHTS)
    assert done.returncode == 78
    assert (
        f"x.toml:3: gateway.data_dir: user {os.geteuid()} may not write to {path.parent}/data" in done.stdout
    )


def test_a_full_disk_is_no_reason_not_to_start_where_the_data_directory_is(path: Path, mounted: Path) -> None:
    """It makes room there, and exports go on."""
    data = mounted / "data"
    data.mkdir()
    (path.parent / "data").symlink_to(data)
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", mounted], check=True)  # no room for another name
    with pytest.raises(OSError, match="No space left"):
        (mounted / "more").mkdir()
    assert not [line for line in check(path, QUIET) if line.startswith("error")]


def test_a_read_only_file_system_is_named_as_that_with_the_remedy(
    path: Path, fill: Fill, mounted: Path
) -> None:
    data = fill([("a", b"x")])
    shutil.copytree(data, mounted / "data", symlinks=True)
    path.write_text(QUIET.replace('"data"', f'"{mounted}/data"') + "[streams.sensors]\n")
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    for command in ("check", "run"):
        done = streambridge(command, "-c", path)
        assert done.returncode == 78
        printed = done.stdout + done.stderr
        assert f"gateway.data_dir: the file system at {mounted} is read-only" in printed
        assert f"mount -o remount,rw {mounted}" in printed
        assert "may not" not in printed, "permissions are not the cause"
        assert "chown" not in printed


def test_a_stream_that_may_not_be_read_is_an_error_and_the_others_are_checked(path: Path, fill: Fill) -> None:
    fill([("a", b"x" * 5000)])
    closed = fill(name="closed") / "streams" / "closed"
    closed.chmod(0)
    path.write_text(QUIET + "[streams.sensors]\nmax_size = 2048\n[streams.closed]\n")
    done = streambridge("check", "-c", path, prefix=WITHOUT_RIGHTS)
    closed.chmod(0o700)
    assert f"gateway.data_dir: user {os.geteuid()} may not read and write {closed}; run" in done.stdout
    assert "streams.sensors.max_size: the stream holds" in done.stdout
    assert "damaged" not in done.stdout


def test_a_memory_directory_of_another_service_is_an_error(path: Path) -> None:
    memory = path.parent / "memory"
    memory.mkdir(mode=0o700)
    lock = os.open(memory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (found,) = check(path, QUIET)
    finally:
        os.close(lock)
    assert "x.toml:4: gateway.memory_dir: another service keeps its memory streams in" in found
    assert check(path, QUIET) == []


def test_a_data_directory_below_a_file_is_an_error(path: Path) -> None:
    (path.parent / "data").write_text("")
    (line,) = check(path, QUIET)
    assert (
        line
        == "error: x.toml:3: gateway.data_dir: data is not a directory; move it away, or choose another path"
    )


def test_streams_that_do_not_fit_on_the_disk_are_a_warning(path: Path) -> None:
    (line,) = check(path, QUIET + '[streams.a]\nmax_size = "900000TiB"\n')
    assert line.startswith("warning: x.toml:3: gateway.data_dir: the streams may grow to 9e+05 TiB, but ")


def test_what_the_streams_hold_already_counts_as_room(path: Path, fill: Fill) -> None:
    fill([("a", b"x" * 1000)] * 5)
    as_stored = '[streams.sensors]\nretention = "limits"\nflush_on_write = false\n'
    assert check(path, QUIET + as_stored) == []


def test_exports_are_checked_by_their_plugins_and_reported_with_the_keys_of_the_file(path: Path) -> None:
    text = """
[[streams.a.export.s3]]
identifier = "one"
bucket = "my-bucket"
size_hint_byte = "5MiB"
[[streams.a.export.s3]]
identifier = "two"
bucket = 5
[[streams.a.export.s4]]
identifier = "three"
"""
    found = [line for line in check(path, QUIET + text) if line.startswith("error")]
    assert found[0] == (
        'error: x.toml:15: streams.a.export.s3[0].size_hint_byte = "5MiB": unknown key; did you mean '
        "`size_hint_bytes`?"
    )
    assert found[1] == (
        "error: x.toml:18: streams.a.export.s3[1].bucket = 5: must be a text in quotes, not a whole number"
    )
    assert "there is no exporter of kind 's4'" in found[2]


@pytest.mark.parametrize("uri", ["http://[::1", "https://", "http://office.example:99999/a", "http:///a"])
def test_a_uri_that_no_server_can_have_is_an_error(path: Path, uri: str) -> None:
    (found,) = check(path, QUIET + f'[[streams.a.export.http]]\nidentifier = "x"\nendpoint_url = "{uri}"\n')
    assert "x.toml:11: streams.a.export.http[0]: endpoint_url: " in found
    assert found.endswith("it is not like https://host:8443/path")


def test_too_short_a_list_or_text_is_reported_with_its_length(path: Path) -> None:
    export = '[[streams.a.export.http]]\nidentifier = "x"\nendpoint_url = "https://office.example/a"\n'
    (line,) = check(path, QUIET + export + "[[streams.a.export.http.reduce]]\ntopics = []\n")
    assert line.endswith(".reduce[0].topics = []: must have at least 1 entry")
    (line,) = check(path, QUIET + export.replace('"x"', '""'))
    assert line.endswith('.identifier = "": must have at least 1 character')


def test_an_enum_of_an_export_is_a_name_or_a_number_as_the_service_reads_it(path: Path) -> None:
    export = '[[streams.a.export.http]]\nidentifier = "x"\nendpoint_url = "https://office.example/a"\n'
    export += "export_format = "
    for right in ('"JSON_BATCHED"', "1"):
        assert check(path, QUIET + export + f"{right}\n") == []
    for wrong in ('"JSON"', "2", "true", "1.0"):
        (line,) = check(path, QUIET + export + f"{wrong}\n")
        assert line == (
            f"error: x.toml:14: streams.a.export.http[0].export_format = {wrong}: must be "
            '"RAW_NOT_BATCHED" (0) or "JSON_BATCHED" (1)'
        )


def test_an_error_of_a_plugins_own_check_has_the_keys_of_the_file(path: Path) -> None:
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nbucket = "my-bucket"\nregion = "eu-west-1"\n'
    (line,) = check(path, QUIET + export + 'kms_key_id = "key"\n', **KEYS)
    assert line == (
        "error: x.toml:11: streams.a.export.s3[0]: kms_key_id needs server_side_encryption `aws:kms` or "
        "`aws:kms:dsse`"
    )


def test_a_mistake_in_an_export_is_reported_once_and_makes_no_others(path: Path) -> None:
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nregion = "eu-west-1"\nbukcet = "my-bucket"\n'
    (line,) = check(path, QUIET + export, **KEYS)
    assert "bukcet" in line
    (line,) = check(path, QUIET + export.replace("bukcet", "bucket") + 'time_hint_millis = "soon"\n', **KEYS)
    assert line.startswith("error: x.toml:15: streams.a.export.s3[0].time_hint_millis")


def test_one_run_finds_every_mistake_wherever_it_is(path: Path) -> None:
    fragments = path.parent / "conf.d"
    fragments.mkdir()
    (fragments / "broken.toml").write_text("[[[")
    (path.parent / "data").write_text("in the way")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = f"""
[gateway]
data_dir = "data"
memory_dir = 5
[mqtt]
mode = "embedded"
listen = ["tcp://127.0.0.1:{port}", "tcp:/127.0.0.1", "udp://127.0.0.1:1"]
users_file = "users"
[http]
listen = "0.0.0.0:0"
[greengrass]
listen = ":8088"
[log]
level = "loud"
[streams.a]
topic = "x"
topics = ["ok/#", "a/#/b", "$SYS/x"]
[[streams.a.export.s3]]
identifier = "one"
size_hint_byte = "5MiB"
bucket = 7
compression = 8
[[streams.a.export.kinesis]]
identifier = "two"
"""
        found = [line.split(": ", 2)[1:] for line in check(path, text)]
    assert [(where, what[:24]) for where, what in found] == [
        ("x.toml:3", "gateway.data_dir: data i"),
        ("x.toml:4", "gateway.memory_dir = 5: "),
        ("x.toml:7", 'mqtt.listen = ["tcp://12'),
        ("x.toml:7", 'mqtt.listen = ["tcp://12'),
        ("x.toml:7", "mqtt.listen: cannot list"),
        ("x.toml:8", "mqtt.users_file: users c"),
        ("x.toml:10", "http.listen: every machi"),
        ("x.toml:12", 'greengrass.listen = ":80'),
        ("x.toml:14", 'log.level = "loud": must'),
        ("x.toml:16", 'streams.a.topic = "x": u'),
        ("x.toml:17", "streams.a.topics: 'a/#/b"),
        ("x.toml:17", "streams.a.topics: '$SYS/"),
        ("x.toml:20", "streams.a.export.s3[0].s"),
        ("x.toml:21", "streams.a.export.s3[0].b"),
        ("x.toml:22", "streams.a.export.s3[0].c"),
        ("x.toml:23", "streams.a.export.kinesis"),
        ("conf.d/broken.toml:1", "not valid TOML: Invalid "),
    ]
    findings = json.loads(streambridge("check", "-c", path, "--json").stdout)["findings"]
    places = [(Path(one["file"]).name, one["line"]) for one in findings]
    assert places[1] == ("x.toml", 4)
    assert places[-1] == ("broken.toml", 1)


def test_a_mistake_in_one_table_of_users_and_roles_hides_none_in_the_others(path: Path) -> None:
    text = QUIET.replace("[greengrass]", 'colour = "red"\n[greengrass]') + (
        "[[mqtt.acl]]\ndeny = {}\n"
        '[[mqtt.acl]]\nsubscribe = ["a/#/b"]\noperations = ["readMesages"]\n'
        '[[mqtt.user]]\nname = "ann"\nroles = ["reder"]\nclient_ids = ["*x"]\n'
        '[[mqtt.role]]\nname = "reader"\npublish = ["%x"]\n'
        '[[mqtt.role]]\nname = "reader"\n'
        '[[mqtt.listener]]\nname = "a"\nlisten = ["tcp://127.0.0.1:0"]\n'
        '[[mqtt.listener.user]]\nname = "bob"\nroles = ["writer"]\n'
        '[[mqtt.listener]]\nname = "a"\nlisten = ["tls://127.0.0.1:0"]\n'
    )
    found = [line.split(": ")[1:3] for line in check(path, text) if line.startswith("error")]
    assert [(where.partition(":")[2], what.partition(" ")[0]) for where, what in found] == [
        ("7", "mqtt.colour"),
        ("13", "mqtt.acl[0].deny"),
        ("15", "mqtt.acl[1].subscribe"),
        ("16", "mqtt.acl[1].operations"),
        ("19", "mqtt.user[0].roles"),
        ("20", "mqtt.user[0].client_ids"),
        ("23", "mqtt.role[0].publish"),
        ("25", "mqtt.role[1].name"),
        ("31", "mqtt.listener[0].user[0].roles"),
        ("33", "mqtt.listener[1].name"),
        ("34", "mqtt.listener[1].listen"),
    ]


def test_stored_streams_are_checked_too(path: Path, fill: Fill) -> None:
    fill([("a", b"x" * 5000)])
    data = fill(name="lost")
    for copy in (data / "streams" / "lost").glob("meta.*"):
        copy.write_bytes(b"?")
    text = '[streams.sensors]\nmax_size = 2048\npersistence = "Memory"\n[streams.lost]\n'
    upgrade, *found = check(path, QUIET + text)
    assert upgrade.startswith(
        'warning: x.toml:11: streams.sensors: the stream exists with retention = "limits"; '
    )
    stated = QUIET + text.replace("max_size", 'retention = "limits"\nmax_size')
    assert not any("retention" in line for line in check(path, stated)), "nothing changes"
    found_synced = check(path, QUIET + "[streams.sensors]\n")
    assert any(
        "flush_on_write = false; the next start or reload makes it true" in line for line in found_synced
    )
    check(path, QUIET + text)
    assert found[0].startswith("warning: x.toml:12: streams.sensors.max_size: the stream holds ")
    assert found[1].startswith("error: x.toml:13: streams.sensors.persistence: the stream exists with")
    assert found[2].startswith("error: x.toml:14: streams.lost: both stored copies of its definition")
    assert "`streambridge repair`" in found[2]


def test_a_disabled_export_that_holds_no_data_back_is_a_warning(path: Path) -> None:
    export = (
        '[[streams.a.export.http]]\nidentifier = "e"\nendpoint_url = "http://127.0.0.1:1/"\ndisabled = true\n'
    )
    (line,) = check(path, QUIET + '[streams.a]\nretention = "exported"\n' + export)
    assert "streams.a.export.http[0].disabled: a disabled export does not hold data back" in line
    assert check(path, QUIET + '[streams.a]\nretention = "limits"\n' + export) == []


def test_a_record_template_with_an_unknown_field_is_an_error(path: Path) -> None:
    export = """[[streams.a.export.http]]
identifier = "e"
endpoint_url = "http://127.0.0.1:1/"
record = '{"t":"{topik}"}'
"""
    (line,) = check(path, QUIET + "[streams.a]\n" + export)
    assert line.startswith("error: x.toml:12: streams.a.export.http[0]: record: {topik} is not a field")


RULES = """
[streams.a]
[[streams.a.export.s3]]
identifier = "x"
bucket = "plant"
region = "eu-central-1"
[[streams.a.export.s3.reduce]]
topics = ["a/#"]
longest_silence_millis = "10 minutes"
sampel = 2
[[streams.a.export.s3.reduce]]
deadband = { "/temp_c" = "much", "/speed" = "2%" }
drop = ["debug"]
"""


def test_mistakes_in_rules_are_all_reported_with_their_lines(path: Path) -> None:
    found = check(path, QUIET + RULES, **KEYS)
    begin = (QUIET + RULES).splitlines().index("[[streams.a.export.s3.reduce]]") + 1
    assert [line.split(": ", 3)[1:3] for line in found] == [
        [f"x.toml:{begin + 2}", 'streams.a.export.s3[0].reduce[0].longest_silence_millis = "10 minutes"'],
        [f"x.toml:{begin + 3}", "streams.a.export.s3[0].reduce[0].sampel = 2"],
        [f"x.toml:{begin + 5}", "streams.a.export.s3[0].reduce[1].deadband"],
        [f"x.toml:{begin + 6}", 'streams.a.export.s3[0].reduce[1].drop = ["debug"]'],
    ]
    assert "did you mean `sample`" in found[1]
    assert """'/temp_c' is 'much'; write a number""" in found[2]


def test_rules_that_cut_batches_into_pieces_are_a_warning_and_on_s3_they_do_not(path: Path) -> None:
    rules = RULES.replace("10 minutes", "10m").replace("sampel", "sample").replace('"much"', "1")
    rules = rules.replace('"debug"', '"/debug"')
    assert check(path, QUIET + rules, **KEYS) == []
    (path.parent / "plugins").mkdir()
    (path.parent / "plugins" / "mine.py").write_text(
        "from bridge import BatchedConfig, BatchLimits, Exporter, hookimpl\n"
        "class Mine(Exporter):\n    kind, Config = 'mine', BatchedConfig\n"
        "    limits = BatchLimits(contiguous=True)\n    def export(self, batch): ...\n"
        "@hookimpl\ndef register_exporters(register): register(Mine)\n"
    )
    export = '[[streams.a.export.mine]]\nidentifier = "x"\n[[streams.a.export.mine.reduce]]\nsample = 2\n'
    (line,) = check(path, QUIET + '[export]\nplugin_dirs = ["plugins"]\n' + export)
    assert line.startswith("warning: x.toml")
    assert "reduce: a batch of this kind holds consecutive numbers" in line


def test_two_exports_to_one_place_that_leave_out_different_messages_are_an_error(path: Path) -> None:
    def exports(*more: str, stream: str = "a") -> str:
        head = 'bucket = "plant"\nregion = "eu-central-1"\n'
        return "".join(
            f'[[streams.{stream}.export.s3]]\nidentifier = "{n}"\n{head}{each}\n'
            for n, each in enumerate(more)
        )

    wanted = 'topics = ["a/#"]\n'
    good = exports(wanted, wanted, 'prefix = "x"') + exports("", stream="b")
    assert check(path, QUIET + good, **KEYS) == []
    (line,) = check(path, QUIET + exports(wanted + 'prefix = "x"', 'prefix = "x/"'), **KEYS)
    assert line.startswith("error: x.toml:")
    assert "the export 0 of this stream writes to the same place, and its topics or reduce leave out" in line


def test_listeners_without_a_password_on_the_network_are_warnings(path: Path) -> None:
    text = QUIET.replace('[greengrass]\nlisten = ""', '[greengrass]\nlisten = "0.0.0.0:0"')
    found = check(path, text.replace('[http]\nlisten = ""', '[http]\nlisten = "[::]:0"'))
    assert [line[: line.index(" has access to")] for line in found] == [
        "warning: x.toml:8: greengrass.listen: every machine that reaches 0.0.0.0:0",
        "warning: x.toml:10: http.listen: every machine that reaches [::]:0",
    ]


def test_one_identifier_for_two_exports_is_an_error(path: Path) -> None:
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nbucket = "my-bucket"\n'
    found = [line for line in check(path, QUIET + export * 2) if line.startswith("error")]
    assert found == [
        "error: x.toml:15: streams.a.export.s3[1].identifier: another export has the identifier 'x' too; "
        "choose another"
    ]


def test_an_export_that_appends_to_its_own_stream_is_an_error(path: Path) -> None:
    text = """
[[streams.a.export.s3TaskExecutor]]
identifier = "one"
dead_letter_stream = "a"
[[streams.a.export.s3TaskExecutor]]
identifier = "two"
status_config = { status_stream_name = "a" }
"""
    found = [line for line in check(path, QUIET + text) if line.startswith("error")]
    why = "'a' is the exported stream itself: each message in it would append another; name another stream"
    assert found == [
        f"error: x.toml:14: streams.a.export.s3TaskExecutor[0].dead_letter_stream: {why}",
        f"error: x.toml:17: streams.a.export.s3TaskExecutor[1].status_config.status_stream_name: {why}",
    ]


def test_exports_whose_dead_letters_go_round_are_an_error(path: Path) -> None:
    text = """
[[streams.a.export.s3TaskExecutor]]
identifier = "one"
dead_letter_stream = "b"
[[streams.b.export.s3TaskExecutor]]
identifier = "two"
dead_letter_stream = "a"
[streams.c]
"""
    found = [line for line in check(path, QUIET + text) if line.startswith("error")]
    why = "a rejected message could go round without end; name a stream that leads nowhere"
    key = "export.s3TaskExecutor[0].dead_letter_stream"
    assert found == [
        f"error: x.toml:14: streams.a.{key}: exports lead from 'b' back to this stream (b -> a): {why}",
        f"error: x.toml:17: streams.b.{key}: exports lead from 'a' back to this stream (a -> b): {why}",
    ]
    lines = check(path, QUIET + text.replace('= "a"\n[streams.c]', '= "c"\n[streams.c]'))
    assert not any(line.startswith("error") for line in lines)


def test_exports_without_credentials_are_a_warning(path: Path) -> None:
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nbucket = "my-bucket"\n'
    lines = check(path, QUIET + export)
    assert any("no AWS credentials were found" in line for line in lines)
    assert any("no region is set" in line for line in lines)
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "eu-central-1"}
    assert check(path, QUIET + export, **known) == []
    del known["AWS_DEFAULT_REGION"]
    assert check(path, QUIET + export + 'region = "eu-west-1"\n', **known) == []
    http = '[[streams.a.export.http]]\nidentifier = "x"\nendpoint_url = "http://127.0.0.1/"\n'
    assert check(path, QUIET + http) == []


def test_a_topic_that_cannot_be_bound_is_an_error(path: Path) -> None:
    (line,) = check(path, QUIET + '[streams.a]\ntopics = ["ok/#", "a/#/b"]\n')
    assert line.startswith("error: x.toml:12: streams.a.topics: 'a/#/b' is not a topic filter")


def test_a_plugin_that_does_not_load_is_an_error(path: Path) -> None:
    drop_in = path.parent / "plugins"
    drop_in.mkdir()
    (drop_in / "broken.py").write_text("import no_such_module\n")
    (line,) = check(path, QUIET + '[export]\nplugin_dirs = ["plugins"]\n')
    assert line.startswith("error: x.toml:12: export.plugin_dirs: plugin broken ")


def test_a_unit_for_an_option_that_is_a_plain_number_is_an_error(path: Path) -> None:
    (path.parent / "plugins").mkdir()
    (path.parent / "plugins" / "mine.py").write_text(
        "from bridge import ExportConfig, Exporter, hookimpl\n"
        "class Config(ExportConfig, frozen=True):\n    flush_millis: int = 0\n"
        "class Mine(Exporter):\n    kind, Config = 'mine', Config\n    def export(self, batch): ...\n"
        "@hookimpl\ndef register_exporters(register): register(Mine)\n"
    )
    text = QUIET + '[export]\nplugin_dirs = ["plugins"]\n[[streams.a.export.mine]]\nidentifier = "x"\n'
    assert check(path, text + "flush_millis = 2000\n") == []
    (line,) = check(path, text + 'flush_millis = "2s"\n')
    assert 'streams.a.export.mine[0].flush_millis = "2s": must be a whole number, not a text' in line


def test_a_plugin_without_hooks_is_an_error(path: Path) -> None:
    drop_in = path.parent / "plugins"
    drop_in.mkdir()
    (drop_in / "_helper.py").write_text("")  # no plugin by its name
    text = QUIET + '[export]\nplugin_dirs = ["plugins"]\n'
    assert check(path, text) == []
    (drop_in / "mine.py").write_text("def register_exporters(register): pass\n")
    (line,) = check(path, text)
    assert line.startswith("error: x.toml:12: export.plugin_dirs: plugin mine ")
    assert "register_exporters (mine.py, line 1) is not marked; write @hookimpl above it" in line


def test_a_plugin_directory_that_is_missing_is_an_error_if_it_is_named(path: Path) -> None:
    assert check(path, QUIET) == []
    (line,) = check(path, QUIET + '[export]\nplugin_dirs = ["plugins"]\n')
    assert line.startswith("error: x.toml:12: export.plugin_dirs: there is no directory ")


def test_a_path_with_a_name_that_is_too_long_is_an_error_and_hides_no_other(path: Path) -> None:
    long = "x" * 300
    text = (
        f'[audit]\nfile = "{long}"\njournald = true\njournald_socket = "{long}"\n'
        f'[export]\nplugin_dirs = ["{long}"]\n[log]\nlevel = "loud"\n'
    )
    found = "\n".join(check(path, QUIET + text))
    for key in ("audit.file", "audit.journald", "export.plugin_dirs", "log.level"):
        assert f": {key}" in found, found


def test_parquet_without_pyarrow_is_an_error(path: Path, tmp_path: Path) -> None:
    absent = tmp_path / "without"  # found first, and hides what is installed
    absent.mkdir()
    hide = "import sys, importlib.machinery as m\nfind = m.PathFinder.find_spec\n"
    hide += "m.PathFinder.find_spec = classmethod(lambda c, n, *a: None if n == 'pyarrow' else find(n, *a))\n"
    (absent / "sitecustomize.py").write_text(hide)
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nbucket = "my-bucket"\nregion = "eu-west-1"\n'
    text = QUIET + export + 'format = "parquet"\n'
    assert check(path, text, **KEYS) == []
    (line,) = check(path, text, **KEYS, PYTHONPATH=str(absent))
    assert line.startswith("error: x.toml:11: streams.a.export.s3[0]: `format = ")
    assert line.endswith(f"needs pyarrow; `pip install '{Path(__file__).parents[2]}[parquet]'`")


@pytest.mark.parametrize(
    "bucket", ["My_Bucket", "my bucket", "a..b", "192.168.5.4", "-mine", "x" * 64, "a/b"]
)
def test_a_bucket_that_cannot_be_is_an_error(path: Path, bucket: str) -> None:
    export = f'[[streams.a.export.s3]]\nidentifier = "x"\nregion = "eu-west-1"\nbucket = "{bucket}"\n'
    (line,) = check(path, QUIET + export, **KEYS)
    assert line.startswith(
        f"error: x.toml:14: streams.a.export.s3[0].bucket: '{bucket}' is not a valid bucket name"
    )


def test_buckets_elsewhere_and_access_points_are_taken_as_they_are(path: Path) -> None:
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nregion = "eu-west-1"\nbucket = "{}"\n'
    point = export.format("arn:aws:s3:eu-west-1:123456789012:accesspoint/mine")
    assert check(path, QUIET + point, **KEYS) == []
    with socket.create_server(("127.0.0.1", 0)) as other:
        elsewhere = f'endpoint_url = "http://127.0.0.1:{other.getsockname()[1]}"\n'
        assert check(path, QUIET + export.format("My_Bucket") + elsewhere, **KEYS) == []


@pytest.mark.parametrize(
    ("region", "level", "hint"),
    [
        ("eu west 1", "error", "write it like eu-west-1"),
        ("europe-west-1", "error", "did you mean 'eu-west-1'?"),
        ("eu-wset-1", "warning", "did you mean 'eu-west-1'?"),
    ],
)
def test_a_region_that_cannot_be_is_found(path: Path, region: str, level: str, hint: str) -> None:
    export = '[[streams.a.export.s3]]\nidentifier = "x"\nbucket = "my-bucket"\n'
    (line,) = check(path, QUIET + export + f'region = "{region}"\n', **KEYS)
    assert line.startswith(f"{level}: x.toml:14: streams.a.export.s3[0].region: ")
    assert line.endswith(hint)
    (line,) = check(path, QUIET + f'[aws]\nregion = "{region}"\n')
    assert line.startswith(f"{level}: x.toml:12: aws.region: ")


def test_rules_for_users_that_are_not_there_are_a_warning(path: Path) -> None:
    text = QUIET + '[[mqtt.acl]]\nuser = "pmup"\npublish = ["#"]\n[[mqtt.acl]]\nuser = "*"\n'
    (line,) = check(path, text)
    assert line.startswith(
        "warning: x.toml:12: mqtt.acl[0].user: nobody can log in as 'pmup': there is no users_file"
    )
    users = path.parent / "users"
    users.write_text("pump:$7$1000$c2FsdA==$aGFzaA==\n")
    users.chmod(0o600)
    text = text.replace("[mqtt]\n", '[mqtt]\nusers_file = "users"\n')
    (line,) = check(path, text)
    assert line.startswith("warning: x.toml:13: mqtt.acl[0].user: nobody can log in as 'pmup': it is not in ")
    assert line.endswith("did you mean 'pump'?")
    assert check(path, text.replace("pmup", "pump")) == []


def test_a_data_directory_that_cannot_be_made_is_an_error(path: Path) -> None:
    for place, why in (
        ("/proc/data", "no directory can be created in /proc"),
        ("x" * 300, "File name too long"),
    ):
        (line,) = check(path, QUIET.replace('data_dir = "data"', f'data_dir = "{place}"'))
        assert line.startswith("error: x.toml:3: gateway.data_dir: ")
        assert why in line
    (path.parent / "data").symlink_to("gone")
    (line,) = check(path, QUIET)
    assert line.startswith("error: x.toml:3: gateway.data_dir: data is a link to gone, which does not exist")


def test_two_listeners_of_ours_are_found_beside_the_running_service_and_at_all_addresses(path: Path) -> None:
    text = (
        QUIET.replace("tcp://127.0.0.1:0", "tcp://0.0.0.0:1883")
        .replace('[http]\nlisten = ""', '[http]\nlisten = "127.0.0.1:1883"')
        .replace("[mqtt]", "[mqtt]\nallow_anonymous = true")
    )
    lock = path.parent / "data" / "lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (line,) = check(path, text)
    assert line == (
        "error: x.toml:11: http.listen: cannot listen at 127.0.0.1:1883: mqtt.listen of this configuration "
        "listens there too; choose another port"
    )


def test_certificates_are_checked_for_their_dates(path: Path) -> None:
    now = datetime.now(UTC)
    long, soon, past = (timedelta(days=days) for days in (4000, 10, -1))
    for ends, expected in ((long, None), (soon, "warning"), (past, "error")):
        lines = check(path, tls(*certificate(path.parent, now - timedelta(days=20), now + ends)))
        assert [line.split(":")[0] for line in lines] == ([expected] if expected else [])
    assert "mqtt.tls.cert: server.pem is only valid from" in lines[0]


def test_a_certificate_beyond_2049_is_read_too(path: Path) -> None:
    begins = datetime(2020, 1, 1, tzinfo=UTC)
    assert check(path, tls(*certificate(path.parent, begins, datetime(2090, 1, 1, tzinfo=UTC)))) == []


def test_a_key_that_does_not_match_its_certificate_is_an_error(path: Path) -> None:
    begins, ends = datetime(2020, 1, 1, tzinfo=UTC), datetime(2090, 1, 1, tzinfo=UTC)
    cert, _ = certificate(path.parent, begins, ends)
    _, key = certificate(path.parent, begins, ends, name="other")
    (line,) = check(path, tls(cert, key))
    assert "mqtt.tls.key: other.key does not match server.pem" in line


def test_a_secret_that_every_user_can_read_is_a_warning(path: Path) -> None:
    secret = path.parent / "password"
    secret.write_text("x")
    secret.chmod(0o644)
    text = QUIET + '[mqtt.external]\npassword_file = "password"\n'
    (line,) = check(path, text)
    assert line.startswith(
        "warning: x.toml:12: mqtt.external.password_file: every user of this machine can read"
    )
    secret.chmod(0o600)
    assert check(path, text) == []
    secret.unlink()
    (line,) = check(path, text)
    assert line.endswith("password cannot be read: No such file or directory")


def test_a_users_file_is_read(path: Path) -> None:
    users = path.parent / "users"
    users.write_text("me:secret\n")
    users.chmod(0o600)
    (line,) = check(path, QUIET.replace("[mqtt]\n", '[mqtt]\nusers_file = "users"\n'))
    assert "line 1: not name:$7$" in line


def test_a_mistake_in_a_file_of_logins_is_reported_once_with_one_remedy(path: Path) -> None:
    users, keys = path.parent / "users", path.parent / "keys"
    text = QUIET.replace("[mqtt]\n", '[mqtt]\nusers_file = "users"\n')
    text += '[firehose]\nlisten = "127.0.0.1:0"\naccess_keys_file = "keys"\n'
    about_users, about_keys = check(path, text)
    assert about_users.endswith("No such file or directory; create it with `streambridge users add NAME`")
    assert "No such file or directory; create it with `install -m 0640 " in about_keys
    users.write_text("pump:$7$1000$c2FsdA==$aGFzaA==\n")
    keys.write_text("AKIDPLANT 0123456789abcdef line-7\n")
    for file in (users, keys):
        file.chmod(0o666)
    about_users, about_keys = check(path, text)
    assert about_users.endswith("users other than its owner can write to it; chmod g-w,o= users")
    assert about_keys.endswith("users other than its owner can write to it; chmod g-w,o= keys")
    users.chmod(0o640)
    keys.chmod(0o644)
    (about_keys,) = check(path, text)
    assert about_keys.endswith("chmod g-w,o= keys")
    keys.chmod(0o640)
    assert check(path, text) == []


def test_a_configuration_that_others_could_change_is_an_error_and_is_not_obeyed(path: Path) -> None:
    directory = path.parent / "conf.d"
    directory.mkdir()
    fragment, target = directory / "a.toml", path.parent / "elsewhere" / "a.toml"
    target.parent.mkdir()
    for one in (path, target):
        one.write_text("")
        one.chmod(0o644)
    fragment.symlink_to(target)
    check(path, QUIET)
    assert load(path)
    for open_to_all in (path, directory, target, target.parent):
        mode = open_to_all.stat().st_mode
        open_to_all.chmod(0o777 if open_to_all.is_dir() else 0o666)
        why = f"not obeyed: {open_to_all} is writable by group or others; chmod go-w {open_to_all}"
        with pytest.raises(ConfigError) as refused:
            load(path)
        assert why in str(refused.value)
        assert any(line.endswith(why.replace(f"{path.parent}/", "")) for line in check(path, QUIET))
        open_to_all.chmod(mode)
    if os.geteuid() == 0:
        for foreign in (path, directory, fragment, target, target.parent):
            os.chown(foreign, 12345, 0, follow_symlinks=False)
            with pytest.raises(ConfigError, match="belongs to user 12345; only root may own it"):
                load(path)
            os.chown(foreign, 0, 0, follow_symlinks=False)
    assert load(path)


def test_a_listener_that_mode_external_does_not_open_is_a_warning(path: Path) -> None:
    text = QUIET.replace("[mqtt]", '[mqtt]\nmode = "external"')
    (line,) = check(path, text)
    assert line.startswith('warning: x.toml:7: mqtt.listen: not used: mode = "external" opens no listener')
    assert "remove this line" in line
    assert check(path, text.replace('listen = ["tcp://127.0.0.1:0"]', "")) == []


def test_a_setting_that_has_no_effect_any_more_is_a_warning(path: Path) -> None:
    (line,) = check(path, QUIET + "[mqtt.limits]\nhandshakes_per_second = 200\n")
    assert "mqtt.limits.handshakes_per_second: not used any more" in line
    assert line.startswith("warning: ")


def test_open_streams_on_the_network_are_a_warning_with_both_remedies(path: Path) -> None:
    text = QUIET.replace('[greengrass]\nlisten = ""', '[greengrass]\nlisten = "0.0.0.0:0"')
    (line,) = check(path, text)
    assert line.startswith("warning: x.toml:8: greengrass.listen: every machine that reaches 0.0.0.0:0 has")
    assert line.endswith("listen on 127.0.0.1, or set greengrass.token_file")
    (path.parent / "token").write_text("secret")
    (path.parent / "token").chmod(0o600)
    assert check(path, text.replace('0.0.0.0:0"', '0.0.0.0:0"\ntoken_file = "token"')) == []


def test_the_firehose_listener_is_checked_with_its_keys(path: Path) -> None:
    firehose = '[firehose]\nlisten = "0.0.0.0:0"\n'
    (line,) = check(path, QUIET + firehose)
    assert "`access_keys_file` is missing" in line
    keys = path.parent / "keys"
    keys.write_text("AKIDPLANT 0123456789abcdef line-7\n")
    keys.chmod(0o600)
    rule = '[[mqtt.acl]]\nuser = "line-7"\npublish = ["streams/plant"]\n'
    text = QUIET + firehose + 'access_keys_file = "keys"\n' + rule
    (line,) = check(path, text)
    assert line.startswith(
        "warning: x.toml:12: firehose.listen: records on their way to 0.0.0.0:0 can be read"
    )
    keys.write_text("AKIDPLANT short\n")
    assert any("keys, line 1: a secret has 16 to 256 characters" in line for line in check(path, text))


@contextmanager
def server(directory: Path, answer: bytes, *, secure: bool) -> Iterator[int]:
    """A server that answers the first bytes of each connection and closes it; gives its port."""
    context = None
    if secure:
        now = datetime.now(UTC)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate(directory, now - timedelta(1), now + timedelta(1)))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                connection = context.wrap_socket(self.request, server_side=True) if context else self.request
                # As brokers and web servers do: who begins with nonsense is not answered.
                if connection.recv(64)[:1] in (b"\x10", b"H"):
                    connection.sendall(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("url", ["http://", "https://h:99999", "http://[::1", "https:///in"])
def test_a_url_that_no_server_can_have_is_named_with_its_line(path: Path, url: str) -> None:
    text = f'''{QUIET}
[aws]
region = "eu-west-1"
endpoint_url = "{url}"
[[streams.a.export.kinesis]]
identifier = "x"
kinesis_stream_name = "k"
endpoint_url = "{url}"
'''
    found = check(path, text)
    wrong = [line for line in found if "no server has such a URL; it is like https://host:8443" in line]
    assert [line.split(": ")[1:3] for line in wrong] == [
        ["x.toml:14", "aws.endpoint_url"],
        ["x.toml:18", "streams.a.export.kinesis[0].endpoint_url"],
    ]


@pytest.mark.parametrize("secure", [True, False], ids=["plain on TLS", "TLS on plain"])
def test_destinations_at_the_wrong_port_are_named(path: Path, secure: bool) -> None:
    quiet = QUIET.replace("[mqtt]", '[mqtt]\nmode = "external"').replace('listen = ["tcp://127.0.0.1:0"]', "")
    text = f"""{quiet}
[aws]
endpoint_url = "http{{s}}://127.0.0.1:{{web}}"
[mqtt.external]
url = "mqtt{{s}}://127.0.0.1:{{broker}}"
[[streams.a.export.http]]
identifier = "x"
endpoint_url = "http{{s}}://127.0.0.1:{{web}}/in"
"""
    right, wrong = ("s", "") if secure else ("", "s")
    with (
        server(path.parent, b"\x20\x02\x00\x00", secure=secure) as broker,
        server(path.parent, b"HTTP/1.0 200 OK\r\n\r\n", secure=secure) as web,
    ):
        assert check(path, text.format(s=right, broker=broker, web=web)) == []
        found = check(path, text.format(s=wrong, broker=broker, web=web))
    speaks = "speaks only TLS; write" if secure else "does not speak TLS; write"
    rest = "or use the other port"
    assert found == [
        f"error: x.toml:14: aws.endpoint_url: 127.0.0.1:{web} {speaks} http{right}://, {rest}",
        f"error: x.toml:16: mqtt.external.url: 127.0.0.1:{broker} {speaks} mqtt{right}://, {rest}",
        f"error: x.toml:19: streams.a.export.http[0].endpoint_url: 127.0.0.1:{web} {speaks} "
        f"http{right}://, {rest}",
    ]
    assert check(path, text.format(s=wrong, broker=broker, web=web)) == []  # nobody is there now


def test_a_stream_for_refused_messages_that_is_not_there_is_a_warning(path: Path, fill: Fill) -> None:
    text = QUIET.replace("[mqtt]", '[mqtt]\nrefused_stream = "refused"')
    (found,) = check(path, text)
    assert found.startswith("warning: x.toml:6: mqtt.refused_stream: there is no stream 'refused'; until")
    assert check(path, text + "[streams.refused]\n") == []
    (found,) = check(path, text.replace("[mqtt]", '[mqtt]\nmode = "external"').replace("listen = [", "#"))
    assert "not used" in found
    fill(name="refused")
    assert check(path, text) == []


@pytest.mark.parametrize("binding", ["any", "user", "prefix"])
def test_rights_of_a_client_id_that_anybody_may_choose_are_a_warning(path: Path, binding: str) -> None:
    rules = """
[[mqtt.acl]]
publish = ["in/%u/#", "streambridge/%c/+"]
[[mqtt.acl]]
subscribe = ["commands/%c/#"]
"""
    found = check(path, QUIET.replace("[greengrass]", f'client_ids = "{binding}"\n[greengrass]') + rules)
    assert len(found) == (binding == "any"), found
    assert all(line.startswith("warning: x.toml:") and "commands/%c/#" in line for line in found)


def test_client_ids_that_two_listeners_bind_to_different_users_are_a_warning(path: Path) -> None:
    (path.parent / "plant").write_text("ann:x\n")
    text = QUIET.replace('listen = ["tcp://127.0.0.1:0"]', "allow_anonymous = true") + (
        '[[mqtt.user]]\nname = "ann"\nclient_ids = ["plc-*", "ann"]\n'
        '[[mqtt.listener]]\nname = "same"\nlisten = ["tcp://127.0.0.1:0"]\n'
        '[[mqtt.listener.user]]\nname = "ann"\nclient_ids = ["plc-1"]\n'
        '[[mqtt.listener.user]]\nname = "bob"\nclient_ids = ["plc-2", "ann-2", "p"]\n'
        '[[mqtt.listener]]\nname = "plant"\nlisten = ["tcp://127.0.0.1:0"]\nusers_file = "plant"\n'
        '[[mqtt.listener.user]]\nname = "ann"\nclient_ids = ["a*"]\n'
    )
    found = [line for line in check(path, text) if "all listeners share the client ids" in line]
    assert found == [
        f"warning: x.toml:{line}: mqtt.listener[{listener}].user[{user}].client_ids: {one!r} is bound to "
        f"{whose!r} in {where}.user too, and all listeners share the client ids: whoever comes second is "
        "refused; give each its own ids"
        for line, listener, user, one, whose, where in (
            (22, 0, 1, "plc-2", "ann", "mqtt"),
            (29, 1, 0, "a*", "ann", "mqtt"),
        )
    ]


OUTLOOK = """
[streams.kept]
max_size = "1MiB"
[[streams.kept.export.http]]
identifier = "lake"
endpoint_url = "http://127.0.0.1:1/"
[streams.bare]
[streams.ring]
strategy_on_full = "OverwriteOldestData"
max_size = "1MiB"
[[streams.ring.export.http]]
identifier = "lake"
endpoint_url = "http://127.0.0.1:1/"
[streams.old]
retention = "limits"
[[streams.old.export.http]]
identifier = "lake"
endpoint_url = "http://127.0.0.1:1/"
[streams.short]
time_to_live = "1h"
[[streams.short.export.http]]
identifier = "lake"
endpoint_url = "http://127.0.0.1:1/"
"""


def test_it_says_of_each_stream_what_happens_when_it_is_full_and_on_a_day_without_the_link(
    path: Path,
) -> None:
    path.write_text(QUIET + OUTLOOK)
    done = streambridge("check", "-c", path, "--rate", "600/m", "--message", "1kB", "--json", env=OFFLINE)
    said = {one["name"]: one for one in json.loads(done.stdout)["streams"]}
    assert said["kept"]["whenFull"].startswith(
        "frees what lake delivered; only if that is not enough, rejects"
    )
    assert said["kept"]["outage"].endswith('it rejects new messages; a day takes max_size = "893.2MiB"')
    assert 90 < said["kept"]["lasts"] < 105, "1 MiB of 1 kB ten times a second"
    assert said["bare"]["whenFull"].startswith("rejects new messages for good: no enabled export frees")
    assert said["bare"]["outage"] == ""
    assert said["ring"]["whenFull"] == "overwrites its oldest messages, exported or not"
    assert "it loses its oldest messages; a day takes" in said["ring"]["outage"]
    assert said["old"]["whenFull"].endswith('retention = "exported" does')
    assert "after 1h it loses its oldest messages" in said["short"]["outage"]
    text = streambridge("check", "-c", path, env=OFFLINE).stdout
    assert "with 10/s of 200B in each stream (--rate, --message):" in text
    assert "  bare: a power cut costs nothing; when full, rejects new messages for good: " in text
    assert "holds a day without the link" in text
    assert streambridge("check", "-c", path, "--rate", "fast").returncode == 2


def test_a_key_of_a_table_inside_is_suggested_where_it_was_written_outside(path: Path) -> None:
    found = check(path, QUIET + '[streams.a]\nmax_age = "1d"\nmax_messages = 5\nmaxsize = 3\n')
    assert [line.partition("did you mean ")[2] for line in found] == [
        "`limits.max_age` or `time_to_live` (whole segments)?",
        "`limits.max_messages`?",
        "`max_size`?",
    ]
