"""Finds and loads plugins.

Order: the files shipped in `plugins/` (in a wheel `bridge/_plugins/`), pip packages with an entry point in
the group `streambridge`, then the files and packages of drop-in directories by name. If a name or kind is
already taken, the later plugin fails. A plugin that fails is listed with its error; the others load.

The code of a drop-in directory runs as the service: nobody but root and the service's user may change the
directory, a file in it, or what links lead to (`readable.foreign`). Otherwise they do not load. A drop-in is
compiled from its source each time: what is in `__pycache__` beside it counts for nothing.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points, version
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from zlib import crc32

import msgspec
import pluggy
from msgspec import Struct

from bridge import enums
from bridge.errors import InvalidDefinition, PluginError
from bridge.model import mistake
from bridge.plugin import hooks
from bridge.plugin.api import BatchLimits, ExportConfig, Exporter, convert_config
from bridge.plugin.auth import AuthOptions
from bridge.plugin.consumer import ClientExporter
from bridge.plugin.hooks import GROUP
from bridge.plugin.mistakes import failure, hook_mistake
from bridge.readable import foreign, is_directory
from bridge.settingtypes import as_stored, second_names

ExportDefinition = dict[str, list[dict[str, Any]]]


class Found(Struct, kw_only=True):
    """A plugin that was found. `kinds` are the kinds of its exporters; `error` says why it was not loaded."""

    name: str
    origin: str
    version: str = ""
    kinds: list[str] = []
    error: str | None = None


class Registry:
    """The loaded plugins. `found` lists all, `exporters` maps kinds to classes, `hook` calls hooks."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self.exporters: dict[str, type[Exporter]] = {}
        self.manager = pluggy.PluginManager(GROUP)
        self.manager.add_hookspecs(hooks)

    @property
    def hook(self) -> Any:
        """The hooks of all loaded plugins."""
        return self.manager.hook

    @property
    def auth_options(self) -> dict[str, type[AuthOptions]]:
        """The plugins that decide logins or rights, with the type of their options."""
        names = self.with_hook("authenticate") | self.with_hook("authorize")
        return {
            name: getattr(self.manager.get_plugin(name), "Options", AuthOptions) for name in sorted(names)
        }

    def with_hook(self, hook: str) -> frozenset[str]:
        """The names of the plugins that have a hook."""
        return frozenset(one.plugin_name for one in getattr(self.hook, hook).get_hookimpls())

    def config(
        self, kind: str, raw: Mapping[str, Any], path: tuple[str | int, ...] | None = None
    ) -> ExportConfig:
        """Read one export configuration; `path` leads to it. Raises InvalidDefinition."""
        path = ("exportDefinition", kind) if path is None else path
        cls = self.exporters.get(kind)
        if cls is None:
            raise InvalidDefinition(path, *self._unknown(kind))
        options, stored = cls.Config, _stored(cls.Config, raw, path)
        try:
            config: ExportConfig = convert_config(cls, stored)
        except msgspec.ValidationError as error:
            inner, what = mistake(error)
            remedy = _known_fields(what, cls) or enums.choices(cls.Config, inner)
            names = (_with_names(f"`{key}`", options, raw).strip("`") for key in inner[:1])
            raise InvalidDefinition(
                (*path, *names, *inner[1:]), _with_names(what, options, raw), remedy
            ) from None
        except ValueError as error:
            raise InvalidDefinition(path, _with_names(str(error), options, raw)) from None
        return config

    def check(self, definition: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Check all exports of a definition. Raises InvalidDefinition for the first mistake."""
        for kind, configs in definition.items():
            for number, raw in enumerate(configs):
                self.config(kind, raw, ("exportDefinition", kind, number))

    def stored(self, definition: Mapping[str, Sequence[Mapping[str, Any]]]) -> ExportDefinition:
        """The exports of a definition as they are stored and sent: with enums as numbers, and one name each.

        Raises InvalidDefinition for two names of one option.
        """
        return {
            kind: [
                _stored(self.exporters[kind].Config, raw, ("exportDefinition", kind, number))
                if kind in self.exporters
                else dict(raw)
                for number, raw in enumerate(configs)
            ]
            for kind, configs in definition.items()
        }

    def named(self, definition: Mapping[str, Sequence[Mapping[str, Any]]]) -> ExportDefinition:
        """The exports of a definition with their enums by name, for people."""
        kinds = self.exporters
        return {
            kind: [enums.named(kinds[kind].Config, raw) if kind in kinds else dict(raw) for raw in configs]
            for kind, configs in definition.items()
        }

    def _unknown(self, kind: str) -> tuple[str, str]:
        for plugin in self.found:
            if plugin.error is not None and kind.lower() in (plugin.name.lower(), *plugin.kinds):
                return f"the plugin {plugin.name} ({plugin.origin}) is not loaded: {plugin.error}", ""
        near = difflib.get_close_matches(kind, self.exporters, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(sorted(self.exporters))}"
        return f"there is no exporter of kind {kind!r}", hint

    def add(self, found: Found, import_it: Callable[[], ModuleType]) -> None:
        """Load one plugin. A failure is recorded in its `error`."""
        self.found.append(found)
        try:
            taken = next((f for f in self.found[:-1] if f.name == found.name and f.error is None), None)
            if taken is not None:
                raise PluginError(
                    f"there is already a plugin named {found.name!r} ({taken.origin}); rename this one"
                )
            module = import_it()
            if (mistake := hook_mistake(module)) is not None:
                raise PluginError(mistake)
            self.manager.register(module, found.name)
            self._register_exporters(module, found)
            options = getattr(module, "Options", AuthOptions)
            if found.name in self.auth_options and not (
                isinstance(options, type) and issubclass(options, AuthOptions)
            ):
                raise PluginError("Options is not a subclass of bridge.AuthOptions")
        except (Exception, SystemExit) as error:
            found.error = str(error) if isinstance(error, PluginError) else failure(error)
            if self.manager.has_plugin(found.name) and taken is None:
                self.manager.unregister(name=found.name)

    def _register_exporters(self, module: ModuleType, found: Found) -> None:
        classes: list[type[Exporter]] = []
        others = [p for p in self.manager.get_plugins() if p is not module]
        self.manager.subset_hook_caller("register_exporters", others)(register=classes.append)
        for cls in classes:
            _check_class(cls)
            if cls.kind in self.exporters:
                raise PluginError(f"there is already an exporter of kind {cls.kind!r}; choose another")
        for cls in classes:
            self.exporters[cls.kind] = cls
            found.kinds.append(cls.kind)


def _check_class(cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Exporter)):
        raise PluginError(f"{cls!r} is registered as an exporter, but is not a subclass of bridge.Exporter")
    if not isinstance(getattr(cls, "kind", None), str):
        raise PluginError(f"{cls.__name__}.kind is missing: the key of this exporter in export definitions")
    if not issubclass(cls.Config, ExportConfig):
        raise PluginError(f"{cls.__name__}.Config is not a subclass of bridge.ExportConfig")
    if cls.export is Exporter.export:
        raise PluginError(f"{cls.__name__} has no export method")
    if not isinstance(cls.limits, BatchLimits):
        raise PluginError(f"{cls.__name__}.limits is {cls.limits!r:.100}, not bridge.BatchLimits(...)")
    try:
        msgspec.convert(msgspec.to_builtins(cls.limits), BatchLimits)
    except msgspec.ValidationError as error:
        raise PluginError(f"{cls.__name__}.limits: {error}") from None
    if not isinstance(cls.timeout, int | float) or not float(cls.timeout) > 0:
        raise PluginError(f"{cls.__name__}.timeout is {cls.timeout!r:.100}, not a number of seconds above 0")


def _stored(options: type[Struct], raw: Mapping[str, Any], path: tuple[str | int, ...]) -> dict[str, Any]:
    """One export as it is stored; raises InvalidDefinition for two names of one option."""
    try:
        return as_stored(options, enums.numbered(options, raw))
    except ValueError as error:
        raise InvalidDefinition(path, str(error)) from None


def _with_names(what: str, options: type[Struct], raw: Mapping[str, Any]) -> str:
    """A sentence with the name that a definition has for each option, or else the first of its two.

    msgspec names an option as it is stored, an exporter by the first name.
    """
    for name, stored in second_names(options).items():
        given = stored if stored in raw else name
        what = re.sub(rf"`{stored}`", f"`{given}`", re.sub(rf"\b{name}\b", given, what))
    return what


def _known_fields(what: str, cls: type[Exporter]) -> str:
    if "unknown field" not in what:
        return ""
    first = {stored: name for name, stored in second_names(cls.Config).items()}
    known = cls.Config.__struct_encode_fields__
    near = difflib.get_close_matches(what.split("`")[1], (*known, *first.values()), n=1)
    if near:
        return f"did you mean `{first.get(near[0], near[0])}`?"
    return f"known fields: {', '.join(first.get(name, name) for name in known)}"


def load(directories: Iterable[str | Path] = ()) -> Registry:
    """Find and load all plugins; `directories` are drop-in directories, which may be missing."""
    registry = Registry()
    registry.exporters[ClientExporter.kind] = ClientExporter
    registry.found.append(
        Found(
            name=ClientExporter.kind, origin="built in", version=_own_version(), kinds=[ClientExporter.kind]
        )
    )
    for found, import_it in _candidates(directories):
        registry.add(found, import_it)
    return registry


def shipped(top: str = "plugins") -> Path:
    """The directory of files that came with streambridge, in a wheel or in a checkout."""
    here = Path(__file__).resolve().parents[1]
    return next(d for d in (here / f"_{top}", here.parent / top) if d.is_dir())


def _candidates(directories: Iterable[str | Path]) -> Iterator[tuple[Found, Callable[[], ModuleType]]]:
    own = _own_version()
    for path in sorted(shipped().glob("*.py")):
        if path.stem != "__init__":
            yield Found(name=path.stem, origin="shipped", version=own), _import_path(path)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        origin = entry.dist.name if entry.dist else entry.value
        release = entry.dist.version if entry.dist else ""
        yield Found(name=entry.name, origin=f"package {origin}", version=release), entry.load
    for directory in map(Path, directories):
        if is_directory(directory):
            for path in sorted(directory.iterdir()):
                target = path / "__init__.py" if path.is_dir() else path
                if target.suffix == ".py" and target.is_file() and not path.name.startswith((".", "_")):
                    yield Found(name=path.stem, origin=str(path)), _import_drop_in(directory, path, target)


def _own_version() -> str:
    try:
        return version("streambridge")
    except ImportError:  # a checkout that is not installed
        return ""


def _import_drop_in(directory: Path, path: Path, target: Path) -> Callable[[], ModuleType]:
    def import_it() -> ModuleType:
        for place in (directory, path, *_inside(path)):
            if why := foreign(place):
                raise PluginError(why)
        return _import_path(target, _FromSource)()

    return import_it


def _inside(path: Path) -> Iterator[Path]:
    """All that is below a directory, also by links."""
    seen = set()
    for where, directories, files in os.walk(path, followlinks=True):
        yield from (Path(where, name) for name in (*directories, *files))
        if (real := os.path.realpath(where)) in seen:
            directories.clear()
        seen.add(real)


class _FromSource(SourceFileLoader):
    """Loads a module from its source only."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _import_path(path: Path, loader: type[SourceFileLoader] = SourceFileLoader) -> Callable[[], ModuleType]:
    package = path.name == "__init__.py"
    stem = path.parent.name if package else path.stem
    name = f"{GROUP}_plugins_{stem}_{crc32(os.fsencode(path)):08x}"

    def import_it() -> ModuleType:
        if name in sys.modules:  # load each module once, because msgspec looks up types by module name
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(
            name,
            path,
            loader=loader(name, str(path)),
            submodule_search_locations=[str(path.parent)] if package else None,
        )
        if spec is None or spec.loader is None:
            raise PluginError(f"{path} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # relative imports and pickling look here
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    return import_it
