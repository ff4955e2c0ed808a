"""What the soak runs: devices, streams, exports; the same at every run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DEVICES, AT_BROKER = 200, 24  # of them, so many talk to the external broker
PLANTS, YARDS = 7, 2  # streams of the embedded broker (and `alarms`), and of the external one
RATES = (0.5, 1.0, 2.0, 5.0, 10.0)  # messages a second; each device has one of them
SIZES = (80, 200, 800, 3000)  # bytes of payload
BUCKET, PREFIX = "soak", "landing"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "soak",
    "AWS_SECRET_ACCESS_KEY": "soak",
    "AWS_DEFAULT_REGION": "eu-west-1",
}
EMBEDDED, EXTERNAL = "gw-embedded", "gw-external"

GATEWAY = """\
[gateway]
id = "{name}"
data_dir = "{data}"
memory_dir = "{memory}"

[greengrass]
listen = ""

[http]
listen = "127.0.0.1:{http}"

[export]
plugin_dirs = []

[mqtt]
"""

USER, PASSWORD, OTHER_PASSWORD = "plant", "right", "left"  # of the devices at the WebSocket listener
KEPT, KEPT_PER_TOPIC = 300, 20  # messages of the limited stream
LIMITED, LIMITED_TOPIC = "latest", "plant/0/#"  # it has no export: what it drops is missing nowhere

MAX_SIZES = ("48MiB", "64MiB")  # of a stream, now one, now the other
STREAM = """
[streams.{name}]
topics = ["{topic}"]
max_size = "48MiB"
segment_size = "2MiB"
retention = "exported"
flush_on_write = {flush}
{more}
[[streams.{name}.export.s3]]
identifier = "table"
bucket = "{bucket}"
prefix = "{prefix}"
endpoint_url = "{s3}"
time_hint_millis = 3000
report_interval_millis = 1000
"""

LIMITED_STREAM = f"""
[streams.{LIMITED}]
topics = ["{LIMITED_TOPIC}"]
limits = {{ max_messages = {KEPT}, max_messages_per_topic = {KEPT_PER_TOPIC} }}
"""

OTHERS = {
    "kinesis": 'kinesis_stream_name = "soak"\npartition_key = "{topic}"\nendpoint_url = "%s"\n',
    "firehose": 'delivery_stream_name = "soak"\npack_bytes = 20000\nendpoint_url = "%s"\n',
    "http": 'endpoint_url = "%s/in"\nexport_format = 1\ntimeout_millis = 5000\n',
    "mqtt": 'endpoint_url = "%s"\ntimeout_millis = 5000\n',
}
# Options of some of them: every message still arrives, but as something else.
OPTIONS = {
    ("plant1", "kinesis"): 'record = "json"\ncompression = "gzip"\n',
    ("plant2", "firehose"): 'reduce = [{ drop = ["/x"] }]\n',
    ("yard0", "http"): 'record = "json"\ncompression = "gzip"\nreduce = [{ keep = ["/d", "/n"] }]\n',
}
# The exports of a stream in addition to s3.
ALSO = {
    "plant0": ("kinesis",),
    "plant1": ("kinesis", "http"),
    "plant2": ("firehose", "mqtt"),
    "yard0": ("http",),
}


@dataclass(frozen=True)
class Device:
    """One device: what it sends, and over what."""

    number: int
    link: str  # that it uses: "tcp0", "tcp1", "tls0", "tls1", "ws0" or "broker"
    level: int  # of the protocol: 4 is MQTT 3.1.1
    qos: int
    rate: float
    size: int
    topic: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def gateway(self) -> str:
        return EXTERNAL if self.link == "broker" else EMBEDDED

    @property
    def streams(self) -> list[str]:
        """The streams that its topic is bound to."""
        own = "".join(self.topic.split("/")[:2])
        return [own, "alarms"] if self.topic.endswith("/alarm") else [own]


def devices(number: int = DEVICES) -> list[Device]:
    """All devices, of every QoS, protocol level, rate and size; each eighth or so at the external broker.

    Each twelfth is at the WebSocket listener, and logs in.
    """
    made = []
    at_broker = max(3, number * AT_BROKER // DEVICES)
    for n in range(number):
        qos = (1, 1, 2, 1, 2, 0)[n % 6]
        level = 5 if n % 4 == 3 else 4
        size = SIZES[n // 3 % len(SIZES)]
        if n >= number - at_broker:
            # Slow: Mosquitto writes its whole file for every message, so that its kill loses little.
            made.append(Device(n, "broker", 4, qos, 1.0, size, f"yard/{n % YARDS}/device{n}"))
            continue
        link = "ws0" if n % 12 == 5 else ("tcp0", "tcp1", "tls0", "tls1")[n // 6 % 4]
        topic = f"plant/{n % PLANTS}/device{n}" + ("/alarm" if n % 25 == 0 else "")
        made.append(Device(n, link, level, qos, RATES[n // 2 % len(RATES)], size, topic))
    return made


APP_STREAM = "apps0"
# What an app appends with an id is stored once, as at QoS 2.
APP = Device(9_999, "control", 4, 2, 0.0, 0, "apps/0/app")


def configuration(gateway: str, places: dict[str, Any], endpoints: dict[str, str]) -> str:
    """The configuration of a gateway; `places` are its directories, ports and files."""
    text = GATEWAY.format(name=gateway, **places)
    if gateway == EXTERNAL:
        text += f'mode = "external"\n\n[mqtt.external]\nurl = "{places["broker"]}"\nclient_id = "soak"\n'
        streams = {f"yard{n}": f"yard/{n}/#" for n in range(YARDS)}
    else:
        text += f'listen = ["tcp://127.0.0.1:{places["tcp"]}", "tls://127.0.0.1:{places["tls"]}", '
        text += (
            f'"ws://127.0.0.1:{places["ws"]}"]\nallow_anonymous = true\nusers_file = "{places["users"]}"\n'
        )
        text += f'\n[mqtt.tls]\ncert = "{places["cert"]}"\nkey = "{places["key"]}"\n'
        streams = {f"plant{n}": f"plant/{n}/#" for n in range(PLANTS)}
        streams["alarms"] = "plant/+/+/alarm"
        streams[APP_STREAM] = "apps/0/#"
    for number, (name, topic) in enumerate(streams.items()):
        flush = str(number % 2 == 0).lower()
        more = 'deduplication_window = "1h"\n' if name == APP_STREAM else ""
        where = {"bucket": BUCKET, "prefix": PREFIX, "s3": endpoints["s3"]}
        text += STREAM.format(name=name, topic=topic, flush=flush, more=more, **where)
        for kind in ALSO.get(name, ()):
            text += f'\n[[streams.{name}.export.{kind}]]\nidentifier = "{kind}"\nlinger_millis = 500\n'
            text += OTHERS[kind] % endpoints[kind] + OPTIONS.get((name, kind), "")
    return text if gateway == EXTERNAL else text + LIMITED_STREAM
