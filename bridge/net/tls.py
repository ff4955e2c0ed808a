"""The certificates of listeners with TLS."""

from __future__ import annotations

import contextlib
import os
import ssl
from pathlib import Path
from typing import NamedTuple

from bridge.errors import ConfigError
from bridge.readable import Kept, ensure_regular, read_regular, unreadable

TICKETS = 1  # session tickets per handshake; a device has one connection, and 2 would cost 20 us more


class Certificates(NamedTuple):
    """A context, and the certificate and key that it shows; both as in their files."""

    context: ssl.SSLContext
    shown: tuple[bytes, bytes]


def kept_context(
    kept: Kept, option: str, cert: Path, key: Path, client_ca: Path | None = None, crl: Path | None = None
) -> ssl.SSLContext:
    """As `server_context`, made again only if a file has changed; for listeners with the same files once.

    A broken certificate or key does not keep a changed client CA or revocation list from holding, nor the
    other way round. Raises ConfigError if nothing good is known of a file.
    """

    def read_pair() -> tuple[bytes, bytes]:
        server_context(option, cert, key)
        return read_regular(cert)[0], read_regular(key)[0]

    shown = kept.read(("pair", cert, key), f"{option}.cert, key", (cert, key), read_pair)

    def make() -> Certificates:
        for name in ("client_ca", "crl_file"):
            if (why := kept.broken.get(f"{option}.{name}")) is not None:
                raise ConfigError(why)
        context = server_context(option, cert, key, client_ca, crl, shown)
        return Certificates(context, shown)

    what = ("context", cert, key, client_ca, crl)
    found = kept.read(what, f"{option}.client_ca, crl_file", (client_ca, crl), make, shown)
    if found.shown != shown:  # the others are broken
        _show(found.context, shown)
    return found.context


def _show(context: ssl.SSLContext, shown: tuple[bytes, bytes]) -> None:
    """Have a context show a certificate and key; new connections get it."""
    with contextlib.ExitStack() as stack:
        names = []
        for content in shown:
            fd = os.memfd_create("tls", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, content)
            names.append(f"/proc/self/fd/{fd}")
        context.load_cert_chain(*names)


def server_context(
    option: str,
    cert: Path,
    key: Path,
    client_ca: Path | None = None,
    crl: Path | None = None,
    shown: tuple[bytes, bytes] | None = None,
) -> ssl.SSLContext:
    """Make a server's context from certificate files. With `client_ca`, clients need a certificate from it.

    With `crl`, the CA that signed a client's certificate must have a list in that file that has not expired
    and does not contain the certificate. `access.revocations` applies the lists to the certificates above it.
    `shown` is what the files `cert` and `key` had. Raises ConfigError, which names the option.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = TICKETS
    try:
        ensure_regular(*(() if shown else (cert, key)), client_ca, crl)
        if shown is None:
            context.load_cert_chain(cert, key)
        else:
            _show(context, shown)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        if crl is not None:
            context.load_verify_locations(crl)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (OSError, ssl.SSLError) as error:
        for path in (*(() if shown else (cert, key)), client_ca, crl):
            if path is not None and (why := unreadable(path)):
                raise ConfigError(f"{option}: {path}: {why}") from error
        asked = "" if client_ca is None else f", client_ca {client_ca}"
        asked += "" if crl is None else f", crl_file {crl}"
        raise ConfigError(f"{option}: cert {cert}, key {key}{asked}: {error}") from error
    return context
