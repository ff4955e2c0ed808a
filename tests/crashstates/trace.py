"""What strace has written, as calls in the order in which they began."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import NamedTuple

CALLS = (
    "open,openat,creat,write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,sync_file_range,sync,syncfs,"
    "rename,renameat,renameat2,link,linkat,unlink,unlinkat,symlink,symlinkat,mkdir,mkdirat,rmdir,truncate,"
    "ftruncate,fallocate,sendfile,copy_file_range,bind,sendto,sendmsg,sendmmsg,mmap,io_uring_enter"
)
OPTIONS = ("--seccomp-bpf", "-f", "-yy", "-xx", "-s", "100000000", "-ttt", "-e", f"trace={CALLS}")

_LINE = re.compile(r"(\d+)\s+([\d.]+) (.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)", re.DOTALL)
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)(.*)", re.DOTALL)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"(?:\d+|AT_FDCWD)<([A-Z0-9-]+:\[[^\]]*\]|[^>]*)>")
_CLIENT = re.compile(r"TCP(?:v6)?:\[.*:(\d+)->.*:(\d+)\]")
_INSTANT = re.compile(r"\}\], \d+, (-?\d+)")


class Call(NamedTuple):
    """A call that succeeded. It began and ended at these lines of the log.

    `path` and `other` are what it is about; of a socket, `path` is empty and `peer` is the client's port.
    `flags` are the words of an open.
    """

    begin: int
    end: int
    name: str
    path: str = ""
    other: str = ""
    data: bytes = b""
    offset: int = -1
    flags: str = ""
    peer: int = 0


_SHORTCUT = re.compile(r"/proc/self/fd/(\d+)(/.*)")


def parse(lines: Iterable[str], first: int = 0) -> list[Call]:
    """The calls of a log, by their beginning; `first` is the number of its first line.

    Raises ValueError for a call that the model does not know.
    """
    found: list[Call] = []
    begun: dict[str, tuple[int, str]] = {}
    number = first
    for number, line in enumerate(lines, first):
        match = _LINE.match(line.rstrip("\n"))
        if match is None or match[3].startswith(("---", "+++")):
            continue
        thread, text = match[1], match[3]
        begin = number
        if (resumed := _RESUMED.match(text)) is not None:
            begin, text = begun.pop(thread, (number, ""))
            text += resumed[2]
        elif text.endswith("<unfinished ...>"):
            begun[thread] = number, text.removesuffix("<unfinished ...>").rstrip()
            continue
        if text:
            found += _calls(begin, number, text)
    for begin, text in begun.values():  # the process was killed in it: it may have had its effect
        if re.match(r"p?write|sendto|sendmsg", text):
            found += _calls(begin, number + 1, f"{text}) = {1 << 62}")
    return sorted(_without_shortcuts(sorted(found)))


def _without_shortcuts(calls: list[Call]) -> Iterator[Call]:
    """Sockets are bound by way of a descriptor of their directory."""
    opened: dict[str, str] = {}
    for call in calls:
        if call.name == "open":
            opened[call.other] = call.path
            yield call._replace(other="")
        elif call.name == "bind" and (found := _SHORTCUT.match(call.path)) is not None:
            yield call._replace(path=opened[found[1]] + found[2])
        else:
            yield call


def _calls(begin: int, end: int, text: str) -> Iterator[Call]:
    match = _CALL.match(text)
    if match is None:
        if "(" in text and not text.rstrip().endswith("= ?"):
            raise ValueError(f"cannot read a line of strace: {text[:200]}")
        return
    name, rest, result = match[1], match[2], int(match[3])
    if result < 0:
        return
    texts = [bytes.fromhex(one.replace("\\x", "")) for one in _TEXT.findall(rest)]
    places = [_place(place) for place in _FD.findall(_TEXT.sub('""', rest))]
    match name:
        case "write" | "writev" | "pwrite64" | "pwritev" | "pwritev2" | "sendto" | "sendmsg":
            where = places[0] if places else ""
            data = b"".join(texts)[:result]
            if (client := _CLIENT.match(where)) is not None:
                yield Call(begin, end, "send", data=data, peer=int(client[2]))
            elif where.startswith("/") and name not in ("sendto", "sendmsg"):
                yield Call(begin, end, "write", where, data=data, offset=_offset(name, rest))
        case "open" | "creat" | "openat":
            made = _FD.search(match[4])
            path = _place(made[1]) if made is not None else _joined(places, texts[0])
            yield Call(
                begin, end, "open", path, str(result), flags="O_CREAT|O_TRUNC" if name == "creat" else rest
            )
        case "fsync" | "fdatasync":
            yield Call(begin, end, name, places[0])
        case "ftruncate":
            yield Call(begin, end, "truncate", places[0], offset=int(rest.rsplit(",", 1)[1]))
        case "truncate":
            yield Call(begin, end, name, _decoded(texts[0]), offset=int(rest.rsplit(",", 1)[1]))
        case "rename" | "link" | "renameat" | "renameat2" | "linkat":
            one, two = [*places, "", ""][:2]
            old, new = _joined([one], texts[0]), _joined([two or one], texts[1])
            if "RENAME_" in rest:
                raise ValueError(f"not modelled: {text[:200]}")
            yield Call(begin, end, name.removesuffix("2").removesuffix("at"), old, new)
        case "symlink" | "symlinkat":
            yield Call(begin, end, "symlink", _joined(places, texts[1]), _decoded(texts[0]))
        case "unlink" | "unlinkat" | "rmdir":
            yield Call(begin, end, "unlink", _joined(places, texts[0]))
        case "mkdir" | "mkdirat":
            yield Call(begin, end, "mkdir", _joined(places, texts[0]))
        case "bind" if "AF_UNIX" in rest and texts and texts[0][:1] != b"\0":
            yield Call(begin, end, "bind", _decoded(texts[0]))
        case "mmap" | "sync" | "syncfs" | "sync_file_range" | "fallocate" | "copy_file_range" | "sendfile":
            if name != "mmap" or ("MAP_SHARED" in rest and "PROT_WRITE" in rest):
                yield Call(begin, end, "unknown", places[0] if places else "", flags=text[:200])
        case _:
            pass


def _place(text: str) -> str:
    """What a descriptor leads to: a path, perhaps in hexadecimal."""
    if text.startswith("\\x"):
        text = _decoded(bytes.fromhex(text.replace("\\x", "")))
    return re.sub(r" ?\(deleted\)$", "", text)


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _joined(places: list[str], name: bytes) -> str:
    return str(PurePath(places[0] if places else "", _decoded(name)))


def _offset(name: str, rest: str) -> int:
    """Where a write goes; -1: at the end."""
    if name == "pwrite64":
        return int(rest.rsplit(",", 1)[1])
    if name in ("pwritev", "pwritev2"):
        found = _INSTANT.search(rest)
        if found is None:
            raise ValueError(f"cannot read the offset of {name}({rest[-100:]})")
        return int(found[1])
    return -1
