"""Damage to the record of drops, `drops.log`: `verify` reports it, a start and `repair` quarantine it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from bridge.streams import meta
from bridge.streams.drops import ROOM, DropReason
from bridge.streams.layout import Files
from bridge.streams.meta import MessageLimits
from bridge.streams.stream import Stream
from bridge.streams.verify import verify

from .conftest import House, payloads, put, run
from .test_verify import command, contents

RECORD = 32


def problems(house: House) -> list[str]:
    """What verify reports, file by file."""
    (checked,) = verify(house.data_dir)
    return [f"{Path(problem.path).name}: {problem.what}" for problem in checked.problems]


def purged(house: House, *numbers: int, messages: int = 20) -> Path:
    """A stopped stream from which these were purged, a record for each; returns the file of records."""

    async def work() -> None:
        async with house.stream() as stream:
            await put(stream, *(b"%d" % n for n in range(messages)))
            for number in numbers:
                stream.drop([(number, number)], DropReason.PURGED)

    run(work())
    assert problems(house) == []
    return house.directory() / "drops.log"


def aside(house: House) -> list[Path]:
    return list(house.directory().glob("quarantine/drops.log*"))


def change(path: Path, at: int, mask: int = 16) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= mask
    path.write_bytes(content)


def clear(path: Path, start: int, end: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:start] + bytes(end - start) + content[end:])


@pytest.mark.parametrize("record", [0, 1, 2])
def test_a_flipped_bit_anywhere_in_a_record_of_a_drop_is_found(house: House, record: int) -> None:
    log = purged(house, 3, 7, 11)
    sound = log.read_bytes()
    for at in range(RECORD):
        log.write_bytes(sound)
        change(log, record * RECORD + at, 1 << at % 8)
        assert problems(house) == [
            "drops.log: it is damaged, and 2 of its records are sound; messages that were dropped may be back"
        ]


def test_verify_names_a_damaged_record_of_drops_and_repair_quarantines_it(house: House) -> None:
    log = purged(house, 3, 7, 11)
    change(log, RECORD + 8)
    before = contents(house.data_dir)
    code, (stream,) = command("verify", house.data_dir)
    assert code == 65
    assert [problem["path"] for problem in stream["problems"]] == [str(log)]
    assert contents(house.data_dir) == before

    code, (stream,) = command("repair", house.data_dir)
    assert code == 65
    (problem,) = stream["problems"]
    assert (problem["path"], problem["what"]) == (
        str(log),
        "it is damaged, and 2 of its records are sound; messages that were dropped may be back; "
        "quarantined, and rewritten with its sound records",
    )
    (kept,) = stream["quarantined"]
    assert Path(kept).read_bytes() == before[log]
    assert stream["messages"] == 18
    assert command("repair", house.data_dir)[0] == command("verify", house.data_dir)[0] == 0

    async def work() -> None:
        async with house.stream() as stream:
            assert payloads(stream) == [b"%d" % n for n in range(20) if n not in (3, 11)]

    run(work())


@pytest.mark.parametrize(
    ("harm", "reported"),
    [
        (lambda log: log.unlink(), "drops.log: it is missing"),
        (lambda log: log.write_bytes(b""), "drops.log: it was cut short"),
        (lambda log: log.write_bytes(log.read_bytes()[: ROOM - RECORD]), "drops.log: it was cut short"),
    ],
)
def test_a_record_of_drops_that_is_missing_or_cut_is_damage_also_if_nothing_else_shows_it(
    house: House, harm: Callable[[Path], None], reported: str
) -> None:
    log = purged(house, 3)
    harm(log)
    reported += "; messages that were dropped may be back"
    assert problems(house) == [reported]

    async def work() -> None:
        async with house.stream() as stream:
            assert len(house.events) == 1
            assert house.events[0].startswith(f"s: {log.parent}/{reported}; ")
            assert house.events[0].endswith(
                "rewritten with its sound records" if aside(house) else "recreated"
            )
            await put(stream, b"on")

    run(work())
    assert problems(house) == []


def test_an_incomplete_record_is_no_damage_and_the_next_one_takes_its_place(
    house: House,
) -> None:
    log = purged(house, 3, 7)
    sound = log.read_bytes()

    async def work() -> None:
        async with house.stream() as stream:
            stream.drop([(11, 11)], DropReason.PURGED)
            assert house.events == []

    for at in range(RECORD):
        log.write_bytes(sound)
        clear(log, RECORD + at, 2 * RECORD)
        assert problems(house) == []
        run(work())
        assert problems(house) == []
        assert log.read_bytes()[RECORD : 3 * RECORD].count(0) > RECORD, "one record, and zeros"


def test_sectors_that_a_power_cut_kept_from_the_disk_are_no_damage_and_a_lost_record_among_others_is(
    house: House,
) -> None:
    log = purged(house, *range(0, 100, 2), messages=100)
    sound = log.read_bytes()
    for start, end in ((0, 512), (512 + 5 * RECORD, 1024), (512, 1024)):
        log.write_bytes(sound)
        clear(log, start, end)
        assert problems(house) == []
    for lost in (0, 5, 14):
        log.write_bytes(sound)
        clear(log, 512 + lost * RECORD, 512 + (lost + 1) * RECORD)
        (reported,) = problems(house)
        assert reported.startswith("drops.log: it is damaged, and 49 of its records are sound; ")


def test_the_compact_form_is_sound_and_damage_in_it_is_found(house: House) -> None:
    async def work() -> None:
        async with house.stream(limits=MessageLimits(max_messages_per_topic=1)) as stream:
            log = stream.directory / "drops.log"
            size = 0
            while log.stat().st_size >= size:
                size = log.stat().st_size
                await put(stream, b"keep", topic=b"%d" % stream.next_sequence)
                for _ in range(20):
                    await put(stream, b"x")

    run(work())
    assert problems(house) == []
    change(house.directory() / "drops.log", 2 * RECORD + 1)
    (reported,) = problems(house)
    assert reported.startswith("drops.log: it is damaged, and ")


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_stream_of_an_older_version_need_not_have_its_record_of_drops_unless_it_has_dropped(
    house: House, overwritten: bool
) -> None:
    async def work() -> None:
        async with house.stream(segment_size=1024, max_size=4096, overwrite=True) as stream:
            for n in range(40 if overwritten else 4):
                await put(stream, b"%d" % n * 100)
            older(stream)

    def older(stream: Stream) -> None:
        known = msgspec.structs.replace(stream.meta, drops=False)
        assert b"drops" in meta.encode(known)
        meta.save(Files(), house.directory(), known)

    run(work())
    (house.directory() / "drops.log").unlink()
    missing = ["drops.log: it is missing; messages that were dropped may be back"]
    assert problems(house) == (missing if overwritten else [])


def test_a_definition_of_an_older_version_is_read_and_an_older_version_reads_ours(house: House) -> None:
    class Older(msgspec.Struct):
        """What the definition was."""

        name: str
        epoch: int
        reserved: int = 0

    known = meta.Meta("s", 1, 2, meta.StorageSettings(), drops=True)
    body = meta.encode(known)[16:]
    assert msgspec.msgpack.decode(body, type=Older) == Older("s", 1)
    fields = msgspec.msgpack.decode(body)
    del fields["drops"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=meta.Meta) == msgspec.structs.replace(
        known, drops=False
    )


def test_a_memory_stream_gets_a_new_record_at_each_start_and_its_absence_is_no_damage(house: House) -> None:
    async def work() -> None:
        async with house.stream(memory=True) as stream:
            await put(stream, b"a")
            assert verify(house.data_dir)[0].problems == []
            (stream.directory / "drops.log").unlink()
            assert verify(house.data_dir)[0].problems == []

    run(work())
