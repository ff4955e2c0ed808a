"""`Util` of the AWS SDK: message bodies to JSON and back."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from bridge.client.base import Data

D = TypeVar("D", bound=Data)


class Util:
    """JSON bodies for SiteWise and S3 exports, and of status messages."""

    @staticmethod
    def validate_and_serialize_to_json_bytes(data: Data) -> bytes:
        """Return the JSON of a data object; raises ValidationException if it is invalid."""
        data.check()
        return json.dumps(_without_empty_lists(data.as_dict())).encode()

    @staticmethod
    def deserialize_json_bytes_to_obj(bytes: bytes, type: type[D]) -> D:  # noqa: A002 - the SDK's names
        """Return the data object of a JSON document."""
        return type.from_dict(json.loads(bytes))


def _without_empty_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_empty_lists(item) for key, item in value.items() if item != []}
    return value
