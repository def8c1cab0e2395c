"""Pictures of the console: a broker with load and a real Chromium.

    scripts/console_shots.py [--all DIRECTORY]

Writes docs/console.png: the overview, light. With --all also every page, light and dark, wide and narrow, into a directory,
to look at them. Needs Chromium (Debian: apt-get install chromium fonts-dejavu-core) and Playwright, which the extra `dev` has.
Everything is on loopback and in a directory that is removed.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import Page, sync_playwright

from kmq.client.lines import LineSender
from kmq.links import layout
from kmq.message.text import format_message

ROOT = Path(__file__).resolve().parents[1]
SHM = Path("/dev/shm")
CHROMIUM = "/usr/bin/chromium"
LOAD_S = 60.0  # long enough for the charts to show something
PAGES = {
    "overview": "#/overview",
    "topics": "#/topics",
    "topic": "#/topics/orders",
    "groups": "#/groups",
    "group": "#/groups/billing",
    "letters": "#/letters",
    "letter": "#/letters/payments.dlq",
    "health": "#/health",
    "runbook": "console/operations.md#disk_full",
}
LOOKS: dict[str, dict[str, Any]] = {
    f"{kind}{name}": {"viewport": {"width": width, "height": height}, "color_scheme": kind}
    for kind in ("light", "dark")
    for name, width, height in (("", 1440, 1000), ("-narrow", 390, 844))
}


@contextmanager
def broker(root: Path) -> Iterator[dict[str, str]]:
    """Start a broker in `root` and yield its environment."""
    instance = f"shots-{os.getpid()}"
    ports = {
        f"KMQ_{name}": "0"
        for name in ("PORT", "ACK_PORT", "HTTP_PORT", "GRPC_PORT", "EGRESS_PORT", "STATUS_PORT", "KAFKA_PORT")
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "RB_"))}
    settings = {"KMQ_INSTANCE": instance, "KMQ_DATA": str(root / "data"), "KMQ_PIPES": str(root / "pipes")}
    env = kept | ports | settings
    subprocess.run([sys.executable, "-m", "kmq", "up"], env=env, check=True)
    try:
        yield env
    finally:
        subprocess.run([sys.executable, "-m", "kmq", "down"], env=env, check=False)
        for path in SHM.glob(f"{instance}.*"):
            path.unlink()
        layout.remove_left_bells(instance)


def port(env: dict[str, str], name: str) -> int:
    return int((Path(env["KMQ_PIPES"]) / f"{name}.port").read_text())


class Load:
    """A changing load: five topics, a group that keeps up and one that does not, dead letters."""

    def __init__(self, env: dict[str, str]) -> None:
        self._env, self._ended = env, threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._produce, self._consume)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _produce(self) -> None:
        shares = {b"orders": 50, b"clicks": 300, b"payments": 20, b"sensors": 120, b"audit": 4}
        number = 0
        with LineSender("127.0.0.1", port(self._env, "ingress")) as sender:
            while not self._ended.wait(0.05):
                for topic, count in shares.items():
                    for key in range(count):
                        number += 1
                        body = b'{"id": %d, "amount": %d.5, "state": "new"}' % (number, key)
                        sender.send(format_message(b"%s.u%d" % (topic, key), body))
                sender.send(b"a line that is no message")
                sender.flush()

    def _consume(self) -> None:
        """One group keeps up, one does not, one gives messages back until they are dead letters."""
        api = f"http://127.0.0.1:{port(self._env, 'http')}/api"
        call(f"{api}/admin/topics", {"name": "payments", "maxDeliveries": 1})
        reasons = cycle(["timeout: ledger", "no such account", "no such account"])
        while not self._ended.wait(0.3):
            for topic, group in (("orders", "billing"), ("clicks", "analytics"), ("payments", "ledger")):
                found = call(f"{api}/topics/{topic}/consume?group={group}&member=m1&maxMessages=1500&autoCommit=true")
                for message in found["messages"][:1] if group == "ledger" else ():
                    given = {name: message[name] for name in ("partition", "offset")}
                    call(f"{api}/topics/{topic}/nack", {"group": group, "reason": next(reasons), **given})


def call(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> dict[str, Any]:
    """Return a response of the gateway; for consume an empty one if there is none."""
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            found: dict[str, Any] = json.load(response)
            return found
    except urllib.error.HTTPError as error:  # the topic does not exist yet, or the message was given back before
        error.close()
        return {"messages": []}


def shoot(page: Page, base: str, name: str, path: Path) -> None:
    """Take a picture of one page when it shows its numbers."""
    page.goto(f"{base}/{PAGES[name]}")
    page.wait_for_selector("main h1")
    page.wait_for_timeout(2500)
    page.screenshot(path=str(path), full_page=name != "runbook")


def main(
    all: Annotated[Path | None, typer.Option(help="Also every page in every look, into this directory.")] = None,
    load: Annotated[float, typer.Option(help="Seconds of load before the pictures.")] = LOAD_S,
) -> None:
    """Write docs/console.png, and with --all every page."""
    with (
        tempfile.TemporaryDirectory() as directory,
        broker(Path(directory)) as env,
        Load(env),
        sync_playwright() as play,
    ):
        time.sleep(load)
        base = f"http://127.0.0.1:{port(env, 'http')}"
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for look, options in LOOKS.items():
            if all is None and look != "light":
                continue
            page = browser.new_page(**options)
            page.on("console", lambda message: print(message.type, message.text))
            page.on("pageerror", lambda error: print("error", error))
            if look == "light":
                shoot(page, base, "overview", ROOT / "docs/console.png")
            for name in () if all is None else PAGES:
                assert all is not None
                all.mkdir(exist_ok=True)
                shoot(page, base, name, all / f"{name}-{look}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    typer.run(main)
