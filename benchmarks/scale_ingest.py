"""Gateways per ingest job: how far the Spark job scales.

    python -m benchmarks.scale_ingest [--gateways 1000,10000]

Gateways are simulated by what the job sees of them: objects with their names (one stream each, `--objects`
of 100 messages) and a gateway report. For each number of gateways, the program measures:

* a first run that takes everything, a second one without new objects, and a third after each gateway has
  uploaded one more object: seconds by stage, and the size of the state document. The objects are files.
* the requests to S3 before a run knows what is new, with a server that answers after `--wait` ms: the time to
  read the gateway reports and to list the objects.

Caveats. The runs use files instead of S3; only the requests use a server, on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.ingest_data import EPOCH, Object, make
from benchmarks.ingest_spark import server
from bridge.ingest.gateway_reports import read_gateway_reports
from bridge.ingest.job import Summary, run
from bridge.ingest.session import open_session
from bridge.ingest.store import StorageLocation
from bridge.ingest.table import TableOptions, open_sink
from bridge.objectkeys import report_key

ROWS = 100  # in an object

# Answers ListObjectsV2 and GetObject for so many gateways, each request after so many ms.
S3 = """
import sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse
gateways, objects, wait = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000
STREAM = '{"stream": "readings", "epoch": 1795000000000, "newest": 9}'
HEAD = '{"gateway": "%s", "updated": 1, "streams": [' + STREAM + ']}'
def entry(key):
    return (f"<Contents><Key>{key}</Key><LastModified>2026-11-18T11:06:40.000Z</LastModified>"
            f'<ETag>"0"</ETag><Size>1000</Size><StorageClass>STANDARD</StorageClass></Contents>')
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_GET(self):
        time.sleep(wait)
        url = urlparse(self.path)
        asked = {name: value[0] for name, value in parse_qs(url.query).items()}
        if "list-type" not in asked:
            return self.answer(HEAD % url.path.rpartition("/")[2].removesuffix(".json"), "application/json")
        start, prefix = int(asked.get("continuation-token", 0)), asked.get("prefix", "")
        end, last, body = min(start + 1000, gateways), False, []
        if "delimiter" in asked:
            folders = [f"<Prefix>gateway=gw-{g:05d}/</Prefix>" for g in range(start, end)]
            body = [f"<CommonPrefixes>{folder}</CommonPrefixes>" for folder in folders]
        elif prefix == "_gateway/":
            body = [entry(f"_gateway/gw-{g:05d}.json") for g in range(start, end)]
        else:
            folder = f"{prefix}stream=readings/epoch=1795000000000/date=2026-11-18/hour=11/"
            body = [entry(f"{folder}{n * 100:020d}-{n * 100 + 99:020d}.ndjson.gz") for n in range(objects)]
            end = gateways
        more = end < gateways
        token = f"<NextContinuationToken>{end}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        xml = '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
        self.answer(xml + "".join(body) + truncated + token + "</ListBucketResult>", "application/xml")
    def answer(self, text, kind):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *a):
        pass
class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 200
server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def requests(gateways: int, objects: int, wait: float) -> dict[str, float]:
    """Seconds that reading the gateway reports and listing take when every request takes `wait` ms."""
    with server(S3, str(gateways), str(objects), str(wait)) as endpoint:
        store = StorageLocation("s3://landing", endpoint).open()
        began = time.monotonic()
        reports = read_gateway_reports(store)
        read = time.monotonic() - began
        began = time.monotonic()
        entries = sum(1 for _ in store.list())
        listed = time.monotonic() - began
    assert (len(reports.streams), entries) == (gateways, gateways * objects), (len(reports.streams), entries)
    return {"wait_ms": wait, "heads_seconds": round(read, 1), "list_seconds": round(listed, 1)}


def upload(place: StorageLocation, gateways: int, objects: range) -> int:
    """The objects of so many gateways, and their reports."""
    store = place.open()
    for g in range(gateways):
        newest = objects.stop * ROWS - 1
        stream = {"stream": "readings", "epoch": EPOCH, "oldest": 0, "newest": newest, "exported": newest}
        report = {"gateway": f"gw-{g:05d}", "updated": EPOCH, "streams": [stream]}
        store.put(report_key(f"gw-{g:05d}"), json.dumps(report).encode())

    def all_of_them() -> Iterator[Object]:
        for g in range(gateways):
            for n in objects:
                yield Object(f"gw-{g:05d}", "readings", n * ROWS, n * ROWS + ROWS - 1, "ndjson.gz")

    return make(place, list(all_of_them()))


def stages(summary: Summary, state: Path) -> dict[str, Any]:
    """Where the time of a run went."""
    rounds = summary.rounds
    documents = sorted(state.rglob("*.json"))
    return {
        "rows": summary.rows,
        "objects": summary.objects,
        "rounds": len(rounds),
        "seconds": round(summary.seconds, 1),
        "list_seconds": round(summary.list_seconds, 1),
        "plan_seconds": round(sum(one.plan_seconds for one in rounds), 1),
        "work_seconds": round(sum(one.work_seconds for one in rounds), 1),
        "commit_seconds": round(sum(one.commit_seconds for one in rounds), 1),
        "objects_per_second": round(summary.objects / max(sum(one.work_seconds for one in rounds), 0.001)),
        "state_mb": round(documents[-1].stat().st_size / 1e6, 1),
    }


def measure(spark: Any, gateways: int, objects: int, folder: Path) -> dict[str, Any]:
    """A first run, one with nothing new, one with one more object of each gateway."""
    place, lake = StorageLocation(str(folder / "landing")), folder / "lake"
    upload(place, gateways, range(objects))
    sink = open_sink(TableOptions(warehouse=str(lake)))
    state = lake / "_streambridge" / "lake.messages"
    result = {"everything": stages(run(spark, place, sink), state)}
    result["nothing_new"] = stages(run(spark, place, sink), state)
    upload(place, gateways, range(objects, objects + 1))
    last = run(spark, place, sink)
    assert last.report.complete, last.report.total("missing")
    assert last.report.total("rows") == gateways * (objects + 1) * ROWS
    result["one_more_each"] = stages(last, state)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateways", default="1000,10000")
    parser.add_argument("--objects", type=int, default=4, help="of each gateway [4]")
    parser.add_argument("--wait", type=float, default=20, help="ms that a request to S3 takes [20]")
    parser.add_argument("--scratch", type=Path, help="directory for the objects [the temporary one]")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"))
    options = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    results = {}
    spark = open_session("local[2]", app="scale")
    for gateways in map(int, options.gateways.split(",")):
        found: dict[str, Any] = {"requests": requests(gateways, options.objects, options.wait)}
        print(json.dumps({gateways: found}), flush=True)
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            found |= measure(spark, gateways, options.objects, Path(folder))
        found["driver_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        results[gateways] = found
        print(json.dumps({gateways: found}), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale_ingest.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.output / "scale_ingest.md").write_text(table(results))
    spark.stop()


def column(found: dict[str, Any]) -> dict[str, str]:
    """What was measured with one number of gateways, by what it is called in the table."""
    asked, first, none, more = (found[k] for k in ("requests", "everything", "nothing_new", "one_more_each"))
    each = f"s ({asked['wait_ms']:.0f} ms a request)"
    return {
        f"heads read, {each}": f"{asked['heads_seconds']}",
        f"objects listed, {each}": f"{asked['list_seconds']}",
        "first run: rows, objects": f"{first['rows']:,}, {first['objects']:,}",
        "first run, s (of it: list, plan, commit)": f"{first['seconds']} ({first['list_seconds']}, "
        f"{first['plan_seconds']}, {first['commit_seconds']})",
        "first run, objects/s": f"{first['objects_per_second']:,}",
        "a run that finds nothing new, s": f"{none['seconds']}",
        "one more object each, s": f"{more['seconds']}",
        "state document, MB": f"{more['state_mb']}",
        "driver, peak MiB": f"{found['driver_peak_mib']}",
    }


def table(results: dict[int, dict[str, Any]]) -> str:
    """All of it as Markdown: a column for each number of gateways."""
    columns = [column(found) for found in results.values()]
    lines = ["| | " + " | ".join(f"{gateways:,} gateways" for gateways in results) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    lines += [f"| {name} | " + " | ".join(one[name] for one in columns) + " |" for name in columns[0]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
