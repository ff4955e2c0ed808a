"""Reading objects over a link that breaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from botocore.exceptions import BotoCoreError, ReadTimeoutError

from bridge.ingest.deletes import sweep
from bridge.ingest.errors import Vanished
from bridge.ingest.store import READS, LocalStore, S3Store, StorageLocation, read

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


@pytest.mark.parametrize("most", [None, len(CONTENT), 10 * len(CONTENT)])
def test_an_object_whose_connection_breaks_is_read_again_and_not_its_whole_task(
    monkeypatch: pytest.MonkeyPatch, most: int | None
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with breaking(READS - 1) as endpoint:
        assert S3Store("bucket", "", endpoint, retry_interval=0.01).get("key", most) == CONTENT
    with breaking(READS) as endpoint, pytest.raises(BotoCoreError):
        S3Store("bucket", "", endpoint, retry_interval=0.01).get("key", most)


def test_an_error_of_the_connection_is_raised_as_it_is() -> None:
    class Silent(LocalStore):
        def get(self, key: str, most: int | None = None) -> bytes:
            raise ReadTimeoutError(endpoint_url="http://s3")

    with pytest.raises(ReadTimeoutError):
        read(Silent(Path()), "key", 1, 1)


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_the_end_of_an_object_can_be_read_alone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place: StorageLocation = (
        request.getfixturevalue("bucket") if kind == "bucket" else StorageLocation(str(tmp_path))
    )
    place.open().put("key", b"0123456789")
    assert [place.open().tail("key", size) for size in (4, 10, 99)] == [b"6789", *[b"0123456789"] * 2]
    with pytest.raises(Vanished):
        place.open().tail("other", 4)


def labelled(key: str) -> bool:
    return key.rpartition("/")[2].startswith("r1-")


def test_what_a_killed_writer_left_is_swept_by_its_label_and_age(tmp_path: Path) -> None:
    place = StorageLocation(str(tmp_path))
    for name in ("r1-a.parquet", "r1-b.parquet", "r1-c.parquet.x.tmp", "r2-a.parquet"):
        path = tmp_path / "data" / "day=1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "r1-a.parquet").write_bytes(b"x")

    def left() -> set[str]:
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("r*")}

    kept = [f"file:{tmp_path}/data/day=1/r1-b.parquet"]
    assert sweep(place, "data/day=", lambda: kept, wanted=labelled).count == 1
    assert left() == {"data/day=1/r1-b.parquet", "data/day=1/r2-a.parquet", "other/r1-a.parquet"}
    assert sweep(place, "data/", list, before=1000.0).count == 0
    assert sweep(place, "data/", list).count == 2
    assert left() == {"other/r1-a.parquet"}


def test_unfinished_multipart_uploads_are_swept(bucket: StorageLocation) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=bucket.endpoint, region_name="us-east-1")
    name, _, prefix = bucket.url.removeprefix("s3://").partition("/")
    for file in ("r1-a", "r2-a"):
        client.create_multipart_upload(Bucket=name, Key=f"{prefix}/data/day=1/{file}")
    store = bucket.open()
    store.put("data/day=1/r1-b", b"x")
    store.put("data/day=1/r1-c", b"x")
    kept = [f"s3n://{name}/{prefix}/data/day=1/r1-b"]
    assert sweep(bucket, "data/day=", lambda: kept, wanted=labelled).count == 1
    assert [entry.key for entry in store.list()] == ["data/day=1/r1-b"]
    uploads = client.list_multipart_uploads(Bucket=name)["Uploads"]
    assert [upload["Key"] for upload in uploads] == [f"{prefix}/data/day=1/r2-a"]
