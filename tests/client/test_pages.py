"""The programs in the documentation, each run as it is against a service in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.client.gateway import Gateway
from tests.test_docs import DOCS, ROOT, blocks

PYTHON_CLIENT = DOCS / "howto" / "python-client.md"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def python(program: str, gateway: Gateway) -> str:
    """What a Python program prints; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", program.replace("1883", str(gateway.mqtt_port))],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_programs_of_the_python_clients_page_run_one_after_another(gateway: Gateway) -> None:
    programs = {title: text for _, title, text in blocks("python", [PYTHON_CLIENT])}
    assert list(programs) == ["append", "asyncio", "tail", "ids"]
    assert python(programs["append"], gateway) == "stored as number 0\n0 b'21.5'\n"
    assert sorted(line.split()[1] for line in python(programs["asyncio"], gateway).splitlines()) == [
        f"b'{value}'" for value in range(10)
    ]
    assert python(programs["tail"], gateway).count("streams/readings") == 11
    assert python(programs["ids"], gateway) == ""
    assert python(programs["ids"], gateway) == ""  # the same id
    assert python(programs["tail"], gateway).count("b'21.5'") == 2
