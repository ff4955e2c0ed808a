"""Loads botocore's data, the models of services and their endpoints, in a third of the memory.

botocore reads its files into ordered dictionaries. Plain ones keep the order too, in half the memory. To make
the client of one service it also parses the endpoints of all services; here they stay text until they are
used.
"""

from __future__ import annotations

import gzip
from contextlib import suppress
from typing import Any

from botocore.loaders import JSONFileLoader
from msgspec import Raw, json


class CompactFiles(JSONFileLoader):
    """Reads the files for a loader of botocore, as its attribute `file_loader`."""

    def load_file(self, file_path: str) -> Any:
        """Read a file, given without its suffix; None if there is none."""
        for suffix, opening in ((".json", open), (".json.gz", gzip.open)):
            with suppress(FileNotFoundError), opening(file_path + suffix, "rb") as file:
                content = file.read()
                return _endpoints(content) if file_path.endswith("endpoints") else json.decode(content)
        return None


class _Services(dict[str, Any]):
    """The endpoints by service, stored as text and parsed on access."""

    def __getitem__(self, name: str) -> Any:
        return json.decode(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - that is this function


def _endpoints(content: bytes) -> Any:
    found = json.decode(json.format(content, indent=-1), type=dict[str, Raw])
    partitions = []
    for partition in json.decode(found.pop("partitions"), type=list[dict[str, Raw]]):
        services = json.decode(partition.pop("services"), type=dict[str, Raw])
        partitions.append(_read(partition) | {"services": _Services(services)})
    return _read(found) | {"partitions": partitions}


def _read(fields: dict[str, Raw]) -> dict[str, Any]:
    return {name: json.decode(value) for name, value in fields.items()}
