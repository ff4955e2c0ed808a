"""`streambridge check`: upstreams, and what would loop between one and an export to the same broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.config.checks import examine
from tests.cli.test_check import QUIET


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.toml"


def check(path: Path, text: str) -> list[str]:
    """The findings as `level: what`, without the directory."""
    path.write_text(text)
    return [f"{one.level}: {one.what}".replace(f"{path.parent}/", "") for one in examine(path)[1]]


UPSTREAM = """
[[upstream]]
name = "cloud"
url = "mqtt://broker.invalid"
protocol = "{down}"
[[upstream.mapping]]
filter = "{filter}"
"""
EXPORT = """
[streams.readings]
topics = ["plant/+/temp", "yard/#"]
[[streams.readings.export.mqtt]]
identifier = "up"
endpoint_url = "mqtt://{host}"
protocol = "{up}"
topic = "{topic}"
"""


def both(
    wanted: str, topic: str = "{topic}", down: str = "3.1.1", up: str = "5", host: str = "broker.invalid"
) -> str:
    names = QUIET.replace("[gateway]", '[gateway]\nid = "gw7"')
    return names + UPSTREAM.format(down=down, filter=wanted) + EXPORT.format(host=host, up=up, topic=topic)


@pytest.mark.parametrize(
    ("wanted", "topic", "back"),
    [
        ("plant/#", "{topic}", "plant/+/temp"),
        ("+/7/+", "{topic}", "plant/+/temp"),
        ("yard/a", "{topic}", "yard/#"),
        ("streams/readings/x", "{topic}", "streams/readings/#"),
        ("up/gw7/#", "up/{gateway}/{topic/1}", "up/gw7/+"),
        ("up/{gateway}/#", "up/{gateway}/{topic/1}", "up/gw7/+"),
        ("up/readings/plant", "up/{stream}/{topic/0}", "up/readings/plant"),
        ("up/7/temp", "up/{topic/1/#}", "up/+/temp"),
        ("up/a/b/c", "up/{topic/3/#}", "up/#"),
        ("up/a/b/c", "up/{json:/to}", "up/#"),
        ("up/a/b/c", "up/{client}/x", "up/#"),
        ("up/a/b", "up/a/b", "up/a/b"),
    ],
)
@pytest.mark.parametrize("protocols", [("3.1.1", "5"), ("5", "3.1.1")], ids=["down", "up"])
def test_a_mapping_that_matches_what_an_export_sends_there_is_refused(
    path: Path, wanted: str, topic: str, back: str, protocols: tuple[str, str]
) -> None:
    down, up = protocols
    (line,) = check(path, both(wanted, topic, down, up))
    assert line.startswith("error: x.toml:")
    assert "upstream[0].mapping[0].filter" in line
    assert f"sends to that broker ('{back}')" in line


@pytest.mark.parametrize(
    "text",
    [
        both("plant/#", down="5", up="5"),  # the property says so
        both("plant/#", host="other.invalid"),
        both("cmd/#"),
        both("plant/+/cmd"),
        both("down/#", "up/{topic}"),
        both("up/gw8/#", "up/{gateway}/{topic}"),
    ],
)
def test_what_cannot_loop_is_no_finding(path: Path, text: str) -> None:
    assert check(path, text) == []


def test_in_external_mode_the_topics_of_the_streams_are_the_mapping(path: Path) -> None:
    quiet = QUIET.replace("[mqtt]", '[mqtt]\nmode = "external"').replace('listen = ["tcp://127.0.0.1:0"]', "")
    text = quiet + '[mqtt.external]\nurl = "mqtt://broker.invalid"\n'
    export = EXPORT.format(host="broker.invalid", up="5", topic="{topic}")
    found = check(path, text + export)
    assert found
    assert all("mqtt.external.url" in line and "would come back" in line for line in found)
    assert check(path, text + export.replace('"{topic}"', '"north/{topic}"')) == []
    assert check(path, text.replace('url = "', 'protocol = "5"\nurl = "') + export) == []


def test_two_upstreams_with_one_client_id_and_a_listener_of_its_own_are_errors(path: Path) -> None:
    one = UPSTREAM.format(down="5", filter="a/#").replace("[[upstream.m", 'client_id = "x"\n[[upstream.m')
    two = one.replace('"cloud"', '"other"').replace("a/#", "b/#")
    (line,) = check(path, QUIET + one + two)
    assert "upstream[1].client_id" in line
    assert "end each other's connections" in line
    export = EXPORT.format(host="broker.invalid", up="5", topic="{topic}") + 'client_id = "x"\n'
    (line,) = check(path, QUIET + one + export)
    assert "export 'up' of stream 'readings' has the client id 'x' at the same broker" in line
    (line,) = check(path, QUIET + one + one.replace('"x"', '"y"'))
    assert "another has this name (upstream[0]" in line
    own = QUIET.replace("127.0.0.1:0", "127.0.0.1:18831") + one.replace("broker.invalid", "localhost:18831")
    (line,) = check(path, own)
    assert "upstream[0].url: this is a listener of this broker" in line


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (("mqtt://broker.invalid", "http://x"), "upstream[0].url"),
        (('filter = "a/#"', 'filter = "a/#/b"'), "upstream[0].mapping[0].filter"),
        (('filter = "a/#"', 'filter = "a/#"\ntopic = "{nothing}"'), "is not a field"),
        (('filter = "a/#"', 'filter = "a/#"\nqos = 2'), "upstream[0].mapping[0].qos"),
        (('filter = "a/#"', 'filter = "a/#"\n[[upstream.mapping]]\nfilter = "a/b"'), "overlap"),
        (("[[upstream.mapping]]", 'alpn = "x"\n[[upstream.mapping]]'), "mqtts://"),
        (("[[upstream.mapping]]", 'password_file = "x"\n[[upstream.mapping]]'), "username"),
        (("[[upstream.mapping]]\n", "mapping = []\n#"), "add [[upstream.mapping]]"),
        (('name = "cloud"', 'name = "a b"'), "upstream[0].name"),
    ],
)
def test_a_mistake_in_an_upstream_has_its_place(path: Path, change: tuple[str, str], what: str) -> None:
    text = QUIET + UPSTREAM.format(down="5", filter="a/#")
    assert change[0] in text
    found = check(path, text.replace(*change))
    assert any(what in line for line in found), found


def test_files_rules_and_the_mode_are_checked_as_elsewhere(path: Path) -> None:
    (path.parent / "secret").write_text("x")
    (path.parent / "secret").chmod(0o644)
    more = 'username = "u"\npassword_file = "secret"\nuser = "north"\n[[upstream.mapping]]'
    text = QUIET + UPSTREAM.format(down="5", filter="a/#").replace("[[upstream.mapping]]", more)
    rule = '[[mqtt.acl]]\nuser = "north"\npublish = ["a/#"]\n'
    (line,) = check(path, text + rule)
    assert "upstream[0].password_file: every user of this machine can read" in line
    external = text.replace("[mqtt]", '[mqtt]\nmode = "external"').replace("listen = [", "#")
    assert any('needs mqtt.mode = "embedded"' in line for line in check(path, external))
