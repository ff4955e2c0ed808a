"""The memory that the limits allow, and the memory that there is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bridge.config.checks.context import CheckContext, Finding
from bridge.model import Persistence
from bridge.streams.store import running
from bridge.units import format_size

_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("session_bytes", "retained_bytes", "guest_bytes")


def memory(context: CheckContext) -> Iterator[Finding]:
    """Warn if the limits on memory together are more than the service may use."""
    config = context.config
    if config.mqtt.mode != "embedded" or not context.knows_all("mqtt", "limits"):
        return
    parts = {key: getattr(config.mqtt.limits, key) for key in _LIMITS}
    parts["memory streams"] = sum(
        stream.max_size for stream in config.streams.values() if stream.persistence is Persistence.Memory
    )
    wanted = sum(parts.values())
    there, where = min(_limits(running(config.gateway.data_dir)))
    if wanted > there:
        listed = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
        yield context.warning(
            ("mqtt", "limits", "session_bytes"),
            f"what is in memory may grow to {format_size(wanted)} ({listed}), but {where} has "
            f"{format_size(there)}; lower these limits: session_bytes to a quarter of that at most",
        )


def _limits(service: int | None) -> Iterator[tuple[int, str]]:
    """What limits the memory of the service, in bytes: the machine, its cgroup (version 2), its unit."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            yield int(line.split()[1]) * 1024, "this machine"
    if service is None and Path("/run/systemd/system").is_dir():  # our own cgroup is that of a shell
        show = ["systemctl", "show", "--value", "--property=MemoryMax", "streambridge.service"]
        with suppress(OSError, ValueError):
            found = subprocess.run(show, capture_output=True, text=True, check=False, timeout=10).stdout
            yield int(found), "streambridge.service (MemoryMax)"
        return
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{service or 'self'}/cgroup").read_text().splitlines()
        group = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        for place in (_CGROUPS / group, *(_CGROUPS / group).parents):
            with suppress(OSError, ValueError):  # `max` is no limit
                yield int((place / "memory.max").read_text()), f"its cgroup {place} (memory.max)"
