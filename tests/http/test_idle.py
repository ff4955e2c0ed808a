"""An idle gateway is silent on its disk: flash memory wears out by what nobody has asked for."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.testbed.web import Web

from .conftest import Service, eventually

WATCHED = 7.0  # seconds: more than a step of the observer, 140 of the store's and some beats of the worker
CALLS = (
    "fsync,fdatasync,sync,syncfs,sync_file_range,rename,renameat,renameat2,mkdir,unlink,unlinkat,ftruncate"
)
WRITES = "write,writev,pwrite64,pwritev"


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_idle_gateway_with_idle_exports_writes_and_syncs_nothing(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    if subprocess.run(["strace", "-V"], capture_output=True).returncode:
        assert not os.environ.get("CI"), "strace is missing"
        pytest.skip("strace is missing: apt-get install strace")
    web = Web()
    streams = f"""
[streams.sensors]
topics = ["sensors/#"]
time_to_live = "1d"
[[streams.sensors.export.http]]
identifier = "web"
uri = "{web.url}/"
[streams.memory]
topics = ["memory/#"]
persistence = "Memory"
"""
    try:
        service = start(streams)
        service.publish(*[("sensors/a", b"x"), ("memory/a", b"x")] * 10)
        eventually(lambda: service.json("/status.json")["exports"][0]["lag"] == 0)
        time.sleep(7)  # what was written is synced, the cursor saved, and the observer has looked once more
        trace = tmp_path / "trace"
        pids = [service.process.pid, *_children(service.process.pid)]
        assert len(pids) > 1, "the export worker runs"
        command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={CALLS},{WRITES}"]
        tracing = subprocess.Popen(
            [*command, *(part for pid in pids for part in ("-p", str(pid)))],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert tracing.stderr is not None
        said = tracing.stderr.readline()
        if "attached" not in said:
            tracing.wait()
            pytest.skip(f"strace may not trace here: {said}")
        ends = time.monotonic() + WATCHED  # what is tested is that nothing happens in that time
        while time.monotonic() < ends:
            assert service.request("/healthz")[0] == service.request("/readyz")[0] == 200
            service.request("/metrics")
            time.sleep(0.5)
        tracing.terminate()
        tracing.communicate(timeout=30)
    finally:
        web.close()
    lines = trace.read_text().splitlines()
    assert any("write" in line for line in lines), "something was traced: it answered requests"
    nowhere = re.compile(r"\(\d+<(socket|anon_inode|pipe|TCP|UNIX|/dev/)|\+\+\+|---|\.log>|/log>| resumed")
    assert [line for line in lines if not nowhere.search(line)] == []
