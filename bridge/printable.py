"""Escapes untrusted text for a terminal or a log, and cuts the credentials out of its URLs.

Names, topics, payloads and replies of servers may contain anything. Control characters (C0 and C1) move the
cursor or set colours, direction marks change how a text reads, and line ends forge lines. `str.isprintable`
is false for all of them, and for half a surrogate pair. The log escapes in its formatter, the commands in
their print helpers.

A URL may carry a password before its host, and a token in its query or fragment (RFC 3986, sections 3.2.1,
3.4 and 3.5). Errors of libraries repeat URLs, and errors are read by people who may not read the
configuration.
"""

from __future__ import annotations

import re

# Also urllib3's `url: /path?query`, which has no host.
_URL = re.compile(r"""(://|(?<=url: )/)([^\s"<>]+)""")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d+)?")
_PUNCTUATION = "'`:;,.)]}"  # at the end, it belongs to the sentence


def printable(text: str) -> str:
    r"""The text on one line, with escapes such as \x1b, \n and \u202e for what is not printable."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def printable_json(document: str) -> str:
    r"""The same JSON, on one line, with escapes such as \u001b in its strings for what is not printable.

    Between the values of `document` there may be only spaces; other white space is in strings.
    """
    return document if document.isprintable() else "".join(map(_escaped_json, document))


def without_credentials(text: str) -> str:
    """The text with each URL cut: without user, password, query and fragment."""
    return _URL.sub(_cut, text) if "://" in text or "url: /" in text else text


MASK = "***"
_WHOLE_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(\S+)")
_PARAMETER = re.compile(r"(?<=[?&;])([^=&;#]*=)?[^&;#]*")


def masked(text: str) -> str:
    """A text that is a URL with `***` for the user and password, the values of its query, and its fragment.

    Other texts are returned as they are. Unlike `without_credentials`, it shows that there is a secret.
    """
    found = _WHOLE_URL.fullmatch(text)
    if not found:
        return text
    start, rest = found.groups()
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    after = rest[len(authority) :]
    _, at, host = authority.rpartition("@")
    path, mark, query = after.partition("#")[0].partition("?")
    if "@" in path or ("@" in after and not _HOST.fullmatch(host)):
        return f"{start}{MASK}"  # perhaps a password with `/`, `?` or `#`: no valid URL, but a password
    query = _PARAMETER.sub(lambda one: f"{one[1] or ''}{MASK}", mark + query) if query else mark
    fragment = f"#{MASK}" if "#" in after else ""
    return f"{start}{MASK + at if at else ''}{host}{path}{query}{fragment}"


def is_masked(text: str) -> bool:
    """Whether a text is a URL with `***` where `masked` puts it."""
    plain = text.replace(MASK, "x")
    return MASK in text and (masked(plain) == text or text.endswith(f"://{MASK}"))


def _cut(found: re.Match[str]) -> str:
    start, rest = found.groups()
    url = rest.rstrip(_PUNCTUATION)
    end = rest[len(url) :]
    authority = re.split(r"[/?#]", url, maxsplit=1)[0]
    host = authority.rpartition("@")[2]
    if "@" in url[len(authority) :] and not _HOST.fullmatch(host):
        return f"{start}...{end}"  # a password with `/`, `?` or `#`: no valid URL, but a password
    path = re.split(r"[?#]", url[len(authority) :], maxsplit=1)[0]
    return f"{start}{host}{path}{end}"


def _escaped(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()


def _escaped_json(char: str) -> str:
    if char.isprintable():
        return char
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[n] << 8 | units[n + 1]:04x}" for n in range(0, len(units), 2))
