"""Escapes untrusted text for a terminal or a log.

Names, topics, payloads and replies of servers may contain anything. Control characters (C0 and C1) move the
cursor or set colours, direction marks change how a text reads, and line ends forge lines. `str.isprintable`
is false for all of them, and for half a surrogate pair. The log escapes in its formatter, the commands in
their print helpers.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text on one line, with escapes such as \x1b, \n and \u202e for what is not printable."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_json(document: str) -> str:
    r"""The same JSON, on one line, with escapes such as \u001b in its strings for what is not printable.

    Between the values of `document` there may be only spaces; other white space is in strings.
    """
    return document if document.isprintable() else "".join(map(_escaped_json, document))


def _escaped(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _escaped_json(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n] << 8 | units[n + 1]:04x}" for n in range(0, len(units), 2))
