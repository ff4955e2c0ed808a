"""Reading objects over a link that breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from botocore.exceptions import BotoCoreError

from bridge.ingest import store
from bridge.ingest.errors import Vanished
from bridge.ingest.store import Place

CONTENT = bytes(range(256)) * 4096


@contextmanager
def breaking(times: int) -> Iterator[str]:
    """An S3 that breaks the connection in the middle of an object, so many times."""
    left = iter(range(times))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT if next(left, None) is None else CONTENT[: len(CONTENT) // 2])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_object_whose_connection_breaks_is_read_again_and_not_its_whole_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "RETRY_INTERVAL", 0.01)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with breaking(store.READS - 1) as endpoint:
        assert Place("s3://bucket", endpoint).open().get("key") == CONTENT
    with breaking(store.READS) as endpoint, pytest.raises(BotoCoreError):
        Place("s3://bucket", endpoint).open().get("key")


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_end_of_an_object_can_be_read_alone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place: Place = request.getfixturevalue("bucket") if kind == "bucket" else Place(str(tmp_path))
    place.open().put("key", b"0123456789")
    assert [place.open().tail("key", size) for size in (4, 10, 99)] == [b"6789", *[b"0123456789"] * 2]
    with pytest.raises(Vanished):
        place.open().tail("other", 4)
