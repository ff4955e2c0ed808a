"""README.md as a package index shows it: without a repository around it, and without Mermaid.

`published(text, url, version)` makes links into the repository absolute, at the tag of the version. `url`
is the address of the repository at a forge with GitHub's paths; without one, links become their text and
images are left out.
"""

from __future__ import annotations

import re

_DIAGRAM = re.compile(r"```mermaid\n.*?\n```\n", re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
OVERVIEW = "![Devices publish to the gateway, which stores and exports](docs/images/overview.svg)\n"


def published(text: str, url: str, version: str) -> str:
    """The text for the index."""

    def absolute(link: re.Match[str]) -> str:
        image, words, path = link.groups()
        if not url:
            return "" if image else words
        return f"{image}[{words}]({url}/{'raw' if image else 'blob'}/v{version}/{path})"

    return _LINK.sub(absolute, _DIAGRAM.sub(OVERVIEW, text))


def urls(url: str, version: str) -> str:
    """The table of pyproject.toml with the project's addresses."""
    return (
        "\n[project.urls]\n"
        f'Source = "{url}"\n'
        f'Documentation = "{url}/blob/v{version}/docs/README.md"\n'
        f'Changelog = "{url}/blob/v{version}/CHANGELOG.md"\n'
        f'Issues = "{url}/issues"\n'
        f'Security = "{url}/blob/v{version}/SECURITY.md"\n'
    )
