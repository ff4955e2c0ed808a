"""Answers and errors of the Firehose API in JSON 1.1, as the SDKs expect them.

An error is `{"__type": code, "message": text}`. Codes are those of the API reference of Data Firehose and its
"Common Errors": 400 for what the client must change, 503 for what it should send again.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from itertools import count
from uuid import uuid4

import msgspec
from msgspec import Struct

from bridge.errors import (
    InvalidRequest,
    KeyUnavailable,
    LimitReached,
    MessageTooLarge,
    StreamBridgeError,
    StreamError,
    StreamInUse,
    StreamNotFound,
    Unauthorized,
    UpdateFailed,
)
from bridge.model import KIB, MIB
from bridge.net.httpserver import HttpResponse
from bridge.operations.deliveries import MAX_BYTES, MAX_RECORDS, Done

CONTENT_TYPE = "application/x-amz-json-1.1"
MAX_DEFINITION = 256 * KIB  # bytes of a body without records: Python's objects for more take too long
UNAVAILABLE = "ServiceUnavailableException"
# The first class that matches; a StreamError is a full stream or the disk, which may be over soon.
CODES: tuple[tuple[type[StreamBridgeError], str], ...] = (
    (StreamNotFound, "ResourceNotFoundException"),
    (Unauthorized, "AccessDeniedException"),
    (StreamInUse, "ResourceInUseException"),
    (LimitReached, "LimitExceededException"),
    (KeyUnavailable, "InvalidKMSResourceException"),
    (UpdateFailed, "ConcurrentModificationException"),
    (InvalidRequest, "InvalidArgumentException"),
    (MessageTooLarge, "InvalidArgumentException"),
    (StreamError, UNAVAILABLE),
)
_OPERATION = re.compile(r"Firehose_20150804\.([A-Za-z]{1,64})")
# msgspec's words for values that have the wrong type, which AWS tells from those that break a rule.
_WRONG_TYPE = re.compile(r"Expected `[\w| ]+`, got|Invalid base64|JSON")


class ApiError(Exception):
    """Raised for a request that gets an error; `code` is AWS's."""

    def __init__(self, code: str, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def operation_of(target: str) -> str:
    """The operation in `x-amz-target`; empty if that names none of this API."""
    found = _OPERATION.fullmatch(target)
    return found[1] if found is not None else ""


def wrong_request(error: Exception) -> ApiError:
    """The error for a body that is no request."""
    code = "SerializationException"
    if isinstance(error, msgspec.ValidationError) and not _WRONG_TYPE.match(str(error)):
        code = "ValidationException"
    return ApiError(code, f"1 validation error detected: {error}")


def failed(error: StreamBridgeError) -> ApiError:
    """The error for what an operation has raised."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), "InternalFailure")
    status = {
        UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
        "InternalFailure": HTTPStatus.INTERNAL_SERVER_ERROR,
    }
    return ApiError(code, str(error), status.get(code, HTTPStatus.BAD_REQUEST))


def success(result: Struct) -> HttpResponse:
    """The response with the result of an operation."""
    return _response(HTTPStatus.OK, b"{}" if isinstance(result, Done) else msgspec.json.encode(result))


def refusal(error: ApiError) -> HttpResponse:
    """The response with an error."""
    body = {"__type": error.code, "message": str(error)}
    return _response(error.status, msgspec.json.encode(body), {"x-amzn-ErrorType": error.code})


def rejection(status: HTTPStatus) -> HttpResponse:
    """The response to a request that HTTP itself rejects: too large, too slow, or malformed."""
    code = _REJECTED.get(status, "InvalidArgumentException")
    text = f"{status.value} {status.phrase}"
    if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        text = (
            f"the body is too large: a request has at most {MAX_RECORDS} records of {MAX_BYTES // MIB} MiB "
            "together, before base64; put fewer records in each request. Any other body has at most "
            f"{MAX_DEFINITION // KIB} KiB"
        )
    return refusal(ApiError(code, text, status))


_REJECTED = {
    HTTPStatus.NOT_FOUND: "UnknownOperationException",
    HTTPStatus.METHOD_NOT_ALLOWED: "UnknownOperationException",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalFailure",
}


def _response(status: HTTPStatus, body: bytes, fields: dict[str, str] | None = None) -> HttpResponse:
    identifier = f"{_PROCESS}{next(_numbers):012x}"
    return HttpResponse(status, CONTENT_TYPE, body, {"x-amzn-RequestId": identifier, **(fields or {})})


_PROCESS, _numbers = str(uuid4())[:24], count()  # request ids that are never the same
