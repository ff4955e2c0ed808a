"""`streambridge plugins`: list the plugins, and create the package of a new one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from bridge.cli import output, skeleton
from bridge.cli.options import ConfigOption, JsonOption
from bridge.cli.plain import ListsByDefault
from bridge.config.settings import DEFAULT_CONFIG, Config, load
from bridge.errors import PluginError
from bridge.plugin import discovery

app = typer.Typer(
    help="List the plugins, or create the package of a new one.", cls=ListsByDefault, rich_markup_mode=None
)


@app.command(
    "list",
    epilog="""\b
Examples:
  streambridge plugins
  streambridge plugins -c gateway.toml --json
""",
)
def list_command(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the plugins. This is the default.

    Shows where each plugin comes from and which kinds of exports it serves, or why it could not be loaded.
    """
    output.behave_in_pipes()
    # The shipped plugins can be listed before there is a configuration.
    settings = load(config) if config != DEFAULT_CONFIG or config.exists() else Config()
    found = discovery.load(settings.export.plugin_dirs).found
    if as_json:
        output.json(found)
        return
    output.table(
        ["PLUGIN", "VERSION", "FROM", "EXPORTS TO", "STATUS"],
        [
            [
                plugin.name,
                plugin.version or "-",
                plugin.origin,
                " ".join(plugin.kinds) or "-",
                "loaded" if plugin.error is None else f"failed: {plugin.error}",
            ]
            for plugin in found
        ],
    )


@app.command(
    epilog="""\b
Examples:
  streambridge plugins new kafka
  cd streambridge-kafka && python -m pytest
"""
)
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and single hyphens: kafka.")
    ],
    directory: Annotated[
        Path, typer.Option("--in", metavar="DIRECTORY", help="Where to create the package.")
    ] = Path(),
) -> None:
    """Create the package of a new exporter plugin: streambridge-NAME.

    It has a working exporter that writes to a file, and tests that inherit the contract suite and pass.
    Replace the file with your destination, and keep the tests.
    """
    _check_name(name)
    target = directory / f"streambridge-{name}"
    if not directory.is_dir():
        raise PluginError(f"there is no directory {directory}; create it, or correct --in")
    if target.exists():
        raise PluginError(f"{target} exists; choose another name, or another directory with --in")
    for path, text in skeleton.files(name).items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    output.echo(f"created {target}; next:")
    output.echo(f"  cd {target}")
    output.echo(f"  {sys.executable} -m pip install -e '.[test]'")
    output.echo(f"  {sys.executable} -m pytest")


def _check_name(name: str) -> None:
    """Raise PluginError for a name that no package, module or kind can have."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or len(name) > 40:
        raise PluginError(
            f"{name!r} cannot be a plugin's name; use lower-case letters, digits and single hyphens, "
            "beginning with a letter, 40 characters at most, such as kafka"
        )
    kind, registry = skeleton.kind_of(name), discovery.load()
    if kind in registry.exporters or kind in {found.name for found in registry.found}:
        raise PluginError(f"{name!r} is taken, as `streambridge plugins` shows; choose another name")
