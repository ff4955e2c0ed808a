"""An mkdocs hook: replaces links to repository files, which the built site lacks, by the names of the files.

In the repository these links work; a test checks them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace `[text](../outside)` by the text and the file's name."""
    here = DOCS / Path(page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = (here / link[2].partition("#")[0]).resolve()
        if "://" in link[2] or not link[2].partition("#")[0] or target.is_relative_to(DOCS):
            return link[0]
        return f"{link[1]} (`{target.relative_to(DOCS.parent)}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", named, markdown)
