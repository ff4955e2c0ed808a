"""The documentation says what the code does: generated pages, links, commands, configurations, requests."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import msgspec
import paho.mqtt.client as paho
import pytest
import typer
import yaml

from benchmarks.testbed.local import free_port
from bridge.cli import app
from bridge.config import load
from bridge.config.settings import Config
from bridge.http.metrics import METRICS
from bridge.plugin import discovery
from bridge.streams.segment import FRAME, PAIR
from tests.http.conftest import Service, eventually

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ = [
    *PAGES,
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/results.md")),
]
FENCE = re.compile(r"^```(\w*)(?: title=\"(.*?)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What the site's search does: the first pages for some words, all of which must occur.
SEARCH = """
const [lunr, path, words] = process.argv.slice(1), {docs} = JSON.parse(require("fs").readFileSync(path));
const index = require(lunr)(function () {
  this.ref("location");
  this.field("title", {boost: 1000});
  this.field("text");
  docs.forEach(doc => this.add({...doc, text: doc.text.replace(/<[^>]+>/g, " ")}));
});
const found = index.search(words.split(" ").map(word => "+" + word.toLowerCase()).join(" "));
const pages = new Set(found.map(one => one.ref.split("#")[0]));
console.log([...pages].slice(0, 10).join("\\n"));
"""
COMMAND = re.compile(r"(?:^|&& |sudo |until |-u streambridge |/bin/)streambridge (.*)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(language: str, pages: list[Path] = PAGES) -> Iterator[tuple[Path, str, str]]:
    """(page, title, text) of each block of code in a language."""
    for page in pages:
        for found in FENCE.finditer(page.read_text()):
            if found[1] == language:
                yield page, found[2] or "", found[3]


def test_pages_made_from_the_code_are_up_to_date() -> None:
    program = "import json, runpy; print(json.dumps(runpy.run_path('docs/generate.py')['pages']()))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("STREAMBRIDGE_")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    stale = [path for path, text in json.loads(done.stdout).items() if (DOCS / path).read_text() != text]
    assert stale == [], "write them anew with `python docs/generate.py`"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and forges make them."""
    text = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in READ:
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", json.dumps(yaml.safe_load(text)["nav"])))
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    assert listed == pages
    index = set(LINK.findall((DOCS / "README.md").read_text()))
    decisions = {f"adr/{page}" for page in LINK.findall((DOCS / "adr" / "README.md").read_text())}
    assert pages - {"README.md"} <= index | decisions


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the build reaches no other server."""
    pytest.importorskip("material", reason="pip install '.[docs]'")
    directory = tmp_path_factory.mktemp("site")
    environment = os.environ | dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", directory],
        cwd=ROOT,
        env=environment | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_the_site_builds_offline_and_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\s\">]+)|<link[^>]*stylesheet[^>]*(https?:\S+)"
    )
    foreign = {found for page in site.rglob("*.html") for found in loads.findall(page.read_text())}
    assert foreign == set()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("pause export", "howto/pause-exports.html"),
        ("data late", "howto/late-data.html"),
        ("STREAM_MANAGER_SERVER_PORT", "howto/greengrass.html"),
        ("mosquitto external broker", "howto/external-broker.html"),
        ("plugin contract suite", "plugins.html"),
        ("paho-mqtt programs", "howto/mqtt-clients.html"),
        ("asyncio client", "howto/python-client.html"),
    ],
)
def test_the_search_of_the_site_finds_the_page_that_helps(site: Path, words: str, page: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is missing; install it: sudo apt-get install nodejs")
    mkdocs = pytest.importorskip("mkdocs")
    search = Path(mkdocs.__file__).parent / "contrib" / "search" / "templates" / "search" / "lunr.js"
    done = subprocess.run(
        [node, "-e", SEARCH, search, site / "search" / "search_index.json", words],
        capture_output=True,
        text=True,
    )
    assert page in done.stdout.split()[:3], f"{words}: {done.stdout}{done.stderr}"


def test_every_command_in_the_documentation_exists_with_its_options() -> None:
    root = typer.main.get_command(app)
    wrong, checked = [], 0
    for page, _, text in blocks("sh", READ):
        given = text.replace("$INGEST_OPTIONS", "--source s3://my-bucket/gateways --warehouse lake")
        for line in given.replace("\\\n", " ").splitlines():
            found = COMMAND.search(line.partition(" #")[0])
            if found is None:
                continue
            checked += 1
            words = shlex.split(re.split(r" (?:2?>|\||&)", found[1])[0])
            if problem := refuses(root, words):
                wrong.append(f"{page.name}: {line.strip()}: {problem}")
    assert wrong == []
    assert checked > 20


def refuses(command: Any, words: list[str]) -> str | None:
    """What the command line has against these words; nothing is run."""
    try:
        context = command.make_context("streambridge", [*words], resilient_parsing=False)
        inner = getattr(command, "commands", {})
        left = [*context._protected_args, *context.args] if inner else []
        if left and left[0] in inner:
            return refuses(inner[left[0]], left[1:])
        return f"no command {left[0]!r}" if left else None
    except typer.Exit:  # such as by --help
        return None
    except Exception as error:
        return repr(error)


def test_the_settings_of_the_timer_are_for_root_alone_because_they_may_hold_secrets(tmp_path: Path) -> None:
    page = (DOCS / "ingest.md").read_text().partition("### Laptop or a small server")[2]
    (commands,) = (text for _, _, text in FENCE.findall(page) if "ingest.env" in text)
    lines = [line for line in commands.replace("\\\n", " ").splitlines() if "systemctl" not in line]
    local = "\n".join(lines).replace("sudo ", "").replace("/etc/streambridge", str(tmp_path))
    assert not re.search("/(etc|opt)/", local)  # it is run here
    subprocess.run(["sh", "-ec", f"umask 022\n{local}"], check=True, stdout=subprocess.DEVNULL)
    written = tmp_path / "ingest.env"
    assert written.read_text().startswith("INGEST_OPTIONS=--source s3://")
    assert stat.S_IMODE(written.stat().st_mode) == 0o600


def test_every_configuration_in_the_documentation_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    registry = discovery.load()
    checked = 0
    for page, _, text in blocks("toml", READ):
        if "project" in tomllib.loads(text) or page == DOCS / "reference" / "configuration.md":
            continue
        path = tmp_path / "streambridge.toml"
        path.write_text(text)
        settings = load(path)
        for definition in settings.streams.values():
            shipped = {k: v for k, v in definition.export_definition.items() if k in registry.exporters}
            registry.check(shipped)
        checked += 1
    assert checked > 10


def test_each_exporter_has_a_page_with_its_rights_an_example_and_its_failures() -> None:
    documented = set()
    for page in sorted((DOCS / "exporters").glob("*.md")):
        text = page.read_text()
        kinds = re.findall(r"<!-- made by docs/generate.py: (\S+) -->", text)
        if page.name == "README.md":
            assert kinds == ["every", "batches", "aws"]
            continue
        documented |= set(kinds)
        heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
        wanted = {"Limits", "Options", "Example", "Rights", "When it fails", "What to look at"}
        assert wanted <= set(heads), page.name
        assert f".export.{kinds[0]}]]" in text, page.name
    assert documented == {
        kind
        for kind, cls in discovery.load().exporters.items()
        if cls.__module__.startswith(("streambridge_", "bridge.plugin."))
    }


# Rights that are not called like the operation that needs them.
OPERATIONS = {"s3:ListBucket": "ListObjectsV2", "s3:ListMultipartUploadParts": "ListParts"}


def test_the_rights_of_the_exporters_are_rights_that_there_are() -> None:
    session = botocore.session.get_session()
    allowed = set()
    for page, _, text in blocks("json", sorted((DOCS / "exporters").glob("*.md"))):
        found = json.loads(text)
        if "Statement" not in found:  # another example
            continue
        for statement in found["Statement"]:
            actions = statement["Action"]
            for action in [actions] if isinstance(actions, str) else actions:
                service, operation = action.split(":")
                known = session.get_service_model(service).operation_names
                assert OPERATIONS.get(action, operation) in known, page
                allowed.add(action)
    assert len(allowed) == 10


def test_every_test_that_the_documentation_names_is_there() -> None:
    paths = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "bridge" / "plugin").glob("*testing.py")]
    sources = "".join(path.read_text() for path in paths)
    there = set(re.findall(r"def (test_\w+)", sources))
    named = {name for page in READ for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert len(named) > 40
    assert named - there == set()


def test_the_size_of_a_message_on_the_disk_is_that_of_the_format() -> None:
    text = (DOCS / "howto" / "disk-sizing.md").read_text()
    one, alone = PAIR.size, FRAME.size + PAIR.size
    assert f"plus {one} bytes" in text
    assert (
        f"header of {FRAME.size} bytes. In the worst case each message has its own frame: {alone} bytes"
        in text
    )
    assert f"(topic + payload + {alone}) × 86,400" in text
    rows = re.findall(
        r"^\| [\d,]+ \| ([\d,]+) \| (\d+) B \| (\d+) B \| ([\d.]+) GB \| ([\d.]+) GB \|$", text, re.MULTILINE
    )
    assert len(rows) == 3
    for rate, topic, payload, *said in rows:
        day = int(rate.replace(",", "")) * (int(topic) + int(payload) + alone) * 86_400 / 1e9
        assert [f"{days * day:.2g}" for days in (1, 3)] == said


def test_what_takes_the_place_of_a_parameter_of_stream_manager_is_a_setting() -> None:
    page = (DOCS / "howto" / "greengrass.md").read_text()
    named = re.findall(r"`(\w+)` in `\[([\w.]+)\]`", page)
    assert len(named) > 5
    for key, section in named:
        table: Any = Config
        for name in section.split("."):
            table = next(field.type for field in msgspec.structs.fields(table) if field.encode_name == name)
        assert key in table.__struct_encode_fields__, f"[{section}] {key}"


def test_the_alerts_use_metrics_that_there_are() -> None:
    alerts = " ".join(block for _, _, block in blocks("yaml") if "alert:" in block)
    used = set(re.findall(r"streambridge_(\w+)", alerts))
    assert len(used) > 10
    assert "export_lost_messages_total" in used
    assert used <= METRICS.keys()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path, "")
    yield running
    assert running.stop() == 0


def test_the_requests_of_the_reference_are_answered_as_it_says(service: Service) -> None:
    said = [(title, json.loads(text)) for page, title, text in blocks("json") if page.name == "topics.md"]
    assert len(said) >= 20
    with service.device("asking") as client:
        replies: list[bytes] = []
        client.on_message = lambda *args: replies.append(args[2].payload)
        for (operation, request), (_, expected) in zip(said[::2], said[1::2], strict=True):
            assert ask(client, replies, operation, request) == without_times(expected), operation


def ask(client: paho.Client, replies: list[bytes], operation: str, request: Any) -> Any:
    client.publish(f"streambridge/asking/{operation}", json.dumps(request))
    eventually(lambda: replies)
    return without_times(json.loads(replies.pop()))


TIMES = ("ingestTime", "oldestIngestTime", "newestIngestTime", "version")


def without_times(value: Any) -> Any:
    """The same, but for what is never twice the same."""
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


@pytest.mark.spark
@pytest.mark.slow
def test_the_tutorial_leads_to_the_table(tmp_path: Path) -> None:
    if shutil.which("mosquitto_pub") is None:
        pytest.skip("mosquitto_pub is missing; install it: sudo apt-get install mosquitto-clients")
    text = (DOCS / "tutorial.md").read_text()
    for port in ("1883", "9464", "5000"):
        text = re.sub(rf"\b{port}\b", str(free_port()), text)
    found: dict[str, list[str]] = {"sh": [], "toml": []}
    for language, title, block in FENCE.findall(text):
        if not title:
            found.setdefault(language, []).append(block)
    (tmp_path / "gateway.toml").write_text("".join(found["toml"]))
    (tmp_path / "tutorial.sh").write_text("set -u\n" + "".join(found["sh"]))
    beside = Path(sys.executable).parent
    (tmp_path / "streambridge").write_text(f'#!/bin/sh\nexec {sys.executable} -m bridge "$@"\n')
    (tmp_path / "streambridge").chmod(0o755)
    done = subprocess.run(
        ["bash", "tutorial.sh"],
        cwd=tmp_path,
        env=os.environ
        | {"XDG_RUNTIME_DIR": str(tmp_path)}  # memory streams, which would stay in /dev/shm
        | {"PATH": f"{tmp_path}:{beside}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert re.search(r"plant-7 +sensors +0\.\.100 +101 ", done.stdout), done.stdout + done.stderr
    assert "\ncomplete: 101 rows, missing 0" in done.stdout
    (rows,) = found["text"]
    assert f"\n{rows}" in done.stdout
    assert done.returncode == 0


def test_every_test_that_the_threat_model_names_exists() -> None:
    text = (DOCS / "threat-model.md").read_text()
    places = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "bridge" / "plugin").glob("*testing.py")]
    there = {name for path in places for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 100
    assert named <= there, sorted(named - there)
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
