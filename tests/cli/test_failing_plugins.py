"""A plugin that raises what no plugin should raise is reported; the gateway and everybody else go on."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.client import (
    ExportDefinition,
    InvalidRequestException,
    MessageStreamDefinition,
    StrategyOnFull,
    StreamManagerClient,
)
from tests.cli.conftest import streambridge
from tests.export.harness import drop_in
from tests.http.conftest import Service, eventually

PLUGIN = """
    import sys
    from bridge import *

    class Config(BatchedConfig, kw_only=True, frozen=True):
        address: str

        def __post_init__(self):
            {post_init}

    class Bad(Exporter):
        kind = "bad"
        Config = Config

        @classmethod
        def check(cls, config):
            {check}

        def export(self, batch):
            return ACCEPTED

    @hookimpl
    def register_exporters(register):
        register(Bad)
"""
FAILURES = {
    "KeyError": {"post_init": "{}['x']", "check": "pass"},
    "SystemExit": {"post_init": "sys.exit(3)", "check": "pass"},
    "IndexError": {"post_init": "pass", "check": "config.address.split(':')[1]"},
}
PLUGINS = '[export]\nplugin_dirs = ["plugins"]\n'
EXPORT = '[[streams.s.export.bad]]\nidentifier = "x"\naddress = "host"\n'
AUTH = """
    from bridge import AuthOptions, hookimpl

    class Options(AuthOptions, frozen=True, kw_only=True):
        file: str

        def mistakes(self):
            return [open(self.file).read().split()[1]][:0]

    @hookimpl
    def authenticate(login, options):
        return None
"""


@pytest.fixture
def services() -> Iterator[list[Service]]:
    """Services that end with the test."""
    started: list[Service] = []
    yield started
    for service in started:
        service.process.kill()
        service.process.wait()


@pytest.mark.parametrize("name", FAILURES)
def test_a_gateway_starts_and_answers_though_a_plugin_fails_on_its_options(
    tmp_path: Path, services: list[Service], name: str
) -> None:
    drop_in(tmp_path, "bad", PLUGIN.format(**FAILURES[name]))
    service = Service(
        tmp_path, f'{PLUGINS}[streams.s]\ntopics = ["s/#"]\n{EXPORT}[streams.t]\ntopics = ["t/#"]\n'
    )
    services.append(service)
    assert service.logged(rf"a defect of the plugin: {name}.*bad.py, line \d+")
    export = ExportDefinition(more={"bad": [{"identifier": "x", "address": "host"}]})
    definition = MessageStreamDefinition(
        "t", strategy_on_full=StrategyOnFull.RejectNewData, topics=["t/#"], export_definition=export
    )
    with StreamManagerClient("127.0.0.1", service.mqtt_port) as client:
        with pytest.raises(InvalidRequestException, match=f"a defect of the plugin: {name}"):
            client.update_message_stream(definition)
        assert client.append_message("t", b"stored") == 0
    check = streambridge("check", "-c", tmp_path / "bridge.toml")
    assert f"streams.s.export.bad[0]: a defect of the plugin: {name}" in check.stdout


def test_systemd_hears_that_a_reload_has_ended_though_a_plugin_fails(
    tmp_path: Path, services: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    drop_in(tmp_path, "bad", PLUGIN.format(**FAILURES["IndexError"]))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        service = Service(tmp_path, f'{PLUGINS}[streams.s]\ntopics = ["s/#"]\n')
        services.append(service)
        config = tmp_path / "bridge.toml"
        config.write_text(config.read_text() + EXPORT)
        service.process.send_signal(signal.SIGHUP)
        seen = [b""]
        while not seen[-1].startswith(b"RELOADING=1"):
            seen.append(systemd.recv(4096))
        while not seen[-1].startswith(b"READY=1"):
            seen.append(systemd.recv(4096))
    assert service.logged("a defect of the plugin: IndexError")


def test_a_login_plugin_that_fails_on_a_changed_file_is_reported_and_the_service_runs(
    tmp_path: Path, services: list[Service]
) -> None:
    drop_in(tmp_path, "logins", AUTH)
    keys = tmp_path / "keys"
    keys.write_text("a b")
    service = Service(tmp_path, f'{PLUGINS}[auth.plugins.logins]\nfile = "{keys}"\n')
    services.append(service)
    keys.write_text("")
    service.process.send_signal(signal.SIGHUP)
    eventually(lambda: service.logged("auth.plugins.logins: a defect of the plugin: IndexError"))
    check = streambridge("check", "-c", tmp_path / "bridge.toml")
    assert "auth.plugins.logins: a defect of the plugin: IndexError" in check.stdout
    assert service.stop() == 0


WATCHED = """
    from bridge import AuthOptions, hookimpl

    class Stop(BaseException):
        pass

    class Options(AuthOptions, frozen=True, kw_only=True):
        file: str

        def files(self):
            return [self.file]

        def mistakes(self):
            if not open(self.file).read():
                raise Stop
            return []

    @hookimpl
    def authenticate(login, options):
        return None
"""


def test_a_service_that_an_internal_error_ends_says_so_in_its_exit_code(
    tmp_path: Path, services: list[Service]
) -> None:
    """A plugin provokes the error: it raises what nothing may catch."""
    drop_in(tmp_path, "logins", WATCHED)
    keys = tmp_path / "keys"
    keys.write_text("a")
    service = Service(tmp_path, f'{PLUGINS}[auth.plugins.logins]\nfile = "{keys}"\n')
    services.append(service)
    keys.write_text("")
    assert service.process.wait(timeout=60) == 1
    assert "internal error, stopping: Stop" in service.log.read_text()


def test_a_login_plugin_that_cannot_name_its_files_keeps_nobody_out(
    tmp_path: Path, services: list[Service]
) -> None:
    drop_in(tmp_path, "logins", WATCHED.replace("[self.file]", "{}[self.file]"))
    keys = tmp_path / "keys"
    keys.write_text("a")
    service = Service(tmp_path, f'{PLUGINS}[auth.plugins.logins]\nfile = "{keys}"\n')
    services.append(service)
    assert service.logged("changes of its files are not noticed: a defect of the plugin: KeyError")
    assert service.stop() == 0
