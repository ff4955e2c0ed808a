"""What an error of AWS means: one table from its code, or botocore's exception, to what to do.

The codes are those of S3 (API reference, "Error responses"), of the JSON services ("Common errors"), and of
STS. A text has the sentence of the service only if its code is in this table: the client that defined the
export can read the text, and may have chosen a server that is not AWS. A sentence is cut after its first
line, because that of a wrong signature goes on with the signed headers, and a token is among them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from bridge.printable import printable, without_credentials

MAX_SENTENCE = 300  # characters
MAX_SKEW = 300.0  # seconds; AWS takes 5 minutes in most services, and 15 in S3
DENIED = frozenset(
    {"AccessDenied", "AccessDeniedException", "AllAccessDisabled", "UnauthorizedOperation", "403"}
)
_RENEW = "renew the credentials at their source; the next attempt asks it again"
_REGION = 'set region = "{there}" in the export, or in [aws]'
_KEY = (
    "AWS knows no such key: it was deleted, belongs to another account or partition, or its session token is "
    "missing; correct the credentials"
)
_SIGNATURE = "the secret key is not that of this access key; correct the credentials"
_CLOCK = "this machine's clock is {skew}; set it, for example with `timedatectl set-ntp true`"
_ABSENT = "create it, or correct its name, its region, or the account of the credentials"
_KMS = "correct the KMS key, its state, or its policy"
_POLICY = "allow {action} for this identity, in its policy and in that of the destination"
REMEDIES = {
    **dict.fromkeys(("PermanentRedirect", "TemporaryRedirect", "301", "307"), _REGION),
    **dict.fromkeys(("AuthorizationHeaderMalformed", "IllegalLocationConstraintException"), _REGION),
    **dict.fromkeys(("IllegalLocationConstraint", "InvalidRegion"), _REGION),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _RENEW),
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken"), _KEY),
    **dict.fromkeys(("UnrecognizedClient", "UnrecognizedClientException"), _KEY),
    **dict.fromkeys(("SignatureDoesNotMatch", "InvalidSignatureException"), _SIGNATURE),
    **dict.fromkeys(("IncompleteSignature", "IncompleteSignatureException"), _SIGNATURE),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"), _CLOCK),
    **dict.fromkeys(("NoSuchBucket", "ResourceNotFoundException"), _ABSENT),
    **dict.fromkeys(("KMSAccessDeniedException", "KMSDisabledException", "KMSNotFoundException"), _KMS),
    **dict.fromkeys(("KMSInvalidStateException", "KMS.DisabledException", "KMS.NotFoundException"), _KMS),
    **dict.fromkeys(DENIED, _POLICY),
    # botocore's exceptions
    "NoCredentialsError": "set [aws.credentials.iot], `profile` of [aws], or AWS_... variables",
    "PartialCredentialsError": "complete the credentials at their source",
    "CredentialRetrievalError": "correct the source of the credentials; the next attempt asks it again",
    "ProfileNotFound": "correct `profile` of [aws], or add it to the AWS config file",
    "SSLError": "if the server has a certificate of your own CA, name the CA in {ca}",
    "ProxyConnectionError": "correct {proxy}",
}
# The right that a call needs, where it is not the name of the call (Service Authorization Reference, S3).
_RIGHTS = {
    **dict.fromkeys(("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"), "PutObject"),
    **dict.fromkeys(("ListObjectsV2", "HeadBucket"), "ListBucket"),
    "HeadObject": "GetObject",
    "ListParts": "ListMultipartUploadParts",
}
_ACTION = re.compile(r"perform:? ([A-Za-z0-9-]+:[A-Za-z0-9]+)")
_LABEL = re.compile(r"[a-z0-9-]{1,64}")


def asked(model: Any, context: Mapping[str, Any] | None, identity: str) -> dict[str, str]:
    """What a call asked for, which the error of botocore does not say: for `response["Asked"]`."""
    action = ""
    if model is not None:
        action = f"{model.service_model.signing_name}:{_RIGHTS.get(model.name, model.name)}"
    return {"identity": identity, "region": str((context or {}).get("client_region") or ""), "action": action}


def sentence(code: str, response: Mapping[str, Any]) -> str:
    """The first line of the service's message; empty if the code is not in the table."""
    if code not in REMEDIES:
        return ""
    lines = str(response.get("Error", {}).get("Message") or "").strip().splitlines()
    return printable(without_credentials(lines[0]))[:MAX_SENTENCE].rstrip(".") if lines else ""


def as_whom(response: Mapping[str, Any]) -> str:
    """The identity and the region of the call, such as `with the access key AKIA1 (env) in eu-west-1`."""
    about = response.get("Asked", {})
    who, region = about.get("identity"), about.get("region")
    return " ".join([*([f"with {who}"] if who else []), *([f"in {region}"] if region else [])])


def remedy(code: str, response: Mapping[str, Any]) -> str:
    """What to do about an answer; empty if the code is not in the table."""
    error, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    headers = meta.get("HTTPHeaders", {})
    text, skew = REMEDIES.get(code, ""), _skew(headers.get("date", ""))
    if text is _SIGNATURE and skew is not None and abs(skew) > MAX_SKEW:
        text = _CLOCK
    there = str(error.get("Region") or headers.get("x-amz-bucket-region") or "")
    found = _ACTION.search(str(error.get("Message") or ""))
    action = found[1] if found else response.get("Asked", {}).get("action") or "the call"
    return text.format(
        there=there if _LABEL.fullmatch(there) else "that of the bucket", action=action, skew=_spoken(skew)
    )


def remedy_of(error: BaseException, ca: str, proxy: str) -> str:
    """What to do about an exception of botocore; empty if not known. `ca` and `proxy` name the options."""
    for one in type(error).__mro__:
        if one.__name__ in REMEDIES:
            return REMEDIES[one.__name__].format(ca=ca, proxy=proxy)
    return ""


def _skew(date: str) -> float | None:
    """The seconds by which this machine's clock is ahead of an answer's `Date`."""
    try:
        there = parsedate_to_datetime(date)
    except (ValueError, TypeError, OverflowError):
        return None
    return (datetime.now(UTC) - there.replace(tzinfo=there.tzinfo or UTC)).total_seconds()


def _spoken(skew: float | None) -> str:
    if skew is None or abs(skew) < 1:
        return "not that of AWS"
    return f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
