"""A fake of AWS services over HTTP that takes only what botocore's service models allow.

Kinesis PutRecords, Firehose PutRecordBatch, SiteWise BatchPutAssetPropertyValue, and the IoT
credentials provider. Faults on demand: `faults` is a queue of functions that answer in place of the
service, once each; `while_broken` answers every request as long as it is set.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import botocore.session
from botocore.model import OperationModel, Shape
from botocore.validate import ParamValidator

Answer = tuple[int, dict[str, Any]]
Fault = Callable[["Request"], Answer | None]

_OPERATIONS = {
    "Kinesis_20131202.PutRecords": ("kinesis", "PutRecords"),
    "Kinesis_20131202.DescribeStreamSummary": ("kinesis", "DescribeStreamSummary"),
    "Firehose_20150804.PutRecordBatch": ("firehose", "PutRecordBatch"),
    "/properties": ("iotsitewise", "BatchPutAssetPropertyValue"),
}
_session = botocore.session.get_session()


def model(service: str, operation: str) -> OperationModel:
    return _session.get_service_model(service).operation_model(operation)


class Request:
    """A request that has passed the model: its operation and parameters, and the raw connection."""

    def __init__(self, operation: str, parameters: dict[str, Any], handler: BaseHTTPRequestHandler) -> None:
        self.operation, self.parameters, self.handler = operation, parameters, handler


class FakeAws:
    """The server, and what it has taken."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []  # records and entries, in order of arrival
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []  # access keys that requests were signed with
        self.faults: list[Fault] = []
        self.while_broken: Fault | None = None
        self.lifetime = 3600.0  # seconds, of credentials
        self.issued = 0
        self.provider: FakeAws | None = None
        self.properties: set[str] | None = None  # aliases that SiteWise knows; None: all
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    @contextmanager
    def broken(self, fault: Fault) -> Iterator[None]:
        self.while_broken = fault
        try:
            yield
        finally:
            self.while_broken = None

    def answer(self, request: Request) -> Answer | None:
        with self.lock:
            fault = self.while_broken or (self.faults.pop(0) if self.faults else None)
            if fault is not None:
                return fault(request)
            return getattr(self, f"_{request.operation}")(request.parameters)

    # --- the services

    def _PutRecords(self, parameters: dict[str, Any]) -> Answer:  # noqa: N802
        records = parameters["Records"]
        if not all(1 <= len(record.get("PartitionKey", "")) <= 256 for record in records):
            return 400, {"__type": "InvalidArgumentException", "message": "partition key"}
        if sum(len(r["Data"]) + len(r["PartitionKey"].encode()) for r in records) > 10 * 1024 * 1024:
            return 400, {"__type": "InvalidArgumentException", "message": "request too large"}
        if any(b"poison" in _content(record["Data"]) for record in records):
            return 400, {"__type": "InvalidArgumentException", "message": "poison"}
        self.taken += records
        results = [{"SequenceNumber": "1", "ShardId": "shardId-0"} for _ in records]
        return 200, {"FailedRecordCount": 0, "Records": results}

    def _DescribeStreamSummary(self, parameters: dict[str, Any]) -> Answer:  # noqa: N802
        return 200, {"StreamDescriptionSummary": {"OpenShardCount": 2}}

    def _PutRecordBatch(self, parameters: dict[str, Any]) -> Answer:  # noqa: N802
        records = parameters["Records"]
        if sum(len(record["Data"]) for record in records) > 4 * 1024 * 1024:
            return 400, {"__type": "InvalidArgumentException", "message": "request too large"}
        self.taken += records
        return 200, {"FailedPutCount": 0, "RequestResponses": [{"RecordId": "1"} for _ in records]}

    def _BatchPutAssetPropertyValue(self, parameters: dict[str, Any]) -> Answer:  # noqa: N802
        entries = parameters["entries"]
        points = set()
        ids = {entry["entryId"] for entry in entries}
        if len(ids) < len(entries):
            return 400, {"__type": "InvalidRequestException", "message": "entry ids"}
        for entry in entries:
            for value in entry["propertyValues"]:
                stamp = value["timestamp"]
                where = entry.get("propertyAlias") or (entry["assetId"], entry["propertyId"])
                point = (where, stamp["timeInSeconds"], stamp.get("offsetInNanos", 0))
                if point in points:
                    return 409, {"__type": "ConflictingOperationException", "message": "same property"}
                points.add(point)
        errors, now = [], time.time()
        for entry in entries:
            codes = []
            if self.properties is not None and entry.get("propertyAlias") not in self.properties:
                codes.append("ResourceNotFoundException")
            times = [value["timestamp"]["timeInSeconds"] for value in entry["propertyValues"]]
            if not all(now - 7 * 86400 <= t <= now + 600 for t in times):
                codes.append("TimestampOutOfRangeException")
            if codes:
                details = [{"errorCode": c, "errorMessage": "no", "timestamps": []} for c in codes]
                errors.append({"entryId": entry["entryId"], "errors": details})
            else:
                self.taken.append(entry)
        return 200, {"errorEntries": errors}

    # --- HTTP

    def _handler(fake) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *args: object) -> None:
                """Nothing."""

            def do_GET(self) -> None:
                alias = self.path.split("/")[2]
                found = fake.credentials(alias)
                self._reply(*found)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service, operation = _OPERATIONS[self.headers.get("X-Amz-Target") or self.path]
                signed = self.headers.get("Authorization", "")
                fake.keys.append(signed.partition("Credential=")[2].partition("/")[0])
                shape = model(service, operation).input_shape
                assert shape is not None
                parameters = _from_json(shape, body)
                report = ParamValidator().validate(parameters, shape)
                if report.has_errors():
                    kind = {"__type": "ValidationException", "message": report.generate_report()}
                    self._reply(400, kind)
                    return
                fake.requests.append((operation, parameters))
                found = fake.answer(Request(operation, parameters, self))
                if found is None:
                    self.close_connection = True
                else:
                    self._reply(*found)

            def _reply(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if "__type" in content:
                    self.send_header("x-amzn-ErrorType", content["__type"])
                self.end_headers()
                self.wfile.write(data)

        return Handler

    def credentials(self, alias: str) -> Answer:
        """The IoT credentials provider."""
        with self.lock:
            if self.faults:
                answer = self.faults.pop(0)(None)  # type: ignore[arg-type]
                assert answer is not None
                return answer
            self.issued += 1
        expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.lifetime))
        found = {"accessKeyId": f"ASIA{alias.upper()}{self.issued}", "secretAccessKey": "s"}
        return 200, {"credentials": {**found, "sessionToken": "t", "expiration": expires}}


def _from_json(shape: Shape, value: Any) -> Any:
    if shape.type_name == "structure":
        members: dict[str, Any] = shape.members  # type: ignore[attr-defined]
        unknown = value.keys() - members.keys()
        assert not unknown, f"not in the model: {unknown}"
        return {name: _from_json(members[name], part) for name, part in value.items()}
    if shape.type_name == "list":
        return [_from_json(shape.member, part) for part in value]  # type: ignore[attr-defined]
    return base64.b64decode(value) if shape.type_name == "blob" else value


# --- faults


def _content(data: bytes) -> bytes:
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def error(status: int, code: str) -> Fault:
    return lambda request: (status, {"__type": code, "message": "on demand"})


def reset(request: Request) -> None:
    """Close the connection with RST."""
    linger = struct.pack("ii", 1, 0)
    request.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.handler.connection.close()


def partial(fake: FakeAws, failing: Callable[[int, dict[str, Any]], bool], code: str) -> Fault:
    """Take all records but those for which `failing(position, record)` holds."""

    def fault(request: Request) -> Answer:
        records = request.parameters["Records"]
        failed = [failing(n, record) for n, record in enumerate(records)]
        fake.taken += [record for record, bad in zip(records, failed, strict=True) if not bad]
        wrong = {"ErrorCode": code, "ErrorMessage": "on demand"}
        if request.operation == "PutRecords":
            good: dict[str, Any] = {"SequenceNumber": "1", "ShardId": "shardId-0"}
            names = ("FailedRecordCount", "Records")
        else:
            good, names = {"RecordId": "1"}, ("FailedPutCount", "RequestResponses")
        results = [wrong if bad else good for bad in failed]
        return 200, {names[0]: sum(failed), names[1]: results}

    return fault
