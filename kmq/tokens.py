"""Bearer tokens: who may produce and consume, in a file that holds none of them.

File        KMQ_TOKENS, one token a line: `<name>:sha256$<salt>$<digest>`; `#` begins a comment. A name may stand there twice, so
            that a token can be replaced without a gap. Changes are in force within a second or so; a file that cannot be read or
            understood keeps the old tokens in force and is named in the log.
Token       `<name>.<43 random characters>`. The name finds the line, so that a check is one hash however many there are.
Hash        One salted SHA-256. A slow hash (scrypt) makes guessable secrets expensive to guess; these have 256 random bits, which
            cannot be guessed at any speed, and a slow one would stop ingress' event loop at each hello. The salt keeps equal
            tokens of two files from looking equal. Digests are compared in constant time, and unknown names cost the same.
Inside      Programs of the pod (the gateway, `kmq produce`) show the token in KMQ_PIPES/local.token. It may be read by
            those who may write to the FIFO `raw` beside it, and gives them no more than that does.
"""

import contextlib
import hashlib
import hmac
import os
import re
from collections.abc import Callable

from kmq.errors import ConfigError
from kmq.settings import Settings
from kmq.watch import Watch

LOCAL = "local"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LINE = re.compile(r"([A-Za-z0-9_-]{1,64}):sha256\$([0-9a-f]{32})\$([0-9a-f]{64})")
_SCHEME = "bearer "
Hash = tuple[bytes, bytes]  # salt, digest
_NOBODY: Hash = (bytes(16), bytes(32))


def _digest(salt: bytes, token: bytes) -> bytes:
    return hashlib.sha256(salt + token).digest()


def read(path: str) -> dict[str, list[Hash]]:
    """Name → the hashes of its tokens. Raises ConfigError naming file and line."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as err:
        raise ConfigError(f"KMQ_TOKENS={path!r}: {err.strerror}; make one with: kmq token new <name>") from err
    table: dict[str, list[Hash]] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise ConfigError(f"KMQ_TOKENS={path!r}: line {number} is not <name>:sha256$<salt>$<digest>")
        table.setdefault(match[1], []).append((bytes.fromhex(match[2]), bytes.fromhex(match[3])))
    return table


def _random(name: str) -> str:
    from secrets import token_urlsafe

    return f"{name}.{token_urlsafe(32)}"


def new(path: str, name: str) -> str:
    """A new token for `name`; only its hash goes to the file, which is made where there is none (0600)."""
    if not _NAME.fullmatch(name) or name == LOCAL:
        raise ConfigError(f"name {name!r}: must be 1 to 64 of A-Z a-z 0-9 _ - and not {LOCAL}")
    token, salt = _random(name), os.urandom(16)
    row = f"{name}:sha256${salt.hex()}${_digest(salt, token.encode()).hex()}\n"
    try:
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                row = "\n" + row  # whoever wrote the last line by hand left its newline out
            file.write(row.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        raise ConfigError(f"KMQ_TOKENS={path!r}: {err.strerror}") from err
    return token


def local(settings: Settings) -> str:
    """The token of this pod's own programs; "" where tokens are not asked for."""
    if not settings.tokens:
        return ""
    path = _local_path(settings)
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}; is the broker up? (kmq status)") from err


def _local_path(settings: Settings) -> str:
    return f"{settings.pipes}/local.token"


def _make_local(settings: Settings) -> None:
    """Whichever process comes first makes it, whole; all others take that one."""
    path = _local_path(settings)
    making = f"{path}.{os.urandom(8).hex()}"  # not our pid: in a container of its own each has the same
    with open(os.open(making, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "w", encoding="ascii") as file:
        file.write(_random(LOCAL) + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(making, path)
    os.unlink(making)


class Tokens:
    """The tokens in force."""

    def __init__(self, settings: Settings, warn: Callable[..., None]) -> None:
        self._path, self._warn = settings.tokens, warn
        self._watch = Watch(self._path)
        self._table = read(self._path)
        _make_local(settings)
        self._local = local(settings).encode()

    def check(self, token: bytes) -> str:
        """The name of whoever shows this token; "" for nobody."""
        if self._watch.changed():
            self._reload()
        name = token.partition(b".")[0].decode("ascii", "replace")
        if name == LOCAL:
            return name if hmac.compare_digest(token, self._local) else ""
        found = ""
        for salt, digest in self._table.get(name, (_NOBODY,)):
            if hmac.compare_digest(_digest(salt, token), digest):
                found = name
        return found

    def check_header(self, authorization: str) -> str:
        """The same for the value of an `authorization: Bearer <token>` header."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return ""
        # Bytes that are not UTF-8 arrive as lone surrogates: of a token that nobody has, not an error of ours.
        return self.check(authorization[len(_SCHEME) :].strip().encode(errors="surrogatepass"))

    def _reload(self) -> None:
        try:
            self._table = read(self._path)
        except ConfigError as err:
            self._warn("tokens_kept", reason=err, effect="the old ones stay in force")


def open_tokens(settings: Settings, warn: Callable[..., None]) -> Tokens | None:
    """The tokens that connections must show, or None where KMQ_TOKENS is not set."""
    return Tokens(settings, warn) if settings.tokens else None
