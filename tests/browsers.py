"""A real Chromium, Debian's, driven by Playwright; nothing is downloaded. What a page did wrong is kept."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S, until

CHROMIUM = "/usr/bin/chromium"
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(event.violatedDirective));
window.longest = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
}).observe({ type: "longtask", buffered: true });
"""


def missing() -> str:
    """What the tests of the console want and do not have; "" if they have it."""
    if not os.access(CHROMIUM, os.X_OK):
        return f"{CHROMIUM} is missing: apt-get install chromium fonts-dejavu-core"
    return "" if find_spec("playwright") else "Playwright is missing: pip install 'playwright>=1.50'"


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser. Without one the test is skipped by name; in CI it fails."""
    if why := missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    from playwright.sync_api import sync_playwright  # not where the tests are only skipped

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A tab on the console: what it asked for, and what it complained of."""

    def __init__(self, browser: Any, base: str, **options: Any) -> None:
        self.base = base
        self.documents: dict[str, list[dict[str, Any]]] = {}  # by path, as the page got them
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self._context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self._context.add_init_script(_WATCH)
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.page.on("dialog", self._dialog)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("console", self._said)
        self.page.on("requestfinished", self._finished)

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    def _finished(self, request: Any) -> None:
        path = request.url.removeprefix(self.base).partition("?")[0]
        response = request.response()
        if (
            path.startswith("/api/")
            and response is not None
            and response.status == 200
            and not path.endswith("/follow")
        ):
            from playwright.sync_api import Error

            with suppress(Error):  # the tab was closed meanwhile
                self.documents.setdefault(path, []).append(response.json())

    def open(self, hash: str = "#/overview") -> Any:
        """Go to a page of the console; returns the tab when the page has its heading."""
        self.page.goto(f"{self.base}/{hash}")
        self.page.wait_for_selector("#main h1")
        return self.page

    def wait(self, expression: str, value: object = None) -> Any:
        """Wait until a JavaScript function of `value` is true, and return what it gave.

        Playwright's own wait calls eval() in the page, which the page's policy forbids.
        """
        return until(
            lambda: self.page.evaluate(expression, value) or self.page.wait_for_timeout(50),
            f"{expression} {value}",
            lambda: self.page.inner_text("main")[:2000],
            every_s=0,
        )

    def document(self, path: str, as_of: str) -> dict[str, Any]:
        """Return the document of a path that was made at that moment, as the page got it."""

        def found() -> dict[str, Any] | None:
            self.page.wait_for_timeout(50)
            return next((each for each in self.documents.get(path, ()) if str(each["as_of"]) == as_of), None)

        return until(found, f"{path} as of {as_of}", every_s=0)

    def close(self) -> None:
        """Close it; whatever the page complained of fails the test."""
        violations = self.page.evaluate("window.violations")
        self._context.close()
        assert not self.complaints and not violations, (self.complaints, violations)


def http_base(pipes: Path) -> str:
    """Where a broker's gateway serves the console."""
    return f"http://127.0.0.1:{int((pipes / 'http.port').read_text())}"
