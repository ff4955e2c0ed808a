"""The units, as systemd's own tools judge them, and what install-service makes of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
UNITS = sorted(
    path.name for path in (CHECKOUT / "systemd").iterdir() if path.suffix in (".service", ".timer")
)


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing; install it: sudo apt-get install systemd")
    command = ["systemd-analyze", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def install(root: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "install-service", "--root", str(root)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    install(tmp_path)
    return tmp_path


def test_the_units_are_valid(root: Path, tmp_path: Path) -> None:
    units = [root / "etc/systemd/system" / name for name in UNITS]
    for unit in units:
        text = unit.read_text()
        unit.write_text(text.replace(f"{sys.prefix}/bin/streambridge", "/bin/true"))
    done = analyze("verify", *units)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("unit", "most"), [("streambridge.service", 13), ("streambridge-ingest.service", 20)]
)
def test_the_sandbox_leaves_little_exposed(unit: str, most: int) -> None:
    done = analyze("security", "--offline=true", f"--threshold={most}", CHECKOUT / "systemd" / unit)
    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.parametrize("unit", ["streambridge.service", "streambridge-ingest.service"])
def test_no_core_file_takes_secrets_to_the_disk(unit: str) -> None:
    assert "\nLimitCORE=0\n" in (CHECKOUT / "systemd" / unit).read_text()


def test_every_unit_starts_this_installation(root: Path) -> None:
    for name in ("streambridge.service", "streambridge-ingest.service"):
        text = (root / "etc/systemd/system" / name).read_text()
        assert f"\nExecStart={sys.prefix}/bin/streambridge " in text
        assert "/opt/" not in text


def test_the_command_is_found_without_its_path_and_another_one_is_left_alone(root: Path) -> None:
    link = root / "usr/local/bin/streambridge"
    assert link.readlink() == Path(sys.prefix) / "bin/streambridge"
    link.unlink()
    link.write_text("mine")
    assert (
        f"kept {link}, which is another command; the service uses {sys.prefix}/bin/streambridge"
        in install(root)
    )
    assert link.read_text() == "mine"


def test_the_configuration_of_the_service_keeps_data_where_the_unit_allows_it(root: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bridge",
            "check",
            "--json",
            "-c",
            root / "etc/streambridge/streambridge.toml",
        ],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "unknown key" not in done.stdout
    lines = (root / "etc/streambridge/streambridge.toml").read_text().splitlines()
    assert 'data_dir = "/var/lib/streambridge"' in lines
    assert "StateDirectory=streambridge" in (root / "etc/systemd/system/streambridge.service").read_text()


@pytest.mark.parametrize(
    ("link", "goes_to"),
    [
        ("etc", "outside"),
        ("etc/systemd/system", "outside"),
        ("etc/systemd/system/streambridge.service", "outside/file"),
        ("etc/streambridge/streambridge.toml", "outside/gone"),
        ("usr/local/bin", "outside"),
    ],
)
def test_a_link_below_root_leads_nothing_elsewhere(tmp_path: Path, link: str, goes_to: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("another's")
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(tmp_path / goes_to)
    done = subprocess.run(
        [sys.executable, "-m", "bridge", "install-service", "--root", root],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "another's"
    if link.endswith("toml"):  # a configuration is never written over, wherever it is
        assert f"kept {root / link}" in done.stdout
    else:
        assert done.returncode == 78
        assert "remove it" in done.stderr


def test_a_token_for_port_8088_is_made_once_and_named_in_the_configuration(root: Path) -> None:
    token = root / "etc/streambridge/greengrass-token"
    assert token.stat().st_mode & 0o777 == 0o600
    made = token.read_text()
    assert len(made.strip()) >= 32
    config = (root / "etc/streambridge/streambridge.toml").read_text()
    assert '\ntoken_file = "/etc/streambridge/greengrass-token"\n' in config
    assert f"kept {token}" in install(root)
    assert token.read_text() == made


def test_an_update_leaves_the_configuration_alone(root: Path) -> None:
    config = root / "etc/streambridge/streambridge.toml"
    config.write_text("# mine\n")
    unit = root / "etc/systemd/system/streambridge.service"
    unit.write_text("")
    told = install(root)
    assert f"kept {config}" in told
    assert config.read_text() == "# mine\n"
    assert "[Service]" in unit.read_text()
    assert (root / "etc/sysusers.d/streambridge.conf").is_file()
    assert (root / "etc/tmpfiles.d/streambridge.conf").is_file()
