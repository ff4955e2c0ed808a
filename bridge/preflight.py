"""What `streambridge check` looks at beyond the text of the configuration.

`examine` reads the configuration and looks at this machine: ports, directories, disk room, plugins,
certificates, secrets, credentials. An *error* keeps the service, or a part of it, from working; a
*warning* will sooner or later. Nothing is changed, and no other machine is asked for anything but
credentials (the instance's metadata service, if AWS is told to ask there).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from msgspec import Struct

from bridge import config, plugins, tomlfile
from bridge.config import Config
from bridge.errors import ConfigError, InvalidRequest
from bridge.model import MessageStreamDefinition, Persistence
from bridge.mqtt.access import read_users
from bridge.mqtt.settings import parse_address
from bridge.streams.reader import StreamReader, list_streams
from bridge.streams.store import is_running
from bridge.tomlfile import Document, Keys
from bridge.tomlstruct import dotted
from bridge.topics import is_topic_filter
from bridge.units import format_size

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


class Finding(Struct, frozen=True):
    """One thing that is wrong, with place and remedy."""

    level: Literal["error", "warning"]
    what: str


def examine(path: Path) -> tuple[Config | None, list[Finding]]:
    """Examine a configuration and the machine that it is for."""
    try:
        document = tomlfile.read(path)
        settings = config.load_document(document)
    except ConfigError as error:
        return None, [Finding("error", line) for line in str(error).splitlines()]
    examiner = _Examiner(settings, document)
    return settings, [*examiner.findings()]


class _Examiner:
    def __init__(self, settings: Config, document: Document) -> None:
        self.config = settings
        self.document = document

    def findings(self) -> Iterator[Finding]:
        """All that is wrong; errors of one area do not hide those of another."""
        yield from self.listeners()
        yield from self.directories()
        yield from self.room()
        yield from self.streams()
        yield from self.secrets()
        yield from self.certificates()
        if any(stream.export_definition for stream in self.config.streams.values()):
            yield from self.credentials()

    def error(self, keys: Keys, what: str) -> Finding:
        return Finding("error", f"{self.document.place(keys)}: {dotted(keys)}: {what}")

    def warning(self, keys: Keys, what: str) -> Finding:
        return Finding("warning", f"{self.document.place(keys)}: {dotted(keys)}: {what}")

    # -- network -------------------------------------------------------------------------------------
    def listeners(self) -> Iterator[Finding]:
        """Whether every address can be listened at; a running service of ours holds them rightly."""
        if is_running(self.config.gateway.data_dir):
            return
        wanted: list[tuple[Keys, str, int]] = []
        http, greengrass = self.config.http.listen, self.config.greengrass.listen
        if self.config.mqtt.mode == "embedded":
            addresses = map(parse_address, self.config.mqtt.listen)
            wanted += [(("mqtt", "listen"), address.host, address.port) for address in addresses]
        for section, listen in (("greengrass", greengrass), ("http", http)):
            host, _, port = listen.rpartition(":")
            if listen and not (host and port.isdecimal()):
                yield self.error((section, "listen"), f"{listen!r} is not like 127.0.0.1:8088")
            elif listen:
                wanted.append(((section, "listen"), host.strip("[]"), int(port)))
        held: list[socket.socket] = []
        try:
            for keys, host, number in wanted:
                try:
                    held.append(socket.create_server((host, number), family=_family(host)))
                except OSError as error:
                    why = _why_not_listen(error, number)
                    yield self.error(keys, f"cannot listen at {host}:{number}: {why}")
        finally:
            for listener in held:
                listener.close()

    # -- disk ----------------------------------------------------------------------------------------
    def directories(self) -> Iterator[Finding]:
        """Whether the directories are there, or can be made, and can be written."""
        for key in ("data_dir", "memory_dir"):
            wanted: Path = getattr(self.config.gateway, key)
            there = _existing(wanted)
            if not there.is_dir():
                yield self.error(("gateway", key), f"{there} is not a directory; move it away")
            elif not os.access(there, os.W_OK | os.X_OK):
                verb = "write to" if there == wanted else "make a directory in"
                yield self.error(
                    ("gateway", key),
                    f"user {os.geteuid()} may not {verb} {there}; chown it, or choose another",
                )

    def room(self) -> Iterator[Finding]:
        """Whether what the streams may grow to fits where they are."""
        gateway = self.config.gateway
        existing = {meta.name: meta for meta in list_streams(gateway.data_dir)}
        for key, persistence in (("data_dir", Persistence.File), ("memory_dir", Persistence.Memory)):
            streams = [stream for stream in self.config.streams.values() if stream.persistence is persistence]
            used = 0
            for stream in streams:
                if persistence is Persistence.File and stream.name in existing:
                    with closing(StreamReader(existing[stream.name].directory)) as reader:
                        used += reader.total_bytes()
            needed = sum(stream.max_size for stream in streams)
            there = _existing(getattr(gateway, key))
            room = shutil.disk_usage(there).free + used
            if needed > room:
                yield self.warning(
                    ("gateway", key),
                    f"the streams may grow to {format_size(needed)}, but {there} has room for "
                    f"{format_size(room)}; lower their max_size or make room",
                )

    # -- streams and plugins ---------------------------------------------------------------------------
    def streams(self) -> Iterator[Finding]:
        """Whether every stream can be bound and exported."""
        registry = plugins.load(self.config.export.plugin_dirs)
        for plugin in registry.found:
            if plugin.error is not None:
                yield self.warning(
                    ("export", "plugin_dirs"),
                    f"plugin {plugin.name} ({plugin.origin}) is not loaded: {plugin.error}",
                )
        for stream in self.config.streams.values():
            keys: Keys = ("streams", stream.name)
            for topic in stream.topics:
                if not is_topic_filter(topic) or topic.startswith(("$", "streambridge/")):
                    yield self.error(
                        (*keys, "topics"),
                        f"{topic!r} cannot be bound: `#` may only be the last level, and neither `$` nor "
                        "`streambridge/` may begin it",
                    )
            yield from self.exports(stream, registry)

    def exports(self, stream: MessageStreamDefinition, registry: plugins.Registry) -> Iterator[Finding]:
        """Whether each export's configuration satisfies its plugin."""
        owners: set[str] = set()
        for kind, items in stream.export_definition.items():
            for number, raw in enumerate(items):
                keys: Keys = ("streams", stream.name, "export", kind, number)
                try:
                    export = registry.config(kind, raw, "export")
                except InvalidRequest as error:
                    yield self._export_error(keys, str(error))
                    continue
                if export.identifier in owners:
                    yield self.error(
                        (*keys, "identifier"),
                        f"{export.identifier!r} is another export's too; choose another",
                    )
                owners.add(export.identifier)
                letters = export.dead_letter_stream
                if letters is not None and letters not in self.config.streams:
                    yield self.warning(
                        (*keys, "dead_letter_stream"), f"there is no [streams.{dotted((letters,))}]; add it"
                    )

    def _export_error(self, keys: Keys, message: str) -> Finding:
        """Say it in the words of the file: snake_case keys, and the line of the key that is wrong."""
        where, _, what = message.removeprefix("export").partition(": ")
        what = re.sub(r"`(\w+)`", lambda found: f"`{_snake(found[1])}`", what)
        inner = [_snake(part) for part in where.split(".") if part]
        return self.error((*keys, *(inner or re.findall(r"field `(\w+)`", what)[:1])), what)

    # -- files ---------------------------------------------------------------------------------------
    def secrets(self) -> Iterator[Finding]:
        """Whether files with secrets can be read by us and by nobody else, and the configuration is ours."""
        for path in self.document.files:
            if path.stat().st_mode & stat.S_IWOTH:
                yield Finding(
                    "warning", f"{path}: every user of this machine can change it; chmod o-w {path}"
                )
        for keys, path in self._files(SECRETS):
            problem = _unreadable(path)
            if problem:
                yield self.error(keys, problem)
            elif path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
                yield self.warning(keys, f"every user of this machine can read {path}; chmod o= {path}")
        users = self.config.mqtt.users_file
        if users is not None and not _unreadable(users):
            try:
                read_users(users)
            except ConfigError as error:
                yield self.error(("mqtt", "users_file"), str(error))

    def certificates(self) -> Iterator[Finding]:
        """Whether certificates can be read and are valid, now and for a while."""
        now = datetime.now(UTC)
        for keys, path in self._files(CERTIFICATES):
            problem = _unreadable(path)
            if problem:
                yield self.error(keys, problem)
                continue
            try:
                begins, ends = validity(path)
            except ValueError as error:
                yield self.error(keys, str(error))
                continue
            if not begins <= now <= ends:
                span = f"{begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
                yield self.error(keys, f"{path} is valid from {span} only; renew it, or set the clock")
            elif ends - now < EXPIRES_SOON:
                yield self.warning(keys, f"{path} expires on {ends:%Y-%m-%d}; renew it and reload")
        tls = self.config.mqtt.tls
        if tls is not None and not _unreadable(tls.cert) and not _unreadable(tls.key):
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key)
            except ssl.SSLError as error:
                yield self.error(
                    ("mqtt", "tls", "key"), f"{tls.key} does not go with {tls.cert}: {error.reason}"
                )

    def _files(self, places: list[Keys]) -> Iterator[tuple[Keys, Path]]:
        """Those of the places where the configuration names a file."""
        for keys in places:
            value: object = self.config
            for key in keys:
                value = getattr(value, str(key), None)
            if isinstance(value, Path):
                yield keys, value

    def credentials(self) -> Iterator[Finding]:
        """Whether AWS credentials and a region can be found."""
        aws = self.config.aws
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        try:
            session = Session(profile=aws.profile)
            if aws.credentials is None and session.get_credentials() is None:
                yield self.warning(
                    ("aws",),
                    "no AWS credentials are found; set [aws.credentials.iot], profile or AWS_... variables",
                )
            if aws.region is None and session.get_config_variable("region") is None:
                yield self.warning(("aws", "region"), "no region is set; set it, or AWS_DEFAULT_REGION")
        except BotoCoreError as error:
            yield self.error(("aws", "profile"), str(error))


def validity(path: Path) -> tuple[datetime, datetime]:
    """From when to when the first certificate of a PEM file is valid; raises ValueError.

    The two times follow each other in a certificate (RFC 5280, 4.1), so that a pattern finds them
    without a parser.
    """
    text = path.read_text(errors="replace")
    begin, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if begin < 0 or end < 0:
        raise ValueError(f"{path} holds no certificate in PEM")
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


def _existing(path: Path) -> Path:
    """The path, or the innermost directory above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _unreadable(path: Path) -> str:
    try:
        path.open("rb").close()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _why_not_listen(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"another program does (see `ss -ltnp sport = :{port}`); stop it, or choose another port"
    if error.errno == errno.EACCES:
        return "ports below 1024 need CAP_NET_BIND_SERVICE; choose another port"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; choose one of `ip address`"
    return error.strerror or str(error)


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda found: f"_{found[1].lower()}", key)
