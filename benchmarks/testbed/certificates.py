"""Certificates made with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.testbed.local import tool

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Pair(NamedTuple):
    cert: Path
    key: Path


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path, name: str = "test-ca") -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.cert, self._key = directory / f"{name}.pem", directory / f"{name}.key"
        self._run(
            "req",
            "-x509",
            *KEY,
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-keyout",
            self._key,
            "-out",
            self.cert,
        )

    def below(self, name: str, days: int = 2) -> Authority:
        """An intermediate authority, which this one has signed, valid for so many days."""
        made = Authority.__new__(Authority)
        made.directory = self.directory
        made.cert, made._key = self.issue(name, "basicConstraints=critical,CA:TRUE\n", days)
        return made

    def issue(
        self, name: str, more: str = "subjectAltName=IP:127.0.0.1,DNS:localhost\n", days: int = 2
    ) -> Pair:
        """A certificate for a client or server of a name, valid for 127.0.0.1; `more` are its extensions."""
        pair = Pair(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        request, extensions = self.directory / "request.csr", self.directory / "extensions"
        extensions.write_text(more)
        self._run("req", *KEY, "-subj", f"/CN={name}", "-keyout", pair.key, "-out", request)
        signer = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", days)
        self._run("x509", "-req", "-in", request, *signer, "-extfile", extensions, "-out", pair.cert)
        return pair

    def revoke(self, *pairs: Pair, days: int = 2, name: str = "crl") -> Path:
        """A revocation list with the certificates of these pairs, valid for so many days; in PEM."""
        index, settings, path = (self.directory / f"{name}.{end}" for end in ("txt", "conf", "pem"))
        index.write_text("")
        settings.write_text(f"[ca]\ndefault_ca=c\n[c]\ndatabase={index}\ndefault_md=sha256\n")
        signer = ("-config", settings, "-cert", self.cert, "-keyfile", self._key)
        for pair in pairs:
            self._run("ca", *signer, "-revoke", pair.cert)
        times = ("-crldays", days) if days > 0 else ("-crl_lastupdate", "20200101000000Z")
        if days <= 0:
            times += ("-crl_nextupdate", "20200102000000Z")
        self._run("ca", *signer, "-gencrl", *times, "-out", path)
        return path

    def _run(self, *arguments: object) -> None:
        subprocess.run([tool("openssl"), *map(str, arguments)], check=True, capture_output=True)
