"""A web server for the `http` exporter."""

from __future__ import annotations

import gzip
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Web:
    """A web server that keeps what is posted to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.peers: set[Any] = set()  # addresses of the connections that brought something
        self.status = 204
        self.retry_after = "1"
        self.room: int | None = None  # it takes so many more requests
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: object) -> None:
                """Nothing."""

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = self.rfile.read(length)
                if len(body) < length:  # cut off: no server takes that
                    self.close_connection = True
                    return
                is_packed = self.headers.get("Content-Encoding") == "gzip"
                text = gzip.decompress(body) if is_packed else body
                status = 422 if b"poison" in text or b"cG9pc29u" in text else web.status
                if status == 204 and web.room is not None:
                    web.room -= 1
                    status = 204 if web.room >= 0 else 503
                if status == 204:
                    web.bodies.append(body)
                    web.peers.add(self.client_address)
                    web.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.send_header("Retry-After", web.retry_after)
                self.end_headers()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/in"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


class Refusing:
    """A web server that has one answer to everything."""

    def __init__(self) -> None:
        self.status, self.body = 500, b""
        refusing = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: object) -> None:
                """Nothing."""

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(refusing.status)
                self.send_header("Content-Length", str(len(refusing.body)))
                self.end_headers()
                self.wfile.write(refusing.body)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.port = self.server.server_port

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
