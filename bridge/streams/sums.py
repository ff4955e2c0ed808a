"""CRC-32 of parts of a long text: each takes about the same time, however long the part is.

Who looks for frames behind damage meets whatever a payload holds: thousands of forged headers that all
claim to reach to the end of the file. To read each to its end would take time with the square of that.

CRC-32 is linear: the values that one text gives for two seeds differ by the difference of the seeds, led
past as many zeros as the text is long, whatever it says. So the value of a part follows from those of the
text up to its first and to its last whole block, which are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from bridge.deflate import crc32

BLOCK = 1024
FEW = 4  # blocks that are sooner read than reckoned
_Map = list[list[int]]  # what becomes of each byte of a value


class Sums:
    """The parts of one text; what was learnt of it is kept."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._sums = [0]  # of the first 0, 1, 2, ... blocks

    def crc32(self, start: int, end: int, seed: int) -> int:
        """What `crc32(data[start:end], seed)` is; the part lies within the data."""
        first, last = -(-start // BLOCK), end // BLOCK
        if last - first <= FEW:
            return crc32(self._data[start:end], seed)
        sums = self._sums
        for block in range(len(sums) - 1, last):
            sums.append(crc32(self._data[block * BLOCK : (block + 1) * BLOCK], sums[block]))
        other = crc32(self._data[start : first * BLOCK], seed) ^ sums[first]
        return crc32(self._data[last * BLOCK : end], sums[last] ^ _led_past(last - first, other))


def _led_past(blocks: int, value: int) -> int:
    """What a difference of seeds has become behind so many blocks."""
    power = 0
    while blocks:
        if blocks & 1:
            value = _applied(_doubled(power), value)
        blocks >>= 1
        power += 1
    return value


def _applied(table: _Map, value: int) -> int:
    a, b, c, d = table
    return a[value & 255] ^ b[value >> 8 & 255] ^ c[value >> 16 & 255] ^ d[value >> 24]


@cache
def _doubled(power: int) -> _Map:
    """Past 2 ** power blocks."""
    if not power:
        zeros = bytes(BLOCK)
        return _map(lambda value: crc32(zeros, value) ^ crc32(zeros))
    half = _doubled(power - 1)
    return _map(lambda value: _applied(half, _applied(half, value)))


def _map(change: Callable[[int], int]) -> _Map:
    tables = []
    for low in range(0, 32, 8):
        table = [0]
        for bit in range(low, low + 8):
            image = change(1 << bit)
            table += [image ^ other for other in table]
        tables.append(table)
    return tables
