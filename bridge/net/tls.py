"""The certificates of listeners with TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

from bridge.errors import ConfigError
from bridge.readable import ensure_regular, unreadable

TICKETS = 1  # session tickets per handshake; a device has one connection, and 2 would cost 20 us more


def server_context(
    option: str, cert: Path, key: Path, client_ca: Path | None = None, crl: Path | None = None
) -> ssl.SSLContext:
    """Make a server's context from certificate files. With `client_ca`, clients need a certificate from it.

    With `crl`, the CA that signed a client's certificate must have a list in that file that has not expired
    and does not contain the certificate. `access.revocations` applies the lists to the certificates above it.
    Raises ConfigError, which names the option.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = TICKETS
    try:
        ensure_regular(cert, key, client_ca, crl)
        context.load_cert_chain(cert, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        if crl is not None:
            context.load_verify_locations(crl)
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    except (OSError, ssl.SSLError) as error:
        for path in (cert, key, client_ca, crl):
            if path is not None and (why := unreadable(path)):
                raise ConfigError(f"{option}: {path}: {why}") from error
        asked = "" if client_ca is None else f", client_ca {client_ca}"
        asked += "" if crl is None else f", crl_file {crl}"
        raise ConfigError(f"{option}: cert {cert}, key {key}{asked}: {error}") from error
    return context
