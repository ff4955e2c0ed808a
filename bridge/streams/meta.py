"""A stream's definition as stored in its directory: two copies, each replaced atomically.

    meta.0, meta.1 = magic "SBMETA\\0\\1" | length u32 | crc u32 | msgpack of `Meta` (`length` bytes)

The copies are written one after the other, with the same generation. If their generations differ, the last
change was neither finished nor acknowledged, and the reader takes the valid copy with the lower generation.
So neither a flipped bit in one copy, nor a power cut or a full disk between the two writes, loses a
definition. `definition` is opaque to the store.

`begun` has, by export, the generation that created it or last moved its start; without an entry, it has the
start that it had in the first generation. The positions of exports and consumers have the same number, so a
start that was moved and moved back differs from one that stayed.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from bridge.decoded import END, Natural, Next, decoded
from bridge.deflate import crc32
from bridge.errors import CorruptData
from bridge.streams.layout import Files

_HEAD = struct.Struct("<8sII")
_MAGIC = b"SBMETA\0\1"
NAMES = ("meta.0", "meta.1")


class MessageLimits(msgspec.Struct, frozen=True):
    """Message limits; None is no limit. Sizes in bytes (topic and payload), age in ms."""

    max_messages: Natural | None = None
    max_bytes: Natural | None = None
    max_age: Natural | None = None
    max_messages_per_topic: Natural | None = None
    max_message_size: Natural | None = None
    discard_new: bool = False


class StorageSettings(msgspec.Struct, frozen=True):
    """How a stream is stored. Sizes in bytes, times in ms.

    `overwrite`: a full stream drops its oldest segments instead of rejecting data. `free_exported`: a full
    stream first drops segments that all its exports have passed. `encryption`: new segments are encrypted.
    """

    max_size: Natural = 256 * 1024 * 1024
    segment_size: Natural = 16 * 1024 * 1024
    ttl: Natural | None = None
    overwrite: bool = False
    memory: bool = False
    flush: bool = False
    free_exported: bool = False
    dedup_window: Natural | None = None
    limits: MessageLimits = MessageLimits()
    encryption: bool = False


class Meta(msgspec.Struct, frozen=True):
    """A stream's identity and settings. `epoch` is when it was created, Unix time in ms.

    `salt` is a secret random number (see `segment`). `reserved`: numbers below it may have been used by
    a memory stream whose content is gone. `drops`: its `drops.log` was made with it, so a missing one is
    damage. `paused` are the exports that were paused by hand, and `begun` is described above: state beside
    the definition, and as opaque. `owner` is who created it, empty for the configuration.
    """

    name: str
    epoch: Natural
    salt: int
    settings: StorageSettings
    definition: bytes = b""
    generation: Natural = 0
    reserved: Next = 0
    drops: bool = False
    paused: tuple[str, ...] = ()
    begun: dict[str, int] = {}
    owner: str = ""


_decoder = msgspec.msgpack.Decoder(Meta)


def encode(meta: Meta) -> bytes:
    """The content of one copy."""
    body = msgspec.msgpack.encode(meta)
    return _HEAD.pack(_MAGIC, len(body), crc32(body)) + body


def decode(data: bytes) -> Meta | None:
    """Read one copy; None if it is damaged."""
    if len(data) < _HEAD.size:
        return None
    magic, length, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != _MAGIC or len(body) != length or crc32(body) != crc:
        return None
    try:
        meta = decoded(body, _decoder)
    except CorruptData:
        return None
    return meta if meta.reserved <= END else None


def save(files: Files, directory: Path, meta: Meta, before: Meta | None = None) -> None:
    """Write both copies durably; raises OSError, and then `before`, the old definition, stays in force.

    If both copies were replaced and the old one cannot be restored, the error says so.
    """
    try:
        for name in NAMES:
            files.replace(directory / name, encode(meta))
    except OSError as error:
        if before is not None and load(directory)[0] == meta:
            try:
                files.replace(directory / NAMES[1], encode(before))
            except OSError:
                why = (
                    "and the old definition cannot be restored: the new one may take effect at the next start"
                )
                raise OSError(error.errno, f"{error.strerror}; {why}", str(directory)) from error
        raise


def load(directory: Path) -> tuple[Meta | None, list[Path]]:
    """The definition, None if no copy is sound, and the copies that are damaged or missing.

    Raises PermissionError, and OSError if no copy is sound and one cannot be read: a file that this user may
    not read, or that the disk does not give, is not damaged, and must not be rewritten.
    """
    best: Meta | None = None
    bad: list[Path] = []
    unread: OSError | None = None
    for name in NAMES:
        path = directory / name
        try:
            meta = decode(path.read_bytes())
        except PermissionError:
            raise
        except FileNotFoundError:
            meta = None
        except OSError as error:
            meta, unread = None, error
        if meta is None:
            bad.append(path)
        elif best is None or meta.generation < best.generation:
            best = meta
    if best is None and unread is not None:
        raise unread
    return best, bad
