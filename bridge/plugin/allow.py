"""The table [export.allow] of the configuration: what the definitions of clients may reach."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from msgspec import Struct, field

from bridge.net.addresses import normal

# The export kinds of AWS IoT Greengrass Stream Manager's SDK (class ExportDefinition).
SDK_KINDS = ("http", "iotAnalytics", "kinesis", "IotSitewise", "s3TaskExecutor")
KINDS = (*SDK_KINDS, "consumer", "s3Delivery")  # the kinds that clients may define by default
_PORTS = {"http": 80, "https": 443, "mqtt": 1883, "mqtts": 8883}
_URL = re.compile(
    r"(?:http|mqtt)s?://[A-Za-z0-9.\-_\[\]:]+(/[!-\[\]-~]*)?"
)  # no user info, blanks or backslashes


class Allow(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """[export.allow]: what exports that clients define, and upload tasks, may reach.

    kinds           kinds of exporters
    endpoints       destinations other than AWS: https://host, with another port https://host:8443, or a
                    bare host for https; `*.example.com` allows all hosts below it. The list applies to
                    `endpoint_url` of exporters of all kinds; for kind mqtt, it has mqtts://host, which is
                    port 8883
    buckets         S3 buckets, also of upload tasks; `*` stands for any characters
    directories     upload tasks may name files in and below these directories

    Exports in this file, and those that the command line defines, are not restricted. Upload tasks always
    are: they are messages. A client's definition can never name a file with a secret or a certificate.
    """

    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    endpoints: list[str] = []
    buckets: list[str] = field(default_factory=lambda: ["*"])
    directories: list[Path] = []

    def __post_init__(self) -> None:
        mistakes = [
            f"`endpoints`: {entry!r} is not like https://host, https://host:8443 or host"
            for entry in self.endpoints
            if _origin(entry, wildcard=True) is None
        ]
        mistakes += [
            f"`directories`: {str(entry)!r} is not an absolute path"
            for entry in self.directories
            if not entry.is_absolute()
        ]
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def endpoint(self, url: str) -> bool:
        """Return whether data may be sent to a URL."""
        wanted = _origin(url) if _URL.fullmatch(url) else None
        return wanted is not None and any(
            allowed is not None
            and (allowed[0], allowed[2]) == (wanted[0], wanted[2])
            and (
                wanted[1].endswith(allowed[1][1:]) if allowed[1].startswith("*.") else wanted[1] == allowed[1]
            )
            for allowed in (_origin(entry, wildcard=True) for entry in self.endpoints)
        )

    def bucket(self, name: str) -> bool:
        """Return whether objects may be written to a bucket."""
        return any(
            re.fullmatch(re.escape(entry).replace(r"\*", ".*"), name, re.DOTALL) for entry in self.buckets
        )

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file of an upload task; raises OSError, and ValueError if it is not allowed.

        The file that was actually opened is checked, so that neither a link nor a change after a check leads
        elsewhere. A FIFO could block without limit, a device has no end, and opening one may have effects.
        """
        where = f"{path} is in none of the directories of [export.allow]"
        if ".." in path.parts or not any(path.is_relative_to(directory) for directory in self.directories):
            raise ValueError(f"{where}; add its directory there")
        if stat.S_ISREG(path.stat().st_mode):
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
            real = Path(f"/proc/self/fd/{file.fileno()}").readlink()
            if not any(real.is_relative_to(directory.resolve()) for directory in self.directories):
                file.close()
                raise ValueError(f"{where}: it is a link to elsewhere")
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file
            file.close()  # the path was replaced in the meantime
        raise ValueError(f"{path} is not a regular file")


def _origin(url: str, *, wildcard: bool = False) -> tuple[str, str, int] | None:
    """Return scheme, host and port of a URL; None if one of them is ambiguous."""
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    pattern = r"(\*\.)?[a-z0-9._:-]+" if wildcard else r"[a-z0-9._:-]+"
    if parts.scheme not in _PORTS or parts.username is not None or not re.fullmatch(pattern, host):
        return None
    return parts.scheme, normal(host), port or _PORTS[parts.scheme]
