"""`streambridge install-service`: put the unit, its user and a first configuration in place.

Running it again updates the units and leaves the configuration alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bridge.cli.common import echo
from bridge.errors import ConfigError
from bridge.plugins import shipped

UNITS = ("streambridge.service", "streambridge-ingest.service", "streambridge-ingest.timer")
_PLACEHOLDER = "/opt/streambridge/bin/streambridge"
# ProtectHome= and the service's user keep it out of these.
_CLOSED = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - named to be refused
_LOCAL_DATA = 'data_dir = "data"\n#data_dir = "/var/lib/streambridge"\n'


def install_service(
    root: Annotated[
        Path, typer.Option("--root", metavar="DIRECTORY", help="Only write the files, below this directory.")
    ] = Path("/"),
) -> None:
    """Install and start the systemd service.

    Brings its user and a first configuration. Needs root. Running it again updates the units and leaves
    the configuration alone.
    """
    command = Path(sys.prefix).absolute() / "bin" / "streambridge"
    alone = root != Path("/")
    if not alone:
        _check(command)
    units = shipped("systemd")
    for unit in UNITS:
        text = (units / unit).read_text().replace(_PLACEHOLDER, str(command))
        _write(root / "etc/systemd/system" / unit, text)
    for kind in ("sysusers", "tmpfiles"):
        text = (units / f"streambridge.{kind}").read_text()
        _write(root / f"etc/{kind}.d" / "streambridge.conf", text)
    target = root / "etc/streambridge/streambridge.toml"
    if target.exists():
        echo(f"kept {target}")
    else:
        _write(target, service_config())
    _link(root / "usr/local/bin/streambridge", command)
    if alone:
        return
    _run("systemd-sysusers", "/etc/sysusers.d/streambridge.conf")
    _run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/streambridge.conf")
    if not Path("/run/systemd/system").is_dir():
        echo("systemd does not run here: start it by `streambridge run`, as user streambridge")
        return
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", "streambridge.service")
    _run("systemctl", "restart", "streambridge.service")
    echo("`systemctl status streambridge` and `journalctl -u streambridge` show how it is")


def service_config() -> str:
    """The sample configuration with its data where the unit allows it."""
    text = (shipped("config") / "streambridge.toml").read_text()
    return text.replace(_LOCAL_DATA, 'data_dir = "/var/lib/streambridge"\n')


def _check(command: Path) -> None:
    """Whether the service's user will be able to run the command, and we may install it."""
    if not command.is_file():
        raise ConfigError(f"{command} is not there; install with pip first: pip install streambridge")
    closed = [place for place in (sys.prefix, sys.base_prefix) if f"{place}/".startswith(_CLOSED)]
    if closed:
        raise ConfigError(
            f"the service may not look into {closed[0]}; install for the whole machine: "
            "`python3 -m venv /opt/streambridge && /opt/streambridge/bin/pip install streambridge`, then "
            "`/opt/streambridge/bin/streambridge install-service`"
        )
    if os.geteuid() != 0:
        raise ConfigError(f"only root can install a service; run `sudo {command} install-service`")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    echo(f"wrote {path}")


def _link(link: Path, command: Path) -> None:
    """Have the command found without its whole path, also by sudo."""
    if link == command:
        return
    if link.exists() and not link.is_symlink():
        echo(f"kept {link}, which is another one; the service's is {command}")
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(command)
    echo(f"linked {link} to {command}")


def _run(*command: str) -> None:
    echo(f"running {' '.join(command)}")
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{command[0]} failed ({error.returncode}); its message is above") from None
