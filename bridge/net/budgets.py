"""Budgets: what all connections of a user, of an address, or of a network may use together.

A budget has a `Meter` for each connected user, address or network, which its connections share. A read from a
socket pays for its bytes at once, and for its messages and requests (SUBSCRIBE, UNSUBSCRIBE, PINGREQ) as they
are handled. Acknowledgements cost nothing but their bytes: how many there are, others decide. Each payment
moves the time up to which the meter is paid. If that is more than `BURST` seconds ahead of now, the
connection is not read, and what was read is not handled, until then. TCP makes the client wait, and nothing
is lost.

    within --ahead by more than BURST--> over --less than half of that at a payment--> within
                                          |
                                          +-- for `disconnect_after`: the connection that used most is closed

A closed connection takes along what the meter owes beyond the burst: the others need not wait for it.

Connections and subscriptions are counted; any above the limit are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

from msgspec import Meta, Struct

from bridge.net.addresses import network_of
from bridge.settingtypes import Bytes, Count, Millis

BURST = 1.0  # seconds by which a client may be ahead
PAUSE = BURST / 10  # of it is free again when a client is read on: otherwise it would stop each time
REMEMBERED = 1_000  # how many reported meters are remembered; beyond that, all are forgotten
T = TypeVar("T")


class Refusal(NamedTuple):
    """Why a connection or a subscription is refused, and under what that is counted."""

    counter: str
    why: str


class Budget(Struct, frozen=True, kw_only=True):
    """[[mqtt.budget]]: what the clients of one user, one address, or one network may use together.

    `per` says whose clients share it. "user": clients without a user name have none. "address": an IPv6 /64
    is one address. "prefix": the network of `ipv4_prefix` or `ipv6_prefix` bits. Who sends more per second is
    read more slowly, and, after `disconnect_after` of that, disconnected; 0 is never. What is left out has no
    limit.
    """

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9-]{1,32}$")]
    per: Literal["user", "address", "prefix"]
    ipv4_prefix: Annotated[int, Meta(ge=1, le=32)] = 24
    ipv6_prefix: Annotated[int, Meta(ge=1, le=128)] = 56
    connections: Count | None = None
    messages_per_second: Count | None = None
    bytes_per_second: Annotated[Bytes, Meta(ge=1)] | None = None
    subscriptions: Count | None = None
    disconnect_after: Annotated[Millis, Meta(ge=0)] = 30_000

    def __post_init__(self) -> None:
        limits = (self.connections, self.messages_per_second, self.bytes_per_second, self.subscriptions)
        if limits == (None,) * len(limits):
            raise ValueError(
                "it limits nothing; set connections, messages_per_second, bytes_per_second or subscriptions"
            )

    @property
    def counter(self) -> str:
        """What counts the refusals and disconnections by this budget."""
        return f"refused_budget_{self.name}"

    def key_of(self, user: str | None, address: str) -> str | None:
        """Return the key of the clients that share a meter; None for a client without one."""
        if self.per == "user":
            return user
        if self.per == "address":
            return network_of(address)
        return network_of(address, self.ipv4_prefix, self.ipv6_prefix)


class Meter(Generic[T]):
    """What the clients that share a budget use. `over` is since when they are slowed; None: they are not."""

    __slots__ = (
        "_bytes", "_messages", "_per_byte", "_per_message", "_spent", "budget", "bytes_went_over",
        "connections", "key", "over", "subscriptions",
    )  # fmt: skip

    def __init__(self, budget: Budget, key: str) -> None:
        self.budget, self.key = budget, key
        self.connections = self.subscriptions = 0
        self.over: float | None = None
        self.bytes_went_over = False  # whether bytes, not messages, exceeded the budget
        self._messages = self._bytes = 0.0  # the times up to which they are paid
        self._per_message = 1 / budget.messages_per_second if budget.messages_per_second else 0.0
        self._per_byte = 1 / budget.bytes_per_second if budget.bytes_per_second else 0.0
        self._spent: dict[T, float] = {}  # by each connection, in seconds, since it went over

    @property
    def has_rate(self) -> bool:
        """Whether messages or bytes are limited."""
        return bool(self._per_message or self._per_byte)

    @property
    def paid(self) -> float:
        """Return the time up to which everything is paid."""
        return max(self._messages, self._bytes)

    def refusal(self, has: int, most: int, what: str) -> Refusal:
        """Return why the clients that share it may not have more of something."""
        see = f"see [[mqtt.budget]] {self.budget.name}"
        return Refusal(
            self.budget.counter, f"{self.key!r} has {has} {what} already, the limit is {most}; {see}"
        )

    def messages_left(self, now: float) -> int | None:
        """Return how many messages to handle before it is surely over: at least 2. None: any number."""
        if not self._per_message:
            return None
        return int(max(BURST - (self.paid - now), 0.0) / self._per_message) + 2

    def pay(self, who: T, messages: int, size: int, now: float) -> float:
        """Pay for a read. Returns the seconds for which to pause; 0 or less if reading may continue."""
        if self.over is not None and self.paid - now < BURST / 2:
            self.over = None
            self._spent.clear()
        costs = messages * self._per_message, size * self._per_byte
        self._messages = max(self._messages, now) + costs[0]
        self._bytes = max(self._bytes, now) + costs[1]
        wait = self.paid - now - BURST
        if wait > 0:
            if self.over is None:
                self.over = now
            self.bytes_went_over = self._bytes > self._messages
            self._spent[who] = self._spent.get(who, 0.0) + max(costs)
        return wait

    def ends(self, now: float) -> float:
        """Return when it is over for too long, if nobody pays anything until then; or infinity."""
        if self.over is None or not self.budget.disconnect_after or not self._spent:
            return float("inf")
        end = self.over + self.budget.disconnect_after / 1000
        return end if self.paid - max(end, now) >= BURST / 2 else float("inf")

    def must_go(self, now: float) -> T | None:
        """Return the connection to close if the budget has been exceeded for too long."""
        if now < self.ends(now):
            return None
        most = max(self._spent, key=self._spent.__getitem__)
        self._spent.clear()
        self.over = now  # the others get the same time without it, and do not wait for what it owes
        self._messages, self._bytes = min(self._messages, now + BURST), min(self._bytes, now + BURST)
        return most

    def forget(self, who: T) -> None:
        """A connection is closed."""
        self._spent.pop(who, None)


class Budgets(Generic[T]):
    """All budgets, and the meters of connected clients."""

    def __init__(
        self, budgets: Sequence[Budget], later: Callable[..., object], now: Callable[[], float]
    ) -> None:
        """`later` and `now` are those of the runtime."""
        self._later, self._now = later, now
        self.load(budgets)

    def load(self, budgets: Sequence[Budget]) -> None:
        """Apply new budgets. All connections must enter again."""
        self._of_users = [one for one in budgets if one.per == "user"]
        self._of_addresses = [one for one in budgets if one.per != "user"]
        self._meters: dict[tuple[str, str], Meter[T]] = {}
        self._reported: set[tuple[str, str]] = set()

    def of_address(self, address: str) -> tuple[Meter[T], ...]:
        """Return the meters of a connection from an address, for any user."""
        return self._found(self._of_addresses, None, address)

    def of_user(self, user: str | None) -> tuple[Meter[T], ...]:
        """Return the meters of a user's client."""
        return self._found(self._of_users, user, "")

    def _found(self, budgets: Sequence[Budget], user: str | None, address: str) -> tuple[Meter[T], ...]:
        found = []
        for budget in budgets:
            if (key := budget.key_of(user, address)) is not None:
                meter = self._meters.get((budget.name, key))
                if meter is None:
                    meter = self._meters[budget.name, key] = Meter(budget, key)
                found.append(meter)
        return tuple(found)

    def enter(self, meters: Sequence[Meter[T]], spare: int = 0) -> Refusal | None:
        """Count a connection. Returns why it exceeds a limit, or None. `spare` others end with its login."""
        refused = None
        for meter in meters:
            meter.connections += 1
            most = meter.budget.connections
            if most is not None and meter.connections - spare > most:
                refused = refused or meter.refusal(meter.connections - spare - 1, most, "connections")
        return refused

    def leave(self, meters: Sequence[Meter[T]], who: T) -> None:
        """A connection is closed. What its meters owe is remembered until it is paid."""
        for meter in meters:
            meter.connections -= 1
            meter.forget(who)
            if not meter.connections:
                self._later(max(meter.paid - self._now(), 0.0), self._forget, meter)

    def _forget(self, meter: Meter[T]) -> None:
        place = meter.budget.name, meter.key
        if not meter.connections and self._meters.get(place) is meter:
            del self._meters[place]

    def meters(self) -> list[Meter[T]]:
        """Return all that are remembered."""
        return list(self._meters.values())

    def is_news(self, meter: Meter[T]) -> bool:
        """Return whether to report that a meter is over its budget: once for each meter."""
        place = meter.budget.name, meter.key
        if place in self._reported:
            return False
        if len(self._reported) >= REMEMBERED:
            self._reported.clear()
        self._reported.add(place)
        return True

    def over(self) -> dict[str, int]:
        """Return how many meters are over each budget."""
        found = {one.name: 0 for one in (*self._of_users, *self._of_addresses)}
        for meter in self._meters.values():
            found[meter.budget.name] += meter.over is not None and meter.paid > self._now()
        return found
