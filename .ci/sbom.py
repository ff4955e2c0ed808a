"""Prints the software bill of materials of the gateway, as CycloneDX 1.6 in JSON.

It lists what `pip install 'streambridge[encryption]'` installs, as installed here: every distribution with
its version, licence and dependencies. The interpreter that runs this is in it, and the OpenSSL that it has
loaded: the gateway depends on both. The same installation gives the same text.
"""

from __future__ import annotations

import json
import platform
import ssl
import sys
import tomllib
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def needed(lines: list[str], extras: set[str]) -> list[tuple[str, set[str]]]:
    """Names and extras of the requirements that hold on this machine."""
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
            found.append((canonicalize_name(requirement.name), requirement.extras))
    return found


def licence(package: Distribution) -> list[dict[str, Any]]:
    """The licence as the package says it."""
    expression = package.metadata.get("License-Expression")
    if expression:
        return [{"expression": expression}]
    classified = [
        line.rpartition(" :: ")[2]
        for line in package.metadata.get_all("Classifier") or []
        if line.startswith("License :: ")
    ]
    text = (package.metadata.get("License") or "").strip()
    names = classified or ([text.splitlines()[0]] if text else [])
    return [{"license": {"name": name}} for name in names]


def platforms() -> list[dict[str, Any]]:
    """The interpreter and its OpenSSL, which come from the system and not from an index."""
    python, openssl = platform.python_version(), ssl.OPENSSL_VERSION.split()[1]
    return [
        {
            "type": "platform" if name == "python" else "library",
            "bom-ref": f"pkg:generic/{name}@{version}",
            "name": name,
            "version": version,
            "cpe": cpe,
            "purl": f"pkg:generic/{name}@{version}",
            "licenses": [{"license": {"id": licence}}],
        }
        for name, version, cpe, licence in (
            ("openssl", openssl, f"cpe:2.3:a:openssl:openssl:{openssl}:*:*:*:*:*:*:*", "Apache-2.0"),
            ("python", python, f"cpe:2.3:a:python:python:{python}:*:*:*:*:*:*:*", "PSF-2.0"),
        )
    ]


def main() -> None:
    """Print the document."""
    components, dependencies = {}, {}
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["encryption"]]
    waiting = needed(lines, set())
    root = f"pkg:pypi/streambridge@{PROJECT['version']}"
    references = {}
    edges = {root: [name for name, _ in waiting]}
    while waiting:
        name, extras = waiting.pop()
        try:
            package = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed; install the gateway first: pip install .")
        below = needed(package.requires or [], extras)
        reference = references[name] = f"pkg:pypi/{name}@{package.version}"
        known = edges.setdefault(reference, [])
        fresh = [one for one, _ in below if one not in known]
        known += fresh
        waiting += [one for one in below if one[0] in fresh or one[0] not in references]
        components[name] = {
            "type": "library",
            "bom-ref": reference,
            "name": name,
            "version": package.version,
            "purl": reference,
            "licenses": licence(package),
        }
    for reference, names in sorted(edges.items()):
        dependencies[reference] = sorted(references[name] for name in names)
    openssl, python = platforms()
    dependencies[root].append(python["bom-ref"])
    dependencies |= {python["bom-ref"]: [openssl["bom-ref"]], openssl["bom-ref"]: []}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(dependencies))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "streambridge",
                "version": PROJECT["version"],
                "licenses": [{"expression": PROJECT["license"]}],
                "purl": root,
            }
        },
        "components": [components[name] for name in sorted(components)] + [openssl, python],
        "dependencies": [{"ref": ref, "dependsOn": names} for ref, names in dependencies.items()],
    }
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
