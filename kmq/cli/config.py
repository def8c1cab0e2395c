"""`kmq config show`: every setting, its value, and where the value came from. Secrets are hidden, here and in bundles.

Invariant   The value of a secret setting, a bearer token, a private key, a token's hash and the password in a URL are
            never in a text that `clean` returns, wherever they were typed.
Not covered A password that looks like a plain word, in a setting that is not secret, and is the path of a file.
"""

import json
import os
import re
import sys
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import typer

from kmq.cli.output import examples, table
from kmq.config import states, terminal
from kmq.config.settings import (
    KINDS,
    SETTINGS,
    SHARED,
    Setting,
    load,
    of_environment,
    of_file,
    retired,
    service_links,
    suggest,
)
from kmq.config.values import FOREVER
from kmq.errors import EXIT_CONFIG, ConfigError

config_app = typer.Typer(
    no_args_is_help=True,
    help="Settings: their values, and where each came from.",
    epilog=examples("kmq config show", "kmq config show KMQ_DATA KMQ_PORT"),
)
_FILE = "kmq.toml"
_ENVIRONMENT, _DEFAULT, _FLEET = "environment", "default", "fleet"


class Value(NamedTuple):
    """A setting in force, ready to be shown."""

    name: str
    text: str  # "": not set
    value: str | int | float | None  # in bytes or seconds; None: not set, no limit, never, or not valid
    source: str
    line: int | None  # of kmq.toml
    default: str
    problem: str  # "": it is valid

    @property
    def origin(self) -> str:
        """Return where the value came from, for a person."""
        return f"{self.source} line {self.line}" if self.line else self.source

    def as_json(self) -> dict[str, object]:
        fields = self._asdict()
        return {"from" if name == "source" else name: value for name, value in fields.items()}


class Shown(NamedTuple):
    """All settings at one moment. `unknown`: (name, where it was given, the nearest right name as text)."""

    values: list[Value]
    unknown: list[tuple[str, str, str]]
    ignored: list[str]
    retired: list[str]
    problem: str  # why `kmq up` refuses these settings; "" if it does not
    secrets: list[str]  # texts that no output may contain; never shown

    def as_json(self) -> dict[str, object]:
        """Return the document of --json."""
        return {
            "settings": [value.as_json() for value in self.values],
            "unknown": [{"name": name, "from": source} for name, source, _ in self.unknown],
            "ignored": self.ignored,
            "retired": self.retired,
            "problem": self.problem or None,
        }


def collect() -> Shown:
    """Return the settings of this directory, even if they are wrong. Wrong values raise no error."""
    environ = dict(os.environ)
    problem, from_env, from_file = "", of_environment(environ), dict[str, str]()
    try:
        from_file = of_file(_FILE)
    except ConfigError as error:
        problem = str(error)
    own = {row.env for row in SETTINGS}
    lines = _lines()
    given = {_ENVIRONMENT: from_env, _FILE: from_file}
    unknown = [
        (name, source, suggest(name)) for source, names in given.items() for name in sorted(names) if name not in own
    ]
    shared, fault = _of_fleet()
    values = [_value(row, from_env, from_file, lines, shared) for row in SETTINGS]
    hidden = {value.name for value in values if value.text == HIDDEN}
    secrets = [texts[name] for texts in given.values() for name in texts if name in hidden or name not in own]
    try:
        load()
    except ConfigError as error:
        problem = problem or str(error)
    return Shown(values, unknown, service_links(environ), retired(environ), clean(problem or fault, secrets), secrets)


def _lines() -> dict[str, int]:
    """Return setting → its line in kmq.toml."""
    try:
        with open(_FILE, encoding="utf-8", errors="replace") as file:
            matches = ((re.match(r"""\s*["']?(\w+)["']?\s*=""", line), number) for number, line in enumerate(file, 1))
            return {match[1]: number for match, number in matches if match}
    except OSError:
        return {}


def _of_fleet() -> tuple[dict[str, str], str]:
    """Return the settings that the fleet has sent to this broker, and why they cannot be read, or ""."""
    try:
        found = states.read(load())
    except ConfigError as error:
        return {}, str(error)
    texts = found.under(states.SETTINGS) if found else {}
    return {name: text for name, text in texts.items() if text != states.DEFAULT and not states.fault(name, text)}, ""


def _value(
    row: Setting, from_env: dict[str, str], from_file: dict[str, str], lines: dict[str, int], shared: dict[str, str]
) -> Value:
    line = None
    if row.env in from_env:
        text, source = from_env[row.env], _ENVIRONMENT
    elif row.env in from_file:
        text, source, line = from_file[row.env], _FILE, lines.get(row.env)
    else:
        text, source = row.default, _DEFAULT
    if row.attribute in SHARED and (text == "" or source == _DEFAULT):
        text, source, line = row.default, _DEFAULT, None
        if row.attribute in shared:
            text, source = shared[row.attribute], _FLEET
    visible = shown(row, text)
    parsed: Any = None
    problem = ""
    if text or row.default:
        try:
            parsed = row.parse(text)
        except ValueError as error:
            problem = str(error)
    if parsed is not None and not isinstance(parsed, (int, float)):
        parsed = visible
    if parsed == FOREVER or text.strip().lower() in ("none", "never") or visible == HIDDEN:
        parsed = None
    return Value(row.env, visible, parsed, source, line, row.default, problem)


@config_app.command(
    "show", epilog=examples("kmq config show", "kmq config show KMQ_DATA KMQ_PORT", "kmq config show --json")
)
def show(
    names: Annotated[list[str] | None, typer.Argument(help="Only these settings, such as KMQ_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; see above.")] = False,
) -> None:
    """Show every setting: its value, and if it comes from the environment, kmq.toml, the fleet, or is the default.

    Secrets are never shown: (hidden) stands for them. Exit code 78 if a
    setting is unknown or wrong: kmq up would refuse it.

    --json: {"settings": [{"name", "text", "value", "from", "line", "default",
    "problem"}, …], "unknown", "ignored", "problem"}. value is in bytes or
    seconds, null for none and never.
    """
    found = collect()
    wanted = [name.upper() for name in names or ()]
    for name in wanted:
        if name not in {value.name for value in found.values}:
            raise ConfigError(f"unknown setting {clean(name)}{suggest(name)}")
    if wanted:
        found = found._replace(values=[value for value in found.values if value.name in wanted])
    print(json.dumps(found.as_json())) if as_json else _print(found)
    problems = [f"{source}: unknown setting {name}{hint}" for name, source, hint in found.unknown]
    problems += [f"{value.name}: {value.problem} ({value.origin})" for value in found.values if value.problem]
    for problem in problems or filter(None, [found.problem]):
        print(f"kmq: {problem}", file=sys.stderr)
    if found.problem:
        raise typer.Exit(EXIT_CONFIG)


def _print(found: Shown) -> None:
    rows = table("setting", "value", "from")
    for value in found.values:
        style = "red" if value.problem else "" if value.source == _DEFAULT else "bold"
        rows.add_row(value.name, value.text, value.origin, style=style)
    terminal.console().print(rows, markup=False, highlight=False)
    if found.ignored:
        print(f"not settings, because Kubernetes makes them for a Service: {', '.join(found.ignored)}")
    if found.retired:
        print(f"not settings any more, so without effect: {', '.join(found.retired)}")


# --- what may be shown -----------------------------------------------------------------------------------------------

HIDDEN = "(hidden)"
_SHORT = 4  # characters; a shorter secret would match in ordinary words
_PATTERNS = [
    (re.compile(pattern, flags), new)
    for pattern, new, flags in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", HIDDEN, re.S),
        (r"^.*-----END [A-Z ]*PRIVATE KEY-----", HIDDEN, re.S),  # of a key without its first lines
        (r"^[ \t]*[A-Za-z0-9+/]{60,76}={0,2}[ \t]*$", HIDDEN, re.M),  # lines of a PEM file
        (r"\blocal\.[0-9a-f]{64}\b", HIDDEN, 0),
        (r"(?<![\w-])[\w-]{1,64}\.[\w-]{43}(?![\w-])", HIDDEN, re.A),  # kmq token new
        (r"sha256\$[0-9a-f]+\$[0-9a-f]+(?:\$scram\$[0-9a-f$]+)?", HIDDEN, 0),
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
    """Return the part of a setting's text that may be shown."""
    kind = KINDS.get(row.parse, "value")
    if not text or text == row.default:
        return text
    if kind == "secret":
        return HIDDEN
    if kind == "value" and not _is_valid(row, text):
        return HIDDEN  # a text that is not a number may be a secret
    if kind == "addresses":
        return re.sub(r"\?[^,]*", f"?{HIDDEN}", re.sub(r"[^,/@\s]+@", f"{HIDDEN}@", clean(text)))
    is_nothing = not os.path.exists(text)
    is_word = is_nothing and os.sep not in text and kind == "path" and not row.default
    if is_word or _LOOKS_SECRET.fullmatch(text) or (is_nothing and _BASE64.fullmatch(text)):
        return HIDDEN  # a token in place of the path of a token file
    return clean(text)


def _is_valid(row: Setting, text: str) -> bool:
    try:
        row.parse(text)
    except ValueError:
        return False
    return True


def add_to(app: typer.Typer) -> None:
    """Add these commands to `kmq`."""
    app.add_typer(config_app, name="config")
