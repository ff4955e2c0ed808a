"""The nesting depth of JSON text, without a parser that recurses."""

from __future__ import annotations

import re

# in text without escapes; an unterminated string extends to the end of its line
_STRING = re.compile(rb'"[^"\n]*"?')
_OTHERS = bytes(byte for byte in range(256) if byte not in b"{}[]\n")


def deeper(text: bytes, levels: int) -> bool:
    """Return whether any line is nested deeper, or has brackets that do not match. Linear in the length.

    A parser that stops at an error has never gone deeper than this function reports.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    # escapes from the left: a quote after an even number of backslashes ends its string
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = _STRING.sub(b"", plain).translate(None, _OTHERS)
    for _ in range(levels):
        before = len(brackets)
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
        if len(brackets) == before:
            break
    return bool(brackets.strip())
