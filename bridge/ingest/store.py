"""Objects under a URL: `s3://bucket/prefix` (also s3a, s3n) by boto3; `file:///dir` or a path locally.

The job does not use Spark's readers: at one truncated object these either fail the whole query or, configured
to ignore it, silently return part of it.

Keys are relative to the URL. `put`, `create` and `writer` are atomic: a reader sees the whole object or none.
Missing objects raise `Vanished`; for everything else (network, throttling, credentials) the library's
exception is raised, and Spark retries the task. A `StorageLocation` travels to the executors; a store does
not.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlparse
from uuid import uuid4

from bridge.ingest.errors import BadObject, BadOption, IngestError, Unreadable, Vanished
from bridge.ingest.gets import SignedGets

T = TypeVar("T")
S3_SCHEMES = ("s3", "s3a", "s3n")
LISTERS = 16  # prefixes listed at the same time: a LIST request returns 1000 keys
READERS = 16  # small objects read at the same time: each costs a round trip
READS = 4  # attempts to read an object whose connection breaks, before Spark retries the whole task
RETRY_INTERVAL = 0.5  # seconds
ALWAYS = float("inf")
UNFINISHED = ".tmp"  # ends the name of a local file that is being written
SPOOL = 32 << 20  # bytes that a writer to S3 holds in memory before it uses a local temporary file

# S3 returns these for one object; the next one may well be readable
OBJECT_ERRORS = frozenset(
    {
        "AccessDenied",
        "InvalidObjectState",  # archived (Glacier)
        "InvalidRequest",  # encrypted with a customer's key
        "KMS.DisabledException",
        "KMS.InvalidKeyUsageException",
        "KMS.KMSInvalidStateException",
        "KMS.NotFoundException",
    }
)


class Entry(NamedTuple):
    """One object of a listing; `modified` is Unix time in ms."""

    key: str
    size: int
    etag: str
    modified: int


class Top(NamedTuple):
    """What is directly below the location: objects, and folders, whose names end in `/`."""

    entries: list[Entry]
    folders: list[str]


class ObjectStore(Protocol):
    """The storage operations that the job needs.

    `ahead` is how many requests may be on their way at the same time. 0: only one, in the caller's thread.
    `under` yields the objects whose keys begin with a prefix, only those with keys greater than `after`.
    `size` returns None for an object that does not exist. Only `deletes` may call `delete`. `abort` deletes
    unfinished objects, which nobody can read: those with the prefix whose keys are `wanted`, begun before
    `before` (Unix time in ms).
    """

    ahead: int

    def list(self) -> Iterator[Entry]: ...
    def top(self) -> Top: ...
    def under(self, prefix: str, after: str = "") -> Iterator[Entry]: ...
    def get(self, key: str, most: int | None = None) -> bytes: ...
    def tail(self, key: str, size: int) -> bytes: ...
    def part(self, key: str, start: int, size: int) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> bool: ...
    def writer(self, key: str) -> Any: ...
    def size(self, key: str) -> int | None: ...
    def delete(self, keys: Iterable[str]) -> None: ...
    def abort(self, prefix: str, wanted: Callable[[str], bool], before: float = ALWAYS) -> None: ...


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where objects are: a URL and, for S3 services other than AWS, their endpoint.

    Raises BadOption for a URL with any other scheme, which would otherwise be taken for a path.
    """

    url: str
    endpoint: str | None = None

    def __post_init__(self) -> None:
        scheme = urlparse(self.url).scheme
        if scheme not in ("", "file", *S3_SCHEMES):
            raise BadOption(
                f"{self.url}: {scheme}: is not supported; use s3://bucket/prefix or a directory "
                f"(for a directory of this name: ./{self.url})"
            )

    @property
    def is_s3(self) -> bool:
        return urlparse(self.url).scheme in S3_SCHEMES

    def open(self) -> ObjectStore:
        """Open the store; a process and its threads can share one."""
        parsed = urlparse(self.url)
        if self.is_s3:
            return S3Store(parsed.netloc, parsed.path.strip("/"), self.endpoint)
        return LocalStore(Path(unquote(parsed.path) if parsed.scheme else self.url))

    def join(self, name: str) -> StorageLocation:
        return replace(self, url=f"{self.url.rstrip('/')}/{name}")

    def above(self) -> StorageLocation | None:
        """Return the folder one level up, if there is one."""
        url = self.url.rstrip("/").rpartition("/")[0]
        return replace(self, url=url) if url and not url.endswith("/") else None


def literal(location: str) -> str:
    """Return a location with the scheme `s3`, or as a path; percent signs in it mean themselves."""
    local = re.sub("^file:(//(localhost)?(?=/))?", "", location, flags=re.IGNORECASE)
    return re.sub("^s3[an]?:", "s3:", re.sub("^/+", "/", local), flags=re.IGNORECASE)


def below(place: str, location: str) -> str | None:
    """Return the key of a location below a place that is spelt alike, except for the scheme; or None."""
    folder, path = literal(place).rstrip("/") + "/", literal(location)
    key = path.removeprefix(folder)
    return key if key != path and not key.startswith("/") else None


def holding(location: StorageLocation, path: str) -> tuple[StorageLocation, str]:
    """Return where a data file of a table at `location` is, and its key there.

    The path of a file that is not below the table is absolute.
    """
    found = re.match("(/|[a-z0-9]+://[^/]+/)", text := literal(path))
    return (replace(location, url=found[0]), text[found.end() :]) if found else (location, path)


def table_folder(option: str, given: str, refused: str) -> Path:
    """Return the absolute directory of a local table; `refused` are characters with a meaning in URLs.

    Raises BadOption if the path has one of these.
    """
    folder = Path(re.sub("^file:(//)?", "", given, flags=re.IGNORECASE)).resolve()
    for character in refused:
        if character in str(folder):
            raise BadOption(f"{option} {folder}: the path of a local table must not contain {character!r}")
    return folder


@lru_cache
def shared(location: StorageLocation) -> ObjectStore:
    """Return the store of a location; the tasks of a worker process share it until one of them fails.

    Opening one for S3 costs as much as 100,000 rows. Not for the driver, whose credentials may change.
    """
    return location.open()


def ahead(requests: Iterable[Callable[[], T]], threads: int) -> Iterator[Callable[[], T]]:
    """Yield for each request, in order, a function that returns its answer, or raises.

    Meanwhile the next ones are made in so many threads; without any, a request is made when its function is
    called.
    """
    if not threads:
        yield from requests
        return
    with ThreadPoolExecutor(threads) as pool:
        coming: deque[Future[T]] = deque()
        for request in requests:
            coming.append(pool.submit(request))
            if len(coming) > threads:
                yield coming.popleft().result
        while coming:
            yield coming.popleft().result


def read(store: ObjectStore, key: str, size: int, most: int) -> bytes:
    """Read an object that was listed with this size.

    Raises BadObject, without reading, if it has more than `most` bytes; Vanished if it no longer exists; and
    Unreadable for a failure that concerns this object alone and may pass (archived, no right to it or to its
    encryption key). For any other failure the library's exception is raised.
    """
    if size > most:
        raise BadObject(f"{size} bytes are more than the {most} that an object may have")
    try:
        return store.get(key, most)
    except PermissionError as error:  # of a file
        raise Unreadable(f"{type(error).__name__}: {error.strerror}") from error
    except Exception as error:
        # of botocore's ClientError; its errors of a connection have None there
        details = (getattr(error, "response", None) or {}).get("Error", {})
        if details.get("Code") not in OBJECT_ERRORS:
            raise
        raise Unreadable(f"{details['Code']}: {details.get('Message')}") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the place of `path` when the block ends without an error.

    A reader sees the old file or the new one. Raises OSError.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}{UNFINISHED}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class LocalStore:
    """Objects as files below a directory; files that end in `.tmp` are unfinished."""

    ahead = READERS

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> Iterator[Entry]:
        return self.under("")

    def top(self) -> Top:
        entries: list[Entry] = []
        for folder, folders, names in os.walk(self.root, onerror=_unlisted):
            for name in names:
                if not name.endswith(UNFINISHED):
                    entries += self._entry(os.path.join(folder, name))
            return Top(entries, [f"{name}/" for name in folders])
        return Top(entries, [])

    def under(self, prefix: str, after: str = "") -> Iterator[Entry]:
        for path in self._paths(prefix):
            if not path.endswith(UNFINISHED):
                yield from (entry for entry in self._entry(path) if entry.key > after)

    def _paths(self, prefix: str) -> Iterator[str]:
        within, _, begin = prefix.rpartition("/")
        top = str(self.root / within)
        for folder, folders, names in os.walk(top, onerror=_unlisted):
            if folder == top:
                folders[:] = [name for name in folders if name.startswith(begin)]
                names = [name for name in names if name.startswith(begin)]
            yield from (os.path.join(folder, name) for name in names)

    def _entry(self, path: str) -> Iterator[Entry]:
        try:
            found = os.stat(path)
        except OSError as error:
            _unlisted(error)
            return
        stamp = found.st_mtime_ns
        yield Entry(os.path.relpath(path, self.root), found.st_size, f"{stamp:x}", stamp // 1_000_000)

    def get(self, key: str, most: int | None = None) -> bytes:
        """Read an object; raises BadObject if it has grown to more than `most` bytes, and Vanished."""
        with self._opened(key) as file:
            return _at_most(file, most)

    def tail(self, key: str, size: int) -> bytes:
        """Read the last `size` bytes of an object, or all of a smaller one."""
        with self._opened(key) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read()

    def part(self, key: str, start: int, size: int) -> bytes:
        """Read `size` bytes (at least 1) of an object from `start` on, which is before its end."""
        with self._opened(key) as file:
            file.seek(start)
            return file.read(size)

    def _opened(self, key: str) -> BinaryIO:
        try:
            return (self.root / key).open("rb")
        except FileNotFoundError as error:
            raise Vanished(f"{key}: no such file") from error

    def put(self, key: str, data: bytes) -> None:
        with self.writer(key) as file:
            file.write(data)

    def create(self, key: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether it was written."""
        whole = f"{key}.{uuid4().hex}.tmp"
        self.put(whole, data)
        try:
            os.link(self.root / whole, self.root / key)
        except FileExistsError:
            return False
        finally:
            (self.root / whole).unlink()
        return True

    @contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        """Open a new object for writing. It appears when the block ends without an error."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            yield file

    def size(self, key: str) -> int | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            return (self.root / key).stat().st_size
        return None

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self.root / key).unlink(missing_ok=True)

    def abort(self, prefix: str, wanted: Callable[[str], bool], before: float = ALWAYS) -> None:
        for path in self._paths(prefix):
            if path.endswith(UNFINISHED):
                gone = [entry.key for entry in self._entry(path) if entry.modified < before]
                self.delete(key for key in gone if wanted(key))


def _at_most(body: Any, most: int | None) -> bytes:
    if most is None:
        return bytes(body.read())
    parts: list[bytes] = []
    room = most + 1
    # up to the empty one: only there do libraries compare the body with its Content-Length
    while room and (part := body.read(room)):
        parts.append(part)
        room -= len(part)
    if not room:  # replaced since the listing
        raise BadObject(f"it has more than the {most} bytes that an object may have")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _unlisted(error: OSError) -> None:
    """Raise IngestError for a file or folder that cannot be listed; one that does not exist is no error."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise IngestError(
            f"{error.filename}: cannot be listed: {error.strerror}; "
            "give the user of this process the right to read it, or move it elsewhere"
        ) from error


class S3Store:
    """Objects below a prefix of a bucket, with boto3's default credential chain."""

    ahead = READERS

    def __init__(
        self, bucket: str, prefix: str, endpoint: str | None, retry_interval: float = RETRY_INTERVAL
    ) -> None:
        import boto3
        import botocore.session
        from botocore.config import Config

        self.bucket, self.retry_interval = bucket, retry_interval
        self.prefix = f"{prefix}/" if prefix else ""
        inner = botocore.session.get_session()
        # times stay text: parsing them would be most of the cost of a large listing
        inner.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
        session = boto3.session.Session(botocore_session=inner)
        self.client = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=session.region_name or "us-east-1",
            config=Config(max_pool_connections=2 * LISTERS, retries={"max_attempts": 5, "mode": "standard"}),
        )
        self._signed = SignedGets(inner, self.client, 2 * LISTERS)

    def list(self) -> Iterator[Entry]:
        """List everything, with the folders of gateways in parallel."""
        entries, folders = self.top()
        yield from entries
        with ThreadPoolExecutor(LISTERS) as pool:
            for found in pool.map(lambda folder: list(self.under(folder)), folders):
                yield from found

    def top(self) -> Top:
        entries: list[Entry] = []
        folders: list[str] = []
        for page in self._pages("", Delimiter="/"):
            entries += self._entries(page)
            folders += [found["Prefix"][len(self.prefix) :] for found in page.get("CommonPrefixes", ())]
        return Top(entries, folders)

    def under(self, prefix: str, after: str = "") -> Iterator[Entry]:
        options = {"StartAfter": self.prefix + after} if after else {}
        for page in self._pages(prefix, **options):
            yield from self._entries(page)

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        pages = self.client.get_paginator("list_objects_v2")
        yield from pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix, **options)

    def _entries(self, page: dict[str, Any]) -> Iterator[Entry]:
        for found in page.get("Contents", ()):
            modified = int(datetime.fromisoformat(found["LastModified"]).timestamp() * 1000)
            yield Entry(found["Key"][len(self.prefix) :], found["Size"], found["ETag"].strip('"'), modified)

    def get(self, key: str, most: int | None = None, part: str = "") -> bytes:
        """Read an object; raises BadObject if it has grown to more than `most` bytes, and Vanished.

        `part` is a Range header: bytes=...
        """
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        read = partial(_at_most, most=most)
        if (data := self._signed.get(self.prefix + key, read, part)) is not None:
            return data
        options = {"Range": part} if part else {}
        for left in reversed(range(READS)):
            try:
                found = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key, **options)
                data = read(found["Body"])
                self._signed.learn(self.prefix + key)
                return data
            except self.client.exceptions.NoSuchKey as error:
                raise Vanished(f"{key}: no such object") from error
            except (HTTPClientError, IncompleteReadError):  # boto3 retries a request, but not its body
                if not left:
                    raise
                time.sleep(self.retry_interval)
        raise AssertionError("the last attempt returns or raises")

    def tail(self, key: str, size: int) -> bytes:
        """Read the last `size` bytes of an object, or all of a smaller one."""
        return self.get(key, part=f"bytes=-{size}")

    def part(self, key: str, start: int, size: int) -> bytes:
        """Read `size` bytes (at least 1) of an object from `start` on, which is before its end."""
        return self.get(key, part=f"bytes={start}-{start + size - 1}")

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether it was written."""
        from botocore.exceptions import ClientError

        try:
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data, IfNoneMatch="*")
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
            return False
        return True

    @contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        """Open a new object for writing. It is uploaded when the block ends without an error."""
        with tempfile.SpooledTemporaryFile(SPOOL) as file:
            yield file  # type: ignore[misc] # it has all of BinaryIO that writers of Parquet use
            file.seek(0)
            self.client.upload_fileobj(file, self.bucket, self.prefix + key)

    def size(self, key: str) -> int | None:
        try:
            return int(self.client.head_object(Bucket=self.bucket, Key=self.prefix + key)["ContentLength"])
        except self.client.exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise

    def delete(self, keys: Iterable[str]) -> None:
        wanted = [{"Key": self.prefix + key} for key in keys]
        for start in range(0, len(wanted), 1000):
            batch: Any = {"Objects": wanted[start : start + 1000], "Quiet": True}
            refused = self.client.delete_objects(Bucket=self.bucket, Delete=batch).get("Errors", ())
            for error in refused:
                raise IngestError(f"{error.get('Key')}: cannot be deleted: {error.get('Message')}")

    def abort(self, prefix: str, wanted: Callable[[str], bool], before: float = ALWAYS) -> None:
        """Abort multipart uploads; a role that may write need not have the right to list them."""
        from botocore.exceptions import ClientError

        pages = self.client.get_paginator("list_multipart_uploads")
        with suppress(ClientError):
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.prefix + prefix):
                for found in page.get("Uploads", ()):
                    began = datetime.fromisoformat(str(found["Initiated"])).timestamp() * 1000
                    if wanted(found["Key"][len(self.prefix) :]) and began < before:
                        self.client.abort_multipart_upload(
                            Bucket=self.bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )
