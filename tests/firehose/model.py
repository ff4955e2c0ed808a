"""Answers of the Firehose API, checked against botocore's own model of the service."""

from __future__ import annotations

import json
import re
from typing import Any

import botocore.session
from botocore.model import OperationModel, ServiceModel, Shape

SERVICE: ServiceModel = botocore.session.get_session().get_service_model("firehose")
# "Common Errors" of the API reference, by the names that services with JSON 1.1 use for them.
COMMON = {
    "AccessDeniedException",
    "IncompleteSignatureException",
    "InternalFailure",
    "InvalidSignatureException",
    "MissingAuthenticationTokenException",
    "SerializationException",
    "ServiceUnavailableException",
    "UnknownOperationException",
    "UnrecognizedClientException",
    "ValidationException",
}


def check_answer(operation: OperationModel, status: int, headers: Any, body: bytes) -> None:
    """Fails unless the answer is one that the model allows."""
    assert headers["content-type"] == "application/x-amz-json-1.1"
    assert re.fullmatch(r"[0-9a-f-]{36}", headers["x-amzn-RequestId"])
    found = json.loads(body)
    if status == 200:
        assert operation.output_shape is not None
        check_shape(operation.output_shape, found, operation.name)
        return
    code = found["__type"]
    errors = {shape.name: shape for shape in operation.error_shapes}
    assert code in {*errors, *COMMON}, f"{operation.name} has no error {code}"
    assert set(found) == {"__type", "message"}
    assert found["message"]
    if code in errors:
        assert (status >= 500) == bool(errors[code]._shape_model.get("fault"))


def check_shape(shape: Shape, value: Any, where: str) -> None:
    """Fails unless the value has the shape, with its ranges, enums and patterns."""
    kind = shape.type_name
    if kind == "structure":
        members: dict[str, Shape] = shape.members  # type: ignore[attr-defined]
        assert isinstance(value, dict), where
        assert value.keys() <= members.keys(), f"{where}: {value.keys() - members.keys()}"
        assert set(shape.required_members) <= value.keys(), where  # type: ignore[attr-defined]
        for name, part in value.items():
            check_shape(members[name], part, f"{where}.{name}")
        return
    if kind == "list":
        assert isinstance(value, list), where
        for n, part in enumerate(value):
            check_shape(shape.member, part, f"{where}[{n}]")  # type: ignore[attr-defined]
    elif kind == "string":
        assert isinstance(value, str), where
        if enum := getattr(shape, "enum", None):
            assert value in enum, f"{where}: {value}"
        pattern = shape.metadata.get("pattern", "")
        if pattern and "\\p{" not in pattern:  # Java's classes of letters
            assert re.search(rf"^(?:{pattern})$", value), f"{where}: {value!r} does not match {pattern}"
    else:
        types = {"boolean": bool, "integer": int, "timestamp": (int, float), "blob": str}
        assert isinstance(value, types[kind]), f"{where}: {value!r} is no {kind}"  # type: ignore[arg-type]
    size = value if isinstance(value, int | float) else len(value)
    low, high = shape.metadata.get("min"), shape.metadata.get("max")
    assert low is None or size >= low, f"{where}: {value!r}"
    assert high is None or size <= high, f"{where}: {value!r}"
