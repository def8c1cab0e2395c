"""What was written to stderr by this process and Spark's workers, whose lines come through the JVM and so a moment later."""

import pytest
from commands import wait


class Heard:
    """All of it since the last look of `capfd` before this was made."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._text = capfd, ""

    @property
    def text(self) -> str:
        self._text += self._capfd.readouterr().err
        return self._text

    def wait_for(self, part: str) -> str:
        """Return the text as soon as it has this part."""
        wait(lambda: part in self.text, lambda: f"never said: {part}\n{self._text[-2000:]}")
        return self._text
