"""usage: PYTHON .ci/release.py [--untagged] [--url URL] [--key FILE] [--architecture NAME ...]

Builds the release of the commit that is checked out, in dist/: sdist, wheel, SBOM, and a Debian package and
an OCI image for each architecture (amd64 and arm64), with their SHA256SUMS. Checks each file the way its
first user meets it, and replaces dist/ only after every check has passed. The same commit gives the same
bytes, with the time of the commit; only an image also depends on the packages that Debian has on that day.

--url is the address of the repository, for the links of the package index; without it the packages have
none. --key is a private SSH key, or the public one of an agent's key; SHA256SUMS.sig is the signature.

Refuses, with a message and exit code 1, when the work tree has changes, or when pyproject.toml, the newest
heading of CHANGELOG.md and the tag of the commit disagree on the version. `--untagged` skips the tag, for a
rehearsal. Without dpkg-deb there is no Debian package, without mmdebstrap no image; where CI is set, that
is an error.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from readme import published, urls

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CONFIGURATION = """
[gateway]
data_dir = "data"
[mqtt]
listen = ["tcp://127.0.0.1:0"]
[greengrass]
listen = ""
[http]
listen = ""
[streams.sensors]
topics = ["sensors/#"]
"""
# Where a Debian package may put files.
PLACES = ("/opt/streambridge/", "/etc/streambridge/", "/lib/systemd/system/", "/usr/")
ARCHITECTURES = ("amd64", "arm64")
NAMESPACE = "streambridge-release"  # of signatures


class ReleaseError(Exception):
    """Why there is no release, and what to do."""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The standard output of a command that must succeed."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "STREAMBRIDGE_"))
    }
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=kept, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


# -- what must agree -------------------------------------------------------------------------------------
def agreed_version(tagged: bool) -> str:
    """The version that pyproject.toml, CHANGELOG.md and the tag name; the work tree is clean."""
    if changes := run("git", "status", "--porcelain").splitlines():
        raise ReleaseError(f"the work tree has changes ({changes[0].strip()}, ...): commit or remove them")
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    newest = re.search(
        r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    if newest is None or newest[1] != version:
        found = f"begins with {newest[1]}" if newest else "has no release"
        raise ReleaseError(
            f"pyproject.toml has version {version}, and CHANGELOG.md {found}: change one of them"
        )
    if newest[2] is None:
        raise ReleaseError(f"CHANGELOG.md has no date for {version}: write `## [{version}] - YYYY-MM-DD`")
    tags = run("git", "tag", "--points-at", "HEAD").split()
    if tagged and f"v{version}" not in tags:
        raise ReleaseError(
            f"HEAD has no tag v{version}: git tag --annotate v{version} --message 'streambridge {version}'"
        )
    return version


# -- build -----------------------------------------------------------------------------------------------
def prepare(tree: Path, url: str, version: str) -> None:
    """Write into the clone what only a published package has."""
    readme = tree / "README.md"
    readme.write_text(published(readme.read_text(), url, version))
    if url:
        with (tree / "pyproject.toml").open("a") as file:
            file.write(urls(url, version))


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """The sdist from the tree, and the wheel from the sdist, which is complete then."""
    epoch = int(run("git", "log", "-1", "--format=%ct", cwd=tree))
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    os.umask(0o022)
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(out)!r})"
    run(sys.executable, "-c", code, cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    reproduce(sdist, epoch)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, sdist)
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def reproduce(sdist: Path, epoch: int) -> None:
    """Write an sdist again without what the machine and the time of the build have left in it."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for entry in sorted(old, key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
    sdist.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=0))


def build_for_machines(tree: Path, out: Path, architectures: list[str]) -> None:
    """Debian packages and images, as far as this machine has the tools."""
    for tool, script in (("dpkg-deb", "deb"), ("mmdebstrap", "image")):
        if shutil.which(tool):
            for architecture in architectures:
                run(tree / ".ci" / script, out, architecture, cwd=tree)
        elif os.environ.get("CI"):
            raise ReleaseError(f"{tool} is missing: build on the Debian release that the packages are for")
        else:
            print(f"{tool} is missing: no {script}")


# -- check -----------------------------------------------------------------------------------------------
def check_sdist(path: Path, version: str) -> None:
    """Its name, its metadata, and no file outside its one directory."""
    name, found = parse_sdist_filename(path.name)
    with tarfile.open(path) as content:
        top = f"{name}-{version}/"
        if outside := [one for one in content.getnames() if not f"{one}/".startswith(top)]:
            raise ReleaseError(f"{path.name} has {outside[0]} outside {top}")
        info = content.extractfile(f"{top}PKG-INFO")
        assert info is not None
        check_metadata(path, info.read(), version)
    if str(found) != version:
        raise ReleaseError(f"{path.name} is not of version {version}")


def check_wheel(path: Path, version: str) -> None:
    """Its name, its metadata, and nothing but bridge/ in site-packages."""
    _, found, _, _ = parse_wheel_filename(path.name)
    with zipfile.ZipFile(path) as content:
        tops = {name.split("/")[0] for name in content.namelist()}
        if tops != {"bridge", f"streambridge-{version}.dist-info"}:
            raise ReleaseError(f"{path.name} has {sorted(tops)} at its top")
        check_metadata(path, content.read(f"streambridge-{version}.dist-info/METADATA"), version)
    if str(found) != version:
        raise ReleaseError(f"{path.name} is not of version {version}")


def check_metadata(path: Path, text: bytes, version: str) -> None:
    """What `twine check` looks at: an index takes the metadata, and can show the description."""
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        raise ReleaseError(f"{path.name}: {'; '.join(map(str, errors.exceptions))}") from None
    if str(metadata.version) != version:
        raise ReleaseError(f"{path.name} says version {metadata.version}, not {version}")
    if not metadata.description or metadata.description_content_type != "text/markdown":
        raise ReleaseError(f"{path.name} has no description in Markdown")


def check_installed(python: Path, version: str, work: Path) -> None:
    """The installed command reports its version, loads its plugins, and accepts a configuration."""
    command = [python, "-m", "bridge"]
    if (said := run(*command, "--version", cwd=work)) != f"streambridge {version}\n":
        raise ReleaseError(f"{python} -m bridge --version says {said!r}, not streambridge {version}")
    plugins = json.loads(run(*command, "plugins", "--json", cwd=work))
    if broken := [plugin for plugin in plugins if plugin["error"]] or not plugins:
        raise ReleaseError(f"plugins do not load: {broken}")
    (work / "release.toml").write_text(CONFIGURATION)
    run(*command, "check", "-c", "release.toml", cwd=work)


def check_fresh_environment(wheel: Path, version: str, work: Path) -> None:
    """The wheel in an environment with the pinned dependencies and nothing else."""
    environment = work / "venv"
    venv.create(environment, with_pip=True)
    run(environment / "bin" / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=work)
    run(environment / "bin" / "pip", "check", cwd=work)
    run(environment / "bin" / "streambridge", "--version", cwd=work)
    check_installed(environment / "bin" / "python", version, work)


def check_deb(path: Path, version: str, work: Path) -> None:
    """Fields, owners, modes and paths of a Debian package; unpacked into a scratch root, it runs."""
    fields = dict(
        line.split(": ", 1)
        for line in run("dpkg-deb", "--info", path).replace("\n  ", " ").splitlines()
        if re.match(r" [A-Z][\w-]*: ", line)
    )
    fields = {name.strip(): value for name, value in fields.items()}
    if fields.get("Version") != version or "python3" not in fields.get("Depends", ""):
        raise ReleaseError(f"{path.name} has the wrong fields: {fields}")
    for line in run("dpkg-deb", "--contents", path).splitlines():
        mode, owner, _, _, _, name = line.split(maxsplit=5)
        place = name.split(" -> ")[0].removeprefix(".")
        if owner != "root/root" or (mode[0] != "l" and "w" in (mode[5], mode[8])):
            raise ReleaseError(f"{path.name}: {place} is {mode} {owner}")
        if not any(place.startswith(one) or one.startswith(place) for one in PLACES):
            raise ReleaseError(f"{path.name}: {place} is outside {', '.join(PLACES)}")
    if fields["Architecture"] == run("dpkg", "--print-architecture").strip():
        root = work / "root"
        run("dpkg-deb", "--extract", path, root)
        check_installed(root / "opt" / "streambridge" / "bin" / "python3", version, work)
    if shutil.which("lintian"):
        print(run("lintian", "--allow-root", "--fail-on", "error,warning", path), end="")


def write_sums(out: Path) -> None:
    """SHA256SUMS, as `sha256sum --check` reads it."""
    files = sorted(path for path in out.iterdir() if path.is_file())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))
    run("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS", cwd=out)


def sign(out: Path, key: Path) -> None:
    """SHA256SUMS.sig, as `ssh-keygen -Y verify` reads it; a signature that does not verify is no release."""
    sums = out / "SHA256SUMS"
    run("ssh-keygen", "-Y", "sign", "-n", NAMESPACE, "-f", key.expanduser().absolute(), sums)
    signature = sums.with_suffix(".sig")
    with sums.open("rb") as file:
        checked = subprocess.run(
            ["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", signature], stdin=file
        )
    if checked.returncode:
        raise ReleaseError(f"{signature.name} does not verify")


def options(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build and check a release.")
    parser.add_argument("--untagged", action="store_true")
    parser.add_argument("--url", default="")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Build, check, and put the files into dist/."""
    given = options(arguments)
    version = agreed_version(tagged=not given.untagged)
    with tempfile.TemporaryDirectory(prefix="streambridge-release-") as directory:
        work = Path(directory)
        tree, out = work / "tree", work / "dist"
        out.mkdir()
        run("git", "clone", "--quiet", ROOT, tree)  # of the commit alone; a build leaves files in its tree
        prepare(tree, given.url.rstrip("/"), version)
        sdist, wheel = build(tree, out)
        check_sdist(sdist, version)
        check_wheel(wheel, version)
        check_fresh_environment(wheel, version, work)
        bill = out / f"streambridge-{version}.cdx.json"
        bill.write_text(run(sys.executable, tree / ".ci" / "sbom.py"))
        build_for_machines(tree, out, given.architecture or list(ARCHITECTURES))
        for deb in out.glob("*.deb"):
            check_deb(deb, version, work)
        write_sums(out)
        if given.key:
            sign(out, given.key)
        shutil.rmtree(DIST, ignore_errors=True)
        shutil.copytree(out, DIST)
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    if not given.url:
        print("no URL=: these packages have no links, and are not for an index")
    if not given.key:
        print("no KEY=: SHA256SUMS is not signed")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ReleaseError as refused:
        print(f"no release: {refused}", file=sys.stderr)
        sys.exit(1)
