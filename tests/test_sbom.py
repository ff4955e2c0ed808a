"""The software bill of materials names what an installation of the gateway consists of."""

from __future__ import annotations

import json
import platform
import ssl
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def test_it_names_every_package_of_the_gateway_and_only_those() -> None:
    made = [
        subprocess.run([sys.executable, ".ci/sbom.py"], cwd=ROOT, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert made[0].stdout == made[1].stdout
    bill = json.loads(made[0].stdout)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    listed = {one["name"]: one for one in bill["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(line).name for line in project["dependencies"]} <= listed.keys()
    assert not listed.keys() & {"amqtt", "pyspark", "pyarrow", "numpy", "pandas", "pytest", "mkdocs-material"}
    references = {bill["metadata"]["component"]["bom-ref"], *(one["bom-ref"] for one in listed.values())}
    assert {one["ref"] for one in bill["dependencies"]} == references
    assert {ref for one in bill["dependencies"] for ref in one["dependsOn"]} <= references
    assert listed["msgspec"]["version"] == version("msgspec")
    assert listed["msgspec"]["licenses"]
    assert listed["python"]["version"] == platform.python_version()
    assert ssl.OPENSSL_VERSION.startswith(f"OpenSSL {listed['openssl']['version']}")
