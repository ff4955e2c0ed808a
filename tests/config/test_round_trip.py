"""A definition is the same in the command, in requests and in the configuration, whatever its settings.

Definitions are made of all settings of streams and of all shipped kinds of exports: random ones, from seeds,
with values that the exporter accepts.
"""

from __future__ import annotations

import asyncio
import json
import random
import types
import typing
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Meta, Struct

from bridge.config.render import NOT_SETTINGS, stream_settings, stream_table
from bridge.config.settings import load, stream_definition
from bridge.encryption import new_master
from bridge.enums import named
from bridge.errors import InvalidDefinition, StreamBridgeError
from bridge.model import MessageStreamDefinition
from bridge.operations.manager import Exports, StreamManager
from bridge.plugin import discovery
from bridge.settingtypes import Means, meanings
from bridge.streams.store import StreamStore
from tests.cli.conftest import streambridge

REGISTRY = discovery.load()
SEEDS = 160
TEXTS = (
    "payload", "message", "json", "/value", "plain", 'with "quotes", \\ and ünïcode\t\x7f', "a-b_c",
    "{stream}/{date}", "{topic}", "2026-01-31T12:00:00Z", "s3.eu-central-1.amazonaws.com", "mqtt://h:1883",
    "https://example.com/x", "mqtts://h", "topic/{topic}", "id", "ab12", "10", "{timestamp}", "{epoch}",
    "raw/a", "eu-central-1", "name", ".gz", "UTC",
)  # fmt: skip


def members(kind: Any) -> Iterator[Any]:
    """The types in a union or an Annotated, with the bounds beside them."""
    if typing.get_origin(kind) is typing.Annotated:
        yield from members(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from members(part)
    else:
        yield kind


def bounds(kind: Any) -> list[Meta]:
    found = [part for part in typing.get_args(kind) if isinstance(part, Meta)]
    return found + [
        meta for part in typing.get_args(kind) if not isinstance(part, Meta) for meta in bounds(part)
    ]


def value(rng: random.Random, kind: Any) -> Any:
    """A value of a type as on the wire, with names of enums or their numbers."""
    one = rng.choice([part for part in members(kind) if part is not type(None)])
    metas = bounds(kind)
    origin, arguments = typing.get_origin(one), typing.get_args(one)
    if origin is typing.Literal:
        return rng.choice(arguments)
    if origin in (list, tuple):
        return [value(rng, arguments[0]) for _ in range(rng.randint(1, 2))]
    if origin is dict:
        return {rng.choice(("a", "x-y", "k_1")): value(rng, arguments[1])}
    if isinstance(one, type) and issubclass(one, IntEnum):
        member = rng.choice(list(one))
        return rng.choice([member.name, member.value])
    if isinstance(one, type) and issubclass(one, Struct):
        fields = msgspec.structs.fields(one)
        chosen = [field for field in fields if field.required or rng.random() < 0.5]
        return {field.encode_name: value(rng, field.type) for field in chosen}
    if one is bool:
        return rng.random() < 0.5
    if one in (int, float):
        low = max([meta.ge for meta in metas if meta.ge is not None], default=0)
        high = min([meta.le for meta in metas if meta.le is not None], default=2**40)
        found = rng.choice([low, high, low + 1, 1000, 5000, 60_000, 7 * 86_400_000, 1 << 20, 1500])
        return max(low, min(high, found + (rng.random() if one is float else 0)))
    if Means.SECRET_FILE in meanings(kind):
        return "/etc/streambridge/secret"
    return rng.choice(TEXTS)


@cache
def minimal(kind: str, variant: int) -> dict[str, Any]:
    """The options that a kind requires, with values that it accepts."""
    rng = random.Random(f"{kind} {variant}")
    cls = REGISTRY.exporters[kind]
    for _ in range(20_000):
        config = {
            field.encode_name: value(rng, field.type)
            for field in msgspec.structs.fields(cls.Config)
            if field.required
        }
        if accepted(kind, config | {"identifier": "e 1"}):
            return config | {"identifier": f"{kind}, 1"}
    raise AssertionError(f"no minimal configuration of {kind} was found: add a value to TEXTS")


def accepted(kind: str, config: dict[str, Any]) -> bool:
    try:
        REGISTRY.config(kind, config)
    except InvalidDefinition:
        return False
    return True


def export(rng: random.Random, kind: str) -> dict[str, Any]:
    """An export with as many random options as the exporter accepts together."""
    config = minimal(kind, rng.randrange(8))
    fields = [f for f in msgspec.structs.fields(REGISTRY.exporters[kind].Config) if not f.required]
    chosen = rng.sample(fields, rng.randint(1, len(fields)))
    for field in chosen + chosen:  # one may need another
        for _ in range(60):
            fresh = config | {field.encode_name: value(rng, field.type)}
            if accepted(kind, fresh):
                config = fresh
                break
    return config


def definition(rng: random.Random, manager: StreamManager) -> MessageStreamDefinition:
    raw: dict[str, Any] = {"name": rng.choice(("my-stream", "with space, dot.")), "strategyOnFull": 0}
    kinds = rng.sample(sorted(REGISTRY.exporters), rng.randint(0, 3))
    raw["exportDefinition"] = {kind: [export(rng, kind)] for kind in kinds}
    for field in msgspec.structs.fields(MessageStreamDefinition):
        if field.name in NOT_SETTINGS or rng.random() < 0.3:
            continue
        for _ in range(40):
            fresh = raw | {field.encode_name: value(rng, field.type)}
            try:
                manager.check(fresh)
            except StreamBridgeError:
                continue
            raw = fresh
            break
    return manager.check(raw)


class NoExports(Exports):
    """The export side, when nothing is exported."""

    def define(self, *_: object) -> None:
        return

    def committed(self, *_: object) -> None:
        return


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[StreamManager]:
    """The manager of an empty data directory."""

    async def opened() -> StreamManager:
        store = StreamStore(tmp_path / "data", tmp_path / "memory", on_event=lambda *_: None)
        return StreamManager(store, REGISTRY, NoExports())

    with asyncio.Runner() as runner:
        manager = runner.run(opened())
        yield manager
        runner.run(manager.store.close())


def by_name(found: MessageStreamDefinition) -> dict[str, Any]:
    """A definition as `describe --json` prints it."""
    wire = named(MessageStreamDefinition, msgspec.to_builtins(found))
    wire["exportDefinition"] = REGISTRY.named(found.export_definition)
    shown: dict[str, Any] = json.loads(json.dumps(wire))
    return shown


def test_every_definition_survives_the_configuration_a_request_and_the_command(
    tmp_path: Path, manager: StreamManager
) -> None:
    covered: set[tuple[str, str]] = set()
    for seed in range(SEEDS):
        found = definition(random.Random(seed), manager)
        path = tmp_path / "streambridge.toml"
        path.write_text(stream_table(found, REGISTRY.exporters), encoding="utf-8")
        read = {name: manager.check(one) for name, one in load(path).streams.items()}
        assert read == {found.name: found}, path.read_text(encoding="utf-8")
        assert manager.check(by_name(found)) == found
        covered |= {(kind, key) for kind, raws in found.export_definition.items() for key in raws[0]}
        covered |= {("", key) for key, _ in stream_settings(found)}
    every = {
        (kind, field.encode_name)
        for kind, exporter in REGISTRY.exporters.items()
        for field in msgspec.structs.fields(exporter.Config)
    }
    refused = {("consumer", "priority"), ("consumer", "reduce")}
    refused |= {(kind, "topics") for kind, one in REGISTRY.exporters.items() if one.limits.contiguous}
    refused |= {
        (kind, "withheld")
        for kind, one in REGISTRY.exporters.items()
        if one.limits.contiguous and not one.limits.declares_filtered
    }
    assert every - covered - refused == set()
    settings = {field.name for field in msgspec.structs.fields(MessageStreamDefinition)}
    assert len({key for kind, key in covered if not kind}) == len(settings - {*NOT_SETTINGS})


def test_what_describe_prints_can_be_given_to_create(tmp_path: Path, manager: StreamManager) -> None:
    env = {"STREAMBRIDGE_KEY_FILE": str(tmp_path / "key")}
    (tmp_path / "key").write_text(new_master())
    for seed in (1, 2):
        found = definition(random.Random(seed), manager)
        data = tmp_path / f"data{seed}"
        (data / "streams").mkdir(parents=True, mode=0o700)
        settings = [f"{key}={text}" for key, text in stream_settings(found)]
        target = ("--data-dir", data)
        done = streambridge("streams", "create", found.name, *settings, *target, env=env)
        assert done.returncode == 0, done.stderr
        shown = streambridge("streams", "describe", found.name, "--json", *target).stdout
        assert json.loads(shown)["definition"] == by_name(
            msgspec.structs.replace(found, export_definition={})
        )
        table = streambridge("streams", "describe", found.name, "--toml", *target).stdout
        (tmp_path / "shown.toml").write_text(table, encoding="utf-8")
        stored = load(tmp_path / "shown.toml").streams[found.name]
        assert stored == msgspec.structs.replace(found, export_definition={})


def test_the_names_and_the_numbers_of_enums_mean_the_same_everywhere(
    tmp_path: Path, manager: StreamManager
) -> None:
    table = '[[streams.a.export.http]]\nidentifier = "e"\nuri = "http://h/"\nexport_format = {}\n'
    read = []
    for text in ('"JSON_BATCHED"', "1"):
        (tmp_path / "one.toml").write_text(table.format(text))
        read.append(load(tmp_path / "one.toml").streams["a"])
    assert read[0] == read[1]
    assert read[0].export_definition["http"][0]["exportFormat"] == 1
    command = {"export": {"http": [{"identifier": "e", "uri": "http://h/", "export_format": "JSON_BATCHED"}]}}
    assert stream_definition("a", command, []) == read[0]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"strategyOnFull": "Overwrite"}, r'"RejectNewData" \(0\) or "OverwriteOldestData" \(1\)'),
        ({"strategyOnFull": 7}, r'"RejectNewData" \(0\) or "OverwriteOldestData" \(1\)'),
        (
            {"exportDefinition": {"http": [{"identifier": "e", "uri": "http://h/", "exportFormat": "JSON"}]}},
            r'"RAW_NOT_BATCHED" \(0\) or "JSON_BATCHED" \(1\)',
        ),
    ],
)
def test_a_wrong_enum_in_a_request_is_answered_with_the_right_ones(
    manager: StreamManager, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidDefinition, match=told):
        manager.check({"name": "a", "strategyOnFull": 0} | fields)
