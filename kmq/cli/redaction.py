"""What commands may show of settings and logs: everything except secrets.

Invariant   The value of a secret setting, a bearer token, a private key, a token's hash and the password in a URL are
            never in a text that `clean` returns, wherever somebody has typed them.
Not covered A password that looks like a plain word, in a setting that is no secret, and names a path that exists.
"""

import os
import re
from collections.abc import Iterable

from kmq.config.settings import KINDS, Setting

HIDDEN = "(hidden)"
_SHORT = 4  # characters; a shorter secret would be found in every second word
_PATTERNS = [
    (re.compile(pattern, flags), new)
    for pattern, new, flags in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", HIDDEN, re.S),
        (r"^.*-----END [A-Z ]*PRIVATE KEY-----", HIDDEN, re.S),  # of a key whose beginning is cut off
        (r"^[ \t]*[A-Za-z0-9+/]{60,76}={0,2}[ \t]*$", HIDDEN, re.M),  # lines of a PEM file
        (r"\blocal\.[0-9a-f]{64}\b", HIDDEN, 0),
        (r"(?<![\w-])[\w-]{1,64}\.[\w-]{43}(?![\w-])", HIDDEN, re.A),  # kmq token new
        (r"sha256\$[0-9a-f]+\$[0-9a-f]+", HIDDEN, 0),
        (r"\beyJ[\w-]+\.[\w-]+\.[\w-]*", HIDDEN, re.A),  # JSON Web Token
        (r"(?<=//)[^/@\s\"']+@", f"{HIDDEN}@", 0),  # password of a URL
        (
            r"(?i)\b(bearer\s+|(?:token|password|passwd|secret|api_?key)['\"]?\s*[=:]\s*['\"]?)[^\s'\"&,;}]+",
            rf"\1{HIDDEN}",
            0,
        ),
    )
]
_LOOKS_SECRET = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|[0-9a-fA-F]{32,}|[\w+=-]{40,}", re.A)
_BASE64 = re.compile(r"(?![./])[\w+/=-]{40,}", re.A)  # or a path, with "/" among its characters


def clean(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the text without secrets. `secrets`: further ones that are known, such as the values of settings."""
    for secret in secrets:
        if len(secret) >= _SHORT:
            text = text.replace(secret, HIDDEN)
    for pattern, new in _PATTERNS:
        text = pattern.sub(new, text)
    return text


def shown(row: Setting, text: str) -> str:
    """Return what may be shown of the text that a setting was given."""
    kind = KINDS.get(row.parse, "value")
    if not text or text == row.default:
        return text
    if kind == "secret":
        return HIDDEN
    if kind == "value" and not _is_valid(row, text):
        return HIDDEN  # what is no number may be anything
    if kind == "addresses":
        return re.sub(r"\?[^,]*", f"?{HIDDEN}", re.sub(r"[^,/@\s]+@", f"{HIDDEN}@", clean(text)))
    is_nothing = not os.path.exists(text)
    is_word = is_nothing and os.sep not in text and kind == "path" and not row.default
    if is_word or _LOOKS_SECRET.fullmatch(text) or (is_nothing and _BASE64.fullmatch(text)):
        return HIDDEN  # a token where the path of a file of tokens belongs
    return clean(text)


def _is_valid(row: Setting, text: str) -> bool:
    try:
        row.parse(text)
    except ValueError:
        return False
    return True
