"""Python source as syntax trees, each text parsed and walked once in a run: several tests check rules of the same modules.

    nodes("a = 1")   ->   [Module, Assign, Name, Constant, Store]

They are left out of garbage collections, which would walk a million nodes again with every few tests to come.
"""

import ast
import gc
from functools import cache


@cache
def tree(text: str) -> ast.Module:
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(text: str) -> list[ast.AST]:
    """All nodes of a text, in the order of `ast.walk`."""
    return [*ast.walk(tree(text))]
