"""How deep JSON text is nested, without a parser that calls itself for each level."""

from __future__ import annotations

import re

# in text without escapes; a string that does not end takes the rest of its line
_STRING = re.compile(rb'"[^"\n]*"?')
_OTHERS = bytes(byte for byte in range(256) if byte not in b"{}[]\n")


def deeper(text: bytes, levels: int) -> bool:
    """Whether a line of the text is nested deeper, or its brackets do not match. Linear in the length.

    What a parser reads before it meets an error is never deeper than what is found here.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    # escapes from the left: where backslashes are even in number, the quote behind them ends its string
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", plain).translate(None, _OTHERS)
    for _ in range(levels):
        before = len(brackets)
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
        if len(brackets) == before:
            break
    return bool(brackets.strip())
