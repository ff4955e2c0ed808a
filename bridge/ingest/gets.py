"""GET requests to S3 that bypass boto3: botocore signs them, and its HTTP session sends them.

For a small object, boto3 spends two thirds of its CPU time on work that the ingest job does not need: it
resolves the endpoint, and builds and parses request and response by S3's service model. These requests skip
that. They learn the location and region of the bucket from the first request of boto3, so boto3 still handles
redirects, path style and other endpoints.

boto3 also handles everything other than the object itself: `get` returns None for any other response and for
a broken connection, and then the caller uses boto3, with its retries and errors. A store whose requests are
not signed with AWS signature version 4 for `s3` (anonymous, directory buckets) learns nothing and only uses
boto3.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^,]*/([^/]+)/s3/aws4_request,")
_FOUND, _PART, _GONE = 200, 206, 404
_SERVER_ERROR = 500
_EVENT = "before-send.s3.GetObject"


class SignedGets:
    """The requests of one bucket. Threads may share it."""

    def __init__(self, session: Any, client: Any, connections: int) -> None:
        """Take botocore's session, and boto3's client for S3, which must make the first request."""
        from botocore.httpsession import URLLib3Session
        from botocore.utils import get_environ_proxies

        self._credentials, self._events = session.get_credentials(), client.meta.events
        self._http = URLLib3Session(
            verify=session.get_config_variable("ca_bundle") or True,
            proxies=get_environ_proxies(client.meta.endpoint_url),
            max_pool_connections=connections,
        )
        self._seen = threading.local()  # the latest request of boto3 in each thread
        self._learned: tuple[str, str, str] | None = None  # URL before the key, region, user agent
        client.meta.events.register(_EVENT, self._see)

    def _see(self, request: Any, **_: object) -> None:
        self._seen.request = request

    def learn(self, key: str) -> None:
        """boto3 has read the object of this key, in this thread: make the next requests like that one."""
        request, self._seen.request = getattr(self._seen, "request", None), None
        if self._learned is not None or request is None or self._credentials is None:
            return
        scope = _SCOPE.match(_text(request.headers.get("Authorization", "")))
        path = _quoted(key)
        if scope and request.url.endswith(f"/{path}"):
            agent = _text(request.headers.get("User-Agent", ""))
            self._learned = request.url.removesuffix(path), scope[1], agent

    def get(self, key: str, read: Callable[[Any], bytes], part: str = "") -> bytes | None:
        """Read an object, or the range `part` of it; None: ask boto3.

        `read` gets the body as a file. What it raises is raised here, if the connection did not fail.
        """
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        if self._learned is None:
            return None
        try:
            response = self._send(*self._learned, key, part)
            if response.status_code == (_PART if part else _FOUND):
                return self._body(response.raw, read)
            _ = response.content  # so that the connection can be used again
        except (BotoCoreError, HTTPError, OSError):
            return None
        if response.status_code != _GONE and response.status_code < _SERVER_ERROR:
            self._learned = None  # a redirect, or no right: boto3 may know more
        return None

    def _send(self, place: str, region: str, agent: str, key: str, part: str) -> Any:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        headers = {"User-Agent": agent, **({"Range": part} if part else {})}
        request = AWSRequest("GET", place + _quoted(key), headers, stream_output=True)
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", region).add_auth(request)
        prepared = request.prepare()
        answered = self._events.emit_until_response(_EVENT, request=prepared)[1]
        return answered or self._http.send(prepared)

    @staticmethod
    def _body(raw: Any, read: Callable[[Any], bytes]) -> bytes:
        """Return the body; raises HTTPError if the connection ended before it did."""
        from urllib3.exceptions import IncompleteRead

        try:
            data = read(raw)
            # not every read that is limited raises this itself
            if left := getattr(raw, "length_remaining", None):
                raise IncompleteRead(len(data), left)
            return data
        except BaseException:
            raw.close()
            raise


def _quoted(key: str) -> str:
    return quote(key, safe="/~")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
