"""Bearer tokens: they name a client and its roles (roles.py). The token file holds only their hashes.

File        KMQ_TOKENS, one token a line: `<name>[@<role>,…]:sha256$<salt>$<digest>`; `#` begins a comment. Without a
            role the token has all of them, as before there were roles; an older release refuses a file with roles. A
            name may have two lines, so that a token can be replaced without a gap. Changes are in force within a second
            or two. If the file cannot be read or parsed, the old tokens stay in force and the log names the file. The
            line of a token that Kafka's clients may prove by SCRAM continues `$scram$<iterations>$<keys of SHA-256>$<of
            SHA-512>`, two keys each, with the salt of the line (scram.py). Such tokens of a name share one salt. An
            older release refuses a file with these, too.
Token       `<name>.<43 random characters>`. The name finds the line, so a check is one hash however many tokens there
            are.
Hash        One salted SHA-256. A slow hash (scrypt) makes guessable secrets expensive to guess; these have 256 random
            bits, which cannot be guessed at any speed, and a slow hash would stop the event loop of ingress at each
            hello. The salt makes equal tokens look different in two files. Digests are compared in constant time;
            unknown names take as long.
Fleet       A token that the fleet has revoked (kmq/config/states.py), by its name or by its id, is refused although the
            file has it.
Inside      Programs of the pod (the gateway, `kmq produce`) show the token in KMQ_PIPES/local.token (local_token.py).
"""

import hashlib
import hmac
import os
import re
from collections import namedtuple
from collections.abc import Callable, Iterable
from secrets import token_bytes

from kmq.access import local_token, roles, scram
from kmq.access.local_token import LOCAL
from kmq.config.settings import Settings
from kmq.config.states import InForce
from kmq.errors import ConfigError
from kmq.files import Watch

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LINE = re.compile(
    r"([A-Za-z0-9_-]{1,64})(?:@([a-z,]+))?:sha256\$([0-9a-f]{32})\$([0-9a-f]{64})"
    r"(?:\$scram\$(\d{4,6})\$([0-9a-f]{64})\$([0-9a-f]{64})\$([0-9a-f]{128})\$([0-9a-f]{128}))?"
)
_SCHEME = "bearer "


class Hash(namedtuple("Hash", ("salt", "digest", "roles", "iterations", "keys"), defaults=(0, {}))):
    """One line of the file. `keys`: for SCRAM, by hash; {}: no SCRAM."""

    __slots__ = ()
    salt: bytes
    digest: bytes
    roles: frozenset[str]
    iterations: int
    keys: dict[str, scram.ScramKeys]


_NOBODY = Hash(bytes(16), bytes(32), frozenset())
_SECRET = token_bytes(32)  # of this process: the salts of unknown names


def _digest(salt: bytes, token: bytes) -> bytes:
    return hashlib.sha256(salt + token).digest()


def read(path: str) -> dict[str, list[Hash]]:
    """Return name → hashes of its tokens. Raises ConfigError that names file and line."""
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
        held = roles.parse(match[2]) if match and match[2] else roles.ALL
        if not match or held is None:
            form = "<name>:sha256$<salt>$<digest> or <name>@<role>,…:sha256$<salt>$<digest>"
            raise ConfigError(f"KMQ_TOKENS={path!r}: line {number} is not {form}; roles are {', '.join(roles.ROLES)}")
        salt, digest, *keys = (bytes.fromhex(text or "") for text in match.group(3, 4, 6, 7, 8, 9))
        found = {"sha256": scram.ScramKeys(*keys[:2]), "sha512": scram.ScramKeys(*keys[2:])} if match[5] else {}
        table.setdefault(match[1], []).append(Hash(salt, digest, held, int(match[5] or 0), found))
    return table


def id_of(name: str, digest: bytes) -> str:
    """Return the id of one token of a name, by which a fleet can revoke it: part of its hash."""
    return f"{name}.{digest[:6].hex()}"


def new(path: str, name: str, held: Iterable[str] = (), with_scram: bool = False) -> str:
    """Return a new token for `name`, whose hash is appended to the file. A new file gets mode 0600.

    `held`: its roles; (): all roles. `with_scram`: Kafka's clients may prove it by SCRAM.
    """
    wrong = [role for role in held if role not in roles.ROLES]
    if wrong:
        raise ConfigError(f"role {wrong[0]!r}: must be one of {', '.join(roles.ROLES)}")
    if not _NAME.fullmatch(name) or name == LOCAL:
        raise ConfigError(f"name {name!r}: must be 1 to 64 of A-Z a-z 0-9 _ - and not {LOCAL}")
    from secrets import token_urlsafe  # only for new tokens: most processes only check them

    token, salt = f"{name}.{token_urlsafe(32)}", os.urandom(16)
    mark = f"@{roles.text(frozenset(held))}" if held else ""
    more = ""
    if with_scram:
        others = read(path).get(name, ()) if os.path.exists(path) else ()
        salt = next((row.salt for row in others if row.keys), salt)
        keys = [key for hash in scram.MECHANISMS.values() for key in scram.make_keys(hash, token, salt)]
        more = f"$scram${scram.ITERATIONS}${'$'.join(key.hex() for key in keys)}"
    row = f"{name}{mark}:sha256${salt.hex()}${_digest(salt, token.encode()).hex()}{more}\n"
    try:
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                row = "\n" + row  # the last line was written by hand, without a newline
            file.write(row.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        raise ConfigError(f"KMQ_TOKENS={path!r}: {err.strerror}") from err
    return token


def local(settings: Settings) -> str:
    """Return the token of this pod's own programs; "" if no token is required."""
    if not settings.tokens:
        return ""
    return local_token.read(settings)


class Tokens:
    """The tokens in force."""

    def __init__(self, settings: Settings, warn: Callable[..., None]) -> None:
        self._path, self._warn = settings.tokens, warn
        self._watch = Watch(self._path)
        self._table = read(self._path)
        self.is_missing = False  # the file could not be read or parsed when it was read last
        self._local = local_token.LocalToken(settings)
        self._in_force = InForce(settings, warn)

    def check(self, token: bytes) -> str:
        """Return the name that this token belongs to; "" if it is unknown."""
        holder = self.find(token)
        return holder.name if holder is not None else ""

    def find(self, token: bytes) -> roles.Holder | None:
        """Return the name and the roles of a token; None if it is unknown."""
        self.look()
        self._in_force.changed()
        name = token.partition(b".")[0].decode("ascii", "replace")
        if name == LOCAL:
            return roles.Holder(name, roles.ALL) if self._local.matches(token) else None
        found = None
        for row in self._table.get(name, (_NOBODY,)):
            if hmac.compare_digest(_digest(row.salt, token), row.digest) and not self._is_revoked(name, row.digest):
                found = roles.Holder(name, row.roles)
        return found

    def find_scram(self, name: str, hash: str) -> tuple[scram.ScramUser, list[roles.Holder]]:
        """Return the SCRAM keys of a name's tokens, and the holder of each. An unknown name gets a salt, no keys."""
        self.look()
        self._in_force.changed()
        rows = [row for row in self._table.get(name, ()) if row.keys and not self._is_revoked(name, row.digest)]
        if not rows:
            salt = hmac.digest(_SECRET, name.encode(errors="surrogatepass"), "sha256")[:16]
            return scram.ScramUser(salt, scram.ITERATIONS, ()), []
        salt, iterations = rows[-1].salt, rows[-1].iterations
        rows = [row for row in rows if (row.salt, row.iterations) == (salt, iterations)]
        user = scram.ScramUser(salt, iterations, [row.keys[hash] for row in rows])
        return user, [roles.Holder(name, row.roles) for row in rows]

    def scram_names(self) -> dict[str, int]:
        """Return the names that have tokens for SCRAM, and their iterations."""
        self.look()
        return {name: row.iterations for name, rows in self._table.items() for row in rows if row.keys}

    def look(self) -> None:
        """Read the file again if it has changed."""
        if self._watch.changed():
            self._reload()

    def _is_revoked(self, name: str, digest: bytes) -> bool:
        in_force = self._in_force
        return in_force.is_unknown or not in_force.revoked.isdisjoint((name, id_of(name, digest)))

    def find_header(self, authorization: str) -> roles.Holder | None:
        """Return the holder of an `authorization: Bearer <token>` header, given its value; None if it is unknown."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        # Bytes that are not UTF-8 arrive as lone surrogates: they make an unknown token, not an error.
        return self.find(authorization[len(_SCHEME) :].strip().encode(errors="surrogatepass"))

    def _reload(self) -> None:
        try:
            self._table, self.is_missing = read(self._path), False
        except ConfigError as err:
            self.is_missing = True
            self._warn("tokens_kept", reason=err, effect="the old ones stay in force")


def open_tokens(settings: Settings, warn: Callable[..., None]) -> Tokens | None:
    """Return the tokens that connections must show; None if KMQ_TOKENS is not set."""
    return Tokens(settings, warn) if settings.tokens else None
