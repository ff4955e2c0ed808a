"""Operations by HTTP: `POST /requests/<operation>` with the body of a request, in JSON or CBOR.

The reply has the status 200 and the body that the same request has over MQTT, whose `status` says what became
of it. Other statuses say that nothing was carried out:

    400  the user name in `Authorization: Basic` cannot be read
    401  no user name, or a wrong password; nothing invites a browser to ask for one
    403  the request comes from a page of another site
    415  the body is neither application/json nor application/cbor: a form of another site cannot send those
    503  too many logins of this user are being checked

Each request names a user of `mqtt.users_file`, also on loopback. The rules are those of the user; a `%c` in
them gives nothing, since there is no client id.
"""

from __future__ import annotations

import base64
import binascii
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from bridge.access.logins import Reason
from bridge.net.addresses import is_loopback
from bridge.net.httpserver import HttpError, HttpRequest, HttpResponse, Route
from bridge.operations.catalog import OPERATIONS
from bridge.operations.codec import answer

if TYPE_CHECKING:
    from bridge.access.logins import Access
    from bridge.access.rules import Identity
    from bridge.operations.catalog import Operations

LEVEL = "/requests/"
MAX_REQUEST = 1024 * 1024
MAX_REPLY = 8 * 1024 * 1024
TYPES = {"application/json", "application/cbor"}


class Requests:
    """The routes of the operations."""

    def __init__(self, operations: Operations, access: Access) -> None:
        self._operations, self._access = operations, access

    def routes(self) -> dict[str, Route]:
        """A route for each operation."""
        return {f"{LEVEL}{name}": partial(self._carry_out, name) for name in OPERATIONS}

    async def _carry_out(self, name: str, request: HttpRequest) -> HttpResponse:
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content not in TYPES:
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise HttpError(HTTPStatus.FORBIDDEN)
        caller = await self._log_in(request)
        reply = await answer(self._operations, name, await request.body(), MAX_REPLY, caller)
        return HttpResponse(HTTPStatus.OK, content, reply)

    async def _log_in(self, request: HttpRequest) -> Identity:
        user, password = _credentials(request.headers.get("authorization", ""))
        denied = await self._access.verify(user, password, request.address)
        if denied is not None:
            busy = denied.reason is Reason.BUSY
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE if busy else HTTPStatus.UNAUTHORIZED)
        label = f"user {user!r} over HTTP from {request.address}"
        return self._access.identify(f"http/{user}", user, local=is_loopback(request.address), label=label)


def _credentials(header: str) -> tuple[str, bytes]:
    """The user and the password of `Authorization: Basic` (RFC 7617); raises HttpError."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        raise HttpError(HTTPStatus.UNAUTHORIZED)
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        name = user.decode()
    except (binascii.Error, UnicodeDecodeError):
        raise HttpError(HTTPStatus.BAD_REQUEST) from None
    if not colon or not name:
        raise HttpError(HTTPStatus.BAD_REQUEST)
    return name, password
