"""The keyword arguments of a pipeline's `run`, made into the values that travel through it.

def run(spark, where, to, **options: Unpack[Options]) -> Done:
    keywords = Keywords("run", options)
    trigger = keywords.value(Trigger, every="1 second")     # a default for this pipeline
    …
    keywords.check_all_taken()
"""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])


class Keywords:
    """Keyword arguments, taken one value at a time."""

    def __init__(self, function: str, given: Mapping[str, Any]) -> None:
        self._function, self._given = function, dict(given)

    def value(self, kind: type[T], **defaults: Any) -> T:
        """Return a NamedTuple of the given arguments; its other fields have these defaults, or its own."""
        fields = kind._fields  # type: ignore[attr-defined]
        taken = {name: self._given.pop(name) for name in fields if name in self._given}
        return kind(**(defaults | taken))

    def check_all_taken(self) -> None:
        """Raise TypeError, as Python does, if an argument is unknown."""
        for name in self._given:
            raise TypeError(f"{self._function}() got an unexpected keyword argument {name!r}")
