"""Help texts with plain placeholders, such as STREAM and NUMBER, instead of braces and Python types.

The text is as wide as the terminal. Only this module changes what typer prints.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import DefaultPlaceholder

WIDEST = 1000  # columns
_TYPES = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "FILE", "Path": "FILE"}


def _usage(pieces: list[str], params: list[Any]) -> list[str]:
    """Format `STREAM [KEY=VALUE]...`: no braces, and dots after an argument that may be repeated."""
    repeated = {param.metavar for param in params if param.param_type_name == "argument" and param.nargs < 0}
    plain = [re.sub(r"^\{(.*)\}(\.\.\.)?$", r"\1\2", piece) for piece in pieces]
    return [f"{piece}..." if piece.strip("[]") in repeated else piece for piece in plain]


def _format_options(params: list[Any], ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in params:
        record = param.get_help_record(ctx)
        if record is None:
            continue
        name, text = record
        if param.param_type_name == "argument":
            plain = param.metavar or name.partition(" ")[0].strip("{}[]")
            sections["Arguments"].append((plain, re.sub(r" *\[required\]$", "", text)))
        else:
            sections["Options"].append((re.sub(r"<([^>]+)>", _plain, name), text))
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _plain(found: re.Match[str]) -> str:
    """Replace `<list[str]>`, `<int range>` and `<a|b>` by TEXT, NUMBER and a|b."""
    name = re.sub(r"^list\[(.*)\]$", r"\1", found[1]).removesuffix(" range")
    return _TYPES.get(name, name)


class PlainCommand(TyperCommand):
    """A command whose help has plain placeholders."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _usage(super().collect_usage_pieces(ctx), self.get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self.get_params(ctx), ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands whose help has plain placeholders."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return _usage(super().collect_usage_pieces(ctx), self.get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _format_options(self.get_params(ctx), ctx, formatter)
        self.format_commands(ctx, formatter)


class ListsByDefault(PlainGroup):
    """A group whose default command is `list`, so `streambridge exports sensors` lists those of sensors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing and (
            not args or args[0] not in {*self.commands, *ctx.help_option_names}
        ):
            args = ["list", *args]
        return super().parse_args(ctx, args)


def use_plain_help(app: typer.Typer) -> None:
    """Give plain help to all commands of an application that do not have their own class."""
    if isinstance(app.info.cls, DefaultPlaceholder):
        app.info.cls = PlainGroup
    for command in app.registered_commands:
        command.cls = command.cls if command.cls not in (None, TyperCommand) else PlainCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            use_plain_help(group.typer_instance)
