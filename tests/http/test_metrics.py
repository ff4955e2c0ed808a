"""/metrics of a running service, as Prometheus reads it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bridge.http.metrics import METRICS
from tests.http.conftest import Service, eventually

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
UNITS = re.compile(r"_(bytes|seconds|messages|connections|sessions)(_total)?$")


@pytest.fixture(scope="module")
def service(start: Callable[..., Service]) -> Service:
    return start(
        """
[streams.sensors]
topics = ["sensors/#"]
[[streams.sensors.export.http]]
identifier = "office"
uri = "http://127.0.0.1:9/nobody"
[streams.full]
topics = ["full"]
max_size = "4KiB"
segment_size = "1KiB"
strategy_on_full = "OverwriteOldestData"
"""
    )


def scrape(service: Service) -> dict[str, Metric]:
    status, headers, body = service.request("/metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return {
        family.name.removeprefix("streambridge_"): family
        for family in text_string_to_metric_families(body.decode())
    }


def value(service: Service, metric: str, **labels: str) -> float:
    """One value; 0 where there is none yet."""
    samples = scrape(service)[metric].samples
    return next((sample.value for sample in samples if labels.items() <= sample.labels.items()), 0)


def test_it_has_the_metrics_that_are_listed_and_no_others(service: Service) -> None:
    found = {name: family for name, family in scrape(service).items() if not name.startswith("process_")}
    listed = {name.removesuffix("_total"): metric for name, metric in METRICS.items()}
    assert found.keys() == listed.keys()
    for name, family in found.items():
        assert (family.type, family.documentation) == (listed[name].kind, listed[name].help)
        for sample in family.samples:
            assert sample.labels.keys() == set(listed[name].labels), name


def test_names_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"[a-z_]+", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert metric.help.endswith("."), name
        if "bytes" in metric.help.lower() or "size" in metric.help.lower():
            assert UNITS.search(name), name


def test_the_dashboard_asks_for_metrics_and_labels_that_a_running_service_has(service: Service) -> None:
    there = {
        family.name.removeprefix("streambridge_") + ("_total" if family.type == "counter" else "")
        for family in scrape(service).values()
    }
    asked = 0
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name, matchers in re.findall(r"(?:streambridge_)?(\w+){(.*?)}", target["expr"]):
                known = set(METRICS[name].labels) if name in METRICS else set()
                assert name in there, panel["title"]
                assert shown | set(re.findall(r"(\w+)=", matchers)) <= known | {"instance"}, panel["title"]
                asked += 1
    assert asked > 20


def test_what_is_stored_and_what_waits_is_counted(service: Service) -> None:
    before = value(service, "stream_appended_messages", stream="sensors")
    service.publish(*[("sensors/a", b"21.5")] * 5)
    eventually(lambda: value(service, "stream_appended_messages", stream="sensors") == before + 5)
    labels = {"stream": "sensors", "export": "office", "kind": "http"}
    assert value(service, "export_lag_messages", **labels) == before + 5
    eventually(lambda: value(service, "export_failing", **labels) == 1)
    eventually(lambda: value(service, "export_lag_seconds", **labels) > 0)
    oldest = eventually(lambda: value(service, "stream_oldest_message_timestamp_seconds", stream="sensors"))
    assert oldest < value(service, "export_last_attempt_timestamp_seconds", **labels) + 60


def test_drops_are_counted_by_reason(service: Service) -> None:
    service.publish(*[("full", bytes(500))] * 20)
    dropped = eventually(
        lambda: value(service, "stream_dropped_messages", stream="full", reason="overwritten")
    )
    kept = value(service, "stream_messages", stream="full")
    assert dropped + kept == value(service, "stream_appended_messages", stream="full") == 20


def test_connections_are_counted_by_front_end(service: Service) -> None:
    with service.device("thermometer"):
        eventually(lambda: value(service, "connections", front_end="mqtt") == 1)
    eventually(lambda: value(service, "connections", front_end="mqtt") == 0)
    assert value(service, "accepted_connections", front_end="mqtt") >= 1


def test_the_process_is_measured_also_where_only_its_own_proc_is_seen(service: Service) -> None:
    found = scrape(service)
    assert 10e6 < found["process_resident_memory_bytes"].samples[0].value < 1e9
    assert found["process_cpu_seconds"].samples[0].value > 0
    assert 0 < found["process_open_fds"].samples[0].value < found["process_max_fds"].samples[0].value
    assert found["process_start_time_seconds"].samples[0].value == pytest.approx(time.time(), abs=300)
