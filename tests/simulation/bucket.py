"""A bucket in memory: S3 as the gateway's exporters and the ingest job use it, with its faults.

`Bucket.client` is given to an exporter in place of boto3's client: the operations that streambridge uses,
their parameters checked against botocore's model of S3, their errors those of botocore. `Bucket.place` is
given to the ingest job. Nothing here waits, and there are no threads: `random` decides what fails, `now` is
the time.

A request of a client has one of these ends, in this order of drawing (`Faults`):

* lost         it never arrives; there was no connection, or it broke
* late         it arrives when `Bucket.late` is called, perhaps after later ones; the client has given up
* throttled    503 SlowDown; nothing happens
* failed       500 InternalError; nothing happens
* denied       403; nothing happens
* conflict     409 ConditionalRequestConflict, for a conditional put; nothing happens
* unanswered   it arrives, whatever comes of it, and the answer is lost
* answered     all others

While `down` is set nothing arrives. What others do to objects: `delete`, `damage` (a bit), `tear` (cut off),
`upload_again` (what it first was). Each puts the key into `harmed`, the last one takes it out.
"""

from __future__ import annotations

import io
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from hashlib import md5
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlparse

from bridge.ingest.errors import BadObject, Vanished
from bridge.ingest.store import ALWAYS, Entry, ObjectStore, StorageLocation, Top

ENDPOINT = "https://s3.simulation.invalid"
MIN_PART = 5 << 20
At = Callable[[str], object]  # called with the name of a hand-over point before it; it may raise


def nowhere(point: str) -> None:
    """Let everything happen."""


@dataclass
class Faults:
    """The share of requests, 0 to 1, with each end; the rest are answered."""

    lost: float = 0.0
    late: float = 0.0
    throttled: float = 0.0
    failed: float = 0.0
    denied: float = 0.0
    conflict: float = 0.0
    unanswered: float = 0.0

    @classmethod
    def all(cls, share: float) -> Faults:
        """Each fault in this share of requests."""
        return cls(*[share] * 7)


@dataclass(slots=True)
class Stored:
    """An object; `modified` is Unix time in ms."""

    body: bytes
    etag: str  # without quotes
    modified: int
    metadata: dict[str, str] = field(default_factory=dict)


class Arrival(NamedTuple):
    """Something that happened in the bucket at `time` (Unix time in seconds); `etag` of the object then."""

    time: float
    what: str
    key: str
    etag: str


class Bucket:
    """One bucket."""

    def __init__(
        self,
        random: Random,
        now: Callable[[], float],
        faults: Faults | None = None,
        *,
        name: str = "landing",
        may_list: bool = True,
    ) -> None:
        """`now` gives Unix time in seconds. Without `may_list`, a missing object is AccessDenied."""
        self.random, self.now, self.name, self.may_list = random, now, name, may_list
        self.faults = faults or Faults()
        self.down = False
        self.cut = False  # the connection breaks in the middle of the next request
        self.objects: dict[str, Stored] = {}
        self.keys: list[str] = []  # sorted
        self.log: list[Arrival] = []
        self.harmed: set[str] = set()
        self._first: dict[str, Stored] = {}  # of harmed keys
        self._under_way: list[Callable[[], Any]] = []
        self._uploads: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = {}

    def client(self) -> Client:
        """Return what stands in for a client of boto3."""
        return Client(self)

    def place(self, prefix: str = "", at: At = nowhere) -> Place:
        """Return the location of a prefix, for the ingest job; `at` is called before each of its steps."""
        return Place(f"s3://{self.name}/{prefix}".rstrip("/"), bucket=self, at=at)

    # --- the world's doing

    def late(self) -> bool:
        """Let one request arrive that is under way, any of them; returns whether there was one."""
        if not self._under_way:
            return False
        request = self._under_way.pop(self.random.randrange(len(self._under_way)))
        try:
            request()
        except _client_error():
            pass  # nobody is there to be told
        return True

    def delete(self, key: str) -> None:
        """Somebody deletes an object."""
        self._harm(key)
        self.remove(key, "deleted by somebody")

    def damage(self, key: str) -> None:
        """Somebody overwrites an object by itself with another bit."""
        body = bytearray(self._harm(key).body)
        if body:
            body[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
        self.store(key, bytes(body), "damaged by somebody", self.objects[key].metadata)

    def tear(self, key: str) -> None:
        """Somebody overwrites an object by its beginning."""
        body = self._harm(key).body
        cut = self.random.randrange(len(body)) if body else 0
        self.store(key, body[:cut], "torn by somebody", self.objects[key].metadata)

    def upload_again(self, key: str) -> None:
        """Somebody puts an object back as it was before it was harmed."""
        before = self._first.pop(key)
        self.harmed.discard(key)
        self.store(key, before.body, "uploaded again", before.metadata)

    def _harm(self, key: str) -> Stored:
        found = self.objects[key]
        self._first.setdefault(key, found)
        self.harmed.add(key)
        return found

    # --- what requests do; no faults here

    def store(self, key: str, body: bytes, what: str, metadata: dict[str, str] | None = None) -> str:
        """Write an object and return its ETag."""
        etag = md5(body, usedforsecurity=False).hexdigest()
        if key not in self.objects:
            insort(self.keys, key)
        self.objects[key] = Stored(body, etag, int(self.now() * 1000), metadata or {})
        self.log.append(Arrival(self.now(), what, key, etag))
        return etag

    def remove(self, key: str, what: str = "deleted") -> None:
        """Delete an object if it is there."""
        found = self.objects.pop(key, None)
        if found is not None:
            del self.keys[bisect_left(self.keys, key)]
            self.log.append(Arrival(self.now(), what, key, found.etag))

    def under(self, prefix: str) -> Iterator[str]:
        """Yield the keys with a prefix, in order. Those written or deleted meanwhile may be among them."""
        at = ""
        index = bisect_left(self.keys, prefix)
        while index < len(self.keys) and self.keys[index].startswith(prefix):
            at = self.keys[index]
            yield at
            index = bisect_left(self.keys, at)
            index += index < len(self.keys) and self.keys[index] == at

    def request(self, operation: str, options: dict[str, Any]) -> dict[str, Any]:
        """Make a request with one of the ends; returns the answer or raises what botocore would."""
        perform = partial(self._perform, operation, options)
        errors = _errors()
        if self.cut:
            self.cut = False
            raise errors.ConnectionClosedError(endpoint_url=ENDPOINT)
        if self.down:
            raise errors.EndpointConnectionError(endpoint_url=ENDPOINT)
        faults, drawn = self.faults, self.random.random()
        conditional = "IfNoneMatch" in options or "IfMatch" in options
        ends = {
            "lost": faults.lost,
            "late": faults.late,
            "throttled": faults.throttled,
            "failed": faults.failed,
            "denied": faults.denied,
            "conflict": faults.conflict if conditional else 0.0,
            "unanswered": faults.unanswered,
        }
        end = ""
        for name, share in ends.items():
            if 0 <= drawn < share:
                end = name
            drawn -= share
        match end:
            case "":
                return perform()
            case "lost" if self.random.random() < 0.5:
                raise errors.EndpointConnectionError(endpoint_url=ENDPOINT)
            case "throttled":
                raise _refused(operation, 503, "SlowDown", "Please reduce your request rate.")
            case "failed":
                raise _refused(operation, 500, "InternalError", "We encountered an internal error.")
            case "denied":
                raise _refused(operation, 403, "AccessDenied", "Access Denied")
            case "conflict":
                raise _refused(operation, 409, "ConditionalRequestConflict", "A conflicting operation")
            case "late":
                self._under_way.append(perform)
            case "unanswered":
                try:
                    perform()
                except _client_error():
                    pass
        if self.random.random() < 0.5:
            raise errors.ConnectionClosedError(endpoint_url=ENDPOINT)
        raise errors.ReadTimeoutError(endpoint_url=ENDPOINT)

    def _perform(self, operation: str, options: dict[str, Any]) -> dict[str, Any]:
        if options["Bucket"] != self.name:
            raise _refused(operation, 404, "NoSuchBucket", "The specified bucket does not exist")
        answer: dict[str, Any] = getattr(self, f"_{operation}")(options)
        return answer | {"ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": {}, "RetryAttempts": 0}}

    def _put_object(self, options: dict[str, Any]) -> dict[str, Any]:
        key = options["Key"]
        self._check_conditions("put_object", options)
        if len(key.encode()) > 1024:
            raise _refused("put_object", 400, "KeyTooLongError", "Your key is too long")
        metadata = {name.lower(): value for name, value in options.get("Metadata", {}).items()}
        return {"ETag": f'"{self.store(key, options["Body"], "put", metadata)}"'}

    def _check_conditions(self, operation: str, options: dict[str, Any]) -> None:
        found = self.objects.get(options["Key"])
        wanted = options.get("IfMatch")
        if found is None and wanted is not None:
            raise _refused(operation, 404, "NoSuchKey", "The specified key does not exist.")
        if (found is not None and options.get("IfNoneMatch") == "*") or (
            found is not None and wanted is not None and wanted.strip('"') != found.etag
        ):
            what = "At least one of the pre-conditions you specified did not hold"
            raise _refused(operation, 412, "PreconditionFailed", what)

    def _found(self, operation: str, key: str) -> Stored:
        found = self.objects.get(key)
        if found is not None:
            return found
        if not self.may_list:
            raise _refused(operation, 403, "AccessDenied", "Access Denied")
        raise _refused(operation, 404, "NoSuchKey", "The specified key does not exist.")

    def _head_object(self, options: dict[str, Any]) -> dict[str, Any]:
        found = self._found("head_object", options["Key"])
        return {
            "ETag": f'"{found.etag}"',
            "ContentLength": len(found.body),
            "LastModified": datetime.fromtimestamp(found.modified / 1000, UTC),
            "Metadata": dict(found.metadata),
        }

    def _get_object(self, options: dict[str, Any]) -> dict[str, Any]:
        head = self._head_object(options)
        body = self._found("get_object", options["Key"]).body
        if "Range" in options:
            first, _, last = options["Range"].removeprefix("bytes=").partition("-")
            part = body[-int(last) :] if not first else body[int(first) : int(last) + 1 if last else None]
            if not part:
                raise _refused("get_object", 416, "InvalidRange", "The range is not satisfiable")
            body = part
        return head | {"Body": io.BytesIO(body), "ContentLength": len(body)}

    def _list_objects_v2(self, options: dict[str, Any]) -> dict[str, Any]:
        prefix, delimiter = options["Prefix"], options.get("Delimiter", "")
        if not self.may_list:
            raise _refused("list_objects_v2", 403, "AccessDenied", "Access Denied")
        keys = [key for key in self.under(prefix) if key in self.objects]
        folders = {
            prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]
        }
        if delimiter:
            keys = [key for key in keys if "/" not in key[len(prefix) :]]
        after = options.get("ContinuationToken", "")
        rest = [key for key in keys if key > after]
        page = rest[:1000]
        answer: dict[str, Any] = {"IsTruncated": len(page) < len(rest)}
        if answer["IsTruncated"]:
            answer["NextContinuationToken"] = page[-1]
        if page:
            answer["Contents"] = [{"Key": key, "ETag": f'"{self.objects[key].etag}"'} for key in page]
        if delimiter and folders:
            answer["CommonPrefixes"] = [{"Prefix": folder} for folder in sorted(folders)]
        return answer

    def _create_multipart_upload(self, options: dict[str, Any]) -> dict[str, Any]:
        name = f"upload-{len(self.log)}-{self.random.getrandbits(64):x}"
        metadata = {key.lower(): value for key, value in options.get("Metadata", {}).items()}
        self._uploads[name] = (options["Key"], metadata, {})
        self.log.append(Arrival(self.now(), "upload begun", options["Key"], ""))
        return {"UploadId": name, "Key": options["Key"], "Bucket": self.name}

    def _upload(self, operation: str, options: dict[str, Any]) -> tuple[dict[str, str], dict[int, bytes]]:
        key, metadata, parts = self._uploads.get(options["UploadId"], ("", {}, {}))
        if key != options["Key"]:
            raise _refused(operation, 404, "NoSuchUpload", "The specified upload does not exist.")
        return metadata, parts

    def _upload_part(self, options: dict[str, Any]) -> dict[str, Any]:
        _, parts = self._upload("upload_part", options)
        parts[options["PartNumber"]] = options["Body"]
        return {"ETag": _quoted(options["Body"])}

    def _list_parts(self, options: dict[str, Any]) -> dict[str, Any]:
        _, parts = self._upload("list_parts", options)
        after = int(options.get("PartNumberMarker", 0))
        rest = [number for number in sorted(parts) if number > after]
        page = rest[: options.get("MaxParts", 1000)]
        return {
            "Parts": [{"PartNumber": number, "ETag": _quoted(parts[number])} for number in page],
            "IsTruncated": len(page) < len(rest),
            "NextPartNumberMarker": page[-1] if page else after,
        }

    def _complete_multipart_upload(self, options: dict[str, Any]) -> dict[str, Any]:
        operation = "complete_multipart_upload"
        metadata, parts = self._upload(operation, options)
        self._check_conditions(operation, options)
        named = options["MultipartUpload"]["Parts"]
        for part in named:
            body = parts.get(part["PartNumber"])
            if body is None or _quoted(body).strip('"') != part["ETag"].strip('"'):
                raise _refused(operation, 400, "InvalidPart", "One or more of the parts could not be found.")
            if part is not named[-1] and len(body) < MIN_PART:
                raise _refused(operation, 400, "EntityTooSmall", "Your proposed upload is too small")
        del self._uploads[options["UploadId"]]
        whole = b"".join(parts[part["PartNumber"]] for part in named)
        self.store(options["Key"], whole, "upload completed", metadata)
        digests = b"".join(md5(parts[p["PartNumber"]], usedforsecurity=False).digest() for p in named)
        stored = self.objects[options["Key"]]
        stored.etag = f"{md5(digests, usedforsecurity=False).hexdigest()}-{len(named)}"
        return {"ETag": f'"{stored.etag}"', "Key": options["Key"], "Bucket": self.name}

    def _abort_multipart_upload(self, options: dict[str, Any]) -> dict[str, Any]:
        self._upload("abort_multipart_upload", options)
        del self._uploads[options["UploadId"]]
        return {}


class Client:
    """What stands in for boto3's client of S3. Its methods are the operations above."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        shape = _shapes().get(name)
        if shape is None or not hasattr(Bucket, f"_{name}"):
            raise AttributeError(name)

        def call(**options: Any) -> dict[str, Any]:
            report = _validator().validate(options, shape)
            if report.has_errors():
                raise _errors().ParamValidationError(report=report.generate_report())
            body = options.get("Body")
            if hasattr(body, "read"):
                options["Body"] = body.read()
            elif isinstance(body, bytearray):
                options["Body"] = bytes(body)
            return self._bucket.request(name, options)

        vars(self)[name] = call
        return call


@dataclass(frozen=True, slots=True)
class Place(StorageLocation):
    """A location in a bucket in memory. `at` is called before every step there."""

    bucket: Any = None
    at: At = nowhere

    def open(self) -> ObjectStore:
        return BucketStore(self.bucket, urlparse(self.url).path.strip("/"), self.at)


class BucketStore:
    """The objects below a prefix, as the ingest job reads and writes them."""

    ahead = 0

    def __init__(self, bucket: Bucket, prefix: str, at: At) -> None:
        self.bucket, self.prefix, self.at = bucket, f"{prefix}/" if prefix else "", at

    def list(self) -> Iterator[Entry]:
        return self.under("")

    def top(self) -> Top:
        found = list(self.list())
        folders = {entry.key.partition("/")[0] + "/" for entry in found if "/" in entry.key}
        return Top([entry for entry in found if "/" not in entry.key], sorted(folders))

    def under(self, prefix: str, after: str = "") -> Iterator[Entry]:
        for count, key in enumerate(self.bucket.under(self.prefix + prefix)):
            if count % 100 == 0:
                self.at(f"list {prefix}")
            if after and key <= self.prefix + after:
                continue
            found = self.bucket.objects.get(key)
            if found is not None:
                yield Entry(key[len(self.prefix) :], len(found.body), found.etag, found.modified)

    def get(self, key: str, most: int | None = None) -> bytes:
        self.at(f"get {key}")
        found = self.bucket.objects.get(self.prefix + key)
        if found is None:
            raise Vanished(f"{key}: no such object")
        if most is not None and len(found.body) > most:
            raise BadObject(f"it has more than the {most} bytes that an object may have")
        return found.body

    def tail(self, key: str, size: int) -> bytes:
        return self.get(key)[-size:]

    def part(self, key: str, start: int, size: int) -> bytes:
        return self.get(key)[start : start + size]

    def put(self, key: str, data: bytes) -> None:
        self.at(f"put {key}")
        self.bucket.store(self.prefix + key, data, "written")
        self.at(f"put done {key}")

    @contextmanager
    def writer(self, key: str) -> Iterator[io.BytesIO]:
        with io.BytesIO() as file:
            yield file
            self.put(key, file.getvalue())

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.at(f"delete {key}")
            self.bucket.remove(self.prefix + key)

    def size(self, key: str) -> int | None:
        self.at(f"head {key}")
        found = self.bucket.objects.get(self.prefix + key)
        return None if found is None else len(found.body)

    def abort(self, prefix: str, wanted: Callable[[str], bool], before: float = ALWAYS) -> None:
        pass  # an object of this bucket is there at once


# botocore takes most of a second to import and to load its model of S3: both happen once, when needed


@cache
def _errors() -> Any:
    import botocore.exceptions

    return botocore.exceptions


@cache
def _client_error() -> Any:
    return _errors().ClientError


@cache
def _validator() -> Any:
    from botocore.validate import ParamValidator

    return ParamValidator()


@cache
def _shapes() -> Mapping[str, Any]:
    """The shapes of the parameters, by the names of boto3's methods."""
    import botocore.session
    from botocore import xform_name

    model = botocore.session.Session().get_service_model("s3")
    return {xform_name(name): model.operation_model(name).input_shape for name in model.operation_names}


def _refused(operation: str, status: int, code: str, message: str) -> Exception:
    """The error of an answer. Answers to HEAD have no body: botocore makes the status the code."""
    if operation == "head_object":
        code, message = str(status), {403: "Forbidden", 404: "Not Found"}.get(status, message)
    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}, "RetryAttempts": 0},
    }
    name = "".join(word.capitalize() for word in operation.split("_"))
    error: Exception = _client_error()(answer, name)
    return error


def _quoted(body: bytes) -> str:
    return f'"{md5(body, usedforsecurity=False).hexdigest()}"'
