"""docs/howto/limits.md, step by step, beside NATS JetStream: both say after each step what its table has."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.testbed.local import tool
from benchmarks.testbed.nats import NatsServer
from bridge.client import NotEnoughMessagesException, ReadMessagesOptions, StreamManagerClient
from tests.cli.conftest import COMMAND, environment
from tests.http.conftest import Service

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "limits.md"
BLOCK = re.compile(r"^( *)```(\w+)(?: title=\"(\w+)\")?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| (\d+) \| (.*) \|$", re.MULTILINE)


def numbers(messages: int, first: int, last: int) -> str:
    return f"{first} to {last}" if messages else f"none, next {last + 1}"


class Ours:
    """The page's commands in a shell, and the page's request."""

    def __init__(self, service: Service, look: str) -> None:
        self.service, self.look = service, look
        bin_ = service.directory / "bin"
        bin_.mkdir()
        for name in ("mosquitto_pub", "mosquitto_rr"):
            self._script(bin_ / name, f'{tool(name)} -p {service.mqtt_port} "$@"')
        self._script(bin_ / "streambridge", f'{" ".join(COMMAND)} "$@"')
        self.environment = environment() | {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "STREAMBRIDGE_CONFIG": str(service.directory / "bridge.toml"),
        }

    @staticmethod
    def _script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\nexec {line}\n")
        path.chmod(0o755)

    def run(self, commands: str) -> str:
        done = subprocess.run(
            ["sh", "-euc", commands], env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cells(self) -> list[str]:
        """Messages, numbers, what max_bytes counts, bytes of the files."""
        (info,) = json.loads(self.run(self.look))["messageStreamInfos"]
        status = info["storageStatus"]
        of = numbers(info["messages"], status["oldestSequenceNumber"], status["newestSequenceNumber"])
        return [str(info["messages"]), of, str(self._counted()), str(status["totalBytes"])]

    def _counted(self) -> int:
        with StreamManagerClient(port=self.service.mqtt_port) as client:
            try:
                found = client.read_messages("EVENTS", ReadMessagesOptions(max_message_count=100))
            except NotEnoughMessagesException:
                return 0
        return sum(len(message.topic or "") + len(message.payload or b"") for message in found)


class JetStream:
    """The page's Python, with the module nats in reach."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.names: dict[str, Any] = {"nats": pytest.importorskip("nats", reason="pip install '.[dev]'")}

    async def run(self, code: str) -> None:
        code = code.replace(":4222", f":{self.port}")
        compiled = compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.isawaitable(result := eval(compiled, self.names)):
            await result

    async def cells(self, look: str) -> list[str]:
        """Messages, numbers, bytes."""
        await self.run(re.sub(r"print\((.*)\)", r"infos = \1", look))
        (info,) = self.names["infos"]
        state = info.state
        of = numbers(state.messages, state.first_seq, state.last_seq)
        return [str(state.messages), of, str(state.bytes)]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path, "")
    try:
        yield running
    finally:
        assert running.stop() == 0


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    (tmp_path / "nats").mkdir()
    running = NatsServer(tmp_path / "nats")
    try:
        yield running
    finally:
        running.stop()


def test_the_page_and_jetstream_say_what_the_table_has(nats_server: NatsServer, service: Service) -> None:
    page = PAGE.read_text()
    blocks = [(found[2], found[3], textwrap.dedent(found[4])) for found in BLOCK.finditer(page)]
    look = {language: text for language, title, text in blocks if title == "look"}
    steps: list[dict[str, str]] = []
    for language, title, text in blocks:
        if language == "sh" and not title:
            steps.append({})
        if not title:
            steps[-1][language] = text
    rows = {int(found[1]): found[2].split(" | ") for found in ROW.finditer(page)}
    assert sorted(rows) == list(range(1, len(steps) + 1))
    ours = Ours(service, look["sh"])

    async def compare() -> None:
        theirs = JetStream(nats_server.port)
        try:
            for number, step in enumerate(steps, 1):
                await asyncio.to_thread(ours.run, step["sh"])
                await theirs.run(step.get("python", ""))
                row = rows[number]
                async with asyncio.timeout(240):  # the last step: until a second has passed
                    while True:
                        mine = await asyncio.to_thread(ours.cells)
                        said = mine + await theirs.cells(look["python"])
                        if said == row or number < len(steps):
                            break
                        await asyncio.sleep(0.1)
                assert said == row, f"step {number}"
        finally:
            await theirs.run("await nc.close()")

    asyncio.run(compare())
