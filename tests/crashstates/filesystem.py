"""A file system in memory: what of a run is on the disk for sure, and what of the rest may be.

The package's docstring says which model allows what. A file's data is kept as versions of its sectors: on
the disk, each sector is as it was synced last, or as the page cache had it after any write since.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePath
from random import Random
from typing import NamedTuple

from .trace import Call

SECTOR, BLOCK = 512, 4096
KILLED, ORDERED, WRITEBACK, UNJOURNALED = MODELS = ("killed", "ordered", "writeback", "no journal")
FEW = 64  # combinations of which none is left out
STALE = (b"\xa5", b"SBF2")  # what may be in blocks that were another file's

Slot = tuple[int, str]  # a name in a directory
Changes = list[tuple[Slot, int | None]]  # what each name leads to then; None: it is gone
State = dict[str, bytes | str | None]  # by path: content, target of a link, None for a directory


class Socket(bytes):
    """The content of a name that a socket was bound to."""


class Change(NamedTuple):
    """A write, or with `size` a truncation. `order`: how many changes of names came before."""

    end: int
    order: int
    offset: int
    data: bytes
    size: int = -1


class NameChange(NamedTuple):
    """A change of names that a journal makes as one."""

    end: int
    changes: Changes
    made: int  # the node that it makes, -1 if none


class File:
    """A file: `durable` is on the disk; `changes` were made since."""

    def __init__(self, durable: bytes = b"") -> None:
        self.durable, self.cache = durable, bytearray(durable)
        self.changes: list[Change] = []
        self.sizes = [len(durable)]  # after so many changes
        self.sectors: dict[int, list[tuple[int, bytes]]] = {}  # (after how many changes, content)
        self._freed: list[tuple[int, int]] = []  # after so many changes: all sectors from this one on

    def add(self, change: Change) -> None:
        """A change in the page cache."""
        self.changes.append(change)
        number, cache = len(self.changes), self.cache
        if change.size >= 0:
            old = len(cache)
            del cache[change.size :]
            cache.extend(bytes(change.size - len(cache)))
            freed = -(-change.size // BLOCK) * (BLOCK // SECTOR)
            self._freed.append((number, freed))
            touched = range(change.size // SECTOR, min(freed, -(-old // SECTOR)))
        else:
            end = change.offset + len(change.data)
            cache.extend(bytes(max(0, change.offset - len(cache))))
            cache[change.offset : end] = change.data
            touched = range(change.offset // SECTOR, -(-end // SECTOR))
        for sector in touched:
            content = bytes(cache[sector * SECTOR : (sector + 1) * SECTOR]).ljust(SECTOR, b"\0")
            self.sectors.setdefault(sector, []).append((number, content))
        self.sizes.append(len(cache))

    def sync(self, before: int) -> None:
        """What had ended before this line is on the disk."""
        rest = list(itertools.dropwhile(lambda change: change.end < before, self.changes))
        done = self.changes[: len(self.changes) - len(rest)]
        if done:
            synced = File(self.durable)
            for change in done:
                synced.add(change)
            self.__init__(bytes(synced.cache))  # type: ignore[misc]
            for change in rest:
                self.add(change)

    def resizes(self, number: int) -> bool:
        """Whether a change (the first is 1) has changed the size."""
        return self.sizes[number] != self.sizes[number - 1] or self.changes[number - 1].size >= 0

    def least(self, sector: int, number: int, *, ordered: bool) -> int:
        """The oldest version of a sector that may be on the disk with the size after `number` changes."""
        least = max((n for n, freed in self._freed if n <= number and sector >= freed), default=0)
        if ordered:
            had = len(self.durable) if not least else 0
            block = sector // (BLOCK // SECTOR)
            if block * BLOCK >= had and block * BLOCK < self.sizes[number]:
                first = self._first(block, least)
                if any(version == first for version, _ in self.sectors.get(sector, ())):
                    least = max(least, first)
        return least

    def _first(self, block: int, after: int) -> int:
        """The first change of a block that came after another."""
        width = BLOCK // SECTOR
        mine = range(block * width, (block + 1) * width)
        return min((n for at in mine for n, _ in self.sectors.get(at, ()) if n > after), default=after)

    def content(self, number: int, chosen: Mapping[int, int], stale: bytes = b"") -> bytes:
        """With the size after `number` changes, and of some sectors the version after so many changes."""
        size = self.sizes[number]
        data = bytearray(self.durable[:size].ljust(size, b"\0"))
        for sector in self.sectors.keys() | self._zeroed(number, size):
            at = sector * SECTOR
            if at >= size:
                continue
            least = self.least(sector, number, ordered=False)
            wanted = chosen.get(sector, 0)
            found = [
                content for version, content in self.sectors.get(sector, ()) if least <= version <= wanted
            ]
            if found:
                content = found[-1]
            elif not least and at < len(self.durable):
                content = self.durable[at : at + SECTOR].ljust(SECTOR, b"\0")
            else:
                content = (stale or b"\0") * SECTOR
            data[at : at + SECTOR] = content[: min(SECTOR, size - at)]
        return bytes(data)

    def _zeroed(self, number: int, size: int) -> set[int]:
        """Sectors that a truncation has freed, and a later size shows again."""
        return {
            sector
            for n, freed in self._freed
            if n <= number
            for sector in range(freed, -(-min(size, len(self.durable)) // SECTOR))
        }


class Choice(NamedTuple):
    """One state: which names, and of each file how many changes count for its size, and which sectors."""

    names: tuple[int, ...] | int  # the version of each changed name; with a journal, how many changes
    files: dict[int, tuple[int, dict[int, int]]]
    stale: bytes = b""


class FileSystem:
    """One run's files under one model, up to some call."""

    def __init__(self, root: Path, model: str, *, at: Path | None = None) -> None:
        """Begins with what is in `root`, all of it on the disk, which was `at` this path in the run."""
        self.root, self.model = str(at or root), model
        self.nodes: list[File | str | None] = [None]  # the root is node 0; a link is its target
        self._disk: dict[Slot, int] = {}
        self._cache: dict[Slot, int] = {}
        self._past: dict[str, int] = {}  # names that nodes had
        self._names: list[NameChange] = []
        self._durable = 0  # so many of the changes of names, with a journal
        self._pending: dict[
            Slot, list[tuple[int, int | None]]
        ] = {}  # without one: (end, node) since the sync
        self._dirty: set[int] = set()
        self._load(root, 0)

    def _load(self, directory: Path, node: int) -> None:
        for path in sorted(directory.iterdir()):
            if path.is_symlink():
                made: File | str | None = str(path.readlink())
            else:
                made = None if path.is_dir() else File(path.read_bytes())
            self.nodes.append(made)
            self._disk[node, path.name] = self._cache[node, path.name] = len(self.nodes) - 1
            if made is None:
                self._load(path, len(self.nodes) - 1)

    # -- the run ---------------------------------------------------------------------------------
    def within(self, path: str) -> bool:
        """Whether a path is on this disk."""
        return path == self.root or path.startswith(self.root + "/")

    def apply(self, call: Call) -> None:
        """The effect of a call that begins; a sync has none yet."""
        if call.name == "unknown":
            if self.within(call.path):
                raise ValueError(f"not modelled: {call.flags}")
            return
        here, there = self.within(call.path), call.other and self.within(call.other)
        if call.name in ("rename", "link") and here != there:
            raise ValueError(f"not modelled, it leaves the disk: {call}")
        if not here:
            return
        match call.name:
            case "open" if "O_CREAT" in call.flags or "O_TRUNC" in call.flags:
                slot = self._slot(call.path)
                if slot not in self._cache and "O_CREAT" in call.flags:
                    self._make(call, slot, File())
                elif "O_TRUNC" in call.flags and "O_EXCL" not in call.flags:
                    self._change(call, self._cache[slot], Change(call.end, 0, 0, b"", 0))
            case "write":
                if (node := self._node(call.path)) is not None:
                    file = self.nodes[node]
                    assert isinstance(file, File), call.path
                    offset = call.offset if call.offset >= 0 else len(file.cache)
                    self._change(call, node, Change(call.end, 0, offset, call.data))
            case "truncate":
                if (node := self._node(call.path)) is not None:
                    self._change(call, node, Change(call.end, 0, 0, b"", call.offset))
            case "mkdir":
                self._make(call, self._slot(call.path), None)
            case "symlink":
                self._make(call, self._slot(call.path), call.other)
            case "bind":
                self._make(call, self._slot(call.path), File(Socket()))
            case "unlink":
                self._name(call, [(self._slot(call.path), None)])
                self._past[call.path] = self._cache.pop(self._slot(call.path))
            case "rename":
                old, new = self._slot(call.path), self._slot(call.other)
                node = self._cache.pop(old)
                self._past[call.path] = node
                self._name(call, [(new, node), (old, None)])
                self._cache[new] = node
            case "link":
                node = self._cache[self._slot(call.path)]
                self._name(call, [(self._slot(call.other), node)])
                self._cache[self._slot(call.other)] = node
            case _:
                pass

    def sync(self, call: Call) -> None:
        """A sync has returned."""
        if not self.within(call.path) or (node := self._node(call.path)) is None:
            return
        found = self.nodes[node]
        if isinstance(found, File):
            force = self._commits(node, found, call)
            found.sync(call.begin)
            if not found.changes:
                self._dirty.discard(node)
        else:
            mine = [n for n, change in enumerate(self._names, 1) if self._is_in(change, node, call)]
            force = max(mine, default=0)
            for slot in [slot for slot in self._pending if slot[0] == node]:
                self._settle(slot, call.begin)
        self._commit(force)

    def _is_in(self, change: NameChange, directory: int, call: Call) -> bool:
        return change.end < call.begin and any(slot[0] == directory for slot, _ in change.changes)

    def _commits(self, node: int, file: File, call: Call) -> int:
        """Up to which change of names a sync of a file commits the journal."""
        force = 0
        for n, change in enumerate(self._names, 1):
            named = any(leads_to == node for _, leads_to in change.changes)
            if change.end < call.begin and (change.made == node or (named and call.name == "fsync")):
                force = n
        for n, change in enumerate(file.changes, 1):
            if change.end < call.begin and file.resizes(n):
                force = max(force, change.order)
        return force

    def _commit(self, upto: int) -> None:
        for change in self._names[self._durable : upto]:
            if self.model != UNJOURNALED:
                _put(self._disk, change.changes)
        self._durable = max(self._durable, upto)

    def _settle(self, slot: Slot, before: int) -> None:
        versions = self._pending[slot]
        done = [node for end, node in versions if end < before]
        if done:
            if self.model == UNJOURNALED:
                _put(self._disk, [(slot, done[-1])])
            self._pending[slot] = versions[len(done) :]
        if not self._pending[slot]:
            del self._pending[slot]

    def _node(self, path: str) -> int | None:
        """What a path leads to; it may have another name by now."""
        try:
            return self._cache[self._slot(path)] if path != self.root else 0
        except KeyError:
            return self._past.get(path)

    def _slot(self, path: str) -> Slot:
        node = 0
        *parents, name = PurePath(path).relative_to(self.root).parts
        for parent in parents:
            node = self._cache[node, parent]
        return node, name

    def _make(self, call: Call, slot: Slot, made: File | str | None) -> None:
        self.nodes.append(made)
        self._name(call, [(slot, len(self.nodes) - 1)], made=len(self.nodes) - 1)
        self._cache[slot] = len(self.nodes) - 1

    def _name(self, call: Call, changes: Changes, made: int = -1) -> None:
        self._names.append(NameChange(call.end, changes, made))
        for slot, node in changes:
            self._pending.setdefault(slot, []).append((call.end, node))

    def _change(self, call: Call, node: int, change: Change) -> None:
        file = self.nodes[node]
        assert isinstance(file, File), call.path
        file.add(change._replace(order=len(self._names)))
        self._dirty.add(node)

    # -- states ----------------------------------------------------------------------------------
    def states(self, draw: Random) -> Iterator[State]:
        """States of the disk that a crash at this point may leave; they may repeat.

        The first are those with nothing and with everything of what is not synced, and with the names alone;
        after those, without an end unless all were few.
        """
        full = self._choice(most=True)
        if self.model == KILLED:
            yield self.built(full)
            return
        yield self.built(self._choice(most=False))
        yield self.built(full)
        yield self.built(self._choice(most=False, names=full.names))
        if every := self._every():
            hollow = STALE if self.model in (WRITEBACK, UNJOURNALED) else ()
            yield from (
                self.built(choice._replace(stale=stale)) for stale in (b"", *hollow) for choice in every
            )
            return
        single = self._single()
        draw.shuffle(single)
        for turn, choice in enumerate(single):
            yield self.built(choice())
            if turn % 2:
                yield self.built(self._drawn(draw))
        while True:
            yield self.built(self._drawn(draw))

    def _bounds(self) -> Sequence[tuple[int, ...] | int]:
        """How the names may be: with a journal, how many changes; else all versions of some names."""
        if self.model != UNJOURNALED:
            return range(self._durable, len(self._names) + 1)
        most = tuple(len(versions) for versions in self._pending.values())
        least = (0,) * len(most)
        some = [least, most]
        for n, high in enumerate(most):
            some += [(*least[:n], v, *least[n + 1 :]) for v in range(1, high + 1)]
            some += [(*most[:n], v, *most[n + 1 :]) for v in range(high)]
        return some

    def _sizes(self, file: File, names: tuple[int, ...] | int) -> list[int]:
        """After how many changes the size may be that is on the disk."""
        if self.model == UNJOURNALED:
            return list(range(len(file.sizes)))
        assert isinstance(names, int)
        cuts = [n for n, c in enumerate(file.changes, 1) if c.size >= 0 and c.order < names]
        most = 0
        for n, change in enumerate(file.changes, 1):
            if file.resizes(n) and change.order > names:
                break
            most = n
        return list(range(min(cuts[-1] if cuts else 0, most), most + 1))

    def _files(self) -> Iterator[tuple[int, File]]:
        for node in sorted(self._dirty):
            file = self.nodes[node]
            assert isinstance(file, File)
            yield node, file

    def _allowed(self, file: File, number: int, chosen: Mapping[int, int]) -> dict[int, int]:
        """The choice of sectors nearest to a wanted one that the model allows with a size."""
        ordered = self.model == ORDERED
        return {
            sector: max(chosen.get(sector, 0), file.least(sector, number, ordered=ordered))
            for sector in file.sectors
        }

    def _of_file(
        self, file: File, names: tuple[int, ...] | int, *, most: bool, data: bool
    ) -> tuple[int, dict[int, int]]:
        number = self._sizes(file, names)[-1 if most else 0]
        wanted = dict.fromkeys(file.sectors, len(file.changes)) if data else {}
        return number, self._allowed(file, number, wanted)

    def _choice(
        self, *, most: bool, names: tuple[int, ...] | int | None = None, data: bool | None = None
    ) -> Choice:
        if names is None:
            bounds = self._bounds()
            names = bounds[1 if self.model == UNJOURNALED else -1] if most else bounds[0]
        data = most if data is None else data
        return Choice(names, {n: self._of_file(f, names, most=most, data=data) for n, f in self._files()})

    def _every(self) -> list[Choice]:
        """All combinations if they are few, else none."""
        number = math.prod(
            len(file.sizes) * math.prod(len(versions) + 1 for versions in file.sectors.values())
            for _, file in self._files()
        )
        if self.model == UNJOURNALED:
            versions = [range(len(versions) + 1) for versions in self._pending.values()]
            number *= math.prod(map(len, versions))
            bounds: Iterable[tuple[int, ...] | int] = itertools.product(*versions)
        else:
            bounds = self._bounds()
            number *= len(bounds)
        if number > FEW:
            return []
        found: list[Choice] = []
        for names in bounds:
            ways = [list(self._ways(file, names)) for _, file in self._files()]
            nodes = [node for node, _ in self._files()]
            for combined in itertools.product(*ways):
                found.append(Choice(names, dict(zip(nodes, combined, strict=True))))  # noqa: PERF401
        return found

    def _ways(self, file: File, names: tuple[int, ...] | int) -> Iterator[tuple[int, dict[int, int]]]:
        versions = [(0, *(n for n, _ in versions)) for versions in file.sectors.values()]
        for number in self._sizes(file, names):
            for picked in itertools.product(*versions):
                yield number, self._allowed(file, number, dict(zip(file.sectors, picked, strict=True)))

    def _single(self) -> list[Callable[[], Choice]]:
        """What differs from nothing and from everything in one thing; each is made when it is asked for."""
        full, least = self._choice(most=True), self._choice(most=False)
        found: list[Callable[[], Choice]] = [
            partial(self._choice, most=most, names=names, data=data)
            for names in self._bounds()
            for most, data in ((True, True), (True, False), (False, True))
        ]
        if self.model in (WRITEBACK, UNJOURNALED):
            hollow = self._choice(most=True, data=False)
            found += [partial(hollow._replace, stale=stale) for stale in STALE]
        for node, file in self._files():
            last, sizes = len(file.changes), self._sizes(file, full.names)
            everything = dict.fromkeys(file.sectors, last)
            found.append(partial(self._with, least, node, self._sizes(file, least.names)[-1], everything))
            for number in sizes:
                found += [partial(self._with, full, node, number, wanted) for wanted in ({}, everything)]
            for sector in [*file.sectors][:6] + [*file.sectors][-2:]:
                for wanted in (everything | {sector: 0}, {sector: last}):
                    found.append(partial(self._with, full, node, sizes[-1], wanted))
        return found

    def _with(self, choice: Choice, node: int, number: int, wanted: dict[int, int]) -> Choice:
        """The same, with another state of one file."""
        file = self.nodes[node]
        assert isinstance(file, File)
        return choice._replace(files=choice.files | {node: (number, self._allowed(file, number, wanted))})

    def _drawn(self, draw: Random) -> Choice:
        if self.model == UNJOURNALED:
            names: tuple[int, ...] | int = tuple(draw.randint(0, len(v)) for v in self._pending.values())
        else:
            names = draw.randint(self._durable, len(self._names))
        files = {}
        for node, file in self._files():
            number = draw.choice(self._sizes(file, names))
            files[node] = number, self._allowed(file, number, _drawn_sectors(file, draw))
        hollow = self.model in (WRITEBACK, UNJOURNALED) and draw.random() < 0.2
        return Choice(names, files, draw.choice(STALE) if hollow else b"")

    def built(self, choice: Choice) -> State:
        """The files of a state by their paths below the root."""
        names = dict(self._disk)
        if isinstance(choice.names, int):
            for change in self._names[self._durable : choice.names]:
                _put(names, change.changes)
        else:
            for (slot, versions), number in zip(self._pending.items(), choice.names, strict=True):
                if number:
                    _put(names, [(slot, versions[number - 1][1])])
        children: dict[int, list[tuple[str, int]]] = {}
        for (directory, name), node in names.items():
            children.setdefault(directory, []).append((name, node))
        state: State = {}

        def walk(directory: int, prefix: str, above: frozenset[int]) -> None:
            for name, node in children.get(directory, ()):
                found = self.nodes[node]
                if isinstance(found, File):
                    if isinstance(found.durable, Socket):
                        state[prefix + name] = found.durable
                    elif node in choice.files and found.changes:
                        number, chosen = choice.files[node]
                        state[prefix + name] = found.content(number, chosen, choice.stale)
                    else:
                        state[prefix + name] = found.durable
                elif isinstance(found, str):
                    state[prefix + name] = found
                elif node not in above and prefix + name not in state:
                    state[prefix + name] = None
                    walk(node, f"{prefix}{name}/", above | {node})

        walk(0, "", frozenset({0}))
        return state


def _put(names: dict[Slot, int], changes: Changes) -> None:
    for slot, node in changes:
        if node is None:
            names.pop(slot, None)
        else:
            names[slot] = node


def _drawn_sectors(file: File, draw: Random) -> dict[int, int]:
    """Which version of each sector is wanted: by pages or by sectors, or up to one of them."""
    last, sectors = len(file.changes), sorted(file.sectors)
    if not sectors:
        return {}
    ways: list[Callable[[], dict[int, int]]] = [
        dict,
        lambda: dict.fromkeys(sectors, last),
        lambda: {sector: draw.randint(0, last) for sector in sectors},
        lambda: dict.fromkeys(sectors[: draw.randrange(len(sectors)) + 1], last),
        lambda: dict.fromkeys(sectors[draw.randrange(len(sectors)) :], last),
        lambda: _of_some_pages(sectors, last, draw),
        lambda: dict.fromkeys(sectors, draw.randint(0, last)),
    ]
    return draw.choice(ways)()


def _of_some_pages(sectors: list[int], last: int, draw: Random) -> dict[int, int]:
    width = BLOCK // SECTOR
    kept = {page for page in range(sectors[-1] // width + 1) if draw.random() < 0.5}
    return {sector: last for sector in sectors if sector // width in kept}


def digest(state: State) -> bytes:
    """What names a state."""
    total = blake2b(digest_size=16)
    for path, content in sorted(state.items()):
        kind = b"d" if content is None else b"l" if isinstance(content, str) else b"f"
        data = content.encode() if isinstance(content, str) else content or b""
        total.update(b"%s %d %d " % (kind, len(path), len(data)) + path.encode() + data)
    return total.digest()


def write(state: State, root: Path) -> None:
    """Make the files of a state below a directory."""
    root.mkdir()
    for path, content in state.items():  # a directory comes before what is in it
        place = root / path
        if content is None:
            place.mkdir(mode=0o700)
        elif isinstance(content, str):
            place.symlink_to(content)
        elif isinstance(content, Socket):
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(place))
        else:
            place.write_bytes(content)
