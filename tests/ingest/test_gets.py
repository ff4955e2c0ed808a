"""Reading objects of S3 without boto3: the same requests, the same answers, the same errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from bridge.ingest.errors import BadObject, Unreadable, Vanished
from bridge.ingest.store import S3Store, StorageLocation, read

KEY, SECRET, TOKEN = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "session token"
NAMES = ("plain", "a b", "k=1/x+y.gz", "ünï/~tilde", "100%/(x)!*'", "per%20cent", "a//b")
DENIED = b"<Error><Code>AccessDenied</Code><Message>not yours</Message></Error>"


class Asked(NamedTuple):
    path: str
    headers: dict[str, str]

    @property
    def by_boto3(self) -> bool:
        return "amz-sdk-invocation-id" in self.headers

    def is_signed(self, endpoint: str) -> bool:
        """Whether its signature is that of the key, for just this request."""
        given = self.headers["authorization"]
        names = given.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        request = AWSRequest("GET", endpoint + self.path, {name: self.headers[name] for name in names})
        request.context["timestamp"] = self.headers["x-amz-date"]
        signer = S3SigV4Auth(Credentials(KEY, SECRET, TOKEN), "s3", "us-east-1")
        text = signer.string_to_sign(request, signer.canonical_request(request))
        return given.endswith(f"Signature={signer.signature(text, request)}")


class Answer(NamedTuple):
    """What the service answers; `length` is more than it has: then the connection breaks."""

    status: int
    body: bytes
    length: int | None = None


class Service(NamedTuple):
    """An S3 of one object, or of what a test answers."""

    endpoint: str
    asked: list[Asked]
    answer: list[Callable[[Asked], Answer]]

    def store(self) -> S3Store:
        return S3Store("bucket", "site one", self.endpoint, retry_interval=0.01)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for name, value in (("ACCESS_KEY_ID", KEY), ("SECRET_ACCESS_KEY", SECRET), ("SESSION_TOKEN", TOKEN)):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with serving() as found:
        yield found


@contextmanager
def serving() -> Iterator[Service]:
    service = Service("", [], [lambda asked: Answer(200, b"0123456789")])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Nothing."""

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            service.asked.append(Asked(self.path, headers))
            answer = service.answer[-1](service.asked[-1])
            self.close_connection = answer.length is not None
            self.send_response(answer.status)
            self.send_header("Content-Length", str(answer.length or len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        service = service._replace(endpoint=f"http://127.0.0.1:{server.server_port}")
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_only_the_first_request_is_built_by_boto3_and_all_are_signed(service: Service) -> None:
    store = service.store()
    for name in NAMES:
        assert store.get(name) == b"0123456789"
    assert [asked.by_boto3 for asked in service.asked] == [True, *[False] * (len(NAMES) - 1)]
    assert all(asked.is_signed(service.endpoint) for asked in service.asked)
    assert {asked.headers["x-amz-security-token"] for asked in service.asked} == {TOKEN}
    assert len({asked.headers["user-agent"].partition(" md/")[0] for asked in service.asked}) == 1


def test_both_ask_for_the_same_object_whatever_its_name(service: Service) -> None:
    store = service.store()
    store.get("first")
    for name in NAMES:
        store.get(name)
        service.store().get(name)
    ours, boto3 = ([asked.path for asked in service.asked[start::2]] for start in (1, 2))
    assert ours == boto3


def test_objects_of_any_name_and_parts_of_them_come_back_from_a_bucket(bucket: StorageLocation) -> None:
    store = bucket.open()
    for name in NAMES:
        store.put(name, name.encode() * 100)
    for _ in range(2):
        for name in NAMES:
            assert store.get(name) == name.encode() * 100
            assert store.tail(name, 7) == (name.encode() * 100)[-7:]
            assert store.part(name, 3, 4) == (name.encode() * 100)[3:7]
    with pytest.raises(Vanished):
        store.get("gone")


def test_an_object_that_has_grown_is_refused_and_the_next_one_is_read(service: Service) -> None:
    store = service.store()
    store.get("first")
    with pytest.raises(BadObject, match="more than the 9 bytes"):
        store.get("second", 9)
    assert store.get("third", 10) == b"0123456789"


@pytest.mark.parametrize("status", [500, 503])
def test_what_the_service_could_not_answer_is_asked_again_through_boto3(
    service: Service, status: int
) -> None:
    store = service.store()
    store.get("first")
    service.answer.append(lambda asked: Answer(200, b"there") if asked.by_boto3 else Answer(status, b""))
    assert store.get("second") == b"there"
    service.answer.pop()
    assert store.get("third") == b"0123456789"
    assert [asked.by_boto3 for asked in service.asked] == [True, False, True, False]


def test_a_refusal_is_the_error_that_boto3_makes_of_it(service: Service) -> None:
    store = service.store()
    store.get("first")
    service.answer.append(lambda asked: Answer(403, DENIED))
    with pytest.raises(Unreadable, match="AccessDenied: not yours"):
        read(store, "second", 10, 10)
    service.answer[-1] = lambda asked: Answer(400, DENIED.replace(b"AccessDenied", b"ExpiredToken"))
    with pytest.raises(ClientError, match="ExpiredToken"):
        store.get("third")
    service.answer.pop()
    assert store.get("fourth") == store.get("fifth") == b"0123456789"
    assert not service.asked[-1].by_boto3


@pytest.mark.parametrize("most", [None, 20, 1000])
def test_a_body_that_the_connection_cuts_off_is_read_again(service: Service, most: int | None) -> None:
    store = service.store()
    store.get("first")
    service.answer.append(lambda asked: Answer(200, b"whole") if asked.by_boto3 else Answer(200, b"half", 20))
    assert store.get("second", most) == b"whole"
    service.answer.pop()
    assert store.get("third", most) == b"0123456789"
    assert [asked.by_boto3 for asked in service.asked] == [True, False, True, False]
