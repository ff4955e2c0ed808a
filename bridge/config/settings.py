"""The configuration: one TOML file and its fragments, read into frozen structs.

`load` either returns a configuration or raises a ConfigError whose message has one line for every mistake:
file, line, key, value and what to do.

* config/streambridge.toml shows every key with its default.
* Sizes and durations are integers (bytes, milliseconds) or texts such as "256MiB" and "1.5s".
* A relative path is relative to the directory of the main file, whatever the working directory is.
* `${STREAMBRIDGE_NAME}` in a text is replaced by that environment variable, `${CREDENTIALS_DIRECTORY}` by
  the directory in which systemd puts a service's credentials. Not in [streams]: definitions are stored on
  the disk and shown by `describe`, so they must not contain secrets.
* `[streams.NAME]` becomes the same MessageStreamDefinition that a client would send.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from bridge.access.accounts import Mistake, mistakes
from bridge.access.rules import Deny, Rights
from bridge.audit.settings import AuditSettings
from bridge.auth.settings import AuthSettings
from bridge.config import tomlfile
from bridge.config.tomlfile import Document, Keys
from bridge.config.tomlstruct import Reader, dotted, fields_of, keys_of, snake, struct_in, unit_of
from bridge.enums import numbered
from bridge.errors import ConfigError, InvalidDefinition
from bridge.export.settings import ExportSettings
from bridge.firehose.settings import FirehoseConfig
from bridge.greengrass.settings import GreengrassConfig
from bridge.http.settings import HttpConfig
from bridge.model import Limits, MessageStreamDefinition, Name, StrategyOnFull, segment_for
from bridge.mqtt.settings import MqttConfig, UpstreamSettings
from bridge.operations.catalog import OPERATIONS
from bridge.operations.deliveries import DELIVERIES
from bridge.operations.validate import segment_size
from bridge.plugin import discovery
from bridge.plugin.api import Exporter
from bridge.plugin.auth import AuthOptions
from bridge.plugin.aws import AwsSettings
from bridge.settingtypes import Means, Millis, meanings, wire_name

DEFAULT_CONFIG = Path("/etc/streambridge/streambridge.toml")

Exporters = Callable[[], Mapping[str, type[Exporter]]]  # by kind; called when they are needed

# The keys of a stream that differ from the SDK's field names.
RENAMED = {"stream_segment_size": "segment_size", "export_definition": "export"}
# The settings that are applied on reload (SIGHUP), besides [streams] and [[upstream]]; the others need a
# restart.
RELOADED = {
    "mqtt.listen", "mqtt.listener", "mqtt.tls", "mqtt.users_file", "mqtt.allow_anonymous", "mqtt.acl",
    "mqtt.role", "mqtt.user", "mqtt.client_ids", "mqtt.forbidden", "mqtt.origins", "mqtt.refused_stream",
    "mqtt.unmatched",
    "mqtt.budget", "log.level",
    *(f"audit.{field}" for field in AuditSettings.__struct_fields__),
    *(f"auth.{field}" for field in AuthSettings.__struct_fields__),
}  # fmt: skip


class Gateway(Struct, frozen=True, kw_only=True):
    """[gateway]: the gateway's name and its data directories."""

    id: str = msgspec.field(default_factory=socket.gethostname)
    data_dir: Path = Path("/var/lib/streambridge")
    memory_dir: Path = Path()  # Path() until __post_init__ has chosen one
    sync_interval: Millis = 1000
    commit_delay: Annotated[Millis, Meta(le=60_000)] = 250

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("`id` is empty; name this gateway, or remove the key to use the host name")
        if self.sync_interval < 1:
            raise ValueError("`sync_interval` must be at least 1 ms")
        if self.memory_dir == Path():
            msgspec.structs.force_setattr(self, "memory_dir", _memory_dir(self.data_dir))


def _memory_dir(data_dir: Path) -> Path:
    """The default directory, on a tmpfs, for the memory streams of a data directory.

    Each data directory has its own: memory streams are emptied at start, those of another instance must stay.
    The first choices belong to this user. /dev/shm is shared by all users, so the store refuses a directory
    there that it does not own.
    """
    name = f"streambridge-{zlib.crc32(os.fsencode(data_dir.absolute())):08x}"
    for variable in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        if os.environ.get(variable):
            return Path(os.environ[variable]) / name
    return Path("/dev/shm") / f"{name}-{os.getuid()}"  # noqa: S108 - see above


class Encryption(Struct, frozen=True, kw_only=True):
    """[encryption]: the key of the streams with `encryption = true`."""

    key_file: Path | None = None


class Log(Struct, frozen=True, kw_only=True):
    """[log]: what is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Config(Struct, frozen=True, kw_only=True):
    """The configuration; `path` is the file that it was read from."""

    path: Path | None = None
    gateway: Gateway = msgspec.field(default_factory=Gateway)
    mqtt: MqttConfig = msgspec.field(default_factory=MqttConfig)
    greengrass: GreengrassConfig = GreengrassConfig()
    firehose: FirehoseConfig = FirehoseConfig()
    http: HttpConfig = HttpConfig()
    export: ExportSettings = msgspec.field(default_factory=ExportSettings)
    aws: AwsSettings = msgspec.field(default_factory=AwsSettings)
    encryption: Encryption = Encryption()
    log: Log = Log()
    audit: AuditSettings = AuditSettings()
    auth: AuthSettings = msgspec.field(default_factory=AuthSettings)
    upstream: list[UpstreamSettings] = []
    streams: dict[str, MessageStreamDefinition] = {}


def load(path: Path, exporters: Exporters | None = None) -> Config:
    """Read the configuration at `path` and the fragments in `conf.d` beside it; see `understand`."""
    config, reader = understand(tomlfile.read(path, obeyed=True), exporters)
    if reader.problems:
        raise ConfigError(reader.report())
    return config


def understand(document: Document, exporters: Exporters | None = None) -> tuple[Config, Reader]:
    """Read a document as far as possible; the reader has the mistakes.

    The types of the options of exports come from `exporters`, or else from the plugins in the document's
    plugin_dirs. Options of unknown kinds stay as they are.
    """
    reader = Reader(document)
    reader.problems += document.problems
    registry = cache(partial(_registry, document))
    exporters = exporters or (lambda: registry().exporters)
    values: dict[str, Any] = {}
    for key, section in document.data.items():
        if key == "streams":
            values[key] = _streams(reader, section, exporters)
        elif key == "upstream":
            values[key] = _upstreams(reader, section)
        elif key == "auth":
            values[key] = _auth(reader, section, registry)
        elif key in _SECTIONS:
            read = reader.struct(_SECTIONS[key], section, (key,))
            if read is not None:
                values[key] = read
            if isinstance(read, MqttConfig):
                _access(reader, read, plugin=_may_log_in(document, registry))
        else:
            reader.unknown((key,), [*_SECTIONS, "streams", "upstream"])
    return Config(path=document.path, **values), reader


def stream_definition(
    name: str, table: dict[str, Any], plugin_dirs: Sequence[Path]
) -> MessageStreamDefinition:
    """The definition for a table [streams.NAME] from the command line; raises ConfigError."""
    document = Document(Path("command line"))
    document.data["streams"] = {name: table}
    reader = Reader(document)
    definition = _stream(
        reader, name, table, ("streams", name), lambda: discovery.load(plugin_dirs).exporters
    )
    if definition is None or reader.problems:
        raise ConfigError("\n".join(problem.what for problem in reader.problems))
    return definition


def _registry(document: Document) -> discovery.Registry:
    export = Reader(document).struct(ExportSettings, document.data.get("export", {}), ("export",))
    return discovery.load((export or ExportSettings()).plugin_dirs)


_SECTIONS = {
    field.name: field.type
    for field in msgspec.structs.fields(Config)
    if field.name not in ("path", "streams", "upstream")
}


def keys_to(error: InvalidDefinition) -> Keys:
    """The keys, in a stream's table, of the value that is wrong in its definition."""
    kind = 1 if error.path[:1] == ("exportDefinition",) else None  # the name of an exporter is not converted
    return tuple(key if isinstance(key, int) or n == kind else _key(key) for n, key in enumerate(error.path))


def sentence(error: InvalidDefinition) -> str:
    """What is wrong and what to do, with the keys of the file."""
    return error.sentence(_key(error.other))


def explained(error: Exception, name: str) -> str:
    """The message for an error with a stream of the configuration or of the command line."""
    if not isinstance(error, InvalidDefinition):
        return str(error)
    text = sentence(error)
    if error.path[:1] == ("exportDefinition",):  # the exporter names its options as on the wire
        text = re.sub(r"`(\w+)`", lambda found: f"`{snake(found[1])}`", text)
    return f"{dotted(('streams', name, *keys_to(error)))}: {text}"


def _key(name: str) -> str:
    return _KEYS.get(name, snake(name))


_KEYS = {
    field.encode_name: key
    for struct in (MessageStreamDefinition, Limits)
    for key, field in keys_of(struct, RENAMED).items()
}


def files_of(settings: object) -> Iterator[Path]:
    """The files that settings name, those of their parts among them."""
    if isinstance(settings, Path):
        yield settings
    elif isinstance(settings, AuthSettings):
        yield from settings.files()
    elif isinstance(settings, Struct):
        for field in settings.__struct_fields__:
            yield from files_of(getattr(settings, field))
    elif isinstance(settings, (list, tuple)):
        for part in settings:
            yield from files_of(part)


def needs_restart(started: Config, new: Config) -> list[str]:
    """The keys that differ from those of the start and that a reload cannot apply."""
    return [
        key
        for section, struct in _SECTIONS.items()
        for field in struct.__struct_fields__
        if (key := f"{section}.{field}") not in RELOADED
        and getattr(getattr(started, section), field) != getattr(getattr(new, section), field)
    ]


def _access(reader: Reader, mqtt: MqttConfig, *, plugin: bool) -> None:
    """Report listeners where nobody could log in, what is wrong between the tables of users and roles, and
    operations that do not exist.

    What may follow from a mistake that is reported already is none. `plugin`: one may let clients in.
    """

    def sound(*keys: str | int) -> bool:
        return not any(keys[: len(one)] == one or one[: len(keys)] == keys for one in reader.broken)

    def report(wrong: Mistake, keys: Keys) -> None:
        if sound(*keys, wrong.table, wrong.number, wrong.key) and (wrong.key != "roles" or roles_known):
            reader.problem((*keys, wrong.table, wrong.number, wrong.key), wrong.what)

    # One that cannot be read at all leaves the others out, too.
    roles = reader.document.data["mqtt"].get("role", [])
    roles_known = isinstance(roles, list) and len(mqtt.role) == len(roles)
    for wrong in mistakes(mqtt.user, mqtt.role):
        report(wrong, ("mqtt",))
    tables: list[tuple[Keys, Sequence[Rights]]] = [
        (("mqtt", "acl"), mqtt.acl),
        (("mqtt", "role"), mqtt.role),
    ]
    _distinct(reader, ("mqtt", "listener"), [one.name for one in mqtt.listener])
    _distinct(reader, ("mqtt", "budget"), [one.name for one in mqtt.budget])
    tables_of: list[Keys] = [("mqtt",), *(("mqtt", "listener", n) for n in range(len(mqtt.listener)))]
    inherited = all(sound("mqtt", key) for key in ("tls", "users_file"))
    for keys, listener in zip(tables_of, mqtt.listeners(), strict=True):
        if inherited and all(sound(*keys, key) for key in _OF_LOGINS):
            for what in listener.mistakes(plugin=plugin):
                reader.problem((*keys, "listen"), what.removeprefix("`listen`: "))
    for keys, given in zip(tables_of[1:], mqtt.listener, strict=True):
        for wrong in mistakes(given.user or (), mqtt.role):
            if wrong.table == "user":
                report(wrong, keys)
        tables.append(((*keys, "acl"), given.acl or ()))
    for keys, rights in tables:
        for number, one in enumerate(rights):
            place = (*keys, number, "deny")
            if one.deny == Deny() and sound(*place) and reader.document.states(place):
                reader.problem(place, "it denies nothing; list topic filters, or remove it")
            listed = (("operations",), one.operations or ()), (("deny", "operations"), one.deny.operations)
            for inner, operations in listed:
                for name in operations:
                    if name not in _OPERATIONS:
                        near = difflib.get_close_matches(name, _OPERATIONS, n=1)
                        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(_OPERATIONS)}"
                        reader.problem((*keys, number, *inner), f"there is no operation {name!r}; {hint}")


def _distinct(reader: Reader, keys: Keys, names: Sequence[str]) -> None:
    """Report tables of a list with the name of an earlier one."""
    first: dict[str, int] = {}
    for number, name in enumerate(names):
        if (other := first.setdefault(name, number)) < number:
            where = f"{dotted((*keys, other))}, {reader.document.position((*keys, other, 'name'))}"
            reader.problem((*keys, number, "name"), f"another has this name ({where}); choose another")


# What decides whether somebody can log in at a listener.
_OF_LOGINS = ("listen", "allow_anonymous", "users_file", "tls", "proxy_protocol")
_OPERATIONS = (*OPERATIONS, *DELIVERIES)


def _may_log_in(document: Document, registry: Callable[[], discovery.Registry]) -> bool:
    """Whether a plugin in [auth.plugins] may let clients in. One with mistakes, which are reported, may."""
    section = document.data.get("auth")
    tables = section.get("plugins") if isinstance(section, dict) else None
    if not isinstance(tables, dict) or not tables:
        return False
    about_topics_only = registry().with_hook("authorize") - registry().with_hook("authenticate")
    return bool(tables.keys() - about_topics_only)


def _auth(reader: Reader, section: object, registry: Callable[[], discovery.Registry]) -> AuthSettings:
    keys: Keys = ("auth", "plugins")
    if not reader.is_table(section, keys[:1]):
        return AuthSettings()
    table = dict(section)
    tables = table.pop("plugins", {})
    plugins: dict[str, AuthOptions] = {}
    if reader.is_table(tables, keys) and tables:
        known = registry().auth_options
        for name, options in tables.items():
            if name not in known:
                reader.problem(
                    (*keys, name),
                    f"no plugin {name!r} has the hook `authenticate` or `authorize`; there are: "
                    f"{', '.join(known) or 'none'}; `streambridge plugins` shows what is wrong with others",
                )
            elif (read := reader.struct(known[name], options, (*keys, name))) is not None:
                plugins[name] = read
    return reader.struct(AuthSettings, table, keys[:1], fixed={"plugins": plugins}) or AuthSettings()


def _upstreams(reader: Reader, section: object) -> list[UpstreamSettings]:
    if not isinstance(section, list):
        reader.problem(("upstream",), "must be a list of tables: [[upstream]]")
        return []
    found = [reader.struct(UpstreamSettings, table, ("upstream", n)) for n, table in enumerate(section)]
    names = [f"({n})" if one is None else one.name for n, one in enumerate(found)]
    _distinct(reader, ("upstream",), names)
    last_to_first = reversed([one for one in found if one is not None])
    return list(reversed({one.name: one for one in last_to_first}.values()))


def _streams(reader: Reader, section: object, exporters: Exporters) -> dict[str, MessageStreamDefinition]:
    definitions = {}
    if reader.is_table(section, ("streams",)):
        for name, table in section.items():
            definition = _stream(reader, name, table, ("streams", name), exporters)
            if definition is not None:
                definitions[name] = definition
    return definitions


def _stream(
    reader: Reader, name: str, table: object, keys: Keys, exporters: Exporters
) -> MessageStreamDefinition | None:
    if not reader.is_table(table, keys):
        return None
    try:
        msgspec.convert(name, Name)
    except msgspec.ValidationError:
        reader.problem(keys, "a stream's name is 1 to 255 letters, digits, spaces and any of _ - , .")
    table = dict(table)
    fixed = {
        "name": name,
        "export_definition": _exports(reader, table.pop("export", {}), (*keys, "export"), exporters),
        "delivery": None,  # only the Firehose API changes it
    }
    # Four defaults that a client's request does not have: a full stream rejects new data, but what its
    # exports have delivered goes first; a message is on the disk before it is acknowledged; and a small
    # stream gets small segments.
    table.setdefault("strategy_on_full", StrategyOnFull.RejectNewData.name)
    table.setdefault("retention", "exported")
    table.setdefault("flush_on_write", True)
    definition = reader.struct(MessageStreamDefinition, table, keys, renamed=RENAMED, fixed=fixed)
    mistake = None if definition is None else segment_size(definition)
    if definition is None or ("segment_size" in table and mistake is None):
        return definition
    if mistake is not None and "segment_size" in table and (*keys, "max_size") not in reader.broken:
        reader.problem((*keys, "segment_size"), sentence(mistake))
    return msgspec.structs.replace(definition, stream_segment_size=segment_for(definition.max_size))


def _exports(
    reader: Reader, table: object, keys: Keys, exporters: Exporters
) -> dict[str, list[dict[str, Any]]]:
    """The exports by kind, with their keys in the camelCase of the wire. Each exporter checks its own."""
    if not reader.is_table(table, keys):
        return {}
    exports = {}
    for kind, items in table.items():
        if isinstance(items, list) and all(isinstance(item, dict) for item in items):
            config = partial(_config, exporters, kind)
            wire = [_export(reader, item, (*keys, kind, n), config) for n, item in enumerate(items)]
            struct = config()
            exports[kind] = [numbered(struct, one) for one in wire] if struct is not None else wire
        else:
            reader.problem((*keys, kind), f"must be a list of tables: [[{dotted((*keys, kind))}]]")
    return exports


def _config(exporters: Exporters, kind: str) -> type[Struct] | None:
    exporter = exporters().get(kind)
    return None if exporter is None else exporter.Config


def _export(
    reader: Reader, table: dict[str, Any], keys: Keys, struct: Callable[[], type[Struct] | None]
) -> dict[str, Any]:
    """One export's options. `struct` returns their types, if they are known."""
    wire = {}
    for key, raw in table.items():
        here = (*keys, key)
        name = wire_name(key)
        value = raw
        if isinstance(raw, dict) and not is_map(type_on_wire(struct(), name)):
            value = _export(reader, raw, here, partial(_inner, struct, name))
        elif isinstance(raw, list) and _inner(struct, name) is not None:
            inner = partial(_inner, struct, name)
            value = [
                _export(reader, item, (*here, n), inner) if isinstance(item, dict) else item
                for n, item in enumerate(raw)
            ]
        elif isinstance(raw, str) and "${STREAMBRIDGE_" in raw:
            reader.problem(here, "a stream's definition is stored and shown; put the secret in a file")
        elif isinstance(raw, str) and (unit := unit_of(type_on_wire(struct(), name))) is not None:
            value = reader.value(unit, raw, here)
        elif isinstance(raw, str) and raw and Means.SECRET_FILE in meanings(type_on_wire(struct(), name)):
            try:
                value = str(reader.path(raw))
            except ValueError as error:
                reader.problem(here, str(error))
        if here not in reader.broken:
            wire[name] = value
    return wire


def is_map(kind: Any) -> bool:
    """Whether a type is a map whose keys are values too, and not names of options."""
    return any(get_origin(part) is dict for part in (kind, *get_args(kind)))


def _inner(struct: Callable[[], type[Struct] | None], name: str) -> type[Struct] | None:
    """The struct that a field of another one holds."""
    found = struct_in(type_on_wire(struct(), name))
    return None if found is None else found[0]


def type_on_wire(struct: type[Struct] | None, name: str) -> Any:
    """The type of a field by its name on the wire; None if there is none."""
    fields = () if struct is None else fields_of(struct)
    return next((field.type for field in fields if field.encode_name == name), None)
