"""Topic patterns: which topics are refined, and columns from their levels.

A pattern is an MQTT topic filter (MQTT 5, section 4.7) in which `{name}` stands for one level, as `+` does,
and becomes the column `name`: `plant/{line}/+/{sensor}/#`. Matching is linear in the number of levels.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from bridge.ingest.errors import BadOption

_NAME = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """The levels of a pattern, and which of them are columns: (name, index of the level)."""

    levels: tuple[str, ...]
    columns: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, reserved: Collection[str] = ()) -> TopicPattern:
        """Return the pattern; an empty text matches every topic. Raises BadOption.

        `reserved` are names that the table uses for other columns.
        """
        levels = text.split("/") if text else ["#"]
        columns: dict[str, int] = {}
        for index, level in enumerate(levels):
            if found := _NAME.fullmatch(level):
                if found[1] in reserved or found[1] in columns:
                    raise BadOption(f"--topic {text}: the name {found[1]} is taken: choose another one")
                columns[found[1]] = index
                levels[index] = "+"
            elif "{" in level or "}" in level:
                raise BadOption(
                    f"--topic {text}: write {{name}} as a whole level, in lower case, a-z, 0-9 and _"
                )
            elif ("+" in level and level != "+") or (
                "#" in level and (level != "#" or index + 1 < len(levels))
            ):
                raise BadOption(f"--topic {text}: + is a whole level, and # the last one")
        return cls(tuple(levels), tuple(columns.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.columns)

    def match(self, topic: str) -> tuple[str, ...] | None:
        """Return the values of the columns, or None if the topic does not match."""
        found = topic.split("/")
        if topic[:1] == "$" and self.levels[0] in ("+", "#") and self.levels != ("#",):
            return None
        for index, level in enumerate(self.levels):
            if level == "#":
                break
            if index >= len(found) or level not in ("+", found[index]):
                return None
        else:
            if len(found) != len(self.levels):
                return None
        return tuple(found[index] for _, index in self.columns)
