"""The section [auth] of the configuration."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from bridge.plugin.auth import AuthOptions
from bridge.plugin.failures import failed
from bridge.settingtypes import Count, Millis

log = logging.getLogger("bridge.auth")


class AuthSettings(Struct, frozen=True, kw_only=True):
    """[auth]: plugins that decide logins and rights of MQTT clients; [auth.plugins.NAME] has their options.

    timeout     how long a client waits for an answer; then it is refused
    pending     how many logins may wait at the same time
    threads     how many questions the plugins answer at the same time
    decisions   how long an answer about a topic is valid for a connection
    """

    timeout: Annotated[Millis, Meta(ge=10, le=60_000)] = 2_000
    pending: Count = 1_000
    threads: Annotated[int, Meta(ge=1, le=64)] = 4
    decisions: Annotated[Millis, Meta(ge=1_000)] = 300_000
    plugins: dict[str, AuthOptions] = field(default_factory=dict)

    def mistakes(self) -> list[str]:
        """Return the problems that keep plugins from working on this machine."""
        return [
            f"auth.plugins.{name}: {mistake}"
            for name, options in self.plugins.items()
            for mistake in mistakes_of(options)
        ]

    def files(self) -> list[Path]:
        """Return the files that decisions depend on, without those of a plugin that fails."""
        found: list[Path] = []
        for name, options in self.plugins.items():
            try:
                found += map(Path, options.files())
            except (Exception, SystemExit) as error:
                log.error("changes of its files are not noticed: %s", failed(error), extra={"plugin": name})
        return found


def mistakes_of(options: AuthOptions) -> list[str]:
    """Return the mistakes that a plugin reports; that it fails is one."""
    try:
        return options.mistakes()
    except (Exception, SystemExit) as error:
        return [failed(error)]
