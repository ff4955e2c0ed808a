"""The example plugins are run as their readers would run them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from bridge import plugins
from tests.export.harness import drop_in, running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "streambridge-sqlite"


def test_the_example_package_passes_its_own_tests() -> None:
    path = os.pathsep.join([str(EXAMPLE), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[89] passed", done.stdout)


def test_the_single_file_of_the_docs_works_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# /etc/streambridge/plugins/tee.py\n.*?)```", page, re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line]) <= 15
    drop_in(tmp_path, "tee", found[1])
    registry = plugins.load([tmp_path / "plugins"])
    assert "tee" in registry.exporters

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"tee": [{"identifier": "t", "path": str(tmp_path / "out")}]})
            await gateway.append("a", b"one", b"two")
            await gateway.exported("a", 1)

    asyncio.run(scenario())
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"
