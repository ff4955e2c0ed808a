"""AWS Signature Version 4, as the side that checks it.

Source: "AWS Signature Version 4 for API requests" in the IAM User Guide. A request is checked in two steps,
so that the body of a caller without a valid key is never read:

* `claim` reads the head: the key must be known, the time within `SKEW` of ours, the scope `firehose`, and
  `host` and every `x-amz-*` field signed, so that none can be changed or added on the way.
* `Claim.check` computes the signature over the head and the SHA-256 of the body, and compares it in constant
  time. An `x-amz-content-sha256` must be that of the body; unsigned and chunked payloads are refused.

Errors have AWS's codes. Like AWS, they tell a client whose clock is wrong, and the answer's Date says by how
much, which SDKs use to correct it. A copy of a signed request is valid until its time is out of `SKEW`: on a
network that others can read, use TLS.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

from bridge.access.accesskeys import AccessKey

ALGORITHM = "AWS4-HMAC-SHA256"
SERVICE = "firehose"
SKEW = 300  # seconds, as AWS allows
TIME = "%Y%m%dT%H%M%SZ"
_TIME = re.compile(r"\d{8}T\d{6}Z")
_PARTS = ("Credential", "SignedHeaders", "Signature")
_MISMATCH = (
    "The request signature we calculated does not match the signature you provided. Check your AWS Secret "
    "Access Key and signing method. Consult the service documentation for details."
)


class SignatureError(Exception):
    """Raised for a request that is not signed as it must be; `code` is AWS's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Claim(NamedTuple):
    """What the head of a request claims: its key, and what was signed."""

    key: AccessKey
    scope: str  # date/region/service/aws4_request
    time: str
    head: bytes  # the canonical request without the hash of the body
    signature: str
    body_hash: str | None  # as the head has it

    def check(self, body: bytes) -> None:
        """Check the signature; raises SignatureError."""
        actual = hashlib.sha256(body).hexdigest()
        canonical = hashlib.sha256(self.head + b"\n" + actual.encode()).hexdigest()
        text = f"{ALGORITHM}\n{self.time}\n{self.scope}\n{canonical}"
        expected = hmac.digest(_signing_key(self.key.secret, self.scope), text.encode(), "sha256").hex()
        right = hmac.compare_digest(expected.encode(), self.signature.encode())
        if not right or (self.body_hash is not None and self.body_hash != actual):
            raise SignatureError("InvalidSignatureException", _MISMATCH)


def claim(headers: Mapping[str, str], keys: Mapping[str, AccessKey], now: float) -> Claim:
    """What a POST to `/` claims; raises SignatureError.

    `headers` have lower-case names, and values in Latin-1; those of a field that was sent more than once are
    joined by commas. `now` is Unix time.
    """
    authorization = headers.get("authorization", "")
    if not authorization:
        raise SignatureError("MissingAuthenticationTokenException", "Missing Authentication Token")
    parts = _parts(authorization)
    time = headers.get("x-amz-date", "")
    if not _TIME.fullmatch(time):
        raise _incomplete("Authorization header requires existence of an 'X-Amz-Date' header.")
    identifier, _, scope = parts["Credential"].partition("/")
    _check_scope(scope, time)
    key = keys.get(identifier)
    if key is None:
        raise unknown_key()
    _check_time(time, now)
    signed = dict.fromkeys(parts["SignedHeaders"].split(";"))
    if len(";".join(signed)) < len(parts["SignedHeaders"]):
        # A few kilobytes of names would stand for megabytes to be hashed before anything is proven.
        raise SignatureError("InvalidSignatureException", "a header is listed twice in SignedHeaders")
    for name in ("host", *(name for name in headers if name.startswith("x-amz-"))):
        if name not in signed:
            raise SignatureError(
                "InvalidSignatureException", f"'{name}' must be a 'SignedHeader' in the AWS Authorization."
            )
    missing = [name for name in signed if name not in headers]
    if missing:
        raise SignatureError("InvalidSignatureException", f"the signed header {missing[0]!r:.80} is missing")
    # In bytes, as they were received: only spaces of ASCII are folded.
    values = [b" ".join(headers[name].encode("latin-1").split()) for name in signed]
    lines = [b"%b:%b\n" % (name.encode(), value) for name, value in zip(signed, values, strict=True)]
    head = b"POST\n/\n\n%b\n%b" % (b"".join(lines), parts["SignedHeaders"].encode())
    return Claim(key, scope, time, head, parts["Signature"], headers.get("x-amz-content-sha256"))


def unknown_key() -> SignatureError:
    """The error for a key that is not, or no longer, one of the gateway's."""
    return SignatureError(
        "UnrecognizedClientException", "The security token included in the request is invalid."
    )


def _parts(authorization: str) -> dict[str, str]:
    algorithm, _, rest = authorization.partition(" ")
    if algorithm != ALGORITHM:
        raise _incomplete(f"Authorization header requires the algorithm {ALGORITHM}.")
    parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    for name in _PARTS:
        if not parts.get(name):
            raise _incomplete(f"Authorization header requires '{name}' parameter.")
    return parts


def _incomplete(message: str) -> SignatureError:
    return SignatureError("IncompleteSignatureException", message)


def _check_scope(scope: str, time: str) -> None:
    date, *rest = scope.split("/")
    if len(rest) != 3:
        raise _incomplete("Credential must have the form id/date/region/service/aws4_request.")
    _, service, end = rest
    wrong = [
        what
        for what, right in (
            (f"a date that is that of X-Amz-Date, {time[:8]}", date == time[:8]),
            (f"correct service: '{SERVICE}'", service == SERVICE),
            ("a valid terminator: 'aws4_request'", end == "aws4_request"),
        )
        if not right
    ]
    if wrong:
        raise SignatureError("InvalidSignatureException", f"Credential should be scoped to {wrong[0]}.")


def _check_time(time: str, now: float) -> None:
    try:
        date = int(time[:4]), int(time[4:6]), int(time[6:8])
        signed = datetime(*date, int(time[9:11]), int(time[11:13]), int(time[13:15]), tzinfo=UTC).timestamp()
    except ValueError:
        raise _incomplete(f"'{time}' in X-Amz-Date is not a time.") from None
    if abs(signed - now) <= SKEW:
        return
    here = f"{datetime.fromtimestamp(now, UTC):{TIME}}"
    if signed < now:
        edge = f"{datetime.fromtimestamp(now - SKEW, UTC):{TIME}}"
        message = f"Signature expired: {time} is now earlier than {edge} ({here} - 5 min.)"
    else:
        edge = f"{datetime.fromtimestamp(now + SKEW, UTC):{TIME}}"
        message = f"Signature not yet current: {time} is still later than {edge} ({here} + 5 min.)"
    raise SignatureError("InvalidSignatureException", message)


@lru_cache(maxsize=256)  # it is the same for a day, and costs more than all else here
def _signing_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
