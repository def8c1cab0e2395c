"""Who sent a request, for the handlers that ask. kmq/gateway/access.py finds it out before they run."""

from contextvars import ContextVar
from typing import Any

from kmq.access.roles import ADMIN, CONSUME, PRODUCE


class Caller:
    """`name`: of the token, "" without one; `may_change`: replay and reset are allowed.

    A handler sets `is_dry_run` when it changes nothing.
    """

    __slots__ = ("is_dry_run", "may_change", "name", "roles")

    def __init__(self, name: str, roles: frozenset[str], may_change: bool) -> None:
        self.name, self.roles, self.may_change = name, roles, may_change
        self.is_dry_run = False

    def session(self) -> dict[str, Any]:
        """Return what this caller may do, as JSON shows it."""
        role = next((role for role in (ADMIN, CONSUME, PRODUCE) if role in self.roles), "none")
        return {"role": role, "roles": sorted(self.roles), "name": self.name, "writable": self.may_change}


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)  # of the request that this task serves


def caller() -> Caller:
    """Return who sent the request; somebody who may change nothing where nothing asks for access."""
    return CALLER.get() or Caller("", frozenset(), may_change=False)
