"""`FirehoseFrontEnd`: the Firehose API on HTTP.

A request is a POST to `/`. Its signature, then its operation and its body are checked; the body is read only
after the head was. The caller is the user of its key, with the rights of that user. The answer comes once the
operation is carried out, for records: once they are stored.

While too much is pending for the disk, requests wait, as long as their bodies take no more than
`HttpLimits.bodies` together. Any more are refused as AWS does under load, and SDKs send them again later.
Connections stay open; one has one request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from bridge.access.accesskeys import AccessKey, read_access_keys
from bridge.access.rules import NOTHING, Identity
from bridge.audit import Origin, record
from bridge.errors import StreamBridgeError
from bridge.firehose import replies, signature
from bridge.firehose.replies import ApiError
from bridge.firehose.signature import SignatureError
from bridge.net.addresses import host_and_port, is_loopback, network_of
from bridge.net.httpserver import HttpError, HttpLimits, HttpRequest, HttpResponse, HttpServer
from bridge.net.limits import ConnectionLimits
from bridge.net.tls import kept_context
from bridge.operations.catalog import Call
from bridge.operations.deliveries import DELIVERIES, MAX_BYTES, Put, PutBatch

if TYPE_CHECKING:
    import ssl

    from bridge.access.logins import Access
    from bridge.firehose.settings import FirehoseConfig
    from bridge.firehose.signature import Claim
    from bridge.operations.catalog import Operations, Request

log = logging.getLogger(__name__)

# A body has 4 MiB in base64 and the JSON around 500 records, with room for spaces and escapes such as `\/`.
LIMITS = HttpLimits(
    methods=("POST",),
    head=16 * 1024,
    body=MAX_BYTES * 3 // 2 + 64 * 1024,
    any_host=True,
    body_timeout=60.0,
    idle_timeout=60.0,
)
STOP = 5.0  # seconds that requests have at a stop
REMEMBERED = 1000  # identities


class FirehoseFrontEnd:
    """The listener, its keys, and its callers."""

    def __init__(
        self,
        config: FirehoseConfig,
        operations: Operations,
        access: Access,
        limits: HttpLimits = LIMITS,
    ) -> None:
        """Raises ConfigError if the keys or the certificate are wrong."""
        self._config, self._operations, self._access = config, operations, access
        self._keys = self._read_keys()
        self._identities: dict[tuple[str, str], Identity] = {}
        self.counts: Counter[str] = Counter()
        self._room = asyncio.Event()
        self._room.set()
        self._waiting = 0  # bytes of the bodies that wait for room
        self._most_waiting = limits.bodies
        self._server: HttpServer | None = None
        if config.listen:
            self._server = HttpServer(
                "firehose.listen",
                config.listen,
                {"/": self._post},
                ConnectionLimits(config.connections, config.connections_per_address),
                limits,
                self._context(),
                replies.rejection,
                fields={},
            )

    async def start(self) -> list[str]:
        """Listen; returns the url, port 0 resolved. Raises ConfigError."""
        if self._server is None:
            return []
        self._operations.manager.on_pressure.append(self._pressure)
        url = await self._server.start()
        if self._config.tls is None and not is_loopback(host_and_port(self._config.listen)[0]):
            log.warning("others can read records on their way to %s; set [firehose.tls]", url)
        return [url]

    async def stop(self) -> None:
        """Stop accepting requests, answer those that were received, and close the connections."""
        if self._server is not None:
            await self._server.stop(STOP)
            with contextlib.suppress(ValueError):
                self._operations.manager.on_pressure.remove(self._pressure)

    def read(self) -> None:
        """Read keys and certificate, for `reload`; any thread may do it. Raises ConfigError."""
        self._read_keys()
        self._context()

    def reload(self) -> None:
        """Take the rights of all callers anew, and read keys and certificate again.

        Raises ConfigError if those are wrong; then the old ones stay.
        """
        self._identities.clear()  # the rules may have changed, whatever is wrong with the files
        keys, context = self._read_keys(), self._context()
        self._keys = keys
        if self._server is not None:
            self._server.tls = context

    def has(self, key: AccessKey) -> bool:
        """Whether a key is still one."""
        return self._keys.get(key.id) == key

    def stats(self) -> dict[str, int]:
        """The number of connections, and counters since the start."""
        return {"connections": len(self._server.connections) if self._server else 0, **self.counts}

    def _read_keys(self) -> dict[str, AccessKey]:
        path = self._config.access_keys_file
        if not self._config.listen or path is None:
            return {}
        option, kept = "firehose.access_keys_file", self._access.kept
        return kept.read(("keys",), option, (path,), lambda: read_access_keys(option, path))

    def _context(self) -> ssl.SSLContext | None:
        tls = self._config.tls
        return (
            None
            if tls is None or not self._config.listen
            else kept_context(self._access.kept, "firehose.tls", tls.cert, tls.key)
        )

    def _pressure(self, high: bool) -> None:
        if high:
            self._room.clear()
        else:
            self._room.set()

    # -- requests ------------------------------------------------------------

    async def _post(self, request: HttpRequest) -> HttpResponse:
        self.counts["requests"] += 1
        try:
            return await self._answer(request)
        except SignatureError as error:
            self.counts["refused_signature"] += 1
            origin = Origin("firehose", request.address)
            record("login", "refused", origin=origin, proven=False, why=f"{error.code}: {error}")
            log.warning("request refused: %s", error, extra={"client": request.address, "code": error.code})
            return replies.refusal(ApiError(error.code, str(error)))
        except StreamBridgeError as error:
            self.counts["failed_requests"] += 1
            return replies.refusal(replies.failed(error))
        except ApiError as error:
            self.counts["failed_requests"] += 1
            return replies.refusal(error)

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        if request.query:
            raise HttpError(HTTPStatus.NOT_FOUND)
        claim = signature.claim(request.headers, self._keys, time.time())
        name = replies.operation_of(request.headers.get("x-amz-target", ""))
        operation = DELIVERIES.get(name)
        if operation is None:
            raise ApiError("UnknownOperationException", "x-amz-target names no operation of Firehose")
        if (
            operation.request not in (Put, PutBatch)
            and int(request.headers.get("content-length", 0)) > replies.MAX_DEFINITION
        ):
            raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        body = await request.body()
        network = network_of(request.address)
        carry_out = self._carry_out(name, claim, body, request.address)
        return await self._operations.turns.work((network, network), carry_out)

    async def _carry_out(self, name: str, claim: Claim, body: bytes, address: str) -> HttpResponse:
        operation = DELIVERIES[name]
        claim.check(body)
        if not self.has(claim.key):  # removed while the body arrived
            raise signature.unknown_key()
        caller = self._identify(claim.key, address)
        try:
            asked: Request = msgspec.json.decode(body, type=operation.request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise replies.wrong_request(error) from None
        size = len(body)
        del body
        if self._operations.manager.under_pressure:
            await self._wait_for_room(size)
        result = await self._operations.carry_out(name, operation, Call(self._operations, caller), asked)
        return replies.success(result)

    async def _wait_for_room(self, size: int) -> None:
        """Wait until streams take records again; raises ApiError if too much waits already."""
        if self._waiting + size > self._most_waiting:
            raise ApiError(
                replies.UNAVAILABLE,
                "the disk is behind; send the request again later",
                HTTPStatus.SERVICE_UNAVAILABLE,
            )
        self._waiting += size
        try:
            self._room.clear()
            await self._room.wait()
        finally:
            self._waiting -= size

    def _identify(self, key: AccessKey, address: str) -> Identity:
        found = self._identities.get((key.id, address))
        if found is None:
            if len(self._identities) >= REMEMBERED:
                self._identities.clear()
            label = f"{address} (key {key.id}, user {key.user!r})"
            found = self._access.identify("", key.user, local=is_loopback(address), label=label)
            found.origin, found.source = Origin("firehose", address), _OfKey(self, self._access, key)
            record("login", origin=found.origin, user=key.user, why=f"access key {key.id}")
            self._identities[key.id, address] = found
        return found


class _OfKey:
    """Gives the holder of a key its present rights, also while its request waits: none without the key."""

    def __init__(self, front_end: FirehoseFrontEnd, access: Access, key: AccessKey) -> None:
        self._front_end, self._access, self._key = front_end, access, key

    def renewed(self, past: Identity) -> Identity:
        if self._front_end.has(self._key):
            found = self._access.renewed(past)
            found.source = self
        else:
            found = past.successor = Identity("", past.user, NOTHING, local=False, label=past.label)
        return found
