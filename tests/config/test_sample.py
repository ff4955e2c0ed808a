"""config/streambridge.toml says what the code does: defaults, all keys, and examples that are valid."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bridge.config import Config, load, tomlstruct
from bridge.errors import ConfigError
from bridge.model import MessageStreamDefinition

SAMPLE = Path(__file__).parents[2] / "config" / "streambridge.toml"
LINES = SAMPLE.read_text().splitlines()
DEFAULT = re.compile(r"#(\w+ = .*)")
EXAMPLE = re.compile(r"# Example: (.*)")
EITHER = re.compile(rf"(?:{DEFAULT.pattern}|{EXAMPLE.pattern})")


def uncommented(pattern: re.Pattern[str], *, active: bool) -> str:
    """The lines that match the pattern, uncommented, below their sections; with the active keys or not."""
    kept = []
    for line in LINES:
        found = pattern.fullmatch(line)
        if found:
            kept.append(next(filter(None, found.groups())))
        elif line.startswith("[") or (active and not line.startswith("#")):
            kept.append(line)
    return "\n".join(kept)


def test_it_works_as_it_is_for_a_user_without_rights() -> None:
    sample = load(SAMPLE)
    assert sample.gateway.data_dir == SAMPLE.parent / "data"
    assert sample.streams["sensors"].topics == ["sensors/#"]


def test_every_commented_line_shows_the_default(tmp_path: Path) -> None:
    bare, shown = tmp_path / "bare" / "x.toml", tmp_path / "shown" / "x.toml"
    for path, text in (
        (bare, "[streams.sensors]"),
        (shown, uncommented(DEFAULT, active=False)),
    ):
        path.parent.mkdir()
        path.write_text(text)
    assert msgspec.structs.replace(load(shown), path=None) == msgspec.structs.replace(load(bare), path=None)


def test_every_example_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    path = tmp_path / "x.toml"
    path.write_text(uncommented(EXAMPLE, active=True))
    assert load(path).streams["sensors"].export_definition["s3"]


def test_every_key_that_the_code_knows_is_in_the_file() -> None:
    shown = tomllib.loads(uncommented(EITHER, active=False))
    sensors = shown.pop("streams")["sensors"]
    sensors.pop("export")
    del shown["gateway"]["data_dir"]
    past = {"handshakes_per_second"}  # still allowed, and without effect
    missing = absent(Config, shown, "", {"path", "streams", "data_dir"} | past)
    missing += absent(
        MessageStreamDefinition,
        {"stream_segment_size": sensors.pop("segment_size"), **sensors},
        "streams.",
        {"name", "topics", "export_definition", "delivery"},
    )
    assert missing == []


@pytest.mark.parametrize(
    "wrong",
    [
        "[]",
        "{}",
        "[[]]",
        "[{}]",
        '""',
        '"\\u0000"',
        "-1",
        "1e300",
        "true",
        "2026-01-01",
        '[1, "a"]',
        "9" * 30,
    ],
)
def test_any_value_at_any_key_is_taken_or_refused_with_its_line(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    lines = uncommented(EITHER, active=False).splitlines()
    path = tmp_path / "x.toml"
    for number, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        if equals:
            path.write_text("\n".join([*lines[:number], f"{key} = {wrong}", *lines[number + 1 :]]))
            told = refusal(path)
            assert told == "" or f"{path}:" in told


def refusal(path: Path) -> str:
    try:
        load(path)
    except ConfigError as error:
        return str(error)
    return ""


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
