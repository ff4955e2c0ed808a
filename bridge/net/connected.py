"""`Connected`: a connected client, as front ends report it."""

from __future__ import annotations

from typing import NamedTuple


class Connected(NamedTuple):
    """A connected client.

    `since` is Unix time in ms. `published` counts the messages that it has sent since then, `subscriptions`
    its topic filters, `queued` the messages that wait for it. A `slowed` client is over a budget.
    """

    id: str
    user: str | None
    address: str
    protocol: str
    since: int
    published: int
    subscriptions: int
    queued: int
    slowed: bool = False
