"""Describes an exception that a plugin's code has raised, with the line of the plugin."""

from __future__ import annotations

import traceback
from pathlib import Path

_LOADERS = {"bridge", "importlib", "pluggy"}  # packages that call the plugin


def failure(error: BaseException) -> str:
    """Describe the error that loading a plugin raised, with the line of the plugin and the remedy."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if not isinstance(error, SyntaxError):  # its message already has the line
        what += _line_in_plugin(error)
    if isinstance(error, ModuleNotFoundError):
        what += "; install it into the environment of streambridge, or correct its name"
    return what


def failed(error: BaseException) -> str:
    """Describe an exception of a plugin that no plugin should raise, such as IndexError from its `check`."""
    return f"a defect of the plugin: {failure(error)}"


def _line_in_plugin(error: BaseException) -> str:
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LOADERS:
            return f" ({Path(frame.f_code.co_filename).name}, line {line})"
    return ""
