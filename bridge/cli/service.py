"""The commands for the service itself: run, check, install-service, hash-password."""

from __future__ import annotations

import typer

from bridge.cli import output, users
from bridge.cli.install import install_service
from bridge.cli.options import ConfigOption, JsonOption, find_credentials
from bridge.config.settings import DEFAULT_CONFIG

app = typer.Typer()


@app.command(
    epilog="""\b
Examples:
  streambridge run -c config/streambridge.toml
  STREAMBRIDGE_CONFIG=/etc/streambridge/streambridge.toml streambridge run

\b
Signals:
  SIGTERM, SIGINT  stop: store and acknowledge received messages, then exit 0
  SIGHUP           check the configuration and apply it
"""
)
def run(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Run the service until SIGTERM or Ctrl-C."""
    # Imported here because the other commands do not need the broker and its dependencies.
    from bridge.service import service

    service.start(config)


@app.command(
    epilog="""\b
Examples:
  streambridge check -c config/streambridge.toml
  streambridge check --json | jq -r '.findings[].what'
"""
)
def check(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Check the configuration and this machine.

    Reports every mistake in the configuration, and problems with ports, directories, disk space, memory,
    plugins, certificates, secrets and credentials, each with its position and what to do. The exit code is 0
    if there are only warnings.
    """
    from bridge.config.checks import examine
    from bridge.streams.store import running

    find_credentials()
    settings, findings = examine(config)
    if (process := running(settings.gateway.data_dir)) is not None:
        output.note(
            f"note: the service is running on {settings.gateway.data_dir} (process {process or 'unknown'}); "
            "the addresses it listens on are not tried"
        )
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        output.json({"ok": not failed, "findings": findings})
    else:
        for finding in findings:
            output.echo(f": {finding.what}", title=finding.level)
        if not failed:
            exports = sum(len(e) for s in settings.streams.values() for e in s.export_definition.values())
            declared = f"{output.count(len(settings.streams), 'stream')}, {output.count(exports, 'export')}"
            output.echo(f"{config}: ok ({declared}, {output.count(len(findings), 'warning')})")
    raise typer.Exit(output.ExitCode.CONFIG if failed else output.ExitCode.OK)


app.command("install-service")(install_service)


app.command(
    "hash-password",
    epilog="""\b
Examples:
  (umask 077; streambridge hash-password thermometer-1 >>users)
""",
)(users.hash_command)
