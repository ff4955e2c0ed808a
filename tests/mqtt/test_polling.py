"""Whether the event loop looks again before it sleeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from bridge.mqtt.server.polling import Polling


class Loop:
    """An event loop, as far as `Polling` uses it: what is called in the next turn."""

    def __init__(self) -> None:
        self.polling = Polling(self.soon)
        self.next: list[Callable[[], None]] = []

    def soon(self, do: Callable[[], None]) -> Loop:
        self.next.append(do)
        return self

    def cancel(self) -> None:
        raise AssertionError("nothing is cancelled")

    def turn(self) -> None:
        calls, self.next = self.next, []
        for call in calls:
            call()

    def sleeps_after(self) -> int:
        """How many turns it takes until it sleeps, if nothing arrives."""
        for turns in range(1_000):
            if not self.next:
                return turns
            self.turn()
        raise AssertionError("it does not sleep")


def test_the_loop_looks_again_while_one_client_waits_for_each_answer() -> None:
    loop = Loop()
    loop.polling.answered(1)
    assert not loop.next  # it may have been the only message
    for _ in range(1_000):
        loop.polling.answered(1)
        assert len(loop.next) == 1
        loop.turn()
    assert 1 < loop.sleeps_after() < 200


def test_it_sleeps_at_once_while_several_clients_publish() -> None:
    loop = Loop()
    for client in [1, 2] * 50 + [0] * 50:
        loop.polling.answered(client)
        assert not loop.next


def test_a_second_client_ends_it() -> None:
    loop = Loop()
    for client in (1, 1, 2):
        loop.polling.answered(client)
    assert loop.sleeps_after() == 1


def test_what_finds_nothing_is_tried_ever_less_often_until_it_finds_something() -> None:
    loop, tries = Loop(), []
    for message in range(1_000):
        loop.polling.answered(1)
        if loop.sleeps_after():
            tries.append(message)
    left_out = [after - before - 1 for before, after in pairwise(tries)]
    assert left_out[:8] == [1, 3, 7, 15, 31, 63, 63, 63]
    while not loop.next:
        loop.polling.answered(1)
    loop.turn()
    loop.polling.answered(1)  # it finds something
    loop.sleeps_after()
    loop.polling.answered(1)
    loop.polling.answered(1)
    assert loop.next
