"""Where a message of another broker goes, and which topic filters have a topic in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.mqtt.mappings import Mapping, topic_template
from bridge.mqtt.settings import UpstreamSettings
from bridge.topics import is_topic_filter, matches, overlap


@pytest.mark.parametrize(
    ("template", "there", "here"),
    [
        ("{topic}", "cmd/press/start", "cmd/press/start"),
        ("fixed", "cmd/press", "fixed"),
        ("{topic/-1}/{topic/0}", "cmd/press/start", "start/cmd"),
        ("in/{topic/1/#}", "gw7/cmd/press/start", "in/cmd/press/start"),
        ("{topic/-2/#}", "a/b/c", "b/c"),
        ("a{topic/0}b", "x/y", "axb"),
        ("{topic/2}", "a/b", None),
        ("in/{topic/2/#}", "a/b", None),
        ("{topic}", "$SYS/uptime", None),
        ("{topic}", "streambridge/me/listStreams", None),
        ("{topic/0}", "/a", None),
    ],
)
def test_a_template_makes_the_topic_here(template: str, there: str, here: str | None) -> None:
    assert topic_template(template)(there) == here


@pytest.mark.parametrize(
    "template", ["", "a/#", "+/b", "{what}", "{topic", "{topic/x}", "$SYS/a", "streambridge/x/y", "{json:/a}"]
)
def test_a_template_that_makes_no_topic_is_a_mistake(template: str) -> None:
    with pytest.raises(ValueError, match="topic"):
        Mapping(filter="a", topic=template)


def test_the_gateways_id_may_be_in_both() -> None:
    mapping = Mapping(filter="{gateway}/cmd/#", topic="{gateway}/{topic/1/#}").of("plant-7")
    assert (mapping.filter, mapping.topic) == ("plant-7/cmd/#", "plant-7/{topic/1/#}")
    with pytest.raises(ValueError, match="filter"):
        Mapping(filter="a{gateway}/cmd/#").of("a/#")


def test_mappings_of_one_upstream_have_no_topic_in_common() -> None:
    with pytest.raises(ValueError, match="'a/#' and 'a/b' overlap"):
        UpstreamSettings(name="x", url="mqtt://h", mapping=[Mapping(filter="a/#"), Mapping(filter="a/b")])


level = st.sampled_from(["a", "b", "$c", "", "+", "#"])
filters = st.lists(level, min_size=1, max_size=4).map("/".join).filter(is_topic_filter)
names = st.lists(st.sampled_from(["a", "b", "$c", "", "d"]), min_size=1, max_size=5).map("/".join)


@given(filters, filters, st.lists(names, min_size=20, max_size=40))
def test_filters_overlap_if_a_topic_matches_both(one: str, other: str, topics: list[str]) -> None:
    # The topics that the filters themselves suggest, beside those at random.
    suggested = [
        text.replace("+", "d").replace("/#", tail).replace("#", "d")
        for text in (one, other)
        for tail in ("", "/d", "/a/b")
    ]
    merged = [_merged(one, other), _merged(other, one)]
    found = any(matches(one, topic) and matches(other, topic) for topic in [*topics, *suggested, *merged])
    assert overlap(one, other) == overlap(other, one)
    assert overlap(one, other) or not found
    if overlap(one, other):
        assert found, "a topic that both match can be made of the two"


def _merged(one: str, other: str) -> str:
    """A topic that has the literal levels of both."""
    first, second = one.split("/"), other.split("/")
    found = []
    for n in range(max(len(first), len(second))):
        here = [levels[n] for levels in (first, second) if n < len(levels)]
        literal = [text for text in here if text not in ("+", "#")]
        if not literal and "+" not in here:
            break
        found.append(literal[0] if literal else "d")
    return "/".join(found) or "d"
