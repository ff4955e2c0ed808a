"""What somebody reads who has made a mistake: each message names the place and the remedy."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path

import pytest

from bridge.config.checks import examine
from tests.cli.conftest import COMMAND, Fill, environment, streambridge
from tests.cli.test_check import QUIET, WITHOUT_RIGHTS

ME = pwd.getpwuid(os.geteuid()).pw_name
USER = "pump:$7$1000$c2FsdA==$aGFzaA==\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.toml"


def test_a_users_file_that_the_service_may_not_read_is_reported_with_its_user_and_the_remedy(
    path: Path,
) -> None:
    users = path.parent / "users"
    users.write_text(USER)
    users.chmod(0)
    path.write_text(QUIET.replace("[mqtt]", '[mqtt]\nusers_file = "users"'))
    for command in ("run", "check"):
        done = streambridge(command, "-c", path, prefix=WITHOUT_RIGHTS)
        assert done.returncode == 78
        assert (done.stdout + done.stderr).endswith(
            f"{path}:6: mqtt.users_file: {users} cannot be read: Permission denied for user {ME}; "
            f"chmod u+r {users}\n"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_of_another_user_is_given_to_the_user_of_the_service(path: Path) -> None:
    users, closed = path.parent / "users", path.parent / "closed"
    users.write_text(USER)
    users.chmod(0o600)
    os.chown(users, 12345, 12345)
    done = streambridge("users", "list", "--file", users, prefix=WITHOUT_RIGHTS)
    assert done.stderr == (
        f"streambridge: mqtt.users_file {users}: Permission denied for user {ME}; chown {ME} {users}\n"
    )
    closed.mkdir(mode=0)
    done = streambridge("users", "list", "--file", closed / "users", prefix=WITHOUT_RIGHTS)
    assert done.stderr.endswith(f"Permission denied for user {ME}; chmod a+x {closed}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_is_warned_of_files_that_the_user_of_the_service_may_not_read(path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    data, users = path.parent / "data", path.parent / "users"
    data.mkdir()
    os.chown(data, nobody.pw_uid, nobody.pw_gid)
    users.write_text(USER)
    users.chmod(0o600)
    path.write_text(QUIET.replace("[mqtt]", '[mqtt]\nusers_file = "users"'))
    done = streambridge("check", "-c", path)
    assert done.returncode == 0
    assert f"warning: {path}:6: mqtt.users_file: {users} cannot be read by user nobody" in done.stdout
    assert f"; chown nobody {users}" in done.stdout
    # Its own files are no use to somebody else: the user of the service is.
    os.chown(users, 12345, 12345)
    done = streambridge("check", "-c", path, prefix=WITHOUT_RIGHTS)
    assert f"Permission denied for user {ME}; run this as user nobody, as the service does" in done.stdout


def test_a_configuration_that_cannot_be_read_is_no_wrong_usage(path: Path) -> None:
    path.write_text("")
    path.chmod(0)
    closed, broken = path.parent / "closed", path.parent / "broken.toml"
    closed.mkdir(mode=0)
    broken.write_bytes(b"\n\xff\n")
    for given, what in (
        (path, f"{path}: cannot be read: Permission denied for user {ME}; chmod u+r {path}"),
        (closed / "x.toml", f"cannot be read: Permission denied for user {ME}; chmod a+x {closed}"),
        (path.parent, f"{path.parent}: cannot be read: it is a directory; name a file"),
        (broken, f"{broken}:2: not valid UTF-8; save the file as UTF-8"),
        (path.parent / "gone.toml", "gone.toml: there is no such file; give another one with --config, or"),
    ):
        for command in (["run"], ["check"], ["streams", "list"]):
            done = streambridge(*command, "-c", given, prefix=WITHOUT_RIGHTS)
            assert done.returncode == 78
            assert what in done.stdout + done.stderr
            assert len((done.stdout + done.stderr).splitlines()) == 1
    closed.chmod(0o700)


def test_fragments_that_cannot_be_read_are_not_left_out(path: Path) -> None:
    """They may have the rules."""
    path.write_text(QUIET)
    fragments = path.parent / "conf.d"
    fragments.mkdir(mode=0)
    for command in ("run", "check"):
        done = streambridge(command, "-c", path, prefix=WITHOUT_RIGHTS)
        assert done.returncode == 78
        assert (
            f"{fragments}: cannot be read: Permission denied for user {ME}; chmod u+r {fragments}\n"
            in done.stdout + done.stderr
        )
    fragments.chmod(0o700)


def test_two_tables_of_one_name_are_both_named(path: Path) -> None:
    budget = '[[mqtt.budget]]\nname = "slow"\nper = "user"\nconnections = {}\n'
    path.write_text(QUIET + budget.format(1) + budget.format(2))
    done = streambridge("check", "-c", path)
    assert done.returncode == 78
    assert done.stdout == (
        f'error: {path}:16: mqtt.budget[1].name = "slow": another has this name (mqtt.budget[0], '
        f"{path}:12); choose another\n"
    )


def test_a_start_that_fails_reports_all_mistakes_as_check_does(path: Path) -> None:
    text = QUIET.replace("[mqtt]", '[mqtt]\nusers_file = "users"\n{}').replace(
        '[http]\nlisten = ""', '[http]\nlisten = ""\n[audit]\nfile = "gone/audit"\n[log]\n{}'
    )
    text += '[mqtt.tls]\ncert = "cert"\nkey = "key"\n[streams.a]\ntopics = ["a/#/b", "a"]\nmax_size = "{}"\n'
    for mistakes, number in ((("", "", "1GiB"), 5), (("lisen = 1", 'level = "loud"', "1 GO"), 8)):
        path.write_text(text.format(*mistakes))
        found = streambridge("check", "-c", path)
        assert found.stdout.count("error: ") == number
        done = streambridge("run", "-c", path)
        assert done.returncode == 78
        lines = [line for line in done.stderr.splitlines() if line.startswith("streambridge: ")]
        assert "".join(f"{line.replace('streambridge', 'error', 1)}\n" for line in lines) == "".join(
            line for line in found.stdout.splitlines(True) if line.startswith("error: ")
        )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("a/#/b", "level 2 of 3 is `#`, which may only be the last; write a/# or a/+/b"),
        ("#/a#", "level 1 of 2 is `#`, which may only be the last; write #"),
        ("a+/b", "level 1 of 2, 'a+', has a `+`, which stands for a whole level; write +/b"),
        ("x/b#", "level 2 of 2, 'b#', has a `#`, which stands for a whole level; write x/#"),
        ("", "it is empty; write # for all topics"),
        ("x" * 5000, "it has 5000 characters and 1 levels; at most 4096 and 64 are possible"),
        ("/" * 99, "it has 99 characters and 100 levels; at most 4096 and 64 are possible"),
        ("a/b\0", "level 2 of 2 has a NUL character; remove it"),
        ("$share/g/a/#", "only the SUBSCRIBE of a client has $share/<group>/; write a/#"),
        (
            "$share/g",
            "only the SUBSCRIBE of a client has $share/<group>/; write the filter alone, such as a/#",
        ),
    ],
)
def test_a_wrong_topic_filter_is_shown_with_the_level_and_a_right_one(
    path: Path, given: str, what: str
) -> None:
    quoted = json.dumps(given)
    path.write_text(
        f"{QUIET}[[mqtt.acl]]\npublish = [{quoted}]\n[streams.a]\ntopics = [{quoted}]\n"
        '[[upstream]]\nname = "u"\nurl = "mqtt://broker.invalid"\n'
        f"[[upstream.mapping]]\nfilter = {quoted}\n"
    )
    found = [one.what for one in examine(path)[1]]
    assert len(found) == 3
    assert all(one.endswith(f"is not a topic filter: {what}") for one in found)
    if "\0" not in given:  # no argument of a command can have it
        done = streambridge("streams", "read", "a", "--topic", given)
        assert done.returncode == 2
        assert f"is not a topic filter: {what}\n" in done.stderr
        assert len(done.stderr) < 500


def test_a_topic_of_the_broker_is_refused_to_a_stream_with_the_reason(path: Path) -> None:
    path.write_text(QUIET + '[streams.a]\ntopics = ["$SYS/#", "streambridge/x"]\n')
    assert [one.what.partition(".topics: ")[2] for one in examine(path)[1]] == [
        "'$SYS/#': topics below $SYS/ belong to the broker, and no stream stores them",
        "'streambridge/x': topics below streambridge/ belong to the broker, and no stream stores them",
    ]


@pytest.mark.parametrize(
    ("given", "mqtt", "http"),
    [
        ("mqtt://127.0.0.1:1883", "tcp://127.0.0.1:1883", "127.0.0.1:1883"),
        ("mqtts://ann:secret@[::1]:8883/x", "tls://[::1]:8883", "[::1]:8883"),
        ("http://127.0.0.1", "ws://127.0.0.1", "127.0.0.1:9464"),
        ("127.0.0.1:1883", "tcp://127.0.0.1:1883", None),
        ("1883", "tcp://127.0.0.1:1883", "127.0.0.1:1883"),
        ("tcp://127.0.0.1:x", "tcp://127.0.0.1:1883", "127.0.0.1:9464"),
    ],
)
def test_a_wrong_address_to_listen_on_is_shown_with_the_right_one(
    path: Path, given: str, mqtt: str, http: str | None
) -> None:
    path.write_text(
        f'[gateway]\ndata_dir = "data"\n[mqtt]\nlisten = ["{given}"]\n[http]\nlisten = "{given}"\n'
        '[greengrass]\nlisten = ""\n'
    )
    about_mqtt, *about_http = [one.what for one in examine(path)[1] if one.level == "error"][
        : 2 if http else 1
    ]
    assert about_mqtt.endswith(f"and an address host:port; write {mqtt}")
    assert [what.rpartition("; ")[2] for what in about_http] == ([f"write {http}"] if http else [])
    assert all("host:port" in what for what in about_http)
    assert "secret" not in f"{about_mqtt} {about_http}"


def test_limits_on_memory_that_exceed_the_machine_are_a_warning(path: Path) -> None:
    path.write_text(
        QUIET + '[mqtt.limits]\nsession_bytes = "6TiB"\nretained_bytes = "3TiB"\n'
        '[streams.a]\npersistence = "Memory"\nmax_size = "1MiB"\n'
    )
    done = streambridge("check", "-c", path)
    assert done.returncode == 0
    (line,) = [line for line in done.stdout.splitlines() if "session_bytes" in line]
    assert line.startswith(
        f"warning: {path}:12: mqtt.limits.session_bytes: what is in memory may grow to 9 TiB (session_bytes "
        "6 TiB, retained_bytes 3 TiB, guest_bytes 32 MiB, memory streams 1 MiB), but this machine has "
    )
    assert line.endswith("; lower these limits: session_bytes to a quarter of that at most")


def test_limits_on_memory_are_compared_with_the_cgroup_in_a_container(path: Path, mounted: Path) -> None:
    (mounted / "memory.max").write_text("268435456\n")
    path.write_text(QUIET + '[mqtt.limits]\nsession_bytes = "200MiB"\n')
    container = (
        f"mount --bind '{mounted}' /sys/fs/cgroup && if [ -d /run/systemd ]; then mount -t tmpfs none "
        '/run/systemd; fi && exec "$0" "$@"'
    )
    inside = ["unshare", "--mount", "sh", "-c", container]
    done = streambridge("check", "-c", path, prefix=inside)
    assert (done.returncode, done.stdout) == (0, f"{path}: ok (0 streams, 0 exports, 0 warnings)\n"), (
        done.stderr
    )
    path.write_text(QUIET + '[mqtt.limits]\nsession_bytes = "256MiB"\n')
    done = streambridge("check", "-c", path, prefix=inside)
    assert "but its cgroup /sys/fs/cgroup (memory.max) has 256 MiB; lower" in done.stdout


def test_a_check_beside_the_running_service_says_so_and_finds_nothing_wrong(path: Path) -> None:
    path.write_text(QUIET + "[streams.a]\n")
    service = subprocess.Popen(
        [*COMMAND, "run", "-c", path], env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        assert service.stderr is not None
        assert any("msg=ready" in line for line in service.stderr)
        done = streambridge("check", "-c", path)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (
            0,
            f"{path}: ok (1 stream, 0 exports, 0 warnings)",
        )
        assert done.stderr == (
            f"note: the service is running on {path.parent}/data (process {service.pid}); the addresses it "
            "listens on are not tried\n"
        )
    finally:
        service.kill()
        service.communicate()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[[upstream]]\nname = "a"\n', "upstream[0]: `mapping` is missing; add [[upstream.mapping]]"),
        (
            '[[upstream]]\nname = "a b"\n',
            'upstream[0].name = "a b": must be 1 to 64 letters, digits and any of _ . -',
        ),
        (
            '[aws]\nendpoint_url = "x"\n',
            'aws.endpoint_url = "x": must be a URL that begins with http:// or https://',
        ),
        ("[log]\n[log]\n", "not valid TOML: Cannot declare `log` twice"),
    ],
)
def test_the_terms_of_libraries_are_put_into_words(path: Path, text: str, what: str) -> None:
    path.write_text(text)
    assert any(one.what.endswith(f": {what}") for one in examine(path)[1])


def test_a_key_that_stored_data_needs_is_to_be_restored_and_not_made_anew(path: Path) -> None:
    key = path.parent / "key"
    path.write_text(QUIET + '[encryption]\nkey_file = "key"\n')
    (path.parent / "data" / "streams").mkdir(parents=True)
    for new in (True, False):
        for command in ("run", "check"):
            done = streambridge(command, "-c", path)
            assert done.returncode == 78
            assert ("`streambridge keys new " in done.stdout + done.stderr) is new
            assert ("; restore it, since encrypted" in done.stdout + done.stderr) is not new
        if new:
            assert streambridge("keys", "new", key).returncode == 0
            assert streambridge("streams", "create", "x", "encryption=true", "-c", path).returncode == 0
            assert streambridge("streams", "append", "x", "secret", "-c", path).returncode == 0
            key.unlink()


def test_repair_calls_a_stream_that_it_cannot_open_not_repaired(fill: Fill) -> None:
    data = fill([("a", b"x")])
    segments = list((data / "streams" / "sensors").glob("*.seg"))
    for segment in segments:
        segment.chmod(0o400)
    done = streambridge("repair", data, prefix=WITHOUT_RIGHTS)
    for segment in segments:
        segment.chmod(0o600)
    assert done.returncode == 1, done.stdout
    assert done.stdout.endswith("1 stream, 1 message: 1 stream not repaired\n")
    assert streambridge("repair", data).returncode == 0
