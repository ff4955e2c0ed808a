"""The files of a new plugin package: a minimal but complete exporter that writes to a file, and its tests.

The texts are templates: `$name` is the name of the plugin, `$module` its module, `$kind` the kind of its
exports, `$cls` the beginning of its classes' names.
"""

from __future__ import annotations

from string import Template

_PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "streambridge-$name"
version = "0.1.0"
description = "A streambridge exporter to $name"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["streambridge"]

[project.optional-dependencies]
test = ["pytest"]

# This makes it a plugin: a name, and the module with its hooks.
[project.entry-points.streambridge]
$kind = "$module"

[tool.setuptools]
py-modules = ["$module"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

_README = """\
# streambridge-$name

A plugin for streambridge: it exports the messages of a stream, at
present to a file, one a line.

```toml
[[streams.plant.export.$kind]]
identifier = "copy"
path = "/var/lib/streambridge/plant.txt"
```

In the environment of streambridge:

```sh
pip install -e '.[test]'
python -m pytest
streambridge plugins     # lists it
```

To make it yours:

1. Replace the option `path` in `$module.py` by what your destination needs.
2. Replace the body of `export`. It returns when the destination has confirmed the records, and not before.
3. In `tests/test_$module.py`, let `delivered` read from your destination, and write a method for each fault
   that it may have.
"""

_MODULE = '''\
"""A streambridge exporter that appends messages to a file, one a line.

    [[streams.plant.export.$kind]]
    identifier = "copy"
    path = "/var/lib/streambridge/plant.txt"

A batch may arrive twice after a crash. The file then has its lines twice. A destination with keys should
use the stream, its epoch and the sequence number as the key.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from bridge import Batch, BatchedConfig, BatchLimits, Exporter, Outcome, Retry, hookimpl


class ${cls}Config(BatchedConfig, kw_only=True, frozen=True):
    """The options of an export, in addition to those of all exports."""

    path: str


class ${cls}Exporter(Exporter):
    """One stream to one file."""

    kind = "$kind"
    Config = ${cls}Config
    limits = BatchLimits(records=1000)

    config: ${cls}Config

    def export(self, batch: Batch) -> Outcome:
        # A record that can never succeed is rejected, by its index in batch.records.
        rejected = {
            index: "the payload has more than one line"
            for index, record in enumerate(batch.records)
            if b"\\n" in record.payload
        }
        lines = [
            record.payload + b"\\n"
            for index, record in enumerate(batch.records)
            if index not in rejected
        ]
        try:
            with open(self.config.path, "ab") as out:
                out.writelines(lines)
                out.flush()
                os.fsync(out.fileno())  # only now they are stored
        except OSError as error:  # no directory yet, disk full: never a rejection
            raise Retry(f"{self.config.path}: {error.strerror}") from error
        return Outcome(rejected=rejected)


@hookimpl
def register_exporters(register: Callable[[type[Exporter]], None]) -> None:
    """Register the exporter of this package."""
    register(${cls}Exporter)
'''

_TEST = '''\
"""The contract suite of streambridge, and what is special to this exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bridge.plugin.testing import ExporterContract, deliver, make_batch

from $module import ${cls}Exporter


class Test${cls}(ExporterContract):
    """Inherits the tests; pytest finds them here."""

    exporter = ${cls}Exporter
    faults = ("missing_directory",)
    poison = b"two\\nlines"

    @pytest.fixture(autouse=True)
    def _destination(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "data"
        self.directory.mkdir()

    def config(self) -> dict[str, Any]:
        return {"identifier": "copy", "path": str(self.directory / "plant.txt")}

    def delivered(self) -> list[int]:
        lines = (self.directory / "plant.txt").read_bytes().splitlines()
        return [int(line.split()[1]) for line in lines]

    @contextmanager
    def missing_directory(self) -> Iterator[None]:
        """A fault: the disk is not mounted yet."""
        aside = self.directory.rename(self.directory.with_name("aside"))
        yield
        aside.rename(self.directory)

    def test_a_rejection_says_why(self) -> None:
        """Operators read the reason."""
        rejected = deliver(self.make(), make_batch([self.poison]))
        assert rejected == {0: "the payload has more than one line"}
'''


def kind_of(name: str) -> str:
    """Return the kind of exports of a plugin: `my-queue` becomes `myQueue`."""
    first, *more = name.split("-")
    return first + "".join(word.capitalize() for word in more)


def files(name: str) -> dict[str, str]:
    """Return the files of a plugin's package, as texts by path."""
    module = f"streambridge_{name.replace('-', '_')}"
    cls = "".join(word.capitalize() for word in name.split("-"))
    words = {"name": name, "module": module, "kind": kind_of(name), "cls": cls}
    templates = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{module}.py": _MODULE,
        f"tests/test_{module}.py": _TEST,
    }
    return {path: Template(text).substitute(words) for path, text in templates.items()}
