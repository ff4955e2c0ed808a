"""A gateway takes little of a small machine; an idle one is silent on its disk.

Flash memory wears out by what nobody has asked for.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from benchmarks.export import service as takes_everything
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


def _memory(pid: int) -> float:
    """Memory of a process that is of no file, with its share of what others have too (PSS), in KiB."""
    found = re.search(r"^Pss_Anon:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def _is_exported(service: Service) -> bool:
    return bool(service.json("/status.json")["exports"][0]["lag"] == 0)


def _started(code: str) -> tuple[float, float]:
    """An interpreter that runs this code: its memory then, and the CPU time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code += "; import sys; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    taken = _memory(process.pid)
    process.communicate()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _wakes(process: psutil.Process) -> int:
    """How often the threads of a process have slept, and so woken."""
    status = (one.read_text() for one in Path(f"/proc/{process.pid}/task").glob("*/status"))
    return sum(
        int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[0]) for text in status
    )


def test_a_gateway_with_an_export_takes_little_more_than_the_interpreter_and_seldom_wakes(
    start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is loaded and not needed shows here: the command line took 7 MiB, the client of upstreams 5.

    So does a timer of its own for what is done once a second: an idle gateway spends its time on waking.
    """
    keys = "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(keys)
    monkeypatch.setenv("HOME", str(tmp_path))
    bare = min(_started("pass")[0] for _ in range(3))
    starts, memories, wakes = [], [], [float("inf")]
    with takes_everything(0) as url:
        streams = f"""
[streams.sensors]
topics = ["sensors/#"]
[[streams.sensors.export.s3]]
identifier = "lake"
bucket = "bucket"
endpoint_url = "{url}"
time_hint_millis = 1
"""
        for _ in range(3):
            imports = _started("import bridge.service.service")[1]  # as busy as the machine is now
            service = start(streams)
            process = psutil.Process(service.process.pid)
            starts.append(sum(process.cpu_times()[:2]) / imports)
            service.publish(*[("sensors/a", b"x" * 200)] * 100)
            eventually(partial(_is_exported, service))
            both = (process, *process.children())
            memories.append(sum(map(_memory, (one.pid for one in both))))
            if len(memories) == 3:
                time.sleep(3)  # the worker rests two seconds after its last message
                while (
                    min(wakes) >= 8 and len(wakes) < 7
                ):  # on a busy machine threads also wait for each other
                    before, began = sum(map(_wakes, both)), time.monotonic()
                    time.sleep(3)
                    wakes.append((sum(map(_wakes, both)) - before) / (time.monotonic() - began))
            service.process.terminate()
            service.process.wait()
    print(f"{min(memories) / bare:.1f} times the memory, {min(starts):.1f} times the CPU time")
    print(f"{min(wakes):.1f} wake-ups a second")
    assert min(memories) < 13.5 * bare
    assert min(wakes) < 8, "what is done every second has timers of its own"
    assert min(starts) < 1.6, "the start loads more than the service"
