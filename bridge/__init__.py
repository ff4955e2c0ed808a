"""streambridge: durable streams on an MQTT gateway, exported by plugins, proven complete in the table.

This package exports what every plugin imports; the modules of `FOR_PLUGINS` have what some plugins also need
(see docs/plugins.md). Names are imported at their first use: the workers of a Spark cluster need
`bridge.ingest` only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridge.plugin.api import (
        ACCEPTED,
        AwsBatchedConfig,
        AwsConfig,
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
        Stopped,
        Unproven,
        send_split,
    )
    from bridge.plugin.auth import Accepted, AuthOptions, Denied, Login, Question
    from bridge.plugin.hooks import Event, hookimpl
    from bridge.plugin.transform import TransformState
    from bridge.settingtypes import BrokerUrl, Bucket, Bytes, Endpoint, Millis, SecretFile

__all__ = [
    "ACCEPTED",
    "Accepted",
    "AuthOptions",
    "AwsBatchedConfig",
    "AwsConfig",
    "Batch",
    "BatchLimits",
    "BatchedConfig",
    "Batching",
    "BrokerUrl",
    "Bucket",
    "Bytes",
    "Context",
    "Denied",
    "Endpoint",
    "Event",
    "ExportConfig",
    "Exporter",
    "Login",
    "Millis",
    "Outcome",
    "Progress",
    "Question",
    "Record",
    "Refused",
    "Retry",
    "SecretFile",
    "Stopped",
    "TransformState",
    "Unproven",
    "hookimpl",
    "send_split",
]

FOR_PLUGINS = (
    "bridge.plugin.aws",
    "bridge.deflate",
    "bridge.extras",
    "bridge.plugin.firehose",
    "bridge.plugin.reports",
    "bridge.plugin.keys",
    "bridge.plugin.mqtt",
    "bridge.net.brokers",
    "bridge.plugin.lineage",
    "bridge.plugin.objects",
    "bridge.plugin.prefixes",
    "bridge.plugin.records",
    "bridge.plugin.reduction",
    "bridge.plugin.uploads",
    "bridge.model",
    "bridge.objectkeys",
    "bridge.filtered",
    "bridge.topics",
    "bridge.plugin.testing",
    "bridge.plugin.authtesting",
)

_ELSEWHERE = dict.fromkeys(("Event", "hookimpl"), "bridge.plugin.hooks") | dict.fromkeys(
    ("BrokerUrl", "Bucket", "Bytes", "Endpoint", "Millis", "SecretFile"), "bridge.settingtypes"
)

_ELSEWHERE |= dict.fromkeys(("Accepted", "AuthOptions", "Denied", "Login", "Question"), "bridge.plugin.auth")
_ELSEWHERE["TransformState"] = "bridge.plugin.transform"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_ELSEWHERE.get(name, "bridge.plugin.api")), name)
        return found
