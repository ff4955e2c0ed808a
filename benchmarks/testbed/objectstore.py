"""An S3 service in memory, for measurements: its listings cost the same however many objects there are.

    python -m benchmarks.testbed.objectstore [GATEWAYS MESSAGES]

Prints its port, serves until standard input ends. It knows one bucket of any name, and GET, HEAD, PUT (also
`If-None-Match: *`) and ListObjectsV2 with `prefix`, `delimiter`, `start-after` and `continuation-token`. With
two numbers, it also plays so many gateways: from the first line of standard input on, each of them uploads an
object a second with the messages of that second, and its report. A payload is JSON with the time of its
message in ns.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import sys
import threading
import time
from bisect import bisect_left, bisect_right, insort
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape

from bridge.objectkeys import data_key, report_key

PREFIX = "site/"
EPOCH = 1_795_000_000_000


class Objects:
    """The objects, sorted by key."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.keys: list[str] = []
        self.found: dict[str, tuple[bytes, str, str]] = {}  # data, ETag, time
        self.requests: dict[str, int] = {}

    def put(self, key: str, data: bytes, *, absent: bool = False) -> str | None:
        """Store an object and return its ETag; None if `absent` and there is one."""
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        with self.lock:
            if key not in self.found:
                insort(self.keys, key)
            elif absent:
                return None
            self.found[key] = data, etag, now
        return etag

    def page(self, prefix: str, after: str, delimiter: str) -> tuple[list[str], list[str], str]:
        """Return keys, common prefixes, and where the next page begins; empty if there is none."""
        keys: list[str] = []
        folders: list[str] = []
        with self.lock:
            at = max(bisect_left(self.keys, prefix), bisect_right(self.keys, after) if after else 0)
            while at < len(self.keys) and self.keys[at].startswith(prefix):
                if len(keys) + len(folders) == 1000:
                    return keys, folders, self.keys[at - 1]
                head, found, _ = self.keys[at][len(prefix) :].partition(delimiter or "\0")
                if found:
                    folders.append(prefix + head + delimiter)
                    at = bisect_left(self.keys, prefix + head + chr(ord(delimiter) + 1))
                else:
                    keys.append(self.keys[at])
                    at += 1
        return keys, folders, ""


class Handler(BaseHTTPRequestHandler):
    """Answers requests; the server has `objects`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    @property
    def objects(self) -> Objects:
        found: Objects = self.server.objects  # type: ignore[attr-defined]
        return found

    def answer(self, status: int, body: bytes = b"", etag: str = "") -> None:
        self.objects.requests[self.command] = self.objects.requests.get(self.command, 0) + 1
        self.send_response(status)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_expect_100(self) -> bool:
        proceeds = super().handle_expect_100()
        self.wfile.flush()  # else the client waits a second before it sends the body
        return proceeds

    def do_GET(self) -> None:
        url = urlparse(self.path)
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        if not key:
            return self._list({name: values[0] for name, values in parse_qs(url.query).items()})
        found = self.objects.found.get(key)
        if found is None:
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return self.answer(200, found[0], found[1])

    do_HEAD = do_GET  # noqa: N815 - the name is that of the library

    def do_PUT(self) -> None:
        _, _, key = unquote(urlparse(self.path).path).lstrip("/").partition("/")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            data = _unchunked(data)
        etag = self.objects.put(key, data, absent=self.headers.get("If-None-Match") == "*")
        if etag is None:
            return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        return self.answer(200, b"", etag)

    def _list(self, asked: dict[str, str]) -> None:
        after = asked.get("continuation-token") or asked.get("start-after", "")
        keys, folders, token = self.objects.page(asked.get("prefix", ""), after, asked.get("delimiter", ""))
        parts = []
        for key in keys:
            data, etag, when = self.objects.found[key]
            parts.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                f'<ETag>"{etag}"</ETag><Size>{len(data)}</Size></Contents>'
            )
        parts += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders]
        parts.append(f"<IsTruncated>{'true' if token else 'false'}</IsTruncated>")
        if token:
            parts.append(f"<NextContinuationToken>{escape(token)}</NextContinuationToken>")
        text = f"<ListBucketResult>{''.join(parts)}</ListBucketResult>"
        self.answer(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())

    def log_message(self, *_: object) -> None:
        pass


def _unchunked(data: bytes) -> bytes:
    body, at = bytearray(), 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].split(b";")[0], 16)
        if not size:
            return bytes(body)
        body += data[end + 2 : end + 2 + size]
        at = end + 4 + size


class Server(ThreadingHTTPServer):
    """The service."""

    daemon_threads = True
    request_queue_size = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects = Objects()


def second(gateway: str, number: int, messages: int, began: float) -> bytes:
    """The object of one second: `messages` from `began` on, evenly."""
    lines = []
    for at in range(messages):
        when = began + at / messages
        stamp = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        payload = json.dumps({"sent": round(when * 1e9), "temp": 20.5, "pad": "x" * 100}).encode()
        row = {
            "gateway": gateway,
            "stream": "sensors",
            "epoch": str(EPOCH),
            "sequence_number": number * messages + at,
            "ingest_time": f"{stamp}Z",
            "topic": f"plant/{gateway}",
            "payload": base64.b64encode(payload).decode(),
        }
        lines.append(json.dumps(row) + "\n")
    return gzip.compress("".join(lines).encode(), 1)


def play(objects: Objects, gateways: int, messages: int) -> None:
    """Upload one object a second for each gateway, one gateway after the other through that second."""
    start, number = time.time(), 0
    while True:
        for index in range(gateways):
            began = start + number + index / gateways
            time.sleep(max(0.0, began + 1 - time.time()))
            name = f"played-{index:02d}"
            first = number * messages
            last = first + messages - 1
            key = data_key(name, "sensors", EPOCH, first, last, int(began * 1000), "ndjson.gz")
            objects.put(PREFIX + key, second(name, number, messages, began))
            stream = {"stream": "sensors", "epoch": EPOCH, "oldest": 0, "newest": last, "exported": last}
            report = {"gateway": name, "updated": int(began * 1000) + 1000, "streams": [stream]}
            objects.put(PREFIX + report_key(name), json.dumps(report).encode())
        number += 1


def main() -> None:
    """Serve until standard input ends; then print the number of requests by method."""
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    if sys.stdin.readline() and len(sys.argv) == 3:
        arguments = (server.objects, int(sys.argv[1]), int(sys.argv[2]))
        threading.Thread(target=play, args=arguments, daemon=True).start()
    sys.stdin.read()
    print(json.dumps(server.objects.requests))


if __name__ == "__main__":
    main()
