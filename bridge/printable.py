"""Text of strangers for a terminal or a log: what could steer either is shown, not sent.

Names, topics, payloads and what a server answered may hold anything. Control characters of C0 and C1 move the
cursor or set colours, marks of direction make text read as another, and line ends forge lines. All of them,
and half a surrogate pair, are what `str.isprintable` says no to. Each output escapes in one place: the
formatter of the log, and the helpers that the commands print with.
"""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text on one line, with escapes such as \x1b, \n and \u202e for what is not printable."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_json(document: str) -> str:
    r"""The same JSON, on one line, with escapes such as \u001b in its strings for what is not printable.

    `document` has no white space between its values but spaces, so that the rest stands in strings.
    """
    return document if document.isprintable() else "".join(map(_escaped_json, document))


def _escaped(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _escaped_json(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n] << 8 | units[n + 1]:04x}" for n in range(0, len(units), 2))
