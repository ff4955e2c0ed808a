"""The Compose file is valid, runs the image that we build, and configures it as `check` accepts."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).parents[1]
COMPOSE = CHECKOUT / "examples/compose"
FILE = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
VERSION = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]


def test_the_gateway_of_the_compose_file_is_the_image_as_it_is_meant_to_run() -> None:
    image = runpy.run_path(str(CHECKOUT / ".ci/oci.py"), {"__name__": "oci"}, "oci")["CONFIG"]
    gateway = FILE["services"]["gateway"]
    assert gateway["image"] == f"localhost/streambridge:{VERSION}"
    assert gateway["read_only"] is True
    assert gateway["cap_drop"] == ["ALL"]
    assert gateway["healthcheck"]["test"] == image["Healthcheck"]["Test"]
    assert {volume.split(":")[1] for volume in gateway["volumes"]} == {"/etc/streambridge", *image["Volumes"]}


def test_its_configuration_starts_a_gateway_for_its_network(tmp_path: Path) -> None:
    text = (COMPOSE / "gateway/streambridge.toml").read_text()
    assert text.count(":1883") == 1
    text = text.replace(":1883", ":0").replace("/var/lib/streambridge", str(tmp_path / "data"))
    (tmp_path / "streambridge.toml").write_text(text + '[http]\nlisten = "127.0.0.1:0"\n')
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "check", "-c", tmp_path / "streambridge.toml"],
        cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow(seconds=5)
def test_docker_compose_accepts_the_file() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is missing; install it: sudo apt-get install docker-compose")
    command = ["docker-compose", "--file", str(COMPOSE / "compose.yaml"), "config"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == {"gateway", "device"}
