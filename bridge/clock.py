"""The clock of a data directory: the wall clock, and the age timeline that all time limits use.

Two readings, both in ms:
    wall    Unix time. It stamps messages. It may be wrong: 1970 at boot, then stepped by NTP
    now     the age timeline. It only moves forward, at the speed of CLOCK_BOOTTIME (which counts suspend),
            whatever the wall clock does. All time limits use it: time to live, maximum age, deduplication
            window, expiry of sessions and messages, will delay, and how long an export collects messages

The timeline survives restarts by an anchor in the file `clock`: one moment on all clocks. It is written at
the first start of each boot, once everything stored was observed; when the clock is stepped or becomes
synchronised; every 10 minutes while messages arrive, or wait for an export or a consumer; and at a clean stop
that long after the last one. An idle gateway does not write it. When a data directory is opened, there are
three cases:

    same boot      the anchor has the current boot id. CLOCK_BOOTTIME has counted all of the time between
    other boot     the difference of the wall clock counts if it is positive and the wall clock was
                   synchronised then and is now. Otherwise nothing counts: messages are kept too long rather
                   than too short
    no anchor      new, or the file is damaged. The timeline begins with the wall clock if nothing is stored
                   yet, else with the newest stored age

After a power cut the newest anchor may be older than the newest message. The timeline then continues at the
age of that message (`observe`) if the two are at most `TRUST` apart; streams copied from another gateway do
not move it.

    file = magic "SBCLK\\0\\0\\1" | crc u32 | msgpack of `Anchor`

The crc, little-endian, is the CRC-32 of what follows it: a map with the keys of `Anchor`, which are `boot`
(the boot id, a text), `boottime` (CLOCK_BOOTTIME), `wall`, `age` (the timeline) and `synchronised`. All times
are in ms. A new file replaces the old one (write, sync, rename).

If a sandbox hides the boot id, two starts belong to the same boot if the wall clock gives the same time of
boot. The kernel knows whether the wall clock is synchronised (adjtimex, which is only read). If a sandbox
forbids that call, the file of systemd-timesyncd is used; without it, the clock counts as not synchronised.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from bridge.decoded import Natural, decoded
from bridge.deflate import crc32
from bridge.errors import CorruptData

NAME = "clock"
STEP = 1000  # ms that the wall clock must jump by to be reported
TRUST = 3_600_000  # ms that the newest message may be ahead of the newest anchor
SAVE_EVERY = 600_000  # ms between two anchors while messages arrive
RETRY = 10_000  # ms after an anchor could not be written
_HEAD: Final = struct.Struct("<8sI")
_MAGIC: Final = b"SBCLK\0\0\1"
_MS: Final = 1_000_000
_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised
_TIMESYNCD: Final = Path("/run/systemd/timesync/synchronized")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


class System:
    """The machine's clocks; tests replace them."""

    def __init__(self) -> None:
        try:
            self.boot = _BOOT_ID.read_bytes().decode().strip()
        except OSError:
            self.boot = ""
        self._adjtimex: Callable[[ctypes.Array[ctypes.c_char]], int] | None
        self._adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)

    def wall(self) -> int:
        """Unix time in ns."""
        return time.time_ns()

    def boottime(self) -> int:
        """Time since boot in ns, suspend included."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def synchronised(self) -> bool:
        """Whether the wall clock is synchronised; False if unknown."""
        if self._adjtimex is not None:
            state = self._adjtimex(ctypes.create_string_buffer(512))  # all zero: it changes nothing
            if state >= 0:
                return int(state) != _TIME_ERROR
        return _TIMESYNCD.exists()


class Anchor(msgspec.Struct, frozen=True):
    """One moment on all clocks. Times in ms; `boot` is empty if it could not be read."""

    boot: str
    boottime: Natural
    wall: Natural
    age: Natural
    synchronised: bool


_decoder = msgspec.msgpack.Decoder(Anchor)


class Timeline:
    """The age timeline in another process of the gateway; `offset` is that of the `Clock`, in ms."""

    def __init__(self) -> None:
        self.offset = 0
        self._boottime = System().boottime

    def now(self) -> int:
        """The age timeline, in ms."""
        return self._boottime() // _MS + self.offset


class Deadline:
    """A moment on the age timeline. `at` is in seconds."""

    __slots__ = ("_clock", "at")

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self.at = clock, at

    def left(self) -> float:
        """How many seconds remain; negative when it has passed."""
        return self.at - self._clock.now() / 1000

    def passed(self) -> bool:
        return self.left() <= 0


class Clock:
    """Reads both clocks. Not for threads, except `save`."""

    def __init__(
        self,
        path: Path,
        write: Callable[[Path, bytes], None],
        system: System | None = None,
        *,
        empty: bool = True,
    ) -> None:
        """Continue the timeline of a data directory; raises OSError if the anchor cannot be read.

        `write` replaces a file durably. `empty`: nothing is stored yet. Call `observed` before anything is
        stored. An anchor that cannot be written (a full disk) is written later.
        """
        self._path, self._write, self._system = path, write, system or System()
        self._boottime = self._system.boottime
        self.steps = 0  # of the wall clock since the start
        self.last_step = 0  # ms, positive if it was set forward
        self.synchronised = self._system.synchronised()
        boottime, wall = self._boottime() // _MS, self.wall()
        self._shift = wall - boottime
        anchor = self._load()
        self._new = anchor is None
        if anchor is None:
            age = wall if empty else 0
        elif self._is_same_boot(anchor, boottime):
            age = anchor.age + max(0, boottime - anchor.boottime)
        else:
            age = anchor.age + self._away(anchor, wall)
        self._offset = age - boottime
        self._tried = boottime - RETRY
        self._saved, self._must_save = boottime, True
        if anchor is not None and self._is_same_boot(anchor, boottime):
            self._saved, self._must_save = anchor.boottime, False

    def wall(self) -> int:
        """Unix time in ms; 0 before 1970, since files hold it without a sign."""
        return max(0, self._system.wall() // _MS)

    def now(self) -> int:
        """The age timeline, in ms."""
        return self._boottime() // _MS + self._offset

    @property
    def boot(self) -> str:
        """The id of this boot; empty if unknown."""
        return self._system.boot

    @property
    def offset(self) -> int:
        """By how much the timeline is ahead of CLOCK_BOOTTIME, in ms: see `Timeline`."""
        return self._offset

    def deadline(self, seconds: float) -> Deadline:
        """The moment so many seconds from now."""
        return Deadline(self, self.now() / 1000 + seconds)

    def observe(self, age: int) -> None:
        """Something stored has this age: move the timeline to it, if it is behind."""
        ahead = age - self.now()
        if ahead > 0 and (self._new or ahead <= TRUST):
            self._offset += ahead
            self._must_save = True  # a kill must not take the timeline back

    def observed(self) -> None:
        """What a part of the gateway has stored was observed: write the anchor if it is due."""
        if self._must_save:
            self.try_save()

    # -- the wall clock --------------------------------------------------------------------------
    def watch(self, *, active: bool = False) -> bool:
        """Check the wall clock and log changes; returns whether `save` is due.

        `active`: something was stored since the last anchor, messages wait, or the service stops.
        """
        boottime, wall = self._boottime() // _MS, self.wall()
        jumped = wall - boottime - self._shift
        if abs(jumped) >= STEP:
            self.steps, self.last_step, self._shift = self.steps + 1, jumped, wall - boottime
            self._must_save = True
            log.warning(
                "the wall clock was set %s by %s, to %s; age limits are not affected",
                "forward" if jumped > 0 else "back",
                timedelta(seconds=abs(jumped) // 1000),
                _text(wall),
            )
        synchronised = self._system.synchronised()
        if synchronised is not self.synchronised:
            self.synchronised = synchronised
            self._must_save |= synchronised
            log.info("the wall clock is %s", "synchronised" if synchronised else "no longer synchronised")
        due = self._must_save or (active and boottime - self._saved >= SAVE_EVERY)
        return due and boottime - self._tried >= RETRY

    def save(self) -> None:
        """Write the anchor durably; raises OSError. May run in a thread."""
        boottime, wall = self._boottime() // _MS, self.wall()
        anchor = Anchor(self.boot, boottime, wall, boottime + self._offset, self.synchronised)
        body = msgspec.msgpack.encode(anchor)
        self._tried = boottime
        self._write(self._path, _HEAD.pack(_MAGIC, crc32(body)) + body)
        self._saved, self._must_save = boottime, False

    def try_save(self) -> None:
        """As `save`, but an error is only logged: the next anchor replaces this one."""
        try:
            self.save()
        except OSError as error:
            log.warning("%s: %s; after a power cut messages may be kept longer", self._path, error.strerror)

    # -- the anchor ------------------------------------------------------------------------------
    def _load(self) -> Anchor | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        body = data[_HEAD.size :]
        if len(data) >= _HEAD.size and _HEAD.unpack_from(data) == (_MAGIC, crc32(body)):
            with suppress(CorruptData):
                return decoded(body, _decoder)
        log.warning("%s is damaged and is recreated; messages may be kept longer", self._path)
        return None

    def _is_same_boot(self, anchor: Anchor, boottime: int) -> bool:
        if anchor.boot or self.boot:
            return anchor.boot == self.boot
        return boottime >= anchor.boottime and abs(anchor.wall - anchor.boottime - self._shift) < STEP

    def _away(self, anchor: Anchor, wall: int) -> int:
        """How much of the time between two boots counts, in ms."""
        passed = wall - anchor.wall
        if self.synchronised and anchor.synchronised:
            return max(0, passed)
        log.info(
            "the wall clock is at %s and was not synchronised both now and at the last stop; the time "
            "between does not count for age limits",
            _text(wall),
        )
        return 0


def _text(wall: int) -> str:
    try:
        return datetime.fromtimestamp(wall / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{wall} ms"
