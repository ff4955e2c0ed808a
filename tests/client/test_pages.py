"""The programs in the documentation, each run as it is against a service in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.client import ReadMessagesOptions, StreamManagerClient
from tests.client.gateway import Gateway
from tests.fakes.sdks import MQTT_JS, node_modules
from tests.greengrass.conftest import finish
from tests.test_docs import DOCS, ROOT, blocks

PYTHON_CLIENT = DOCS / "howto" / "python-client.md"
MQTT_CLIENTS = DOCS / "howto" / "mqtt-clients.md"
LANGUAGES = ("python", "js")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture(scope="module")
def config() -> str:
    """The configuration of the page for MQTT clients."""
    ((_, _, text),) = blocks("toml", [MQTT_CLIENTS])
    return text


@pytest.fixture(scope="module")
def readings(tmp_path_factory: pytest.TempPathFactory, config: str) -> Iterator[Gateway]:
    """A gateway with the stream of that page."""
    with Gateway(tmp_path_factory.mktemp("readings"), config) as running:
        yield running


def start(language: str, program: str, gateway: Gateway) -> subprocess.Popen[str]:
    """Start a program in one of the languages."""
    program = program.replace("1883", str(gateway.mqtt_port))
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    if language == "js":
        command, env["NODE_PATH"] = ["node", "-e", program], str(node_modules(MQTT_JS))
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def run(language: str, program: str, gateway: Gateway) -> str:
    """What a program prints; it must end well."""
    return finish(start(language, program, gateway))


def python(program: str, gateway: Gateway) -> str:
    """What a Python program prints."""
    return run("python", program, gateway)


def program(language: str, name: str) -> str:
    """A program of the page for MQTT clients."""
    (found,) = [text for _, title, text in blocks(language, [MQTT_CLIENTS]) if title.startswith(f"{name}.")]
    return found


def test_every_program_of_the_page_for_mqtt_clients_is_there_in_both_languages() -> None:
    names = [[title for _, title, _ in blocks(language, [MQTT_CLIENTS])] for language in LANGUAGES]
    assert names[0] == ["publish.py", "request.py", "consume.py", "will.py"]
    assert names[1] == [name.replace(".py", ".js") for name in names[0]]


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_programs_for_mqtt_clients_publish_ask_and_consume(readings: Gateway, language: str) -> None:
    with StreamManagerClient(readings.urls["mqtt"]) as client:
        client.purge_message_stream("readings")
        first = client.describe_message_stream("readings").storage_status.newest_sequence_number + 1
        for _ in range(2):  # the second time the stream knows the message ids
            printed = run(language, program(language, "publish"), readings)
            assert sorted(printed.splitlines()) == ["21.5: stored", "21.6: stored", "21.7: stored"]
        stored = client.read_messages("readings", ReadMessagesOptions(first, 3, 10))
        assert [message.payload for message in stored] == [b"21.5", b"21.6", b"21.7"]
        asked = run(language, program(language, "request"), readings).splitlines()
        assert "readings" in asked[0]
        assert [line.split()[0] for line in asked[1:]] == [str(first + n) for n in range(3)]
        consume = program(language, "consume").replace("5000", "200")
        consumed = run(language, consume, readings).splitlines()
        assert [line.split()[0].startswith("readings/press-") for line in consumed] == [True] * 3
        assert run(language, consume, readings) == ""  # all are acknowledged


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_that_meets_a_full_stream_keeps_its_messages_until_there_is_room(
    tmp_path: Path, config: str, language: str
) -> None:
    limited = config.replace('max_size = "256MiB"', 'limits = { max_messages = 2, discard = "new" }')
    assert limited != config
    with Gateway(tmp_path, limited) as gateway, StreamManagerClient(gateway.urls["mqtt"]) as client:
        device = start(language, program(language, "publish"), gateway)
        assert device.stdout is not None
        lines = [device.stdout.readline() for _ in range(3)]
        (full,) = [line for line in lines if line.endswith("; trying again\n")]
        assert "stored" not in full
        assert client.purge_message_stream("readings") == 2
        assert finish(device).splitlines()[-1].endswith(": stored")
        (message,) = client.read_messages("readings", ReadMessagesOptions(2))
        assert message.payload == full.partition(":")[0].encode()


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_will_of_a_killed_device_is_in_the_stream(readings: Gateway, language: str) -> None:
    with StreamManagerClient(readings.urls["mqtt"]) as client:
        start_at = client.describe_message_stream("readings").storage_status.newest_sequence_number + 1
        following = client.tail("readings", start_at, topic="readings/+/state", timeout=30)
        device = start(language, program(language, "will"), readings)
        assert device.stdout is not None
        assert device.stdout.readline() == "online\n"
        assert next(following).payload == b"online"
        device.kill()
        assert next(following).payload == b"offline"
        device.communicate()


def test_the_programs_of_the_python_clients_page_run_one_after_another(gateway: Gateway) -> None:
    programs = {title: text for _, title, text in blocks("python", [PYTHON_CLIENT])}
    assert list(programs) == ["append", "asyncio", "tail", "ids"]
    assert python(programs["append"], gateway) == "stored as number 0\n0 b'21.5'\n"
    assert sorted(line.split()[1] for line in python(programs["asyncio"], gateway).splitlines()) == [
        f"b'{value}'" for value in range(10)
    ]
    assert python(programs["tail"], gateway).count("streams/readings") == 11
    assert python(programs["ids"], gateway) == ""
    assert python(programs["ids"], gateway) == ""  # the same id
    assert python(programs["tail"], gateway).count("b'21.5'") == 2
