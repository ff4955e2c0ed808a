"""The gateway's configuration in a world: what a plan says, and what reloads have changed since."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING

from .clients import ADDRESS
from .plan import DEVICES, FAMILIES

if TYPE_CHECKING:
    from .world import World

QUEUED = 200_000  # bytes that wait for one subscriber, in a tight world
RETAINED = 12  # messages, in a tight world
KIN_SEGMENT = 4096  # bytes, of the stream kin
KEPT = ("safe", "state", "plain")  # topics below which there are retained messages
WORK_SEGMENT = 4096  # bytes, of the stream work
DEADLINE = 2.0  # s, in which a worker acknowledges what it has fetched
FEW, TOPICS = 3, 12  # messages of each topic of the stream few, and its topics
SAMPLE = 2  # the export of the stream odd sends one of so many messages of a topic
ROOM_OF_FEW = FEW * TOPICS * 400  # bytes
GUEST = "guest"  # a user who may make requests, and nothing that they ask for


def text(world: World) -> str:
    """The configuration file."""
    plan = world.plan
    s3 = _order(world) + (
        f'bucket = "landing"\ntime_hint_millis = {world.linger}\nsize_hint_bytes = {plan.batch}\n'
        "report_interval_millis = 500\n"
    )
    small = f"segment_size = {plan.segment}\n"
    topics = {name: f"topics = {json.dumps(wanted)}\n" for name, wanted in plan.wanted.items()}
    starts = {name: f"start_sequence_number = {start}\n" for name, start in world.export_starts.items()}
    number = "max_messages = 25" if plan.seed % 3 else "max_messages_per_topic = 20"
    sealed = "encryption = true\n" if plan.encrypted else ""
    most = f'max_deliveries = {plan.deliveries}\ndead_letter_stream = "fate"\n' if plan.deliveries else ""
    limits = f"[mqtt.limits]\nqueued_bytes = {QUEUED}\nretained_messages = {RETAINED}\n" if plan.tight else ""
    return f"""
[gateway]
id = "g"
data_dir = "{world.root}/data"
memory_dir = "{world.place}/memory"
sync_interval = {plan.sync_interval}
[mqtt]
listen = ["tcp://{ADDRESS[0]}:{ADDRESS[1]}"]
users_file = "{world.place}/users"
allow_anonymous = true
{"" if plan.open else _rules(world)}
{limits}
{f'[encryption]{chr(10)}key_file = "{world.place}/keys"' if plan.encrypted else ""}
[export]
threads = {plan.threads}
plugin_dirs = []
[http]
listen = ""
[greengrass]
listen = ""
[streams.safe]
retention = "limits"
topics = ["safe/#"]
flush_on_write = true
{sealed}{small}
[[streams.safe.export.s3]]
identifier = "lake"
{s3}{starts.get("safe", "")}
[streams.plain]
retention = "limits"
flush_on_write = false
topics = ["plain/#"]
{small}
[[streams.plain.export.s3]]
identifier = "lake"
{s3}{starts.get("plain", "")}{topics.get("plain", "")}
[streams.both]
retention = "limits"
topics = ["safe/both/#", "plain/both/#", "both/#"]
flush_on_write = {"true" if plan.seed % 2 else "false"}
{sealed}{small}
[streams.ring]
retention = "limits"
flush_on_write = false
topics = ["ring/#"]
{small}
limits = {{ max_messages = {world.ring} }}
[[streams.ring.export.s3]]
identifier = "lake"
{s3}{starts.get("ring", "")}{topics.get("ring", "")}
[streams.memory]
retention = "limits"
flush_on_write = false
topics = ["memory/#"]
persistence = "Memory"
[streams.kin]
topics = ["kin/#"]
flush_on_write = true
retention = "exported"
max_size = {world.kin_size}
segment_size = {KIN_SEGMENT}
{sealed}{_sink(world)}{starts.get("kin", "")}
[streams.aged]
retention = "limits"
flush_on_write = false
topics = ["aged/#"]
{'limits = { max_age = "4s" }' if plan.age < 60 else 'time_to_live = "60s"'}
segment_size = 1024
[streams.work]
topics = ["work/#"]
flush_on_write = {"true" if plan.seed % 2 else "false"}
retention = "exported"
max_size = {WORK_SEGMENT * 12}
segment_size = {WORK_SEGMENT}
[[streams.work.export.consumer]]
identifier = "pool"
ack_deadline_millis = {int(DEADLINE * 1000)}
max_unacknowledged = 60
{most}{starts.get("work", "")}[streams.fate]
retention = "limits"
flush_on_write = true
[streams.few]
retention = "limits"
topics = ["few/#"]
flush_on_write = true
{small}
limits = {{ max_messages_per_topic = {FEW}, max_bytes = {ROOM_OF_FEW} }}
[streams.odd]
retention = "limits"
topics = ["odd/#"]
flush_on_write = true
{sealed}[[streams.odd.export.kinesis]]
identifier = "sample"
kinesis_stream_name = "odd"
batch_size = 8
dead_letter_stream = "dead"
[[streams.odd.export.kinesis.reduce]]
sample = {SAMPLE}
[streams.late]
retention = "limits"
topics = ["late/#"]
flush_on_write = true
[[streams.late.export.s3]]
identifier = "lake"
bucket = "landing"
time_hint_millis = 3600000
report_interval_millis = 500
[streams.dead]
retention = "limits"
flush_on_write = true
max_size = 2048
segment_size = 1024
[streams.exact]
retention = "limits"
flush_on_write = {"true" if plan.seed % 2 else "false"}
{small}
limits = {{ {number}, max_bytes = 3000, discard = "new" }}
[streams.ids]
retention = "limits"
deduplication_window = "{plan.window}s"
flush_on_write = {"false" if plan.seed % 3 else "true"}
{small}
limits = {{ max_messages = 100000, max_message_size = 5000 }}
"""


def _order(world: World) -> str:
    return f'order = "{"newest" if world.newest_first else "oldest"} first"\n'


def _sink(world: World) -> str:
    plan = world.plan
    if plan.sink == "firehose":
        return f"""[[streams.kin.export.firehose]]
identifier = "firehose"
delivery_stream_name = "out"
pack_bytes = 1
dead_letter_stream = "dead"
{_order(world)}"""
    return f"""[[streams.kin.export.kinesis]]
identifier = "kinesis"
kinesis_stream_name = "out"
batch_size = {1 + plan.seed % 20}
{'partition_key = "{topic}"' if plan.keyed else ""}
dead_letter_stream = "dead"
{"" if plan.keyed else _order(world)}"""


def _rules(world: World) -> str:
    rules = []
    for n in range(DEVICES):
        allowed = [family for family in FAMILIES if (n, family) not in world.revoked]
        topics = [f"{family}/#" for family in (*allowed, "state", "flood", "late", "odd")]
        rules.append(f'[[mqtt.acl]]\nuser = "user{n}"\npublish = {json.dumps(topics)}\nsubscribe = []\n')
    kept = [f"{family}/kept/#" for family in KEPT]
    heard = ["live/#", "flood/#", "share/#", "others/#", *kept]
    return f"""{"".join(rules)}
[[mqtt.acl]]
user = ""
publish = ["streambridge/%c/#", "streams/ids", "streams/exact"]
subscribe = {json.dumps(heard)}
read = {json.dumps([*heard, "streams/work"])}
manage = ["streams/both", "streams/exact", "streams/dead", "streams/fresh", "streams/safe", "streams/kin"]
[[mqtt.acl]]
user = "{GUEST}"
publish = ["streambridge/%c/#"]
subscribe = []
"""


def users(world: World) -> str:
    """The users file."""
    words = {f"user{n}": f"word{n}-{world.passwords[n]}" for n in range(DEVICES)} | {GUEST: GUEST}
    salt = b"0123456789abcdef"
    lines = []
    for name, word in words.items():
        digest = hashlib.pbkdf2_hmac("sha512", word.encode(), salt, 1, 64)
        lines.append(f"{name}:$7$1${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}\n")
    return "".join(lines)
