"""The commands around the service itself: run, check, plugins."""

from __future__ import annotations

import os

import typer

from bridge.cli.common import (
    DEFAULT_CONFIG,
    ConfigOption,
    ExitCode,
    JsonOption,
    behave_in_pipes,
    count,
    echo,
    load_config,
    print_json,
    print_table,
)
from bridge.cli.install import install_service
from bridge.config.settings import Config, load
from bridge.errors import ConfigError
from bridge.plugin.discovery import load as load_plugins


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    app.command(epilog=_RUN)(run)
    app.command(epilog=_CHECK)(check)
    app.command()(plugins)
    app.command("install-service")(install_service)


_RUN = """\b
Examples:
  streambridge run -c config/streambridge.toml
  STREAMBRIDGE_CONFIG=/etc/streambridge/streambridge.toml streambridge run

\b
Signals:
  SIGTERM, SIGINT  stop: finish what is acknowledged, then exit 0
  SIGHUP           check the configuration and take it over
"""


def run(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Run the service until SIGTERM or Ctrl-C."""
    settings = load_config(config)
    # The broker and its dependencies; the other commands need none of them.
    from bridge.config.checks import blockers
    from bridge.service import service

    if problems := blockers(config, settings):  # before anything is made
        raise ConfigError("\n".join(problems))
    service.run(settings)


_CREDENTIALS = ("/run/credentials/streambridge.service", "/etc/credstore")
_CHECK = """\b
Examples:
  streambridge check -c config/streambridge.toml
  streambridge check --json | jq -r '.findings[].what'
"""


def check(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Say what is wrong with configuration or machine.

    Every finding has its place and a remedy. Looks at the whole configuration, ports, directories, disk
    room, plugins, certificates, secrets and credentials. Warnings leave the exit code at 0.
    """
    from bridge.config.checks import examine

    if "CREDENTIALS_DIRECTORY" not in os.environ:  # the unit has it; here, look where its content comes from
        there = next((path for path in _CREDENTIALS if os.path.isdir(path)), _CREDENTIALS[-1])  # noqa: PTH112 - never raises
        os.environ["CREDENTIALS_DIRECTORY"] = there
    settings, findings = examine(config)
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": findings})
    else:
        for finding in findings:
            echo(f": {finding.what}", title=finding.level)
        if not failed:
            exports = sum(len(e) for s in settings.streams.values() for e in s.export_definition.values())
            told = (count(len(settings.streams), "stream"), count(exports, "export"))
            echo(f"{config}: ok ({', '.join(told)}, {count(len(findings), 'warning')})")
    raise typer.Exit(ExitCode.CONFIG if failed else ExitCode.OK)


def plugins(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the plugins that are found.

    Says where each comes from, what it exports to, and what is wrong with one that fails.
    """
    behave_in_pipes()
    # The shipped plugins are worth listing before there is any configuration.
    settings = load(config) if config != DEFAULT_CONFIG or config.exists() else Config()
    found = load_plugins(settings.export.plugin_dirs).found
    if as_json:
        print_json(found)
        return
    print_table(
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
