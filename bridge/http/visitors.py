"""Identifies visitors: programs with a password in each request, browsers with a session, and others.

    GET  /session.json   who is logged in, and the session's token
    POST /login          {"user", "password"}: begins a session
    POST /logout         ends it

A session consists of a random cookie that scripts cannot read (HttpOnly) and that browsers do not send for
other sites (SameSite=Strict), and a token that the page sends in the header `X-Streambridge-Token` with every
change. It ends after `IDLE` seconds without a request or `LIFE` seconds in total, when its user's password is
changed, and when the service stops. If there are `MOST`, one more ends one of the user who has most of them,
so that nobody logs out others by logging in again and again. The cookie's name contains a digest of the
gateway's id, because browsers send a cookie to all ports of a host, and tunnels to several gateways often end
at one host.

Looking needs no login on loopback or if there are no users. A visitor without a login may read the same
messages as an anonymous MQTT client.

The right `page` in the rules (`bridge.access.rules`) restricts this further. "look" leaves a user only the
operations that change nothing. "none" closes everything here except metrics and health checks, even to
visitors without a login.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from bridge.access.logins import Reason
from bridge.audit import Origin, record
from bridge.net.addresses import is_loopback
from bridge.net.httpserver import JSON, HttpError, HttpRequest, HttpResponse, Route, json_response

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.access.logins import Access
    from bridge.access.rules import Identity

IDLE, LIFE = 30 * 60.0, 12 * 3600.0
MOST = 100  # sessions
PROOF_FIELD = "x-streambridge-token"


@dataclass
class _Session:
    user: str
    proof: bytes
    token: str
    began: float
    used: float


class Login(Struct, forbid_unknown_fields=True):
    """The body of /login."""

    user: str
    password: str


class Visitors:
    """The sessions of browsers, and the rights of all visitors."""

    def __init__(self, access: Access, gateway: str, now: Callable[[], float] = time.monotonic) -> None:
        """`now` returns the time in seconds."""
        self._access, self._now = access, now
        self._cookie = f"streambridge_{hashlib.sha256(gateway.encode()).hexdigest()[:8]}"
        self._sessions: dict[bytes, _Session] = {}  # by the digest of the cookie, the last used one last

    def looking(self) -> dict[str, Route]:
        """The routes for GET."""
        return {"/session.json": self._describe}

    def acting(self) -> dict[str, Route]:
        """The routes for POST."""
        return {"/login": self._log_in, "/logout": self._log_out}

    # -- rights ------------------------------------------------------------
    async def ensure_may_look(self, request: HttpRequest) -> None:
        """Raise HttpError if the visitor must log in or may not look."""
        open_here = is_loopback(request.address) or not self._access.has_users
        if self._session(request) is None and open_here and self._nobody(request).page != "none":
            return
        self._identity(await self._known(request), request)

    async def reader(self, request: HttpRequest) -> Identity:
        """Return the rights with which messages are read. Raises HttpError if that needs a login."""
        known = self._session(request) is not None or "authorization" in request.headers
        loopback = is_loopback(request.address)
        if known:
            return self._identity(await self._known(request), request)
        nobody = self._nobody(request)
        if nobody.page == "none" or self._access.refuse_anonymous(loopback=loopback) is not None:
            raise HttpError(HTTPStatus.UNAUTHORIZED)
        return nobody

    async def actor(self, request: HttpRequest) -> Identity:
        """Return who requests a change. Raises HttpError without a login, or for another site."""
        ensure_same_origin(request)
        session = self._session(request)
        if session is not None and "authorization" not in request.headers:
            if not hmac.compare_digest(request.headers.get(PROOF_FIELD, "").encode(), session.token.encode()):
                raise HttpError(HTTPStatus.FORBIDDEN)
            return self._identity(session.user, request)
        return self._identity(await self._known(request), request)

    async def _known(self, request: HttpRequest) -> str:
        """Return the user of a request, by its session or password. Raises HttpError."""
        session = self._session(request)
        if session is not None and "authorization" not in request.headers:
            return session.user
        user, password = _credentials(request.headers.get("authorization", ""))
        await self._verify(user, password, request)
        return user

    async def _verify(self, user: str, password: bytes, request: HttpRequest) -> None:
        denied = await self._access.verify(user, password, request.address)
        origin = Origin("http", request.address)
        if denied is None:
            record("login", origin=origin, user=user, why="password")
        else:
            record("login", "refused", origin=origin, user=user, proven=False, why=denied.text)
            busy = denied.reason is Reason.BUSY
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE if busy else HTTPStatus.UNAUTHORIZED)

    def _identity(self, user: str, request: HttpRequest) -> Identity:
        """The rights of a user; raises HttpError if the page is closed to the user."""
        label = f"user {user!r} over HTTP from {request.address}"
        found = self._identified(f"http/{user}", user, request, label)
        if found.page == "none":
            raise HttpError(HTTPStatus.FORBIDDEN)
        return found

    def _nobody(self, request: HttpRequest) -> Identity:
        """The rights of a visitor without a login."""
        label = f"an anonymous visitor over HTTP from {request.address}"
        return self._identified("http", None, request, label)

    def _identified(self, client: str, user: str | None, request: HttpRequest, label: str) -> Identity:
        local = is_loopback(request.address)
        found = self._access.identify(client, user, local=local, label=label, visits=True)
        found.origin = Origin("http", request.address)
        return found

    # -- sessions ------------------------------------------------------------
    def _session(self, request: HttpRequest) -> _Session | None:
        """Return the session of a request, if it has a valid one."""
        key = self._key(request)
        session = self._sessions.pop(key, None)
        now = self._now()
        if (
            session is None
            or now - session.used > IDLE
            or now - session.began > LIFE
            or not self._access.still_admits(session.user, session.proof)
        ):
            return None
        session.used = now
        self._sessions[key] = session
        return session

    def _key(self, request: HttpRequest) -> bytes:
        for pair in request.headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie:
                return _digest(value)
        return b""

    async def _describe(self, request: HttpRequest) -> HttpResponse:
        """Who is logged in. `users` says whether there are users.

        `look` says whether the visitor may look, `operate` whether the user may change anything.
        """
        session = self._session(request)
        found: dict[str, object] = {"user": None, "users": self._access.has_users, "operate": True}
        if session is not None:
            found |= {"user": session.user, "token": session.token, "operate": self._operates(session.user)}
        try:
            await self.ensure_may_look(request)
        except HttpError:
            return json_response(found | {"look": False})
        return json_response(found | {"look": True})

    def _operates(self, user: str) -> bool:
        return self._access.identify("", user).page == "operate"

    async def _log_in(self, request: HttpRequest) -> HttpResponse:
        ensure_same_origin(request)
        if content_type(request) != JSON:
            raise HttpError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        try:
            login = msgspec.json.decode(await request.body(), type=Login)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise HttpError(HTTPStatus.BAD_REQUEST) from None
        if not login.user:
            raise HttpError(HTTPStatus.UNAUTHORIZED)
        await self._verify(login.user, login.password.encode(errors="surrogatepass"), request)
        visitor = self._identity(login.user, request)
        self._sessions.pop(self._key(request), None)
        cookie, now = secrets.token_urlsafe(32), self._now()
        session = _Session(login.user, self._access.proof_of(login.user), secrets.token_urlsafe(32), now, now)
        self._make_room(login.user)
        self._sessions[_digest(cookie)] = session
        answer = json_response({"user": session.user, "token": session.token, "operate": visitor.may_change})
        return answer._replace(
            fields={"Set-Cookie": f"{self._cookie}={cookie}; Path=/; HttpOnly; SameSite=Strict"}
        )

    def _make_room(self, user: str) -> None:
        """End a session if there are too many: the least recently used one of the user who has most."""
        if len(self._sessions) < MOST:
            return
        count = Counter(one.user for one in self._sessions.values())
        count[user] += 1  # the new one
        most = max(count.values())
        del self._sessions[next(key for key, one in self._sessions.items() if count[one.user] == most)]

    async def _log_out(self, request: HttpRequest) -> HttpResponse:
        await self.actor(request)
        self._sessions.pop(self._key(request), None)
        ended = f"{self._cookie}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"
        return json_response({"user": None})._replace(fields={"Set-Cookie": ended})


def ensure_same_origin(request: HttpRequest) -> None:
    """Raise HttpError if the request comes from a page of another site."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HttpError(HTTPStatus.FORBIDDEN)


def content_type(request: HttpRequest) -> str:
    """The type of the body, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _digest(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


def _credentials(header: str) -> tuple[str, bytes]:
    """The user and the password of `Authorization: Basic` (RFC 7617); raises HttpError."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        raise HttpError(HTTPStatus.UNAUTHORIZED)
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        name = user.decode()
    except ValueError:  # it is no base64, or the name no UTF-8
        raise HttpError(HTTPStatus.BAD_REQUEST) from None
    if not colon or not name:
        raise HttpError(HTTPStatus.BAD_REQUEST)
    return name, password
