"""Writes the reference pages that are made from the code. A test fails when they are out of date.

python docs/generate.py
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from enum import EnumMeta
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.update(COLUMNS="100", TERMINAL_WIDTH="100")  # before typer is imported: the width of help texts

import msgspec  # noqa: E402
import typer  # noqa: E402

import bridge  # noqa: E402
import bridge.streams  # noqa: E402
from bridge import objectkeys  # noqa: E402
from bridge.cli import app  # noqa: E402
from bridge.config import settings  # noqa: E402
from bridge.export import cursor  # noqa: E402
from bridge.http import metrics  # noqa: E402
from bridge.mqtt.broker import journal, journalfile  # noqa: E402
from bridge.mqtt.server import states  # noqa: E402
from bridge.mqtt.wire import packets  # noqa: E402
from bridge.plugin import discovery  # noqa: E402
from bridge.plugin import hooks as hookspecs  # noqa: E402
from bridge.plugin.api import AwsBatchedConfig, AwsConfig, BatchedConfig, ExportConfig  # noqa: E402
from bridge.settingtypes import Means  # noqa: E402
from bridge.streams import drops, formats, layout, meta, segment  # noqa: E402

NOTE = "<!-- Made by docs/generate.py; a change here is lost. -->\n\n"


def pages() -> dict[str, str]:
    """The generated pages by their path below docs/."""
    made = {
        "cli": command_line(),
        "configuration": configuration(),
        "file-format": file_format(),
        "hooks": hooks(),
        "metrics": metric_list(),
    }
    whole = {f"reference/{name}.md": NOTE + text.rstrip() + "\n" for name, text in made.items()}
    return whole | exporters() | architecture()


# -- the command line ------------------------------------------------------------------------------------
def command_line() -> str:
    """Every command's own help."""
    parts = ["# Command line\n\nThe help of every command, as `--help` prints it."]
    parts += [f"## {name}\n\n```text\n{text}\n```" for name, text in _helps()]
    return "\n\n".join(parts)


def _helps() -> Iterator[tuple[str, str]]:
    waiting: list[tuple[str, Any, Any]] = [("streambridge", typer.main.get_command(app), None)]
    while waiting:
        name, command, above = waiting.pop(0)
        context = command.make_context(name.split()[-1], [], above, resilient_parsing=True)
        context.terminal_width = context.max_content_width = 100
        lines = (line.rstrip() for line in command.get_help(context).splitlines())
        yield name, "\n".join(lines).strip()
        below = getattr(command, "commands", {})
        waiting[:0] = [
            (f"{name} {word}", inner, context) for word, inner in below.items() if not inner.hidden
        ]


# -- the configuration -----------------------------------------------------------------------------------
def configuration() -> str:
    """config/streambridge.toml, section by section."""
    sample = (ROOT / "config" / "streambridge.toml").read_text()
    head, *sections = re.split(r"^(?=\[[\w.]+\]\n)", sample, flags=re.MULTILINE)
    intro = "\n".join(line.removeprefix("#").strip() for line in head.splitlines())
    # What stands before a section's name belongs to it, not to the section before.
    found, before = [], ""
    for text in sections:
        body, comment = re.fullmatch(r"(.*?)((?:#[^\n]*\n)*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        if found or before or body:
            name = re.match(r"\[([\w.]+)\]", text)[1]  # type: ignore[index]
            found.append(f"## {name}\n\n```toml\n{(before + body).strip()}\n```")
        before = comment
    reloaded = "\n".join(f"* `{key}`" for key in sorted({*settings.RELOADED, "streams"}))
    return "\n\n".join(
        [
            "# Configuration",
            "This is `config/streambridge.toml`, section by section.",
            _markdown(intro),
            "SIGHUP makes a running service read it again. A mistake in it is logged and changes nothing; "
            "one in the users file or a certificate leaves the old users, rules and certificates. So does "
            "a change of `mqtt.listen`, and adding or removing `mqtt.tls` or its `client_ca`: "
            "that needs a restart. "
            "These are taken over at once; any other change is logged as waiting for a restart:",
            reloaded,
            *found,
        ]
    )


def _markdown(text: str) -> str:
    return re.sub(r"^ *(streambridge run .*)$", r"    \1", text.strip(), flags=re.MULTILINE)


# -- exports ---------------------------------------------------------------------------------------------
BLOCK = re.compile(r"(<!-- made by docs/generate.py: (\S+) -->\n).*?(<!-- up to here -->)", re.DOTALL)
SHARED = {"every": ExportConfig, "batches": BatchedConfig, "aws": AwsConfig}


def architecture() -> dict[str, str]:
    """The page of the architecture: its rooms from the contracts of lint, the connection from its table."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    house, mqtt = (contract["layers"] for contract in contracts[:2])
    floors = []
    for floor in house:
        rooms = [room.strip() for room in re.split("[|:]", floor)]
        floors.append("   ".join(rooms))
        if "mqtt" in rooms:
            floors += [f"    mqtt: {'   '.join(re.split('[ |:]+', floor))}" for floor in mqtt]
    lines = ["```text", *floors]
    page = (ROOT / "docs" / "architecture.md").read_text()
    page = _between(page, "rooms", "\n".join([*lines, "```"]))
    return {"architecture.md": _between(page, "connection", _connection())}


def _between(page: str, name: str, made: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"


def _connection() -> str:
    """The states of a connection as a figure, and its table."""
    rows = states.TRANSITIONS
    names = {
        getattr(packets, name): name
        for name in (
            "CONNECT", "PUBLISH", "PUBACK", "PUBREC", "PUBREL", "PUBCOMP", "SUBSCRIBE", "UNSUBSCRIBE",
            "PINGREQ", "DISCONNECT",
        )
    }  # fmt: skip

    def on(row: states.Transition) -> str:
        return row.on.name.lower() if isinstance(row.on, states.Event) else names[row.on]

    drawn: dict[tuple[states.State, states.State], list[str]] = {}
    for row in rows:
        drawn.setdefault((row.state, row.to), []).append(on(row))
    figure = ["```mermaid", "stateDiagram-v2", "    [*] --> NEW"]
    for (here, there), found in drawn.items():
        what = "every other packet" if here is there else ", ".join(found)
        figure.append(f"    {here.name} --> {there.name}: {what}")
    figure += ["    CLOSED --> [*]", "```"]
    table = ["| state | packet or event | what is done | then |", "|---|---|---|---|"]
    table += [f"| {row.state.name} | {on(row)} | {row.does} | {row.to.name} |" for row in rows]
    events = [f"* *{event.name.lower()}*: {event.value}." for event in states.Event]
    return "\n".join([*figure, "", *table, "", *events])


def exporters() -> dict[str, str]:
    """The pages of the exporters, with what is made from the code made anew."""
    kinds = discovery.load().exporters

    def block(found: re.Match[str]) -> str:
        name = found[2]
        shared = SHARED.get(name)
        text = _exporter(kinds[name]) if shared is None else _fields(shared, _inherited(shared))
        return f"{found[1]}\n{text}\n\n{found[3]}"

    pages = sorted((ROOT / "docs" / "exporters").glob("*.md"))
    return {f"exporters/{page.name}": BLOCK.sub(block, page.read_text()) for page in pages}


def _exporter(exporter: type[bridge.Exporter]) -> str:
    """What an exporter says of itself, its limits and its own options."""
    config, limits = exporter.Config, exporter.limits
    rows = [
        ("messages of a batch", limits.records),
        ("bytes of a message", limits.record_bytes),
        ("bytes of a batch", limits.batch_bytes),
        ("seconds without progress until it counts as hung", exporter.timeout),
    ]
    base = BatchedConfig if issubclass(config, BatchedConfig) else ExportConfig
    aws = {"endpoint_url", "region"} if issubclass(config, AwsConfig | AwsBatchedConfig) else set()
    common = [
        "those of [every export](README.md#options-of-every-export)",
        *(
            ["of [exports in batches](README.md#options-of-exports-in-batches)"]
            if base is BatchedConfig
            else []
        ),
        *(["of [exports to AWS](README.md#options-of-exports-to-aws)"] if aws else []),
    ]
    own = {*base.__struct_fields__, *aws} - set(getattr(config, "__annotations__", {}))
    return "\n\n".join(
        [
            _prose(inspect.getdoc(sys.modules[exporter.__module__]) or ""),
            "## Limits",
            "| limit | |\n|---|---|\n"
            + "\n".join(f"| {what} | {f'{limit:,.0f}' if limit else 'none'} |" for what, limit in rows),
            "## Options",
            _fields(config, own),
            f"And {', '.join(common[:-1])}{' and ' if common[:-1] else ''}{common[-1]}.",
        ]
    )


def _inherited(struct: type[msgspec.Struct]) -> set[str]:
    """The fields that a configuration has from its base."""
    return set(struct.__mro__[1].__struct_fields__) if struct is not ExportConfig else set()  # type: ignore[attr-defined]


def _fields(struct: type[msgspec.Struct], leave_out: set[str]) -> str:
    rows = ["| key | type | default |", "|---|---|---|"]
    rows += [
        f"| `{field.name}` | {_type(field.type)} | {_default(field)} |"
        for field in msgspec.structs.fields(struct)
        if field.name not in leave_out
    ]
    return "\n".join(rows)


def _type(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        base, *more = get_args(kind)
        unit = next((one for one in more if one in (Means.BYTES, Means.MILLIS)), None)
        bounds = "".join(_bounds(one) for one in more if isinstance(one, msgspec.Meta))
        return _type(base) + bounds if unit is None else _UNITS[unit] + bounds
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type(part) for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f'`"{value}"`' for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "table"
    if isinstance(kind, EnumMeta):
        return ", ".join(f"{member.value} {member.name}" for member in kind)  # type: ignore[var-annotated]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "table of " + ", ".join(f"`{name}`" for name in kind.__struct_fields__)
    names = {str: "text", int: "integer", bool: "true or false", float: "number", bytes: "bytes"}
    return names.get(kind, str(getattr(kind, "__name__", kind)))


_UNITS = {Means.BYTES: 'bytes (or `"64KiB"`)', Means.MILLIS: 'milliseconds (or `"1.5s"`)'}


def _bounds(limit: msgspec.Meta) -> str:
    low, high = limit.ge, limit.le
    if low is None and high is None:
        low, high, what = limit.min_length, limit.max_length, " characters"
    else:
        what = ""
    huge = high is not None and high >= 2**31 - 1
    if low is not None and high is not None and not huge:
        return f", {low:,} to {high:,}{what}"
    return f", at least {low:,}{what}" if low else f", at most {high:,}{what}" if high and not huge else ""


def _default(field: Any) -> str:
    if field.required:
        return "must be given"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "none"
    if hasattr(value, "name") and hasattr(value, "value"):
        return f"{value.value}"
    return f"`{msgspec.json.encode(value).decode()}`"


# -- docstrings ------------------------------------------------------------------------------------------
def _prose(text: str) -> str:
    """A docstring as Markdown: blank lines where it needs them, underlined lines as headings."""
    text = re.sub(r"^(\S[^\n]*)\n-{3,}$", r"### \1\n", text.strip(), flags=re.MULTILINE)
    lines: list[str] = []
    for line in text.splitlines():
        before = lines[-1] if lines else ""
        begins_list = line.startswith("* ") and not before.startswith(("* ", "  "))
        begins_code = line.startswith("    ") and not before.startswith("  ")
        if before and (begins_list or begins_code):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def _doc(module: ModuleType) -> str:
    return _prose(inspect.getdoc(module) or "")


def file_format() -> str:
    """What the modules that read and write files say of themselves."""
    parts = [
        "# File format",
        "Everything below is said by the modules that read and write these files. "
        "The magic at the beginning of a file ends in the version of its format.",
    ]
    for title, module in (
        ("The data directory", bridge.streams),
        ("The format, and earlier ones", formats),
        ("Names", layout),
        ("Segments and indexes", segment),
        ("Definitions", meta),
        ("Drops", drops),
        ("Export positions", cursor),
        ("Sessions and retained messages", journal),
        ("Their file", journalfile),
        ("Exported objects", objectkeys),
    ):
        parts += [f"## {title}", f"`{module.__name__}`", _doc(module)]
    reasons = [f"| {reason.value} | {reason.name.lower()} |" for reason in drops.DropReason]
    parts += [
        "## Reasons of drops",
        _prose(inspect.getdoc(drops.DropReason) or ""),
        "| number | reason |\n|---|---|",
    ]
    return "\n\n".join(parts) + "\n" + "\n".join(reasons)


def hooks() -> str:
    """The hooks with their signatures, and what a plugin imports."""
    parts = [
        "# Hooks and plugin API",
        _doc(hookspecs),
        "[Write a plugin](../plugins.md) shows them at work.",
        "## Hooks",
    ]
    source = ast.parse(inspect.getsource(hookspecs))
    for node in source.body:
        if isinstance(node, ast.FunctionDef):
            parts += [f"### {node.name}", _signature(node), _prose(ast.get_docstring(node) or "")]
    parts += ["## What a plugin imports", "All of it from `bridge`."]
    for name in sorted(bridge.__all__, key=str.lower):
        parts += [f"### {name}", *_class(name, getattr(bridge, name))]
    return "\n\n".join(parts)


def _signature(node: ast.FunctionDef) -> str:
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"```python\ndef {node.name}({ast.unparse(node.args)}){returns}\n```"


def _class(name: str, thing: Any) -> Iterator[str]:
    if not inspect.isclass(thing):
        if inspect.isfunction(thing):
            tree = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
            assert isinstance(tree, ast.FunctionDef)
            yield _signature(tree)
            yield _prose(inspect.getdoc(thing) or "")
        else:
            yield {
                "ACCEPTED": "The outcome of a batch all of whose records were accepted.",
                "Bytes": 'The type of a size: bytes, or in the configuration `"64KiB"`.',
                "Millis": 'The type of a duration: milliseconds, or in the configuration `"1.5s"`.',
                "Bucket": "The type of a setting that names an S3 bucket.",
                "Endpoint": "The type of a setting that says where data is sent: an http or https URL.",
                "SecretFile": "The type of a setting that names a file with a secret or a certificate.",
                "hookimpl": "The mark of a hook's implementation: `@hookimpl`.",
            }[name]
        return
    yield _prose(inspect.getdoc(thing) or "")
    source = textwrap.dedent(inspect.getsource(thing))
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    fields = [str(ast.get_source_segment(source, n)) for n in tree.body if isinstance(n, ast.AnnAssign)]
    if fields:
        yield "```python\n" + "\n".join(fields) + "\n```"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            text = " ".join((ast.get_docstring(node) or "").split())
            yield f"`{node.name}({ast.unparse(node.args)})`: {text}"


# -- metrics ---------------------------------------------------------------------------------------------
def metric_list() -> str:
    """The metrics of /metrics."""
    rows = [
        f"| `streambridge_{m.name}` | {m.kind} | {' '.join(f'`{label}`' for label in m.labels)} | {m.help} |"
        for m in metrics.METRICS.values()
    ]
    return "\n\n".join(
        [
            "# Metrics",
            "`GET /metrics` on `[http] listen` gives these in the text format of Prometheus. "
            "[Monitor](../howto/monitoring.md) has a scrape configuration, alerts and a dashboard.",
            "Counters begin at zero when the service starts, unless their text says otherwise. A `reason` "
            "appears with the first message that it counts. `front_end` is the door that clients use, `mqtt` "
            "or `greengrass`. Beside these there are the usual `process_*` metrics: CPU, memory, start, "
            "descriptors.",
            "| metric | type | labels | meaning |\n|---|---|---|---|\n" + "\n".join(rows),
        ]
    )


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / "docs" / path).write_text(text)
