"""Removes secrets from a configuration and from texts, for an archive that leaves the machine.

Only values that are known to be harmless are kept: numbers, sizes, durations, names of streams and topics,
choices, hosts with their ports, and paths that exist or whose directory exists. Every other string is
removed, because a token may be where nobody expects it: in a URL, a header, a template or a user name.

From texts such as log lines it removes the strings that were removed from the configuration, the content of
secret files, the values of environment variables, and anything that looks like a password, token, key or URL
parameter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bridge.config.tomlstruct import VARIABLE, snake
from bridge.encryption import OWN_CREDENTIALS

REMOVED = "<removed>"
SHORTEST = 6  # characters of a secret that is searched for in texts; shorter ones may be ordinary words
CONFIG = "STREAMBRIDGE_CONFIG"  # names a file, so its value is not secret
MOST = 1024 * 1024  # bytes that are read of a secret file

# The values of these keys are names and choices. `user` is the one in a rule.
_HARMLESS = {
    "id", "data_dir", "memory_dir", "plugin_dirs", "mode", "protocol", "level", "format", "client_ids",
    "strategy_on_full", "persistence", "retention", "discard", "share_group", "identifier", "topics", "topic",
    "dead_letter_stream", "status_stream_name", "refused_stream", "stream", "publish", "subscribe", "read",
    "manage", "user", "region", "bucket", "prefix", "kinesis_stream_name", "delivery_stream_name",
    "compression", "export_format", "status_level", "value_type", "time_unit", "start_time", "name",
    "filter", "roles", "operations", "page", "proxy_protocol",
}  # fmt: skip
_SECRET = re.compile(r"passw|secret|token|credential|api_?key|auth|cookie|signature", re.IGNORECASE)
_FREE = {"tags", "headers", "rename"}  # tables whose values people choose
_CHOICES = {"payload", "json", "cbor", "ndjson", "parquet", "none", "gzip"}
_QUANTITY = re.compile(r"\d+(\.\d+)? ?[A-Za-z]{1,3}")
_HOST = re.compile(r"[\w-]+(\.[\w-]+)+")
_ADDRESS = re.compile(r"[\w.:\[\]-]*:\d+")
_ROOT = Path("/")
_FILE_SETTING = re.compile(r"(?<![\w-])(\w*_file|key)[ \t]*=[ \t]*(\"[^\"\n]*\"|'[^'\n]*')")
# A word that names a secret, and a quote behind it; not a file, and not the table of a configuration.
_TELLING = (
    r"(?<![\w.-])(?=[\w.-]*(?:passw|passphrase|secret|token|credential|api[_-]?key|access[_-]?key"
    r"|authorization|cookie|signature|(?<![a-z])(?:pass|pwd)(?![a-z])))"
    r"(?![\w.-]*(?:_file\b|credentials\.iot\b))[\w.-]++[\"']?"
)
# A client chooses texts in the log, such as its user name. So each pattern looks at a word only from its
# beginning, and its repetitions are possessive: the time grows with the length of a text, not with its power.
_TEXTS = (
    (re.compile(r"-----BEGIN [^-]+-----.*?(-----END [^-]+-----|\Z)", re.DOTALL), REMOVED),
    # Up to the last `@`, because a password may have a `/`; bounded, or many URLs in a row take a long time.
    (re.compile(r"((?<!\w)\w+://)[^\s'\"]{1,1000}@"), rf"\1{REMOVED}@"),
    (re.compile(r"((?<!\w)\w+://[^\s'\"/?#]+)[/?#][^\s'\"]*"), rf"\1/{REMOVED}"),
    (re.compile(r"([?&][\w.-]+=)[^&\s'\"]+"), rf"\1{REMOVED}"),
    (re.compile(r"\b(Bearer|Basic|Digest|AWS4-HMAC-SHA256)\s+\S+", re.IGNORECASE), rf"\1 {REMOVED}"),
    (re.compile(r"(?<![\w-])(?=[\w-]*\beyJ)[\w-]++\.[\w-]++\.[\w-]*+"), REMOVED),
    (re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}"), REMOVED),
    (re.compile(r"\$7\$\d+\$[A-Za-z0-9+/=]+\$[A-Za-z0-9+/=]+"), REMOVED),
    (
        re.compile(
            rf"({_TELLING}\s*+(?:=|:\s*+(?=[\"']))\s*+)"
            r"(\"(?:[^\"\\]|\\.)*+\"|'(?:[^'\\]|\\.)*+'|[^\s\"]++)",
            re.IGNORECASE,
        ),
        rf"\1{REMOVED}",
    ),
    # `password: a few words`: to the end of the line, because nothing else says where the words end.
    (
        re.compile(rf"({_TELLING}[^\S\n]*+:[^\S\n]*+)(?!{REMOVED})[^\n\"]++", re.IGNORECASE),
        rf"\1{REMOVED}",
    ),
)  # fmt: skip


class Scrubber:
    """The known secrets of this machine."""

    def __init__(self, base: Path) -> None:
        """`base` is the directory of the configuration, to which its paths are relative."""
        self._base = base
        self._secrets: set[str] = set()
        for name, value in os.environ.items():
            if name != CONFIG and (name.startswith("STREAMBRIDGE_") or _SECRET.search(name)):
                self.learn(value)

    def learn(self, text: str) -> None:
        """Remove this text wherever it occurs."""
        for line in text.splitlines():
            if len(line.strip()) >= SHORTEST:
                self._secrets.add(line.strip())

    def learn_file(self, path: Path) -> None:
        """Remove the lines and words of a file, and what follows `:` or `=` in it, wherever they occur."""
        try:
            with path.open("rb") as file:
                text = file.read(MOST).decode(errors="replace")
        except OSError:
            return
        for line in text.splitlines():
            if line.startswith(f"{CONFIG}="):
                continue
            self.learn(line)
            if line.startswith("#"):
                continue
            self.learn("\n".join(line.split()))
            self.learn(line.rpartition(":")[2])
            self.learn(line.partition("=")[2].strip("\"'"))

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, REMOVED)
        for pattern, replacement in _TEXTS:
            text = pattern.sub(replacement, text)
        return text

    def tree(self, value: Any) -> Any:
        """Return a document without secrets in its strings; its keys stay."""
        if isinstance(value, Mapping):
            return {key: self.tree(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(inner) for inner in value]
        return self.text(value) if isinstance(value, str) else value

    def settings(self, value: Any, key: str = "", above: str = "") -> Any:
        """Return a part of a configuration or definition without secrets. `above` is the key of its table."""
        name = snake(key)
        if isinstance(value, Mapping):
            return {one: self.settings(inner, str(one), name) for one, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.settings(inner, key, above) for inner in value]
        if isinstance(value, bool) or value is None:
            return value
        if _SECRET.search(name) or above in _FREE:
            return self._path(value) if name.endswith("_file") else self._removed(str(value))
        if not isinstance(value, str):
            return value
        if name in _HARMLESS or value in _CHOICES or _QUANTITY.fullmatch(value) or not value:
            return value
        if "://" in value:
            return self._url(value)
        if _ADDRESS.fullmatch(value) or (name == "endpoint" and _HOST.fullmatch(value)):
            return value
        return self._path(value)

    def _url(self, value: str) -> str:
        """Return scheme, host and port of a URL. Only its other parts are removed from texts."""
        scheme, _, rest = value.partition("://")
        before, _, behind = rest.rpartition("@")
        if set(before) & set("/?#"):  # a password with such a character; `urlsplit` takes it for the path
            self.learn("\n".join((before, *re.split("[/?#:&=@]", before))))
            value = f"{scheme}://{behind}"
        try:
            parts = urlsplit(value)
            port = f":{parts.port}" if parts.port is not None else ""
        except ValueError:
            return self._removed(value)
        for part in (parts.username, parts.password, parts.query, parts.fragment, *parts.path.split("/")):
            self.learn(part or "")
        rest = f"/{REMOVED}" if parts.path.strip("/") or parts.query or parts.fragment else ""
        return f"{parts.scheme}://{parts.hostname or ''}{port}{rest}"

    def _path(self, value: object) -> str:
        """Keep a path if it or its directory exists; any other string may be a token."""
        text = str(value)
        try:
            if "/" in text or "." in text:
                path = self._base / Path(text).expanduser()
                if path.exists() or ("/" in text and path.parent != _ROOT and path.parent.is_dir()):
                    return text
        except (OSError, ValueError, RuntimeError):
            pass
        return self._removed(text)

    def _removed(self, text: str) -> str:
        self.learn(text)
        return REMOVED


def secret_files(document: Mapping[str, Any], base: Path) -> Iterable[Path]:
    """Yield the files that a configuration names at keys that end in `_file` or `key`."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from secret_files(value, base)
        elif isinstance(value, list):
            for one in value:
                if isinstance(one, Mapping):
                    yield from secret_files(one, base)
        elif isinstance(value, str) and (snake(key).endswith("_file") or key == "key"):
            try:
                if (path := base / Path(_expanded(value)).expanduser()).is_file():
                    yield path
            except (OSError, ValueError, RuntimeError):
                continue


def secret_files_in(text: str, base: Path) -> Iterable[Path]:
    """Yield the same files of the text of a configuration that need not be valid TOML."""
    for key, value in _FILE_SETTING.findall(text):
        yield from secret_files({key: value[1:-1]}, base)


def _expanded(text: str) -> str:
    """Replace the variables of a path; outside the unit, that of the credentials has its usual value."""

    def value(found: re.Match[str]) -> str:
        usual = OWN_CREDENTIALS if found[1] == "CREDENTIALS_DIRECTORY" else found[0]
        return os.environ.get(found[1], usual)

    return VARIABLE.sub(value, text)
