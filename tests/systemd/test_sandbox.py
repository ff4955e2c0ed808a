"""The unit as shipped, under a real systemd: its sandbox starts the service and lets it do its work.

The code is this checkout's, bound into the machine; user, mounts, filters and limits are the unit's own.
What only a package can show is in test_service.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from sysconfig import get_path

import pytest

from tests.systemd.machine import Machine, why_not

CHECKOUT = Path(__file__).parents[2]
UNIT = "/etc/systemd/system/streambridge.service"
RUN = "ExecStart=/opt/streambridge/bin/streambridge run\n"
# ProtectHome= may hide the places of a checkout and its Python, so they are bound to others.
BINDS = {
    Path(sys.base_prefix): "/srv/python",
    Path(get_path("purelib")): "/srv/packages",
    CHECKOUT: "/srv/streambridge",
}
COMMAND = f"""ExecStart=/srv/python/bin/python3.{sys.version_info.minor} -m bridge run
Environment=PYTHONPATH=/srv/streambridge:/srv/packages LD_LIBRARY_PATH=/srv/python/lib
Environment=AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_DEFAULT_REGION=eu-west-1
"""
CONFIG = """
[gateway]
id = "boxed"
data_dir = "/var/lib/streambridge"
[export]
plugin_dirs = []
[streams.sensors]
topics = ["sensors/#"]
[[streams.sensors.export.s3]]
identifier = "lake"
bucket = "lake"
endpoint_url = "http://127.0.0.1:5000"
time_hint_millis = 1
"""
# Stands for S3, and prints the objects of the gateway's messages as they come.
S3 = """
import logging, signal, time, boto3
from moto.server import ThreadedMotoServer
logging.disable()
ThreadedMotoServer("127.0.0.1", 5000, verbose=False).start()
s3 = boto3.client("s3", "eu-west-1", endpoint_url="http://127.0.0.1:5000",
                  aws_access_key_id="key", aws_secret_access_key="secret")
s3.create_bucket(Bucket="lake", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
print("ready", flush=True)
while not (found := s3.list_objects_v2(Bucket="lake", Prefix="gateway=").get("Contents")):
    time.sleep(0.1)
print(found[0]["Key"], flush=True)
signal.pause()
"""
LOOK = 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:9464/metrics").read().decode())'
PUBLISH = 'import paho.mqtt.publish as p; p.single("sensors/a", "21.5", qos=1)'


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A booted machine with this checkout and its environment, and the unit as it stands in systemd/."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    booted = Machine(tmp_path, BINDS)
    try:
        for kind in ("sysusers", "tmpfiles"):
            text = (CHECKOUT / f"systemd/streambridge.{kind}").read_text()
            booted.file(f"/etc/{kind}.d/streambridge.conf").write_text(text)
        unit = (CHECKOUT / "systemd/streambridge.service").read_text()
        assert RUN in unit
        booted.file(UNIT).write_text(unit.replace(RUN, COMMAND))
        booted.run("systemd-sysusers")
        booted.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/streambridge.conf")
        booted.file("/etc/streambridge/streambridge.toml").write_text(CONFIG)
        yield booted
    finally:
        booted.close()


def test_the_shipped_sandbox_lets_the_service_start_store_export_and_stop(machine: Machine) -> None:
    with subprocess.Popen(
        [*machine.inside("--net"), sys.executable, "-c", S3], stdout=subprocess.PIPE, text=True
    ) as s3:
        try:
            assert s3.stdout is not None
            assert s3.stdout.readline() == "ready\n"
            machine.run("systemctl", "daemon-reload")
            machine.run("systemctl", "start", "streambridge.service", check=False)
            assert machine.state("ActiveState") == "active", machine.log()
            device = [*machine.inside("--net"), sys.executable, "-c", PUBLISH]
            subprocess.run(device, check=True, timeout=120)
            exported = s3.stdout.readline()
            look = [*machine.inside("--net"), sys.executable, "-c", LOOK]
            metrics = subprocess.run(look, check=True, timeout=120, capture_output=True, text=True).stdout
            machine.run("systemctl", "stop", "streambridge.service")
        finally:
            s3.kill()
    assert "boxed" in exported
    assert "\nstreambridge_ready 1.0\n" in metrics
    assert "\nstreambridge_export_worker_up 1.0\n" in metrics
    assert "\nprocess_resident_memory_bytes " in metrics
    assert (machine.state("Result"), machine.state("ExecMainStatus")) == ("success", "0"), machine.log()
    assert machine.state("NRestarts") == "0"
    assert not [line for line in machine.log().splitlines() if line.startswith(("warning", "error"))]
