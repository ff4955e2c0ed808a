"""Directories and the files that the configuration names: secrets and certificates."""

from __future__ import annotations

import difflib
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bridge.access.users import read_users
from bridge.config.checks.look import Finding, Look, existing, read_only, unreadable
from bridge.config.tomlfile import Keys
from bridge.errors import ConfigError
from bridge.streams.layout import STREAMS
from bridge.streams.reader import stream_directories

EXPIRES_SOON = timedelta(days=30)
SECRETS: list[Keys] = [
    ("mqtt", "users_file"),
    ("mqtt", "tls", "key"),
    ("mqtt", "external", "password_file"),
    ("mqtt", "external", "key"),
    ("greengrass", "token_file"),
    ("aws", "credentials", "iot", "key"),
]
CERTIFICATES: list[Keys] = [
    ("mqtt", "tls", "cert"),
    ("mqtt", "tls", "client_ca"),
    ("mqtt", "external", "ca"),
    ("mqtt", "external", "cert"),
    ("aws", "credentials", "iot", "cert"),
    ("aws", "credentials", "iot", "ca"),
]


def directories(look: Look) -> Iterator[Finding]:
    """Whether the directories are there, or can be made, and can be written."""
    for key in ("data_dir", "memory_dir"):
        if not look.knows("gateway", key) or not look.knows("gateway", "data_dir"):
            continue
        wanted: Path = getattr(look.config.gateway, key)
        there = existing(wanted)
        missing = wanted.absolute().relative_to(there.absolute()).parts
        if missing and os.path.islink(broken := there / missing[0]):  # noqa: PTH114 - never raises
            yield look.error(
                ("gateway", key),
                f"{broken} is a link to {broken.readlink()}, which is not there; make that directory, or "
                "remove the link",
            )
        elif not there.is_dir():
            yield look.error(
                ("gateway", key), f"{there} is not a directory; move it away, or choose another place"
            )
        elif read_only(there):
            mount = next(place for place in (there.absolute(), *there.absolute().parents) if place.is_mount())
            yield look.error(
                ("gateway", key),
                f"the file system at {mount} is read-only; look in `dmesg` whether the disk fails, "
                f"`mount -o remount,rw {mount}`, or choose another place",
            )
        elif not os.access(there, os.W_OK | os.X_OK):
            verb = "write to" if there == wanted else "make a directory in"
            yield look.error(
                ("gateway", key),
                f"user {os.geteuid()} may not {verb} {there}; run this as the service's user, chown the "
                "directory, or choose another",
            )
        elif why := _cannot_make(there, missing):
            yield look.error(
                ("gateway", key), f"no directory can be made in {there}: {why}; choose another place"
            )


def _cannot_make(there: Path, missing: Sequence[str]) -> str:
    """Why directories of these names cannot be made in another; empty if they can. Leaves nothing behind.

    Rights do not say all: /proc takes none, a quota or the room for inodes may be used up, a name too long.
    """
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".streambridge-check-") as trial:
            Path(trial, *missing).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def closed_streams(look: Look) -> Iterator[Finding]:
    """Streams that the user may not open; the service runs without them."""
    data_dir = look.config.gateway.data_dir
    if not look.knows("gateway", "data_dir") or read_only(existing(data_dir)):  # told of the whole directory
        return
    if os.access(data_dir / STREAMS, os.R_OK | os.X_OK):
        for stream in stream_directories(data_dir):
            if not os.access(stream, os.R_OK | os.W_OK | os.X_OK):
                yield look.error(
                    ("gateway", "data_dir"),
                    f"user {os.geteuid()} may not read and write {stream}; run this as the service's "
                    "user, or `chown -R` it to that user",
                )


def secrets(look: Look) -> Iterator[Finding]:
    """Whether files with secrets can be read by us and by nobody else, and the configuration is ours."""
    for path in look.document.files:
        if path.stat().st_mode & stat.S_IWOTH:
            yield Finding("warning", f"{path}: every user of this machine can change it; chmod o-w {path}")
    for keys, path in _named(look, SECRETS):
        problem = unreadable(path)
        if problem:
            yield look.error(keys, problem)
        elif path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            yield look.warning(keys, f"every user of this machine can read {path}; chmod o= {path}")
    users = look.config.mqtt.users_file
    if users is not None and not unreadable(users):
        try:
            read_users(users)
        except ConfigError as error:
            yield look.error(("mqtt", "users_file"), str(error))


def rules(look: Look) -> Iterator[Finding]:
    """Rules for users that nobody can log in as: most likely a misspelt name."""
    mqtt = look.config.mqtt
    if not all(look.knows("mqtt", key) for key in ("users_file", "acl", "tls", "allow_anonymous")):
        return
    if mqtt.tls is not None and mqtt.tls.client_ca is not None:  # any name may be in a certificate
        return
    try:
        users = {} if mqtt.users_file is None else read_users(mqtt.users_file)
    except ConfigError:
        return  # reported with the secrets
    for number, rule in enumerate(mqtt.acl):
        if rule.user not in ("*", "", look.config.greengrass.user, *users):
            near = difflib.get_close_matches(rule.user, users, n=1)
            where = "there is no users_file" if mqtt.users_file is None else f"it is not in {mqtt.users_file}"
            hint = f"did you mean {near[0]!r}?" if near else "add the user, or remove the rule"
            yield look.warning(
                ("mqtt", "acl", number, "user"), f"nobody can log in as {rule.user!r}: {where}; {hint}"
            )


def certificates(look: Look) -> Iterator[Finding]:
    """Whether certificates can be read and are valid, now and for a while."""
    now = datetime.now(UTC)
    for keys, path in _named(look, CERTIFICATES):
        problem = unreadable(path)
        if problem:
            yield look.error(keys, problem)
            continue
        try:
            begins, ends = validity(path)
        except ValueError as error:
            yield look.error(keys, str(error))
            continue
        if not begins <= now <= ends:
            span = f"{begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
            yield look.error(keys, f"{path} is valid from {span} only; renew it, or set the clock")
        elif ends - now < EXPIRES_SOON:
            yield look.warning(keys, f"{path} expires on {ends:%Y-%m-%d}; renew it and reload")
    tls = look.config.mqtt.tls
    if tls is not None and not unreadable(tls.cert) and not unreadable(tls.key):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key)
        except ssl.SSLError as error:
            reason = (error.reason or "not a key").lower().replace("_", " ")
            yield look.error(("mqtt", "tls", "key"), f"{tls.key} does not go with {tls.cert}: {reason}")


def _named(look: Look, places: list[Keys]) -> Iterator[tuple[Keys, Path]]:
    """Those of the places where the configuration names a file."""
    for keys in places:
        value: object = look.config
        for key in keys:
            value = getattr(value, str(key), None)
        if isinstance(value, Path):
            yield keys, value


def validity(path: Path) -> tuple[datetime, datetime]:
    """From when to when the first certificate of a PEM file is valid; raises ValueError.

    The two times follow each other in a certificate (RFC 5280, 4.1), so that a pattern finds them
    without a parser.
    """
    text = path.read_text(errors="replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if begin < 0 or end < 0:
        raise ValueError(f"{path} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)")
    moment = rb"(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)"
    found = re.search(moment + moment, ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)]))
    if found is None:
        raise ValueError(f"{path} holds no certificate that can be read")
    first, second = (group.decode() for group in found.groups() if group)
    return _moment(first), _moment(second)


def _moment(text: str) -> datetime:
    if len(text) == 12:  # UTCTime: two digits of the year, 1950 to 2049
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
