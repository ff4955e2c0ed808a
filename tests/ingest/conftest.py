"""One Spark session and one S3 server (moto, in a process of its own) for all tests of the ingest job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink

MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def credentials() -> Iterator[None]:
    """Set before the JVM starts: its Python workers inherit them from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        # the C1 compiler alone starts faster, and these tests never run long enough to miss the other
        patch.setenv("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield


@pytest.fixture(scope="session")
def s3_endpoint(credentials: None) -> Iterator[str]:
    server = subprocess.Popen(
        [sys.executable, "-c", MOTO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    server.kill()
    server.communicate()


@pytest.fixture
def bucket(s3_endpoint: str) -> StorageLocation:
    """An S3 prefix in a bucket of its own."""
    import boto3

    name = f"landing-{uuid4().hex[:12]}"
    boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(Bucket=name)
    return StorageLocation(f"s3://{name}/site/one", s3_endpoint)


@pytest.fixture
def landing(tmp_path: Path) -> StorageLocation:
    """A local prefix."""
    return StorageLocation(str(tmp_path / "landing"))


@pytest.fixture
def iceberg(tmp_path: Path) -> Callable[..., Any]:
    """Open the Iceberg table of this test, each time as another process would."""
    return lambda: open_sink(TableOptions(warehouse=str(tmp_path / "warehouse")))


@pytest.fixture
def delta(tmp_path: Path) -> Callable[..., Any]:
    return lambda: open_sink(TableOptions(delta=str(tmp_path / "delta" / "messages")))


@pytest.fixture(params=["iceberg", "delta"])
def sink(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each kind of table in turn."""
    opener: Callable[..., Any] = request.getfixturevalue(request.param)
    return opener


class Intercepted:
    """A sink with some of its methods replaced, so that something else happens while a run works."""

    def __init__(self, sink: Any, **methods: Callable[..., Any]) -> None:
        self._sink = sink
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)


def need_java() -> None:
    """Without Java these tests are skipped."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        pytest.skip("Java is missing: install a Java 17 runtime")


@pytest.fixture(scope="session")
def spark(credentials: None) -> Iterator[Any]:
    need_java()
    from bridge.ingest.session import open_session

    session = open_session("local[2,4]")
    yield session
    session.stop()
