"""Fingerprints of modules: hashes of the statement trees of a forward and its helpers.

Names of locals and of the module's attributes are numbered in the order of their first use. Annotations and docstrings
are dropped, so that copies of a class under other names have one fingerprint. Names of functions and modules of other
files are resolved.
"""

import ast
import builtins
import hashlib
import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from normops.adoption.guards import Absent, Guard, is_plain
from normops.adoption.sources import source_of

_DROPPED = {"annotation", "returns", "decorator_list", "type_comment", "type_params", "kind", "ctx", "simple", "name"}


class NoFingerprint(Exception):  # noqa: N818  nothing failed
    """The reason why a module has no fingerprint."""


class Fingerprint(NamedTuple):
    """The fingerprint of a module."""

    hash: str
    attributes: tuple[str, ...]
    """The attributes of the module that its forward reads, in order, without methods."""
    guards: tuple[Guard, ...]
    """The forward, its helpers and constants of its file."""


def fingerprint_of(module: nn.Module) -> Fingerprint:
    """Returns the fingerprint of a module.

    Raises:
        NoFingerprint: if there is no source, or code that a fingerprint does not cover.
    """
    reader = _Reader(module)
    cls = type(module)
    reader.add(cls.forward, next(base for base in cls.__mro__ if "forward" in vars(base)))
    reader.guards.append(Guard(cls, "forward", cls.forward))
    texts = []
    while reader.left:
        texts.append(reader.text_of(*reader.left.pop(0)))
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return Fingerprint(digest, tuple(reader.attributes), tuple(reader.guards))


class _Reader:
    """Reads the functions of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.attributes: dict[str, int] = {}
        self.guards: list[Guard] = []
        self.left: list[tuple[FunctionType, type | None]] = []
        self._numbers: dict[FunctionType, int] = {}

    def add(self, function: Any, owner: type | None) -> str:
        """Returns the number of a function, which becomes part of the fingerprint; ``owner`` has it as a method."""
        if not inspect.isfunction(function):
            raise NoFingerprint(f"calls a {type(function).__name__}")
        if function not in self._numbers:
            self._numbers[function] = len(self._numbers)
            self.left.append((function, owner))
        return f"f{self._numbers[function]}"

    def text_of(self, function: FunctionType, owner: type | None) -> str:
        tree = source_of(function)
        if tree is None or tree.decorator_list:
            raise NoFingerprint("has no source" if tree is None else "has decorators")
        defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        if not all(map(is_plain, (*defaults[0], *defaults[1].values()))):
            raise NoFingerprint("has arguments with other defaults than constants")
        return _Function(self, function, owner, tree).text(tree) + repr(defaults)

    def of_self(self, name: str) -> str:
        """Returns the text of an attribute of the module: a number."""
        cls = type(self._module)
        static = inspect.getattr_static(cls, name, None)
        if static is None or name in vars(self._module) or name in self._module._parameters:
            return f"a{self.attributes.setdefault(name, len(self.attributes))}"
        if not inspect.isfunction(static):
            if is_plain(static):
                return f"a{self.attributes.setdefault(name, len(self.attributes))}"
            raise NoFingerprint(f"reads {name}, a {type(static).__name__}")
        self.guards.append(Guard(cls, name, static))
        self.guards.append(Guard(None, name, Absent))
        return self.add(static, next(base for base in cls.__mro__ if name in vars(base)))

    def of_super(self, name: str, owner: type) -> str:
        """Returns the text of a method of a class after ``owner``."""
        mro = type(self._module).__mro__
        base = next((base for base in mro[mro.index(owner) + 1 :] if name in vars(base)), None)
        if base is None:
            raise NoFingerprint(f"calls super().{name}")
        self.guards.append(Guard(base, name, vars(base)[name]))
        return self.add(vars(base)[name], base)


class _Function:
    """Writes the tree of one function as text, which is the same in every version of Python."""

    def __init__(self, reader: _Reader, function: FunctionType, owner: type | None, tree: ast.FunctionDef) -> None:
        self._reader, self._function, self._owner = reader, function, owner
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._self = arguments[0].arg if owner is not None and arguments else None
        self._numbers: dict[str, int] = {}
        self._locals = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self._locals.add(node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._locals |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node is not tree:
                raise NoFingerprint("defines functions or classes in its forward")
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                raise NoFingerprint("writes to variables of its file")
        if self._self in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}:
            raise NoFingerprint("assigns to self")

    def text(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{' '.join(self.text(each) for each in node if not _is_dropped(each))}]"
        if isinstance(node, ast.Name):
            return self._name(node.id)
        if isinstance(node, ast.arg):
            return self._number(node.arg)
        if isinstance(node, ast.alias):
            return f"{node.name} as {self._number((node.asname or node.name).partition('.')[0])}"
        if isinstance(node, ast.Constant):
            return f"{type(node.value).__name__}:{node.value!r}"
        if isinstance(node, ast.Attribute) and (own := self._attribute(node)) is not None:
            return own
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return f"Assign(targets=[{self.text(node.target)}] value={self.text(node.value)})"
        if not isinstance(node, ast.AST):
            return str(node)
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _DROPPED)
        parts = (f"{name}={self.text(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({' '.join(parts)})"

    def _attribute(self, node: ast.Attribute) -> str | None:
        value = node.value
        if isinstance(value, ast.Name) and value.id == self._self:
            if not isinstance(node.ctx, ast.Load):
                raise NoFingerprint(f"assigns to its {node.attr}")
            return self._reader.of_self(node.attr)
        is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and not value.args
        if is_call and value.func.id == "super" and self._owner is not None:  # type: ignore[attr-defined]
            return self._reader.of_super(node.attr, self._owner)
        return None

    def _number(self, name: str) -> str:
        return f"v{self._numbers.setdefault(name, len(self._numbers))}"

    def _name(self, name: str) -> str:
        if name in self._locals:
            return self._number(name)
        space = self._function.__globals__
        if name in self._function.__code__.co_freevars:
            raise NoFingerprint(f"reads {name}, a variable of a function around it")
        if name not in space and not hasattr(builtins, name):  # an optional import, in code that does not run
            return f"undefined {name}"
        value = space[name] if name in space else getattr(builtins, name)
        if isinstance(value, ModuleType):
            return f"module {value.__name__}"
        if name in space and is_plain(value) and not isinstance(value, torch.dtype):
            self._reader.guards.append(Guard(space, name, value))
            return repr(value)
        package = str(space.get("__name__", "")).partition(".")[0]
        if inspect.isfunction(value) and value.__module__.partition(".")[0] == package != "torch":
            self._reader.guards.append(Guard(space, name, value))
            return self._reader.add(value, None)
        return _path_of(name, value)


def _is_dropped(node: Any) -> bool:
    """Returns whether a statement is a docstring or an annotation without a value."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or (isinstance(node, ast.AnnAssign) and node.value is None)


def _path_of(name: str, value: Any) -> str:
    """Returns the path under which a value of another file is found: of a function, a class or an object."""
    if isinstance(value, torch.dtype):
        return str(value)
    for place, path in (
        (getattr(value, "__module__", None), getattr(value, "__qualname__", None)),
        (type(value).__module__, name),
    ):
        found: Any = sys.modules.get(str(place))
        for part in str(path).split("."):
            found = getattr(found, part, None)
        if found is value and found is not None:
            return f"{place}.{path}"
    raise NoFingerprint(f"reads {name}, whose origin is unknown")
