"""Books: counters that go up and down, and what they must be.

A class with a counter of bytes, items, connections or memory has a method `recount`. It yields each counter:
its name, what it is, and what it must be by the state that it counts. The two are equal between any two turns
of the event loop. An object calls `opened` when it begins to count. That does nothing unless somebody keeps
books: tests, the simulation, and a process with `STREAMBRIDGE_CHECK_BOOKS=1`. They call `check`.

`tests/test_books.py` fails for a counter without a book.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableSet
from typing import Protocol
from weakref import WeakSet

VARIABLE = "STREAMBRIDGE_CHECK_BOOKS"  # of the environment
Entry = tuple[str, object, object]  # the counter's name, what it is, and what it must be


class Book(Protocol):
    """An object with counters."""

    def recount(self) -> Iterable[Entry]:
        """Its counters. Reads no files and changes nothing."""


class WrongBookError(AssertionError):
    """A counter is not what it must be."""


_kept: MutableSet[Book] | None = WeakSet() if os.environ.get(VARIABLE) == "1" else None


def keep(kept: MutableSet[Book]) -> None:
    """Keep the books of what is opened from now on, in `kept`."""
    global _kept
    _kept = kept


def opened(book: Book) -> None:
    """An object begins to count."""
    if _kept is not None:
        _kept.add(book)


def check() -> None:
    """Compare all counters with what they count. Raises WrongBookError, which names all that are wrong."""
    wrong = [
        f"{type(book).__module__}.{type(book).__name__}: {name} is {found}, and must be {must}"
        for book in list(_kept or ())
        for name, found, must in book.recount()
        if found != must
    ]
    if wrong:
        raise WrongBookError("; ".join(sorted(wrong)))
