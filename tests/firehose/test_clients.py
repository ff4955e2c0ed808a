"""Clients of Data Firehose that nobody here has written, unchanged but for their endpoint.

boto3 is the client of most other tests here. aws-cli and the SDK for JavaScript are installed from their
registries the first time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.model import MIB
from tests.fakes.sdks import installed
from tests.firehose.harness import KEY, S3, SECRET, Gateway

CLIENTS = Path(__file__).parent / "clients"
AWS_CLI, JAVASCRIPT = "awscli-1.45.11", "client-firehose-3.1169.0"
SIGNED = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "eu-central-1"}


def run(command: list[str], env: dict[str, str], **options: Any) -> str:
    """What a client prints; it must end well."""
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **SIGNED, **env},
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow(seconds=60)
def test_aws_cli_creates_fills_describes_changes_and_deletes_a_delivery_stream(gateway: Gateway) -> None:
    requirements = CLIENTS / f"{AWS_CLI}.txt"

    def command(target: Path) -> list[str]:
        make = f'"{sys.executable}" -m venv "{target}"'
        install = (
            f'"{target}/bin/python" -m pip install --quiet --disable-pip-version-check -r "{requirements}"'
        )
        return ["sh", "-c", f"{make} && {install}"]

    python = installed(AWS_CLI, requirements, command) / "bin" / "python"

    def aws(operation: str, *arguments: str) -> Any:
        settings = {"AWS_ENDPOINT_URL": gateway.url, "AWS_PAGER": "", "AWS_DEFAULT_REGION": "eu-central-1"}
        printed = run([str(python), "-m", "awscli", "firehose", operation, *arguments], settings)
        return json.loads(printed) if printed.strip() else None

    name = ("--delivery-stream-name", "plant")
    aws("create-delivery-stream", *name, "--extended-s3-destination-configuration", json.dumps(S3))
    assert aws("list-delivery-streams")["DeliveryStreamNames"] == ["plant"]
    aws("put-record", *name, "--record", json.dumps({"Data": "from the shell\n"}))
    aws("tag-delivery-stream", *name, "--tags", "Key=site,Value=north")
    assert aws("list-tags-for-delivery-stream", *name)["Tags"] == [{"Key": "site", "Value": "north"}]
    aws(
        "update-destination",
        *name,
        "--current-delivery-stream-version-id=1",
        "--destination-id=destinationId-000000000001",
        '--extended-s3-destination-update={"CompressionFormat": "GZIP"}',
    )
    found = aws("describe-delivery-stream", *name)["DeliveryStreamDescription"]
    assert (found["DeliveryStreamStatus"], found["VersionId"]) == ("ACTIVE", "2")
    assert gateway.stored() == [b"from the shell\n"]
    aws("delete-delivery-stream", *name, "--allow-force-delete")
    assert aws("list-delivery-streams")["DeliveryStreamNames"] == []


@pytest.mark.slow(seconds=60)
def test_the_javascript_sdk_puts_batches_reads_errors_and_corrects_its_clock(gateway: Gateway) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is missing (Node.js 20 or newer with npm)")
    manifest = CLIENTS / f"{JAVASCRIPT}.json"

    def command(target: Path) -> list[str]:
        shutil.copy(manifest, target / "package.json")
        return ["npm", "install", "--silent", "--no-audit", "--no-fund"]

    directory = installed(JAVASCRIPT, manifest, command)
    program = """
        const assert = require('assert');
        const sdk = require('@aws-sdk/client-firehose');
        const options = {endpoint: process.env.ENDPOINT, region: 'eu-central-1'};
        const client = new sdk.FirehoseClient(options);
        const work = async () => {
            const name = {DeliveryStreamName: 'plant'};
            await client.send(new sdk.CreateDeliveryStreamCommand(
                {...name, ExtendedS3DestinationConfiguration: JSON.parse(process.env.S3)}));
            const data = Array.from({length: 500}, (_, n) => ({Data: Buffer.from(`record ${n}\\n`)}));
            const put = await client.send(new sdk.PutRecordBatchCommand({...name, Records: data}));
            assert.strictEqual(put.FailedPutCount, 0);
            assert.strictEqual(new Set(put.RequestResponses.map((one) => one.RecordId)).size, 500);
            await client.send(new sdk.PutRecordCommand({...name, Record: {Data: Buffer.alloc(1024000, 7)}}));
            const found = (await client.send(new sdk.DescribeDeliveryStreamCommand(name)));
            assert.strictEqual(found.DeliveryStreamDescription.DeliveryStreamStatus, 'ACTIVE');
            assert(found.DeliveryStreamDescription.CreateTimestamp instanceof Date);
            await assert.rejects(
                client.send(new sdk.DescribeDeliveryStreamCommand({DeliveryStreamName: 'none'})),
                (error) => error instanceof sdk.ResourceNotFoundException && error.message.includes('none'));
            // A clock that is an hour behind: the SDK learns the difference from the first answer.
            const late = new sdk.FirehoseClient({...options, systemClockOffset: -3600000});
            const listed = await late.send(new sdk.ListDeliveryStreamsCommand({}));
            assert.deepStrictEqual(listed.DeliveryStreamNames, ['plant']);
        };
        work().then(() => process.exit(0), (error) => { console.error(error); process.exit(1); });
    """
    run(["node", "-e", program], {"ENDPOINT": gateway.url, "S3": json.dumps(S3)}, cwd=directory)
    stored = gateway.stored()
    assert stored[:500] == [b"record %d\n" % n for n in range(500)]
    assert hashlib.sha256(stored[500]).digest() == hashlib.sha256(b"\7" * 1000 * (MIB // 1024)).digest()
