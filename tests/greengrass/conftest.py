"""The real AWS SDKs, each in a directory of its own, and a bridge for them to talk to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.sdks import installed
from tests.greengrass.harness import Server

HERE = Path(__file__).parent
JAVA_SDK = "STREAMBRIDGE_JAVA_SDK"  # a directory with the jars
PYTHON_SDKS = ("stream-manager-1.1.2", "greengrasssdk-1.6.1", "greengrasssdk-1.5.0")
NODE_SDK = "aws-greengrass-core-sdk-1.7.0"
# The same snippet runs with each of the Python SDKs; they differ in the package's name only.
PREAMBLE = """
import asyncio, collections.abc, json, os, sys, threading, time
if "greengrasssdk-1.5.0" in os.environ["PYTHONPATH"]:
    # It was made for Python 3.7. What it uses and Python has dropped since:
    collections.Mapping = collections.abc.Mapping
    def with_loop(function):
        return lambda *args, loop=None, **options: function(*args, **options)
    for name in ("wait_for", "open_connection", "Queue"):
        setattr(asyncio, name, with_loop(getattr(asyncio, name)))
try:
    import stream_manager
except ModuleNotFoundError:
    import greengrasssdk.stream_manager
    sys.modules["stream_manager"] = sys.modules["greengrasssdk.stream_manager"]
    for part in ("data", "exceptions"):
        sys.modules["stream_manager." + part] = sys.modules["greengrasssdk.stream_manager." + part]
from stream_manager import *
from stream_manager.exceptions import *
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the SDK for Java, unless its directory is given."""
    left_out = (
        [] if JAVA_SDK in os.environ else [item for item in items if item.get_closest_marker("java_sdk")]
    )
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


class Sdk:
    """Runs code with a Python SDK in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        requirements = HERE / "sdks" / f"{name}.txt"
        self.directory = installed(
            name,
            requirements,
            lambda target: [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--target", str(target), "--requirement", str(requirements)),
            ],
        )

    def start(self, code: str, server: Server, **env: str) -> subprocess.Popen[str]:
        """Start a program that has imported everything of the SDK."""
        return subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
            env={"PYTHONPATH": str(self.directory), "STREAM_MANAGER_SERVER_PORT": str(server.port)} | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, server: Server, **env: str) -> str:
        """Run it to its end, which must be good; returns what it printed."""
        return finish(self.start(code, server, **env))


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    """What a program printed; it must end well."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
    assert process.returncode == 0, f"{out}\n{err}"
    return out


@pytest.fixture(params=PYTHON_SDKS)
def any_sdk(request: pytest.FixtureRequest) -> Sdk:
    """Each of the Python SDKs."""
    return Sdk(request.param)


@pytest.fixture(scope="session")
def sdk() -> Sdk:
    """The current Python SDK."""
    return Sdk(PYTHON_SDKS[0])


@pytest.fixture(scope="session")
def node() -> Callable[..., str]:
    """A function that runs JavaScript with the Node.js SDK, in an async function with `client` connected."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing (Node.js 18 or newer with npm)")
    manifest = HERE / "sdks" / f"{NODE_SDK}.json"

    def command(target: Path) -> list[str]:
        shutil.copy(manifest, target / "package.json")
        return ["npm", "install", "--silent", "--no-audit", "--no-fund"]

    directory = installed(NODE_SDK, manifest, command)
    quiet = "{error: () => {}, info: () => {}, debug: () => {}, warn: (...a) => console.log('warned', ...a)}"

    def run(code: str, server: Server, **env: str) -> str:
        program = f"""
            const assert = require('assert');
            const {{ randomUUID: uuidv4 }} = require('crypto');
            const sm = require('aws-greengrass-core-sdk/stream-manager');
            const {{ StreamManagerClient, util, exceptions }} = sm;
            for (const key of Object.keys(sm)) globalThis[key] = sm[key];
            const client = new StreamManagerClient({{logger: {quiet}}});
            const work = async () => {{ {code} }};
            client.onConnected(() => work().then(
                () => process.exit(0), (e) => {{ console.error(e); process.exit(1); }}));
            client.onError((e) => {{ console.error('connection', e); process.exit(2); }});
        """
        process = subprocess.Popen(
            ["node", "-e", program],
            cwd=directory,
            env={"PATH": os.environ["PATH"], "STREAM_MANAGER_SERVER_PORT": str(server.port)} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return finish(process)

    return run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A bridge that listens for SDK clients."""
    with Server(tmp_path) as running:
        yield running
