"""Plugins: how they are found, what is refused, and each hook."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import py_compile
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge import objectkeys
from bridge.filtered import from_extra, left_out
from bridge.plugin import discovery, hooks
from bridge.streams.drops import DropReason
from tests.export.harness import Bucket, drop_in, numbers, running, until

HOOKS = [name for name in dir(hooks) if hasattr(getattr(hooks, name), "streambridge_spec")]


def test_every_hook_has_a_test() -> None:
    here = Path(__file__)
    tests = (here, here.with_name("test_credentials.py"), here.parents[1] / "auth/test_plugins.py")
    text = "".join(path.read_text(encoding="utf-8") for path in tests)
    assert HOOKS
    assert [name for name in HOOKS if f"def {name}(" not in text] == []


def test_all_shipped_plugins_load_without_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("streambridge_plugins_", "boto3", "pyarrow")):
            monkeypatch.delitem(sys.modules, name)
    registry = discovery.load()
    assert [(found.name, found.error) for found in registry.found if found.error] == []
    assert {"http", "iotAnalytics", "kinesis", "IotSitewise", "s3TaskExecutor", "firehose", "s3"} <= set(
        registry.exporters
    )
    assert not {"boto3", "pyarrow"} & set(sys.modules)


GOOD = """
    from bridge import *

    class Out(Exporter):
        kind = "{kind}"
        def export(self, batch):
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Out)
"""


def test_bad_plugins_are_listed_with_their_error_and_the_others_run(tmp_path: Path) -> None:
    bad = {
        "a_good": GOOD.format(kind="good"),
        "b_import": "import no_such_sdk",
        "b_leaves": "raise SystemExit(3)",
        "c_misspelt": "from bridge import hookimpl\n@hookimpl\ndef register_exporter(register): pass",
        "c_unlike": "from bridge import hookimpl\n@hookimpl\ndef on_start(): pass",
        "d_argument": "from bridge import hookimpl\n@hookimpl\ndef register_exporters(r): pass",
        "e_taken": GOOD.format(kind="good"),
        "d_raises": "from bridge import hookimpl\n@hookimpl\ndef register_exporters(register):\n    1 / 0",
        "f_no_class": "from bridge import *\n@hookimpl\ndef register_exporters(register): register(1)",
        "g_unmarked": "\n\ndef register_exporters(register): pass",
        "g_unregistered": GOOD.format(kind="lost").partition("@hookimpl")[0],
        "g_nothing": "limit = 1",
        "h_timeout": GOOD.replace("{kind}", 'h"; timeout = "900'),
        "h_never": GOOD.replace("{kind}", 'i"; timeout = 0; other = "'),
        "h_limits": GOOD.replace("{kind}", 'j"; limits = {"records": 5}; other = "'),
        "h_records": GOOD.replace("{kind}", 'k"; limits = BatchLimits(records="5"); other = "'),
        "f_empty": "from bridge import *\n@hookimpl\ndef register_exporters(register): register(Exporter)",
        "kinesis": GOOD.format(kind="other"),
        "s3_again": GOOD.format(kind="s3"),
        "z_good": GOOD.format(kind="fine"),
    }
    for name, source in bad.items():
        drop_in(tmp_path, name, source)
    registry = discovery.load([tmp_path / "plugins", tmp_path / "missing"])
    errors = {f.name: f.error for f in registry.found if f.origin.startswith(str(tmp_path)) and f.error}
    assert {name: error.replace(str(tmp_path), "") for name, error in errors.items()} == {
        "b_import": "ModuleNotFoundError: No module named 'no_such_sdk' (b_import.py, line 1); install it "
        "into the environment of streambridge, or correct its name",
        "b_leaves": "SystemExit: 3 (b_leaves.py, line 1)",
        "c_misspelt": "there is no hook register_exporter (c_misspelt.py, line 2); did you mean "
        "register_exporters?",
        "c_unlike": "there is no hook on_start (c_unlike.py, line 2); the hooks are register_exporters, "
        "transform_records, aws_credentials, authenticate, authorize, handle_event",
        "d_argument": "the hook register_exporters (d_argument.py, line 2) has no argument 'r'; its "
        "arguments are register, by these names, and those that are not needed may be left out",
        "d_raises": "ZeroDivisionError: division by zero (d_raises.py, line 4)",
        "e_taken": "there is already an exporter of kind 'good'; choose another",
        "f_empty": "Exporter.kind is missing: the key of this exporter in export definitions",
        "f_no_class": "1 is registered as an exporter, but is not a subclass of bridge.Exporter",
        "g_unmarked": "it has no hook: register_exporters (g_unmarked.py, line 3) is not marked; write "
        "@hookimpl above it",
        "g_unregistered": "it has no hook, so its exporter Out is not registered; add a function `@hookimpl "
        "def register_exporters(register)` that calls `register(Out)`",
        "g_nothing": "it has no hook; mark a function named register_exporters or transform_records or "
        "aws_credentials or authenticate or authorize or handle_event with @hookimpl, or, if it is not a "
        "plugin, begin the file's name with `_`",
        "h_timeout": "Out.timeout is '900', not a number of seconds above 0",
        "h_never": "Out.timeout is 0, not a number of seconds above 0",
        "h_limits": "Out.limits is {'records': 5}, not bridge.BatchLimits(...)",
        "h_records": "Out.limits: Expected `int | null`, got `str` - at `$.records`",
        "kinesis": "there is already a plugin named 'kinesis' (shipped); rename this one",
        "s3_again": "there is already an exporter of kind 's3'; choose another",
    }
    assert {"good", "fine", "kinesis", "s3"} <= set(registry.exporters)
    assert registry.exporters["s3"].__module__.startswith("streambridge_plugins_s3_")


def test_a_drop_in_that_others_can_write_does_not_load(tmp_path: Path) -> None:
    drop_in(tmp_path, "open", GOOD.format(kind="open"))
    drop_in(tmp_path, "closed", GOOD.format(kind="closed"))
    (tmp_path / "plugins" / "open.py").chmod(0o664)
    registry = discovery.load([tmp_path / "plugins"])
    (error,) = [found.error for found in registry.found if found.error]
    assert "is writable by group or others" in error
    assert "chmod go-w" in error
    assert "closed" in registry.exporters
    (tmp_path / "plugins").chmod(0o777)
    registry = discovery.load([tmp_path / "plugins"])
    assert not {"open", "closed"} & set(registry.exporters)


def test_a_drop_in_is_loaded_from_its_source_and_never_from_a_cache_beside_it(tmp_path: Path) -> None:
    for name, kind in (("mine", "good"), ("theirs", "evil")):
        drop_in(tmp_path, name, GOOD.format(kind=kind))
    source, other = (tmp_path / "plugins" / f"{name}.py" for name in ("mine", "theirs"))
    cache = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(
        str(other), str(cache), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    other.unlink()
    cache.parent.chmod(0o777)
    registry = discovery.load([tmp_path / "plugins"])
    assert "good" in registry.exporters
    assert "evil" not in registry.exporters


@pytest.mark.parametrize("how", ["link to a file", "link to a directory", "cache in a package"])
def test_a_drop_in_whose_parts_others_can_change_does_not_load(tmp_path: Path, how: str) -> None:
    drop_in(tmp_path, "closed", GOOD.format(kind="closed"))
    elsewhere, package = tmp_path / "elsewhere", tmp_path / "plugins" / "mine"
    elsewhere.mkdir()
    package.mkdir()
    source = "from .out import register_exporters\n" if how != "link to a file" else "\n"
    (package / "__init__.py").write_text(source, encoding="utf-8")
    (elsewhere / "out.py").write_text(GOOD.format(kind="mine").replace("\n    ", "\n"), encoding="utf-8")
    if how == "cache in a package":
        (package / "out.py").write_bytes((elsewhere / "out.py").read_bytes())
        (package / "__pycache__").mkdir()
        (package / "__pycache__").chmod(0o777)
    elif how == "link to a file":
        (tmp_path / "plugins" / "out.py").symlink_to(elsewhere / "out.py")
        elsewhere.chmod(0o777)
    else:
        (package / "out").symlink_to(elsewhere)
        (elsewhere / "out.py").rename(elsewhere / "__init__.py")
        (elsewhere / "__init__.py").chmod(0o666)
    registry = discovery.load([tmp_path / "plugins"])
    assert "closed" in registry.exporters
    assert "mine" not in registry.exporters
    assert any("is writable by group or others" in (found.error or "") for found in registry.found)


def test_a_drop_in_may_be_a_package_with_files_of_its_own(tmp_path: Path) -> None:
    drop_in(tmp_path, "other", GOOD.format(kind="other"))
    package = tmp_path / "plugins" / "mine"
    package.mkdir(mode=0o755)
    (package / "__init__.py").write_text("from .out import register_exporters\n", encoding="utf-8")
    source = GOOD.format(kind="mine").replace("\n    ", "\n")
    (package / "out.py").write_text(source, encoding="utf-8")
    for path in package.iterdir():
        path.chmod(0o644)
    registry = discovery.load([tmp_path / "plugins"])
    assert [found.error for found in registry.found if found.error] == []
    assert {"mine", "other"} <= set(registry.exporters)


def test_a_pip_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "bridge_pip-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bridge-pip\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[streambridge]\npip = bridge_pip\nbroken = no_such_module\n")
    source = GOOD.format(kind="pip").replace("\n    ", "\n")
    (tmp_path / "bridge_pip.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = discovery.load()
    found = {f.name: f for f in registry.found}
    assert (found["pip"].origin, found["pip"].version, found["pip"].kinds) == (
        "package bridge-pip",
        "1.2",
        ["pip"],
    )
    assert "no_such_module" in (found["broken"].error or "")


FILTER = """
    from bridge import Record, hookimpl

    @hookimpl
    def transform_records(records, config):
        if config.identifier == "plain":
            return None
        return [
            Record(r.sequence_number, r.ingest_time, r.topic, r.payload.upper())
            for r in records
            if r.payload != b"noise"
        ]
"""


def test_hook_transform_records_changes_and_filters(recorder: Path) -> None:
    drop_in(recorder, "noise", FILTER)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            exports = [{"identifier": n, "path": str(recorder / n)} for n in ("plain", "quiet")]
            gateway.create("a", {"recorder": exports})
            await gateway.append("a", b"noise", b"one", b"noise", b"two", b"noise")
            await gateway.exported("a", 4)
            assert [gateway.status("a", number).skipped_messages_count for number in range(2)] == [0, 3]
            assert not list((recorder / "data" / "exports").rglob("*.skipped"))  # a count is enough

    asyncio.run(scenario())
    assert numbers(recorder / "plain") == [0, 1, 2, 3, 4]
    assert numbers(recorder / "quiet") == [1, 3]


def test_hook_transform_records_for_an_option_is_called_for_exports_that_set_it(recorder: Path) -> None:
    only = FILTER + '\n    transform_records.option = "dead_letter_stream"\n'
    drop_in(recorder, "noise", only)

    async def scenario() -> None:
        async with running(recorder) as gateway:
            exports = [{"identifier": n, "path": str(recorder / n)} for n in ("loud", "quiet")]
            exports[1]["deadLetterStream"] = "dead"
            gateway.create("dead", {})
            gateway.create("a", {"recorder": exports})
            await gateway.append("a", b"noise", b"one", b"noise")
            await gateway.exported("a", 2)

    asyncio.run(scenario())
    assert numbers(recorder / "loud") == [0, 1, 2]
    assert numbers(recorder / "quiet") == [1]


def test_what_the_hook_transform_records_leaves_out_the_object_declares(
    tmp_path: Path, bucket: Bucket
) -> None:
    drop_in(tmp_path, "noise", FILTER)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"s3": [bucket.config()]})
            await gateway.append("a", b"one", b"noise", b"two", b"three")
            await gateway.exported("a", 3)

    asyncio.run(scenario())
    (key,) = bucket.data_keys()
    name = objectkeys.parse_key(key)
    assert name is not None
    assert (name.first, name.last) == (0, 3)
    assert [row["sequence_number"] for row in bucket.rows(key)] == [0, 2, 3]
    declared = from_extra(bucket.body(key))
    assert declared is not None
    assert left_out(declared, 0, 3) == (1, b"\x02")


def test_hook_handle_event_gets_failures_and_recoveries(recorder: Path) -> None:
    path = recorder / "events"
    source = f"""
        import json
        from bridge import hookimpl

        @hookimpl
        def handle_event(event):
            with open({str(path)!r}, "a") as out:
                print(json.dumps([event.name, event.stream, event.export, event.detail]), file=out)

        @hookimpl
        def register_exporters(register):
            pass
    """
    drop_in(recorder, "events", source)

    def events() -> list[Any]:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    async def scenario() -> None:
        async with running(recorder) as gateway:
            config = {"identifier": "x", "path": str(recorder / "out")}
            gateway.create("a", {"recorder": [{**config, "fault": "wait"}]})
            await gateway.append("a", b"x")
            await until(lambda: len(events()) == 1)
            gateway.update("a", {"recorder": [config]})
            await until(lambda: len(events()) == 2)
            gateway.exports.event("stream_full", "a", "256 MiB")
            await until(lambda: len(events()) == 3)

    asyncio.run(scenario())
    assert events() == [
        ["export_failing", "a", "x", "the link is down"],
        ["export_recovered", "a", "x", ""],
        ["stream_full", "a", "", "256 MiB"],
    ]


PICKY = """
    from bridge import *

    class Picky(Exporter):
        kind = "picky"
        limits = BatchLimits(record_bytes=10)

        def export(self, batch):
            assert all(len(r.payload) <= 10 for r in batch.records)
            return Outcome(rejected={
                n: "bad" for n, record in enumerate(batch.records) if record.payload == b"bad"
            })

    @hookimpl
    def register_exporters(register):
        register(Picky)
"""


def test_a_dead_letter_of_a_dead_worker_confirms_none_of_the_next_one(tmp_path: Path) -> None:
    drop_in(tmp_path, "picky", PICKY)
    asked: list[asyncio.Future[None]] = []

    async def append_status(name: str, payload: bytes) -> None:
        asked.append(asyncio.get_running_loop().create_future())
        await asked[-1]

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.append_status = append_status  # type: ignore[method-assign]
            gateway.create("dead", {})
            gateway.create("a", {"picky": [{"identifier": "p", "deadLetterStream": "dead"}]})
            await gateway.append("a", b"bad")
            await until(lambda: len(asked) == 1)
            assert gateway.exports.pid is not None
            os.kill(gateway.exports.pid, signal.SIGKILL)
            await until(lambda: len(asked) == 2)
            asked[0].set_result(None)
            asked[1].set_exception(OSError("dead is full"))
            await until(lambda: "dead is full" in (gateway.status("a").error_message or ""))
            assert gateway.status("a").last_exported_sequence_number == -1
            await until(lambda: len(asked) == 3)
            asked[2].set_result(None)
            await gateway.exported("a", 0)

    asyncio.run(scenario())


def test_rejected_records_are_kept_in_the_dead_letter_stream_before_they_are_passed(tmp_path: Path) -> None:
    drop_in(tmp_path, "picky", PICKY)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("dead", {})
            gateway.refused.add("dead")
            gateway.create("a", {"picky": [{"identifier": "p", "deadLetterStream": "dead"}]})
            await gateway.append("a", b"good", b"bad", bytes(11), b"good")
            await until(lambda: "dead-letter stream" in (gateway.status("a").error_message or ""))
            assert gateway.status("a").last_exported_sequence_number == -1
            gateway.refused.clear()
            await gateway.exported("a", 3)
            letters = [json.loads(letter) for letter in gateway.read("dead")]
            assert sorted(letter["sequenceNumber"] for letter in letters) == [1, 2]
            assert {letter["reason"] for letter in letters if letter["sequenceNumber"] == 1} == {"bad"}
            assert {(letter["stream"], letter["export"]) for letter in letters} == {("a", "p")}
            status = gateway.status("a")
            assert status.exported_messages_count == 4  # processed, the rejected ones too
            assert status.exported_bytes_from_stream == 8
            assert status.rejected_messages_count == 2

    asyncio.run(scenario())


def test_a_dead_letter_that_its_stream_cannot_store_is_stored_without_the_payload(tmp_path: Path) -> None:
    drop_in(tmp_path, "picky", PICKY)

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("dead", {}, limits={"maxMessageSize": 1000})
            gateway.create("a", {"picky": [{"identifier": "p", "deadLetterStream": "dead"}]})
            await gateway.append("a", bytes(900), b"good", b"bad")
            await gateway.exported("a", 2)
            large, small = (json.loads(letter) for letter in gateway.read("dead"))
            assert (large["sequenceNumber"], large["payload"], large["payloadBytes"]) == (0, "", 900)
            assert large["reason"] == "the message of 900 bytes is larger than 10 bytes"
            assert (small["sequenceNumber"], small["payload"]) == (2, "YmFk")
            assert "payloadBytes" not in small
            assert gateway.status("a").rejected_messages_count == 2

    asyncio.run(scenario())


BACKWARDS = PICKY.replace("enumerate(batch.records)", "reversed(list(enumerate(batch.records)))")


@pytest.mark.parametrize("plugin", [PICKY, BACKWARDS], ids=["in order", "backwards"])
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_whichever_dead_letter_is_refused_all_rejected_records_are_kept_in_the_end(
    tmp_path: Path, refused: int, plugin: str
) -> None:
    drop_in(tmp_path, "picky", plugin)
    asked: list[int] = []

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            append = gateway.append_status

            async def append_status(name: str, payload: bytes) -> None:
                asked.append(json.loads(payload)["sequenceNumber"])
                if len(asked) == refused + 1:
                    raise OSError(f"{name} is full")
                await append(name, payload)

            gateway.append_status = append_status  # type: ignore[method-assign]
            gateway.create("dead", {})
            gateway.create("a", {"picky": [{"identifier": "p", "deadLetterStream": "dead"}]})
            await gateway.append("a", b"good", b"bad", b"bad", b"good", b"bad", b"good")
            await gateway.exported("a", 5)
            letters = [json.loads(letter)["sequenceNumber"] for letter in gateway.read("dead")]
            assert letters == [1, 2, 4]
            status = gateway.status("a")
            assert (status.exported_messages_count, status.rejected_messages_count) == (6, 3)
            assert status.skipped_messages_count == 0

    asyncio.run(scenario())


GAPS = """
    import json, os
    from bridge import *
    from bridge import hookimpl

    class Config(BatchedConfig, frozen=True):
        path: str

    class Gaps(Exporter):
        kind = "gaps"
        Config = Config
        limits = BatchLimits(contiguous=True)

        def export(self, batch):
            if os.path.exists(self.config.path + ".down"):
                raise Retry("down")
            return ACCEPTED

        def dropped(self, first, last, reason):
            with open(self.config.path, "a") as out:
                out.write(json.dumps([first, last, reason]) + chr(10))

    @hookimpl
    def register_exporters(register):
        register(Gaps)
"""


def test_every_drop_on_the_way_of_an_export_is_reported_with_its_reason(tmp_path: Path) -> None:
    drop_in(tmp_path, "gaps", GAPS)
    out, down = tmp_path / "out", tmp_path / "out.down"

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"gaps": [{"identifier": "x", "path": str(out)}]})
            for first in range(0, 24, 8):
                down.touch()
                await gateway.append("a", *(b"%d" % n for n in range(first, first + 8)))
                await until(lambda: "down" in (gateway.status("a").error_message or ""))
                gateway.manager.stream("a").drop_upto(first + 3, DropReason.PURGED)
                gateway.manager.stream("a").drop([(first + 5, first + 5)], DropReason.EXPIRED)
                down.unlink()
                await gateway.exported("a", first + 7)
                await until(lambda: gateway.status("a").error_message is None)

    asyncio.run(scenario())
    expected: list[list[Any]] = []
    for first in range(0, 24, 8):
        expected += [[first, first + 2, "purged"], [first + 5, first + 5, "expired"]]
    assert [json.loads(line) for line in out.read_text().splitlines()] == expected


def test_an_export_without_its_plugin_reports_it_and_resumes_when_it_is_back(recorder: Path) -> None:
    path = recorder / "plugins" / "recorder.py"
    config = {"identifier": "x", "path": str(recorder / "out")}

    async def first() -> None:
        async with running(recorder) as gateway:
            gateway.create("a", {"recorder": [config]})
            await gateway.append("a", b"x")
            await gateway.exported("a", 0)

    async def without() -> None:
        async with running(recorder) as gateway:
            await gateway.append("a", b"x")
            await until(lambda: "no exporter of kind" in (gateway.status("a").error_message or ""))

    async def again() -> None:
        async with running(recorder) as gateway:
            await gateway.exported("a", 1)

    asyncio.run(first())
    aside = path.rename(recorder / "recorder.aside")
    asyncio.run(without())
    aside.rename(path)
    asyncio.run(again())
    assert numbers(recorder / "out") == [0, 1]
