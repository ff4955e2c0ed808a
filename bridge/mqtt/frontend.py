"""`MqttFrontEnd`: what the application starts and stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.mqtt.lane import Lane

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.manager import StreamManager
    from bridge.mqtt.settings import MqttConfig


class MqttFrontEnd:
    """The embedded broker. `state_dir` keeps sessions and retained messages; without it they end with us."""

    def __init__(self, config: MqttConfig, manager: StreamManager, state_dir: Path | None = None) -> None:
        self._config, self._manager, self._state_dir = config, manager, state_dir
        self._lane: Lane | None = None

    async def start(self) -> list[str]:
        """Listen; returns the urls listened on, port 0 resolved. Raises ConfigError with the remedy."""
        self._lane = Lane(self._config, self._manager, self._state_dir)
        return await self._lane.start()

    async def stop(self) -> None:
        """Stop accepting and reading, commit and acknowledge what was read, close."""
        if self._lane is not None:
            await self._lane.stop()

    def reload(self, config: MqttConfig) -> None:
        """Take over users, rules and certificates, all or nothing (ConfigError)."""
        if self._lane is not None:
            self._lane.reload(config)

    def stats(self) -> dict[str, int]:
        """Counters since the start (drops and refusals by reason), connections and sessions now."""
        return self._lane.stats() if self._lane is not None else {}
