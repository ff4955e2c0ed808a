"""The `[export]` table of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from bridge.plugin.allow import Allow


class ExportSettings(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How exports share this machine and its link.

    Up to `threads` batches are sent at the same time. `max_bandwidth` limits what all exports together send,
    in bits per second (see `bridge.plugin.link`). `plugin_dirs` are searched for drop-in plugins.
    """

    threads: Annotated[int, Meta(ge=1, le=100)] = 5
    max_bandwidth: Annotated[int, Meta(ge=1000)] | None = None
    plugin_dirs: list[Path] = field(default_factory=lambda: [Path("/etc/streambridge/plugins")])
    allow: Allow = field(default_factory=Allow)
