"""What happens to SUBSCRIBE and UNSUBSCRIBE: rights and limits, the journal, retained messages, the codes.

A filter that is refused has a code of its own in SUBACK, and the others of the packet hold (MQTT 5 section
3.9.3). SUBACK is sent once the journal has the subscriptions. Retained messages follow it.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from bridge.mqtt.broker.message import Subscription
from bridge.mqtt.broker.reports import reason, refused
from bridge.mqtt.wire.packets import (
    BAD_TOPIC_FILTER,
    NO_SUBSCRIPTION_EXISTED,
    NOT_AUTHORIZED,
    PROTOCOL_ERROR,
    QUOTA_EXCEEDED,
    SUCCESS,
    V5,
    ProtocolError,
)
from bridge.topics import SHARE, is_topic_filter, unshared

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Container, Iterable, Sequence

    from bridge.errors import StreamError
    from bridge.mqtt.broker.inbox import Inbox
    from bridge.mqtt.broker.journal import Journal
    from bridge.mqtt.broker.line import Line
    from bridge.mqtt.broker.reports import Reports
    from bridge.mqtt.broker.router import Router
    from bridge.mqtt.broker.sessions import Session
    from bridge.mqtt.settings import Limits
    from bridge.mqtt.wire.packets import TopicRequest
    from bridge.net.turns import Turns
    from bridge.runtime import Runtime

USUAL_FILTER = 256  # characters; longer filters must keep all of a client's below this on average


class Subscribing:
    """Processes the SUBSCRIBE and UNSUBSCRIBE packets of all clients."""

    def __init__(
        self,
        runtime: Runtime,
        router: Router,
        journal: Journal,
        turns: Turns,
        limits: Limits,
        reports: Reports,
    ) -> None:
        self._runtime, self._router, self._journal, self._turns = runtime, router, journal, turns
        self._limits, self._reports = limits, reports
        self._counts: Counter[str] = reports.counts

    def subscribe(
        self,
        inbox: Inbox,
        requests: Sequence[TopicRequest],
        identifier: int,
        answer: Callable[[bytes], None],
        denied: Container[str] = (),
    ) -> None:
        """Subscribe a client to the filters that are not in `denied`.

        `answer` gets a SUBACK code for each request once the journal has them. Then retained messages are
        sent. Until then nothing more is read from the client, so its next packets find the subscriptions in
        force. Raises ProtocolError.
        """
        session, line = inbox.session, inbox.line
        assert session is not None
        began = self._turns.begin()
        codes = bytearray()
        for request in requests:
            code = self._refusal(session, line, request, denied)
            if not code:
                options, shared = request.options, request.filter.startswith(SHARE)
                subscription = Subscription(
                    request.filter,
                    options & 3,
                    bool(options & 4) or (line.bridge and not shared),
                    bool(options & 8) or line.bridge,
                    options >> 4 & 3,
                    identifier,
                )
                new = self._router.subscribe(session, subscription)
                if session.persistent:
                    self._journal.subscribed(session, subscription)
                handling = subscription.retain_handling
                if not shared and (handling == 0 or (handling == 1 and new)):
                    self._router.feeds.want(session, request.filter)
                code = subscription.qos
            codes.append(code)
        line.hold("subscribe")

        def confirm() -> None:
            if session.line is line:
                answer(bytes(codes))
            self._router.feeds.feed(session, partial(line.release, "subscribe"))

        def journaled(_error: StreamError | None) -> None:
            self._runtime.soon(confirm)  # never before other answers of this read

        self._journal.after_commit(journaled)
        self._turns.spend(began)

    def unsubscribe(self, session: Session, filters: Sequence[str]) -> bytes:
        """Unsubscribe a client. Returns an UNSUBACK code for each filter."""
        began = self._turns.begin()
        codes = bytearray()
        for topic_filter in filters:
            known = self._router.unsubscribe(session, topic_filter)
            if known and session.persistent:
                self._journal.unsubscribed(session, topic_filter)
            codes.append(SUCCESS if known else NO_SUBSCRIPTION_EXISTED)
        self._turns.spend(began)
        return bytes(codes)

    def _refusal(self, session: Session, line: Line, request: TopicRequest, denied: Container[str]) -> int:
        """Return the MQTT 5 reason code for refusing a filter, or 0."""
        topics, shared = unshared(request.filter), request.filter.startswith(SHARE)
        if not (is_topic_filter(request.filter) and topics):
            if line.level != V5 and not shared:
                raise ProtocolError(f"topic filter {request.filter[:80]!r}")
            return BAD_TOPIC_FILTER  # not a violation of 3.1.1, which has no shared subscriptions
        if shared and request.options & 4:
            raise ProtocolError("No Local on a shared subscription (MQTT-3.8.3-4)", PROTOCOL_ERROR)
        known, counter = session.subscriptions, "refused_subscriptions"
        if not session.identity.may_subscribe(topics):
            code, why = NOT_AUTHORIZED, "it may not subscribe there; see [[mqtt.acl]]"
            refused(session, "subscribe", request.filter, reason(session, "subscribe", topics))
        elif topics in denied:
            code, why = NOT_AUTHORIZED, "a plugin refuses it"
            refused(session, "subscribe", request.filter, why)
        elif request.filter not in known and (full := line.full_of_subscriptions(len(known))):
            code, (counter, why) = QUOTA_EXCEEDED, full
        elif request.filter not in known and (long := self._too_long(request.filter, known)):
            code, why = QUOTA_EXCEEDED, long
        else:
            return 0
        self._counts[counter] += 1
        text = "%s: subscription to %.200r refused: %s (counted in the metrics)"
        self._reports.log(f"subscription {code}", logging.WARNING, text, line.name, request.filter, why)
        return code

    def _too_long(self, topic_filter: str, known: Iterable[str]) -> str:
        """Return why a long filter and the client's others would take too much memory; else empty."""
        most = self._limits.subscriptions * USUAL_FILTER
        if len(topic_filter) <= USUAL_FILTER or len(topic_filter) + sum(map(len, known)) <= most:
            return ""
        return f"its filters would have more than {most} characters; see [mqtt.limits] subscriptions"
