"""The directories, and the files that the configuration names: secrets and certificates."""

from __future__ import annotations

import contextlib
import difflib
import os
import pwd
import re
import ssl
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from bridge.access.accesskeys import CREATE as CREATE_KEYS
from bridge.access.accesskeys import read_access_keys
from bridge.access.tokens import CREATE as CREATE_TOKENS
from bridge.access.tokens import read_tokens
from bridge.access.users import CREATE as CREATE_USERS
from bridge.access.users import read_users
from bridge.auth.settings import mistakes_of
from bridge.config.checks.context import CheckContext, Finding, existing, read_only
from bridge.config.tomlfile import Keys as Place
from bridge.encryption import Keys
from bridge.errors import ConfigError, EncryptionKeyError
from bridge.firehose.settings import FirehoseTls
from bridge.mqtt.settings import TlsSettings
from bridge.net.crl import read_crls
from bridge.readable import foreign, is_directory, read_regular
from bridge.streams.layout import FULL, STREAMS
from bridge.streams.reader import stream_directories
from bridge.streams.store import is_held, running

EXPIRES_SOON = timedelta(days=30)
LIST_EXPIRES_SOON = timedelta(days=1)
_KEY: Place = ("encryption", "key_file")
SECRETS: list[Place] = [
    ("mqtt", "users_file"),
    ("mqtt", "tls", "key"),
    ("mqtt", "external", "password_file"),
    ("mqtt", "external", "key"),
    ("greengrass", "token_file"),
    ("greengrass", "tokens_file"),
    ("firehose", "access_keys_file"),
    ("firehose", "tls", "key"),
    ("aws", "credentials", "iot", "key"),
    _KEY,
]
_OF_LISTENERS = {  # what [[mqtt.listener]] names too
    ("mqtt", "users_file"),
    ("mqtt", "tls", "key"),
    ("mqtt", "tls", "cert"),
    ("mqtt", "tls", "client_ca"),
}
CREATE: dict[Place, str] = {  # what to do if the file is missing
    ("firehose", "access_keys_file"): CREATE_KEYS,
    ("greengrass", "tokens_file"): CREATE_TOKENS,
}
CERTIFICATES: list[Place] = [
    ("mqtt", "tls", "cert"),
    ("mqtt", "tls", "client_ca"),
    ("mqtt", "external", "ca"),
    ("mqtt", "external", "cert"),
    ("firehose", "tls", "cert"),
    ("aws", "credentials", "iot", "cert"),
    ("aws", "credentials", "iot", "ca"),
]


def directories(context: CheckContext) -> Iterator[Finding]:
    """Check that the directories exist or can be created, and are writable."""
    for key in ("data_dir", "memory_dir"):
        if not context.knows("gateway", key) or not context.knows("gateway", "data_dir"):
            continue
        wanted: Path = getattr(context.config.gateway, key)
        parent = existing(wanted)
        missing = wanted.absolute().relative_to(parent.absolute()).parts
        what = ""
        if missing and os.path.islink(broken := parent / missing[0]):  # noqa: PTH114 - never raises
            what = (
                f"{broken} is a link to {broken.readlink()}, which does not exist; create that directory, or "
                "remove the link"
            )
        elif not parent.is_dir():
            what = f"{parent} is not a directory; move it away, or choose another path"
        elif read_only(parent):
            parents = (parent.absolute(), *parent.absolute().parents)
            mount = next(path for path in parents if path.is_mount())
            what = (
                f"the file system at {mount} is read-only; check `dmesg` for disk errors, "
                f"`mount -o remount,rw {mount}`, or choose another path"
            )
        elif not os.access(parent, os.W_OK | os.X_OK):
            verb = "write to" if parent == wanted else "create a directory in"
            what = (
                f"user {os.geteuid()} may not {verb} {parent}; run this as the service's user, chown the "
                "directory, or choose another"
            )
        elif why := _cannot_create(parent, missing):
            what = f"no directory can be created in {parent}: {why}; choose another path"
        elif key == "memory_dir" and running(context.config.gateway.data_dir) is None and is_held(wanted):
            what = f"another service keeps its memory streams in {wanted}; choose another path"
        if what:
            yield context.error(("gateway", key), what)
        elif not missing and wanted.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            yield context.warning(
                ("gateway", key),
                f"users other than its owner can write to {wanted}, and so replace what is stored; "
                f"chmod go-w {wanted}",
            )


def _cannot_create(parent: Path, missing: Sequence[str]) -> str:
    """Return why subdirectories cannot be created, or an empty text if they can. Leaves nothing behind.

    Permissions do not tell everything: /proc accepts no directory, a quota or all inodes may be used up, a
    name may be too long.
    """
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".streambridge-check-") as created:
            Path(created, *missing).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL and not missing:  # the service starts there, and makes room
            return ""
        return error.strerror or str(error)
    return ""


def audit_log(context: CheckContext) -> Iterator[Finding]:
    """Check that the audit log can be written."""
    audit = context.config.audit
    if audit.file is not None and context.knows("audit", "file") and (why := _wrong_log(audit.file)):
        yield context.error(("audit", "file"), why)
    if audit.journald and context.knows("audit", "journald_socket"):
        try:
            is_socket = stat.S_ISSOCK(audit.journald_socket.stat().st_mode)
        except OSError:
            is_socket = False
        if not is_socket:
            what = f"{audit.journald_socket} is not a socket: journald does not run here; set `file` instead"
            yield context.error(("audit", "journald"), what)


def _wrong_log(path: Path) -> str:
    """Return why a file cannot be the audit log, or an empty text."""
    directory = path.absolute().parent
    if not is_directory(directory):
        return f"{directory} is not a directory; create it for the service's user, or choose another path"
    if not os.access(directory, os.W_OK | os.X_OK):
        return (
            f"user {os.geteuid()} may not write to {directory}, where files are rotated; run this as the "
            "service's user, chown the directory, or choose another"
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be opened: {error.strerror}; choose another path"
    if not stat.S_ISREG(mode):
        return f"{path} is not a regular file; choose another path"
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"users other than its owner can write to {path}; chmod go-w {path}"
    return ""


def auth_plugins(context: CheckContext) -> Iterator[Finding]:
    """Report what keeps plugins that decide logins from working."""
    for name, options in context.config.auth.plugins.items():
        for mistake in mistakes_of(options):
            found = re.match("`([a-z_]+)`", mistake)
            keys: Place = ("auth", "plugins", name, *([found[1]] if found else []))
            yield context.error(keys, mistake[len(found[0]) + 2 :] if found else mistake)


def closed_streams(context: CheckContext) -> Iterator[Finding]:
    """Report streams that this user may not open; the service runs without them."""
    data_dir = context.config.gateway.data_dir
    if not context.knows("gateway", "data_dir") or read_only(existing(data_dir)):  # reported for data_dir
        return
    if os.access(data_dir / STREAMS, os.R_OK | os.X_OK):
        for stream in stream_directories(data_dir):
            if not os.access(stream, os.R_OK | os.W_OK | os.X_OK):
                yield context.error(
                    ("gateway", "data_dir"),
                    f"user {os.geteuid()} may not read and write {stream}; run this as the service's "
                    "user, or `chown -R` it to that user",
                )


def secrets(context: CheckContext) -> Iterator[Finding]:
    """Check who may read the files with secrets, and who may write the configuration."""
    for path in context.document.files:
        if why := foreign(path, context.service):
            yield Finding("error", f"{path}: not obeyed: {why}")
    wrong = dict(_wrong_logins(context))
    for keys, path in _named(context, SECRETS):
        create = CREATE_USERS if keys[-1] == "users_file" else CREATE.get(keys, "")
        if keys == _KEY and keys in wrong:  # it knows whether a new key helps, or the old one is needed
            yield context.error(keys, wrong[keys])
        elif problem := context.unreadable(path, create.format(path=path)):
            yield context.error(keys, problem)
        elif keys in wrong:
            yield context.error(keys, wrong[keys])
        elif path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            yield context.warning(keys, f"every user of this machine can read {path}; chmod o= {path}")


def closed_files(context: CheckContext) -> Iterator[Finding]:
    """Report files that root can read, and the service's user cannot."""
    if os.geteuid() != 0 or not context.service:
        return
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    with contextlib.suppress(KeyError, OSError):  # no such user, or root cannot become that user here
        user = pwd.getpwuid(context.service)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        for keys, path in _named(context, [*SECRETS, *CERTIFICATES]):
            if not path.is_file() or (credentials and path.is_relative_to(credentials)):  # read by systemd
                continue
            test = ["test", "-r", str(path)]
            done = subprocess.run(test, user=user.pw_uid, group=user.pw_gid, extra_groups=groups, check=False)
            if done.returncode:
                yield context.warning(
                    keys,
                    f"{path} cannot be read by user {user.pw_name}, as whom the service runs; chown "
                    f"{user.pw_name} {path}, and chmod a+x its directories",
                )


def _wrong_logins(context: CheckContext) -> Iterator[tuple[Place, str]]:
    """What the service would not accept in the files of users, access keys, tokens and the key."""
    mqtt, signing = context.config.mqtt, context.config.firehose.access_keys_file
    files: list[tuple[Place, Path | None]] = [(("mqtt", "users_file"), mqtt.users_file)]
    for number, listener in enumerate(mqtt.listener):
        files.append((("mqtt", "listener", number, "users_file"), listener.users_file))
    for keys, users in files:
        try:
            if users is not None:
                read_users(users)
        except ConfigError as error:
            yield keys, str(error).removeprefix("mqtt.users_file ")
    try:
        if signing is not None:
            read_access_keys("firehose.access_keys_file", signing)
    except ConfigError as error:
        yield ("firehose", "access_keys_file"), str(error).removeprefix("firehose.access_keys_file ")
    try:
        if context.config.encryption.key_file is not None and context.knows("gateway", "data_dir"):
            Keys(context.config.gateway.data_dir, context.config.encryption.key_file).check()
    except EncryptionKeyError as error:
        yield _KEY, str(error)
    try:
        if (tokens := context.config.greengrass.tokens_file) is not None:
            read_tokens("greengrass.tokens_file", tokens)
    except ConfigError as error:
        yield ("greengrass", "tokens_file"), str(error).removeprefix("greengrass.tokens_file ")


def rules(context: CheckContext) -> Iterator[Finding]:
    """Report rules and roles for unknown users: most likely the name is misspelt."""
    mqtt = context.config.mqtt
    if not all(context.knows("mqtt", key) for key in ("users_file", "acl", "user", "tls", "allow_anonymous")):
        return
    if context.config.auth.plugins or not context.knows("auth"):
        return  # they may know any name
    if any(one.tls is not None and one.tls.client_ca is not None for one in mqtt.listeners()):
        return  # a certificate may have any name
    try:
        files = dict.fromkeys(one.users_file for one in mqtt.listeners() if one.users_file is not None)
        users = {name for path in files for name in read_users(path)}
        signing = _users_of_keys(context)
    except ConfigError:
        return  # reported by `secrets`
    greengrass = context.config.greengrass
    known = {"*", "", greengrass.user, *greengrass.users.values(), *signing}
    known |= {one.user for one in context.config.upstream if one.user is not None}
    named: list[tuple[Place, str]] = [
        (("mqtt", "acl", number, "user"), rule.user) for number, rule in enumerate(mqtt.acl)
    ]
    named += [(("mqtt", "user", number, "name"), account.name) for number, account in enumerate(mqtt.user)]
    for number, listener in enumerate(mqtt.listener):
        place: Place = ("mqtt", "listener", number)
        named += [((*place, "acl", n, "user"), rule.user) for n, rule in enumerate(listener.acl or ())]
        named += [((*place, "user", n, "name"), one.name) for n, one in enumerate(listener.user or ())]
    for keys, user in named:
        if user not in known | users:
            near = difflib.get_close_matches(user, users, n=1)
            where = f"it is not in {' or '.join(map(str, files))}" if files else "there is no users_file"
            hint = f"did you mean {near[0]!r}?" if near else "add the user, or remove this table"
            yield context.warning(keys, f"nobody can log in as {user!r}: {where}; {hint}")


def _users_of_keys(context: CheckContext) -> set[str]:
    """The users of the Firehose API's keys and of port 8088's tokens; raises ConfigError."""
    keys, tokens = context.config.firehose.access_keys_file, context.config.greengrass.tokens_file
    found: set[str] = set()
    if keys is not None:
        found |= {key.user for key in read_access_keys("firehose.access_keys_file", keys).values()}
    if tokens is not None:
        found |= set(read_tokens("greengrass.tokens_file", tokens).values())
    return found


def certificates(context: CheckContext) -> Iterator[Finding]:
    """Check that certificates can be read, and are valid now and for a while."""
    now = datetime.now(UTC)
    for keys, path in _named(context, CERTIFICATES):
        if problem := context.unreadable(path):
            yield context.error(keys, problem)
            continue
        try:
            begins, ends = validity(path)
        except ValueError as error:
            yield context.error(keys, str(error))
            continue
        if not begins <= now <= ends:
            span = f"{begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
            yield context.error(keys, f"{path} is only valid from {span}; renew it, or set the clock")
        elif ends - now < EXPIRES_SOON:
            yield context.warning(keys, f"{path} expires on {ends:%Y-%m-%d}; renew it and reload")
    pairs: list[tuple[Place, TlsSettings | FirehoseTls | None]] = [
        (("mqtt",), context.config.mqtt.tls),
        (("firehose",), context.config.firehose.tls),
    ]
    for number, listener in enumerate(context.config.mqtt.listener):
        pairs.append((("mqtt", "listener", number), listener.tls))
    for place, tls in pairs:
        crl_file = getattr(tls, "crl_file", None)
        if crl_file is not None:
            client_ca = getattr(tls, "client_ca", None)
            yield from _revocation_lists(context, (*place, "tls", "crl_file"), crl_file, client_ca, now)
        if tls is None or context.unreadable(tls.cert) or context.unreadable(tls.key):
            continue
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key)
        except ssl.SSLError as error:
            reason = (error.reason or "not a key").lower().replace("_", " ")
            yield context.error((*place, "tls", "key"), f"{tls.key} does not match {tls.cert}: {reason}")


def _revocation_lists(
    context: CheckContext, keys: Place, path: Path, client_ca: Path | None, now: datetime
) -> Iterator[Finding]:
    try:
        crls = read_crls("crl_file", path)
    except ConfigError as error:
        yield context.error(keys, str(error).removeprefix("crl_file "))
        return
    expires = crls.expires
    authorities = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with contextlib.suppress(OSError):  # reported at client_ca
        authorities.load_verify_locations(client_ca)
    if missing := len(crls.without_list(authorities.get_ca_certs(binary_form=True))):
        yield context.error(
            keys,
            f"{path} has no list of {missing} of the CAs in {client_ca}, so their certificates are refused; "
            "add the lists, or remove the CAs",
        )
    if expires is not None and expires <= now:
        what = f"{path} expired on {expires:%Y-%m-%d %H:%M} UTC, so every client certificate is refused"
        yield context.error(keys, f"{what}; get a new list from the CA")
    elif expires is not None and expires - now < LIST_EXPIRES_SOON:
        yield context.warning(keys, f"{path} expires on {expires:%Y-%m-%d %H:%M} UTC; replace it")


def _named(context: CheckContext, places: list[Place]) -> Iterator[tuple[Place, Path]]:
    """The keys at which the configuration names a file, and the files."""
    for keys in places:
        value: object = context.config
        for key in keys:
            value = getattr(value, str(key), None)
        if isinstance(value, Path):
            yield keys, value
    for number, listener in enumerate(context.config.mqtt.listener):
        for keys in places:
            if keys in _OF_LISTENERS:
                value = listener
                for key in keys[1:]:
                    value = getattr(value, str(key), None)
                if isinstance(value, Path):
                    yield ("mqtt", "listener", number, *keys[1:]), value
    for number, one in enumerate(context.config.upstream):
        for keys in places:
            path = getattr(one, str(keys[-1]), None) if keys[:2] == ("mqtt", "external") else None
            if path is not None:  # an upstream names the same files
                yield ("upstream", number, keys[-1]), path


def validity(path: Path) -> tuple[datetime, datetime]:
    """Return the validity period of the first certificate in a PEM file; raises ValueError.

    The two times follow each other in a certificate (RFC 5280, 4.1), so a regular expression finds them.
    """
    text = read_regular(path)[0].decode(errors="replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if begin < 0 or end < 0:
        raise ValueError(f"{path} contains no PEM certificate (-----BEGIN CERTIFICATE-----)")
    moment = rb"(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)"
    found = re.search(moment + moment, ssl.PEM_cert_to_DER_cert(text[begin : end + len(ssl.PEM_FOOTER)]))
    if found is None:
        raise ValueError(f"{path} contains no certificate that can be read")
    first, second = (group.decode() for group in found.groups() if group)
    return _moment(first), _moment(second)


def _moment(text: str) -> datetime:
    if len(text) == 12:  # UTCTime: the year has two digits, 1950 to 2049
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)
