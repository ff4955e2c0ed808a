"""Reports mistakes in a plugin's module to its author: what happened, where, and what to do.

pluggy ignores a function without `@hookimpl`, and reports other mistakes in its own terms. An author should
not have to know pluggy.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from bridge.plugin import hooks
from bridge.plugin.api import Exporter
from bridge.plugin.failures import failure as failure
from bridge.plugin.hooks import GROUP

HOOKS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hooks).items()
    if hasattr(function, f"{GROUP}_spec")
}
_NAMES = ", ".join(HOOKS)


def hook_mistake(module: ModuleType) -> str | None:
    """Return the first mistake in the hooks of a module, with the remedy; None if there is none."""
    marked = {
        name: value
        for name, value in _members(module)
        if inspect.isroutine(value) and hasattr(value, f"{GROUP}_impl")
    }
    for name, function in marked.items():
        mistake = _misspelt(name, function) or _wrong_argument(name, function)
        if mistake is not None:
            return mistake
    return None if marked else _without_hooks(module)


def _members(module: ModuleType) -> list[tuple[str, Any]]:
    return [(name, getattr(module, name, None)) for name in dir(module)]


def _misspelt(name: str, function: Any) -> str | None:
    hook = getattr(function, f"{GROUP}_impl").get("specname") or name
    if hook in HOOKS:
        return None
    near = difflib.get_close_matches(hook, HOOKS, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"the hooks are {_NAMES}"
    return f"there is no hook {hook}{line_of(function)}; {remedy}"


def _wrong_argument(name: str, function: Any) -> str | None:
    hook = getattr(function, f"{GROUP}_impl").get("specname") or name
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in HOOKS[hook]:
            return (
                f"the hook {hook}{line_of(function)} has no argument {parameter.name!r}; its arguments are "
                f"{', '.join(HOOKS[hook])}, by these names, and those that are not needed may be left out"
            )
    return None


def _without_hooks(module: ModuleType) -> str:
    for name, value in _members(module):
        if name in HOOKS and inspect.isfunction(value):
            return f"it has no hook: {name}{line_of(value)} is not marked; write @hookimpl above it"
    for name, value in _members(module):
        if isinstance(value, type) and issubclass(value, Exporter) and value.__module__ == module.__name__:
            return (
                f"it has no hook, so its exporter {name} is not registered; add a function "
                f"`@hookimpl def register_exporters(register)` that calls `register({name})`"
            )
    return (
        f"it has no hook; mark a function named {_NAMES.replace(', ', ' or ')} with @hookimpl, or, if it is "
        "not a plugin, begin the file's name with `_`"
    )


def line_of(function: Any) -> str:
    """Return ` (FILE, line N)` for a function; empty if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code is not None else ""
