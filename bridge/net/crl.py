"""Certificate revocation lists: the certificates that a CA has revoked (RFC 5280, section 5).

When a client presents its certificate, OpenSSL checks issuer, signature and times of the list. This module
does what OpenSSL does not: it tells which certificates of chains and of existing connections are revoked, and
when a list or the certificate of a connected client expires. It parses DER (X.690) itself, in small steps, so
that a thread that reads a list of a million certificates never holds the GIL for long. A library does.

    CertificateList = SEQUENCE { tbsCertList, signatureAlgorithm, signatureValue }
    tbsCertList     = SEQUENCE { [version INTEGER], signature SEQUENCE, issuer Name, thisUpdate Time,
                                 [nextUpdate Time], [revokedCertificates SEQUENCE OF
                                 SEQUENCE { serial INTEGER, ... }], [extensions] }
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bridge.errors import ConfigError
from bridge.readable import read_regular, unreadable

_BEGIN, _END = b"-----BEGIN X509 CRL-----", b"-----END X509 CRL-----"
_INTEGER, _UTC_TIME, _TIME, _SEQUENCE, _VERSION = 0x02, 0x17, 0x18, 0x30, 0xA0
_DELTA = bytes.fromhex("0603551d1b")  # the extension deltaCRLIndicator (5.2.4)
_STEP = 64 * 1024  # characters that are decoded at a time
_SERIAL = 21  # bytes of the longest serial number (4.1.2.2), with its sign

_Field = tuple[int, int, int]  # tag, begin and end of the content
Certified = tuple[bytes, bytes]  # the name of an issuer in DER, and a serial number


class Serials:
    """A set of serial numbers in 21 bytes each; a set of objects takes four times as many."""

    def __init__(self) -> None:
        self.parts = [bytearray() for _ in range(256)]  # by the last byte

    def add(self, serial: bytes) -> None:
        """Add a serial number, as in DER. Raises IndexError if it is empty."""
        self.parts[serial[-1]] += serial.rjust(_SERIAL, b"\0") if len(serial) <= _SERIAL else _short(serial)

    def __contains__(self, serial: bytes) -> bool:
        wanted = serial.rjust(_SERIAL, b"\0") if len(serial) <= _SERIAL else _short(serial)
        part = self.parts[serial[-1]] if serial else b""
        at = part.find(wanted)
        while at >= 0 and at % _SERIAL:
            at = part.find(wanted, at + 1)
        return at >= 0


def _short(serial: bytes) -> bytes:
    return hashlib.sha256(serial).digest()[:_SERIAL]


class Crl(NamedTuple):
    """One list. `expires` is None if the CA does not say when the next list is due.

    A delta list adds to the complete one of its CA.
    """

    issuer: bytes
    issued: datetime
    expires: datetime | None
    serials: Serials
    delta: bool = False


class Crls(NamedTuple):
    """The lists of a file."""

    lists: tuple[Crl, ...] = ()

    @property
    def expires(self) -> datetime | None:
        """Return when the first list expires; None if none does."""
        return min((one.expires for one in self.lists if one.expires is not None), default=None)

    def without_list(self, authorities: Iterable[bytes]) -> list[bytes]:
        """Return the CA certificates, in DER, that have no list here."""
        return [one for one in authorities if all(subject(one) != known.issuer for known in self.lists)]

    def revoke(self, certificate: bytes) -> bool:
        """Return whether a certificate, in DER, is in one of the lists."""
        return self.revoked(certified(certificate))

    def revoked(self, certificate: Certified) -> bool:
        """Return whether a certificate, by its issuer and serial number, is in one of the lists."""
        issuer, serial = certificate
        return any(one.issuer == issuer and serial in one.serials for one in self.lists)

    def knows(self, issuer: bytes) -> bool:
        """Return whether a CA has a list here."""
        return any(one.issuer == issuer for one in self.lists)

    def expired(self, issuer: bytes, now: datetime) -> bool:
        """Return whether a CA has lists here, and all of them have expired."""
        own = [one for one in self.lists if one.issuer == issuer and not one.delta]
        return bool(own) and all(one.expires is not None and one.expires <= now for one in own)


def read_crls(option: str, path: Path) -> Crls:
    """Read the lists in a PEM file. Raises ConfigError, which names the option."""
    try:
        text = read_regular(path)[0]
    except OSError as error:
        raise ConfigError(f"{option} {path}: {unreadable(path) or error}") from error
    lists: list[Crl] = []
    begin = text.find(_BEGIN)
    while begin >= 0:
        end = text.find(_END, begin)
        try:
            if end < 0:
                raise ValueError
            lists.append(_crl(_decoded(text, begin + len(_BEGIN), end)))
        except (ValueError, IndexError):
            raise ConfigError(f"{option} {path}: list number {len(lists) + 1} in it cannot be read") from None
        begin = text.find(_BEGIN, end)
    if not lists:
        raise ConfigError(
            f"{option} {path}: no list in PEM in it ({_BEGIN.decode()}); convert it: openssl crl -inform der "
            "-in LIST"
        )
    complete = {one.issuer for one in lists if not one.delta}
    for number, one in enumerate(lists, 1):
        if one.issuer not in complete:
            raise ConfigError(
                f"{option} {path}: list number {number} in it is a delta list, which has only what is "
                "new; add the complete list of its CA"
            )
    return Crls(tuple(lists))


def _decoded(text: bytes, at: int, end: int) -> bytes:
    """Decode base64 in small steps. Raises ValueError."""
    der, rest = bytearray(), b""
    while at < end:
        piece = rest + text[at : min(at + _STEP, end)].translate(None, b" \t\r\n")
        at += _STEP
        whole = len(piece) if at >= end else len(piece) & ~3
        der += base64.b64decode(piece[:whole], validate=True)
        rest = piece[whole:]
    return bytes(der)


def certified(certificate: bytes) -> Certified:
    """The issuer and the serial number of a certificate in DER; raises ValueError or IndexError."""
    (_, *serial), (_, *issuer) = _field_of(certificate, 0), _field_of(certificate, 2)
    return certificate[slice(*issuer)], certificate[slice(*serial)]


def subject(certificate: bytes) -> bytes:
    """Return the subject of a certificate, in DER. Raises ValueError or IndexError."""
    _, begin, end = _field_of(certificate, 4)
    return certificate[begin:end]


def not_after(certificate: bytes) -> float:
    """Return when a certificate in DER expires, Unix time in seconds. Raises ValueError or IndexError."""
    times = _fields(certificate, *_field_of(certificate, 3))
    _next(times)
    return _time(certificate, *_next(times)).timestamp()


def _field_of(certificate: bytes, number: int) -> _Field:
    """A field of a certificate: serial number, algorithm, issuer, validity, subject (RFC 5280, 4.1)."""
    fields = _fields(certificate, *_next(_fields_of(certificate)))
    field = _next(fields)
    for _ in range(number + (field[0] == _VERSION)):
        field = _next(fields)
    return field


def _crl(der: bytes) -> Crl:
    fields = _fields(der, *_next(_fields_of(der)))
    tag, begin, end = _next(fields)
    if tag == _INTEGER:
        tag, begin, end = _next(fields)
    _, begin, end = _next(fields)
    issuer = der[begin:end]
    issued = _time(der, *_next(fields))
    expires, serials, delta = None, Serials(), False
    for tag, begin, end in fields:
        if tag in (_UTC_TIME, _TIME):
            expires = _time(der, tag, begin, end)
        elif tag == _SEQUENCE:
            _add(serials, der, begin, end)
        elif tag == _VERSION:  # that of the extensions is the same
            delta = der.find(_DELTA, begin, end) >= 0
    return Crl(issuer, issued, expires, serials, delta)


def _add(serials: Serials, der: bytes, at: int, end: int) -> None:
    """Add the serial numbers of the entries; raises ValueError or IndexError.

    There may be a million, so that those in the usual form, of less than 128 bytes, have a shorter way.
    """
    parts = serials.parts
    while at < end:
        size, length = der[at + 1], der[at + 3]
        begin, after = at + 4, at + 2 + size
        if (
            size < 128
            and 0 < length <= min(size - 2, _SERIAL)
            and after <= end
            and der[at] == _SEQUENCE
            and der[at + 2] == _INTEGER
        ):
            parts[der[begin + length - 1]] += der[begin : begin + length].rjust(_SERIAL, b"\0")
        else:
            tag, begin, after = _next(_fields(der, _SEQUENCE, at, end))
            serials.add(_first(der, tag, begin, after))
        at = after


def _next(fields: Iterator[_Field]) -> _Field:
    """The next field; raises ValueError if there is none."""
    found = next(fields, None)
    if found is None:
        raise ValueError
    return found


def _first(der: bytes, tag: int, begin: int, end: int) -> bytes:
    """The content of the first field of a sequence."""
    _, begin, end = _next(_fields(der, tag, begin, end))
    return der[begin:end]


def _fields_of(der: bytes) -> Iterator[_Field]:
    """The fields of the outermost sequence."""
    return _fields(der, *_next(_fields(der, _SEQUENCE, 0, len(der))))


def _fields(der: bytes, tag: int, begin: int, end: int) -> Iterator[_Field]:
    """The fields of a sequence: tag, begin and end of the content. Raises ValueError or IndexError."""
    if tag != _SEQUENCE:
        raise ValueError
    while begin < end:
        kind, size = der[begin], der[begin + 1]
        begin += 2
        if size & 0x80:
            more = size & 0x7F
            if not 0 < more <= 4:
                raise ValueError
            size = int.from_bytes(der[begin : begin + more], "big")
            begin += more
        if begin + size > end:
            raise ValueError
        yield kind, begin, begin + size
        begin += size


def _time(der: bytes, tag: int, begin: int, end: int) -> datetime:
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:  # the year has two digits, 1950 to 2049
        text = ("20" if text < "50" else "19") + text
    elif tag != _TIME:
        raise ValueError
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
