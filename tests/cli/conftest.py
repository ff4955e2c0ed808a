"""The command in a process of its own, and data directories for it to look into."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from bridge.model import MessageStreamDefinition, StrategyOnFull
from bridge.operations.definitions import settings_of
from bridge.streams.store import StreamStore
from tests.fakes.clock import Machine

COMMAND = [sys.executable, "-m", "bridge"]
CHECKOUT = Path(__file__).parents[2]
NOON = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def environment() -> dict[str, str]:
    """This process's environment, without what would point the command at somebody's configuration."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("STREAMBRIDGE_", "AWS_"))}
    return kept | {"PYTHONPATH": str(CHECKOUT)}


def streambridge(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path = CHECKOUT,
    prefix: Sequence[str] = (),
    given: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command with `given` at its standard input, and wait for its end."""
    return subprocess.run(
        [*prefix, *COMMAND, *map(str, arguments)],
        cwd=cwd,
        env=environment() | (env or {}),
        input=given or "",
        capture_output=True,
        text=True,
        timeout=120,
    )


Fill = Callable[..., Path]


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """A function that appends messages to a stream of a data directory; the n-th at n seconds past noon."""

    def fill_it(
        messages: Sequence[tuple[str, bytes]] = (),
        name: str = "sensors",
        headers: bytes = b"",
        **settings: object,
    ) -> Path:
        data_dir = tmp_path / "data"
        definition = MessageStreamDefinition(
            **{"name": name, "strategy_on_full": StrategyOnFull.RejectNewData, "topics": ["sensors/#"]}
            | settings
        )

        async def work() -> None:
            machine = Machine(NOON / 1000)
            store = StreamStore(data_dir, tmp_path / "memory", on_event=lambda *_: None, system=machine)
            stream = store.streams.get(name) or store.create(
                name, settings_of(definition), msgspec.json.encode(definition)
            )
            for topic, payload in messages:
                machine.set_wall(NOON / 1000 + stream.next_sequence)
                stream.append(topic.encode(), payload, headers)
                await store.committer.drain()
            await store.close()

        asyncio.run(work())
        return data_dir

    return fill_it
