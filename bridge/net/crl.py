"""Certificate revocation lists: the certificates that a CA has revoked (RFC 5280, section 5).

When a client presents its certificate, OpenSSL checks issuer, signature and times of the list. This module
does what OpenSSL does not: it tells which certificates of chains and of existing connections are revoked, and
when a list or the certificate of a connected client expires. It parses DER (X.690) itself, which costs less
than a library.

    CertificateList = SEQUENCE { tbsCertList, signatureAlgorithm, signatureValue }
    tbsCertList     = SEQUENCE { [version INTEGER], signature SEQUENCE, issuer Name, thisUpdate Time,
                                 [nextUpdate Time], [revokedCertificates SEQUENCE OF
                                 SEQUENCE { serial INTEGER, ... }], [extensions] }
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from bridge.errors import ConfigError
from bridge.readable import read_regular, unreadable

_BEGIN, _END = "-----BEGIN X509 CRL-----", "-----END X509 CRL-----"
_INTEGER, _UTC_TIME, _TIME, _SEQUENCE, _VERSION = 0x02, 0x17, 0x18, 0x30, 0xA0

_Field = tuple[int, int, int]  # tag, begin and end of the content
Certified = tuple[bytes, bytes]  # the name of an issuer in DER, and a serial number


class Crl(NamedTuple):
    """One list. `expires` is None if the CA does not say when the next list is due."""

    issuer: bytes
    issued: datetime
    expires: datetime | None
    serials: frozenset[bytes]


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

    def expired(self, issuer: bytes, now: datetime) -> bool:
        """Return whether a CA has lists here, and all of them have expired."""
        own = [one for one in self.lists if one.issuer == issuer]
        return bool(own) and all(one.expires is not None and one.expires <= now for one in own)


def read_crls(option: str, path: Path) -> Crls:
    """Read the lists in a PEM file. Raises ConfigError, which names the option."""
    try:
        text = read_regular(path)[0].decode("ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {unreadable(path) or error}") from error
    lists = []
    for piece in text.split(_BEGIN)[1:]:
        body, end, _ = piece.partition(_END)
        try:
            if not end:
                raise ValueError
            der = ssl.PEM_cert_to_DER_cert(f"{ssl.PEM_HEADER}{body}{ssl.PEM_FOOTER}")
            lists.append(_crl(der))
        except (ValueError, IndexError):
            raise ConfigError(f"{option} {path}: list number {len(lists) + 1} in it cannot be read") from None
    if not lists:
        raise ConfigError(
            f"{option} {path}: no list in PEM in it ({_BEGIN}); convert it: openssl crl -inform der -in LIST"
        )
    return Crls(tuple(lists))


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
    expires, serials = None, frozenset[bytes]()
    for tag, begin, end in fields:
        if tag in (_UTC_TIME, _TIME):
            expires = _time(der, tag, begin, end)
        elif tag == _SEQUENCE:
            entries = _fields(der, tag, begin, end)
            serials = frozenset(_first(der, *entry) for entry in entries)
    return Crl(issuer, issued, expires, serials)


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
