"""The part of this repository that a cluster needs, as two files for spark-submit.

`streambridge-ingest.zip` holds the ingest package and the few modules that it uses, without the gateway's
packages (MQTT, plugins).
"""

from __future__ import annotations

import zipfile
from pathlib import Path

ARCHIVE = "streambridge-ingest.zip"
ENTRY = "streambridge_ingest.py"
_STAMP = (2020, 1, 1, 0, 0, 0)  # the same sources give the same archive, byte for byte


def write_package(folder: Path) -> list[Path]:
    """Write both files into the folder and return their paths."""
    bridge = Path(__file__).resolve().parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    shared = ("__init__.py", "deflate.py", "errors.py", "objectkeys.py", "printable.py")
    modules = [*(bridge / name for name in shared), *sorted((bridge / "ingest").rglob("*.py"))]
    with zipfile.ZipFile(folder / ARCHIVE, "w", zipfile.ZIP_DEFLATED) as archive:
        for module in modules:
            name = zipfile.ZipInfo(f"bridge/{module.relative_to(bridge).as_posix()}", _STAMP)
            archive.writestr(name, module.read_bytes(), zipfile.ZIP_DEFLATED)
    (folder / ENTRY).write_bytes((bridge / "ingest" / "main.py").read_bytes())
    return [folder / ARCHIVE, folder / ENTRY]
