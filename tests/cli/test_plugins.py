"""`streambridge plugins new`: the package that it makes, and the names that it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.cli.conftest import CHECKOUT, streambridge


def made(tmp_path: Path, name: str = "my-queue") -> Path:
    done = streambridge("plugins", "new", name, "--in", tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / f"streambridge-{name}"


def run(*command: str | Path, cwd: Path, **more: str) -> str:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STREAMBRIDGE_"))
    }
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=kept | more, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_plugin_passes_the_contract_suite_as_it_stands(tmp_path: Path) -> None:
    package = made(tmp_path)
    there = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert there == {
        "README.md",
        "pyproject.toml",
        "streambridge_my_queue.py",
        "tests/test_streambridge_my_queue.py",
    }
    path = {"PYTHONPATH": str(CHECKOUT)}
    assert " passed" in run(sys.executable, "-m", "pytest", "-q", cwd=package, **path)


@pytest.mark.slow(seconds=60)
def test_a_new_plugin_passes_its_tests_in_a_fresh_environment_and_is_listed(tmp_path: Path) -> None:
    package, environment, tree = made(tmp_path), tmp_path / "venv", tmp_path / "tree"
    venv.create(environment, with_pip=True)
    tree.mkdir()
    for name in ("bridge", "plugins", "config", "systemd", "pyproject.toml", "README.md", "LICENSE"):
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
        else:
            shutil.copy(source, tree)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", tree, f"{package}[test]", cwd=tmp_path)
    assert " passed" in run(python, "-m", "pytest", "-q", cwd=package)
    listed = json.loads(run(environment / "bin" / "streambridge", "plugins", "--json", cwd=tmp_path))
    (found,) = (plugin for plugin in listed if plugin["name"] == "myQueue")
    assert found == {
        "name": "myQueue",
        "origin": "package streambridge-my-queue",
        "version": "0.1.0",
        "kinds": ["myQueue"],
        "error": None,
    }


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("s3", "'s3' is taken"),
        ("reduce", "'reduce' is taken"),
        ("Kafka", "cannot be a plugin's name; use lower-case letters"),
        ("../kafka", "cannot be a plugin's name"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_made(
    tmp_path: Path, name: str, says: str
) -> None:
    done = streambridge("plugins", "new", name, "--in", tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_exists_is_kept(tmp_path: Path) -> None:
    module = made(tmp_path) / "streambridge_my_queue.py"
    module.write_text("mine")
    done = streambridge("plugins", "new", "my-queue", "--in", tmp_path)
    assert done.returncode == 1
    assert "exists; choose another name, or another directory with --in" in done.stderr
    assert module.read_text() == "mine"
    missing = streambridge("plugins", "new", "my-queue", "--in", tmp_path / "missing")
    assert "there is no directory" in missing.stderr
