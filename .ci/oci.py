"""usage: PYTHON .ci/oci.py IMAGE ARCHITECTURE VERSION DEBIAN.tar STAGE

Writes IMAGE, a tar file with an OCI image layout (image-spec 1.1) of two layers: the packages of DEBIAN.tar
without manuals, translations and what only a package manager reads, and the directory STAGE. Everything
belongs to root, but for /var/lib/streambridge. Times are at most SOURCE_DATE_EPOCH, entries are sorted: the
same input gives the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

EPOCH = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
USER = 10001
DATA = "var/lib/streambridge"
# Of no use to a process that runs nothing but the gateway. The licences stay.
LEFT_OUT = (
    *(
        f"usr/share/{name}/"
        for name in ("man", "locale", "lintian", "doc-base", "info", "menu", "bug", "pixmaps", "applications")
    ),
    *("var/cache/", "var/lib/apt/", "var/log/", "etc/apt/", "dev/"),
    *("bin/", "sbin/", "usr/sbin/"),  # of dpkg and tar, on which the base of Debian depends
)
READY = "import urllib.request as u; u.urlopen('http://127.0.0.1:9464/readyz', timeout=5)"
SECOND = 10**9
CONFIG = {
    "User": f"{USER}:{USER}",
    "ExposedPorts": {"1883/tcp": {}},
    "Env": [
        "PATH=/usr/bin",
        "STREAMBRIDGE_IMAGE=1",  # `bridge.readable.foreign`
        "HOME=/var/lib/streambridge",
        "LANG=C.UTF-8",
        "PYTHONDONTWRITEBYTECODE=1",
        "STREAMBRIDGE_CONFIG=/etc/streambridge/streambridge.toml",
    ],
    "Entrypoint": ["/opt/streambridge/bin/streambridge"],
    "Cmd": ["run"],
    "Volumes": {"/var/lib/streambridge": {}},
    "WorkingDir": "/var/lib/streambridge",
    "StopSignal": "SIGTERM",
    # Docker's extension of the specification. Podman needs `--health-cmd`.
    "Healthcheck": {
        "Test": ["CMD", "/opt/streambridge/bin/python3", "-c", READY],
        "Interval": 30 * SECOND,
        "Timeout": 10 * SECOND,
        "StartPeriod": 60 * SECOND,
        "Retries": 3,
    },
}


def wanted(name: str) -> bool:
    """Whether the image has a file of Debian's packages, or a directory, whose name ends with a slash."""
    documentation = name.startswith("usr/share/doc/") and not name.endswith(("/copyright", "/"))
    program = name.startswith("usr/bin/") and not name.startswith("usr/bin/python3") and name != "usr/bin/"
    return not (name.startswith(LEFT_OUT) or documentation or program)


def of_debian(path: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """The entries of the packages."""
    with tarfile.open(path) as source:
        for entry in source:
            entry.name = entry.name.removeprefix("./")
            if entry.name not in ("", ".") and wanted(f"{entry.name}/" if entry.isdir() else entry.name):
                if entry.islnk():
                    entry.linkname = entry.linkname.removeprefix("./")
                yield entry, source.extractfile(entry) if entry.isreg() else None


def of_stage(stage: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """The entries of a directory."""
    with tarfile.open(fileobj=io.BytesIO(), mode="w") as names:
        for path in sorted(stage.rglob("*")):
            entry = names.gettarinfo(path, path.relative_to(stage).as_posix())
            entry.uid = entry.gid = USER if entry.name == DATA else 0
            entry.mode = {DATA: 0o700, "tmp": 0o1777}.get(entry.name, entry.mode)
            yield entry, path.open("rb") if entry.isreg() else None


def layer(entries: Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]) -> tuple[bytes, str]:
    """A compressed layer, and the digest of what it is uncompressed."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as out:
        for entry, content in entries:
            entry.mtime = min(int(entry.mtime), EPOCH)
            entry.uname = entry.gname = ""
            entry.pax_headers = {}
            out.addfile(entry, content)
            if content is not None:
                content.close()
    return gzip.compress(plain.getvalue(), 9, mtime=0), digest(plain.getvalue())


def digest(content: bytes) -> str:
    """A digest as the specification writes it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def main(image: str, architecture: str, version: str, debian: str, stage: str) -> None:
    """Write the layout."""
    blobs: dict[str, bytes] = {}

    def blob(kind: str, content: Any) -> dict[str, Any]:
        text = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
        blobs[digest(text)] = text
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(text), "size": len(text)}

    created = datetime.fromtimestamp(EPOCH, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    name = f"localhost/streambridge:{version}"
    labels = {
        "org.opencontainers.image.title": "streambridge",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.created": created,
    }
    platform = {"os": "linux", "architecture": architecture}
    if architecture == "arm64":
        platform["variant"] = "v8"
    layers = [layer(of_debian(Path(debian))), layer(of_stage(Path(stage)))]
    config = blob(
        "config.v1+json",
        {
            **platform,
            "created": created,
            "config": CONFIG | {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [plain for _, plain in layers]},
            "history": [
                {"created": created, "created_by": what} for what in ("Debian packages", "streambridge")
            ],
        },
    )
    manifest = blob(
        "manifest.v1+json",
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": [blob("layer.v1.tar+gzip", packed) for packed, _ in layers],
            "annotations": labels,
        },
    )
    named = {"org.opencontainers.image.ref.name": name, "io.containerd.image.name": name}
    index = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [manifest | {"platform": platform, "annotations": named}],
    }
    files = {f"blobs/{key.replace(':', '/')}": content for key, content in blobs.items()}
    files |= {"index.json": json.dumps(index).encode(), "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
    with tarfile.open(image, "w", format=tarfile.PAX_FORMAT) as out:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime, entry.mode = len(files[path]), EPOCH, 0o644
            out.addfile(entry, io.BytesIO(files[path]))
    print(f"{image}: {name} for {architecture}, {Path(image).stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
