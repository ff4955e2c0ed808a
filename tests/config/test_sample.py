"""config/streambridge.toml says what the code does: defaults, all keys, and examples that are valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge import config, tomlstruct
from bridge.model import MessageStreamDefinition

SAMPLE = Path(__file__).parents[2] / "config" / "streambridge.toml"
LINES = SAMPLE.read_text().splitlines()
DEFAULT = re.compile(r"#(\w+ = .*)")
EXAMPLE = re.compile(r"# Example: (.*)")


def uncommented(pattern: re.Pattern[str], *, active: bool) -> str:
    """The lines that match the pattern, uncommented, below their sections; with the active keys or not."""
    kept = []
    for line in LINES:
        found = pattern.fullmatch(line)
        if found:
            kept.append(found[1])
        elif line.startswith("[") or (active and not line.startswith("#")):
            kept.append(line)
    return "\n".join(kept)


def test_it_works_as_it_is_for_a_user_without_rights() -> None:
    settings = config.load(SAMPLE)
    assert settings.gateway.data_dir == SAMPLE.parent / "data"
    assert settings.streams["sensors"].topics == ["sensors/#"]


def test_every_commented_line_shows_the_default(tmp_path: Path) -> None:
    bare, shown = tmp_path / "bare" / "x.toml", tmp_path / "shown" / "x.toml"
    for path, text in (
        (bare, "[streams.sensors]"),
        (shown, uncommented(DEFAULT, active=False)),
    ):
        path.parent.mkdir()
        path.write_text(text)
    assert msgspec.structs.replace(config.load(shown), path=None) == msgspec.structs.replace(
        config.load(bare), path=None
    )


def test_every_example_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    path = tmp_path / "x.toml"
    path.write_text(uncommented(EXAMPLE, active=True))
    assert config.load(path).streams["sensors"].export_definition["s3"]


def test_every_key_that_the_code_knows_is_in_the_file() -> None:
    either = re.compile(rf"(?:{DEFAULT.pattern}|{EXAMPLE.pattern})")
    text = "\n".join(
        next(filter(None, found.groups())) if found else line if line.startswith("[") else ""
        for line in LINES
        for found in [either.fullmatch(line)]
    )
    shown = tomllib.loads(text)
    sensors = shown.pop("streams")["sensors"]
    sensors.pop("export")
    del shown["gateway"]["data_dir"]
    missing = absent(config.Config, shown, "", {"path", "streams", "data_dir"})
    missing += absent(
        MessageStreamDefinition,
        {"stream_segment_size": sensors.pop("segment_size"), **sensors},
        "streams.",
        {"name", "topics", "export_definition"},
    )
    assert missing == []


def absent(cls: type[msgspec.Struct], table: dict[str, Any], place: str, leave_out: set[str]) -> list[str]:
    missing = []
    for field in msgspec.structs.fields(cls):
        key = field.name.removesuffix("_millis")
        if field.name in leave_out:
            continue
        if key not in table:
            missing.append(place + key)
        elif inner := tomlstruct.struct_in(field.type):
            value = table[key][0] if isinstance(table[key], list) else table[key]
            missing += absent(inner[0], value, f"{place}{key}.", leave_out)
    return missing
