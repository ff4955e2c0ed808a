"""The gateway in this process, with all front ends, on the loop of a scheduler."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from bridge.access.logins import Access
from bridge.access.rules import AccessRule
from bridge.encryption import Keys
from bridge.firehose.frontend import FirehoseFrontEnd
from bridge.firehose.settings import FirehoseConfig
from bridge.greengrass.frontend import GreengrassFrontEnd
from bridge.greengrass.settings import GreengrassConfig
from bridge.http.frontend import HttpFrontEnd
from bridge.http.observer import Observer
from bridge.http.settings import HttpConfig
from bridge.model import MessageStreamDefinition, StrategyOnFull
from bridge.mqtt import MqttFrontEnd
from bridge.mqtt.settings import MqttConfig
from bridge.operations.catalog import Operations
from bridge.operations.manager import StreamManager
from bridge.plugin import discovery
from bridge.streams.store import StreamStore
from tests.mqtt.harness import Bridge, NoExports, NoWorker, until

from .scheduler import Scheduler, Watched, run

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
ALL = {"publish": ["#"], "subscribe": ["#"], "manage": ["#"]}


def hashed(user: str, password: bytes) -> str:
    """A line of a users file. Its hash has one iteration, so it costs no time."""
    digest = hashlib.pbkdf2_hmac("sha512", password, b"salt" * 4, 1)
    return f"{user}:$7$1${base64.b64encode(b'salt' * 4).decode()}${base64.b64encode(digest).decode()}\n"


def rule(user: str, **rights: Any) -> AccessRule:
    """A rule of a user; without rights, one that allows everything."""
    return AccessRule(user=user, **(rights or ALL))


class House(Bridge):
    """A gateway with one stream "s", bound to "in/#", and the users ann, bob and plant."""

    def __init__(self, root: Path, scheduler: Scheduler, **settings: Any) -> None:
        self.users = root / "users"
        self.set_users()
        self.keys = root / "keys"
        self.set_keys(f"{KEY} {SECRET} plant")
        rules = settings.pop("acl", [rule("ann"), rule("bob"), rule("plant")])
        settings = {"listen": ["tcp://127.0.0.1:0"], "users_file": self.users, "acl": rules} | settings
        files, auth = settings.pop("files", None), settings.pop("auth", None)
        super().__init__(root, MqttConfig(**settings), auth=auth)
        self.files = files or self.files
        self.scheduler = scheduler

    async def start(self) -> None:
        key = self.root / "key"
        self.store = StreamStore(
            self.root / "data",
            self.root / "memory",
            on_event=lambda stream, what: None,
            files=self.files,
            system=self.system,
            runtime=Watched(self.scheduler, 2, "store"),
            keys=Keys(self.root / "data", key) if key.exists() else None,
        )
        self.manager = StreamManager(self.store, self.registry or discovery.load([]), NoExports())
        self.operations = Operations(self.manager, self.allow)
        self.access = Access(self.config)
        self.front = MqttFrontEnd(
            self.config, self.operations, self.access, Watched(self.scheduler, 2, "mqtt"), auth=self.auth
        )
        self.firehose = FirehoseFrontEnd(
            FirehoseConfig(listen="127.0.0.1:0", access_keys_file=self.keys), self.operations, self.access
        )
        observer = Observer(
            self.gateway,
            self.root / "data",
            self.manager,
            NoWorker(),
            {"mqtt": self.front},
            1000,  # type: ignore[arg-type]
        )
        self.page = HttpFrontEnd(
            HttpConfig(listen="127.0.0.1:0"), observer, self.operations, self.access, self.gateway
        )
        self.tokens = self.root / "tokens"
        self.greengrass = GreengrassFrontEnd(
            GreengrassConfig(listen="127.0.0.1:0", tokens_file=self.tokens if self.tokens.exists() else None),
            self.operations,
            self.access,
        )
        self.urls = await self.front.start()
        self.urls += [*await self.firehose.start(), *await self.page.start(), *await self.greengrass.start()]
        if self.auth is not None:
            await self.auth.start()
        if "s" not in self.store.streams:
            self.stream("s", "in/#")

    async def stop(self) -> None:
        await self.greengrass.stop()
        await self.firehose.stop()
        await super().stop()
        await self.page.stop()
        self.access.close()

    # -- changes ------------------------------------------------------------

    def set_users(self, **changed: bytes | None) -> None:
        """Write the users file, with other passwords, or without the users whose password is None."""
        known: dict[str, bytes | None] = {"ann": b"a", "bob": b"b", "plant": b"p"}
        lines = [hashed(user, word) for user, word in (known | changed).items() if word is not None]
        self.users.write_text("".join(lines))
        self.users.chmod(0o600)

    def set_keys(self, *lines: str) -> None:
        """Write the file of access keys."""
        self.keys.write_text("".join(f"{line}\n" for line in lines))
        self.keys.chmod(0o600)

    def reload(self, **settings: Any) -> None:
        """Reload as the service does, with other settings of [mqtt]."""
        self.config = msgspec.structs.replace(self.config, **settings)
        self.front.reload(self.config)
        self.greengrass.reload()
        self.firehose.reload()

    # -- clients ------------------------------------------------------------

    async def http(
        self, path: str, body: dict[str, Any], user: str = "ann:a", *, slow: str = ""
    ) -> tuple[int, dict[str, Any]]:
        """POST JSON to the status page's listener; returns the status and the answer (`slow`: see `post`)."""
        basic = base64.b64encode(user.encode()).decode()
        extra = [f"Authorization: Basic {basic}", "Content-Type: application/json"]
        return await self.post(2, path, json.dumps(body).encode(), extra, slow)

    async def put(self, data: bytes, name: str = "d", *, slow: str = "") -> tuple[int, dict[str, Any]]:
        """PutRecord by the API of Firehose."""
        body = json.dumps(
            {"DeliveryStreamName": name, "Record": {"Data": base64.b64encode(data).decode()}}
        ).encode()
        url = self.urls[1]
        headers = {
            "X-Amz-Target": "Firehose_20150804.PutRecord",
            "Content-Type": "application/x-amz-json-1.1",
        }
        request = AWSRequest("POST", url, headers, body)
        request.context["timestamp"] = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        SigV4Auth(Credentials(KEY, SECRET), "firehose", "eu-central-1").add_auth(request)
        extra = [f"{name}: {value}" for name, value in request.headers.items()]
        return await self.post(1, "/", body, extra, slow)

    async def post(
        self, number: int, path: str, body: bytes, headers: Sequence[str], slow: str
    ) -> tuple[int, dict[str, Any]]:
        """One request on a connection of its own. Its body follows once it waits at `slow`."""
        seen = self.scheduler.seen[slow]
        address = self.urls[number].split("//")[1].rstrip("/")
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [f"POST {path} HTTP/1.1", f"Host: {address}", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        if slow:
            await until(lambda: self.scheduler.seen[slow] > seen, what=f"a request waits at {slow}")
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return int(head.split()[1]), json.loads(answer) if answer.startswith(b"{") else {}

    def delivery(self, name: str = "d") -> None:
        """A delivery stream."""
        export = {"identifier": "x", "deliveryStreamName": "there"}
        self.manager.create(
            MessageStreamDefinition(
                name=name,
                strategy_on_full=StrategyOnFull.RejectNewData,
                export_definition={"firehose": [export]},
            )
        )


def waits_test(test: Callable[[House, Scheduler], Awaitable[None]], root: Path, **settings: Any) -> Scheduler:
    """Run a case in a house of its own; every change must have been made, and no task be left."""
    scheduler = Scheduler()

    async def main() -> None:
        house = House(root, scheduler, **settings)
        async with asyncio.timeout(60):
            await house.start()
            try:
                await test(house, scheduler)
            finally:
                await house.stop()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"
        scheduler.check()

    run(scheduler, main())
    return scheduler
