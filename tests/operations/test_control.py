"""The control socket, by which the command line asks the running service."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cbor2
import pytest

from bridge.control import SOCKET
from bridge.control.client import Control
from bridge.control.server import ControlFrontEnd
from bridge.errors import ConfigError, StreamBridgeError
from tests.greengrass.harness import DEADLINE, Server


class Service(Server):
    """A bridge with the control socket alone."""

    def front_end(self) -> ControlFrontEnd:
        return ControlFrontEnd(self.operations, self.data_dir)


@contextmanager
def asking(server: Server) -> Iterator[Control]:
    control = Control.connect(server.data_dir)
    assert control is not None
    with control:
        yield control


def test_the_control_socket_is_for_this_user_alone(tmp_path: Path) -> None:
    with Service(tmp_path) as server, asking(server) as control:
        assert stat.S_IMODE((server.data_dir / SOCKET).stat().st_mode) == 0o600
        server.stream()
        for _ in range(2):
            reply = cbor2.loads(control.ask("listStreams", cbor2.dumps({"requestId": "1"})))
            assert reply == {"requestId": "1", "status": 0, "statusName": "Success", "streams": ["s"]}
        assert b"no operation" in control.ask("noSuchThing", b"{}")
        http = {"identifier": "h", "uri": "https://office.example/", "bearerTokenFile": "/etc/hostname"}
        wanted = {"name": "x", "strategyOnFull": 0, "exportDefinition": {"http": [http]}}
        made = cbor2.loads(control.ask("createMessageStream", cbor2.dumps({"definition": wanted})))
        assert made["status"] == 0, "the command line may define anything"


def test_nonsense_on_the_control_socket_ends_its_connection_alone(tmp_path: Path) -> None:
    with Service(tmp_path) as server, asking(server) as control:
        server.stream()
        for nonsense in (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\2\1\xff", b"\0\0"):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(DEADLINE)
                peer.connect(str(server.data_dir / SOCKET))
                peer.sendall(nonsense)
                peer.shutdown(socket.SHUT_WR)
                assert peer.recv(10) == b""
        assert cbor2.loads(control.ask("listStreams", cbor2.dumps({})))["streams"] == ["s"]


def test_a_service_that_stops_before_it_replies_is_reported_as_an_unknown_result(tmp_path: Path) -> None:
    with Service(tmp_path) as server, asking(server) as control:
        server.run(server.front.stop())
        with pytest.raises(StreamBridgeError, match="check whether the operation was carried out"):
            control.ask("listStreams", b"{}")
        assert Control.connect(server.data_dir) is None


def test_a_data_directory_may_have_a_long_path_and_the_socket_of_a_dead_run(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    for _ in range(2):
        with Service(deep) as server:
            os.link(server.data_dir / SOCKET, tmp_path / "kept")
            assert server.urls[0].startswith("unix://")
            with asking(server) as control:
                assert b"Success" in control.ask("listStreams", b"{}")
        (tmp_path / "kept").rename(server.data_dir / SOCKET)
    (server.data_dir / SOCKET).unlink()
    (server.data_dir / SOCKET).write_text("not a socket")
    with pytest.raises(ConfigError, match="is not a socket; move it away"), Service(deep):
        pass


@pytest.mark.parametrize("left", ["empty file", "empty directory"])
def test_what_a_power_cut_makes_of_the_sockets_name_refuses_no_start(tmp_path: Path, left: str) -> None:
    path = tmp_path / "data" / SOCKET
    path.parent.mkdir()
    path.touch() if left == "empty file" else path.mkdir()
    with Service(tmp_path):
        assert path.is_socket()


@pytest.mark.parametrize("kept", ["directory", "link"])
def test_possible_data_under_the_name_of_the_socket_is_kept(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "data" / SOCKET
    path.parent.mkdir()
    if kept == "directory":
        path.mkdir()
        (path / "mine").touch()
    else:
        (tmp_path / "empty").touch()
        path.symlink_to(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not a socket; move it away"), Service(tmp_path):
        pass
