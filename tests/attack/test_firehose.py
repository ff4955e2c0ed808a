"""Attacks on the listener of the Firehose API by who knows the id of a key, and by who has one."""

from __future__ import annotations

import base64
import dataclasses
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.firehose.frontend import LIMITS
from tests.firehose.harness import Gateway, amz_date, request


def answered(connection: socket.socket) -> tuple[int, str]:
    """The status and the text of the next answer, whose connection may stay open."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        more = connection.recv(65536)
        assert more, data
        data += more
    length = int(data.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(data) < end + 4 + length:
        data += connection.recv(65536)
    return int(data.split(b" ")[1]), data[end + 4 :].decode()


def test_a_header_that_is_signed_a_thousand_times_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    """15 KB stood for 8 MB that were hashed, for anybody who knew the id of a key."""
    names = "host;x-amz-date;x-amz-target" + ";x-big" * 1_000
    now = amz_date()
    scope = f"{now[:8]}/eu-central-1/firehose/aws4_request"
    claim = f"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/{scope}, SignedHeaders={names}, Signature={'0' * 64}"
    with Gateway(tmp_path) as gateway:
        answer = gateway.send(
            request(
                "ListDeliveryStreams",
                b"{}",
                {"X-Amz-Date": now, "X-Big": "y" * 8_000, "Authorization": claim, "Connection": "close"},
            )
        )
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert b"listed twice in SignedHeaders" in answer, answer


@pytest.mark.parametrize("field", [b"a:\r\n", b"x-amz-%04d:\r\n"])
def test_a_head_of_thousands_of_fields_is_refused(tmp_path: Path, field: bytes) -> None:
    fields = b"".join(field % n if b"%" in field else field for n in range(1_000))
    with Gateway(tmp_path) as gateway:
        answer = gateway.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 "), answer
        fields = b"".join(b"x-%d: 1\r\n" % n for n in range(90))
        answer = gateway.send(b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + fields + b"\r\n")
        assert b"MissingAuthenticationToken" in answer, answer


def test_only_records_may_be_megabytes(tmp_path: Path) -> None:
    """A definition of 6 MB took a quarter of a second to become Python's objects."""
    with Gateway(tmp_path) as gateway:
        gateway.create()
        other = {"DeliveryStreamName": "x", "RedshiftDestinationConfiguration": {"a": "x" * 300_000}}
        status, answer = gateway.call_raw("CreateDeliveryStream", other)
        assert (status, answer["__type"]) == (413, "InvalidArgumentException"), answer
        assert "256 KiB" in answer["message"]
        data = base64.b64encode(b"x" * 900_000).decode()
        status, answer = gateway.call_raw(
            "PutRecord", {"DeliveryStreamName": "plant", "Record": {"Data": data}}
        )
        assert status == 200, answer


def test_records_that_wait_for_a_disk_take_bounded_memory_and_the_rest_is_to_be_sent_again(
    tmp_path: Path,
) -> None:
    data = base64.b64encode(b"x" * 300_000).decode()
    body = json.dumps({"DeliveryStreamName": "plant", "Record": {"Data": data}}).encode()
    limits = dataclasses.replace(LIMITS, bodies=1_000_000)
    with Gateway(tmp_path, limits=limits) as gateway:
        gateway.create()
        committer = gateway.store.committer

        def press(high: bool) -> Callable[[], None]:
            def do() -> None:
                committer.under_pressure = high
                for told in committer.on_pressure:
                    told(high)

            return do

        gateway.call(press(True))
        before = gateway.front.stats().get("requests", 0)
        clients = []
        for number in range(1, 6):
            clients.append(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
            clients[-1].sendall(request("PutRecord", body))
            gateway.wait_until(lambda n=number: gateway.front.stats().get("requests", 0) == before + n)
            gateway.wait_until(lambda: not gateway.front._server.guests.total)
        for client in clients[2:]:
            status, text = answered(client)
            assert (status, "ServiceUnavailableException" in text) == (503, True), text
        assert gateway.newest("plant") == -1
        gateway.call(press(False))
        assert [answered(client)[0] for client in clients[:2]] == [200, 200]
        assert gateway.newest("plant") == 1
        for client in clients:
            client.close()
