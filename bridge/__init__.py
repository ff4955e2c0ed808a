"""streambridge: durable streams on an MQTT gateway, exported by plugins, proven complete in the table.

What a plugin imports stands here; see docs/plugins.md.
"""

from bridge.export.api import (
    ACCEPTED,
    Batch,
    BatchedConfig,
    Batching,
    BatchLimits,
    Context,
    ExportConfig,
    Exporter,
    Outcome,
    Progress,
    Record,
    Refused,
    Retry,
    send_split,
)
from bridge.hookspecs import Event, hookimpl

__all__ = [
    "ACCEPTED",
    "Batch",
    "BatchLimits",
    "BatchedConfig",
    "Batching",
    "Context",
    "Event",
    "ExportConfig",
    "Exporter",
    "Outcome",
    "Progress",
    "Record",
    "Refused",
    "Retry",
    "hookimpl",
    "send_split",
]
