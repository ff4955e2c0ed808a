"""`streambridge support`: one archive for those who are asked for help, without secrets or messages.

    README.txt        what the archive contains, and what was removed
    versions.json     this program, Python, the machine, and the packages
    config.json       the configuration with its fragments; see `scrub` for what is removed
    check.txt         what `streambridge check` finds
    streams.json      each stream: definition, contents, and the statuses of its exports
    verify.txt        the summary of `streambridge verify`
    metrics.txt       the metrics, if the service runs
    log.txt           the last lines of the service's log, if journald has it

If a part cannot be produced, its file says why.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bridge.cli import output
from bridge.cli.lookup import describe_stream
from bridge.cli.operate import statuses
from bridge.cli.options import ConfigOption, data_directory
from bridge.cli.scrub import Scrubber, secret_files, secret_files_in
from bridge.config import tomlfile
from bridge.config.settings import DEFAULT_CONFIG, Config, understand
from bridge.errors import StreamBridgeError
from bridge.streams import verify as integrity
from bridge.streams.reader import list_damaged, list_streams
from bridge.streams.store import is_running

UNIT = "streambridge.service"
ENVIRONMENT = "environment"  # the environment file of the unit, beside the configuration
TIMEOUT = 30.0  # seconds to wait for another program, or for a reply of the service
README = """\
Made by `streambridge support` at {time} on {host}.

Messages are not in here. Removed from all files: the content of files that hold secrets, environment
variables of streambridge, texts of the configuration that are not known to be harmless (also user names,
descriptions and tags), URLs beyond their host, and whatever looks like a password, token or key. Names of
streams, topics, exports, hosts and paths are here. Read the files before you give them away.
"""


def support(
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the archive here; the file must not exist.",
            show_default="streambridge-support-TIME.tar.gz",
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", min=0, metavar="NUMBER", help="Include this many lines of the log.")
    ] = 2000,
    check_messages: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read and check all stored messages.")
    ] = True,
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Collect diagnostic data for a support request, without secrets or messages.

    The archive contains versions, the configuration, findings of `check` and `verify`, the state of streams
    and exports, metrics and the last lines of the log. The service may be running.
    """
    now = time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime())
    path = target if target is not None else Path(f"streambridge-support-{now}.tar.gz")
    if path.exists():
        raise StreamBridgeError(f"{path}: this file exists; choose another one with --output")
    files = _files(config, lines, check_messages=check_messages)
    readme = README.format(time=now, host=platform.node())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in {"README.txt": readme, **files}.items():
            data = text.encode(errors="backslashreplace")
            entry = tarfile.TarInfo(f"streambridge-support/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    output.echo(f"wrote {path}")
    output.note("note: read the archive before you send it; its README.txt lists what was removed")


def _files(config: Path, lines: int, *, check_messages: bool) -> dict[str, str]:
    """Return the files of the archive, without secrets."""
    base = config.absolute().parent
    scrubber = Scrubber(base)
    document: Mapping[str, Any] = {}
    settings = Config()
    problem = ""
    try:
        read = tomlfile.read(config)
        document = read.data
        settings = understand(read, dict)[0]
    except Exception as error:
        problem = f"{config}: {error}\n"
    # From the texts too, because of a file that is not valid TOML nothing is in the document.
    texts = "\n".join(map(_text_of, tomlfile.files_at(config)))
    for secret in (base / ENVIRONMENT, *secret_files(document, base), *secret_files_in(texts, base)):
        scrubber.learn_file(secret)
    cleaned = scrubber.settings(document)
    data_dir = settings.gateway.data_dir

    def streams() -> Any:
        directory = data_directory(config, data_dir)
        found = [
            msgspec.to_builtins(
                describe_stream(directory, meta, statuses(directory, meta.name)), enc_hook=str
            )
            for meta in list_streams(directory)
        ]
        for info in found:
            for secret in secret_files(info["definition"], base):
                scrubber.learn_file(secret)
            info["definition"] = scrubber.settings(info["definition"])
        return {
            "running": is_running(directory),
            "damaged": list_damaged(directory),
            "streams": found,
        }

    parts: dict[str, Callable[[], Any]] = {
        "versions.json": lambda: _versions(data_dir),
        "config.json": lambda: problem or cleaned,
        "check.txt": lambda: _command("check", "-c", str(config)),
        "streams.json": streams,
        "verify.txt": lambda: _verified(data_dir) if check_messages else "left out (--no-verify)\n",
        "metrics.txt": lambda: _metrics(settings),
        "log.txt": lambda: _log(lines),
    }
    found: dict[str, Any] = {}
    for name, make in parts.items():
        try:
            found[name] = make()
        except Exception as error:  # the other parts may still help
            found[name] = f"cannot be made: {type(error).__name__}: {error}\n"
    # Done last, so that a secret found in one part is removed from all.
    cleaned_parts = ((name, scrubber.tree(value)) for name, value in found.items())
    return {
        name: value if isinstance(value, str) else json.dumps(value, indent=2, default=str) + "\n"
        for name, value in cleaned_parts
    }


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _versions(data_dir: Path) -> dict[str, Any]:
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    there = next(place for place in (data_dir, *data_dir.absolute().parents) if place.exists())
    space = shutil.disk_usage(there)
    return {
        "streambridge": packages.get("streambridge", "checkout"),
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "os": platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {},
        "processors": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "disk": {"size": space.total, "free": space.free},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "packages": dict(sorted(packages.items())),
    }


def _command(*arguments: str) -> str:
    """Return the output of one of our own commands."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "bridge", *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
        stdin=subprocess.DEVNULL,
        check=False,
        env=_environment(),
    )
    return f"{done.stdout}{done.stderr}exit code {done.returncode}\n"


def _environment() -> dict[str, str]:
    """Return this process's environment, with this package first on PYTHONPATH."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}


def _verified(data_dir: Path) -> str:
    text = ""
    for checked in integrity.verify(data_dir):
        problems = [f"  {one.path}: {one.what}\n" for one in checked.problems]
        text += (
            f"{checked.name}: {checked.messages} messages ({checked.oldest} to {checked.newest}), "
            f"{checked.segments} segments, {checked.total_bytes} bytes, {len(problems)} problems\n"
            + "".join(problems)
        )
        text += f"  lost to earlier damage: {checked.lost}\n" if checked.lost else ""
        text += "".join(f"  quarantined: {name}\n" for name in checked.quarantined)
    return text or "no streams\n"


def _metrics(settings: Config) -> str:
    if not settings.http.listen:
        return "[http] listen is empty\n"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{settings.http.listen}/metrics", timeout=TIMEOUT) as answer:
        text: str = answer.read().decode(errors="replace")
    return text


def _log(lines: int) -> str:
    if shutil.which("journalctl") is None:
        return "there is no journalctl here\n"
    done = subprocess.run(
        ["journalctl", "--unit", UNIT, "--lines", str(lines), "--no-pager", "--output", "short-iso"],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
        check=False,
    )
    return done.stdout + done.stderr
