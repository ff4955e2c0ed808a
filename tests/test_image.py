"""The OCI image: what it is made of, and a gateway that runs in it, confined, here and on aarch64."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.publish as mqtt
import pytest

from bridge.config.checks import examine

CHECKOUT = Path(__file__).parents[1]
USER = 10001
READ = ("/opt/streambridge/bin/streambridge", "streams", "read", "sensors", "--json")
CONFIG = """
[gateway]
data_dir = "/var/lib/streambridge"
[mqtt]
listen = ["tcp://{host}:{port}"]
allow_anonymous = true
[greengrass]
listen = ""
[http]
listen = "{http}"
[streams.sensors]
topics = ["sensors/#"]
flush_on_write = true
"""


class Layout:
    """An image's tar file, whose digests are checked as it is read."""

    def __init__(self, path: Path) -> None:
        with tarfile.open(path) as content:
            self.files = {one.name: content.extractfile(one).read() for one in content}  # type: ignore[union-attr]
        (self.entry,) = json.loads(self.files["index.json"])["manifests"]
        self.manifest = json.loads(self.blob(self.entry))
        self.config = json.loads(self.blob(self.manifest["config"]))
        packed = [self.blob(one) for one in self.manifest["layers"]]
        self.layers = [tarfile.open(fileobj=io.BytesIO(one)) for one in packed]  # noqa: SIM115 - in memory

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        content = self.files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
        assert len(content) == descriptor["size"]
        assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
        return content

    def unpack(self, root: Path) -> Path:
        for layer in self.layers:
            layer.extractall(root, filter="tar")
        return root


def test_an_image_is_the_same_bytes_for_the_same_input_and_belongs_to_root(tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    (stage / "var/lib/streambridge").mkdir(parents=True)
    (stage / "tmp").mkdir()
    (stage / "etc").mkdir()
    (stage / "etc/hello").write_text("hello")
    debian = tmp_path / "debian.tar"
    with tarfile.open(debian, "w") as out:
        for name in ("./usr/bin/python3.11", "./usr/share/man/man1/x.1.gz", "./usr/share/doc/x/copyright"):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = 3, time.time()
            out.addfile(entry, io.BytesIO(b"abc"))
    made = []
    for number in range(2):
        os.utime(stage / "etc/hello")
        made.append(tmp_path / f"{number}.tar")
        subprocess.run(
            [sys.executable, CHECKOUT / ".ci/oci.py", made[-1], "arm64", "1.2.3", debian, stage],
            env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"},
            check=True,
        )
    assert made[0].read_bytes() == made[1].read_bytes()
    image = Layout(made[0])
    assert image.layers[0].getnames() == ["usr/bin/python3.11", "usr/share/doc/x/copyright"]
    owners = {entry.name: (entry.uid, entry.gid, entry.mode & 0o7777) for entry in image.layers[1]}
    assert owners.pop("var/lib/streambridge") == (USER, USER, 0o700)
    assert {owner[:2] for owner in owners.values()} == {(0, 0)}
    assert owners["tmp"][2] == 0o1777
    assert max(entry.mtime for layer in image.layers for entry in layer) <= 1700000000
    assert image.config["config"]["User"] == f"{USER}:{USER}"
    assert image.entry["platform"] == {"os": "linux", "architecture": "arm64", "variant": "v8"}
    assert image.entry["annotations"]["org.opencontainers.image.ref.name"] == "localhost/streambridge:1.2.3"


def test_the_configuration_of_an_image_without_one_of_its_own_is_valid(tmp_path: Path) -> None:
    _, _, text = (CHECKOUT / ".ci/image").read_text().partition("<<'CONFIG'\n")
    path = tmp_path / "streambridge.toml"
    path.write_text(text.partition("\nCONFIG\n")[0].replace("/var/lib/streambridge", str(tmp_path)))
    config, found = examine(path, remote=False)
    assert config.mqtt.listen == ["tcp://127.0.0.1:1883"]
    errors = [one.what for one in found if one.level == "error"]
    assert [what for what in errors if "cannot listen" not in what] == []


def build(directory: Path, architecture: str) -> Path:
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is missing; install it: sudo apt-get install mmdebstrap")
    done = subprocess.run([CHECKOUT / ".ci/image", directory, architecture], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (image,) = directory.glob("*.oci.tar")
    return image


@pytest.fixture
def podman(tmp_path: Path) -> Iterator[list[str]]:
    """The command with a store of its own, in which a container `gateway` may be made."""
    for command, package in (("podman", "podman"), ("runc", "runc")):
        if shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"{command} is missing; install it: sudo apt-get install {package}")
    with tempfile.TemporaryDirectory(
        prefix="pod-", dir="/tmp"
    ) as run:  # its paths have 50 characters at most
        store = ["--root", f"{tmp_path}/store", "--runroot", run, "--storage-driver", "vfs"]
        command = ["podman", *store, "--cgroup-manager", "cgroupfs", "--runtime", "runc"]
        yield command
        subprocess.run([*command, "rm", "--force", "--time", "0", "gateway"], capture_output=True, timeout=60)


@pytest.mark.slow(seconds=90)
@pytest.mark.timeout(900)
def test_the_image_runs_confined_is_healthy_and_has_its_messages_after_a_sigkill(
    podman: list[str], tmp_path: Path
) -> None:
    image = build(tmp_path, {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()])
    content = {name for layer in Layout(image).layers for name in layer.getnames()}
    assert not content & {"bin/sh", "usr/bin/sh", "bin/bash", "usr/bin/apt", "usr/bin/dpkg", "usr/bin/perl"}
    assert "etc/ssl/certs/ca-certificates.crt" in content
    assert "var/lib/dpkg/status.d/libc6" in content

    def run(*words: str) -> str:
        done = subprocess.run([*podman, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def inside(program: str) -> str:
        return run("exec", "gateway", "/opt/streambridge/bin/python3", "-c", program)

    def wait_until_ready() -> None:
        with subprocess.Popen(
            [*podman, "logs", "--follow", "--since", "0s", "gateway"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as log:  # fmt: skip
            assert log.stdout is not None
            assert any(" msg=ready " in line for line in log.stdout)
            log.kill()

    (tmp_path / "etc").mkdir()
    configured = CONFIG.format(host="0.0.0.0", port=1883, http="127.0.0.1:9464")
    (tmp_path / "etc/streambridge.toml").write_text(configured)
    run("load", "--input", str(image))
    name = Layout(image).entry["annotations"]["org.opencontainers.image.ref.name"]
    limits = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")  # what a container here may have
    confined = (
        "--read-only",
        "--cap-drop",
        "all",
        "--security-opt",
        "no-new-privileges",
        "--network",
        "none",
    )
    run("run", "--detach", "--name", "gateway", *limits, *confined, name)  # without a configuration
    wait_until_ready()
    run("rm", "--force", "--time", "0", "gateway")
    health = Layout(image).config["config"]["Healthcheck"]["Test"]
    mounts = ("--volume", f"{tmp_path}/etc:/etc/streambridge:ro", "--volume", "data:/var/lib/streambridge")
    run("run", "--detach", "--name", "gateway", *limits, *confined, *mounts, name)
    wait_until_ready()
    assert inside("import os; print(os.getuid(), os.getgid())").split() == [str(USER), str(USER)]
    assert (
        inside("import os; print(os.access('/opt', os.W_OK), os.access('/etc', os.W_OK))") == "False False\n"
    )
    inside("import paho.mqtt.publish as p; p.single('sensors/a', '21.5', qos=1)")
    run("exec", "gateway", *health[1:])
    run("kill", "--signal", "KILL", "gateway")
    run("wait", "gateway")
    run("start", "gateway")
    wait_until_ready()
    assert [json.loads(line)["payload"] for line in run("exec", "gateway", *READ).splitlines()] == ["21.5"]
    run("stop", "--time", "60", "gateway")
    assert run("wait", "gateway").strip() == "0"


# Mounts a binfmt_misc of its own user namespace (Linux 6.7); before, the machine's registration serves.
QEMU = r"""
mount -t binfmt_misc binfmt /proc/sys/fs/binfmt_misc 2>/dev/null &&
printf '%s' ':aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00:'\
'\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:'\
'/usr/bin/qemu-aarch64-static:F' \
  >/proc/sys/fs/binfmt_misc/register
mount --rbind /proc "$1/proc" && mount --rbind /dev "$1/dev" && exec chroot "$@"
"""


def emulated(root: Path) -> list[str]:
    """What makes a command run in the unpacked image, on an emulated aarch64; all ends with the command."""
    return [
        *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child=SIGKILL"),
        *("sh", "-c", QEMU, "sh", str(root)),
    ]


def listening(gateway: subprocess.Popen[str]) -> int:
    """The port of a gateway, once it says that it is ready."""
    assert gateway.stdout is not None
    lines = []
    for line in gateway.stdout:
        lines.append(line)
        if " msg=ready " in line:
            return int(line.partition("mqtt://127.0.0.1:")[2].split()[0].split(",")[0])
    raise AssertionError(lines)


@pytest.mark.slow(seconds=120)
@pytest.mark.timeout(1200)
def test_on_an_emulated_aarch64_the_image_stores_and_has_its_messages_after_a_sigkill(tmp_path: Path) -> None:
    if shutil.which("qemu-aarch64-static") is None:
        pytest.skip("qemu is missing; install it: sudo apt-get install qemu-user-static")
    root = Layout(build(tmp_path, "arm64")).unpack(tmp_path / "root")
    done = subprocess.run(
        [*emulated(root), "/usr/bin/python3", "-c", "import platform; print(platform.machine())"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode and "Exec format error" in done.stderr:
        pytest.skip("this machine runs no aarch64 programs: register qemu-aarch64 with binfmt_misc")
    assert done.stdout == "aarch64\n", done.stderr
    os.chown(root / "var/lib/streambridge", os.getuid(), os.getgid())  # who is user 0 there
    config = root / "etc/streambridge/streambridge.toml"
    config.write_text(CONFIG.format(host="127.0.0.1", port=0, http=""))
    environment = {
        "PATH": "/usr/bin:/usr/sbin:/bin:/sbin",
        "STREAMBRIDGE_CONFIG": "/etc/streambridge/streambridge.toml",
    }
    run = [*emulated(root), "/opt/streambridge/bin/streambridge", "run"]
    for payload in ("21.5", "22.0"):
        gateway = subprocess.Popen(
            run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            port = listening(gateway)
            mqtt.single("sensors/a", payload, qos=1, hostname="127.0.0.1", port=port)
        finally:
            os.killpg(gateway.pid, signal.SIGKILL)
            gateway.wait()
            gateway.stdout.close()  # type: ignore[union-attr]
    read = subprocess.run(
        [*emulated(root), *READ], env=environment, capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["payload"] for line in read.stdout.splitlines()] == ["21.5", "22.0"]
