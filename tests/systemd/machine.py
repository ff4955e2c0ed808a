"""A machine of its own for the service: a real systemd as process 1, in a container over this system's files.

The root is an overlay on `/` whose changes are in memory, the network a loopback of its own; mounts and
processes end with the container. Needs root, systemd-nspawn and a kernel that mounts overlays.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 60.0
HIERARCHIES = [path for name in ("systemd", "unified") if (path := Path("/sys/fs/cgroup") / name).is_dir()]
# The machine's directory, its name, and options on what it sees of this one. Where systemd runs already, it
# gives the container a scope; elsewhere the container gets cgroups here, so that two do not share any.
BOOT = """
set -e
mount -t tmpfs tmpfs "$1"; cd "$1"; mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
rm -rf root/etc/machine-id root/etc/streambridge root/opt/streambridge root/var/lib/streambridge
rm -f root/usr/sbin/policy-rc.d # a policy of this system, such as that of .ci/tools, is not the machine's
: >root/etc/machine-id
name=$2
set -- systemd-nspawn --quiet --boot --directory=root --machine="$2" --private-network --link-journal=no \
  --console=pipe $3
if [ ! -d /run/systemd/system ]; then
  mount -t tmpfs tmpfs /run
  for hierarchy in $HIERARCHIES; do echo $$ >"$hierarchy/$name/cgroup.procs"; done
  set -- "$@" --register=no --keep-unit
fi
exec "$@" systemd.unit=basic.target
"""


def why_not() -> str | None:
    """Why this system cannot have such a machine."""
    if os.geteuid() != 0:
        return "only root can boot a container with its own systemd"
    for command, package in (("systemd-nspawn", "systemd-container"), ("dpkg-deb", "dpkg")):
        if shutil.which(command) is None:
            return f"{command} is missing; install it: sudo apt-get install {package}"
    overlay = "mkdir u w m && mount -t overlay o -o lowerdir=/,upperdir=u,workdir=w m"
    attempt = f"mount -t tmpfs t /mnt && cd /mnt && {overlay}"
    tried = subprocess.run(["unshare", "--mount", "sh", "-c", attempt], capture_output=True, text=True)
    return f"this machine mounts no overlay: {tried.stderr.strip()}" if tried.returncode else None


class Machine:
    """A booted machine; commands run in it as root."""

    def __init__(self, directory: Path, binds: dict[Path, str]) -> None:
        self._name = f"streambridge-{os.getpid()}-{time.monotonic_ns()}"
        self._cgroups = [path / self._name for path in HIERARCHIES]
        mounted = directory / "machine"
        mounted.mkdir()
        if not Path("/run/systemd/system").is_dir():
            for path in self._cgroups:
                path.mkdir()
        self.console = directory / "console"
        self._container = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "sh",
                "-c",
                BOOT,
                "sh",
                mounted,
                self._name,
                " ".join(f"--bind-ro={here}:{there}" for here, there in binds.items()),
            ],
            env=os.environ | {"HIERARCHIES": " ".join(map(str, HIERARCHIES))},
            stdin=subprocess.DEVNULL,
            stdout=self.console.open("wb"),
            stderr=subprocess.STDOUT,
        )
        try:
            until("the machine has a process 1", self._init)
            until(
                "it has booted",
                lambda: self.run("systemctl", "is-active", "basic.target", check=False) == "active",
            )
        except BaseException:
            self.close()
            raise

    def _init(self) -> str | None:
        children = Path(f"/proc/{self._container.pid}/task/{self._container.pid}/children")
        assert self._container.poll() is None, self.console.read_text()
        return next((pid for pid in children.read_text().split() if comm(pid) == "systemd"), None)

    def run(self, *command: str | Path, check: bool = True) -> str:
        """Run a command in the machine and return what it prints."""
        done = subprocess.run(
            [*self.inside("--all"), *map(str, command)],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def inside(self, *namespaces: str) -> list[str]:
        """What makes a command of ours run in the machine, or in some of its namespaces only."""
        init = self._init()
        assert init is not None
        return ["nsenter", "--target", init, *namespaces]

    def file(self, path: str) -> Path:
        """A file of the machine, as seen from here; the directory that it is in is made."""
        found = Path(f"/proc/{self._init()}/root") / path.lstrip("/")
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def state(self, name: str, unit: str = "streambridge.service") -> str:
        """A property of a unit."""
        return self.run("systemctl", "show", "--value", "--property", name, unit)

    def log(self, unit: str = "streambridge.service") -> str:
        """What the journal has of a unit."""
        return self.run("journalctl", "--quiet", "--output=cat", "--unit", unit)

    def close(self) -> None:
        """End all of it."""
        init = self._init() if self._container.poll() is None else None
        if init is not None:
            os.kill(int(init), 9)  # the kernel ends all others with it
        else:
            self._container.kill()
        self._container.wait(DEADLINE)
        for top in self._cgroups:
            if top.is_dir():
                for path in sorted(top.rglob("*/"), reverse=True):
                    if path.is_dir():
                        path.rmdir()
                top.rmdir()


def comm(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def until(what: str, condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Wait for something; returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.05)
    return found
