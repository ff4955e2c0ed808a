"""Observes the gateways while they run: resources of the processes, progress of streams and exports."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.soak.verdict import Sample
from benchmarks.soak.world import Gateway, World

EVERY = 1.0


@dataclass
class Count:
    """How many messages a gateway has stored, and how many of them are in S3."""

    time: float
    gateway: str
    stored: int
    exported: int


def look(name: str, process: psutil.Process) -> Sample | None:
    """Look at a process; None if it is gone."""
    try:
        files = sockets = 0
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                sockets += str(link.readlink()).startswith("socket:")
            except OSError:
                continue
            files += 1
        rss = process.memory_info().rss
        return Sample(time.time(), name, process.pid, rss, process.num_threads(), files - sockets, sockets)
    except (OSError, psutil.Error):
        return None


class Watch:
    """A thread that samples until it is stopped."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.samples: list[Sample] = []
        self.counts: list[Count] = []
        self.workers: dict[int, float] = {}  # all that were seen: process id, when it was created
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self.world.services.collect()
            for gateway in self.world.gateways.values():
                self._look(gateway)

    def _look(self, gateway: Gateway) -> None:
        processes: list[tuple[str, psutil.Process | None]] = [(f"{gateway.name} worker", gateway.worker())]
        try:
            assert gateway.process is not None
            processes.append((gateway.name, psutil.Process(gateway.process.pid)))
        except psutil.Error:
            pass
        for name, process in processes:
            if process is not None and (sample := look(name, process)) is not None:
                self.samples.append(sample)
                if name.endswith(" worker"):
                    self.workers[sample.pid] = process.create_time()
        state = gateway.status()
        if state is not None:
            stored = {stream["name"]: stream["newest"] + 1 for stream in state["streams"]}
            late = sum(export["lag"] for export in state["exports"] if export["kind"] == "s3")
            total = sum(stored.values())
            self.counts.append(Count(time.time(), gateway.name, total, total - late))

    def orphans(self) -> list[int]:
        """Workers that still live although their gateway is gone."""
        left = []
        for pid, created in self.workers.items():
            try:
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
            except psutil.Error:
                continue
        return left
