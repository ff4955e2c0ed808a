"""The example plugins are run as their readers would run them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from bridge.plugin import discovery
from tests.export.harness import drop_in, running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "streambridge-sqlite"


@pytest.mark.parametrize("place", [EXAMPLE, ROOT], ids=["example", "checkout"])
def test_the_example_package_passes_its_own_tests(place: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", EXAMPLE / "tests"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"([89]|\d\d) passed", done.stdout)


def test_the_single_file_of_the_docs_works_as_it_stands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(# /etc/streambridge/plugins/tee.py\n.*?)```", page, re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line]) <= 15
    drop_in(tmp_path, "tee", found[1])
    registry = discovery.load([tmp_path / "plugins"])
    assert "tee" in registry.exporters

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            gateway.create("a", {"tee": [{"identifier": "t", "path": str(tmp_path / "out")}]})
            await gateway.append("a", b"one", b"two")
            await gateway.exported("a", 1)

    asyncio.run(scenario())
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"


def test_the_exporter_to_another_service_in_the_docs_works_as_it_stands(tmp_path: Path, moto: str) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    (source,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Sns" in text)
    drop_in(tmp_path, "sns", source)
    queues, topics = boto3.client("sqs", endpoint_url=moto), boto3.client("sns", endpoint_url=moto)
    queue = queues.create_queue(QueueName="plant")["QueueUrl"]
    topic = topics.create_topic(Name="plant")["TopicArn"]
    where = queues.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    topics.subscribe(
        TopicArn=topic, Protocol="sqs", Endpoint=where, Attributes={"RawMessageDelivery": "true"}
    )

    async def scenario() -> None:
        async with running(tmp_path) as gateway:
            config = {"identifier": "s", "topicArn": topic, "endpointUrl": moto, "region": "eu-central-1"}
            gateway.create("a", {"sns": [config]})
            await gateway.append("a", b"one", b"two")
            await gateway.exported("a", 1)

    asyncio.run(scenario())
    found = queues.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]
    assert sorted(message["Body"] for message in found) == ["one", "two"]
