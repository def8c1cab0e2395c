"""Options that travel together are one value: a parameter of a NamedTuple type becomes one option per field."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer in which the fields of each NamedTuple parameter are options."""
    groups: dict[str, Any] = {n: kind for n, kind in get_type_hints(function).items() if hasattr(kind, "_fields")}

    @wraps(function)
    def command(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{option: given.pop(option) for option in group._fields})
        function(**given)

    flat = [option for parameter in signature(function).parameters.values() for option in _options(parameter, groups)]
    command.__signature__ = Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in flat}
    return command


def _options(parameter: Parameter, groups: dict[str, Any]) -> list[Parameter]:
    """Return the options that a parameter stands for: the fields of a group, or the parameter itself.

    A default of the group gives each field its default.
    """
    options = [parameter]
    if parameter.name in groups:
        options = list(signature(groups[parameter.name]).parameters.values())
        if parameter.default is not Parameter.empty:
            options = [option.replace(default=getattr(parameter.default, option.name)) for option in options]
    return [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
