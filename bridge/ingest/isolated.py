"""Reads objects one by one in a child process, after the worker of an earlier attempt has died.

A library that crashes on an object, or uses all memory, ends the worker, which loses everything that it had
read. Spark retries the task. In the retry, such an object ends only a child process: the object is
quarantined with the reason, and the others are taken. A child reads objects one after the other, and is
replaced when it dies.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from bridge.ingest.errors import IngestError
from bridge.ingest.files import Target
from bridge.ingest.store import StorageLocation
from bridge.ingest.worker import process

FIRST_VICTIM = "1000"  # oom_score_adj: the kernel kills the child rather than the worker or the JVM
START = "from bridge.ingest.isolated import main; main()"


def one_by_one(
    work: list[Any], source: StorageLocation, target: Target
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Like `worker.process`, but an object that ends the process gives a row too.

    Raises IngestError for a failure that is not about one object.
    """
    with ExitStack() as stack:
        child: subprocess.Popen[str] | None = None
        for one in work:
            if child is None:
                child = stack.enter_context(_child(source, target))
            answer = _send(child, one)
            if not answer.endswith("\n"):  # the child died, perhaps in the middle of its answer
                with suppress(BrokenPipeError):  # closing flushes what it has not read
                    child.stdin.close()  # type: ignore[union-attr] # it is a pipe
                key, etag = one[:2]
                reason = f"the process that read it alone {_ended(child.wait())}"
                yield "object", {"key": key, "etag": etag, "status": "bad", "reason": reason}
                child = None
                continue
            reply = json.loads(answer)
            if "error" in reply:
                raise IngestError(reply["error"])
            yield from ((kind, body) for kind, body in reply["rows"])


def _child(source: StorageLocation, target: Target) -> subprocess.Popen[str]:
    setting = base64.b64encode(pickle.dumps((source, target))).decode()
    return subprocess.Popen(
        [sys.executable, "-c", START, setting],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def _send(child: subprocess.Popen[str], one: Any) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.write(json.dumps(one) + "\n")
        child.stdin.flush()
    return child.stdout.readline()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def main() -> None:
    """Run the child: each line of standard input is one object, each line of standard output its rows."""
    with suppress(OSError):  # no /proc
        Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # libraries may print
        _serve(sys.stdin, out)


def _serve(lines: IO[str], out: IO[str]) -> None:
    import pyarrow as pa

    pa.set_cpu_count(1)
    source, target = pickle.loads(base64.b64decode(sys.argv[1]))  # noqa: S301 - its parent wrote it
    for line in lines:
        try:
            reply: dict[str, Any] = {"rows": list(process([json.loads(line)], source, target))}
        except Exception as error:  # a network failure, for example: Spark retries the task
            reply = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()
