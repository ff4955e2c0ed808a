"""Seals and opens the frames of one stream, with the keys of the data directory (`bridge.encryption`)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from errno import EACCES

from bridge.encryption import Keys
from bridge.errors import CorruptData, EncryptionKeyError
from bridge.streams.segment import SEALED, Frame, Seal, body_of, unsealed

_PLACE = struct.Struct("<QQ")


class Sealing:
    """Seals and opens the frames of one stream. May be used from any thread."""

    def __init__(self, keys: Keys, directory: str) -> None:
        """`directory` is the name of the stream's directory, which stands for the stream's name."""
        self._keys, self._label = keys, b"segment\0" + directory.encode() + b"\0"

    def _context(self, epoch: int, segment: int) -> bytes:
        return self._label + _PLACE.pack(epoch, segment)

    def opening(self) -> int:
        """Return the number of the current opening key. Raises OSError."""
        try:
            return self._keys.own()
        except EncryptionKeyError as error:
            raise OSError(EACCES, str(error)) from None

    def knows(self, opening: int) -> bool:
        """Return whether frames sealed with this key can be opened. Raises EncryptionKeyError."""
        return self._keys.knows(opening)

    def missing(self, opening: int) -> str:
        """Return the remedy for an unknown key."""
        return self._keys.missing(opening)

    def sealer(self, epoch: int, segment: int) -> Seal:
        """Seals the frames of the segment that begins with number `segment`."""
        context, seal = self._context(epoch, segment), self._keys.seal_parts
        return lambda head, body: seal(context, head, body)

    def opener(self, epoch: int, segment: int) -> Opener:
        """Opens the frames of a segment."""
        context, unseal = self._context(epoch, segment), self._keys.open

        def opened(data: bytes, frame: Frame) -> tuple[bytes, Frame] | None:
            if not frame.columns & SEALED:  # in an encrypted segment, every frame is sealed
                return None
            try:
                return unsealed(data, frame, unseal(context, *body_of(data, frame)))
            except CorruptData:
                return None

        return opened


# Returns a valid frame, decrypted; None if it was changed or belongs elsewhere. Raises EncryptionKeyError.
Opener = Callable[[bytes, Frame], tuple[bytes, Frame] | None]
