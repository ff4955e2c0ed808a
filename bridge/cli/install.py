"""`streambridge install-service`: install the systemd unit, its user and a first configuration.

Running it again updates the units and keeps the configuration.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from bridge.cli import output
from bridge.errors import ConfigError
from bridge.plugin.discovery import shipped

UNITS = ("streambridge.service", "streambridge-ingest.service", "streambridge-ingest.timer")
CONFIG = "etc/streambridge/streambridge.toml"
TOKEN = "etc/streambridge/greengrass-token"  # noqa: S105 - where it is
_PLACEHOLDER = "/opt/streambridge/bin/streambridge"
# The service cannot read these because of ProtectHome= and its user.
_CLOSED = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # noqa: S108 - named to be refused
_WHEEL = "pip install ./streambridge-*-py3-none-any.whl"  # it is on no package index
_EXAMPLE_TOKEN = f'# Example: token_file = "/{TOKEN}"'
_LOCAL_DATA = 'data_dir = "data"\n#data_dir = "/var/lib/streambridge"\n'


def install_service(
    root: Annotated[
        Path, typer.Option("--root", metavar="DIRECTORY", help="Only write the files below this directory.")
    ] = Path("/"),
) -> None:
    """Install and start the systemd service.

    Creates its user, a first configuration and a token for clients of port 8088. Needs root. Running it again
    updates the units and keeps the configuration and the token.
    """
    command = Path(sys.prefix).absolute() / "bin" / "streambridge"
    alone = root != Path("/")
    if not alone:
        _check(command)
    units, files = shipped("systemd"), _Root(root)
    for unit in UNITS:
        text = (units / unit).read_text().replace(_PLACEHOLDER, str(command))
        files.write(f"etc/systemd/system/{unit}", text)
    for kind in ("sysusers", "tmpfiles"):
        files.write(f"etc/{kind}.d/streambridge.conf", (units / f"streambridge.{kind}").read_text())
    if files.has(CONFIG):
        output.echo(f"kept {root / CONFIG}")
    else:
        files.write(CONFIG, service_config())
    if files.has(TOKEN):
        output.echo(f"kept {root / TOKEN}")
    else:
        # systemd-tmpfiles lets the service read it.
        files.write(TOKEN, secrets.token_urlsafe(32) + "\n", 0o600)
    files.link("usr/local/bin/streambridge", command)
    if alone:
        return
    _run("systemd-sysusers", "/etc/sysusers.d/streambridge.conf")
    _run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/streambridge.conf")
    if not Path("/run/systemd/system").is_dir():
        output.echo("systemd is not running here; run `streambridge run` as user streambridge")
        return
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", "streambridge.service")
    _run("systemctl", "restart", "streambridge.service")
    output.echo("`systemctl status streambridge` and `journalctl -u streambridge` show its state")


def service_config() -> str:
    """The sample configuration, with the data directory of the unit and the token file."""
    text = (shipped("config") / "streambridge.toml").read_text()
    text = text.replace(_EXAMPLE_TOKEN, _EXAMPLE_TOKEN.removeprefix("# Example: "))
    return text.replace(_LOCAL_DATA, 'data_dir = "/var/lib/streambridge"\n')


def _check(command: Path) -> None:
    """Check that we may install, and that the service's user can run the command."""
    if not command.is_file():
        raise ConfigError(f"{command} does not exist; install the wheel first: {_WHEEL}")
    closed = [place for place in (sys.prefix, sys.base_prefix) if f"{place}/".startswith(_CLOSED)]
    if closed:
        raise ConfigError(
            f"the service may not read {closed[0]}; install for the whole machine: "
            f"`python3 -m venv /opt/streambridge && /opt/streambridge/bin/{_WHEEL}`, then "
            "`/opt/streambridge/bin/streambridge install-service`"
        )
    if os.geteuid() != 0:
        raise ConfigError(f"only root can install a service; run `sudo {command} install-service`")


class _Root:
    """The root directory of the files. Below a directory given by --root, no symbolic link is followed.

    Such a directory may belong to another user, for example an image or a mounted system. A link in it must
    not redirect files that root writes. Links below the system's own `/` are followed.
    """

    def __init__(self, root: Path) -> None:
        self.path = root
        self._flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if root != Path("/"):
            self._flags |= os.O_NOFOLLOW

    def write(self, place: str, text: str, mode: int = 0o644) -> None:
        """Write a file atomically."""
        path = self.path / place
        with self._directory(path) as directory:
            found = _kind(path.name, directory)
            if found == stat.S_IFLNK and os.readlink(path.name, dir_fd=directory) == os.devnull:
                raise ConfigError(
                    f"{path}: the unit is masked, as a removed Debian package leaves it; run `systemctl "
                    f"unmask {path.name}`, then this again"
                )
            if found not in (None, stat.S_IFREG):
                raise ConfigError(f"{path}: this is a link or another special file; remove it")
            new = f".{path.name}.new"
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=directory)  # left by an interrupted attempt
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(fd, mode)
            os.rename(new, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        output.echo(f"wrote {path}")

    def has(self, place: str) -> bool:
        """Return whether a path exists, even as a dangling link."""
        path = self.path / place
        with self._directory(path) as directory:
            return _kind(path.name, directory) is not None

    def link(self, place: str, command: Path) -> None:
        """Link the command into a directory that is on $PATH, also under sudo."""
        path = self.path / place
        if path == command:
            return
        with self._directory(path) as directory:
            if _kind(path.name, directory) not in (None, stat.S_IFLNK):
                output.echo(f"kept {path}, which is another command; the service uses {command}")
                return
            with suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=directory)
            os.symlink(command, path.name, dir_fd=directory)
        output.echo(f"linked {path} to {command}")

    @contextmanager
    def _directory(self, path: Path) -> Iterator[int]:
        """Open the directory of a file, and create it if it is missing."""
        self.path.mkdir(parents=True, exist_ok=True)
        # The directory that was given may itself be a link.
        here = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in path.parent.relative_to(self.path).parts:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=here)
                try:
                    below = os.open(name, self._flags, dir_fd=here)
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                    raise ConfigError(
                        f"{path}: its part {name} is a symbolic link or a file, not a directory; remove it"
                    ) from None
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)


def _kind(name: str, directory: int) -> int | None:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _run(*command: str) -> None:
    output.echo(f"running {' '.join(command)}")
    try:
        subprocess.run(command, check=True)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{command[0]} failed ({error.returncode}); see its message above") from None
