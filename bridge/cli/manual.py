"""`streambridge man`: the manual page streambridge(1), made from the declarations of the commands.

The packages install it. In roff, a line that begins with `.` or `'` is a request, and a backslash escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from bridge.cli import output

_FILES = (
    ("/etc/streambridge/streambridge.toml", "the configuration, with its fragments in conf.d beside it"),
    ("/var/lib/streambridge", "the data directory"),
)


def man(context: typer.Context) -> None:
    """Print the manual page, for man(1)."""
    for line in page(context.find_root().command):
        output.echo(line)


def page(root: Any) -> Iterator[str]:
    """Yield the lines of the page for a command and its subcommands."""
    try:
        release = version("streambridge")
    except PackageNotFoundError:
        release = ""
    yield f'.TH STREAMBRIDGE 1 "" "streambridge {release}" "User Commands"'
    yield from (".SH NAME", f"streambridge \\- {_text(_first(root.help))}")
    yield from (".SH SYNOPSIS", ".B streambridge", r".I COMMAND \fR[\fIOPTIONS\fR]")
    yield from (".SH DESCRIPTION", *_paragraphs(root.help or ""))
    yield from _options(root, root.make_context("streambridge", [], resilient_parsing=True))
    yield ".SH COMMANDS"
    yield from _commands("streambridge", root, None)
    yield ".SH FILES"
    for path, text in _FILES:
        yield from (".TP", f".I {_text(path)}", _text(text))
    yield ".SH EXAMPLES AND EXIT CODES"
    yield from _paragraphs(root.epilog or "")


def _commands(name: str, command: Any, above: Any) -> Iterator[str]:
    context = command.make_context(name.split()[-1], [], above, resilient_parsing=True)
    for word, inner in getattr(command, "commands", {}).items():
        if inner.hidden:
            continue
        full = f"{name} {word}"
        if not getattr(inner, "commands", None):
            below = inner.make_context(word, [], context, resilient_parsing=True)
            usage = " ".join(inner.collect_usage_pieces(below))
            yield from (f".SS {_text(full)} {_text(usage)}", *_paragraphs(inner.help or ""))
            yield from _options(inner, below)
            yield from _paragraphs(inner.epilog or "")
        yield from _commands(full, inner, context)


def _options(command: Any, context: Any) -> Iterator[str]:
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is None or param.name == "help":
            continue
        names = [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else []
        metavar = param.metavar or ("" if getattr(param, "is_flag", False) else "VALUE")
        shown = f"{', '.join(names)} {metavar}".strip()
        yield from (".TP", rf"\fB{_text(shown)}\fR", _text(param.help or ""))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; one that begins with \\b keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = paragraph.strip().splitlines()
        if not lines:
            continue
        yield ".PP"
        if lines[0].strip() == "\b":
            yield from (".nf", *(_text(line) for line in lines[1:]), ".fi")
        else:
            yield _text(" ".join(line.strip() for line in lines))


def _first(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0].rstrip(".")


def _text(text: str) -> str:
    """Escape a line of text so that roff prints it as it is."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped[:1] in (".", "'") else escaped
