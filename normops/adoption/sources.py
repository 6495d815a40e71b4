"""Finds the syntax tree of a function from its own lines, and verifies that it compiles to the function's code."""

import __future__

import ast
import inspect
import linecache
from threading import Lock
from types import CodeType, FunctionType, ModuleType

_FLAGS = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_COMPARED = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars"),
    *("co_argcount", "co_kwonlyargcount", "co_posonlyargcount"),
)


# Parsers in several threads of CPython 3.11.7 raise "SystemError: AST constructor recursion depth mismatch".
_parser = Lock()


def source_of(function: FunctionType) -> ast.FunctionDef | None:
    """Returns the syntax tree that compiles to a function's code, or None if there is none."""
    with _parser:
        return _source_of(function)


def _source_of(function: FunctionType) -> ast.FunctionDef | None:
    code = function.__code__
    linecache.checkcache(code.co_filename)  # the file may have changed since it was read
    lines = linecache.getlines(code.co_filename, function.__globals__)[code.co_firstlineno - 1 :]
    try:
        # Removing the indentation would change docstrings.
        is_indented = lines[0][:1].isspace()
        outer = ast.parse("".join([*["if True:\n"][: int(is_indented)], *inspect.getblock(lines)]))
        tree = outer.body[0].body[0] if is_indented else outer.body[0]  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    names = [name for name in code.co_names if name in function.__globals__]
    modules = [name for name in names if isinstance(function.__globals__[name], ModuleType)]
    # CPython compiles calls of imported names differently. The file may have imported all of them, or modules only.
    return tree if any(_compiles_to(tree, code, imported) for imported in (modules, names)) else None


def _compiles_to(tree: ast.FunctionDef, code: CodeType, imported: list[str]) -> bool:
    outer = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass")
    function = outer.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [tree]
    outer.body = [*(ast.parse(f"import {name}").body[0] for name in imported), function]
    try:
        module = compile(outer, code.co_filename, "exec", flags=code.co_flags & _FLAGS, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    functions = [each for whole in _codes(module) for each in _codes(whole)]
    return any(each.co_name == code.co_name and _are_equal(each, code) for each in functions)


def _codes(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _are_equal(a: CodeType, b: CodeType) -> bool:
    """Returns whether two codes differ at most in line numbers and qualified names."""
    if any(getattr(a, name) != getattr(b, name) for name in _COMPARED) or len(a.co_consts) != len(b.co_consts):
        return False
    pairs = zip(a.co_consts, b.co_consts, strict=True)
    return all(
        _are_equal(x, y) if isinstance(x, CodeType) and isinstance(y, CodeType) else type(x) is type(y) and _same(x, y)
        for x, y in pairs
    )


def _same(a: object, b: object) -> bool:
    return a == b if isinstance(a, frozenset) else repr(a) == repr(b)  # 1 is not 1.0, and NaN is NaN
