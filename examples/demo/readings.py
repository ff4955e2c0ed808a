"""What the devices of the demo measure: this machine, through psutil.

Each function returns (topic, fields) pairs, one per message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil

Readings = Iterator[tuple[str, dict[str, Any]]]


def cpu() -> Readings:
    """Seconds each core has spent in each state, and its load since the last reading."""
    busy = psutil.cpu_percent(percpu=True)
    for core, (times, percent) in enumerate(zip(psutil.cpu_times(percpu=True), busy, strict=True)):
        yield f"cpu/{core}", {"percent": percent, **times._asdict()}


def load() -> Readings:
    """Load averages, and the context switches and interrupts of the kernel since the start."""
    one, five, fifteen = psutil.getloadavg()
    yield "load", {"1m": one, "5m": five, "15m": fifteen}
    yield "scheduler", psutil.cpu_stats()._asdict()


def memory() -> Readings:
    """Bytes of memory and swap."""
    yield "memory/ram", psutil.virtual_memory()._asdict()
    yield "memory/swap", psutil.swap_memory()._asdict()


def disk() -> Readings:
    """Counters of each disk, and free space in the root file system."""
    for name, counters in psutil.disk_io_counters(perdisk=True).items():
        yield f"disk/{name}", counters._asdict()
    yield "disk/root", psutil.disk_usage("/")._asdict()


def network() -> Readings:
    """Counters of each network interface."""
    for name, counters in psutil.net_io_counters(pernic=True).items():
        yield f"network/{name}", counters._asdict()


def temperature() -> Readings:
    """Degrees Celsius of each sensor, where the machine has any."""
    for chip, sensors in psutil.sensors_temperatures().items():
        for number, sensor in enumerate(sensors):
            yield (
                f"temperature/{chip}/{number}",
                {"label": sensor.label, "celsius": sensor.current},
            )


KINDS: dict[str, Callable[[], Readings]] = {
    kind.__name__: kind for kind in (cpu, load, memory, disk, network, temperature)
}


def present() -> list[str]:
    """The kinds that this machine has readings for."""
    return [name for name, read in KINDS.items() if any(True for _ in read())]
