"""The plugin `jwt`: good tokens, hostile tokens, and the end of a token."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import time
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bridge import Accepted, Denied
from bridge.access.accounts import Account
from bridge.access.users import hash_password
from bridge.auth.settings import AuthSettings
from bridge.auth.supervisor import Auth
from bridge.mqtt.wire import properties as p
from bridge.mqtt.wire.packets import V5
from bridge.plugin import discovery
from bridge.plugin.authtesting import AuthContract, login
from tests.http.conftest import Service, eventually
from tests.mqtt.harness import Bridge, Client, Packet, connect, run_async, running

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
STRANGER = ec.generate_private_key(ec.SECP256R1())
SECRET = b"a shared secret of more than thirty-two bytes"
ISSUER, AUDIENCE = "https://login.example", "streambridge"


def public(key: Any, kid: str) -> dict[str, Any]:
    """A key as it is in a file of keys."""
    algorithm = (
        jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    )
    found: dict[str, Any] = json.loads(algorithm.to_jwk(key.public_key()))
    return found | {"kid": kid, "use": "sig"}


def jwks(root: Path, *more: dict[str, Any]) -> Path:
    path = root / "jwks.json"
    write_keys(path, public(RSA, "rsa"), public(EC, "ec"), *more)
    return path


def write_keys(path: Path, *keys: dict[str, Any]) -> None:
    """Replace a file of keys at once, as one that is never seen half written."""
    fresh = path.with_name("fresh.json")
    fresh.write_text(json.dumps({"keys": keys}))
    fresh.replace(path)


def claims(**changed: Any) -> dict[str, Any]:
    found = {"sub": "pump-7", "iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 3600} | changed
    return {key: value for key, value in found.items() if value is not None}


def token(
    payload: dict[str, Any] | None = None,
    key: Any = EC,
    algorithm: str = "ES256",
    kid: str | None = "ec",
    **header: Any,
) -> bytes:
    names = {"kid": kid} if kid is not None else {}
    return jwt.encode(payload or claims(), key, algorithm, headers=names | header).encode()


def part(value: Any) -> bytes:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def forged(header: dict[str, Any], secret: bytes = b"", payload: dict[str, Any] | None = None) -> bytes:
    """A token that a library would not make: any header, signed by HMAC, or not at all."""
    signed = part(header) + b"." + part(payload or claims())
    digest = hmac.digest(secret, signed, hashlib.sha256) if secret else b""
    return signed + b"." + part(digest)


PEM = EC.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
GOOD = token().split(b".")
HOSTILE: dict[str, bytes] = {
    "no algorithm": forged({"alg": "none", "kid": "ec"}),
    "no algorithm, in other letters": forged({"alg": "NoNe", "kid": "ec"}),
    "no signature": token().rpartition(b".")[0] + b".",
    "the public key as a shared secret": forged({"alg": "HS256", "kid": "ec"}, PEM),
    "the public key as a shared secret, without its name": forged({"alg": "HS256"}, PEM),
    "another algorithm of the same kind of key": token(key=RSA, algorithm="RS512", kid="rsa"),
    "the key of another": token(key=RSA, algorithm="RS256", kid="ec"),
    "a key that is not known": token(key=STRANGER, kid="stranger"),
    "a signature of another key": token(key=STRANGER),
    "a key in the token": token(key=STRANGER, jwk=public(STRANGER, "ec")),
    "an address of keys in the token": token(key=STRANGER, jku="http://127.0.0.1/keys"),
    "the name of a file as a key": token(kid="../../dev/null"),
    "a key name that is no text": forged({"alg": "ES256", "kid": ["ec"]}),
    "a critical extension": token(crit=["x"], x=1),
    "two keys fit": token(kid=None),
    "over": token(claims(exp=int(time.time()) - 60)),
    "without an end": token(claims(exp=None)),
    "an end that is no number": forged({"alg": "ES256", "kid": "ec"}, payload=claims(exp="never")),
    "not yet": token(claims(nbf=int(time.time()) + 86_400, exp=int(time.time()) + 90_000)),
    "another issuer": token(claims(iss="https://evil.example")),
    "without an issuer": token(claims(iss=None)),
    "another audience": token(claims(aud="another-service")),
    "without an audience": token(claims(aud=None)),
    "without a user": token(claims(sub=None)),
    "an empty user": token(claims(sub="")),
    "a user with a line end": token(claims(sub="ann\nbob")),
    "too long": token(claims(more="x" * 20_000)),
    "changed claims": b".".join((GOOD[0], part(claims(sub="root")), GOOD[2])),
    "header that is no map": part([1]) + b"." + part(claims()) + b"." + part(b"x"),
    "nonsense": b"a.b.c",
    "deep": part(b"[" * 5000) + b"." + part(claims()) + b"." + part(b"x"),
}  # fmt: skip


class TestJwt(AuthContract):
    """The contract of all such plugins."""

    plugin = "jwt"

    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.path = jwks(tmp_path)

    def options(self) -> dict[str, Any]:
        return {"jwks_file": str(self.path), "issuer": ISSUER, "audience": AUDIENCE}

    def good(self) -> list[Any]:
        return [
            login("pump-7", token()),
            login(None, token()),
            login("", token(key=RSA, algorithm="RS256", kid="rsa")),
            login("pump-7", token(claims(aud=["x", AUDIENCE]))),
        ]

    def bad(self) -> list[Any]:
        return [login("", one) for one in HOSTILE.values()] + [login("ann", token())]

    def foreign(self) -> list[Any]:
        return [
            login("ann", b"a password"),
            login("ann", None),
            login("ann", b"a.b"),
            login("ann", b"a.b!.c"),
        ]


def test_keys_are_exchanged_without_a_restart_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = jwks(tmp_path)
    plugin = discovery.load().manager.get_plugin("jwt")
    options = plugin.Options(jwks_file=path, issuer=ISSUER, audience=AUDIENCE)

    def until(wanted: type) -> None:
        end = time.monotonic() + 60
        while not isinstance(plugin.authenticate(login("", token(key=STRANGER, kid="new")), options), wanted):
            assert time.monotonic() < end
            time.sleep(0.05)

    until(Denied)
    jwks(tmp_path, public(STRANGER, "new"))
    until(Accepted)
    path.write_text("{")
    time.sleep(0)
    until(Accepted)
    for wrong in ("{", '{"keys": []}', '{"keys": [{"kty": "oct", "k": "YQ"}]}', '{"keys": 7}'):
        path.write_text(wrong)
        assert "jwks_file" in options.mistakes()[0]


def test_a_shared_secret_counts_only_if_it_is_asked_for(tmp_path: Path) -> None:
    path = jwks(tmp_path, {"kty": "oct", "k": part(SECRET).decode(), "kid": "shared", "alg": "HS256"})
    plugin = discovery.load().manager.get_plugin("jwt")
    shared = login("", token(key=SECRET, algorithm="HS256", kid="shared"))
    options = {"jwks_file": path, "issuer": ISSUER, "audience": AUDIENCE}
    assert isinstance(plugin.authenticate(shared, plugin.Options(**options)), Denied)
    asked = plugin.Options(**options, algorithms=["HS256", "ES256"])
    assert plugin.authenticate(shared, asked).user == "pump-7"
    confused = login("", forged({"alg": "HS256", "kid": "ec"}, PEM))
    assert isinstance(plugin.authenticate(confused, asked), Denied)


def test_a_device_logs_in_with_its_token_and_is_disconnected_when_it_ends(tmp_path: Path) -> None:
    plugin = discovery.load().manager.get_plugin("jwt")
    options = plugin.Options(jwks_file=jwks(tmp_path), issuer=ISSUER, audience=AUDIENCE, leeway=0)
    auth = Auth(AuthSettings(plugins={"jwt": options}, timeout=30_000))

    async def log_in(bridge: Bridge, name: str, password: bytes) -> tuple[Client, int]:
        client = await bridge.open()
        client.level = V5
        client.send(connect(name, user="", password=password, level=V5))
        return client, (await client.receive()).body[1]

    async def test(bridge: Bridge) -> None:
        long, code = await log_in(bridge, "long", token(claims(sub="pump-8")))
        assert code == 0
        end = int(time.time()) + 6  # it is short, since the plugin runs by now
        short, code = await log_in(bridge, "short", token(claims(exp=end)))
        assert code == 0
        _, code = await log_in(bridge, "bad", HOSTILE["no algorithm"])
        assert code == 0x86
        assert (await short.receive()).body[:1] == b"\xa0", "Maximum connect time"
        assert time.time() >= end
        assert await short.closed()
        assert await long.alive()
        assert {one.identity.user for one in bridge.broker.sessions.all()} >= {"pump-8"}

    async def main() -> None:
        async with asyncio.timeout(90), running(tmp_path, auth=auth, allow_anonymous=False) as bridge:
            await test(bridge)

    run_async(main())


LASTING = {p.SESSION_EXPIRY: 1000}
BY_RSA: dict[str, Any] = {"key": RSA, "algorithm": "RS256", "kid": "rsa"}


async def opened(bridge: Bridge, name: str, password: bytes, **options: Any) -> tuple[Client, Packet]:
    """A client with a token, and its CONNACK."""
    client = await bridge.open()
    client.level = V5
    client.send(connect(name, user="", password=password, level=V5, properties=LASTING, **options))
    return client, await client.receive()


def test_a_key_that_is_taken_out_ends_the_connections_of_its_tokens_and_no_others(tmp_path: Path) -> None:
    plugin = discovery.load().manager.get_plugin("jwt")
    path = jwks(tmp_path)
    options = plugin.Options(jwks_file=path, issuer=ISSUER, audience=AUDIENCE)
    auth = Auth(AuthSettings(plugins={"jwt": options}, timeout=30_000))

    async def test(bridge: Bridge) -> None:
        watcher, _ = await opened(bridge, "watcher", token(claims(sub="watcher"), **BY_RSA))
        await watcher.subscribe(("will", 0))
        goes, answer = await opened(bridge, "goes", token(), will=("will", b"", 0))
        assert answer.body[1] == 0
        bridge.front.reload(bridge.config)
        assert await goes.alive(), "nothing was taken away"
        renamed = {"kty": "oct", "k": part(b"more").decode(), "kid": "x", "use": "enc"}
        write_keys(path, renamed, public(RSA, "rsa") | {"alg": "RS256", "x5t": "new"})
        bridge.front.reload(bridge.config)
        assert await goes.receive() == Packet(0xE0, b"\x87\0"), "Not authorized"
        assert await goes.closed()
        assert await watcher.silent(), "it stays, and gets no will"
        refused = (await opened(bridge, "goes", token()))[1].body[1]
        assert refused in (0x86, 0x87), "nor does it let anybody in"
        back, answer = await opened(bridge, "goes", token(**BY_RSA), clean=False)
        assert answer.body[:2] == b"\1\0", "the session waits for another token"

        # An issuer that is no longer the right one counts as a key that is gone.
        other = msgspec.structs.replace(options, issuer="https://other.example")
        auth.reload(msgspec.structs.replace(auth.settings, plugins={"jwt": other}))
        bridge.front.reload(bridge.config)
        assert await back.receive() == Packet(0xE0, b"\x87\0")
        assert await watcher.closed()

    async def main() -> None:
        async with asyncio.timeout(90), running(tmp_path, auth=auth, allow_anonymous=False) as bridge:
            await test(bridge)

    run_async(main())


def test_a_new_key_lets_clients_in_before_the_service_has_noticed_the_file(tmp_path: Path) -> None:
    plugin = discovery.load().manager.get_plugin("jwt")
    options = plugin.Options(jwks_file=jwks(tmp_path), issuer=ISSUER, audience=AUDIENCE)
    auth = Auth(AuthSettings(plugins={"jwt": options}, timeout=30_000))

    async def main() -> None:
        async with asyncio.timeout(90), running(tmp_path, auth=auth, allow_anonymous=False) as bridge:
            fresh = token(key=STRANGER, kid="new")
            assert (await opened(bridge, "c", fresh))[1].body[1] == 0x86
            jwks(tmp_path, public(STRANGER, "new"))
            code = 0x86
            while code == 0x86:  # the plugin looks at the file every second
                client, answer = await opened(bridge, "c", fresh)
                code = answer.body[1]
            assert code == 0
            assert await client.alive()

    run_async(main())


def test_a_running_service_notices_a_key_that_is_gone_without_a_signal(tmp_path: Path) -> None:
    path = jwks(tmp_path)
    config = (
        f'[auth]\ntimeout = "30s"\n[auth.plugins.jwt]\njwks_file = "{path}"\nissuer = "{ISSUER}"\n'
        f'audience = "{AUDIENCE}"\n'
    )
    service = Service(tmp_path, config)
    try:
        with socket.create_connection(("127.0.0.1", service.mqtt_port), timeout=60) as sock:
            sock.sendall(connect("c", user="", password=token(), level=V5))
            assert sock.recv(100)[3] == 0
            write_keys(path, public(RSA, "rsa"))
            assert sock.recv(4) == b"\xe0\x02\x87\0"
            assert sock.recv(4) == b""
        path.write_text("nonsense")
        eventually(lambda: service.logged("is not a set of keys"))
    finally:
        service.process.terminate()
        service.process.wait()


def test_a_user_with_certificates_does_not_log_in_with_a_token(tmp_path: Path) -> None:
    plugin = discovery.load().manager.get_plugin("jwt")
    options = plugin.Options(jwks_file=jwks(tmp_path), issuer=ISSUER, audience=AUDIENCE)
    auth = Auth(AuthSettings(plugins={"jwt": options}, timeout=30_000))
    accounts = [Account(name="pump-7", certificates=["cn:plc-1"])]

    async def main() -> None:
        settings: dict[str, Any] = {"allow_anonymous": False, "user": accounts}
        async with asyncio.timeout(90), running(tmp_path, auth=auth, **settings) as bridge:
            assert (await opened(bridge, "a", token(claims(sub="pump-8"))))[1].body[1] == 0
            assert (await opened(bridge, "b", token()))[1].body[1] == 0x86
            # A user who gets such a list loses what a token has opened before.
            client, _ = await opened(bridge, "c", token(claims(sub="pump-8")))
            more = [*accounts, Account(name="pump-8", certificates=["cn:plc-2"])]
            bridge.front.reload(msgspec.structs.replace(bridge.config, user=more))
            assert await client.receive() == Packet(0xE0, b"\x87\0")
            assert (await opened(bridge, "c", token(claims(sub="pump-8"))))[1].body[1] == 0x86
            # So does one whose name is now in the users file.
            client, _ = await opened(bridge, "d", token(claims(sub="pump-9")))
            path = tmp_path / "users"
            path.write_text(f"pump-9:{hash_password(b'x')}\n")
            path.chmod(0o600)
            bridge.front.reload(msgspec.structs.replace(bridge.config, users_file=path))
            assert await client.receive() == Packet(0xE0, b"\x87\0")

    run_async(main())
