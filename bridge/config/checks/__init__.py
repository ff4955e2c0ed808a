"""What `streambridge check` examines beyond the text of the configuration.

`examine` reads the configuration and examines this machine: ports, directories, disk space, streams, plugins,
certificates, secrets, credentials. An *error* keeps the service, or a part of it, from working. A *warning*
will sooner or later cause trouble. Nothing is changed.

The only connections to other machines are those to the configured destinations, to see whether they speak
TLS, and to the instance's metadata service, if AWS credentials come from there. An unreachable machine is no
finding.

One run finds everything: a mistake hides only what depends on its own key. Findings are in the order of the
files and their lines; those that are in no file come last.
"""

from __future__ import annotations

import re
from pathlib import Path

from bridge.config import tomlfile
from bridge.config.checks import files, memory, network, streams, upstreams
from bridge.config.checks.context import CheckContext, Finding, finding
from bridge.config.settings import Config, understand
from bridge.config.tomlfile import Position

CHECKS = (
    network.listeners,
    network.unused,
    network.exposure,
    network.local_clients,
    network.unencrypted,
    network.proxies,
    network.certificates_of_users,
    network.destinations,
    network.former_names,
    network.secrets_in_urls,
    network.client_ids,
    network.shared_client_ids,
    files.directories,
    files.audit_log,
    files.auth_plugins,
    files.closed_streams,
    streams.room,
    memory.memory,
    streams.loaded_plugins,
    streams.streams,
    streams.places,
    streams.stopped,
    streams.refused_messages,
    streams.publishers,
    streams.encrypted,
    upstreams.upstreams,
    upstreams.loops,
    files.secrets,
    files.closed_files,
    files.certificates,
    files.rules,
    streams.aws_names,
    streams.credentials,
)

REMOTE = (network.destinations, streams.credentials)  # they connect to other machines


def examine(path: Path, *, remote: bool = True) -> tuple[Config, list[Finding]]:
    """Examine a configuration and the machine that it is for; `remote`: and other machines."""
    document = tomlfile.read(path)
    settings, reader = understand(document)
    context = CheckContext(settings, document, reader.broken)
    found = [finding("error", problem) for problem in reader.problems]
    for check in CHECKS:
        if remote or check not in REMOTE:
            found += check(context)

    def order(one: Finding) -> tuple[object, ...]:
        place = None if one.file is None else document.order(Position(one.file, one.line or 0))
        return place is None, place

    return settings, sorted(found, key=order)


def blockers(path: Path, settings: Config) -> list[str]:
    """What keeps the service from starting on this machine: addresses and directories that it cannot use."""
    context = CheckContext(settings, tomlfile.read(path))
    found = (one for check in (network.listeners, files.directories) for one in check(context))
    return [one.what for one in found if one.level == "error"]


def all_mistakes(path: Path, first: str) -> list[str]:
    """Everything that keeps the service from working, after it has stopped at `first`, one or more lines.

    A line of `first` is left out if a check says the same, or names the same key or file.
    """
    found = [one.what for one in examine(path, remote=False)[1] if one.level == "error"]

    def is_said(line: str) -> bool:
        named = re.split("[ :]", line)[0]  # such as mqtt.users_file
        is_name = "." in named or "/" in named
        return line in found or (is_name and any(f" {named}" in what for what in found))

    return [*(line for line in first.splitlines() if not is_said(line)), *found]
