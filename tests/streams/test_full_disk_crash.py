"""A kill at every single call while a full disk is relieved, the disk being full again at the next start."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from bridge.streams.drops import DropReason
from bridge.streams.layout import Files

from .conftest import House, everything, put, run

BEFORE, AFTER = 60, 80  # messages that are there when the disk fills up, and at the end
KILLED = 9


def fill(place: Path) -> None:
    """Take all that is left of a file system, as another program might."""
    with (place / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return


def payload(number: int) -> bytes:
    return b"%04d" % number * 250


class Killed(Files):
    """Ends the process right before the `left`-th call that changes something, as a kill would."""

    def __init__(self, place: Path) -> None:
        self.place, self.left = place, -1

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            fill(self.place)  # what was freed is another program's by the next start
            os._exit(KILLED)

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT:
            self._count()
        return super().open(path, flags)

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        self._count()
        super().write(fd, parts, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._count()
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)


@pytest.mark.parametrize("flush", [False, True], ids=["written", "synced"])
@pytest.mark.parametrize("segment_size", [16384, 1 << 20], ids=["segments", "active"])
@pytest.mark.parametrize("setting", ["free_exported", "overwrite"])
def test_a_kill_at_any_call_while_room_is_made_neither_loses_nor_invents_a_message(
    mounted: Path, setting: str, segment_size: int, flush: bool
) -> None:
    """Also when all of it is in the segment that is being written; nothing is refused, as exports keep up."""
    legal = DropReason.EXPORTED if setting == "free_exported" else DropReason.OVERWRITTEN

    def child(root: Path, call: int, acknowledge: int) -> None:
        house = House(root)
        house.files = killed = Killed(mounted)

        async def work() -> None:
            async with house.stream(segment_size=segment_size, flush=flush, **{setting: True}) as stream:
                await put(stream, *map(payload, range(BEFORE)))
                fill(mounted)
                killed.left = call
                for number in range(BEFORE, AFTER):
                    stream.exported_upto = stream.next_sequence
                    await put(stream, payload(number))
                    os.write(acknowledge, b"%d\n" % number)

        run(work())

    def is_killed(root: Path, call: int) -> tuple[bool, list[int]]:
        """Whether the child was killed at this call, or came to its end; and what it acknowledged."""
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                child(root, call, write_end)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            acknowledged = [*range(BEFORE), *map(int, pipe.read().split())]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, KILLED), f"call {call}: an append was refused; its traceback is on stderr"
        return status == KILLED, acknowledged

    async def check(root: Path, acknowledged: list[int]) -> None:
        async with House(root).store() as store:
            assert store.unopened == {}
            stream = store.streams["s"]
            assert {drop.reason for drop in stream.drops.ranges} <= {legal}
            assert not any(damage.lost for damage in stream.log.damage), "a torn tail loses nothing"
            found = {message.sequence_number: message.payload for message in everything(stream)}
            assert list(found) == list(range(stream.oldest, stream.next_sequence))
            assert all(found[number] == payload(number) for number in found)
            assert len(acknowledged) <= stream.next_sequence <= len(acknowledged) + 1
            (mounted / "filler").unlink()
            assert await put(stream, b"after") == [max(found, default=stream.oldest - 1) + 1]

    call, killed = 0, True
    while killed:
        call += 1
        root = mounted / str(call)
        root.mkdir()
        killed, acknowledged = is_killed(root, call)
        run(check(root, acknowledged))
        shutil.rmtree(root)
    assert call > 25, "space was freed more than once"
