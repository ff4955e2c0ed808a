"""`streambridge check --connect`: what the exports of the configuration can do at their destinations.

Each exporter makes the smallest call that changes nothing (`Exporter.probe`). Destinations are tried at the
same time; a silent one costs seconds.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import Struct

from bridge.config import tomlfile
from bridge.config.checks.context import CheckContext, DeclaredExport
from bridge.config.settings import Config
from bridge.plugin import aws
from bridge.plugin.api import AwsConfig, Context, Exporter, Retry, Unproven
from bridge.plugin.failures import failed
from bridge.printable import without_credentials

PATIENCE: dict[str, Any] = {"connect_timeout": 5.0, "read_timeout": 10.0}  # seconds
AT_ONCE = 8


class Tried(Struct, frozen=True):
    """What came of one export's destination. `ok` is None if that is not known; `what` says why."""

    stream: str
    export: str
    kind: str
    ok: bool | None
    what: str


class _Context(Context):
    """The services of an exporter, with the `[aws]` table."""

    def __init__(self, settings: Config, stream: str) -> None:
        super().__init__(settings.gateway.id, stream)
        self._aws = settings.aws

    def client(self, service: str, config: Any, **options: Any) -> Any:
        """Return a client that gives up soon. Raises Retry."""
        try:
            return aws.client(
                self._aws, service, config.region, config.endpoint_url, self.link, **PATIENCE, **options
            )
        except Exception as error:
            raise aws.failure(error, f"making the {service} client") from error


def connect(path: Path, settings: Config) -> list[Tried]:
    """Try the destination of every enabled export of a configuration."""
    context = CheckContext(settings, tomlfile.read(path))

    def tried(export: DeclaredExport) -> Tried:
        config: Any = export.config
        ok, what = _try(
            context.registry.exporters[export.kind], config, _Context(settings, export.stream.name)
        )
        return Tried(export.stream.name, config.identifier, export.kind, ok, without_credentials(what))

    exports = [one for one in context.exports if one.config is not None and not one.config.disabled]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(tried, exports))


def _try(exporter: type[Exporter], config: Any, context: _Context) -> tuple[bool | None, str]:
    try:
        could = exporter.probe(config, context)
    except Unproven as error:
        return None, str(error)
    except Retry as error:
        return False, str(error)
    except (Exception, SystemExit) as error:
        return False, failed(error)
    return True, could + _identity(config, context)


def _identity(config: Any, context: _Context) -> str:
    """Whose credentials AWS sees, if it can be asked; empty otherwise, and for other servers."""
    if not hasattr(config, "region") or config.endpoint_url:
        return ""
    try:
        asker = AwsConfig(identifier="check", region=config.region)
        return f", as {context.client('sts', asker).get_caller_identity()['Arn']}"
    except Exception:
        return ""  # the call that matters has been answered
