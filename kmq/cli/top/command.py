"""`kmq top`: the pipeline, live."""

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kmq.cli.elsewhere import GatewayClient, elsewhere, read_token
from kmq.cli.output import examples
from kmq.config.settings import Settings, load
from kmq.errors import ConfigError

if TYPE_CHECKING:
    from kmq.cli.top.readers import TopReader
    from kmq.cli.top.screen import View
    from kmq.cli.top.terminal import Screen

_STEP_S = 0.25
_ONCE_S = 1.2  # --once: how long rates are measured
_ONCE_ROWS = 40
_ONCE_SWEEP_S = 1.0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one screen and end, for scripts.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON document.")] = False,
    url: Annotated[
        str, typer.Option("--url", help="The HTTP API of a broker elsewhere, such as http://host:8082.")
    ] = "",
    token: Annotated[str, typer.Option("--token", help="With --url: a bearer token, or @<file> that holds one.")] = "",
) -> None:
    """Watch the broker: each stage, how full each link is, what is wrong and what to do, topics by rate, groups by lag.

    Four times a second; keys: p pipeline, t topics, g groups, c connections, l log, ? help, q quit. Also while the
    broker is down. --once --json prints what GET /api/overview says. Groups, and everything with --url, come from the
    gateway.
    """
    from kmq.cli.top import terminal

    if (as_json and not once) or (token and not url):
        raise ConfigError("--json needs --once" if as_json and not once else "--token needs --url")
    settings = load()
    gateway = GatewayClient(url, read_token(token)) if url else elsewhere()
    if once:
        _print_once(_reader(settings, gateway, _ONCE_SWEEP_S), as_json)
        return
    if not terminal.is_for_people():
        raise ConfigError("kmq top needs a terminal; --once prints one screen")
    raise typer.Exit(_watch(_reader(settings, gateway)))


def _reader(settings: Settings, gateway: GatewayClient | None, sweep_s: float | None = None) -> "TopReader":
    from kmq.cli.top.readers import LocalReader, RemoteReader

    if gateway is not None:
        return RemoteReader(gateway)
    return LocalReader(settings) if sweep_s is None else LocalReader(settings, sweep_s)


def _print_once(reader: "TopReader", as_json: bool) -> None:
    from kmq.cli.top import screen
    from kmq.cli.top import terminal as screens
    from kmq.cli.top.snapshot import parse
    from kmq.config import terminal

    try:
        document = reader.measured(_ONCE_S)
    finally:
        reader.close()
    if as_json:
        print(json.dumps(document))
        return
    console = terminal.console()
    painter = screens.Painter(console, screens.is_ascii())
    width = max(20, shutil.get_terminal_size((80, _ONCE_ROWS)).columns)
    lines = screen.draw(parse(document), screen.View(), width, _ONCE_ROWS)[:-1]
    while lines and not lines[-1].parts:
        lines.pop()
    for line in lines:
        sys.stdout.write(painter.line(line, width).rstrip(" ") + "\n")


def _watch(reader: "TopReader") -> int:
    from kmq.cli.top.screen import View
    from kmq.cli.top.terminal import Screen, TerminalEnded

    try:
        with Screen() as screen:
            _run(reader, screen, View())
    except TerminalEnded as end:
        return end.exit_code
    finally:
        reader.close()
    return 0


def _run(reader: "TopReader", screen: "Screen", wanted: "View") -> None:
    """Draw until a key ends it."""
    from kmq.cli.top.screen import draw

    snapshot, due = reader.snapshot(), time.monotonic() + _STEP_S
    while True:
        size = screen.size
        screen.show(draw(snapshot, wanted, *size), size)
        for key in screen.wait(due - time.monotonic()):
            if key in ("q", "Q"):
                return
            if key == "\x0c":  # Ctrl-L
                screen.clear()
            wanted = turned(wanted, key, snapshot, size[1])
        if time.monotonic() >= due:
            snapshot, due = reader.snapshot(), time.monotonic() + _STEP_S


def turned(wanted: "View", key: str, snapshot: object, height: int) -> "View":
    """Return the view after this key."""
    from kmq.cli.top import screen
    from kmq.cli.top.snapshot import TopSnapshot

    assert isinstance(snapshot, TopSnapshot)
    if key.lower() in (*screen.VIEWS, "?"):
        return screen.View(key.lower())
    if key == "escape":
        return screen.View()
    steps = {"up": -1, "down": 1, "page up": -(height - 4), "page down": height - 4, "home": -wanted.scroll}
    last = screen.rows(snapshot, wanted.view)
    return wanted._replace(scroll=max(0, min(last, wanted.scroll + steps.get(key, 0))))


def add_to(app: typer.Typer) -> None:
    """Add this command to `kmq`."""
    app.command(epilog=examples("kmq top --once", "kmq top --once --json", "COLUMNS=120 kmq top --once"))(top)
