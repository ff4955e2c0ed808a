"""`streambridge verify` and `streambridge repair`, as commands on directories with known damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.streams import meta

from .conftest import House, payloads, put, run

ROOT = Path(__file__).parent.parent.parent


def command(*arguments: str | Path) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bridge", *arguments, "--json"], capture_output=True, text=True, cwd=ROOT
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def contents(directory: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file() and not p.is_symlink()}


async def fill(house: House) -> None:
    async with house.stream(segment_size=1024) as stream:
        for start in range(0, 100, 5):
            await put(stream, *(b"%03d" % n * 10 for n in range(start, start + 5)))


def damage(house: House, which: int) -> Path:
    path = sorted(house.directory().glob("*.seg"))[which]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path


def test_a_sound_directory_verifies_with_exit_code_0_and_all_its_counts(house: House) -> None:
    run(fill(house))
    code, (stream,) = command("verify", house.data_dir)
    assert code == 0
    assert (stream["name"], stream["messages"], stream["oldest"], stream["newest"]) == ("s", 100, 0, 99)
    assert stream["frames"] == 20
    assert stream["totalBytes"] == sum(p.stat().st_size for p in house.directory().glob("*.seg"))
    assert stream["problems"] == []
    before = contents(house.data_dir)
    assert command("repair", house.data_dir)[0] == 0
    assert contents(house.data_dir) == before  # nothing to repair, so nothing changes


def test_verify_names_file_and_lost_numbers_changes_nothing_and_repair_repairs_it(house: House) -> None:
    run(fill(house))
    path = damage(house, 2)
    before = contents(house.data_dir)
    code, (stream,) = command("verify", house.data_dir)
    assert code == 65
    (problem,) = stream["problems"]
    assert problem["path"] == str(path)
    ((first, last),) = problem["lost"]
    assert last - first == 4
    assert stream["messages"] == 95  # that can be read
    assert contents(house.data_dir) == before

    code, (stream,) = command("repair", house.data_dir)
    assert code == 65
    assert f"lost: {first}-{last}" in "".join(p["what"] for p in stream["problems"])
    assert stream["messages"] == 95
    assert [p["path"] for p in stream["problems"]] == [str(path)]
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["messages"], stream["lost"]) == (0, 95, [[first, last]])
    (kept,) = stream["quarantined"]
    assert Path(kept).is_file()
    assert command("repair", house.data_dir)[0] == 0

    async def work() -> None:
        async with house.stream() as stream:
            assert len(payloads(stream)) == 95
            assert await put(stream, b"on") == [100]

    run(work())


def test_first_segments_that_are_missing_are_found_and_reported_once(house: House) -> None:
    run(fill(house))
    for path in sorted(house.directory().glob("00*"))[:4]:
        path.unlink()
    code, (stream,) = command("verify", house.data_dir)
    ((first, last),) = stream["problems"][0]["lost"]
    assert (code, first, stream["oldest"], stream["messages"]) == (65, 0, last + 1, 99 - last)
    code, (stream,) = command("repair", house.data_dir)
    assert (code, stream["lost"], len(stream["problems"])) == (65, [[0, last]], 1)
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["lost"]) == (0, [[0, last]])


@pytest.mark.parametrize("number", [1, 2])
def test_damage_among_dropped_messages_is_found_and_repaired(house: House, number: int) -> None:
    """In the middle of a closed segment, and at its end."""

    async def work() -> None:
        async with house.stream(segment_size=2000) as stream:
            for n in range(6):
                await put(stream, b"%d" % n * 500)
            stream.purge([(number, number)])

    run(work())
    path = min(house.directory().glob("*.seg"))
    content = path.read_bytes()
    at = content.index(b"%d" % number * 500)
    path.write_bytes(content[:at] + b"x" + content[at + 1 :])
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["messages"]) == (65, 5)
    assert [(p["path"], p["lost"]) for p in stream["problems"]] == [(str(path), [])]
    assert command("repair", house.data_dir)[0] == 65
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["messages"], stream["lost"]) == (0, 5, [])


def test_a_torn_tail_and_a_damaged_definition_and_index_are_found_and_repaired(house: House) -> None:
    run(fill(house))
    last = max(house.directory().glob("*.seg"))
    last.write_bytes(last.read_bytes()[:-3])
    (house.directory() / meta.NAMES[0]).write_bytes(b"")
    index = min(house.directory().glob("*.idx"))
    index.write_bytes(index.read_bytes()[:-1])
    code, (stream,) = command("verify", house.data_dir)
    assert code == 65
    found = " ".join(f"{p['path']} {p['what']}" for p in stream["problems"])
    for expected in ("torn tail of", "this copy of the definition is damaged"):
        assert expected in found
    assert stream["rebuilt"] == [str(index)]
    assert command("repair", house.data_dir)[0] == 65
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["messages"]) == (0, 95)


def test_repair_writes_a_lost_definition_again_and_the_messages_are_there(house: House) -> None:
    run(fill(house))
    for name in meta.NAMES:
        (house.directory() / name).write_bytes(b"?")
    assert command("verify", house.data_dir)[0] == 65
    code, (stream,) = command("repair", house.data_dir)
    assert code == 65
    assert "default settings" in stream["problems"][0]["what"]

    async def work() -> None:
        async with house.stream() as stream:
            assert len(payloads(stream)) == 100

    run(work())


def test_repair_refuses_while_the_service_runs_and_verify_does_not(house: House) -> None:
    async def work() -> None:
        await fill(house)
        async with house.stream() as stream:
            await put(stream, b"x")
            code, (found,) = command("verify", house.data_dir)
            assert (code, found["messages"]) == (0, 101)
            code, told = command("repair", house.data_dir)
            assert code == 75
            assert "another process writes" in told

    run(work())


def test_an_index_that_a_power_cut_has_spoilt_is_no_damage(house: House) -> None:
    """It is not synced, because the next use makes it again from its segment."""
    run(fill(house))
    for index in house.directory().glob("*.idx"):
        index.write_bytes(bytes(index.stat().st_size))
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["messages"], stream["problems"]) == (0, 100, [])
    assert stream["rebuilt"]


def test_a_definition_that_cannot_be_read_is_not_called_damaged(house: House) -> None:
    """A failing disk gives no bytes; here, a directory in place of each copy gives none either."""
    run(fill(house))
    kept = {name: (house.directory() / name).read_bytes() for name in meta.NAMES}
    for name in meta.NAMES:
        (house.directory() / name).unlink()
        (house.directory() / name).mkdir()
    code, (stream,) = command("verify", house.data_dir)
    assert code == 65
    assert [problem["what"] for problem in stream["problems"]] == ["it cannot be read: Is a directory"]

    async def start() -> str:
        async with house.store() as store:
            (unopened,) = store.unopened.values()
            return unopened.why

    why = run(start())
    assert "meta.0: Is a directory; nothing was changed" in why or "meta.1: Is a directory" in why
    assert "damaged" not in why
    for name, content in kept.items():
        (house.directory() / name).rmdir()
        (house.directory() / name).write_bytes(content)
    code, (stream,) = command("verify", house.data_dir)
    assert (code, stream["messages"]) == (0, 100)
