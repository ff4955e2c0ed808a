"""The command `streambridge`, also as `python -m bridge`.

The service runs for months on a small machine, so it starts without the command line: typer, rich and the
other commands would take 7 MiB of its memory, and more than half of the CPU time of its start. All that is
not a plain `run` goes to `bridge.cli`: other commands, help, and mistakes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path


def configuration(words: Sequence[str]) -> Path | None:
    """The configuration of a plain `run`; None if the command line is to look at these arguments."""
    from bridge.config.settings import DEFAULT_CONFIG

    match words:
        case ["run"]:
            return Path(os.environ.get("STREAMBRIDGE_CONFIG") or DEFAULT_CONFIG)
        case ["run", "-c" | "--config", file] if file and not file.startswith("-"):
            return Path(file)
    return None


def main() -> None:
    """Run the service or another command, and exit."""
    if sys.argv[1:2] == ["run"] and (config := configuration(sys.argv[1:])) is not None:
        from bridge.service import service

        try:
            service.start(config)
        except (Exception, KeyboardInterrupt) as error:
            from bridge.cli import fail

            fail(error)
    else:
        from bridge.cli import main as command

        command()


if __name__ == "__main__":
    main()
