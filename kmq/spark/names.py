"""Checks names that a user types: an unknown name is an error with its value and the nearest known name."""

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from types import MappingProxyType

from kmq.errors import ConfigError

_ALIKE = 0.05  # names that differ by less from the best match are offered too
_SHOWN = 80  # characters of a value: a token or an offsets table is long


def check_options(
    given: Mapping[str, str], names: Iterable[str], kind: str, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ConfigError at the first unknown option of a `kind` (reader, writer); upper and lower case are the same.

    `elsewhere`: name of an option in other systems, in lower case → its name here.
    """
    known = {name.lower(): name for name in names}
    for name, value in given.items():
        if name.lower() not in known:
            ours = elsewhere.get(name.lower())
            advice = f"; did you mean {ours}?" if ours else nearest(name, known.values())
            said = "…" if _is_secret(name + advice) else repr(str(value)[:_SHOWN])  # a misspelt token is secret, too
            raise ConfigError(
                f"unknown {kind} option {name}={said}{advice}; expected one of {', '.join(known.values())}"
            )


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean …?` with the most similar name, or several that are about equally similar; "" for none."""
    known = {each.lower(): each for each in names}
    # With and without the prefix, so that `token` finds kmq.token, and kmq.subscribe finds subscribe.
    short = {each.removeprefix("kmq."): each for each in known}
    wanted = name.lower()
    for text, among in ((wanted, {each: each for each in known}), (wanted.removeprefix("kmq."), short)):
        likeness = {each: SequenceMatcher(None, each, text).ratio() for each in get_close_matches(text, among)}
        best = [known[among[each]] for each, ratio in likeness.items() if ratio > max(likeness.values()) - _ALIKE]
        if best:
            return f"; did you mean {' or '.join(best)}?"
    return ""


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in ("token", "password", "secret"))
