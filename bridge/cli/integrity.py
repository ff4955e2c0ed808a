"""`streambridge verify` and `streambridge repair`: the integrity of a data directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bridge.cli import output
from bridge.cli.options import (
    ConfigOption,
    JsonOption,
    KeyFileOption,
    act_as_owner,
    data_directory,
    keys_of,
)
from bridge.config.settings import DEFAULT_CONFIG
from bridge.errors import EncryptionKeyError
from bridge.model import plain_definition
from bridge.streams import verify as integrity
from bridge.streams.verify import Checked

Directory = Annotated[
    Path | None,
    typer.Argument(
        help="The data directory.", metavar="DIR", show_default="gateway.data_dir of the configuration"
    ),
]

app = typer.Typer()


@app.command(
    epilog="""\b
Examples:
  streambridge verify /var/lib/streambridge
  streambridge verify --json -c config/streambridge.toml

\b
Exit codes:
  0 no damage; 65 something is damaged, and `repair` quarantines it; 78 the key cannot be used, and
  no damage was found without it
"""
)
def verify(
    directory: Directory = None,
    config: ConfigOption = DEFAULT_CONFIG,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check all stored messages and drop records.

    Changes nothing; the service may be running. Without the right key, only the framing and the checksums of
    encrypted messages are checked.
    """
    data_dir = data_directory(config, directory, "as `verify DIR`")
    keys, wrong = keys_of(config, data_dir, key_file), None
    try:
        if keys.configured:
            keys.check()
    except EncryptionKeyError as error:
        wrong = error
    with _bar("bytes") as progress:
        found = integrity.verify(data_dir, progress, keys if keys.configured and not wrong else None)
    _print(found, as_json, "damaged")
    if wrong:
        raise wrong


@app.command(
    epilog="""\b
Examples:
  sudo systemctl stop streambridge
  sudo -u streambridge streambridge repair /var/lib/streambridge
  sudo systemctl start streambridge

\b
Exit codes:
  0 no damage; 1 a stream could not be opened, and is not repaired; 65 something was damaged, and
  is repaired; 75 the service is running
"""
)
def repair(
    directory: Directory = None,
    config: ConfigOption = DEFAULT_CONFIG,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quarantine damaged data and rebuild indexes.

    Reports the messages that were lost. The service must be stopped.
    """
    data_dir = data_directory(config, directory, "as `repair DIR`")
    keys = keys_of(config, data_dir, key_file)
    act_as_owner(data_dir)
    with _bar("segments") as progress:
        found = integrity.repair(
            data_dir,
            lambda name: msgspec.json.encode(plain_definition(name)),
            progress,
            keys,
        )
    _print(found, as_json, "damaged, now repaired")


@contextmanager
def _bar(unit: str) -> Iterator[integrity.Progress]:
    count = TextColumn("{task.completed:,} of {task.total:,} " + unit)
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        count,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        tasks = {}

        def update(stream: str, done: int, total: int) -> None:
            if stream not in tasks:
                tasks[stream] = bars.add_task(stream, total=total)
            bars.update(tasks[stream], completed=done, total=total)

        yield update


def _print(found: list[Checked], as_json: bool, verdict: str) -> None:
    bad = [checked for checked in found if checked.problems]
    closed = [checked for checked in found if checked.closed]
    streams = [checked for checked in found if checked.name != integrity.KEYS]
    if as_json:
        output.json(found)
    else:
        for checked in found:
            _print_stream(checked)
        total = sum(checked.messages for checked in streams)
        number = sum(1 for checked in bad if checked.name != integrity.KEYS and not checked.closed)
        what = [output.count(number, "stream")] if number else []
        what += ["keys"] if any(checked.name == integrity.KEYS for checked in bad) else []
        states = [f"{' and '.join(what)} {verdict}"] if what else []
        states += [f"{output.count(len(closed), 'stream')} not repaired"] if closed else []
        state = ", ".join(states) or "no damage"
        output.echo(f"{output.count(len(streams), 'stream')}, {output.count(total, 'message')}: {state}")
    if closed:
        raise typer.Exit(output.ExitCode.FAILED)
    if bad:
        raise typer.Exit(output.ExitCode.DAMAGED)


def _print_stream(checked: Checked) -> None:
    state = output.count(len(checked.problems), "problem") if checked.problems else "ok"
    if checked.name == integrity.KEYS:
        output.echo(f"{checked.name}: {state}")
        _print_problems(checked)
        return
    numbers = f" ({checked.oldest} to {checked.newest})" if checked.messages else ""
    output.echo(
        f"{checked.name}: {state}; {output.count(checked.messages, 'message')}{numbers}, "
        f"{output.count(checked.segments, 'segment')}, {output.count(checked.frames, 'frame')}, "
        f"{output.count(checked.total_bytes, 'byte')}"
    )
    if checked.unopened:
        output.echo(
            f"  encrypted: {output.count(checked.unopened, 'frame')} could not be decrypted without the key; "
            "their checksums are right"
        )
    _print_problems(checked)
    if checked.lost:
        output.echo(f"  {output.lost_to_damage(checked.lost)}")
    for name in checked.rebuilt:
        output.echo(f"  {name}: the index does not match its segment, and is made again when it is needed")
    for name in checked.quarantined:
        output.echo(f"  quarantined: {name}")


def _print_problems(checked: Checked) -> None:
    for problem in checked.problems:
        lost = f"; {output.lost_to_damage(problem.lost)}" if problem.lost else ""
        output.echo(f"  {problem.path}: {problem.what}{lost}")
