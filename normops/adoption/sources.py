"""Finds the syntax trees of functions, and binds arguments."""

import ast
import inspect
import linecache
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
"""The syntax tree of a function."""


def source_of(function: FunctionType) -> Defined | None:
    """Returns the syntax tree that compiles to a function's code, or None if there is none."""
    code = function.__code__
    key = code.co_name, code.co_firstlineno
    for look_again in (False, True):
        if look_again:  # the file may have changed since it was read, and been reloaded
            linecache.checkcache(code.co_filename)
        codes, nodes = _compiled(code.co_filename, "".join(linecache.getlines(code.co_filename, function.__globals__)))
        found = nodes.get(key, ())
        if code in codes.get(key, ()) and len(found) == 1:
            return found[0]
    return None


_Functions = tuple[dict[tuple[str, int], list[CodeType]], dict[tuple[str, int], list[Defined]]]


@lru_cache(maxsize=4)
def _compiled(file: str, source: str) -> _Functions:
    """Returns the codes and the syntax trees of the functions in a file, by name and first line."""
    codes: dict[tuple[str, int], list[CodeType]] = {}
    nodes: dict[tuple[str, int], list[Defined]] = {}
    try:
        tree = ast.parse(source)
        left = [compile(tree, file, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return codes, nodes
    while left:
        code = left.pop()
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    for node in ast.walk(tree):
        if isinstance(node, Defined):
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            line = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
            nodes.setdefault((name, line), []).append(node)
    return codes, nodes


def bound_arguments(function: FunctionType, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a function by their names."""
    # A function's attributes, such as __signature__, could declare other arguments.
    bare = FunctionType(function.__code__, {}, "bare", function.__defaults__, function.__closure__)
    bound = inspect.signature(bare).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
