"""The service under a real systemd: package, sandbox, reload, watchdog, drain, credentials, timer."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.testbed.certificates import Authority
from bridge.ingest.store import StorageLocation
from tests.ingest.gateway import Gateway, reported
from tests.systemd.machine import Machine, until
from tests.test_packaging import CHECKOUT, copy_sources, run

pytestmark = [pytest.mark.slow(seconds=15), pytest.mark.timeout(1000)]

PUBLISH = """
import sys, paho.mqtt.publish
paho.mqtt.publish.single("sensors/a", sys.argv[1], qos=1)
"""
# Publishes until the connection ends, and says how many messages were acknowledged.
PUBLISH_ON = """
import sys, threading, paho.mqtt.client as paho
acknowledged, gone = [], threading.Event()
client = paho.Client(paho.CallbackAPIVersion.VERSION2)
client.on_publish = lambda *_: acknowledged.append(1)
client.on_disconnect = lambda *_: gone.set()
client.max_inflight_messages_set(200)
client.connect("127.0.0.1")
client.loop_start()
while not gone.is_set():
    client.publish("sensors/a", b"x" * 100, qos=1)
    gone.wait(0.001)
    if len(acknowledged) > 100:
        print("going", flush=True)
client.loop_stop()
print(len(acknowledged))
"""


# Where packages put files, but for what other services and dpkg itself write there.
PRUNED = ("/var/log", "/var/lib/dpkg", "/var/lib/systemd", "/var/cache")
LISTED = (
    *("find", "/etc", "/opt", "/usr/bin", "/usr/lib/systemd", "/usr/lib/sysusers.d", "/usr/lib/tmpfiles.d"),
    *("/usr/local", "/usr/share", "/var", "-xdev"),
    *(word for path in PRUNED for word in ("-path", path, "-prune", "-o")),
    "-print",
)


def install(machine: Machine) -> None:
    """The package as an administrator installs it; returns when the service says that it is ready."""
    machine.run("dpkg", "--install", "--force-confold", "/srv/streambridge.deb")


def publish(machine: Machine, payload: str) -> None:
    """A device's message; returns when it is acknowledged."""
    machine.run("/opt/streambridge/bin/python3", "-c", PUBLISH, payload)


def payloads(machine: Machine) -> list[str]:
    """What the stream holds."""
    lines = machine.run("streambridge", "streams", "read", "sensors", "--json", "-n", "1000000").splitlines()
    return [json.loads(line)["payload"] for line in lines]


def test_the_package_installs_a_service_that_runs_confined_and_is_removed_without_its_data(
    machine: Machine,
) -> None:
    install(machine)
    assert machine.state("ActiveState") == "active"
    assert "mqtt://127.0.0.1:1883" in machine.state("StatusText")
    publish(machine, "21.5")
    assert payloads(machine) == ["21.5"]
    machine.run("systemctl", "is-enabled", "streambridge.service")
    user = machine.run("id", "-u", "streambridge")
    status = dict(
        line.split(":\t", 1)
        for line in machine.run("cat", f"/proc/{machine.state('MainPID')}/status").splitlines()
    )
    assert status["Uid"].split() == [user] * 4 != ["0"] * 4
    assert int(status["CapBnd"], 16) == 0
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert machine.run("stat", "--format=%a %U", "/var/lib/streambridge") == "700 streambridge"
    machine.run("dpkg", "--remove", "streambridge")
    assert machine.state("ActiveState") == "inactive"
    machine.run("test", "-d", "/var/lib/streambridge/streams")


def earlier(machine: Machine, configuration: str) -> None:
    """Make /srv/earlier.deb: the package as version 0.0.1 with another configuration."""
    machine.run("dpkg-deb", "--raw-extract", "/srv/streambridge.deb", "/srv/earlier")
    control = machine.file("/srv/earlier/DEBIAN/control")
    control.write_text(re.sub("^Version: .*", "Version: 0.0.1", control.read_text(), flags=re.MULTILINE))
    machine.file("/srv/earlier/etc/streambridge/streambridge.toml").write_text(configuration)
    machine.run("dpkg-deb", "-Zgzip", "-z1", "--build", "/srv/earlier", "/srv/earlier.deb")


def test_an_upgrade_keeps_messages_changes_and_what_is_switched_off_and_a_purge_leaves_only_messages(
    machine: Machine,
) -> None:
    before = set(machine.run(*LISTED).splitlines())
    earlier(
        machine, '[gateway]\ndata_dir = "/var/lib/streambridge"\n[streams.sensors]\ntopics = ["sensors/#"]\n'
    )
    machine.run("dpkg", "--install", "/srv/earlier.deb")
    publish(machine, "21.5")
    changed = machine.file("/etc/streambridge/streambridge.toml")
    changed.write_text(changed.read_text() + "# changed\n")
    token = machine.file("/etc/streambridge/greengrass-token").read_text()

    install(machine)
    assert machine.state("ActiveState") == "active"
    assert changed.read_text().endswith("# changed\n")
    assert machine.file("/etc/streambridge/greengrass-token").read_text() == token
    assert payloads(machine) == ["21.5"]

    machine.run("systemctl", "disable", "--now", "streambridge")
    install(machine)
    assert machine.run("systemctl", "is-enabled", "streambridge", check=False) == "disabled"
    assert machine.state("ActiveState") == "inactive"

    key = machine.file("/etc/streambridge/keys/encryption.key")  # with no opening key, nothing is encrypted
    machine.run("install", "-d", "-o", "streambridge", "/etc/streambridge/keys")
    key.write_text("key")
    machine.run("install", "-d", "/var/log/streambridge")
    told = machine.run("dpkg", "--purge", "streambridge")
    assert "the key" not in told
    assert "stored messages and tables are kept in /var/lib/streambridge;" in told
    assert machine.run("getent", "passwd", "streambridge", check=False) == ""
    assert machine.run("getent", "group", "streambridge", check=False) == ""
    assert (
        machine.run("find", "/var/lib/streambridge", "!", "-user", "root", "-o", "!", "-group", "root") == ""
    )
    left = set(machine.run(*LISTED).splitlines()) - before
    assert {path for path in left if not path.startswith("/var/lib/streambridge")} == set()

    install(machine)  # the messages are those of the new user
    assert machine.state("ActiveState") == "active"
    machine.run("systemctl", "stop", "streambridge")
    lines = machine.run("streambridge", "verify", "/var/lib/streambridge")
    assert "1 message: no damage" in lines
    machine.run("rm", "-r", "/var/lib/streambridge")
    assert "kept" not in machine.run("dpkg", "--purge", "streambridge")


def test_the_package_brings_the_manual_page_and_completions(machine: Machine) -> None:
    install(machine)
    page = machine.run("man", "--no-hyphenation", "--encoding=utf8", "/usr/share/man/man1/streambridge.1.gz")
    assert "streambridge streams list" in " ".join(page.split())
    complete = """
        source /usr/share/bash-completion/completions/streambridge
        COMP_WORDS=(streambridge ver) COMP_CWORD=1
        _streambridge_completion streambridge
        echo "${COMPREPLY[@]}"
    """
    assert machine.run("bash", "-c", complete) == "verify"


def test_install_service_sets_up_what_pip_has_installed(machine: Machine) -> None:
    install(machine)
    machine.run("dpkg", "--remove", "streambridge")
    machine.run("dpkg-deb", "--extract", "/srv/streambridge.deb", "/srv/package")
    machine.run("mv", "/srv/package/opt/streambridge", "/opt/")
    machine.run("rm", "-r", "/etc/streambridge")
    command = "/opt/streambridge/bin/streambridge install-service"
    masked = machine.run("sh", "-c", f"{command} 2>&1", check=False)
    assert "systemctl unmask streambridge.service" in masked, "the package that was removed has masked it"
    machine.run("systemctl", "unmask", "streambridge.service")
    told = machine.run(*command.split())
    assert "systemctl status streambridge" in told
    assert machine.state("ActiveState") == "active"
    assert machine.state("FragmentPath") == "/etc/systemd/system/streambridge.service"
    publish(machine, "21.5")


def test_the_commands_of_the_documentation_work_while_the_service_is_stopped(machine: Machine) -> None:
    install(machine)
    publish(machine, "21.5")
    machine.run("systemctl", "stop", "streambridge")
    as_user = ("runuser", "-u", "streambridge", "--", "streambridge")
    assert machine.run(*as_user, "repair", "/var/lib/streambridge").endswith("1 message: no damage")
    assert machine.run(*as_user, "streams", "create", "pumps") == "created pumps"
    assert machine.run("streambridge", "streams", "create", "valves") == "created valves"
    assert machine.run("find", "/var/lib/streambridge", "!", "-user", "streambridge") == ""
    machine.run("systemctl", "start", "streambridge")
    listed = machine.run(*as_user, "streams", "list")
    assert "pumps" in listed
    assert "valves" in listed
    assert machine.run(*as_user, "streams", "append", "valves", "open") == "stored as 0"


def test_a_reload_takes_over_what_is_right_and_refuses_what_is_wrong(machine: Machine) -> None:
    install(machine)
    process = machine.state("MainPID")
    more = machine.file("/etc/streambridge/conf.d/more.toml")
    more.write_text('[streams.more]\ntopics = ["more/#"]\n')
    machine.run("systemctl", "reload", "streambridge")
    until("the stream is there", lambda: "more" in machine.run("streambridge", "streams", "list"))
    more.write_text('[streams.more]\ntopic = ["more/#"]\n')
    machine.run("systemctl", "reload", "streambridge")
    until("the mistake is named", lambda: "did you mean" in machine.log())
    until("systemd knows of the end", lambda: machine.state("ActiveState") == "active")
    publish(machine, "21.5")
    assert machine.state("MainPID") == process


def test_a_stuck_loop_is_ended_by_the_watchdog_and_a_killed_service_starts_again(machine: Machine) -> None:
    override = machine.file("/etc/systemd/system/streambridge.service.d/test.conf")
    override.write_text("[Service]\nWatchdogSec=8\n")
    install(machine)
    publish(machine, "before")
    stuck = machine.state("MainPID")
    machine.run("kill", "-STOP", stuck)
    until("it was restarted", lambda: int(machine.state("NRestarts")) >= 1)
    assert "Watchdog timeout" in machine.run("journalctl", "--quiet", "--unit", "streambridge")
    until("it is ready again", lambda: machine.state("ActiveState") == "active")
    assert machine.state("MainPID") != stuck
    publish(machine, "after the watchdog")
    killed, restarts = machine.state("MainPID"), int(machine.state("NRestarts"))
    machine.run("kill", "-KILL", killed)
    until("it was restarted", lambda: int(machine.state("NRestarts")) > restarts)
    until("it is ready again", lambda: machine.state("ActiveState") == "active")
    assert payloads(machine) == ["before", "after the watchdog"]


def test_a_stop_under_load_stores_everything_acknowledged_and_is_not_a_failure(machine: Machine) -> None:
    install(machine)
    with subprocess.Popen(
        [*machine.inside("--all"), "/opt/streambridge/bin/python3", "-c", PUBLISH_ON],
        stdout=subprocess.PIPE,
        text=True,
    ) as device:
        assert device.stdout is not None
        assert device.stdout.readline() == "going\n"
        machine.run("systemctl", "stop", "streambridge")
        acknowledged = int(device.stdout.read().split()[-1])
    assert (machine.state("ActiveState"), machine.state("Result")) == ("inactive", "success")
    assert machine.state("ExecMainStatus") == "0"
    assert 100 < acknowledged <= len(payloads(machine))


def test_a_secret_that_only_root_can_read_reaches_the_service_as_a_credential(
    machine: Machine, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("gateway")
    key = machine.file("/etc/credstore/tls-key")
    key.write_text(pair.key.read_text())
    key.chmod(0o600)
    machine.file("/etc/streambridge/gateway.pem").write_text(pair.cert.read_text())
    machine.file("/etc/streambridge/streambridge.toml").write_text(
        '[mqtt]\nlisten = ["tls://127.0.0.1:8883"]\n'
        '[mqtt.tls]\ncert = "gateway.pem"\nkey = "${CREDENTIALS_DIRECTORY}/tls-key"\n'
    )
    install(machine)
    shown = subprocess.run(
        [*machine.inside("--net"), sys.executable, "-c",
         "import ssl; print(ssl.get_server_certificate(('127.0.0.1', 8883)))"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    machine.run("streambridge", "streams", "list")  # needs no secret
    assert ": ok (" in machine.run("streambridge", "check")  # finds it where the service has it
    assert ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


def told(title: str) -> str:
    """What the ingest page has root do, in its block of this title."""
    page = (CHECKOUT / "docs/ingest.md").read_text()
    return page.partition(f'```sh title="{title}"\n')[2].partition("```\n")[0].replace("sudo ", "")


def test_the_timer_runs_the_ingest_job_in_its_sandbox_as_the_documentation_sets_it_up(
    machine: Machine, tmp_path: Path
) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if machine.run("/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])") != version:
        pytest.skip(f"the system's Python is not {version}, and cannot use this environment's Spark")
    install(machine)
    gateway = Gateway(StorageLocation(str(tmp_path / "landing")))
    gateway.export(0, 99)
    gateway.report(reported(99))
    shutil.copytree(tmp_path / "landing", machine.file("/srv/landing"))
    machine.file("/etc/systemd/system/streambridge-ingest.timer.d/test.conf").write_text(
        "[Timer]\nOnCalendar=*:*:0/2\nRandomizedDelaySec=0\nAccuracySec=100ms\n"
    )
    tree = copy_sources(tmp_path / "tree")
    wheel = ("pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path)
    run(sys.executable, "-m", *wheel, cwd=tree)
    (built,) = tmp_path.glob("*.whl")
    shutil.copy(built, machine.file(f"/srv/{built.name}"))
    home = "/opt/streambridge-ingest"
    # There is no network: what apt-get and pip would bring is bound into the machine.
    offline = told("the timer's environment").replace("apt-get", ": apt-get")
    offline = offline.replace("-c constraints.txt '.[spark]'", f"--no-index --no-deps /srv/{built.name}")
    assert "--no-index" in offline
    machine.run("sh", "-ec", offline)
    machine.file(f"{home}/lib/python{version}/site-packages/here.pth").write_text("/srv/python\n")
    machine.run("sh", "-ec", told("the timer").replace("s3://my-bucket/gateways", "/srv/landing"))
    assert machine.run("stat", "--format=%a", "/etc/streambridge/ingest.env") == "600"
    unit = "streambridge-ingest.service"
    ended = "ExecMainExitTimestampMonotonic"
    until("the job ran", lambda: machine.state(ended, unit) not in ("", "0"), seconds=400)
    machine.run("systemctl", "stop", "streambridge-ingest.timer")
    assert (machine.state("ExecMainStatus", unit), machine.state("Result", unit)) == ("0", "success")
    places = ("--source", "/srv/landing", "--warehouse", "/var/lib/streambridge-ingest")
    report = machine.run(f"{home}/bin/streambridge", "ingest", "report", *places)
    assert report.splitlines()[-1].startswith("complete: 100 rows, missing 0")
