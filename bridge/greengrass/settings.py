"""The section [greengrass] of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from bridge.net.addresses import check_listen
from bridge.settingtypes import Count, Millis


class GreengrassConfig(Struct, frozen=True, kw_only=True):
    """[greengrass]: the listener for clients of the AWS Stream Manager SDKs.

    A client shows a token of `tokens_file`, and is the user of that line, or the token in `token_file`, and
    is `user`. Processes of root and of the service's own user on this machine need none, and are `user` too.
    Those of the local users in `users` need none either, and are the users that it names, which must have
    rules. With `authenticate_clients = false`, no process on this machine needs one, and all are `user`.
    The rules and roles of the user say what they may do. An empty `listen` opens no listener.

    A client that makes no request for `idle_timeout` is disconnected; the SDKs connect again. Streams that
    clients create get `retention`; "limits" is what AWS's guide says.
    """

    listen: str = "127.0.0.1:8088"
    token_file: Path | None = None
    tokens_file: Path | None = None
    user: str = "greengrass"
    users: dict[str, Annotated[str, Meta(min_length=1)]] = {}
    authenticate_clients: bool = True
    connections: Count = 1_000
    connections_per_address: Count = 1_000
    retention: Literal["limits", "exported"] = "limits"
    idle_timeout: Annotated[Millis, Meta(ge=1000)] = 24 * 3_600_000

    def __post_init__(self) -> None:
        check_listen(self.listen, "127.0.0.1:8088")
