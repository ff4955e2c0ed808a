"""The commands for the service itself: run, check, install-service, hash-password."""

from __future__ import annotations

from typing import Annotated

import typer

from bridge.cli import output, users
from bridge.cli.install import install_service
from bridge.cli.options import ConfigOption, JsonOption, find_credentials
from bridge.config.settings import DEFAULT_CONFIG
from bridge.units import parse_rate, parse_size

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
  streambridge check --rate 50/s --message 1kB
  streambridge check --connect
"""
)
def check(
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
    rate: Annotated[
        str, typer.Option("--rate", metavar="RATE", help="Messages of each stream, such as 10/s or 600/h.")
    ] = "10/s",
    message: Annotated[
        str, typer.Option("--message", metavar="SIZE", help="The size of a message, such as 200B or 1kB.")
    ] = "200B",
    connect: Annotated[
        bool, typer.Option("--connect", help="Try every destination with a call that changes nothing.")
    ] = False,
) -> None:
    """Check the configuration and this machine.

    Reports every mistake in the configuration, and problems with ports, directories, disk space, memory,
    plugins, certificates, secrets and credentials, each with its position and what to do. The exit code is 0
    if there are only warnings. Also says what each stream does at a power cut, when it is full, and on a day
    without the link at --rate. With --connect, tries the destination of every export, with its credentials,
    and says what it could do; the exit code is 1 if one of them fails.
    """
    from bridge.config.checks import examine
    from bridge.config.checks.connect import connect as try_destinations
    from bridge.config.checks.outlook import outlook
    from bridge.streams.store import running

    try:
        number, size = parse_rate(rate), parse_size(message)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    find_credentials()
    settings, findings = examine(config)
    if (process := running(settings.gateway.data_dir)) is not None:
        output.note(
            f"note: the service is running on {settings.gateway.data_dir} (process {process or 'unknown'}); "
            "the addresses it listens on are not tried"
        )
    failed = any(finding.level == "error" for finding in findings)
    interval = settings.gateway.sync_interval
    streams = [outlook(stream, number, size, interval) for stream in settings.streams.values()]
    tried = try_destinations(config, settings) if connect else []
    if as_json:
        more = {"destinations": tried} if connect else {}
        output.json({"ok": not failed, "findings": findings, "streams": streams, **more})
    else:
        for finding in findings:
            output.echo(f": {finding.what}", title=finding.level)
        if streams:
            output.echo(f"with {rate} of {message} in each stream (--rate, --message):")
        for stream in streams:
            outage = f"; {stream.outage}" if stream.outage else ""
            costs = f"a power cut costs {stream.power_cut}"
            output.echo(f": {costs}; when full, {stream.when_full}{outage}", title=f"  {stream.name}")
        for one in tried:
            level = "error" if one.ok is False else "ok" if one.ok else "not known"
            output.echo(f": export {one.export} of stream {one.stream} ({one.kind}): {one.what}", title=level)
        if not failed:
            exports = sum(len(e) for s in settings.streams.values() for e in s.export_definition.values())
            declared = f"{output.count(len(settings.streams), 'stream')}, {output.count(exports, 'export')}"
            output.echo(f"{config}: ok ({declared}, {output.count(len(findings), 'warning')})")
    if failed:
        raise typer.Exit(output.ExitCode.CONFIG)
    unreached = any(one.ok is False for one in tried)
    raise typer.Exit(output.ExitCode.FAILED if unreached else output.ExitCode.OK)


app.command("install-service")(install_service)


app.command(
    "hash-password",
    epilog="""\b
Examples:
  (umask 077; streambridge hash-password thermometer-1 >>users)
""",
)(users.hash_command)
