"""The upstreams: what would loop, come twice, or not be kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from bridge.config.checks.context import CheckContext, DeclaredExport, Finding
from bridge.config.tomlfile import Keys
from bridge.mqtt.settings import BrokerSettings, parse_address
from bridge.net.addresses import is_loopback, normal
from bridge.net.brokers import host_and_port
from bridge.topics import overlap

UNKNOWN = "\0"  # stands for text of any length, with any number of levels
LEVEL = "\1"  # stands for text without a slash


def upstreams(context: CheckContext) -> Iterator[Finding]:
    """Check the mode, the client ids, and that no upstream is this broker itself."""
    config = context.config
    seen = {
        (*_place_of(url), name): f"export {export.config.identifier!r} of stream {export.stream.name!r}"
        for export in context.exports
        if export.kind == "mqtt" and export.config is not None
        if (url := getattr(export.config, "endpoint_url", ""))
        if (name := getattr(export.config, "client_id", None))
    }
    if config.upstream and config.mqtt.mode == "external":
        yield context.error(
            ("upstream",), 'it needs mqtt.mode = "embedded": its messages are published in that broker'
        )
    for number, one in enumerate(config.upstream):
        keys: Keys = ("upstream", number)
        place = _place_of(one.url)
        client_id = one.client_id or f"{config.gateway.id}-{one.name}"
        if other := seen.get((*place, client_id)):
            yield context.error(
                (*keys, "client_id"),
                f"{other} has the client id {client_id!r} at the same broker: they would end each "
                "other's connections; choose another",
            )
        seen[(*place, client_id)] = f"upstream {one.name!r}"
        if config.mqtt.mode == "embedded" and place in _own_places(context):
            yield context.error((*keys, "url"), "this is a listener of this broker; name another broker")
        for mapping_number, mapping in enumerate(one.mapping):
            try:
                mapping.of(config.gateway.id)
            except ValueError as error:
                what = f"with gateway.id = {config.gateway.id!r}: {str(error).replace('`', '')}"
                yield context.error((*keys, "mapping", mapping_number), what)


def loops(context: CheckContext) -> Iterator[Finding]:
    """Check that nothing that an export sends to a broker comes back from there, where no property says so.

    In MQTT 5 the user property `bridged-by` does. If either connection is of MQTT 3.1.1, it is lost.
    """
    config = context.config
    sources: list[tuple[BrokerSettings, list[tuple[Keys, str]]]] = []
    for number, one in enumerate(config.upstream):
        keys: Keys = ("upstream", number)
        filters: list[tuple[Keys, str]] = [
            ((*keys, "mapping", n, "filter"), mapping.filter.replace("{gateway}", config.gateway.id))
            for n, mapping in enumerate(one.mapping)
        ]
        sources.append((one, filters))
    if config.mqtt.mode == "external":
        streams: list[tuple[Keys, str]] = [
            (("mqtt", "external", "url"), topic)
            for name, stream in config.streams.items()
            for topic in (*stream.topics, f"streams/{name}/#")
        ]
        sources.append((config.mqtt.external, streams))
    for export in context.exports:
        if export.kind == "mqtt" and export.config is not None:
            for source, filters in sources:
                yield from _loop(context, export, source, filters)


def _loop(
    context: CheckContext,
    export: DeclaredExport,
    source: BrokerSettings,
    filters: Iterable[tuple[Keys, str]],
) -> Iterator[Finding]:
    """The filters at a broker that match what an export sends there, if one of the two is MQTT 3.1.1."""
    config = export.config
    assert config is not None
    url, protocol = getattr(config, "endpoint_url", ""), getattr(config, "protocol", "5")
    if (protocol == "5" and source.protocol == "5") or not url or _place_of(url) != _place_of(source.url):
        return
    sent = list(sent_to(export, context.config.gateway.id))
    for keys, topic_filter in filters:
        if back := next((topic for topic in sent if overlap(topic, topic_filter)), None):
            stream = f"export {config.identifier!r} of stream {export.stream.name!r}"
            yield context.error(
                keys,
                f"{topic_filter!r} matches what {stream} sends to that broker ({back!r}), which would come "
                'back; set protocol = "5" for both, or separate the topics',
            )


def sent_to(export: DeclaredExport, gateway: str) -> Iterator[str]:
    """Filters for all topics on which an export `mqtt` may publish."""
    stream = export.stream
    topics = getattr(export.config, "topics", None) or [*stream.topics, f"streams/{stream.name}/#"]
    template = getattr(export.config, "topic", "{topic}")
    for topic in topics:
        levels = topic.split("/")

        def field(found: re.Match[str], topic: str = topic, levels: list[str] = levels) -> str:
            name = found[1]
            if name in ("stream", "gateway"):
                return stream.name if name == "stream" else gateway
            if name == "topic":
                return topic.replace("+", LEVEL).replace("#", UNKNOWN)
            if name in ("epoch", "sequence_number", "ingest_time", "ingest_millis"):
                return LEVEL
            if place := re.fullmatch(r"topic/(\d+)(/#)?", name):
                number, rest = int(place[1]), place[2] is not None
                if number >= len(levels) or "#" in levels[: number + 1]:
                    return UNKNOWN if rest else LEVEL
                wanted = levels[number:] if rest else levels[number : number + 1]
                return "/".join(wanted).replace("+", LEVEL).replace("#", UNKNOWN)
            return LEVEL if re.fullmatch(r"topic/-\d+", name) else UNKNOWN

        yield _filter_of(re.sub(r"\{([^{}]*)\}", field, template))


def _filter_of(text: str) -> str:
    """The filter for a topic of which parts are unknown."""
    found: list[str] = []
    for level in text.split("/"):
        if UNKNOWN in level:
            return "/".join([*found, "#"])
        found.append("+" if LEVEL in level else level)
    return "/".join(found)


def _place_of(url: str) -> tuple[str, int]:
    host, port = host_and_port(url)
    return ("localhost" if is_loopback(host) else normal(host.lower())), port


def _own_places(context: CheckContext) -> set[tuple[str, int]]:
    found = set()
    for url in (url for listener in context.config.mqtt.listeners() for url in listener.listen):
        try:
            address = parse_address(url)
        except ValueError:  # reported with the listener
            continue
        if address.scheme in ("tcp", "tls") and (address.loopback or address.host in ("0.0.0.0", "::")):  # noqa: S104
            found.add(("localhost", address.port))
        else:
            found.add((address.host.lower(), address.port))
    return found
