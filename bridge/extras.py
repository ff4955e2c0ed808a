"""How to install the extras of streambridge, which is on no package index, for messages."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path


def how_to_install(extra: str, checkout: Path = Path(__file__).parents[1]) -> str:
    """The command that installs an extra: from the checkout, if this is one, or else from the wheel."""
    if (checkout / "pyproject.toml").exists():
        return f"pip install '{checkout}[{extra}]'"
    version = importlib.metadata.version("streambridge")
    return f"pip install './streambridge-{version}-py3-none-any.whl[{extra}]'"
