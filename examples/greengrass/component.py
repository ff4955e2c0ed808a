"""usage: python3 component.py install|run ARTIFACTS WORK

The lifecycle of streambridge as a component of AWS IoT Greengrass; recipe.yaml calls it. Needs Python 3.11
or newer and nothing else.

`install` makes an environment in WORK with the wheel of ARTIFACTS and the packages of its gateway.txt, each
checked against its hash there. Wheels in ARTIFACTS are taken from there, so a device without an index gets
all of them as artifacts. A finished environment of the same artifacts is kept.

`run` writes the settings of the deployment, which are JSON in STREAMBRIDGE_SETTINGS, to
WORK/streambridge.toml, and becomes the service. Everything that is stored is in WORK/data, which Greengrass
keeps when it updates a component.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def install(artifacts: Path, work: Path) -> None:
    """Make the environment, and its mark last: an interrupted installation starts again."""
    environment, mark = work / "venv", work / "venv" / "installed"
    (wheel,) = artifacts.glob("streambridge-*.whl")
    requirements = artifacts / "gateway.txt"
    wanted = hashlib.sha256(wheel.read_bytes() + requirements.read_bytes() + sys.version.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == wanted:
        return
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [environment / "bin/pip", "install", "--disable-pip-version-check", "--find-links", artifacts]
    subprocess.run([*pip, "--require-hashes", "--only-binary", ":all:", "-r", requirements], check=True)
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    mark.write_text(wanted)


def run(work: Path) -> None:
    """Become the service."""
    settings = json.loads(os.environ.pop("STREAMBRIDGE_SETTINGS", "") or "{}")
    gateway = {"id": os.environ.pop("STREAMBRIDGE_THING", ""), "data_dir": str(work / "data")}
    settings["gateway"] = gateway | settings.get("gateway", {})
    (work / "data").mkdir(mode=0o700, exist_ok=True)
    config = work / "streambridge.toml"
    new = work / "streambridge.toml.new"
    new.write_text(toml(settings))
    new.chmod(0o600)
    new.replace(config)
    os.environ["STREAMBRIDGE_CONFIG"] = str(config)
    command = work / "venv/bin/streambridge"
    os.execv(command, [str(command), "run"])


def toml(table: dict[str, Any], path: tuple[str, ...] = (), array: bool = False) -> str:
    """A table as TOML, whose texts, numbers, truth values and lists are JSON's. A null is a key left out."""
    table = {key: value for key, value in table.items() if value is not None}
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    arrays = {key: value for key, value in table.items() if _of_tables(value)}
    head = ".".join(map(_text, path))
    lines = [f"[[{head}]]" if array else f"[{head}]"] if path else []
    lines += [
        f"{_text(key)} = {_value(value)}"
        for key, value in table.items()
        if key not in tables and key not in arrays
    ]
    below = [toml(value, (*path, key)) for key, value in tables.items()]
    below += [toml(one, (*path, key), array=True) for key, value in arrays.items() for one in value]
    return "\n".join(lines) + "\n" + "".join(below)


def _of_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)} = {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _text(value)


def _text(value: Any) -> str:
    """JSON's escapes are TOML's, but for surrogates, which are written as they are, and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


if __name__ == "__main__":
    step, artifacts, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if step == "install":
        install(artifacts, work)
    elif step == "run":
        run(work)
    else:
        sys.exit(__doc__)
