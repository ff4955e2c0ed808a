"""What `streambridge check` looks at beyond the text of the configuration.

`examine` reads the configuration and looks at this machine: ports, directories, disk room, streams,
plugins, certificates, secrets, credentials. An *error* keeps the service, or a part of it, from working; a
*warning* will sooner or later. Nothing is changed. Of other machines only the destinations that the
configuration names are connected to, to see whether they speak TLS, and the instance's metadata service, if
AWS is told to ask there for credentials. One that cannot be reached is no finding.

All is found in one run: a mistake hides nothing but what depends on that very key.
"""

from __future__ import annotations

from pathlib import Path

from bridge.config import tomlfile
from bridge.config.checks import files, network, streams
from bridge.config.checks.look import Finding, Look
from bridge.config.settings import Config, understand

PARTS = (
    network.listeners,
    network.unused,
    network.exposure,
    network.destinations,
    network.client_ids,
    files.directories,
    files.closed_streams,
    streams.room,
    streams.loaded_plugins,
    streams.streams,
    streams.stopped,
    streams.refused_messages,
    files.secrets,
    files.certificates,
    files.rules,
    streams.aws_names,
    streams.credentials,
)


def examine(path: Path) -> tuple[Config, list[Finding]]:
    """Examine a configuration and the machine that it is for."""
    document = tomlfile.read(path)
    settings, reader = understand(document)
    look = Look(settings, document, reader.broken)
    found = [Finding("error", line) for problem in reader.problems for line in problem.splitlines()]
    for part in PARTS:
        found += part(look)
    return settings, found


def hindrances(path: Path, settings: Config) -> list[str]:
    """What a sound configuration cannot have on this machine and not run without: addresses, directories."""
    look = Look(settings, tomlfile.read(path))
    return [finding.what for part in (network.listeners, files.directories) for finding in part(look)]
