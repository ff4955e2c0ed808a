"""Logins with a JSON Web Token (RFC 7519) as the password.

    [auth.plugins.jwt]
    jwks_file = "/etc/streambridge/jwks.json"
    issuer = "https://login.plant.example"
    audience = "streambridge"

What it promises:

* A token counts only with a signature by a key of the file, with the algorithm of that key, which must be
  among `algorithms`. The token does not choose: `none`, a public key used as a shared secret, keys inside the
  token (`jwk`, `jku`, `x5u`) and critical extensions that are not known are refused.
* `exp`, `iss` and `aud` must be present and valid. At `exp` the connection is closed. It is also closed when
  the key that signed the token is no longer in the file, or when the options get another issuer or audience.
* The claim `user_claim` names the user. A user name in CONNECT must be empty or the same.
* The file is read again when it changes. An invalid file is reported, and the old keys stay.

A password without the shape of a token is left to other plugins.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import re
import stat
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import field

from bridge import Accepted, AuthOptions, Denied, Login, hookimpl
from bridge.extras import how_to_install

SAFE = {
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "ES256K", "EdDSA",
}  # fmt: skip
SHARED = {"HS256", "HS384", "HS512"}
LONGEST = 16 * 1024  # bytes of a token
LOOK_EVERY = 1.0  # seconds between two checks for changes of the file
_SHAPE = re.compile(rb"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")

log = logging.getLogger("bridge.auth")


class Options(AuthOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options: `leeway` is in seconds; `algorithms` may also have HS256, HS384 and HS512."""

    jwks_file: Path
    issuer: str
    audience: str
    algorithms: list[str] = field(default_factory=lambda: ["RS256", "PS256", "ES256", "EdDSA"])
    user_claim: str = "sub"
    leeway: int = 10

    def __post_init__(self) -> None:
        mistakes = []
        if unknown := [one for one in self.algorithms if one not in SAFE | SHARED]:
            mistakes.append(f"`algorithms`: {unknown[0]!r} is none of {', '.join(sorted(SAFE | SHARED))}")
        mistakes += [
            f"`{key}` is empty; without it, tokens for other services would let clients in"
            for key in ("issuer", "audience", "algorithms", "user_claim")
            if not getattr(self, key)
        ]
        if not 0 <= self.leeway <= 300:
            mistakes.append("`leeway` is 0 to 300 seconds")
        if mistakes:
            raise ValueError("\n".join(mistakes))

    def mistakes(self) -> list[str]:
        """Return mistakes: a missing library, or a file without keys."""
        if importlib.util.find_spec("jwt") is None:
            return [f"`jwks_file`: PyJWT is missing; {how_to_install('jwt')}"]
        try:
            _keys(self.jwks_file, self.algorithms)
        except OSError as error:
            return [f"`jwks_file`: {self.jwks_file}: {error.strerror}"]
        except ValueError as error:
            return [f"`jwks_file`: {error}"]
        return []

    def files(self) -> list[Path]:
        """Return the key file."""
        return [self.jwks_file]

    def bases(self) -> set[str]:
        """Return the basis of every key: the key with the claims that a token must have."""
        return {key.basis(self) for key in _keys(self.jwks_file, self.algorithms)}


class _Key(NamedTuple):
    """A key of the file, and the digest that identifies it."""

    jwk: Any
    digest: str

    def basis(self, options: Options) -> str:
        """Return the basis on which a token with this key is accepted."""
        return "\n".join((options.issuer, options.audience, options.user_claim, self.digest))


@hookimpl
def authenticate(login: Login, options: Options) -> Accepted | Denied | None:
    """Accept a client whose password is a token."""
    token = login.password or b""
    if not _SHAPE.fullmatch(token):
        return None
    if len(token) > LONGEST:
        return Denied(why=f"a token of {len(token)} bytes")
    jwt = _library()
    try:
        header = jwt.get_unverified_header(token)
        key = _KEY_FILES.of(options).find(header)
        claims = jwt.decode(
            token,
            key.jwk,
            algorithms=[key.jwk.algorithm_name],
            issuer=options.issuer,
            audience=options.audience,
            leeway=options.leeway,
            options={"require": ["exp", "iss", "aud"]},
        )
    except (jwt.PyJWTError, ValueError) as error:
        return Denied(why=f"{type(error).__name__}: {error}")
    user = claims.get(options.user_claim)
    if not isinstance(user, str) or not user or len(user) > 1024 or not user.isprintable():
        return Denied(why=f"the claim {options.user_claim!r} is no user name: {user!r:.100}")
    if login.user and login.user != user:
        return Denied(why=f"the user name {login.user!r} is not {user!r}, as the token says")
    return Accepted(user=user, expires=float(claims["exp"]), basis=key.basis(options))


class _Jwks:
    """The keys of a file, by their ids."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._looked, self._state = 0.0, (0, 0)
        self._known: list[_Key] = []

    def find(self, header: dict[str, Any]) -> _Key:
        """Return the key that a token names, or the only key if it names none. Raises ValueError."""
        with self._lock:
            self._look()
            keys = self._known
        name = header.get("kid")
        fit = keys if name is None and len(keys) == 1 else [key for key in keys if key.jwk.key_id == name]
        if name is None and len(keys) != 1:
            raise ValueError(f"the token names no key, and there are {len(keys)}")
        if len(fit) != 1:
            raise ValueError(f"there is no key {name!r:.100} in {self._options.jwks_file}")
        if header.get("alg") != fit[0].jwk.algorithm_name:
            raise ValueError(f"the token has the algorithm {header.get('alg')!r:.100}, its key another one")
        return fit[0]

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY and self._known:
            return
        self._looked = now
        path = self._options.jwks_file
        try:
            found = path.stat()
            state = (found.st_mtime_ns, found.st_ino)
            if state != self._state:
                self._known = _keys(path, self._options.algorithms)
                self._state = state
        except (OSError, ValueError) as error:
            log.error("%s: the old keys stay: %s", path, error)


class _KeyFiles:
    """The key files, one for each set of options."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, tuple[str, ...]], _Jwks] = {}
        self._lock = threading.Lock()

    def of(self, options: Options) -> _Jwks:
        with self._lock:
            return self._known.setdefault((options.jwks_file, tuple(options.algorithms)), _Jwks(options))


_KEY_FILES = _KeyFiles()


def _library() -> Any:
    """Import PyJWT. That takes a while, so it is done only where tokens are used."""
    return importlib.import_module("jwt")


def _keys(path: Path, algorithms: list[str]) -> list[_Key]:
    """Read the keys of a file that sign with one of these algorithms. Raises OSError or ValueError.

    Anyone who can write the file can log in as any user. A private key in it does not belong on a gateway.
    """
    jwt = _library()
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"users other than its owner can write to {path}; chmod go-w {path}")
    try:
        found = json.loads(path.read_bytes())
        raw = found["keys"]
        private = [one.get("kid") for one in raw if one.get("kty") != "oct" and "d" in one]
        public = [one for one in raw if one.get("use", "sig") == "sig" and "d" not in one]
        keys = [_Key(jwk := jwt.PyJWK(one), _digest(one, jwk.algorithm_name)) for one in public]
    except (jwt.PyJWTError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} is not a set of keys (JWKS, `{{"keys": [...]}}`): {error!r:.200}; get it from the issuer'
        ) from None
    if private:
        raise ValueError(
            f"{path} has a private key ({private[0]!r:.100}): whoever reads the file can make tokens; "
            "replace that key at the issuer, and put only public keys here"
        )
    names = [key.jwk.key_id for key in keys]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{path} has two keys with the id {twice!r:.100}; remove one")
    fit = [key for key in keys if key.jwk.algorithm_name in algorithms]
    if not fit:
        raise ValueError(f"{path} has no key for {', '.join(algorithms)}")
    return fit


def _digest(key: dict[str, Any], algorithm: str) -> str:
    """Return the digest of a key's name and thumbprint members (RFC 7638, 3.2; RFC 8037, 2)."""
    members = [key.get(name) for name in ("kid", "kty", "crv", "x", "y", "n", "e", "k")]
    return hashlib.sha256(json.dumps([algorithm, *members]).encode()).hexdigest()
