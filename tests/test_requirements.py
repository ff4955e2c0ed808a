"""requirements/ has what the gateway consists of, with hashes, in step with constraints.txt."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_packaging import run

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REMEDY = "run .ci/requirements"


def pins(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Name, version and hashes of each requirement."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found = {}
    for line in text.splitlines():
        requirement, *hashes = line.split("--hash=")
        parsed = Requirement(requirement.strip())
        found[parsed.name.lower().replace("_", "-")] = (
            str(parsed.specifier),
            [one.strip() for one in hashes],
        )
    return found


def test_the_hashed_requirements_are_those_of_the_gateway_in_the_versions_of_the_constraints() -> None:
    bill = subprocess.run(
        [sys.executable, ".ci/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    wanted = {one["name"] for one in json.loads(bill)["components"] if one["purl"].startswith("pkg:pypi/")}
    gateway = pins(ROOT / "requirements/gateway.txt")
    assert wanted == gateway.keys(), REMEDY
    backend = pins(ROOT / "requirements/build.txt")
    assert {Requirement(line).name for line in PROJECT["build-system"]["requires"]} <= backend.keys(), REMEDY
    constraints = {
        name.lower().replace("_", "-"): version
        for name, _, version in (
            line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
        )
    }
    for name, (version, hashes) in (gateway | backend).items():
        assert version == f"=={constraints[name]}", REMEDY
        assert hashes
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", one) for one in hashes)


def _needs(name: str) -> set[str]:
    """A distribution and all that it needs on this machine, without extras."""
    found: set[str] = set()
    ahead = [name]
    while ahead:
        if (name := canonicalize_name(ahead.pop())) not in found:
            found.add(name)
            needed = map(Requirement, distribution(name).requires or ())
            ahead += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _size(names: set[str]) -> int:
    """Bytes of the files that these distributions install."""
    files = (file.locate() for name in names for file in distribution(name).files or ())
    return sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).is_file())


def test_the_gateway_installs_little_beside_boto3() -> None:
    """A package that only one convenience needs shows here: pydantic came with the command line, 11 MB."""
    assert _size(_needs("streambridge")) < 2.5 * _size(_needs("boto3"))


@pytest.mark.slow(seconds=60)
def test_pip_installs_the_gateway_from_hashed_wheels_on_both_architectures(tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    pip = environment / "bin" / "pip"
    hashed = (
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--quiet",
        "-r",
        ROOT / "requirements/gateway.txt",
    )
    run(pip, "install", *hashed, cwd=tmp_path)
    run(pip, "check", cwd=tmp_path)
    run(environment / "bin/python", "-c", "import boto3, msgspec, uvloop, zlib_ng", cwd=tmp_path)
    aarch64 = [f"--platform=manylinux_2_{libc}_aarch64" for libc in (17, 28)]
    run(pip, "download", *hashed, "--no-deps", *aarch64, "--dest", tmp_path / "aarch64", cwd=tmp_path)
    assert len(list((tmp_path / "aarch64").glob("*aarch64.whl"))) >= 4

    spoilt = tmp_path / "spoilt.txt"
    text = (ROOT / "requirements/gateway.txt").read_text()
    spoilt.write_text(re.sub("(?<=sha256:)[0-9a-f]{64}", "0" * 64, text))
    done = subprocess.run(
        [pip, "install", "--require-hashes", "--force-reinstall", "--no-deps", "-r", spoilt],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
