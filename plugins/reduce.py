"""Plugin `reduce`: fewer and smaller messages, by the rules in the option `reduce` of an export.

The first rule whose `topics` match the topic of a message applies. It decides in this order:

1. `sample = N` sends one in N messages of each topic: the first, then every N-th.
2. `deadband` sends a message only if one of its values differs from the last one sent on the same topic by
   more than its band. A band is a number, a percentage of the last value sent (`"2%"`), or `"ignore"`. On an
   object or a list, a band applies to every value in it, except where a longer pointer has its own. Values
   other than numbers count as changed when they differ. A value that a message lacks is not compared. A
   message without any of these values, or with more than 200, is sent.
3. `longest_silence_millis` sends the next message of a topic when that much time has passed since the last
   one sent, whatever the sample and the dead band say. Times are the ingest times of the messages.
4. `keep` or `drop` select fields, and `rename` gives fields new names. Values stay as they were published,
   digit by digit. A field is not renamed if another field of the object already has the new name.

Payloads that are not JSON are sampled, and otherwise sent unchanged. `keep`, `drop` and `rename` follow
objects only: a list is one value.

The values sent last are in the state of the transform, so a retried batch has the same messages. The state
has room for about 1,600 topics with one value each. Beyond that, the topic that was sent longest ago is
forgotten, and its next message is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw, Struct

from bridge import ExportConfig, Record, TransformState, hookimpl
from bridge.plugin.reduction import Reduction, encoded, parse_band, steps
from bridge.topics import matches

MOST_VALUES = 200  # compared values per message
MOST_TOPICS = 4096  # topics in the cache of rules
EXACT = 2**53  # larger integers are compared as text, because a float cannot distinguish them
UNREADABLE = (ValueError, RecursionError)  # what decoding a hostile payload raises; msgspec's are ValueErrors

Band = tuple[float, float]  # absolute, and as a share of the last value
Value = float | bytes  # a number, or the digest of anything else


class _Sent(Struct, array_like=True):
    """The state of a topic: when its last message was sent, how many came, and the values sent last."""

    time: int
    count: int = 0
    values: dict[int, Value] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Sent).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


class _Field:
    """A node of the tree of pointers: what a rule does with a field and those below it."""

    __slots__ = ("band", "below", "drop", "has_band", "keep", "name")

    def __init__(self) -> None:
        self.below: dict[str, _Field] = {}
        self.keep = self.drop = self.has_band = False
        self.band: Band | None = None
        self.name = ""

    def at(self, pointer: str) -> _Field:
        """Return the node of a pointer; create it if necessary."""
        node = self
        for step in steps(pointer):
            node = node.below.setdefault(step, _Field())
        return node


class _Rule:
    """A rule with its pointers as trees."""

    def __init__(self, rule: Reduction) -> None:
        self.topics, self.sample, self.silence = rule.topics, rule.sample, rule.longest_silence_millis
        self._bands, self._fields = _Field(), _Field()
        for pointer, band in rule.deadband.items():
            node = self._bands.at(pointer)
            node.band, node.has_band = parse_band(band), True
        for pointer in rule.keep:
            self._fields.at(pointer).keep = True
        for pointer in rule.drop:
            self._fields.at(pointer).drop = True
        for pointer, name in rule.rename.items():
            self._fields.at(pointer).name = name
        self._keeps = bool(rule.keep)
        self.compares = bool(rule.deadband)
        self.remembers = self.compares or rule.sample > 1

    def values(self, payload: bytes) -> dict[int, tuple[Value, Band]]:
        """Return the values to compare, by the digests of their pointers; empty if none can be compared."""
        found: dict[int, tuple[Value, Band]] = {}
        try:
            _collect(msgspec.json.decode(payload), self._bands, None, "", found)
        except UNREADABLE:
            return {}
        return found if len(found) <= MOST_VALUES else {}

    def shortened(self, payload: bytes) -> bytes:
        """Return the payload with the fields and names that the rule gives it."""
        if not self._fields.below:
            return payload
        try:
            return _shortened(payload, self._fields, keeps=self._keeps)
        except UNREADABLE:
            return payload


def _collect(
    value: Any, node: _Field | None, band: Band | None, pointer: str, found: dict[int, tuple[Value, Band]]
) -> None:
    """Add the leaves of a value with their bands; `band` is the one of the enclosing value."""
    if node is not None and node.has_band:
        band = node.band
    if len(found) > MOST_VALUES or (band is None and (node is None or not node.below)):
        return
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            step = str(key)
            below = None if node is None else node.below.get(step)
            if below is not None or band is not None:
                step = step.replace("~", "~0").replace("/", "~1")
                _collect(inner, below, band, f"{pointer}/{step}", found)
    elif band is not None:
        is_number = isinstance(value, float) or (type(value) is int and -EXACT <= value <= EXACT)
        found[_digest(pointer)] = (float(value) if is_number else _text(value)), band


def _shortened(payload: bytes, node: _Field, *, keeps: bool) -> bytes:
    members, left, same = _members(payload), dict[str, Raw](), True
    for key, value in members.items():
        field = node.below.get(key)
        if field is None:
            if not keeps:
                left[key] = value
            continue
        if field.drop:
            continue
        raw = bytes(value)
        inside = keeps and not field.keep  # of this field, only what is kept below it
        if field.below and raw[:1] == b"{":
            inner = _shortened(raw, field, keeps=inside)
            same = same and inner is raw
            left[key] = Raw(inner)
        elif not inside:
            left[key] = value
    names = {key: node.below[key].name for key in left if key in node.below and node.below[key].name}
    if same and len(left) == len(members) and not names:
        return payload
    if names:
        taken = left.keys() - names.keys()
        renamed = dict[str, Raw]()
        for key, value in left.items():
            name = names.get(key, key)
            name = key if key in names and (name in taken or name in renamed) else name
            renamed[name] = value
        left = renamed
    return msgspec.json.encode(left)


def _text(value: object) -> bytes:
    return hashlib.blake2b(
        msgspec.json.encode(str(value) if type(value) is int else value), digest_size=8
    ).digest()


@lru_cache(10_000)
def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class _Rules:
    """The rules of one export."""

    def __init__(self, rules: list[Reduction]) -> None:
        self._rules = [_Rule(rule) for rule in rules]
        self._by_topic: dict[str, tuple[_Rule | None, bytes]] = {}

    def of(self, topic: str) -> tuple[_Rule | None, bytes]:
        """Return the rule of a topic, and the topic's key in the state."""
        found = self._by_topic.get(topic)
        if found is None:
            rule = next((one for one in self._rules if any(matches(f, topic) for f in one.topics)), None)
            found = rule, b"reduce" + hashlib.blake2b(topic.encode(), digest_size=8).digest()
            if len(self._by_topic) >= MOST_TOPICS:
                self._by_topic.clear()
            self._by_topic[topic] = found
        return found

    def payload(self, record: Record, state: TransformState) -> bytes | None:
        """Return the payload to send for a record; None if it is left out."""
        rule, key = self.of(record.topic)
        if rule is None:
            return record.payload
        if rule.remembers and not _is_sent(rule, key, record, state):
            return None
        return rule.shortened(record.payload)


def _is_sent(rule: _Rule, key: bytes, record: Record, state: TransformState) -> bool:
    """Decide by sample, dead band and silence whether to send a record, and update the state."""
    number, time = record.sequence_number, record.ingest_time
    stored = state.get(key)
    sent = None if stored is None else _decode(stored)
    values = rule.values(record.payload) if rule.compares else {}
    fresh = {name: value for name, (value, _) in values.items()}
    if sent is None:
        state.set(number, key, _encode(_Sent(time, 1, fresh)))
        return True
    # If the clock was set back, the silence could otherwise have any length.
    overdue = rule.silence is not None and not 0 <= time - sent.time < rule.silence
    sends = overdue or (sent.count % rule.sample == 0 and (not values or _has_changed(values, sent.values)))
    if sends:
        known = sent.values | fresh
        sent.time, sent.values = time, known if len(known) <= MOST_VALUES else fresh
    if sends or rule.sample > 1:
        sent.count = (sent.count + 1) % rule.sample
        state.set(number, key, _encode(sent))
    return sends


def _has_changed(values: Mapping[int, tuple[Value, Band]], before: Mapping[int, Value]) -> bool:
    for name, (value, (absolute, share)) in values.items():
        last = before.get(name)
        if isinstance(value, float) and isinstance(last, float):
            if abs(value - last) > max(absolute, share * abs(last)):
                return True
        elif value != last:
            return True
    return False


_compiled: dict[bytes, _Rules] = {}


def _rules(config: ExportConfig) -> _Rules:
    key = encoded(config.reduce)
    found = _compiled.get(key)
    if found is None:
        if len(_compiled) >= 1000:
            _compiled.clear()
        found = _compiled[key] = _Rules(config.reduce)
    return found


@hookimpl
def transform_records(records: list[Record], config: ExportConfig, state: TransformState) -> list[Record]:
    """Apply the rules."""
    rules, left = _rules(config), []
    for record in records:
        payload = rules.payload(record, state)
        if payload is record.payload:
            left.append(record)
        elif payload is not None:
            left.append(msgspec.structs.replace(record, payload=payload))
    return left


# It is not called for exports without rules.
transform_records.option = "reduce"  # type: ignore[attr-defined]
