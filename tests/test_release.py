"""`make release` builds checked packages, and refuses what does not agree. Runs in a clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]


def git(tree: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=release", "-c", "user.email=release@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=tree, check=True, capture_output=True)


def release(tree: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    return subprocess.run(
        [sys.executable, ".ci/release.py"], cwd=tree, env=environment, capture_output=True, text=True
    )


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


@pytest.mark.slow(seconds=120)
def test_a_release_holds_checked_packages_and_their_checksums(tree: Path) -> None:
    stale = tree / "dist" / "streambridge-0.0.1.tar.gz"
    stale.parent.mkdir()
    stale.write_text("of an earlier release")
    done = release(tree)
    assert done.returncode == 0, done.stderr
    expected = {f"streambridge-{version(tree)}.tar.gz", f"streambridge-{version(tree)}-py3-none-any.whl"}
    if shutil.which("dpkg-deb"):
        architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
        expected.add(f"streambridge_{version(tree)}_{architecture}.deb")
    dist = tree / "dist"
    assert {path.name for path in dist.iterdir()} == expected | {"SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=dist, check=True)
    assert {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()} == expected
