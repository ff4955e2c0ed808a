"""Decodes what files hold: a right checksum proves that bytes are as they were written, not their sense.

Another program, a faulty version, or somebody who can write there may have made them. So nonsense is damage
like any other: each caller does what it does about a wrong checksum.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from bridge.errors import CorruptData

T = TypeVar("T")

END, MOST = 2**63, 2**63 - 1
Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]  # checked where it is decoded
Next = Annotated[int, msgspec.Meta(ge=0)]  # the number after one, or a count: at most END, as users check
FromMinusOne = Annotated[int, msgspec.Meta(ge=-1, le=MOST)]  # -1: none


def decoded(body: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Decode a value. Raises CorruptData for all else, whatever msgspec raises for it."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        # UnicodeDecodeError is a ValueError; what is nested deep is a RecursionError.
        raise CorruptData(f"its content makes no sense: {error}") from None
