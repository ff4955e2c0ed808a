"""Dicts that strangers can fill, and that stay small: a new entry takes the place of the oldest one."""

from __future__ import annotations

from typing import TypeVar

REMEMBERED = 10_000  # entries

Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(memory: dict[Key, Value], key: Key, value: Value, most: int = REMEMBERED) -> None:
    """Set an entry, which is the newest one then; of more than `most`, the oldest goes."""
    memory.pop(key, None)
    if len(memory) >= most:
        del memory[next(iter(memory))]
    memory[key] = value
