"""What is done to a contender, and what is counted afterwards.

A trial: start the server on an empty directory, publish, do the harm, start it again on what is left, read
everything. Counted are messages whose acknowledgement the client had before the harm:

    lost         acknowledged and not there
    duplicated   there more than once
    wrong        there, with bytes that nobody sent
    refused      the server does not start again, or does not answer, within `START` seconds
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.testbed.local import free_port

from .clients import GROUP, SIZE, Client, payload
from .contenders import Contender

START = 90.0  # seconds
RECOVERY = 30.0  # seconds that it may answer with errors before it can be read
MOST = 60_000  # messages of one trial
SLOW = 15_000  # messages per second, where the harm comes late
IMAGE = 768 << 20  # bytes of a file system
FS_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
SYNCS = "fsync,fdatasync,msync,sync_file_range,syncfs"
NOTHING = "its files hold no message"
ROOT = Path(__file__).parents[2]


class Refused(Exception):  # noqa: N818
    """The server did not start, or did not answer."""


class Outcome(NamedTuple):
    """What one trial has come to."""

    acknowledged: int
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    refused: bool = False
    rate: float = 0.0  # messages acknowledged per second
    note: str = ""


class World:
    """A contender on a directory for its data, and one beside it for all else."""

    def __init__(self, contender: Contender, home: Path, data: Path) -> None:
        self.contender, self.home, self.data, self.port = contender, home, data, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = contender.environment(home, data)
        home.mkdir(exist_ok=True)
        data.mkdir(exist_ok=True)
        self.config = home / "config"
        self.config.write_text(contender.config.format(home=home, data=data, port=self.port))
        (home / "plugins").write_text("[].")

    def start(self, *, again: bool = False) -> Client:
        """Start the server, and wait until a client is ready to publish; raises Refused."""
        words = {"config": self.config, "home": self.home, "data": self.data, "port": self.port}
        with (self.home / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [word.format(**words) for word in self.contender.command],
                stdout=log, stderr=log, cwd=ROOT, env=os.environ | self.environment, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START
        said = ""
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                said = f"it has ended with {self.process.returncode}"
                break
            try:
                client = self.contender.client(self.port, self.config)
                client.prepare(again=again)
                return client
            except (OSError, ValueError) as error:
                said = str(error)
                time.sleep(0.1)
        self.kill()
        log_end = (self.home / "log").read_text("utf-8", "replace")[-300:]
        raise Refused(f"{said}: {log_end}".strip())

    def kill(self) -> None:
        """End the server and all that it has started, at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        if "ERL_EPMD_PORT" in self.environment:  # Erlang leaves its port mapper behind
            subprocess.run(
                ["epmd", "-kill"], env=os.environ | self.environment, capture_output=True, check=False
            )

    def processes(self) -> list[int]:
        """The server's processes."""
        assert self.process is not None
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid:  # its process group
                    found.append(int(entry.name))
        return found


class Load:
    """Publishes in a thread until it is stopped, or the server fails."""

    def __init__(self, client: Client, *, slow: bool = False) -> None:
        self.acknowledged: list[int] = []
        self.began = time.monotonic()
        self.error = ""
        self._client, self._slow, self._stop = client, slow, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for first in range(0, MOST, GROUP):
                if self._stop:
                    return
                self.acknowledged.extend(self._client.publish(range(first, first + GROUP)))
                if self._slow:
                    time.sleep(max(0.0, first / SLOW - (time.monotonic() - self.began)))
        except (OSError, ValueError) as error:
            self.error = str(error)

    def so_far(self) -> list[int]:
        """What was acknowledged until now."""
        return self.acknowledged[:]

    def end(self) -> list[int]:
        """Stop; returns what was acknowledged."""
        self._stop = True
        self._thread.join()
        self._client.close()
        return self.acknowledged

    def wait(self, seconds: float) -> None:
        """Let it run for so long, or until it has published all."""
        self._thread.join(seconds)


def stored(world: World) -> Counter[bytes]:
    """What the server has after its next start; raises Refused, OSError or ValueError."""
    world.start(again=True).close()
    deadline = time.monotonic() + RECOVERY
    while True:
        reader = world.contender.client(world.port, world.config)
        try:
            return Counter(reader.read())
        except ValueError:  # it may still be recovering
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
        finally:
            reader.close()


def judged(world: World, acknowledged: list[int], rate: float = 0.0, note: str = "") -> Outcome:
    """Start the server again, read everything, and compare."""
    try:
        found = stored(world)
    except (Refused, OSError, ValueError) as error:
        return Outcome(len(acknowledged), refused=True, rate=rate, note=f"{note} {error}".strip())
    finally:
        world.kill()
    sent = {payload(number): number for number in range(MOST)}
    lost = sum(payload(number) not in found for number in acknowledged)
    return Outcome(
        len(acknowledged),
        lost,
        sum(count - 1 for body, count in found.items() if body in sent),
        sum(count for body, count in found.items() if body not in sent),
        rate=rate,
        note=note,
    )


# -- the trials ----------------------------------------------------------------------------------
def killed(contender: Contender, root: Path, draw: random.Random) -> Outcome:
    """SIGKILL under load."""
    world = World(contender, root / "home", root / "data")
    try:
        load = Load(world.start(), slow=True)
        load.wait(draw.uniform(2.2, 3.4))
        took, done = time.monotonic() - load.began, len(load.so_far())
        world.kill()
        return judged(world, load.end(), done / took)
    finally:
        world.kill()


def rate(contender: Contender, root: Path) -> Outcome:
    """How fast it acknowledges, with nothing going wrong."""
    world = World(contender, root / "home", root / "data")
    try:
        load = Load(world.start())
        load.wait(1.5)
        took, done = time.monotonic() - load.began, len(load.so_far())
        load.end()
        return Outcome(done, rate=done / took)
    finally:
        world.kill()


@contextlib.contextmanager
def mounted(root: Path, kind: str) -> Iterator[Path]:
    """A file system of its own on a loop device; raises OSError if this machine has none."""
    image, place = root / "image", root / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE)
    force = {"ext4": "-F", "xfs": "-f"}[kind]
    for command in ([f"mkfs.{kind}", "-q", force, image], ["mount", "-o", "loop", image, place]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{command[0]} {kind}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)
        image.unlink()
        (root / "found").unlink(missing_ok=True)


def remount(root: Path, kind: str) -> None:
    """Mount what is on the disk, as the machine finds it when the power is back.

    A copy of it: a sandbox elsewhere on the machine may hold the file system that was shut down.
    """
    found = root / "found"
    subprocess.run(["umount", "-l", root / "disk"], check=True)
    subprocess.run(["cp", "--sparse=always", root / "image", found], check=True)
    options = "loop,nouuid" if kind == "xfs" else "loop"
    subprocess.run(["mount", "-o", options, found, root / "disk"], check=True)


def shut_down(place: Path) -> None:
    """Nothing reaches the disk of a file system from here on, its journal neither."""
    fd = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, FS_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, "little"))
    finally:
        os.close(fd)


def power_cut(kind: str) -> Callable[[Contender, Path, random.Random], Outcome]:
    """The power goes under load: what has not reached the disk is gone."""

    def trial(contender: Contender, root: Path, draw: random.Random) -> Outcome:
        with mounted(root, kind) as place:
            world = World(contender, root / "home", place / "data")
            try:
                client = world.start()
                os.sync()  # what was made at the first start is there
                load = Load(client, slow=True)
                load.wait(draw.uniform(2.2, 3.4))
                acknowledged = load.so_far()
                shut_down(place)
                world.kill()
                load.end()
                remount(root, kind)
                return judged(world, acknowledged)
            finally:
                world.kill()

    return trial


def failing_syncs(contender: Contender, root: Path, draw: random.Random) -> Outcome:
    """From an instant on every sync fails with EIO (strace injects it); two seconds later the power goes."""
    with mounted(root, "ext4") as place:
        world = World(contender, root / "home", place / "data")
        try:
            client = world.start()
            os.sync()
            load = Load(client, slow=True)
            load.wait(draw.uniform(0.8, 1.2))
            attach = [word for pid in world.processes() for word in ("-p", str(pid))]
            trace = subprocess.Popen(
                ["strace", "-f", "-qq", "-o", "/dev/null", *attach,
                 "-e", f"trace={SYNCS}", "-e", f"inject={SYNCS}:error=EIO"],
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
            load.wait(2.0)
            acknowledged, refusal = load.so_far(), load.error
            shut_down(place)
            ended = world.process is not None and world.process.poll() is not None
            world.kill()
            trace.kill()  # by SIGTERM it may wait for a thread that it holds itself
            trace.wait()
            load.end()
            remount(root, "ext4")
            note = "it ended itself" if ended else f"it refused: {refusal}" if refusal else ""
            return judged(world, acknowledged, note=note[:200])
        finally:
            world.kill()


def full_disk(contender: Contender, root: Path, draw: random.Random) -> Outcome:
    """Something else fills the disk under load; two seconds later SIGKILL, a start, room, another start."""
    with mounted(root, "ext4") as place:
        world = World(contender, root / "home", place / "data")
        filler = place / "filler"
        try:
            load = Load(world.start(), slow=True)
            load.wait(draw.uniform(0.8, 1.2))
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                for size in (1 << 20, 4096, 512):
                    with contextlib.suppress(OSError):
                        while True:
                            file.write(bytes(size))
            load.wait(2.0)
            ended = world.process is not None and world.process.poll() is not None
            world.kill()
            acknowledged = load.end()
            note = "it ended itself" if ended else ""
            try:
                world.start(again=True).close()
            except Refused as error:
                note = f"{note}; no start while it is full: {error}".strip("; ")
            world.kill()
            filler.unlink()
            return judged(world, acknowledged, note=note)
        finally:
            world.kill()


class Spoiler:
    """One load, killed; then each trial spoils another copy of what it has left.

    Only messages that are there without being spoilt count.
    """

    def __init__(self, contender: Contender, root: Path) -> None:
        self.root, self.world = root, World(contender, root / "home", root / "data")
        try:
            load = Load(self.world.start(), slow=True)
            load.wait(3.0)
            self.world.kill()
            self.acknowledged = load.end()
        finally:
            self.world.kill()
        self.origin = root / "origin"
        self.world.data.rename(self.origin)
        self._copy()
        try:
            found = stored(self.world)
        finally:
            self.world.kill()
        self.acknowledged = [number for number in self.acknowledged if payload(number) in found]

    def holders(self, number: int) -> list[tuple[Path, int]]:
        """The files that hold a message, and where."""
        found = []
        for path in self.files():
            at = path.read_bytes().find(payload(number))
            if at >= 0:
                found.append((path, at))
        return found

    def files(self) -> list[Path]:
        """The files of the copy that have something in them."""
        return sorted(p for p in self.world.data.rglob("*") if p.is_file() and p.stat().st_size)

    def _copy(self) -> None:
        shutil.rmtree(self.world.data, ignore_errors=True)
        subprocess.run(["cp", "-a", self.origin, self.world.data], check=True)

    def trial(self, spoil: Callable[[Spoiler], str]) -> Outcome:
        """Spoil a copy; returns what the server makes of it."""
        self._copy()
        note = spoil(self)
        if not note:
            return Outcome(0, note=NOTHING)
        return judged(self.world, self.acknowledged, note=note)


def flip(draw: random.Random, *, inside: bool) -> Callable[[Spoiler], str]:
    """Flip one bit of a stored message, or anywhere in its files."""

    def spoil(spoiler: Spoiler) -> str:
        if inside and not spoiler.acknowledged:
            return ""
        if inside:
            found = spoiler.holders(draw.choice(spoiler.acknowledged))
            if not found:
                return ""
            path, at = found[0]
            at += draw.randrange(SIZE)
        else:
            files = spoiler.files()
            if not files:
                return ""
            path = draw.choices(files, [f.stat().st_size for f in files])[0]
            at = draw.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
        return f"{path.name} at {at}"

    return spoil


def cut(draw: random.Random) -> Callable[[Spoiler], str]:
    """Cut the file that holds the newest message in the middle of it."""

    def spoil(spoiler: Spoiler) -> str:
        for number in reversed(spoiler.acknowledged):
            found = spoiler.holders(number)
            if found:
                path, at = found[-1]
                os.truncate(path, at + draw.randrange(1, SIZE))
                return f"{path.name} at {at}"
        return ""

    return spoil
