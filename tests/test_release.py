"""`make release` builds checked packages, and refuses what does not agree. Runs in a clone."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[1]
HOME = "https://forge.example/streambridge/streambridge"


def git(tree: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=release", "-c", "user.email=release@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


def release(tree: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    command = [sys.executable, ".ci/release.py", *options]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clone whose commit has the tag of its version, and no other."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-tags", CHECKOUT, clone], check=True)
    changelog = clone / "CHANGELOG.md"
    text = changelog.read_text()
    released = re.sub(r"\n## \[?Unreleased\]?\n.*?(?=\n## \[)", "", text, flags=re.DOTALL)
    if released != text:
        changelog.write_text(released)
        git(clone, "commit", "--all", "--message", "leave out what is not released")
    git(clone, "tag", f"v{version(clone)}")
    return clone


def version(tree: Path) -> str:
    found = re.search(r'^version = "(.*)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def change_a_file(tree: Path) -> None:
    (tree / "README.md").write_text("changed")


def add_a_file(tree: Path) -> None:
    (tree / "bridge" / "left_behind.py").write_text("")


def commit_after_the_tag(tree: Path) -> None:
    git(tree, "commit", "--allow-empty", "--message", "later")


def raise_the_version_alone(tree: Path) -> None:
    path = tree / "pyproject.toml"
    path.write_text(path.read_text().replace(f'version = "{version(tree)}"', 'version = "99.0.0"'))
    git(tree, "commit", "--all", "--message", "raised")
    git(tree, "tag", "v99.0.0")


def begin_the_next_changelog(tree: Path) -> None:
    path = tree / "CHANGELOG.md"
    path.write_text(path.read_text().replace("\n## [", "\n## [Unreleased]\n\n- Something.\n\n## [", 1))
    git(tree, "commit", "--all", "--message", "began")
    git(tree, "tag", "--force", f"v{version(tree)}")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (change_a_file, "the work tree has changes (M README.md"),
        (add_a_file, "the work tree has changes (?? bridge/left_behind.py"),
        (commit_after_the_tag, "HEAD has no tag v"),
        (raise_the_version_alone, "pyproject.toml has version 99.0.0, and CHANGELOG.md begins with "),
        (begin_the_next_changelog, "CHANGELOG.md begins with Unreleased"),
    ],
)
def test_a_release_is_refused_while_tree_version_changelog_and_tag_disagree(
    tree: Path, spoil: Callable[[Path], None], says: str
) -> None:
    spoil(tree)
    done = release(tree)
    assert done.returncode == 1
    assert done.stderr.startswith("no release: ")
    assert says in done.stderr
    assert not (tree / "dist").exists()


@pytest.mark.slow(seconds=180)
@pytest.mark.timeout(1800)
def test_a_release_holds_checked_packages_and_their_signed_checksums(tree: Path, tmp_path: Path) -> None:
    stale = tree / "dist" / "streambridge-0.0.1.tar.gz"
    stale.parent.mkdir()
    stale.write_text("of an earlier release")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    here = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    done = release(tree, "--url", HOME, "--key", key, "--architecture", here)
    assert done.returncode == 0, done.stderr
    name = f"streambridge-{version(tree)}"
    expected = {f"{name}.tar.gz", f"{name}-py3-none-any.whl", f"{name}.cdx.json"}
    if shutil.which("dpkg-deb"):
        expected.add(f"streambridge_{version(tree)}_{here}.deb")
    if shutil.which("mmdebstrap"):
        expected.add(f"{name}-{here}.oci.tar")
    dist = tree / "dist"
    assert {path.name for path in dist.iterdir()} == expected | {"SHA256SUMS", "SHA256SUMS.sig"}
    assert {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()} == expected

    public = key.with_suffix(".pub").read_text()
    (dist / "allowed_signers").write_text(f"streambridge {public}")
    commands = re.search(
        "```sh\n(ssh-keygen -Y verify.*?)```", (CHECKOUT / "SECURITY.md").read_text(), re.DOTALL
    )
    assert commands is not None
    verify = ["sh", "-ec", commands[1]]
    subprocess.run(verify, cwd=dist, check=True)
    (dist / "SHA256SUMS").write_text((dist / "SHA256SUMS").read_text().replace("a", "b"))
    assert subprocess.run(verify, cwd=dist, capture_output=True).returncode != 0


def load(name: str) -> ModuleType:
    """A module of .ci, which is no package."""
    sys.path.insert(0, str(CHECKOUT / ".ci"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.mark.slow(seconds=40)
def test_sdists_and_wheels_of_the_same_commit_are_the_same_bytes_and_an_index_takes_them(
    tree: Path, tmp_path: Path
) -> None:
    build = (
        "import sys; from pathlib import Path; import release; release.prepare(Path('.'), sys.argv[2], '1.0')"
    )
    build += "; release.build(Path('.'), Path(sys.argv[1]))"
    made = []
    for number, (mask, zone) in enumerate(((0o022, "UTC"), (0o077, "Asia/Tokyo"))):
        clone, out = tmp_path / f"clone{number}", tmp_path / f"out{number}"
        subprocess.run(["git", "clone", "--quiet", tree, clone], check=True, umask=mask)
        out.mkdir()
        environment = os.environ | {"PYTHONPATH": str(CHECKOUT / ".ci"), "TZ": zone}
        command = [sys.executable, "-c", build, out, HOME]
        subprocess.run(command, cwd=clone, env=environment, check=True, umask=mask)
        made.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert len(made[0]) == 2
    assert made[0] == made[1]

    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    tools = ("twine==6.2.0", "pipx==1.8.0")
    subprocess.run([environment / "bin/pip", "install", "--quiet", *tools], check=True)
    packages = sorted((tmp_path / "out0").iterdir())
    subprocess.run([environment / "bin/twine", "check", "--strict", *packages], check=True)
    (wheel,) = (path for path in packages if path.suffix == ".whl")
    pipx = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    subprocess.run([environment / "bin/pipx", "install", wheel], env=os.environ | pipx, check=True)
    said = subprocess.check_output([tmp_path / "bin/streambridge", "--version"], text=True)
    assert said == f"streambridge {version(tree)}\n"


def test_the_description_for_an_index_has_no_relative_links_and_no_diagram_that_it_cannot_draw() -> None:
    published = load("readme").published
    text = (CHECKOUT / "README.md").read_text()
    linked = published(text, HOME, "1.2.3")
    assert f"({HOME}/blob/v1.2.3/benchmarks/results.md)" in linked
    assert f"({HOME}/raw/v1.2.3/docs/images/demo.png)" in linked
    targets = re.findall(r"\]\(([^)]*)\)", linked)
    assert {target for target in targets if not target.startswith(("https://", "http://", "#"))} == set()
    repository = [target.split("/v1.2.3/")[1] for target in targets if target.startswith(HOME)]
    assert [path for path in repository if not (CHECKOUT / path.split("#")[0]).exists()] == []
    for shown in (linked, published(text, "", "1.2.3")):
        assert "mermaid" not in shown
    assert "](" not in published("a [b](c.md) ![d](e.png)", "", "1")
