"""The section [http] of the configuration."""

from __future__ import annotations

from msgspec import Struct

from bridge.net.addresses import check_listen
from bridge.settingtypes import Count


class HttpConfig(Struct, frozen=True, kw_only=True):
    """[http]: the status page, metrics, health checks and requests."""

    listen: str = "127.0.0.1:9464"
    connections: Count = 64
    connections_per_address: Count = 32

    def __post_init__(self) -> None:
        check_listen(self.listen, "127.0.0.1:9464")
