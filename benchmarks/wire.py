"""Bytes on the wire: what exports send for four data sets, with and without rules that reduce them.

    python -m benchmarks.wire [--minutes 60] [--output DIR]

Four gateways of different plants publish for an hour. Their messages are made from fixed seeds, so every run
counts the same bytes:

* vibration: 8 sensors, each once a second, with a spectrum of 16 bands
* energy: 10 meters, each every 5 seconds, with three phases
* doors: 50 contacts, each every 10 seconds, and one of them is opened about every minute
* plc: one controller, once a second, with 40 fields of which a few change

Each exporter sends all of them, then all with fewer fields, and then what the rules leave, to a fake of its
service behind a forwarder that counts the bytes of both directions. Kinesis, Firehose, HTTP and MQTT send
every 10 seconds, and S3 every 5 minutes. The partition key of Kinesis is the topic. With gzip it is the
stream, so that all messages of a batch are in one record.

Caveats. The figures count HTTP with its headers and answers, but not the bytes of TLS, TCP and IP, nor the
gateway reports. The fakes answer with fewer headers than the services. How much a rule saves depends on the
data: with noisy values, a dead band lets more messages pass. The size of gzip data depends on the build of
its library, by about a percent.

Writes wire.json and wire.md to the output directory, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.testbed.aws import FakeAws
from benchmarks.testbed.forwarder import Forwarder
from benchmarks.testbed.objectstore import Server
from benchmarks.testbed.uplink import Answering
from benchmarks.testbed.web import Web
from bridge import Batch, Context, Exporter, Record, TransformState
from bridge.plugin import discovery
from bridge.plugin.testing import deliver

START = 1_795_000_000_000  # Unix time in ms, of the first message
Reading = tuple[int, str, dict[str, Any]]  # ms since the start, topic, payload


def vibration(minutes: int) -> Iterator[Reading]:
    """Bearings: noise around a level that rises slowly."""
    chance = random.Random(1)
    for second in range(minutes * 60):
        for sensor in range(8):
            level = 1.2 + sensor / 10 + second / 36_000
            row: dict[str, Any] = {"ts": START + second * 1000, "sensor": f"bearing-{sensor}"}
            row |= {
                "rms": round(level + chance.gauss(0, 0.05), 4),
                "peak": round(level * 3 + chance.gauss(0, 0.3), 4),
            }
            row |= {"temp": round(48 + sensor + second / 1800 + chance.gauss(0, 0.05), 2)}
            row["bands"] = [round(abs(chance.gauss(level / (band + 1), 0.02)), 4) for band in range(16)]
            yield second * 1000, f"plant/bearing-{sensor}/vibration", row


def energy(minutes: int) -> Iterator[Reading]:
    """Meters: loads that are switched now and then, and counters that always grow."""
    chance = random.Random(2)
    load, counter = [chance.uniform(1, 40) for _ in range(10)], [chance.uniform(1e4, 1e5) for _ in range(10)]
    for second in range(0, minutes * 60, 5):
        for meter in range(10):
            if chance.random() < 0.01:
                load[meter] = chance.uniform(1, 40)
            counter[meter] += load[meter] / 720
            row: dict[str, Any] = {"ts": START + second * 1000, "meter": f"em-{meter:02d}"}
            for phase in (1, 2, 3):
                row[f"u{phase}"] = round(230 + chance.gauss(0, 0.4), 1)
                row[f"i{phase}"] = round(load[meter] / 0.69 * (1 + chance.gauss(0, 0.002)), 2)
            row |= {"p": round(load[meter] * (1 + chance.gauss(0, 0.002)), 3), "pf": 0.97, "f": 50.0}
            row["kwh"] = round(counter[meter], 3)
            yield second * 1000, f"building/em-{meter:02d}", row


def doors(minutes: int) -> Iterator[Reading]:
    """Contacts: a sign of life every ten seconds, and a door that opens and shuts again."""
    chance = random.Random(3)
    opened: dict[int, int] = {}
    for second in range(0, minutes * 60, 10):
        if chance.random() < 1 / 6:
            opened[chance.randrange(50)] = second + chance.choice((10, 20, 60))
        for door in range(50):
            row = {"id": f"door-{door:02d}", "open": opened.get(door, 0) > second, "battery": 97, "rssi": -60}
            row["rssi"] = -60 - chance.randrange(6)
            yield second * 1000 + door * 7, f"site/door-{door:02d}/state", row


def plc(minutes: int) -> Iterator[Reading]:
    """A controller: set points, states, counters, and measured values with some noise."""
    chance = random.Random(4)
    speed, pieces, state = 1200.0, 0, "run"
    for second in range(minutes * 60):
        if chance.random() < 1 / 60:
            state, speed = chance.choice([("run", 1200.0), ("run", 1350.0), ("stop", 0.0)])
        pieces += state == "run" and second % 4 == 0
        row: dict[str, Any] = {
            "time": START + second * 1000,
            "state": state,
            "pieces": pieces,
            "alarm": False,
        }
        row |= {f"setpoint_{n}": 50 + n for n in range(12)}
        row |= {f"valve_{n}": state == "run" and n % 3 == 0 for n in range(12)}
        row |= {f"temp_{n}": round(60 + n + chance.gauss(0, 0.05), 2) for n in range(6)}
        row |= {f"pressure_{n}": round(4 + n / 10 + chance.gauss(0, 0.004), 3) for n in range(5)}
        row["speed"] = round(speed + (speed and chance.gauss(0, 0.8)), 1)
        yield second * 1000, "line/1/snapshot", row


Made = Callable[[int], Iterator[Reading]]
# Each data set, and what a plant would do without: the rules of `reduce`.
DATA: dict[str, tuple[Made, dict[str, Any]]] = {
    "vibration": (vibration, {"sample": 10, "drop": ["/bands"]}),
    "energy": (
        energy,
        {
            "deadband": {"/p": "2%", "/u1": 3, "/u2": 3, "/u3": 3, "/pf": 0.05},
            "longestSilenceMillis": 60_000,
            "drop": ["/meter", "/f"],
        },
    ),
    "doors": (
        doors,
        {"deadband": {"/open": 0, "/battery": 1}, "longestSilenceMillis": 600_000, "drop": ["/rssi"]},
    ),
    "plc": (
        plc,
        {
            "deadband": {"": "1%", "/time": "ignore", "/pieces": "ignore"},
            "longestSilenceMillis": 60_000,
            "drop": [f"/setpoint_{n}" for n in range(12)],
        },
    ),
}
VARIANTS = ("all", "fewer fields", "reduced")  # of a data set: with `drop` alone, and with the whole rule
TEN_SECONDS, FIVE_MINUTES = 10_000, 300_000


class Destination:
    """An exporter with its options, the fake that it sends to, and how often it sends."""

    def __init__(self, label: str, kind: str, fake: str, every: int, **options: Any) -> None:
        self.label, self.kind, self.fake, self.every, self.options = label, kind, fake, every, options


KINESIS = {"kinesisStreamName": "plant", "partitionKey": "{topic}"}
PACKED = {"kinesisStreamName": "plant", "partitionKey": "{stream}", "compression": "gzip"}
LISTS = {"exportFormat": 1, "compression": "gzip"}
DESTINATIONS = [
    Destination("kinesis payload", "kinesis", "aws", TEN_SECONDS, **KINESIS),
    Destination("kinesis json", "kinesis", "aws", TEN_SECONDS, **KINESIS, record="json"),
    Destination("kinesis cbor", "kinesis", "aws", TEN_SECONDS, **KINESIS, record="cbor"),
    Destination("kinesis payload gzip", "kinesis", "aws", TEN_SECONDS, **PACKED),
    Destination("kinesis json gzip", "kinesis", "aws", TEN_SECONDS, **PACKED, record="json"),
    Destination("firehose payload", "firehose", "aws", TEN_SECONDS, deliveryStreamName="plant"),
    Destination("http payload", "http", "web", TEN_SECONDS),
    Destination("http json", "http", "web", TEN_SECONDS, record="json"),
    Destination("http json gzip", "http", "web", TEN_SECONDS, **LISTS, record="json"),
    Destination("mqtt payload", "mqtt", "broker", TEN_SECONDS),
    Destination("s3 ndjson", "s3", "store", FIVE_MINUTES, bucket="plant", format="ndjson"),
    Destination("s3 parquet", "s3", "store", FIVE_MINUTES, bucket="plant", format="parquet"),
]


@contextmanager
def fakes() -> Iterator[dict[str, str]]:
    """The services by name, with their URLs."""
    aws, web, store, broker = FakeAws(), Web(), Server(), Answering()
    for server in (aws.server, web.server, store):
        server.handle_error = lambda *_: None  # type: ignore[method-assign] - the forwarder resets what is left
    thread = threading.Thread(target=store.serve_forever, args=(0.02,))
    thread.start()
    try:
        urls = {"aws": aws.url, "web": web.url, "store": f"http://127.0.0.1:{store.server_port}"}
        yield urls | {"broker": broker.url}
    finally:
        aws.close()
        web.close()
        broker.close()
        store.shutdown()
        thread.join()
        store.server_close()


def records(made: Made, minutes: int) -> list[Record]:
    """The messages as a stream has them."""
    return [
        Record(number, START + at, topic, json.dumps(row, separators=(",", ":")).encode())
        for number, (at, topic, row) in enumerate(made(minutes))
    ]


def reduced(rows: list[Record], rule: dict[str, Any]) -> list[Record]:
    """What the rule leaves."""
    registry = discovery.load()
    config = registry.config(
        "http", {"identifier": "x", "endpointUrl": "http://127.0.0.1/", "reduce": [rule]}
    )
    found = registry.hook.transform_records(
        records=rows, stream="plant", kind="http", config=config, state=TransformState()
    )
    return next(result for result in found if result is not None)


def batches(
    rows: list[Record], exporter: type[Exporter], every: int, newest: int
) -> Iterator[tuple[int, int, list[Record]]]:
    """The batches that an export makes of them, first and last number and records.

    They end by time, and within the exporter's limits. One that is declared to lack numbers reaches up to the
    next one, or to the `newest` number.
    """
    limits = exporter.limits
    parts: list[list[Record]] = []
    for _, group in groupby(rows, key=lambda row: (row.ingest_time - START) // every):
        part: list[Record] = []
        size = 0
        for row in group:
            length = len(row.payload) + len(row.topic)
            full = len(part) >= (limits.records or 100_000) or size + length > (limits.batch_bytes or 4 << 20)
            if part and full:
                parts.append(part)
                part, size = [], 0
            part.append(row)
            size += length
        parts.append(part)
    for at, part in enumerate(parts):
        first, last = part[0].sequence_number, part[-1].sequence_number
        if limits.declares_filtered:
            last = parts[at + 1][0].sequence_number - 1 if at + 1 < len(parts) else newest
        yield first, last, part


def where(kind: str, url: str) -> dict[str, str]:
    """The option that names a destination."""
    if kind == "mqtt":
        return {"endpointUrl": url.replace("http:", "mqtt:")}
    return {"endpointUrl": f"{url}/in" if kind == "http" else url}


def count(
    destination: Destination, url: str, rows: list[Record], newest: int, prefix: str
) -> tuple[int, int]:
    """The bytes that it takes to send them, and in how many batches; objects are named below the prefix."""
    exporter = discovery.load().exporters[destination.kind]
    forwarder = Forwarder(url)
    try:
        options = {"identifier": "x", **where(destination.kind, forwarder.url), **destination.options}
        if destination.kind == "s3":
            options["prefix"] = prefix
        instance = exporter(discovery.load().config(destination.kind, options), Context())
        number = 0
        for first, last, part in batches(rows, exporter, destination.every, newest):
            number += 1
            rejected = deliver(instance, Batch("gw-1", "plant", START, first, last, part))
            if rejected:
                raise SystemExit(f"{destination.label} has rejected {rejected}")
        passed = forwarder.passed  # before what closing sends: a gateway report, a DISCONNECT
        instance.close()
        return passed, number
    finally:
        forwarder.close()


def table(found: list[dict[str, Any]]) -> str:
    """What was counted, as Markdown."""
    labels = [destination.label for destination in DESTINATIONS]
    lines = [
        "kB of an hour; in brackets, bytes for each message that was published:\n",
        "| data set | | messages | payloads | " + " | ".join(labels) + " |",
        "|---|---|---|---|" + "---|" * len(labels),
    ]
    for row in found:
        for what in VARIANTS:
            sizes = [
                f"{row[what][label] / 1000:,.0f} ({row[what][label] / row['all']['messages']:.0f})"
                for label in labels
            ]
            kept = row[what]
            name = row["data"] if what == "all" else ""
            start = f"| {name} | {what} | {kept['messages']:,} | {kept['payloads'] / 1000:,.0f} | "
            lines.append(start + " | ".join(sizes) + " |")
        factors = [f"{row['all'][label] / row['reduced'][label]:.1f}" for label in labels]
        payload = row["all"]["payloads"] / row["reduced"]["payloads"]
        messages = row["all"]["messages"] / row["reduced"]["messages"]
        lines.append(f"| | all / reduced | {messages:.1f} | {payload:.1f} | " + " | ".join(factors) + " |")
    rules = [f"* {name}: `{json.dumps(rule)}`" for name, (_, rule) in DATA.items()]
    return "\n".join([*lines, "", "The rules, as in a definition:", "", *rules])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    os.environ.update(AWS_ACCESS_KEY_ID="benchmark", AWS_SECRET_ACCESS_KEY="benchmark")
    os.environ["AWS_DEFAULT_REGION"] = "eu-central-1"
    found = []
    with fakes() as urls:
        for name, (made, rule) in DATA.items():
            rows = records(made, given.minutes)
            row: dict[str, Any] = {"data": name}
            fields = reduced(rows, {"drop": rule["drop"]})
            for what, left in zip(VARIANTS, (rows, fields, reduced(rows, rule)), strict=True):
                row[what] = {"messages": len(left), "payloads": sum(len(one.payload) for one in left)}
                row[what]["batches"] = {}
                for destination in DESTINATIONS:
                    url = urls[destination.fake]
                    found_here = count(destination, url, left, len(rows) - 1, f"{name}-{what}")
                    row[what][destination.label], row[what]["batches"][destination.label] = found_here
            found.append(row)
            print(json.dumps(row), flush=True)
    (given.output / "wire.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.output / "wire.md").write_text(table(found) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
