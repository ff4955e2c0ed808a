"""Encryption at rest: the keys of a data directory, and the two methods that use them.

What it promises
----------------
* Without the master key, sealed data cannot be read, or changed unnoticed.
* No key is ever used twice with the same nonce, whatever happens to files: see "Keys".
* A wrong key is reported differently from damage. Neither causes data to be deleted.

Master key
----------
A text file with one key of 64 hexadecimal digits (32 bytes) per line. Empty lines and lines that begin with
`#` are ignored. The first key encrypts, and all keys decrypt. So everything stays readable while a key is
replaced: see `Keys.rotate`.

Keys
----
    master key --encrypts--> opening key --HKDF(what is sealed)--> data key

A process that seals data draws an *opening key*, 32 random bytes, and a random number that names the key. It
never seals with the opening key of another process. The nonce of each message is the next value of a counter
in the memory of the process. Neither keys nor nonces depend on the content of a disk. So a torn tail, a
rewritten file, a restored backup or a copied directory cannot repeat a pair of key and nonce.

    <data_dir>/keys/<opening, 16 hex digits>.key = copy, zeros up to 4096, copy, zeros up to 8192
    copy   = magic "SBKEY\\0\\0\\1" | master u64 | opening u64 | nonce 12 bytes | sealed key 48 bytes
             | crc u32 of what precedes it                                                  88 bytes
    sealed = opening u64 | counter u64 | ciphertext | tag 16 bytes        32 bytes more than the plaintext

All numbers are little-endian. `master` names the key that encrypts the copy: the first 8 bytes of
HMAC-SHA256(master key, "streambridge key id\\1"). The copy's key is HMAC-SHA256(master key, "streambridge
wrap\\1"), its additional data is what precedes the nonce. A data key is HMAC-SHA256(opening key, context,
"\\1"), which is HKDF-Expand (RFC 5869) for one block. `context` names what is sealed, such as a segment of a
stream. The cipher is AES-256-GCM. Its nonce is 4 zero bytes and the counter; its additional data is the
context and what the caller adds.

The file `spare` has the size of a key file and becomes the next one, so a start on a full disk needs no space
for its key. The copies are written in place and synced one after the other, so one is always readable: if one
is damaged or torn, it is written first. A start writes a damaged copy again. A process holds a shared lock
(flock) on the key file with which it seals, and `collect` deletes only files that nobody has locked. `keys/`
itself is locked while files are created, rotated, repaired or deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import secrets
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from bridge import durable
from bridge.deflate import crc32
from bridge.errors import CorruptData, EncryptionKeyError
from bridge.extras import how_to_install
from bridge.readable import read_regular, unreadable

DIRECTORY = "keys"
ENDING = ".key"
SPARE = "spare"
OVERHEAD = 32  # bytes that sealing adds
_MAGIC = b"SBKEY\0\0\1"
_COPY = struct.Struct("<8sQQ12s48sI")
_NAMED = struct.Struct("<8sQQ")  # what precedes the nonce
_PREFIX = struct.Struct("<QQ")
_BLOCK = 4096
_SIZE = 2 * _BLOCK
_KEY = 32
CREDENTIALS = "/run/credentials"  # of all units
OWN_CREDENTIALS = f"{CREDENTIALS}/streambridge.service"  # of the installed service
CREDENTIAL_SOURCES = "/etc/credstore"
_CACHED = 256  # data keys; making one takes some microseconds
RESTORE = "restore it, since encrypted data is stored here. Nothing was changed"
CREATE = "create it with `streambridge keys new {path}`"


def read_master(path: Path, remedy: str = CREATE) -> list[bytes]:
    """The keys in a file, the one that encrypts first; raises EncryptionKeyError.

    `remedy` is what to do without that file.
    """
    try:
        text = read_regular(path)[0].decode("ascii", "replace")
    except OSError as error:
        why = unreadable(path, remedy.format(path=path)) or error
        raise EncryptionKeyError(f"{path}: the key file cannot be read: {why}") from None
    lines = [line.strip() for line in text.splitlines()]
    found = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        try:
            key = bytes.fromhex(line)
        except ValueError:
            key = b""
        if len(key) != _KEY:
            raise EncryptionKeyError(
                f"{path}, line {number}: this is not a key; a key has 64 hexadecimal digits; restore the file"
            )
        found.append(key)
    if not found:
        raise EncryptionKeyError(f"{path}: there is no key in this file; {remedy.format(path='FILE')}")
    return found


def may_replace(path: Path) -> bool:
    """Whether this user may replace a key file, and it stays replaced."""
    path = path.resolve()
    return not _is_credential(path) and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def _is_credential(path: Path) -> bool:
    """Whether systemd makes this file from another one at each start."""
    own = os.environ.get("CREDENTIALS_DIRECTORY", "")
    directories = {CREDENTIALS, own} - {"", CREDENTIAL_SOURCES}
    return any(path.resolve().is_relative_to(Path(directory).resolve()) for directory in directories)


def new_master() -> str:
    """A line for a key file."""
    return f"{secrets.token_hex(_KEY)}\n"


def name_of(master: bytes) -> int:
    """The name of a master key, which says nothing about the key."""
    return int.from_bytes(_derived(master, b"streambridge key id")[:8], "little")


def opening_of(sealed: bytes | memoryview) -> int:
    """The number of the opening key that something is sealed with."""
    return int.from_bytes(sealed[:8], "little")


def is_used(data_dir: Path) -> bool:
    """Whether something in a data directory may be sealed."""
    return any(_files(data_dir / DIRECTORY))


def _files(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from sorted(directory.glob(f"*{ENDING}"))


def _derived(key: bytes, info: bytes) -> bytes:
    return hmac.digest(key, info + b"\1", "sha256")


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise EncryptionKeyError(
            f"encryption needs the package cryptography; install it with `{how_to_install('encryption')}`"
        ) from None
    return AESGCM(key)


class _Copy(NamedTuple):
    """One copy in a key file: which master key encrypts it, and its bytes."""

    master: int
    opening: int
    nonce: bytes
    sealed: bytes

    def key(self, masters: Collection[bytes]) -> bytes | None:
        """The opening key, if one of these master keys decrypts it."""
        from cryptography.exceptions import InvalidTag

        for master in masters:
            if name_of(master) == self.master:
                named = _NAMED.pack(_MAGIC, self.master, self.opening)
                with contextlib.suppress(InvalidTag):
                    wrap = _cipher(_derived(master, b"streambridge wrap"))
                    key: bytes = wrap.decrypt(self.nonce, self.sealed, named)
                    return key
        return None


def _encoded(opening: int, key: bytes, master: bytes) -> bytes:
    named, nonce = _NAMED.pack(_MAGIC, name_of(master), opening), os.urandom(12)
    sealed = _cipher(_derived(master, b"streambridge wrap")).encrypt(nonce, key, named)
    content: bytes = named + nonce + sealed
    return content + crc32(content).to_bytes(4, "little")


def _copies(data: bytes, opening: int) -> list[_Copy | None]:
    """Both copies of a key file; None for one that is damaged."""
    found: list[_Copy | None] = []
    for start in (0, _BLOCK):
        copy = data[start : start + _COPY.size]
        if len(copy) == _COPY.size and crc32(copy[:-4]) == int.from_bytes(copy[-4:], "little"):
            magic, master, number, nonce, sealed, _ = _COPY.unpack(copy)
            found.append(_Copy(master, number, nonce, sealed) if magic == _MAGIC else None)
        else:
            found.append(None)
    return [copy if copy is not None and copy.opening == opening else None for copy in found]


def _readable(data: bytes, opening: int, masters: Collection[bytes]) -> list[bool]:
    """Which copies of a key file give the opening key."""
    return [copy is not None and copy.key(masters) is not None for copy in _copies(data, opening)]


def _copies_in(path: Path) -> list[_Copy | None]:
    """As `_copies`. Raises OSError."""
    try:
        return _copies(path.read_bytes(), int(path.stem, 16))
    except ValueError:  # the name is no number
        return [None, None]


@contextlib.contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def damaged(data_dir: Path) -> dict[Path, int]:
    """The key files with damaged copies, and how many; without the master key. Raises OSError."""
    directory = data_dir / DIRECTORY
    if not directory.is_dir():
        return {}
    with _locked(directory, fcntl.LOCK_SH):  # a rotation tears one copy after the other
        found = {path: _copies_in(path).count(None) for path in _files(directory)}
    return {path: number for path, number in found.items() if number}


class Keys:
    """The keys of one data directory, for one process. `seal` and `open` are for any thread."""

    def __init__(self, data_dir: Path, key_file: Path | None = None) -> None:
        """`key_file` has the master key; without one, nothing can be sealed or opened."""
        self.directory, self.key_file = data_dir / DIRECTORY, key_file
        self._openings: dict[int, bytes] = {}  # opening keys
        self._data: dict[tuple[int, bytes], Any] = {}  # ciphers
        self._own: int | None = None  # what this process seals with
        self._counter = count()
        self._lock = -1  # on the own key file, as long as this process lives
        self._making = threading.Lock()

    def check(self) -> list[Path]:
        """Decrypt all key files; returns those of which both copies are damaged.

        Raises EncryptionKeyError if the master key is missing, cannot be read, or does not fit.
        """
        files = list(_files(self.directory))
        if not files and self.key_file is None:
            return []
        masters = self._masters()
        _cipher(bytes(_KEY))  # says what to install
        return [path for path in files if not self._load(path, masters)]

    def _masters(self) -> list[bytes]:
        if self.key_file is None:
            raise EncryptionKeyError(
                f"{self.directory.parent}: encrypted data is stored here, and no key is configured; set "
                "key_file in [encryption] to the file with the key. Nothing was changed"
            )
        return read_master(self.key_file, RESTORE if any(_files(self.directory)) else CREATE)

    def _load(self, path: Path, masters: list[bytes]) -> bool:
        """Decrypt a key file; whether a copy is sound. Raises EncryptionKeyError."""
        try:
            copies = _copies_in(path)
        except OSError:
            return False
        sound = [copy for copy in copies if copy is not None]
        for copy in sound:
            if (key := copy.key(masters)) is not None:
                self._openings[copy.opening] = key
                return True
        known = {name_of(master) for master in masters}
        if any(copy.master not in known for copy in sound):
            needed = ", ".join(sorted({f"{copy.master:016x}" for copy in sound}))
            raise EncryptionKeyError(
                f"{self.key_file}: this is another key than the one that {path} needs ({needed}, here is "
                f"{', '.join(f'{name:016x}' for name in sorted(known))}); restore the file with the right "
                "key. Nothing was changed"
            )
        return False

    @property
    def configured(self) -> bool:
        """Whether there is a key file to seal with."""
        return self.key_file is not None

    def knows(self, opening: int) -> bool:
        """Whether something sealed with this opening key can be opened; raises EncryptionKeyError."""
        if opening not in self._openings:
            path = self._path(opening)
            if not path.exists():
                return False
            self._load(path, self._masters())
        return opening in self._openings

    def missing(self, opening: int) -> str:
        """What to do about an opening key that is not known."""
        path = self._path(opening)
        state = "is damaged" if path.exists() else "is missing"
        return f"{path} {state}, which this data needs; restore it from a backup"

    def _path(self, opening: int) -> Path:
        return self.directory / f"{opening:016x}{ENDING}"

    # -- sealing ---------------------------------------------------------------------------------
    def own(self) -> int:
        """The number of the opening key of this process; the first call makes it.

        Raises EncryptionKeyError or OSError.
        """
        if self._own is None:
            with self._making:
                self._own = self._own if self._own is not None else self._make()
        return self._own

    def _make(self) -> int:
        with self._locked():
            master = self._masters()[0]  # read again: it may have been rotated since the start
            opening, key = secrets.randbits(64), secrets.token_bytes(_KEY)
            path, spare = self._path(opening), self.directory / SPARE
            copy = _encoded(opening, key, master).ljust(_BLOCK, b"\0")
            lock = os.open(spare, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                _write(lock, 0, 2 * copy)
                spare.rename(path)
                durable.sync_directory(self.directory)
            except OSError:
                os.close(lock)
                path.unlink(missing_ok=True)
                raise
            with contextlib.suppress(OSError):  # then the next start needs room
                spare.write_bytes(bytes(_SIZE))
        self._openings[opening], self._lock = key, lock
        return opening

    def seal(self, context: bytes, added: bytes, plain: bytes) -> bytes:
        """Encrypt `plain`; `added` is authenticated with it. Raises EncryptionKeyError or OSError."""
        return b"".join(self.seal_parts(context, added, plain))

    def seal_parts(self, context: bytes, added: bytes, plain: bytes) -> tuple[bytes, bytes]:
        """As `seal`, in two parts: a copy of a large one costs a page fault for each of its pages."""
        opening, number = self.own(), next(self._counter)
        cipher = self._data.get((opening, context)) or self._data_key(opening, context)
        prefix = _PREFIX.pack(opening, number)
        nonce = b"\0\0\0\0" + prefix[8:]
        return prefix, cipher.encrypt(nonce, plain, context + added)

    def open(self, context: bytes, added: bytes, sealed: bytes | memoryview) -> bytes:
        """Decrypt what `seal` returned for the same context and `added`.

        Raises CorruptData if it was changed or belongs elsewhere, EncryptionKeyError if its key is unknown.
        """
        from cryptography.exceptions import InvalidTag

        if len(sealed) < OVERHEAD:
            raise CorruptData("it is too short to be sealed")
        opening, number = _PREFIX.unpack_from(sealed)
        cipher = self._data.get((opening, context))
        if cipher is None:
            if not self.knows(opening):
                raise EncryptionKeyError(self.missing(opening))
            cipher = self._data_key(opening, context)
        nonce = b"\0\0\0\0" + number.to_bytes(8, "little")
        try:
            return bytes(cipher.decrypt(nonce, bytes(sealed[_PREFIX.size :]), context + added))
        except InvalidTag:
            raise CorruptData("it was changed, or belongs elsewhere") from None

    def _data_key(self, opening: int, context: bytes) -> Any:
        if len(self._data) >= _CACHED:
            self._data.clear()
        cipher = self._data[opening, context] = _cipher(_derived(self._openings[opening], context))
        return cipher

    def close(self) -> None:
        """Seal nothing more with the own key; another process may delete it, if nothing needs it."""
        if self._own is not None:
            self._own = None
            os.close(self._lock)

    # -- all key files ---------------------------------------------------------------------------
    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        durable.make_directory(self.directory)
        with _locked(self.directory, fcntl.LOCK_EX):
            yield

    def repair(self) -> list[Path]:
        """Write each damaged copy again from the sound one; returns the key files. Raises OSError."""
        if 1 not in damaged(self.directory.parent).values():
            return []
        repaired = []
        with self._locked():
            for path in _files(self.directory):
                copies = _copies_in(path)
                if copies.count(None) != 1:
                    continue
                bad = copies.index(None)
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    sound = os.pread(fd, _BLOCK, (1 - bad) * _BLOCK)
                    _write(fd, bad * _BLOCK, sound.ljust(_BLOCK, b"\0"))
                finally:
                    os.close(fd)
                repaired.append(path)
        return repaired

    def collect(self, used: Callable[[], Collection[int] | None], settle: Callable[[], object]) -> int:
        """Delete the key files that nothing is sealed with; returns how many.

        `used` returns the numbers of the opening keys in use; None if that cannot be determined: then nothing
        is deleted. `settle` makes certain that this holds after a power cut, too. Raises OSError.
        """
        number = 0
        if not any(_files(self.directory)):
            return 0
        with self._locked():
            if (needed := used()) is None:
                return 0
            names = {f"{one:016x}" for one in needed}
            unneeded = [path for path in _files(self.directory) if path.stem not in names]
            if unneeded:
                settle()
            for path in unneeded:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    number += 1
                except BlockingIOError:  # a process seals with it
                    continue
                finally:
                    os.close(fd)
            durable.sync_directory(self.directory)
        return number

    def rotate(self) -> tuple[int, bool]:
        """Encrypt all key files with another master key; (how many, whether the key file is finished).

        If the key file has one key, a new one is put before it. Then all key files are encrypted with the
        first one, and the others are removed from the key file; not from a credential, which must have the
        new key already, nor from a file that this user may not write. After a crash in between, all can be
        read, and the next call completes it. The service may run. Raises EncryptionKeyError or OSError.
        """
        with self._locked():
            masters = self._masters()
            path = self.key_file
            assert path is not None
            files = list(_files(self.directory))
            if damaged := [one for one in files if not self._load(one, masters)]:
                raise EncryptionKeyError(
                    f"{damaged[0]}: both its copies are damaged; restore it from a backup, or delete it if "
                    "there is none, and rotate again. Nothing was changed"
                )
            if len(masters) == 1 and _is_credential(path):
                raise EncryptionKeyError(
                    f"{path}: this is a credential, which systemd makes again at each start, so a new key in "
                    "it would be lost; create one with a new key before the old one, restart the service, "
                    "and rotate again. Nothing was changed"
                )
            if len(masters) == 1:
                masters.insert(0, secrets.token_bytes(_KEY))
                _save_master(path, masters)
            for one in files:
                opening = int(one.stem, 16)
                fd = os.open(one, os.O_RDWR | os.O_CLOEXEC)
                try:
                    readable = _readable(os.pread(fd, _SIZE, 0), opening, masters)
                    for number in sorted((0, 1), key=readable.__getitem__):
                        copy = _encoded(opening, self._openings[opening], masters[0])
                        _write(fd, number * _BLOCK, copy.ljust(_BLOCK, b"\0"))
                finally:
                    os.close(fd)
            finished = may_replace(path)
            if finished:
                _save_master(path, masters[:1])
        return len(files), finished


def _write(fd: int, offset: int, data: bytes) -> None:
    """Write durably; raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
    os.fdatasync(fd)


def _save_master(path: Path, masters: list[bytes]) -> None:
    """Replace a key file atomically and durably, with its owner and mode; raises OSError.

    If `path` is a link, it stays one: the file that it leads to may be on another disk on purpose.
    """
    path = path.resolve()
    spare = path.with_name(path.name + ".tmp")
    before = path.stat()
    spare.unlink(missing_ok=True)
    fd = os.open(spare, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            if (os.geteuid(), os.getegid()) != (before.st_uid, before.st_gid):
                os.fchown(fd, before.st_uid, before.st_gid)
            os.fchmod(fd, before.st_mode & 0o777)  # whatever the umask is
            _write(fd, 0, "".join(f"{master.hex()}\n" for master in masters).encode())
        finally:
            os.close(fd)
        spare.replace(path)
    except OSError:
        spare.unlink(missing_ok=True)  # it has the keys
        raise
    durable.sync_directory(path.parent)
