"""The budgets of one connection: how fast it may send, and how many topic filters it may have.

The budgets of its address and of its network count a connection from the start, those of its user from the
login. `bridge.net.budgets` says how a meter is paid.

    read --a payment is more than a second ahead--> held ("rate") --the meter has caught up--> read
                                                      |
                                                      +-- held for `disconnect_after`: closed, if it sent most
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from bridge.mqtt.server.states import OPEN, State
from bridge.mqtt.wire.packets import MESSAGE_RATE_TOO_HIGH, QUOTA_EXCEEDED
from bridge.net.budgets import BURST, PAUSE, Budget, Budgets, Meter, Refusal

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from bridge.runtime import Runtime, Timer

log = logging.getLogger(__name__)

ANY = 1 << 60  # messages, if no budget limits them
OWN = "connection"  # the budget of a single connection: `messages_per_second` of its listener


class Payer(Protocol):
    """A connection; `connection.Connection` is one."""

    state: State

    @property
    def name(self) -> str: ...

    def hold(self, why: str) -> None: ...

    def release(self, why: str) -> None: ...

    def fail(self, counter: str, why: str, reason: int, told: str = "") -> None: ...


class Metering:
    """The meters of one connection. It does not refer to the connection, so that both are freed at once.

    `rates` are those that limit messages or bytes. If it is empty, nothing needs to be paid, and the hot path
    does not call `pay`.
    """

    __slots__ = (
        "_budgets", "_counts", "_filters", "_of_address", "_of_user", "_prepaid", "_runtime",
        "_timer", "rates",
    )  # fmt: skip

    def __init__(self, budgets: Budgets[Any], runtime: Runtime, counts: MutableMapping[str, int]) -> None:
        """`counts` counts the connections that were slowed, by budget."""
        self._budgets, self._runtime, self._counts = budgets, runtime, counts
        self._of_address: tuple[Meter[Any], ...] = ()
        self._of_user: tuple[Meter[Any], ...] = ()
        self.rates: tuple[Meter[Any], ...] = ()
        self._filters = 0  # topic filters, as the meters count them
        self._prepaid = 0  # bytes that were paid before they were handled
        self._timer: Timer | None = None  # until reading resumes

    @property
    def slowed(self) -> bool:
        """Whether one of its budgets is exceeded, by this connection or by others that share the budget."""
        now = self._runtime.now()
        return any(meter.over is not None and meter.paid > now for meter in self.rates)

    # -- connections ------------------------------------------------------------

    def enter_address(self, address: str) -> Refusal | None:
        """Count the connection for its address. Returns why there are too many; None if there is room."""
        self._of_address = self._budgets.of_address(address)
        return self._budgets.enter(self._of_address)

    def enter_user(self, user: str | None, spare: int = 0) -> Refusal | None:
        """Count the connection for its user; `spare` others end with this login."""
        self._of_user = self._budgets.of_user(user)
        return self._budgets.enter(self._of_user, spare)

    def leave_address(self, conn: object) -> None:
        """The transport is closed."""
        self._budgets.leave(self._of_address, conn)
        self._of_address = ()
        if self._timer is not None:
            self._timer.cancel()

    def leave_user(self, conn: object) -> None:
        """The connection is closed, and its client's subscriptions count no longer."""
        self.count_filters(0)
        self._budgets.leave(self._of_user, conn)
        self._of_user = ()

    def logged_in(self, messages_per_second: int, filters: int) -> None:
        """Start the rates; also after a reload, which makes new meters. 0 messages a second: no limit.

        `filters` is the number of topic filters of the client's session.
        """
        self.rates = tuple(meter for meter in self.shared if meter.has_rate)
        if messages_per_second:
            own = Budget(name=OWN, per="address", messages_per_second=messages_per_second, disconnect_after=0)
            self.rates += (Meter(own, ""),)
        self._filters = 0
        self.count_filters(filters)

    @property
    def shared(self) -> tuple[Meter[Any], ...]:
        """The meters that count it, which other connections may share."""
        return (*self._of_address, *self._of_user)

    # -- topic filters ------------------------------------------------------------

    def count_filters(self, filters: int) -> None:
        """Count the topic filters that the client has now."""
        more = filters - self._filters
        if more:
            self._filters = filters
            for meter in self.shared:
                meter.subscriptions += more

    def refuse_filter(self, filters: int) -> Refusal | None:
        """Return why a client that has `filters` topic filters may not have another one; None if it may."""
        more = filters - self._filters
        for meter in self.shared:
            most = meter.budget.subscriptions
            if most is not None and meter.subscriptions + more >= most:
                return meter.refusal(meter.subscriptions + more, most, "subscriptions")
        return None

    # -- rates ------------------------------------------------------------

    def messages_left(self) -> int:
        """Return how many messages to handle before the next payment."""
        now = self._runtime.now()
        return min(
            (left for meter in self.rates if (left := meter.messages_left(now)) is not None), default=ANY
        )

    def prepay(self, conn: Payer, size: int) -> None:
        """Pay for `size` bytes that were read but not handled: their packet is incomplete, or must wait."""
        more = size - self._prepaid
        if more > 0:
            self._prepaid += more
            self.pay(conn, 0, more)

    def pay_handled(self, conn: Payer, messages: int, size: int) -> None:
        """Pay for what was handled, minus the bytes that were prepaid."""
        more, self._prepaid = max(size - self._prepaid, 0), max(self._prepaid - size, 0)
        self.pay(conn, messages, more)

    def pay(self, conn: Payer, messages: int, size: int) -> None:
        """Pay for what was read. Holds the connection while a budget is exceeded."""
        now, longest = self._runtime.now(), 0.0
        for meter in self.rates:
            wait = meter.pay(conn, messages, size, now)
            if wait > 0 and meter.key:
                self._report(conn, meter)
            longest = max(longest, wait)
        if longest > 0:
            self._pause(conn, now + longest + PAUSE)

    def _report(self, conn: Payer, meter: Meter[Any]) -> None:
        name = meter.budget.name
        self._counts[f"slowed_{name}"] += 1
        if self._budgets.is_news(meter):
            text = "%s is read more slowly: %s %r is over %s_per_second of [[mqtt.budget]] %s (logged once)"
            log.warning(text, conn.name, meter.budget.per, meter.key, _limit(meter), name)

    def _pause(self, conn: Payer, until: float) -> None:
        """Stop reading until then. Meanwhile, close who exceeds a budget for too long."""
        now = self._runtime.now()
        for meter in self.rates:
            if (noisy := meter.must_go(now)) is not None:
                reason = QUOTA_EXCEEDED if meter.bytes_went_over else MESSAGE_RATE_TOO_HIGH
                why = f"over {_limit(meter)}_per_second of [[mqtt.budget]] {meter.budget.name} for too long"
                self._runtime.soon(noisy.fail, meter.budget.counter, why, reason)
        # It may be over sooner: another connection was closed with what it owed, or a reload made new meters.
        until = min(until, max((meter.paid for meter in self.rates), default=0.0) - BURST + PAUSE)
        if self._timer is not None:
            self._timer.cancel()
        if conn.state is not OPEN:
            return
        if until <= now:
            conn.release("rate")
            return
        conn.hold("rate")
        due = min(until, *(meter.ends(now) for meter in self.rates))
        self._timer = self._runtime.later(due - now, self._pause, conn, until)


def _limit(meter: Meter[Any]) -> str:
    """Return which of its limits a meter exceeds."""
    return "bytes" if meter.bytes_went_over else "messages"
