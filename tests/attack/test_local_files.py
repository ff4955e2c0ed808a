"""Attacks by a local user who can put something else where the service looks for its files. 8 s together."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, environment
from tests.http.conftest import eventually

from .conftest import TOKENS, Gateway
from .test_tokens import show


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch(0o600)
    os.truncate(path, 1 << 36)  # 64 GiB, none of them on the disk


@contextmanager
def replaced(path: Path, by: Callable[[Path], None]) -> Iterator[None]:
    kept = path.with_name(f"{path.name}.kept")
    path.rename(kept)
    try:
        by(path)
        yield
    finally:
        path.unlink(missing_ok=True)
        kept.rename(path)


@pytest.mark.parametrize("what", [fifo, endless, huge])
@pytest.mark.parametrize("name", ["users", "keys", "gateway.toml", "gateway.key", "gateway.pem"])
def test_what_is_no_file_of_a_usual_size_stops_no_running_service(
    gateway: Gateway, name: str, what: Callable[[Path], None]
) -> None:
    """A FIFO held up the event loop until somebody wrote to it, and /dev/zero took all memory."""
    path = next(gateway.data.parent.rglob(name))

    def reloaded(good: bool) -> None:
        seen = len(gateway.log())
        gateway.process.send_signal(signal.SIGHUP)
        if good:
            eventually(lambda: "msg=reloaded" in gateway.log()[seen:])
        else:
            eventually(
                lambda: [
                    one
                    for one in gateway.log()[seen:].splitlines()
                    if name in one and ("failed" in one or "its last good content stays" in one)
                ]
            )

    with replaced(path, what):
        reloaded(good=False)
        gateway.device.next()
    reloaded(good=True)


@pytest.mark.parametrize("what", [fifo, endless, huge])
def test_a_token_stays_right_while_its_file_cannot_be_read_and_the_service_runs(
    gateway: Gateway, what: Callable[[Path], None]
) -> None:
    with replaced(gateway.data.parent / "tokens", what):
        assert show(gateway, TOKENS["pump-8"])[1], "the last good content holds"
        gateway.device.next()
    assert show(gateway, TOKENS["pump-8"])[1]


@pytest.mark.parametrize("what", [fifo, endless, huge])
def test_a_start_with_no_file_of_a_usual_size_says_so(tmp_path: Path, what: Callable[[Path], None]) -> None:
    what(tmp_path / "x.toml")
    done = subprocess.run(
        [*COMMAND, "run", "-c", str(tmp_path / "x.toml")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode > 0
    assert "cannot be read: " in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_service_makes_is_its_own_whatever_the_umask_is(tmp_path: Path) -> None:
    config = '[gateway]\nid = "g"\ndata_dir = "a/b/data"\nmemory_dir = "c/memory"\n'
    for name in ("mqtt", "greengrass", "http"):
        listen = '["tcp://127.0.0.1:0"]' if name == "mqtt" else '""'
        config += f"[{name}]\nlisten = {listen}\n"
    (tmp_path / "g.toml").write_text(config + '[streams.s]\ntopics = ["s/#"]\n')
    (tmp_path / "g.toml").chmod(0o600)
    with (tmp_path / "log").open("w") as log:
        os.fchmod(log.fileno(), 0o600)
        process = subprocess.Popen(
            [*COMMAND, "run", "-c", str(tmp_path / "g.toml")], env=environment(), stderr=log, umask=0
        )
    try:
        eventually(lambda: "msg=ready" in (tmp_path / "log").read_text())
    finally:
        process.terminate()
        assert process.wait(60) == 0
    made = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    assert {"b", "data", "streams", "c"} <= {path.name for path in made}
    open_to_others = [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not open_to_others


def test_check_names_a_data_directory_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o775)
    (tmp_path / "g.toml").write_text('[gateway]\nid = "g"\ndata_dir = "data"\n')
    done = subprocess.run(
        [*COMMAND, "check", "-c", str(tmp_path / "g.toml")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    said = " ".join(done.stdout.split()) + " ".join(done.stderr.split())
    assert "users other than its owner can write to" in said, said
