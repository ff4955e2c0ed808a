"""Computes the CRC-32 of parts of a long buffer, each in about the same time, however long it is.

A search for frames after damage may find hostile payloads: thousands of forged headers, each for a frame that
ends with the file. Reading each of these frames would take quadratic time.

CRC-32 is linear. Whatever a buffer contains, its values for two seeds differ by the difference of the seeds,
moved past as many zeros as the buffer is long. So the value of a part follows from the values of the buffer
up to the part's first and last complete block, which are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from bridge.deflate import crc32

BLOCK = 1024
FEW = 4  # blocks; fewer are faster to read than to compute
_Map = list[list[int]]  # the image of each byte of a value


class Sums:
    """The CRC-32 of parts of one buffer. Intermediate values are kept."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self._sums = [0]  # CRC-32 of the first 0, 1, 2, ... blocks

    def crc32(self, start: int, end: int, seed: int) -> int:
        """Return `crc32(data[start:end], seed)`. The part must lie within the data."""
        first, last = -(-start // BLOCK), end // BLOCK
        if last - first <= FEW:
            return crc32(self._data[start:end], seed)
        sums = self._sums
        for block in range(len(sums) - 1, last):
            sums.append(crc32(self._data[block * BLOCK : (block + 1) * BLOCK], sums[block]))
        other = crc32(self._data[start : first * BLOCK], seed) ^ sums[first]
        return crc32(self._data[last * BLOCK : end], sums[last] ^ _moved_past(last - first, other))


def _moved_past(blocks: int, value: int) -> int:
    """Move a difference of seeds past this many blocks of zeros."""
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
    """Return the map that moves a value past 2 ** power blocks."""
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
