"""The section [firehose] of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from bridge.model import DEFAULT_MAX_SIZE
from bridge.net.addresses import check_listen
from bridge.settingtypes import Bytes, Count


class FirehoseTls(Struct, frozen=True, kw_only=True):
    """[firehose.tls]: the certificate of the listener, read again on reload.

    To add or remove this section needs a restart.
    """

    cert: Path
    key: Path


class FirehoseConfig(Struct, frozen=True, kw_only=True):
    """[firehose]: the listener for clients of Amazon Data Firehose.

    An empty `listen` opens no listener. Requests are signed with a key of `access_keys_file`, which has a
    line `id secret [user]` for each; it is read again on reload. The rules of [[mqtt.acl]] for that user (by
    default, the key's id) say what its clients may do. `max_size` and `flush_on_write` are those of the
    streams that clients create.
    """

    listen: str = ""
    access_keys_file: Path | None = None
    tls: FirehoseTls | None = None
    connections: Count = 256
    connections_per_address: Count = 256
    max_size: Annotated[Bytes, Meta(ge=1024 * 1024)] = DEFAULT_MAX_SIZE
    flush_on_write: bool = False

    def __post_init__(self) -> None:
        check_listen(self.listen, "127.0.0.1:4573")
        if self.listen and self.access_keys_file is None:
            raise ValueError(
                "`access_keys_file` is missing, and nobody could sign a request; name a file with a line "
                "`id secret [user]` for each client"
            )
