"""The state that the hook `transform_records` keeps between batches: a small map, stored with the position.

The state belongs to a position: it has the values that were set at records below it, and none of later ones.
So a batch that is retried, even after a crash, is transformed with the state of its first attempt.

    stored = entry ...                    the entry that was set first comes first
    entry  = key length u8 | value length u16 | key | value         (big-endian)

The entry with the empty key has the `reduce` rules of the batch that begins at the position.
"""

from __future__ import annotations

import struct

MAX_STATE = 64 * 1024  # bytes of all entries; the least recently set ones are forgotten
MAX_KEY, MAX_VALUE = 255, 32 * 1024
_HEAD = struct.Struct(">BH")


class TransformState:
    """A map of bytes to bytes that the plugins of an export share.

    A key has 1 to 255 bytes and should begin with the name of the plugin; a value has at most 32 KiB. All
    entries together have at most 64 KiB. Beyond that, the least recently set ones are forgotten.
    """

    def __init__(self, stored: bytes = b"") -> None:
        """Read a result of `stored`. Raises ValueError if it is not one."""
        self._kept = dict(_entries(stored))
        self.rules = self._kept.pop(b"", b"")
        self._changes: list[tuple[int, bytes, bytes]] = []  # values set at records from the position on
        self._latest: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if it was never set, or was forgotten."""
        value = self._latest.get(key)
        return self._kept.get(key) if value is None else value

    def set(self, number: int, key: bytes, value: bytes) -> None:
        """Set a value from the record with this sequence number on. Raises ValueError if it is too large."""
        if not 0 < len(key) <= MAX_KEY or len(value) > MAX_VALUE:
            raise ValueError(
                f"a key has 1 to {MAX_KEY} bytes, not {len(key)}, and a value at most {MAX_VALUE}, "
                f"not {len(value)}"
            )
        self._changes.append((number, key, value))
        self._latest[key] = value

    # --- for streambridge

    def rewind(self) -> None:
        """Forget values set at records from the position on, which are transformed again."""
        self._changes.clear()
        self._latest.clear()

    def advance(self, position: int) -> None:
        """Move to a later position. Values set at records below it stay."""
        ahead = []
        for change in self._changes:
            number, key, value = change
            if number < position:
                self._kept.pop(key, None)
                self._kept[key] = value  # at the end, because it was set last
            else:
                ahead.append(change)
        self._changes = ahead
        self._latest = {key: value for _, key, value in ahead}
        room = MAX_STATE - _HEAD.size - len(self.rules)
        size = sum(_HEAD.size + len(key) + len(value) for key, value in self._kept.items())
        while size > room:
            key = next(iter(self._kept))
            size -= _HEAD.size + len(key) + len(self._kept.pop(key))

    def stored(self) -> bytes:
        """Return the state at the position, at most `MAX_STATE` bytes; empty if there is nothing to keep."""
        rules = [(b"", self.rules)] if self.rules else []
        parts = []
        for key, value in (*self._kept.items(), *rules):
            parts += [_HEAD.pack(len(key), len(value)), key, value]
        return b"".join(parts)


def _entries(stored: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 0
    while at < len(stored):
        try:
            key_size, value_size = _HEAD.unpack_from(stored, at)
        except struct.error:
            raise ValueError("the state of a transform is cut off") from None
        middle = at + _HEAD.size + key_size
        at = middle + value_size
        if at > len(stored):
            raise ValueError("the state of a transform is cut off")
        found.append((stored[middle - key_size : middle], stored[middle:at]))
    return found
