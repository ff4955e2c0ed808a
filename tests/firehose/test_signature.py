"""Signatures: what is right is taken; what was changed, left out or is too old is refused as by AWS."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from hypothesis import given
from hypothesis import strategies as st

from bridge.access.accesskeys import AccessKey, read_access_keys
from bridge.errors import ConfigError
from bridge.firehose import signature
from bridge.firehose.signature import SignatureError
from tests.firehose.harness import KEY, OTHER, SECRET, TARGET, Gateway, amz_date, keys_file, signed

LIST = "ListDeliveryStreams"


def answer(gateway: Gateway, fields: dict[str, str], body: bytes = b"{}") -> tuple[int, dict[str, Any], str]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    try:
        connection.request("POST", "/", body, fields)
        found = connection.getresponse()
        return found.status, json.loads(found.read()), found.headers["Date"]
    finally:
        connection.close()


def refused(gateway: Gateway, fields: dict[str, str], body: bytes = b"{}") -> tuple[str, str]:
    status, found, _ = answer(gateway, fields, body)
    assert status == 400, found
    return found["__type"], found["message"]


def replaced(fields: dict[str, str], pattern: str, text: str) -> dict[str, str]:
    return fields | {"Authorization": re.sub(pattern, text, fields["Authorization"])}


def test_a_request_signed_by_botocore_is_taken(gateway: Gateway) -> None:
    assert answer(gateway, signed(LIST, b"{}"))[0] == 200
    assert answer(gateway, signed(LIST, b"{}", host="gateway.plant.example:8443"))[0] == 200


def test_a_field_is_signed_in_the_bytes_that_were_sent(gateway: Gateway) -> None:
    """Characters of UTF-8 have bytes that would be spaces in Latin-1: `à` ends with A0, `Å` with 85."""
    fields = signed(LIST, b"{}", X_Amz_Note="pr\u00fcfstand  \u00e0 la carte, \u00c5, \u6d4b")
    answer = gateway.send(request(fields))
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    answer = gateway.send(request(fields | {"X-Amz-Note": "prufstand"}))
    assert b"InvalidSignatureException" in answer


def test_a_signed_field_may_be_sent_more_than_once(gateway: Gateway) -> None:
    fields = {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": TARGET + LIST, "Host": "h"}
    made = AWSRequest("POST", "http://h/", fields, b"{}")
    for value in ("b  c", "a"):
        made.headers.add_header("X-Test", value)
    SigV4Auth(Credentials(KEY, SECRET), "firehose", "eu-central-1").add_auth(made)
    assert "x-test" in made.headers["Authorization"]
    answer = gateway.send(request(made.headers))
    assert answer.startswith(b"HTTP/1.1 200 "), answer


def request(fields: Mapping[str, str]) -> bytes:
    """A request that asks for the list, and ends its connection."""
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST / HTTP/1.1\r\n{head}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()


def test_the_hash_of_the_body_may_be_in_a_field_and_must_be_right(gateway: Gateway) -> None:
    right = hashlib.sha256(b"{}").hexdigest()
    wrong = hashlib.sha256(b"[]").hexdigest()
    assert answer(gateway, signed(LIST, b"{}", X_Amz_Content_SHA256=right))[0] == 200
    for value in (wrong, "UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"):
        fields = signed(LIST, b"{}", X_Amz_Content_SHA256=value)
        assert refused(gateway, fields)[0] == "InvalidSignatureException"


def test_what_is_changed_on_the_way_is_refused(gateway: Gateway) -> None:
    fields = signed(LIST, b"{}")
    for changed in (
        fields | {"X-Amz-Target": TARGET + "DeleteDeliveryStream"},
        fields | {"Host": "other"},
        fields | {"Content-Type": "text/plain"},
        replaced(fields, r"Signature=\w{4}", "Signature=0000"),
        fields | {"X-Amz-Security-Token": "added"},
        replaced(fields, ";x-amz-target", ""),
        replaced(fields, "host;", ""),
        replaced(fields, "host;", "host;x-more;"),
    ):
        assert refused(gateway, changed)[0] == "InvalidSignatureException", changed
    assert refused(gateway, fields, b'{"Limit": 1}')[0] == "InvalidSignatureException"


def test_a_secret_that_is_wrong_and_a_key_that_is_unknown_are_told_apart_as_by_aws(gateway: Gateway) -> None:
    with pytest.raises(ClientError, match="InvalidSignatureException") as error:
        gateway.client(KEY, "wrong" * 8).list_delivery_streams()
    assert "The request signature we calculated does not match" in str(error.value)
    with pytest.raises(ClientError, match="UnrecognizedClientException"):
        gateway.client("AKIDUNKNOWN", SECRET).list_delivery_streams()
    with pytest.raises(ClientError, match="InvalidSignatureException"):
        gateway.client(KEY, OTHER[1]).list_delivery_streams()


@pytest.mark.parametrize(
    ("pattern", "text", "code"),
    [
        ("AWS4-HMAC-SHA256", "AWS4-ECDSA-P256-SHA256", "IncompleteSignatureException"),
        ("Credential=", "Cred=", "IncompleteSignatureException"),
        ("SignedHeaders=[^,]*", "SignedHeaders=", "IncompleteSignatureException"),
        ("Signature=.*", "", "IncompleteSignatureException"),
        ("/aws4_request", "", "IncompleteSignatureException"),
        ("/aws4_request", "/aws3_request", "InvalidSignatureException"),
        ("/firehose/", "/kinesis/", "InvalidSignatureException"),
        (r"/\d{8}/", "/20200101/", "InvalidSignatureException"),
        (".*", "Bearer abc", "IncompleteSignatureException"),
    ],
)
def test_an_incomplete_signature_is_refused(gateway: Gateway, pattern: str, text: str, code: str) -> None:
    assert refused(gateway, replaced(signed(LIST, b"{}"), pattern, text))[0] == code


def test_a_request_without_signature_or_time_is_refused(gateway: Gateway) -> None:
    fields = signed(LIST, b"{}")
    unsigned = {name: value for name, value in fields.items() if name != "Authorization"}
    assert refused(gateway, unsigned)[0] == "MissingAuthenticationTokenException"
    timeless = {name: value for name, value in fields.items() if name.lower() != "x-amz-date"}
    assert refused(gateway, timeless)[0] == "IncompleteSignatureException"


def at(seconds: float) -> dict[str, str]:
    """A request signed by a client whose clock is so many seconds ahead."""
    request = AWSRequest(
        "POST", "http://h/", {"X-Amz-Target": TARGET + LIST, "Host": "h", "Content-Type": "x"}, b"{}"
    )
    auth = SigV4Auth(Credentials(KEY, SECRET), "firehose", "eu-central-1")
    time = amz_date(seconds)
    request.context["timestamp"] = time
    request.headers["X-Amz-Date"] = time
    canonical = auth.canonical_request(request)
    text = auth.string_to_sign(request, canonical)
    auth._inject_signature_to_request(request, auth.signature(text, request))
    return dict(request.headers.items())


def test_a_clock_may_be_off_by_five_minutes_and_the_answer_says_how_much(gateway: Gateway) -> None:
    assert answer(gateway, at(-240))[0] == answer(gateway, at(240))[0] == 200
    code, message = refused(gateway, at(-400))
    assert code == "InvalidSignatureException"
    assert re.fullmatch(
        r"Signature expired: \d{8}T\d{6}Z is now earlier than \d{8}T\d{6}Z \(\d{8}T\d{6}Z - 5 min\.\)",
        message,
    )
    code, message = refused(gateway, at(400))
    assert code == "InvalidSignatureException"
    assert message.startswith("Signature not yet current: ")
    assert answer(gateway, at(400))[2].endswith(" GMT"), (
        "SDKs correct their clock with the Date of the answer"
    )


def test_the_signature_of_an_example_that_aws_has_published() -> None:
    """The example "GET ListUsers" of the AWS General Reference, with its method, query and service."""
    key = signature._signing_key(
        "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", "20150830/us-east-1/iam/aws4_request"
    )
    assert key.hex() == "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"


@given(
    st.dictionaries(
        st.sampled_from(["authorization", "x-amz-date", "host", "x-amz-target", "x-amz-content-sha256"]),
        st.one_of(
            st.text(st.characters(max_codepoint=255), max_size=60),
            st.sampled_from(
                [
                    "20261123T170000Z",
                    "20269999T999999Z",
                    "AWS4-HMAC-SHA256 Credential=AKID/20261123/r/firehose/aws4_request,"
                    "SignedHeaders=host;x-amz-date;x-amz-target,Signature=0",
                ]
            ),
        ),
    ),
    st.binary(max_size=20),
)
def test_no_head_makes_it_fail_in_another_way(headers: dict[str, str], body: bytes) -> None:
    keys = {"AKID": AccessKey("AKID", "s" * 16, "u")}
    with pytest.raises(SignatureError):
        signature.claim(headers, keys, 1_795_453_200).check(body)


# -- the file of keys ------------------------------------------------------------


def test_the_file_of_keys_is_read_with_comments_and_users(tmp_path: Path) -> None:
    keys = read_access_keys("firehose.access_keys_file", keys_file(tmp_path))
    assert {key.id: key.user for key in keys.values()} == {KEY: "plant", OTHER[0]: "other"}
    path = tmp_path / "one"
    path.write_text("AKID1 0123456789abcdef\n")
    path.chmod(0o640)
    assert read_access_keys("o", path) == {"AKID1": AccessKey("AKID1", "0123456789abcdef", "AKID1")}


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "no keys in it"),
        ("# nothing\n", 0o600, "no keys in it"),
        ("AKID1\n", 0o600, "line 1: not `id secret"),
        ("AKID1 0123456789abcdef u v\n", 0o600, "line 1: not `id secret"),
        ("AKID1 short-secret\n", 0o600, "line 1: a secret has 16 to 256"),
        ("A/D1 0123456789abcdef\n", 0o600, "line 1: an id has"),
        ("AKID1 0123456789abcdef\nAKID1 0123456789abcdefg\n", 0o600, "line 2: the id AKID1 appears twice"),
        ("AKID1 0123456789äbcdef\n", 0o600, "of ASCII"),
        ("AKID1 0123456789abcdef\n", 0o644, "chmod g-w,o= "),
        ("AKID1 0123456789abcdef\n", 0o620, "chmod g-w,o= "),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_without_showing_a_secret(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(says)) as error:
        read_access_keys("firehose.access_keys_file", path)
    assert "0123456789abcdef" not in str(error.value)


def test_keys_are_exchanged_on_reload_and_stay_if_the_new_ones_are_wrong(gateway: Gateway) -> None:
    path = gateway.settings.access_keys_file
    assert path is not None
    path.write_text("AKIDNEW newsecretnewsecretnew\n")
    gateway.call(gateway.front.reload)
    gateway.client("AKIDNEW", "newsecretnewsecretnew").list_delivery_streams()
    with pytest.raises(ClientError, match="UnrecognizedClientException"):
        gateway.client().list_delivery_streams()
    path.write_text("broken\n")
    gateway.call(gateway.front.reload)
    gateway.client("AKIDNEW", "newsecretnewsecretnew").list_delivery_streams()
