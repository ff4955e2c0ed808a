"""What Python's `zlib` does, by zlib-ng where that is installed: the same formats, in less time.

zlib-ng checks 1 KiB in a fifth of the time, packs twice as fast, and unpacks in two thirds. ISA-L
unpacks faster still, but leaves the processor's vector registers in a state (AVX-512 in use, no
VZEROUPPER) in which every later copy of 16 to 31 bytes, in all of the process, takes 0.2 us more.
"""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import compress, crc32, decompressobj

    _LEVEL = 5  # packs as well as level 6 of zlib
except ImportError:  # no build of it for this processor
    from zlib import compress, crc32, decompressobj  # type: ignore[assignment]

    _LEVEL = 6

__all__ = ["GZIP", "crc32", "decompressobj", "gzip"]

GZIP = 31  # the wbits of gzip with the largest window


def gzip(data: bytes) -> bytes:
    """`data` as a gzip file without name and time: with one build of the library always the same bytes."""
    return compress(data, _LEVEL, GZIP)
