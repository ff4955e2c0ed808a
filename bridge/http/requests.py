"""Operations by HTTP: `POST /requests/<operation>` with the body of a request, in JSON or CBOR.

The reply has the status 200 and the same body as over MQTT, whose `status` is the result. Any other status
means that nothing was carried out:

    400  the user name in `Authorization: Basic` cannot be read
    401  no login, or a wrong password; without the header that makes browsers ask for one
    403  the request comes from a page of another site, or from a session without its token; or the rules
         close the page to this user
    415  the body is neither application/json nor application/cbor, which a form of another site cannot send
    503  too many logins of this user are being checked

A read or a fetch that waits ends when its client closes the connection, as over MQTT.

Each request needs a user of `mqtt.users_file`, even on loopback: by a password, or by the session of a
browser (`visitors`). The rules are those of the user; a `%c` in them gives nothing, because there is no
client id. For an operation that changes something, a user who may only look (`page` in the rules) gets status
200 with a refusal.
"""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from bridge.http.visitors import Visitors, content_type
from bridge.net.httpserver import HttpError, HttpRequest, HttpResponse, Route
from bridge.operations.catalog import OPERATIONS
from bridge.operations.codec import answer

if TYPE_CHECKING:
    from bridge.operations.catalog import Operations

LEVEL = "/requests/"
MAX_REQUEST = 1024 * 1024
MAX_REPLY = 8 * 1024 * 1024
TYPES = {"application/json", "application/cbor"}


class Requests:
    """The routes of the operations."""

    def __init__(self, operations: Operations, visitors: Visitors) -> None:
        self._operations, self._visitors = operations, visitors

    def routes(self) -> dict[str, Route]:
        """A route for each operation."""
        return {f"{LEVEL}{name}": partial(self._carry_out, name) for name in OPERATIONS}

    async def _carry_out(self, name: str, request: HttpRequest) -> HttpResponse:
        content = content_type(request)
        if content not in TYPES:
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        caller = await self._visitors.actor(request)
        work = answer(self._operations, name, await request.body(), MAX_REPLY, caller)
        reply = await (request.while_connected(work) if OPERATIONS[name].waits else work)
        return HttpResponse(HTTPStatus.OK, content, reply)
