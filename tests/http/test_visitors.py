"""Sessions of browsers without a browser: what ends them, by a clock that the test sets."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from bridge.access.logins import Access
from bridge.http.visitors import IDLE, LIFE, MOST, PROOF_FIELD, Visitors
from bridge.mqtt.settings import MqttConfig
from bridge.net.httpserver import JSON, HttpError, HttpRequest
from tests.mqtt.test_login_changes import line


class House:
    """Visitors, a clock that stands still, and requests."""

    def __init__(self, root: Path) -> None:
        self.path, self.time = root / "users", 1000.0
        self.path.write_text(line("ann", "ann") + line("eve", "eve"))
        self.path.chmod(0o600)
        self.config = MqttConfig(users_file=self.path)
        self.access = Access(self.config)
        self.visitors = Visitors(self.access, "plant-7", lambda: self.time)

    def reload(self, text: str) -> None:
        self.path.write_text(text)
        self.access.load(self.config)

    def request(
        self, method: str = "GET", path: str = "/", body: object = None, **headers: str
    ) -> HttpRequest:
        async def content() -> bytes:
            return json.dumps(body).encode()

        fields = {name.lower().replace("_", "-"): value for name, value in headers.items()}
        return HttpRequest(method, path, "", fields, "192.0.2.7", content, lambda answer: answer)

    async def log_in(self, user: str = "ann", password: str | None = None) -> dict[str, str]:
        """The headers of a new session."""
        body = {"user": user, "password": password or user}
        answer = await self.visitors.acting()["/login"](self.request("POST", body=body, content_type=JSON))
        cookie = answer.fields["Set-Cookie"].partition(";")[0]
        return {"cookie": cookie, PROOF_FIELD: json.loads(answer.body)["token"]}

    async def looks(self, session: dict[str, str]) -> None:
        await self.visitors.ensure_may_look(self.request(**session))

    async def reads(self, session: dict[str, str]) -> None:
        assert (await self.visitors.reader(self.request(**session))).user

    async def acts(self, session: dict[str, str]) -> None:
        assert (await self.visitors.actor(self.request("POST", **session))).user

    async def shown(self, session: dict[str, str]) -> None:
        found = json.loads((await self.visitors.looking()["/session.json"](self.request(**session))).body)
        if found["user"] is None:
            raise HttpError(HTTPStatus.UNAUTHORIZED)

    async def leaves(self, session: dict[str, str]) -> None:
        await self.visitors.acting()["/logout"](self.request("POST", **session))


WAYS = ["looks", "reads", "acts", "shown"]


async def admits(used: Awaitable[object]) -> bool:
    """Whether a request is answered."""
    try:
        await used
    except HttpError as error:
        return error.status is not HTTPStatus.UNAUTHORIZED
    return True


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.access.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_session_lasts_while_it_is_used_and_no_longer_than_its_life(house: House, way: str) -> None:
    async def test() -> None:
        use: Any = getattr(house, way)
        session, began = await house.log_in(), house.time
        while house.time + IDLE < began + LIFE:
            house.time += IDLE  # to the second
            assert await admits(use(session)), house.time - began
        house.time = began + LIFE
        assert await admits(use(session))
        house.time += 1
        assert not await admits(use(session)), "however often it is used"
        house.time = began
        assert not await admits(use(session)), "it is gone for good"
        idle = await house.log_in()
        house.time += IDLE + 1
        assert not await admits(use(idle))
        used = await house.log_in()
        house.time += IDLE
        assert await admits(use(used)), "the life of an earlier session is not its own"

    asyncio.run(test())


@pytest.mark.parametrize("way", [*WAYS, "leaves"])
def test_a_session_ends_with_a_new_password_an_old_hash_and_its_user(house: House, way: str) -> None:
    async def test() -> None:
        use: Any = getattr(house, way)
        eve = line("eve", "eve")
        for text in (eve + line("ann", "other"), eve + line("ann", "ann", b"new"), eve):
            house.reload(line("ann", "ann") + eve)
            ann, other = await house.log_in(), await house.log_in("eve")
            house.reload(line("ann", "ann") + eve)
            assert await admits(house.looks(ann)), "nothing has changed"
            house.reload(text)
            assert not await admits(use(ann))
            assert await admits(use(other))

    asyncio.run(test())


def test_no_password_lets_in_that_was_replaced_while_it_was_checked(house: House) -> None:
    async def test() -> None:
        program = house.acts({"authorization": f"Basic {base64.b64encode(b'ann:ann').decode()}"})
        both = [asyncio.ensure_future(admits(one)) for one in (house.log_in(), program)]
        await asyncio.sleep(0)
        assert not any(one.done() for one in both)
        house.reload(line("ann", "new"))
        assert await asyncio.gather(*both) == [False, False]

    asyncio.run(test())


def test_who_logs_in_again_and_again_logs_out_nobody_else(house: House) -> None:
    async def test() -> None:
        ann = await house.log_in()
        eve = [await house.log_in("eve") for _ in range(MOST)]
        found = [await admits(house.shown(one)) for one in (ann, *eve[:3], eve[-1])]
        assert found == [True, False, True, True, True]
        await house.log_in()
        assert [await admits(house.shown(one)) for one in (ann, eve[3], eve[4])] == [True, False, True]

    asyncio.run(test())
