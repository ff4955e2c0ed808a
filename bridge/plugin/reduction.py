"""The option `reduce` of every export: rules that make messages fewer and smaller before they are sent.

The first rule whose `topics` match a message applies. A message that no rule matches is sent as it is. The
plugin `reduce` applies the rules. Fields are named by JSON pointers (RFC 6901): `/motor/speed` is the
member `speed` of the object `motor`, and the empty pointer is the whole payload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from bridge.model import MAX_MILLIS
from bridge.settingtypes import Millis
from bridge.topics import covers, filter_mistake

MAX_RULES = 16 * 1024  # bytes of the rules as JSON, as they are stored with a position
IGNORE = "ignore"  # the band of a value whose changes do not count
Topics = Annotated[list[str], Meta(min_length=1)]
_POINTER = re.compile(r"(/([^~/]|~[01])*)*")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")


class Reduction(Struct, rename="camel", kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One rule: its topics, which of their messages are sent, and with which fields.

    `sample` N sends one in N messages of a topic. `deadband` sends a message only if one of these values has
    changed by more than its band since the last message sent. After `longest_silence_millis` without a
    message of its topic, the next one is sent in any case. `keep` or `drop` name fields; `rename` gives
    fields new names.
    """

    topics: Topics = field(default_factory=lambda: ["#"])
    sample: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    deadband: dict[str, float | str] = {}
    longest_silence_millis: Annotated[Millis, Meta(ge=1, le=MAX_MILLIS)] | None = None
    keep: list[str] = []
    drop: list[str] = []
    rename: dict[str, str] = {}

    def __post_init__(self) -> None:
        mistakes = list(self._mistakes())
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def _mistakes(self) -> Iterator[str]:
        for topic in self.topics:
            if (mistake := filter_mistake(topic)) is not None:
                yield f"`topics`: {mistake}"
        named = {"deadband": self.deadband, "keep": self.keep, "drop": self.drop, "rename": self.rename}
        for key, pointers in named.items():
            for pointer in pointers:
                if not _POINTER.fullmatch(pointer):
                    yield (
                        f'`{key}`: {pointer!r} is not a JSON pointer; write the member b of a as "/a/b", '
                        "and ~ and / in a name as ~0 and ~1"
                    )
                elif not pointer and key != "deadband":
                    yield f'`{key}`: "" is the whole payload; name a field, such as "/temperature"'
        for pointer, band in self.deadband.items():
            try:
                parse_band(band)
            except ValueError as error:
                yield f"`deadband`: the band of {pointer!r} {error}"
        for pointer, name in self.rename.items():
            if not name or name.startswith("/"):
                yield (
                    f'`rename`: the new name of {pointer!r} is {name!r}; write a name such as "speed", '
                    "not a pointer"
                )
        if self.keep and self.drop:
            yield "`drop`: with `keep`, all other fields are left out already; remove one of them"
        for pointer in self.rename:
            if any(_is_within(pointer, dropped) for dropped in self.drop):
                yield f"`rename`: {pointer!r} is not sent, since `drop` leaves it out; remove one of them"
            elif self.keep and not any(
                _is_within(pointer, kept) or _is_within(kept, pointer) for kept in self.keep
            ):
                yield f"`rename`: {pointer!r} is not sent, since `keep` does not name it; add it there"
        if self.longest_silence_millis is not None and self.sample == 1 and not self.deadband:
            yield "`longest_silence_millis` needs `sample` or `deadband`; without them, every message is sent"

    @property
    def changes_nothing(self) -> bool:
        """Whether all messages of its topics are sent as they are."""
        return self.sample == 1 and not (self.deadband or self.keep or self.drop or self.rename)


def _is_within(pointer: str, outer: str) -> bool:
    """Whether a JSON pointer names a field or a part of it."""
    return pointer == outer or pointer.startswith(f"{outer}/")


def check_effects(rules: Sequence[Reduction]) -> None:
    """Raise ValueError for a rule without effect.

    A rule that changes nothing exempts its topics from the rules after it, so there must be one.
    """
    for number, rule in enumerate(rules):
        before = [one for earlier in rules[:number] for one in earlier.topics]
        if all(any(covers(one, topic) for one in before) for topic in rule.topics):
            raise ValueError(
                f"`reduce`: rule {number + 1} is never used, since rules before it have all of its topics; "
                "put it before them, or remove it"
            )
    if rules and rules[-1].changes_nothing:
        raise ValueError(
            f"`reduce`: rule {len(rules)} changes nothing, and there is none after it; give it `sample`, "
            "`deadband`, `keep`, `drop` or `rename`, or remove it"
        )


def parse_band(band: float | str) -> tuple[float, float] | None:
    """Parse a band as (absolute, share of last value); None if changes do not count. Raises ValueError."""
    if band == IGNORE:
        return None
    percent = _PERCENT.fullmatch(band) if isinstance(band, str) else None
    if percent is not None:
        return 0.0, float(percent[1]) / 100
    if isinstance(band, str) or not 0 <= band < float("inf"):
        raise ValueError(
            f'is {band!r}; write a number from 0 up such as 0.5, a percentage such as "2%", or "{IGNORE}"'
        )
    return float(band), 0.0


def steps(pointer: str) -> list[str]:
    """Return the member names of a JSON pointer (RFC 6901, section 4)."""
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


class _Filters(Struct, rename="camel"):
    topics: list[str]
    reduce: list[Reduction]


def encoded(rules: list[Reduction], topics: Sequence[str] = ()) -> bytes:
    """Encode the rules as stored with a position, with the topics of an export whose retries need them too.

    Empty if there are neither. Raises ValueError if they are too large.
    """
    if topics:
        data = msgspec.json.encode(_Filters(list(topics), rules))
    else:
        data = msgspec.json.encode(rules) if rules else b""
    if len(data) > MAX_RULES:
        what = "`topics` and `reduce`: they" if topics else "`reduce`: its rules"
        raise ValueError(
            f"{what} have {len(data)} bytes as JSON, and may have {MAX_RULES}; shorten them, or "
            "use topic filters with wildcards"
        )
    return data


def decoded(data: bytes) -> tuple[list[Reduction], list[str]]:
    """Return the rules and topics that were given to `encoded`."""
    if data.startswith(b"{"):
        found = msgspec.json.decode(data, type=_Filters)
        return found.reduce, found.topics
    return (msgspec.json.decode(data, type=list[Reduction]) if data else []), []
