"""`HttpFrontEnd`: the listener and the routes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import time
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.http import metrics
from bridge.http.documents import Documents
from bridge.http.observer import SHARE, Observer
from bridge.http.requests import MAX_REQUEST, Requests
from bridge.http.visitors import Visitors
from bridge.net.addresses import host_and_port, is_loopback, network_of
from bridge.net.httpserver import (
    HttpError,
    HttpLimits,
    HttpRequest,
    HttpResponse,
    HttpServer,
    Route,
    json_response,
)
from bridge.net.limits import FOR_HEALTH, SPARE_DESCRIPTORS, ConnectionLimits

if TYPE_CHECKING:
    from bridge.access.logins import Access
    from bridge.http.settings import HttpConfig
    from bridge.net.turns import Turns
    from bridge.operations.catalog import Operations

log = logging.getLogger("bridge.http")
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("base", "table", "chart", "session", "overview", "stream", "lists", "main")
LOOKING, ACTING = ("GET", "HEAD"), ("POST",)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class HttpFrontEnd:
    """The status page, metrics, health checks and requests."""

    def __init__(
        self,
        config: HttpConfig,
        observer: Observer,
        operations: Operations,
        access: Access,
        gateway: str,
    ) -> None:
        """Raises ValueError if `listen` is not an address."""
        listen = config.listen
        self._observer = observer
        self._page = _page()
        self._metrics: asyncio.Task[bytes] | None = None
        self._metrics_until = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._loopback = is_loopback(host_and_port(listen)[0])
        visitors, turns = Visitors(access, gateway), operations.turns
        looking = self._pages() | Documents(observer, operations, visitors).routes() | visitors.looking()
        acting = Requests(operations, visitors).routes() | visitors.acting()
        self._server = HttpServer(
            "http.listen",
            listen,
            {path: partial(_only, LOOKING, turns, route) for path, route in looking.items()}
            | {path: partial(_only, ACTING, turns, route) for path, route in acting.items()},
            ConnectionLimits(
                config.connections, config.connections_per_address, SPARE_DESCRIPTORS - FOR_HEALTH
            ),
            HttpLimits(methods=LOOKING + ACTING, body=MAX_REQUEST, displace=True),
        )

    def _pages(self) -> dict[str, Route]:
        return {
            "/": self._root,
            "/metrics": self._scrape,
            "/healthz": self._health,
            "/readyz": self._readiness,
        }

    async def start(self) -> list[str]:
        """Listen. Returns the URL. Raises ConfigError."""
        url = await self._server.start()
        if not self._loopback:
            log.warning("every machine that can reach %s can see the streams and clients", url)
        logging.getLogger().addHandler(self._observer.events)
        self._watch = asyncio.create_task(self._observer.run(), name="observer")
        return [url]

    async def stop(self) -> None:
        """Close the listener and its connections."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._server.stop()
        logging.getLogger().removeHandler(self._observer.events)
        self._observer.close()

    # -- routes ----------------------------------------------------------------------------------
    async def _root(self, request: HttpRequest) -> HttpResponse:
        return self._page

    async def _scrape(self, request: HttpRequest) -> HttpResponse:
        now = time.monotonic()
        if self._metrics is None or (self._metrics.done() and now >= self._metrics_until):
            self._metrics = asyncio.create_task(self._render())
        return HttpResponse(HTTPStatus.OK, PROMETHEUS, await asyncio.shield(self._metrics))

    async def _render(self) -> bytes:
        began = time.monotonic()
        text = await asyncio.to_thread(metrics.render, self._observer.state())
        ended = time.monotonic()
        self._metrics_until = ended + (ended - began) * SHARE
        return text

    async def _health(self, request: HttpRequest) -> HttpResponse:
        """Alive: the event loop answers. Able to store: the data directory was writable."""
        error = await self._observer.storage_error()
        status = HTTPStatus.OK if error is None else HTTPStatus.SERVICE_UNAVAILABLE
        return json_response({"ok": error is None, "storage": error or "writable"}, status)

    async def _readiness(self, request: HttpRequest) -> HttpResponse:
        """Ready: messages are received, and all streams can store them.

        The listeners are open or the external broker is connected, and the service is not stopping.
        """
        await self._observer.storage_error()
        found = self._observer.readiness()
        return json_response(found, HTTPStatus.OK if found.ok else HTTPStatus.SERVICE_UNAVAILABLE)


async def _only(methods: tuple[str, ...], turns: Turns, route: Route, request: HttpRequest) -> HttpResponse:
    """The response of a route that has only these methods, in the turns of the visitor's address."""
    if request.method not in methods:
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, methods)
    network = network_of(request.address)

    async def answered() -> HttpResponse:
        return await route(request)

    return await turns.work((network, network), answered())


def _page() -> HttpResponse:
    """Return the page, made from its files. Its policy allows only this script and this style."""
    style = (PAGE / "page.css").read_text()
    script = "".join((PAGE / f"{name}.js").read_text() for name in SCRIPTS)
    page = (PAGE / "page.html").read_text().replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    fields = {"Content-Security-Policy": policy}
    return HttpResponse(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(), fields)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
