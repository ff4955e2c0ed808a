"""The hooks that a plugin may implement. With the Exporter class they are the whole plugin API.

A plugin is a module (a file, or a pip package's entry point in the group `streambridge`) with
functions of these names, marked with `@hookimpl`. A function may take fewer arguments than listed.
`authenticate` and `authorize` run in the auth process, all others in the export worker process.
`register_exporters` also runs wherever configurations are checked: it must be cheap and must not import an
SDK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy
from msgspec import Struct

from bridge.plugin.api import ExportConfig, Exporter, Record
from bridge.plugin.auth import Accepted, AuthOptions, Denied, Login, Question
from bridge.plugin.transform import TransformState

if TYPE_CHECKING:
    from bridge.plugin.aws import AwsSettings, Credentials

GROUP = "streambridge"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class Event(Struct, frozen=True, kw_only=True, tag=False):
    """An event for operators.

    `name` is `stream_full`, `export_failing`, `export_recovered` or `export_stopped` (no attempt until its
    configuration changes or it is retried). `export` is the identifier of the export, empty for events of a
    stream.
    """

    name: str
    stream: str
    export: str = ""
    detail: str = ""


@hookspec
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register exporter classes: call `register(cls)` for each."""


@hookspec
def transform_records(
    records: list[Record], stream: str, kind: str, config: ExportConfig, state: TransformState
) -> list[Record] | None:
    """Return the records to export instead of these, or None to leave them unchanged.

    Omit a record to filter it; keep the order and the sequence numbers. The same records and the same state
    must always give the same result, because a batch may be retried. Anything else that the result depends on
    must be in `state`, which keeps the values set at earlier records, even after a crash. A function with the
    attribute `option` is called only for exports whose configuration has a value in that option.
    """


@hookspec(firstresult=True)
def aws_credentials(settings: AwsSettings) -> Callable[[], Credentials] | None:
    """Return a function that fetches fresh AWS credentials, or None to leave it to other plugins.

    `settings` is the table `[aws]`: `region`, `endpoint_url`, `profile`, `credentials` and `proxies`. The
    function returns `Credentials(access_key=..., secret_key=..., token=..., expiry=...)` of
    `bridge.plugin.aws`; `expiry` is Unix time in seconds. It is called again before they expire.
    """


@hookspec(firstresult=True)
def authenticate(login: Login, options: AuthOptions) -> Accepted | Denied | None:
    """Return who a client is, or that it is refused, or None to leave the decision to other plugins.

    It runs in the auth process, in several threads at the same time, for clients that are not in
    `mqtt.users_file`. A client waits for at most `auth.timeout`; an exception or a late answer refuses it. If
    all plugins return None, the client is refused.
    """


@hookspec(firstresult=True)
def authorize(question: Question, options: AuthOptions) -> bool | None:
    """Return whether a client may publish or subscribe, or None to leave the decision to other plugins.

    It is called for actions that the rules allow, at the first message of a connection on a topic and at each
    subscription. The answer is cached for `auth.decisions`. If all plugins return None, the action is
    allowed.
    """


@hookspec
def handle_event(event: Event) -> None:
    """Handle an event, in a separate thread. Events are dropped if more than 1,000 are queued."""
