"""The site broker of `streambridge demo --bridge`: amqtt, an MQTT 3.1.1 broker in Python, as a process.

It plays the part of a site's existing broker. amqtt comes with the extra `[amqtt]`; only this module uses it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import select
import signal
import subprocess
import sys
from typing import IO, TYPE_CHECKING

from bridge.errors import StreamBridgeError
from bridge.extras import how_to_install

if TYPE_CHECKING:
    from types import TracebackType

LISTENER = "default"
PROGRAM = f"from {__name__} import main; main()"
TIMEOUT = 10.0  # seconds


class SiteBroker:
    """The broker as a process; it listens on `port` of the loopback interface."""

    def __init__(self) -> None:
        """Start it. Raises StreamBridgeError if amqtt is not installed or the broker does not start."""
        if importlib.util.find_spec("amqtt") is None:
            raise StreamBridgeError(
                "the site broker of `demo --bridge` is amqtt, which is not installed; "
                f"install it with: {how_to_install('amqtt')}"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._stdout: IO[bytes] = self._process.stdout  # type: ignore[assignment]
        first = self._stdout.readline()
        if not first:
            _, errors = self._process.communicate()
            why = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise StreamBridgeError(f"the site broker did not start: {why}")
        self.port = int(first)

    def wait_for_end(self) -> None:
        """Wait until the broker has noticed the end of a client's connection."""
        if select.select([self._stdout], [], [], TIMEOUT)[0]:
            self._stdout.readline()

    def __enter__(self) -> SiteBroker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    """Serve until SIGTERM. Prints the port when it listens, then a line when each connection ends."""
    logging.basicConfig(level=logging.CRITICAL)  # amqtt logs each client that connects or disconnects
    asyncio.run(_serve())


async def _serve() -> None:
    from amqtt.adapters import StreamReaderAdapter, StreamWriterAdapter
    from amqtt.broker import Broker
    from amqtt.contexts import BrokerConfig, ListenerConfig, ListenerType

    broker = Broker(
        BrokerConfig(
            listeners={LISTENER: ListenerConfig(type=ListenerType.EXTERNAL)},
            # Clients need a user name: amqtt queues no messages for the sessions of anonymous clients.
            plugins={"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": False}},
        )
    )
    await broker.start()

    def report(what: object) -> None:
        sys.stdout.write(f"{what}\n")
        sys.stdout.flush()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await broker.external_connected(StreamReaderAdapter(reader), StreamWriterAdapter(writer), LISTENER)
        report("ended")

    # amqtt cannot report a port that the kernel has chosen, so we open the socket.
    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    report(server.sockets[0].getsockname()[1])
    await stopped.wait()
    server.close()
    await broker.shutdown()
