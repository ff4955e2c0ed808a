"""Connections to other MQTT brokers, and what to check if they fail.

The exporter `mqtt` and the upstreams share this module. Their settings have different names for the same
things (`ca_file`, `mqtt.external.ca`), so functions that write messages get a function that returns the name.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from bridge.readable import ensure_regular, read_regular, unreadable

AWS_HOST = re.compile(r"\.iot\.[a-z0-9-]+\.amazonaws\.com(\.cn)?$")
BRIDGED_BY = "bridged-by"  # the MQTT 5 user property with the id of a gateway that a message has passed

# Returns the name of one of `_SETTINGS` for a message.
Named = Callable[[str], str]

_HINTS = {  # the settings to check after a reason code of CONNACK (MQTT 5 section 3.2.2.2)
    0x81: 'set {protocol} = "3.1.1"',
    0x82: 'set {protocol} = "3.1.1"',
    0x84: 'set {protocol} = "3.1.1"',
    0x85: "set {client_id} to one that it takes",
    0x86: "see {username} and {password_file}",
    0x87: "see {username}, {password_file}, {cert} and {client_id}, and its rules",
}
_SETTINGS = ("url", "ca", "cert", "key", "alpn", "username", "password_file", "client_id", "protocol")


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of `mqtt://host` or `mqtts://host:8883`. Raises ValueError for an invalid port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (8883 if parts.scheme == "mqtts" else 1883)


def is_secure(url: str) -> bool:
    """Return whether the broker uses TLS."""
    return urlsplit(url).scheme == "mqtts"


def url_mistake(url: str) -> str:
    """Return the mistake in a broker's URL, without the URL, as that may have a password; empty if none."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("mqtt", "mqtts") and parts.hostname and parts.port != 0
        good = good and not (parts.username or parts.path.strip("/") or parts.query)
    except ValueError:
        good = False
    return "" if good else "it is not like mqtt://host:1883 or mqtts://host:8883, without a user or a path"


def read_password(path: Path | str | None, named: Named) -> str | None:
    """Read the password in a file, without surrounding white space. Raises ValueError."""
    if path is None:
        return None
    try:
        return read_regular(Path(path))[0].decode().strip()
    except OSError as error:
        raise ValueError(f"{named('password_file')} {path}: {unreadable(Path(path)) or error}") from error
    except UnicodeDecodeError:  # its text quotes the bytes, which are secret
        raise ValueError(f"{named('password_file')} {path}: it is not UTF-8") from None


def tls_context(
    url: str,
    named: Named,
    *,
    ca: Path | str | None,
    cert: Path | str | None,
    key: Path | str | None,
    alpn: str | None,
    aws: bool | None = None,
) -> ssl.SSLContext | None:
    """Return the context for a connection to a broker, None without TLS. Raises ValueError.

    `aws`: whether it is AWS IoT Core, which accepts MQTT on port 443 only with ALPN; None: decide by its
    name.
    """
    if not is_secure(url):
        return None
    try:
        ensure_regular(ca)
        context = ssl.create_default_context(cafile=ca)  # with `ca`, no other authority counts
    except OSError as error:
        raise ValueError(f"{named('ca')} {ca}: {error.strerror or error}") from error
    load_certificates(context, named, ca=None, cert=cert, key=key)
    host, port = host_and_port(url)
    if alpn is None and port == 443 and (AWS_HOST.search(host) is not None if aws is None else aws):
        # https://docs.aws.amazon.com/iot/latest/developerguide/protocols.html; `mqtt` is for authorizers.
        alpn = "x-amzn-mqtt-ca" if cert is not None else "mqtt"
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    return context


def load_certificates(
    context: ssl.SSLContext,
    named: Named,
    *,
    ca: Path | str | None,
    cert: Path | str | None,
    key: Path | str | None,
) -> None:
    """Read the files into a context, for the next connection; raises ValueError."""
    doing = f"{named('ca')} {ca}"
    try:
        ensure_regular(ca)
        if ca is not None:
            context.load_verify_locations(ca)
        if cert is not None:
            doing = f"{named('cert')} {cert} with {named('key')} {key or 'in it'}"
            ensure_regular(cert, key)
            context.load_cert_chain(cert, key, password="")  # so that OpenSSL never prompts for one
    except OSError as error:
        raise ValueError(f"{doing}: {error.strerror or error}") from error


def hint_for(code: int, named: Named) -> str:
    """Return what to check if the broker answers CONNECT with this reason code; empty if unknown."""
    return _HINTS[code].format(**{key: named(key) for key in _SETTINGS}) if code in _HINTS else ""


def cause_of(error: BaseException | None, named: Named) -> str:
    """Return why a connection failed, and what to check."""
    match error:
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({error.verify_message}); "
                f"see {named('ca')} and {named('url')}"
            )
        case ssl.SSLError():
            return (
                f"TLS failed ({error.reason or error}); see {named('url')} (does its port speak TLS?), "
                f"{named('cert')} and {named('alpn')}"
            )
        case socket.gaierror():
            return f"its name cannot be resolved ({error.strerror}); see {named('url')} and the DNS"
        case ConnectionRefusedError():
            return f"connection refused: nothing listens there; see {named('url')} and the broker"
        case TimeoutError():
            return f"it does not answer; see {named('url')} and the network"
        case OSError():
            return f"{error.strerror or error}; see {named('url')} and the network"
    return str(error) or repr(error)
