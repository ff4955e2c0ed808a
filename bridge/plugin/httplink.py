"""HTTP over the link: connections of botocore that are paced and notice that they are dead (see `link`).

botocore reads a whole answer into the memory before it looks at it, so one of more than `LARGEST` bytes ends
its connection.

botocore has no setting for the class of its connections. Its HTTP session has a table of pools by scheme, and
`put_over` replaces those.
"""

from __future__ import annotations

import errno
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

from bridge.model import MIB
from bridge.plugin.link import Link, Meter, prepare, probe

LARGEST = 16 * MIB  # bytes of an answer with its head; exporters get some hundred KB at most

log = logging.getLogger(__name__)

# The errors with which TCP_USER_TIMEOUT ends a connection; the last two if a router has answered.
DEAD = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


def put_over(link: Link, session: Any) -> None:
    """Have a botocore URLLib3Session that has no connection yet make its connections over the link."""
    session._pool_classes_by_scheme.update(
        http=_pool(AWSHTTPConnectionPool, AWSHTTPConnection, link),
        https=_pool(AWSHTTPSConnectionPool, AWSHTTPSConnection, link),
    )


def _pool(pool: Any, connection: Any, link: Link) -> Any:
    made = type(connection.__name__, (_OverLink, connection), {"over": link})
    return type(pool.__name__, (pool,), {"ConnectionCls": made})


class _Bounded(io.RawIOBase):
    """What a socket receives of one answer. Raises ConnectionError when it is too much."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__()
        self._raw, self._left = raw, LARGEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        found = self._raw.readinto(buffer)
        self._left -= found or 0
        if self._left < 0:
            log.warning("an answer of more than %d MiB was cut off", LARGEST // MIB)
            raise ConnectionResetError(errno.ECONNRESET, "the answer is too large")
        return found

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _bounded(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Make an answer that is read to `LARGEST` bytes."""
    answer = make(*args, **options)
    answer.fp = io.BufferedReader(_Bounded(answer.fp.detach()))
    return answer


class _OverLink:
    """What a connection class of urllib3 gets in addition. It stands before that class."""

    over: Link
    response_class: Any
    sock: Any
    auto_open: int
    _meter: Meter | None = None
    _used_at = 0.0

    def connect(self) -> None:
        """Connect, with TLS."""
        super().connect()  # type: ignore[misc]
        self._used_at = time.monotonic()
        self._meter = Meter(self.over, self.sock)
        with suppress(AttributeError):  # TLS through a TLS proxy: not a socket
            prepare(self.sock, self.over.patience)
        self._probe(on=True)

    def request(self, *args: Any, **options: Any) -> None:
        """Send a request."""
        if self.sock is not None:
            self._probe(on=True)
        super().request(*args, **options)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        """Send bytes or the content of a file at the pace of the link."""
        if self.sock is None and self.auto_open:
            self.connect()
        if self._meter is None:  # a request to a proxy, within `connect`
            super().send(data)  # type: ignore[misc]
            return
        blocks = iter(lambda: data.read(self.over.piece), b"") if hasattr(data, "read") else (data,)
        with self._watching():
            for block in blocks:
                for piece in self._meter.pieces(block):
                    super().send(piece)  # type: ignore[misc]

    def getresponse(self, *args: Any, **options: Any) -> Any:
        """The answer, as far as its head."""
        made = self.response_class  # botocore's own after a request with `Expect: 100-continue`
        self.response_class = partial(_bounded, made)
        try:
            with self._watching():
                answer = super().getresponse(*args, **options)  # type: ignore[misc]
        finally:
            self.response_class = made
        self._used_at = time.monotonic()
        if self.sock is not None:
            self._probe(on=False)
        return answer

    @property
    def is_connected(self) -> bool:
        """Whether the connection may be used for another request."""
        if self._used_at <= max(self.over.lost_at, time.monotonic() - self.over.idle):
            return False
        return super().is_connected  # type: ignore[misc, no-any-return]

    def close(self) -> None:
        """Close the connection."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None
        super().close()  # type: ignore[misc]

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Tell the link if the connection dies."""
        try:
            yield
        except OSError as error:
            if error.errno in DEAD:
                self.over.died()
            raise

    def _probe(self, *, on: bool) -> None:
        with suppress(AttributeError, OSError):
            probe(self.sock, on)
