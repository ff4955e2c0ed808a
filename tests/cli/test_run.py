"""`streambridge run` as a process: the shipped configuration, signals, and queries beside it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import paho.mqtt.client as paho
import pytest

from tests.cli.conftest import CHECKOUT, COMMAND, Fill, environment, streambridge
from tests.mqtt.harness import connect

ANY_PORT = """
[gateway]
memory_dir = "memory"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
"""


class Service:
    """A running service, and what it has logged."""

    def __init__(self, config: Path, **env: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "run", "-c", str(config)],
            env=environment() | env,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read the log until a line matches."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"{pattern!r} was never logged:\n{''.join(self.log)}")

    def publish(self, port: int, topic: str, payload: bytes) -> None:
        """Publish at QoS 1 and wait for the PUBACK."""
        client = paho.Client(paho.CallbackAPIVersion.VERSION2)
        client.connect("127.0.0.1", port)
        client.loop_start()
        client.publish(topic, payload, qos=1).wait_for_publish(timeout=30)
        client.disconnect()
        client.loop_stop()

    def stop(self) -> int:
        """Stop it as systemd does."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The shipped configuration in a directory of its own, at free ports."""
    copied = Path(shutil.copy(CHECKOUT / "config" / "streambridge.toml", tmp_path))
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "ports.toml").write_text(ANY_PORT)
    return copied


@pytest.fixture
def start(config: Path) -> Iterator[Callable[..., Service]]:
    """A function that starts the service with more environment."""
    started: list[Service] = []

    def start_it(**env: str) -> Service:
        started.append(Service(config, **env))
        return started[-1]

    yield start_it
    for service in started:
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()
        assert service.process.stderr is not None
        service.process.stderr.close()


@pytest.fixture
def service(start: Callable[..., Service]) -> Service:
    return start()


def test_the_shipped_configuration_stores_what_a_device_publishes(service: Service, config: Path) -> None:
    port = int(service.wait_for(r"ready.*listen=\S*:(\d+)")[1])
    service.publish(port, "sensors/a/temperature", b"21.5")
    beside = streambridge("streams", "read", "sensors", "-c", config)
    assert beside.stdout.split()[2:] == ["sensors/a/temperature", "21.5"]
    assert streambridge("check", "-c", config).returncode == 0
    assert streambridge("run", "-c", config).returncode == 75  # the data directory is in use
    assert service.stop() == 0
    assert streambridge("streams", "read", "sensors", "-c", config).stdout == beside.stdout
    assert (config.parent / "data").is_dir()


def test_a_reload_takes_over_streams_and_keeps_the_old_after_a_mistake(
    service: Service, config: Path
) -> None:
    port = int(service.wait_for(r"ready.*listen=\S*:(\d+)")[1])
    more = config.parent / "conf.d" / "more.toml"
    more.write_text("[streams.alarms]\ntopcs = 1\n")
    service.process.send_signal(signal.SIGHUP)
    assert "did you mean `topics`?" in service.wait_for(r"reload failed.*")[0]
    more.write_text('[gateway]\nid = "other"\n[streams.alarms]\ntopics = ["alarms/#"]\n')
    service.process.send_signal(signal.SIGHUP)
    assert "gateway.id" in service.wait_for(r"needs a restart.*")[0]
    service.wait_for("reloaded")
    service.publish(port, "alarms/1", b"hot")
    assert streambridge("streams", "read", "alarms", "-c", config).stdout.split()[-1] == "hot"
    assert service.stop() == 0


def test_what_waits_for_a_restart_is_named_until_it_is_as_at_the_start(
    service: Service, config: Path
) -> None:
    more = config.parent / "conf.d" / "more.toml"
    service.wait_for("ready")

    def named_at_a_reload(text: str) -> list[str]:
        more.write_text(text)
        del service.log[:]
        service.process.send_signal(signal.SIGHUP)
        service.wait_for("reloaded")
        return re.findall(r"needs a restart: ([\w.]+)", "".join(service.log))

    assert named_at_a_reload('[gateway]\nid = "other"\n') == ["gateway.id"]
    assert named_at_a_reload('[gateway]\nid = "other"\n[mqtt]\nallow_anonymous = true\n') == ["gateway.id"]
    assert named_at_a_reload("") == []
    assert service.stop() == 0


def test_each_reload_logs_its_own_result_at_once_and_what_it_did_not_apply(
    service: Service, config: Path
) -> None:
    service.wait_for("ready")
    more = config.parent / "conf.d" / "more.toml"
    for text, logged in (
        ("", "info bridge msg=reloaded\n"),
        ("[streams.a]\ntopcs = 1\n", r"error bridge msg=\"reload failed.*did you mean"),
        (
            '[gateway]\nid = "other"\n[mqtt]\nusers_file = "nowhere"\n[streams.wrong]\ntopics = ["a/#/b"]\n',
            r"warning bridge msg=\"reloaded, except: gateway\.id, "
            r"listeners and certificates of \[mqtt\], mqtt\.users_file, streams\.wrong; see the lines above",
        ),
    ):
        more.write_text(text)
        for _ in range(3):
            service.process.send_signal(signal.SIGHUP)
            service.wait_for(logged)
    assert "repeated" not in "".join(service.log)
    assert service.stop() == 0


def test_a_reload_moves_a_listener_with_its_rules_or_leaves_all_as_it_was(
    start: Callable[..., Service], config: Path
) -> None:
    ports = config.parent / "conf.d" / "ports.toml"
    listen = 'listen = ["tcp://127.0.0.1:0"]'
    assert listen in ANY_PORT
    ports.write_text(ANY_PORT.replace(listen, f"{listen}\nallow_anonymous = false"))
    service = start()
    port = int(service.wait_for(r"ready.*listen=\S*:(\d+)")[1])

    def answer(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(connect("c"))
            return client.recv(4)

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f'listen = ["tcp://127.0.0.1:{other.getsockname()[1]}"]'
        ports.write_text(ANY_PORT.replace(listen, f"{taken}\nallow_anonymous = true"))
        service.process.send_signal(signal.SIGHUP)
        service.wait_for(r"reload of \[mqtt\] failed.*another program listens there")
        service.wait_for("reloaded, except")
    assert answer(port) == b"\x20\2\0\5", "not authorized, as before"
    del service.log[:]
    elsewhere = listen.replace("127.0.0.1", "localhost")
    ports.write_text(ANY_PORT.replace(listen, f"{elsewhere}\nallow_anonymous = true"))
    service.process.send_signal(signal.SIGHUP)
    fresh = int(service.wait_for(r"listening at mqtt://\S*:(\d+)")[1])
    service.wait_for("reloaded")
    assert answer(fresh) == b"\x20\2\0\0"
    with pytest.raises(ConnectionError):
        answer(port)
    assert service.stop() == 0


def test_a_port_that_is_taken_ends_the_start_in_one_line(service: Service, config: Path) -> None:
    port = int(service.wait_for(r"ready.*listen=\S*:(\d+)")[1])
    other = config.parent / "other"
    other.mkdir()
    second = other / "x.toml"
    text = ANY_PORT.replace("127.0.0.1:0", f"127.0.0.1:{port}")
    second.write_text(text.replace("[gateway]\n", '[gateway]\ndata_dir = "data"\n'))
    done = streambridge("run", "-c", second)
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert "mqtt.listen: cannot listen at" in done.stderr
    assert "another program listens there already" in done.stderr
    assert not (other / "data").exists()  # nothing was made


def test_a_data_directory_that_cannot_be_ends_the_start_with_its_key_and_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(ANY_PORT.replace("[gateway]\n", '[gateway]\ndata_dir = "/dev/null/data"\n'))
    done = streambridge("run", "-c", path)
    assert done.returncode == 78
    assert done.stderr.endswith(
        "x.toml:3: gateway.data_dir: /dev/null is not a directory; move it away, or choose another path\n"
    )


def test_systemd_is_notified_of_ready_reloading_and_stopping(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)

        def next_state() -> dict[str, str]:
            while True:
                state = dict(line.split("=", 1) for line in systemd.recv(4096).decode().splitlines())
                if not state.keys() & {"WATCHDOG"}:
                    return state

        service = start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        ready = next_state()
        assert ready["READY"] == "1"
        assert "1 stream, " in ready["STATUS"]
        service.process.send_signal(signal.SIGHUP)
        assert next_state()["RELOADING"] == "1"
        assert next_state()["READY"] == "1"
        assert service.stop() == 0
        assert next_state()["STOPPING"] == "1"


def test_a_reload_that_is_asked_for_during_the_start_is_done_after_it(service: Service) -> None:
    service.wait_for("opened 0 streams")
    service.process.send_signal(signal.SIGHUP)
    service.wait_for("msg=ready")
    service.wait_for("msg=reloaded")
    assert service.stop() == 0


def test_the_watchdog_hears_from_a_running_loop_and_nothing_from_one_that_is_stuck(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    """SIGSTOP stands for the stuck loop: systemd sees the same silence, and would restart the service."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        service = start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        for _ in range(2):
            while systemd.recv(4096) != b"WATCHDOG=1":
                pass
        service.process.send_signal(signal.SIGSTOP)
        systemd.settimeout(0.2)
        with pytest.raises(TimeoutError):
            while True:  # what was on its way, and then silence for longer than the loop's second
                systemd.recv(4096)
                systemd.settimeout(2.5)
        service.process.send_signal(signal.SIGCONT)
        systemd.settimeout(60)
        assert systemd.recv(4096) == b"WATCHDOG=1"
        assert service.stop() == 0


def test_the_service_runs_soon_after_it_is_woken_and_the_export_worker_comes_after_it(
    service: Service,
) -> None:
    if (usual := slice_of("self")) is None:
        pytest.skip("this kernel has no slices, or does not show them")
    service.wait_for("ready")
    pid = service.process.pid
    assert slice_of(pid) == 100_000
    (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    deadline = time.monotonic() + 60
    while slice_of(worker) != usual:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert os.getpriority(os.PRIO_PROCESS, int(worker)) == os.getpriority(os.PRIO_PROCESS, pid) + 5


def slice_of(pid: int | str) -> int | None:
    """How many ns the kernel lets a thread run at a time."""
    try:
        found = re.search(r"^se\.slice\s*:\s*(\d+)$", Path(f"/proc/{pid}/sched").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


@pytest.mark.parametrize("broken", ["format", "clock", "mqtt/sessions.journal"])
def test_a_start_that_fails_to_read_names_the_file(tmp_path: Path, broken: str) -> None:
    config = tmp_path / "x.toml"
    config.write_text(f"{ANY_PORT}[streams.s]\n".replace("[gateway]", '[gateway]\ndata_dir = "data"'))
    service = Service(config)
    service.wait_for("msg=ready")
    assert service.stop() == 0
    path = tmp_path / "data" / broken
    path.unlink()
    path.symlink_to("/proc/self/mem")  # a read of its first page fails with EIO
    done = streambridge("run", "-c", config)
    assert done.returncode == 1
    assert f"streambridge: {path}: Input/output error" in done.stderr.splitlines()


def test_a_start_says_which_streams_the_new_defaults_change(tmp_path: Path, fill: Fill) -> None:
    data = fill([("sensors/a", b"1")])
    fill([("a", b"1")], name="stated")
    path = tmp_path / "x.toml"
    path.write_text(
        f'[gateway]\ndata_dir = "{data}"\n[streams.sensors]\n[streams.stated]\nretention="limits"\n'
        "flush_on_write=false\n"
    )
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "ports.toml").write_text(ANY_PORT)
    service = Service(path)
    try:
        service.wait_for("ready")
        (line,) = [line for line in service.log if "retention was" in line]
        assert "to undo that, set it in [streams.sensors]" in line
        assert "stream=sensors" in line
        (line,) = [line for line in service.log if "flush_on_write was false and is true now" in line]
        assert "stream=sensors" in line
    finally:
        assert service.stop() == 0
    again = Service(path)
    again.wait_for("ready")
    assert again.stop() == 0
    assert not any("retention" in line for line in again.log), "it is said once"


RING = """
[gateway]
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = "127.0.0.1:0"
[streams.ring]
max_size = "64KiB"
strategy_on_full = "OverwriteOldestData"
[[streams.ring.export.http]]
identifier = "away"
uri = "http://127.0.0.1:1/"
[[streams.ring.export.http]]
identifier = "off"
uri = "http://127.0.0.1:1/"
disabled = true
"""


def test_what_was_dropped_before_it_was_exported_is_shown_everywhere_and_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(RING)
    service = Service(path)
    try:
        page = service.wait_for(r"ready.*(http://127[^,]*)/")[1]
        lines = "".join(f"{n} {'x' * 100}\n" for n in range(3000))
        streambridge("streams", "append", "ring", "-c", path, given=lines)
        service.wait_for("messages were dropped before they were exported, in all .* for away .*stream=ring")
        (away, off) = json.loads(streambridge("exports", "ring", "-c", path, "--json").stdout)
        lost, (first, last) = away["lostMessages"], away["lastLost"]
        assert lost == last - first + 1 > 1000
        assert (away["lastExportedSequenceNumber"], away["exportedMessages"]) == (-1, 0)
        assert away["lastLostTime"] > 0
        assert (off["lostMessages"], off["lastLost"]) == (0, None)
        described = streambridge("streams", "describe", "ring", "-c", path).stdout
        assert (
            f"{lost} LOST: dropped before they were exported, the last {first} to {last} at 20" in described
        )
        assert "LOST" in streambridge("exports", "-c", path).stdout
        with urllib.request.urlopen(f"{page}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        labels = '{export="away",kind="http",stream="ring"}'
        assert f"streambridge_export_lost_messages_total{labels} {float(lost)}" in metrics
        with urllib.request.urlopen(f"{page}/status.json", timeout=60) as answer:
            shown = json.load(answer)
        assert (shown["totals"]["lost"], shown["totals"]["losing"], shown["streams"][0]["lost"]) == (
            lost,
            1,
            lost,
        )
    finally:
        assert service.stop() == 0
    (away, _) = json.loads(streambridge("exports", "ring", "-c", path, "--json").stdout)
    assert away["lostMessages"] >= lost, "a stopped service shows it too"
