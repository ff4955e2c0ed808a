"""The contract of plugins that decide logins and rights, as tests to inherit.

    class TestDirectory(AuthContract):
        plugin = "directory"

        def options(self): return {"url": the_test_directory()}
        def good(self): return [login("ann", b"right")]
        def bad(self): return [login("ann", b"wrong")]

pytest finds the inherited tests; nothing here needs pytest itself. The suite calls the hooks as the auth
process does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from bridge.plugin.auth import Accepted, AuthOptions, Denied, Login, Question
from bridge.plugin.discovery import Registry, load


def login(
    user: str | None, password: bytes | None, client_id: str = "client", address: str = "192.0.2.1"
) -> Login:
    """Make the argument of `authenticate`."""
    return Login(client_id=client_id, user=user, password=password, address=address)


def publishing(user: str | None, topic: str, client_id: str = "client") -> Question:
    """Make the argument of `authorize` for a message."""
    return Question(client_id=client_id, user=user, address="192.0.2.1", action="publish", topic=topic)


@cache
def _loaded(directories: tuple[str | Path, ...]) -> Registry:
    return load(directories)


class AuthContract:
    """The contract of a plugin with the hooks `authenticate` or `authorize`. Override the first part."""

    plugin: ClassVar[str]  # the plugin's name
    directories: ClassVar[
        Sequence[str | Path]
    ] = ()  # plugin directories, if it is in none of the usual places
    seconds: ClassVar[float] = 2.0  # the longest time for an answer, as in [auth] timeout

    def options(self) -> Mapping[str, Any]:
        """Return the options, as in `[auth.plugins.NAME]`."""
        return {}

    def good(self) -> Sequence[Login]:
        """Return logins that the plugin accepts."""
        return []

    def bad(self) -> Sequence[Login]:
        """Return logins that the plugin refuses."""
        return []

    def foreign(self) -> Sequence[Login]:
        """Return logins that the plugin leaves to other plugins."""
        return []

    def allowed(self) -> Sequence[Question]:
        """Return questions that the plugin answers with True or leaves to other plugins."""
        return []

    def forbidden(self) -> Sequence[Question]:
        """Return questions that the plugin answers with False."""
        return []

    # --- the contract

    def test_the_options_are_read_and_unknown_keys_are_errors(self) -> None:
        """A mistake in a configuration is found when it is read."""
        self._options()
        try:
            self._options({"no_such_key": 1})
        except (msgspec.ValidationError, TypeError):
            return
        raise AssertionError("an unknown key was accepted; use forbid_unknown_fields=True")

    def test_logins_are_accepted_refused_and_left_to_others(self) -> None:
        """Each answer has a user or a reason, and comes in time."""
        for asked in self.good():
            said = self._ask("authenticate", login=asked)
            assert isinstance(said, Accepted), f"{asked} was not accepted: {said}"
            assert isinstance(said.user, str), f"{asked}: no user: {said}"
            assert said.user, f"{asked}: an empty user"
            assert said.expires is None or said.expires > time.time(), f"{asked}: it has expired: {said}"
            assert said.basis in self._options().bases(), f"{asked}: `bases` would end it at once: {said}"
        for asked in self.bad():
            said = self._ask("authenticate", login=asked)
            assert isinstance(said, Denied), f"{asked} was not refused: {said}"
            assert said.why, f"{asked}: no reason"
        for asked in self.foreign():
            said = self._ask("authenticate", login=asked)
            assert said is None, f"{asked} was not left to other plugins: {said}"

    def test_questions_are_answered(self) -> None:
        """Each answer comes in time, and is the same when the question is repeated."""
        for question in self.allowed():
            assert self._ask("authorize", question=question) is not False, question
        for question in self.forbidden():
            assert self._ask("authorize", question=question) is False, question

    def test_whatever_a_client_sends_gets_an_answer(self) -> None:
        """An exception would refuse the client too, but would tell the operator nothing."""
        for user in (None, "", "\x00", "a" * 65_535, "ann\n", "\u202e"):
            for password in (None, b"", b"\xff" * 65_535, b"..", b"\x00.\x00.\x00"):
                self._ask("authenticate", login=login(user, password))
            self._ask("authorize", question=publishing(user, "a/" * 30_000))

    def test_threads_may_ask_at_the_same_time(self) -> None:
        """As the auth process does."""
        logins = [*self.good(), *self.bad(), *self.foreign()] * 4
        one_by_one = [type(self._ask("authenticate", login=asked)) for asked in logins]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda asked: type(self._ask("authenticate", login=asked)), logins))
        assert together == one_by_one

    def _registry(self) -> Registry:
        registry = _loaded(tuple(self.directories))
        assert self.plugin in registry.auth_options, f"{self.plugin} has no hook: {registry.found}"
        return registry

    def _options(self, more: Mapping[str, Any] = {}) -> AuthOptions:
        kind = self._registry().auth_options[self.plugin]
        values = {**self.options(), **more}
        return msgspec.convert(values, kind, dec_hook=lambda kind, value: kind(value))

    def _ask(self, hook: str, **values: Any) -> Any:
        values["options"] = self._options()
        found = getattr(self._registry().hook, hook).get_hookimpls()
        for one in found:
            if one.plugin_name == self.plugin:
                began = time.monotonic()
                said = one.function(*(values[name] for name in one.argnames))
                took = time.monotonic() - began
                assert took < self.seconds, (
                    f"{hook} took {took:.1f} s; clients are refused after [auth] timeout"
                )
                return said
        return None
