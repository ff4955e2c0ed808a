"""The command on a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.cli.conftest import CHECKOUT, environment


class Terminal:
    """A process on a pseudo-terminal; `seen` is what it has printed."""

    def __init__(self, command: Sequence[str | Path], columns: int = 100) -> None:
        self.seen = ""
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        kept = {key: value for key, value in environment().items() if key not in ("COLUMNS", "LINES")}
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            cwd=CHECKOUT,
            env=kept | {"TERM": "xterm", "NO_COLOR": "1"},
        )
        os.close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        """Type as a person would; the terminal's echo is the process's affair."""
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until this text was printed after what was waited for before."""
        until = time.monotonic() + 60
        start = len(self.seen)
        while text not in self.seen[max(0, start - len(text)) :] and text not in self.seen[start:]:
            assert time.monotonic() < until, self.seen
            if not self._read():
                break
        assert text in self.seen, self.seen

    def end(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        return self._process.wait(60)

    def _read(self) -> bool:
        """Read what comes next, within a minute; returns whether there was anything."""
        if not select.select([self._fd], [], [], 60)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
