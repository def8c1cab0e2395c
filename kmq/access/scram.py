"""SCRAM-SHA-256 and -512 (RFC 5802, RFC 7677), the side of the broker: a client proves that it has a token.

    ← n,,n=<user>,r=<nonce>                 first message of the client
    → r=<both nonces>,s=<salt>,i=<count>
    ← c=<base64 of `n,,`>,r=…,p=<proof>     last message of the client
    → v=<signature>                         by which the client knows that the broker has the keys

Keys        The keys that the broker stores (`ScramKeys`) are no proof of a token. Somebody who has read them can pose
            as a broker, and after seeing an exchange also as the client. TLS and the mode of the file prevent that.
Users       A name may have several tokens. They share one salt, so the client need not say which token it has: the
            broker finds the one whose keys fit. An unknown name gets a salt too, always the same, and fails at the end.
Not covered Binding to the TLS channel (`p=…`), extensions that a client calls mandatory, acting as another identity.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Sequence
from secrets import token_urlsafe
from typing import NamedTuple

MECHANISMS = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}  # name → hash
ITERATIONS = 4096  # the least that clients take; a token has 256 random bits, which no count makes harder to guess
_FIRST = re.compile(rb"[ny],(?:a=([^,]*))?,(n=([^,]+),r=([!-+\--~]+)(?:,.*)?)", re.DOTALL)
_LAST = re.compile(rb"(c=([A-Za-z0-9+/=]+),r=([!-+\--~]+)(?:,.*)?),p=([A-Za-z0-9+/=]+)", re.DOTALL)
_ESCAPED = {"=2C": ",", "=3D": "="}


class ScramError(Exception):
    """The client has failed. Its text may be sent to the client."""


class ScramKeys(NamedTuple):
    """The stored keys of a token for one hash."""

    stored: bytes
    server: bytes


def make_keys(hash: str, token: str, salt: bytes, iterations: int = ITERATIONS) -> ScramKeys:
    salted = hashlib.pbkdf2_hmac(hash, token.encode(), salt, iterations)
    client = hmac.digest(salted, b"Client Key", hash)
    return ScramKeys(hashlib.new(hash, client).digest(), hmac.digest(salted, b"Server Key", hash))


class ScramUser(NamedTuple):
    """The tokens of a name: their salt and count, and the keys of each."""

    salt: bytes
    iterations: int
    keys: Sequence[ScramKeys]


class ScramExchange:
    """One exchange: `first`, then `last`. `found`: which of the user's keys fit."""

    def __init__(self, hash: str, find: Callable[[str], ScramUser], nonce: str = "") -> None:
        """`nonce`: for tests; by default a new one."""
        self._hash, self._find, self._nonce = hash, find, nonce or token_urlsafe(24)
        self.user = ""
        self.found = -1
        self._user = ScramUser(b"", 0, ())
        self._binding = self._said = b""

    def first(self, said: bytes) -> bytes:
        """Return the answer to the first message. Raises ScramError."""
        match = _FIRST.fullmatch(said)
        if match is None:
            raise ScramError("this is no first message of SCRAM without a channel binding")
        other, bare, name, nonce = match.groups()
        text = name.decode(errors="replace")
        if re.search("=(?!2C|3D)", text):
            raise ScramError("the name of the user is not escaped")
        self.user = re.sub("=2C|=3D", lambda found: _ESCAPED[found[0]], text)
        if other not in (None, b"", name):
            raise ScramError("nobody can act as another user")
        self._user = self._find(self.user)
        self._nonce = nonce.decode() + self._nonce
        self._binding = base64.b64encode(said[: match.start(2)])
        answer = f"r={self._nonce},s={base64.b64encode(self._user.salt).decode()},i={self._user.iterations}".encode()
        self._said = bare + b"," + answer
        return answer

    def last(self, said: bytes) -> bytes:
        """Return the answer to the last message: the client has proved who it is. Raises ScramError."""
        match = _LAST.fullmatch(said)
        if match is None or match[2] != self._binding or match[3] != self._nonce.encode():
            raise ScramError("this does not continue the exchange")
        try:
            proof = base64.b64decode(match[4], validate=True)
        except binascii.Error:
            raise ScramError("the proof is not base64") from None
        whole = self._said + b"," + match[1]
        for number, keys in enumerate(self._user.keys):
            signature = hmac.digest(keys.stored, whole, self._hash)
            client = bytes(a ^ b for a, b in zip(signature, proof, strict=False))
            fits = hmac.compare_digest(hashlib.new(self._hash, client).digest(), keys.stored)
            if fits and len(proof) == len(signature):
                self.found = number
        if self.found < 0:
            raise ScramError("the user is unknown, or has another token")
        return b"v=" + base64.b64encode(hmac.digest(self._user.keys[self.found].server, whole, self._hash))
