"""The component for Greengrass: a recipe as documented for both nuclei, and the lifecycle as they run it.

The rules for recipes are those of the recipe reference of AWS and, for nucleus lite, of its page on what
recipes it supports: keys are case-sensitive, `runtime` is required, there is no Shutdown, Recover or
SkipIf, and variables are replaced in scripts and environment variables only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import paho.mqtt.publish as mqtt
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

CHECKOUT = Path(__file__).parents[2]
COMPONENT = CHECKOUT / "examples/greengrass"
RECIPE = yaml.safe_load((COMPONENT / "recipe.yaml").read_text())
VERSION = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
KEYS = {
    (): {
        *(
            "RecipeFormatVersion",
            "ComponentName",
            "ComponentVersion",
            "ComponentType",
            "ComponentDescription",
        ),
        *("ComponentPublisher", "ComponentDependencies", "ComponentConfiguration", "Manifests"),
    },
    ("Manifests",): {"Platform", "Lifecycle", "Artifacts"},
    ("Manifests", "Platform"): {"os", "runtime"},
    ("Manifests", "Lifecycle"): {"Install", "Run"},
    ("Manifests", "Lifecycle", "Install"): {"Timeout", "RequiresPrivilege", "Script", "Setenv"},
    ("Manifests", "Lifecycle", "Run"): {"RequiresPrivilege", "Script", "Setenv"},
    ("Manifests", "Artifacts"): {"Uri", "Unarchive", "Permission"},
}
VARIABLES = {"artifacts:path", "work:path", "iot:thingName", "configuration:/settings"}


def walk(value: Any, path: tuple[str, ...] = ()) -> None:
    """Check the keys of each map whose keys are fixed."""
    for one in value if isinstance(value, list) else [value]:
        if path in KEYS:
            assert set(one) <= KEYS[path], path
            for key in one:
                walk(one[key], (*path, key))


def component() -> Any:
    spec = importlib.util.spec_from_file_location("component", COMPONENT / "component.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replaced(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\{([^}]*)\}", lambda found: variables[found[1]], text)


def test_the_recipe_is_what_both_nuclei_take() -> None:
    walk(RECIPE)
    assert RECIPE["RecipeFormatVersion"] == "2020-01-25"
    assert RECIPE["ComponentVersion"] == VERSION
    assert re.fullmatch(r"[a-zA-Z0-9-_.]{1,128}", RECIPE["ComponentName"])
    (manifest,) = RECIPE["Manifests"]
    assert manifest["Platform"] == {"os": "linux", "runtime": "*"}
    for step in manifest["Lifecycle"].values():
        assert set(re.findall(r"\{([^}]*)\}", step["Script"])) <= VARIABLES
        assert step["RequiresPrivilege"] is False
        for value in step.get("Setenv", {}).values():
            assert set(re.findall(r"\{([^}]*)\}", value)) <= VARIABLES
    assert "{" not in json.dumps(RECIPE["ComponentConfiguration"]["DefaultConfiguration"]).replace(
        '{"', ""
    ).replace(": {", "")
    named = {uri.rpartition("/")[2] for uri in (one["Uri"] for one in manifest["Artifacts"])}
    assert named == {f"streambridge-{VERSION}-py3-none-any.whl", "gateway.txt", "component.py"}
    assert all(f"/{VERSION}/" in one["Uri"] for one in manifest["Artifacts"])


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters=""), max_size=8)
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_settings_in_json_are_the_same_settings_in_toml(settings: dict[str, Any]) -> None:
    assert tomllib.loads(component().toml(settings)) == settings


@pytest.mark.slow(seconds=60)
def test_the_component_installs_stores_and_keeps_its_messages_over_a_kill_and_an_update(
    tmp_path: Path,
) -> None:
    artifacts, work = tmp_path / "artifacts", tmp_path / "work"
    artifacts.mkdir()
    work.mkdir()
    shutil.copy(COMPONENT / "component.py", artifacts)
    shutil.copy(CHECKOUT / "requirements/gateway.txt", artifacts)
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", CHECKOUT, clone], check=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir", artifacts, clone], check=True)
    settings = RECIPE["ComponentConfiguration"]["DefaultConfiguration"]["settings"]
    settings = settings | {"mqtt": {"listen": ["tcp://127.0.0.1:0"]}, "http": {"listen": ""}}
    variables = {
        "artifacts:path": str(artifacts),
        "work:path": str(work),
        "iot:thingName": "plant-7's",
        "configuration:/settings": json.dumps(settings),
    }
    lifecycle = RECIPE["Manifests"][0]["Lifecycle"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("STREAMBRIDGE_")}
    for payload in ("21.5", "22.0"):
        install = replaced(lifecycle["Install"]["Script"], variables)
        subprocess.run(["sh", "-c", install], check=True, capture_output=True)
        given_to_it = {key: replaced(value, variables) for key, value in lifecycle["Run"]["Setenv"].items()}
        gateway = subprocess.Popen(
            ["sh", "-c", replaced(lifecycle["Run"]["Script"], variables)],
            env=kept | given_to_it, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            assert gateway.stdout is not None
            ready = next(line for line in gateway.stdout if " msg=ready " in line)
            port = int(ready.partition("mqtt://127.0.0.1:")[2].split()[0].split(",")[0])
            mqtt.single("telemetry/a", payload, qos=1, hostname="127.0.0.1", port=port)
        finally:
            os.killpg(gateway.pid, signal.SIGKILL)
            gateway.wait()
            gateway.stdout.close()  # type: ignore[union-attr]
        (artifacts / "gateway.txt").write_text((artifacts / "gateway.txt").read_text() + "\n")  # an update
    read = [
        work / "venv/bin/streambridge",
        "streams",
        "read",
        "telemetry",
        "--json",
        "-c",
        work / "streambridge.toml",
    ]
    lines = subprocess.check_output(read, text=True, env=kept).splitlines()
    assert [json.loads(line)["payload"] for line in lines] == ["21.5", "22.0"]
    assert tomllib.loads((work / "streambridge.toml").read_text())["gateway"]["id"] == "plant-7's"
