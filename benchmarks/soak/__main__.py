"""The soak: everything at once under faults, and then an account of every message.

    make soak [MINUTES=20]        (or: python -m benchmarks.soak [--minutes 20] [--output build/soak])

200 devices at mixed rates and QoS publish to ten streams of two gateways: one with the embedded broker, one
behind Mosquitto. Their streams are exported to stand-ins for Kinesis, Firehose, HTTP, MQTT and S3. Meanwhile
`streambridge ingest` loads the objects into a table. Gateways, workers, Mosquitto and ingest runs are killed
with SIGKILL, links are cut, services fail, the disk fills up, certificates are replaced, all at random. At
the end the faults stop, pending messages arrive, and `verdict.py` checks what must hold. The exit code is 0
only if all of it does.

The report is OUTPUT/soak.md with charts, and OUTPUT/soak.json. `--plant` deletes one exported object before
the last ingest run. The soak must find that loss, so the exit code must be 1.

The full disk is a tmpfs in a private mount namespace. Where that is not allowed, the fault is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import boto3

from benchmarks.soak import evidence, plan, report, verdict
from benchmarks.soak.app import App
from benchmarks.soak.faults import Event, Faults
from benchmarks.soak.verdict import Check
from benchmarks.soak.watch import Watch
from benchmarks.soak.world import DISK, World, wait_for
from bridge.objectkeys import parse_key

INSIDE = "SOAK_MOUNTS"  # set to 1 in our own mount namespace, to 0 where there can be none
EXPORTED = 400.0  # seconds that exports may take to catch up: their longest pause is 5 minutes


def own_mounts() -> bool:  # noqa: RET503 - execvp does not return
    """Go on in a mount namespace of our own; False where that is not allowed."""
    if INSIDE in os.environ:
        return os.environ[INSIDE] == "1"
    enter = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    allowed = (
        shutil.which("unshare") and subprocess.run([*enter, "true"], capture_output=True).returncode == 0
    )
    os.environ[INSIDE] = "1" if allowed else "0"
    command = [sys.executable, "-m", "benchmarks.soak", *sys.argv[1:]]
    command = [*enter, *command] if allowed else command
    os.execvp(command[0], command)


class Ingest(threading.Thread):
    """Ingest runs one after the other, about half of them killed somewhere."""

    def __init__(self, world: World, seed: int, faults: Faults, pause: float) -> None:
        super().__init__()
        self.world, self.chance, self.faults, self.pause = world, random.Random(f"{seed}i"), faults, pause
        self.runs: list[Event] = []

    def run(self) -> None:
        kill = True  # the first, so that also a short run has it
        while not self.faults.over.wait(self.pause):
            event = Event("ingest", "", time.time())
            self.runs.append(event)
            code, document = self.world.ingest(self.chance.uniform(2, 14) if kill else None)
            event.kind = "SIGKILL ingest" if code < 0 else "ingest"
            event.what, event.end = f"exit code {code}, {document.get('rows', 0)} rows", time.time()
            kill = self.chance.random() < 0.5


def plant(world: World) -> str:
    """Delete the newest object of one stream: a message is lost."""
    client = boto3.client("s3", endpoint_url=world.storage)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=plan.BUCKET, Prefix=plan.PREFIX)
    keys = [item for page in pages for item in page.get("Contents", ()) if parse_key(item["Key"])]
    newest = str(max(keys, key=lambda item: item["LastModified"])["Key"])
    client.delete_object(Bucket=plan.BUCKET, Key=newest)
    return newest


def live(world: World, seed: int, seconds: float) -> tuple[Faults, Watch, list[Event], App]:
    """Devices and faults, until all that was published is acknowledged and exported."""
    watch, faults = Watch(world), Faults(world, seed, seconds)
    ingest = Ingest(world, seed, faults, min(30.0, seconds / 4))
    app = App(world.data[plan.EMBEDDED], seed)
    threads: list[Watch | Faults | Ingest | App] = [watch, faults, ingest, app]
    work = world.start_devices(seconds)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and work.poll() is None and not faults.broken:
            for gateway in world.gateways.values():
                with gateway.lock:
                    if not gateway.running():
                        gateway.start()
            time.sleep(0.2)
        faults.stop()
        ingest.join()
        app.stop()
        if not faults.broken:
            work.wait(300)
            for gateway in world.gateways.values():
                wait_for(f"the exports of {gateway.name}", gateway.caught_up, EXPORTED)
    finally:
        work.kill()
        work.wait()
        faults.stop()
        if ingest.is_alive():
            ingest.join()
        watch.stop()
        if app.is_alive():
            app.stop(0)
    return faults, watch, ingest.runs, app


def settle(world: World) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Stop the gateways; returns where each stream ends, and what is wrong with what they leave."""
    ends, wrong = {}, []
    for gateway in world.gateways.values():
        for stream in (gateway.status() or {"streams": []})["streams"]:
            if stream["name"] != plan.LIMITED:  # it is not exported
                ends[gateway.name, stream["name"]] = stream["newest"] + 1
        gateway.stop()
        command = [sys.executable, "-m", "bridge", "verify", "-c", str(gateway.config)]
        checked = subprocess.run(command, capture_output=True, text=True)
        if checked.returncode != 0:
            wrong.append(f"verify of {gateway.name}: {checked.stdout[-300:]}{checked.stderr[-300:]}")
        wrong += evidence.internal_errors(gateway.log) + gateway.faults
    world.services.collect()
    return ends, wrong


def topics_of_limited(world: World) -> list[str]:
    """The topics of the messages in the limited stream, whose gateway has stopped."""
    command = [sys.executable, "-m", "bridge", "streams", "read", plan.LIMITED, "--all", "--json"]
    command += ["-c", str(world.gateways[plan.EMBEDDED].config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line)["topic"] for line in done.stdout.splitlines()]


def judge(
    root: Path, faults: Faults, watch: Watch, ends: dict[tuple[str, str], int], last: Check, app: App
) -> list[Check]:
    """Hold everything that was seen against what must hold."""
    changes = sum(event.kind == "password changed" for event in faults.events)
    devices, rows = evidence.devices(root / "devices.json"), evidence.rows(root / "lake")
    checks = [
        verdict.all_acknowledged(devices),
        verdict.none_missing(devices, rows, faults.unsaved),
        verdict.none_twice(rows),
        verdict.contiguous(rows, ends),
        verdict.once_at_qos_2(devices, rows),
        verdict.nothing_invented(devices, rows),
        verdict.in_order(devices, rows),
        verdict.sessions_kept(devices),
        verdict.read_back(len(app.acknowledged), app.read, app.wrong),
        verdict.limited(topics_of_limited(watch.world)),
        verdict.thrown_out(changes, faults.thrown_out),
        last,
    ]
    for kind, counts in watch.world.delivered.counts.items():
        checks.append(verdict.delivered(kind, rows, counts))
    for name in watch.world.gateways:
        checks += verdict.flat(watch.samples, name) + verdict.flat(watch.samples, f"{name} worker")
    return checks


def soak(options: argparse.Namespace, root: Path, disk: Path | None) -> int:
    """One run; returns the exit code."""
    world = World(root, disk, options.devices)
    try:
        faults, watch, runs, app = live(world, options.seed, options.minutes * 60)
        if faults.broken:
            print("given up:", *faults.broken, sep="\n")
            return 1
        ends, wrong = settle(world)
        sent = json.loads((root / "devices.json").read_text())
        (root / "devices.json").write_text(json.dumps([*sent, app.result()]))
        if options.plant:
            print("planted: deleted", plant(world))
        code, document = world.ingest()
        wrong += [f"worker {pid} was left behind" for pid in watch.orphans()]
        checks = judge(root, faults, watch, ends, verdict.ingested(code, document), app)
        checks.append(verdict.clean(wrong))
        good = report.write(root, options, checks, world, faults.events + runs, watch)
    finally:
        world.close()
    if disk is not None and not good:
        shutil.copytree(disk, root / "disk-kept", symlinks=True)
    return 0 if good else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="how long the devices publish [20]")
    parser.add_argument("--devices", type=int, default=plan.DEVICES, help="how many [200]")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the faults [the time]")
    parser.add_argument("--output", type=Path, default=Path("build/soak"), help="directory [build/soak]")
    parser.add_argument("--plant", action="store_true", help="lose something on purpose")
    options = parser.parse_args()
    mounts = own_mounts()
    root = options.output.resolve()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    disk = root / "disk" if mounts else None
    if disk is None:
        print("no mounts here: the disk will not be full")
    else:
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], check=True)
    print(
        f"seed {options.seed}, {options.minutes:g} minutes, {options.devices} devices, output in {root}",
        flush=True,
    )
    return soak(options, root, disk)


if __name__ == "__main__":
    sys.exit(main())
