"""What is installed is what is in the tree, and the gateway part stays light."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import botocore
import pytest
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
INSIDE = {"plugins": "bridge/_plugins", "config": "bridge/_config", "systemd": "bridge/_systemd"}
SOURCES = ["bridge", *INSIDE, "pyproject.toml", "README.md", "LICENSE"]
# What a small gateway must not need; only the extras bring it.
EXTRAS = {"pyspark", "pyarrow", "numpy", "pandas", "pyiceberg", "amqtt"}


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STREAMBRIDGE_"))
    }
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_sources(to: Path) -> Path:
    """The files that a build reads; building in the checkout would leave files there."""
    for name in SOURCES:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
        else:
            shutil.copy(source, to / name)
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_sources(tmp_path_factory.mktemp("tree"))
    out = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", out,
        cwd=tree,
    )  # fmt: skip
    (built,) = out.glob("streambridge-*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as pip does it, beside the dependencies of this environment."""
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def test_the_list_of_packages_is_complete() -> None:
    found = {
        ".".join(path.parent.relative_to(CHECKOUT).parts) for path in (CHECKOUT / "bridge").rglob("*.py")
    }
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed - {"bridge._plugins", "bridge._config", "bridge._systemd"} == found


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    expected = {path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "bridge").rglob("*.py")}
    pages = [*(CHECKOUT / "bridge/http/page").iterdir(), *(CHECKOUT / "bridge/ingest").glob("fleet.[hcj]*")]
    expected |= {path.relative_to(CHECKOUT).as_posix() for path in pages}
    expected.add("bridge/py.typed")
    for top, inside in INSIDE.items():
        suffixes = {"plugins": {".py"}, "config": {".toml"}}.get(top)
        expected |= {
            f"{inside}/{path.name}"
            for path in (CHECKOUT / top).iterdir()
            if path.is_file() and (suffixes is None or path.suffix in suffixes)
        }
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - metadata == expected
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_an_installed_command_finds_its_plugins_and_its_configuration(site: Path, tmp_path: Path) -> None:
    env = {"PYTHONPATH": str(site)}
    where = run(sys.executable, "-c", "import bridge; print(bridge.__file__)", cwd=tmp_path, **env)
    assert where.startswith(str(site))
    command = site / "bin" / "streambridge"
    release = PROJECT["project"]["version"]
    assert run(sys.executable, command, "--version", cwd=tmp_path, **env) == f"streambridge {release}\n"
    found = json.loads(run(sys.executable, command, "plugins", "--json", cwd=tmp_path, **env))
    shipped = {path.stem for path in (CHECKOUT / "plugins").glob("*.py")} | {"consumer"}
    assert {plugin["name"]: plugin["error"] for plugin in found} == dict.fromkeys(shipped)
    assert (site / "bridge" / "_config" / "streambridge.toml").is_file()


def test_the_gateway_depends_on_nothing_heavy(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        needed = re.findall(r"^Requires-Dist: (.*)$", content.read(name).decode(), re.MULTILINE)
    seen: set[str] = set()
    waiting = [(Requirement(line), frozenset[str]()) for line in needed]
    while waiting:
        requirement, extras = waiting.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        if requirement.name not in seen:
            seen.add(requirement.name)
            try:
                deeper = requires(requirement.name) or []
            except PackageNotFoundError:  # wanted for another platform only
                deeper = []
            waiting += [(Requirement(line), frozenset(requirement.extras)) for line in deeper]
    assert "msgspec" in seen
    assert not {name.lower() for name in seen} & EXTRAS


def test_the_service_runs_without_the_extras(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules |= dict.fromkeys({EXTRAS})  # importing one is an ImportError now
import bridge.service.service, bridge.cli, bridge.plugin.discovery
print([plugin.error for plugin in bridge.plugin.discovery.load().found])
"""
    errors = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(CHECKOUT))
    assert set(json.loads(errors.replace("None", "null"))) <= {None}


def test_the_command_starts_without_what_only_the_service_needs(tmp_path: Path) -> None:
    program = "import sys, bridge.cli; print(*(name for name in sys.modules))"
    loaded = set(run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(CHECKOUT)).split())
    assert not loaded & (EXTRAS | {"boto3", "uvloop", "paho.mqtt.client"})


def test_a_trimmed_installation_has_every_service_of_aws_that_an_exporter_uses(tmp_path: Path) -> None:
    shutil.copytree(Path(botocore.__file__).parent, tmp_path / "botocore")
    (tmp_path / "pip").mkdir()
    run(sys.executable, CHECKOUT / ".ci" / "trim", tmp_path, cwd=tmp_path)
    data = tmp_path / "botocore" / "data"
    assert sum(file.stat().st_size for file in data.rglob("*")) < 5_000_000
    assert not (tmp_path / "pip").exists()
    kept = {one.name for one in data.iterdir() if one.is_dir()}
    sources = [*(CHECKOUT / "plugins").glob("*.py"), *(CHECKOUT / "bridge" / "plugin").glob("*.py")]
    sources += (CHECKOUT / "bridge" / "config" / "checks").glob("*.py")
    used = {name for file in sources for name in re.findall(r'client\(\s*"([a-z0-9-]+)"', file.read_text())}
    assert {"s3", "kinesis"} <= used <= kept
    make = "import botocore.session as s; [s.Session().create_client(n, region_name='eu-west-1') for n in {}]"
    run(sys.executable, "-c", make.format(sorted(kept)), cwd=tmp_path)


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pins = dict(line.replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    unmet = [
        requirement.name
        for requirement in map(Requirement, wanted)
        if not requirement.specifier.contains(pins.get(requirement.name, "0"))
    ]
    assert unmet == []


@pytest.mark.slow(seconds=30)
def test_pip_install_alone_gives_a_gateway_that_works(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path / "tree")
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    run(environment / "bin" / "pip", "install", "--quiet", ".", cwd=tree)
    installed = json.loads(run(environment / "bin" / "pip", "list", "--format=json", cwd=tmp_path))
    assert not {package["name"].lower() for package in installed} & EXTRAS
    command = environment / "bin" / "streambridge"
    assert "Examples:" in run(command, "--help", cwd=tmp_path)
    assert "Usage:" in run(command, "ingest", "--help", cwd=tmp_path)
    shipped = (
        environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages" / "bridge" / "_config"
    )
    copied = shutil.copy(shipped / "streambridge.toml", tmp_path)
    run(command, "plugins", "-c", copied, cwd=tmp_path)


@pytest.fixture(scope="module")
def debs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Debian packages for this machine of two clones of the same commit."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("Debian packages are built on Debian")
    found = []
    for name in ("tree", "another"):
        tree = tmp_path_factory.mktemp(name) / name
        run("git", "clone", "--quiet", CHECKOUT, tree, cwd=tree.parent)
        for environment in ("venv", "environment"):  # the README's, and one of another name
            venv.create(tree / environment, symlinks=True)
        run("make", "deb", cwd=tree, TZ="Asia/Tokyo" if name == "another" else "UTC")
        found += (tree / "dist").glob("*.deb")
    return found


@pytest.mark.slow(seconds=120)
@pytest.mark.timeout(900)
def test_debian_packages_of_the_same_commit_are_the_same_bytes_and_lintian_finds_nothing(
    debs: list[Path],
) -> None:
    first, second = debs
    assert first.read_bytes() == second.read_bytes()
    if shutil.which("lintian") is None:
        pytest.skip("lintian is missing; install it: sudo apt-get install lintian")
    assert run("lintian", "--allow-root", "--fail-on", "error,warning", first, cwd=first.parent) == ""


@pytest.mark.slow(seconds=5)
def test_the_debian_package_holds_a_gateway_that_works(debs: list[Path], tmp_path: Path) -> None:
    package, _ = debs
    unpacked = tmp_path / "unpacked"
    run("dpkg-deb", "-x", package, unpacked, cwd=tmp_path)
    python = unpacked / "opt/streambridge/bin/python3"
    found = json.loads(run(python, "-m", "bridge", "plugins", "--json", cwd=tmp_path))
    assert {plugin["error"] for plugin in found} == {None}
    script = (unpacked / "opt/streambridge/bin/streambridge").read_text()
    assert script.startswith("#!/opt/streambridge/bin/python3\n")
    unit = (unpacked / "lib/systemd/system/streambridge.service").read_text()
    assert "ExecStart=/opt/streambridge/bin/streambridge run\n" in unit
    config = (unpacked / "etc/streambridge/streambridge.toml").read_text()
    assert 'data_dir = "/var/lib/streambridge"' in config.splitlines()
    assert str(tmp_path) not in script + unit + config


def purged(root: Path) -> str:
    """What the script of the Debian package says at a purge, with its directories below `root`."""
    script = re.sub(r"(?<![\w>])/(etc|var)/", rf"{root}/\1/", (CHECKOUT / ".ci/debian/postrm").read_text())
    (root / "bin").mkdir(parents=True)
    for name, text in {
        "chown": f'echo "$@" >>{root}/owned',
        "getent": "exit 2",
        "deb-systemd-helper": "",
        "systemctl": "",
    }.items():
        (root / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (root / "bin" / name).chmod(0o755)
    return run("sh", "-c", script, "postrm", "purge", cwd=root, PATH=f"{root / 'bin'}:/usr/bin:/bin")


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_purge_keeps_the_encryption_key_as_long_as_it_keeps_encrypted_messages(
    tmp_path: Path, encrypted: bool
) -> None:
    key, keys, log = (
        tmp_path / part
        for part in ("etc/streambridge/keys/k", "var/lib/streambridge/keys", "var/log/streambridge")
    )
    for directory in (key.parent, keys, log):
        directory.mkdir(parents=True)
    key.write_text("key")
    (log / "audit.jsonl").write_text("{}")
    (keys.parent / "lock").write_text("")
    if encrypted:
        (keys / "1").write_text("")
    told = purged(tmp_path)
    assert (key.exists(), log.exists(), keys.exists()) == (encrypted, False, True)
    assert (f"{tmp_path}/etc/streambridge is kept" in told) is encrypted
    owned = (tmp_path / "owned").read_text()
    assert (f"-hR root:root {tmp_path}/etc/streambridge\n" in owned) is encrypted


@pytest.mark.parametrize("full", [True, False])
def test_an_installation_on_a_full_disk_leaves_no_empty_token(tmp_path: Path, full: bool) -> None:
    script = re.sub(
        r"(?<![\w>])/(etc|opt)/", rf"{tmp_path}/\1/", (CHECKOUT / ".ci/debian/postinst").read_text()
    )
    token = tmp_path / "etc/streambridge/greengrass-token"
    python = tmp_path / "opt/streambridge/bin/python"
    for place in (token, python):
        place.parent.mkdir(parents=True)
    token.write_text("")  # of an earlier attempt
    python.write_text("#!/bin/sh\n" + ("exit 1" if full else "echo a-token") + "\n")
    for stub in (python, *(tmp_path / "bin" / name for name in ("systemd-sysusers", "systemd-tmpfiles"))):
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(stub.read_text() if stub == python else "#!/bin/sh\n")
        stub.chmod(0o755)
    helper = tmp_path / "bin/deb-systemd-helper"
    for name in ("deb-systemd-helper", "deb-systemd-invoke", "systemctl"):
        helper.with_name(name).write_text("#!/bin/sh\n")
        helper.with_name(name).chmod(0o755)
    command = ["sh", "-c", script, "postinst", "configure"]
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0, token.read_text()) == ((False, "") if full else (True, "a-token\n"))
    if full:  # and the next attempt makes one
        python.write_text("#!/bin/sh\necho a-token\n")
        assert subprocess.run(command, env=path, cwd=tmp_path).returncode == 0
        assert (token.read_text(), token.stat().st_mode & 0o777) == ("a-token\n", 0o600)
