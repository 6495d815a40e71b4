"""Follows the code of a module's forward, expression by expression.

This package, not Python, evaluates the source of a function. The source is known to be the function's own because it
compiles to the same code. Each operation of torch becomes a node of a graph like Dynamo's, in which the passes for
torch.compile find norms. Every other value that is read is compared at every call (:mod:`~.guards`), or refused. A
statement, expression, function, attribute or value is refused unless it is known to be harmless.
"""

import ast
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from normops.adoption.evaluation import Frame, Super, is_plain_class
from normops.adoption.guards import Absent, Guards, is_plain
from normops.adoption.reasons import Raises, refuse
from normops.adoption.sources import bound_arguments, source_of
from normops.inductor.calls import CASTS, METHODS, OPERATIONS, RESHAPES


class TracedFloat(float):
    """In a graph, the number of an attribute that an operation of torch takes without a change."""

    attribute: str


class Run(NamedTuple):
    """One call of a forward."""

    graph: Graph
    arguments: tuple[Node, ...]
    parameters: dict[str, Node]
    result: Node
    numbers: dict[str, float]
    """The attributes whose only use is as unchanged arguments of operations of torch."""
    decides_by_width: bool
    asks_for: frozenset[str]
    """The properties of tensors that the forward read, and may branch on: "dtypes", "dimensions"."""


@dataclass(frozen=True, eq=False)
class _Noted:
    """A tracked number. It is not a Python number, so that every use of it is noticed."""

    value: Any
    attribute: str = ""
    """The name of the module's attribute that holds it, if any."""
    is_width: bool = True
    """False if it is computed from numbers of rows; unused for an attribute."""

    def __bool__(self) -> bool:
        raise NotImplementedError


class _Method(NamedTuple):
    tensor: Tensor
    name: str


# Functions that depend on their arguments alone, and have no side effects.
_OF_NUMBERS = {abs, bool, float, int, max, min, round, str}
_FALSE = {getattr(torch.jit, name) for name in ("is_scripting", "is_tracing") if hasattr(torch.jit, name)}
_PURE = {*_OF_NUMBERS, *_FALSE, all, any, len, list, super, tuple}
PROPERTIES = ("dtype", "shape", "ndim", "size", "dim")
"""The properties of a tensor that a forward may read, in addition to the methods that it may call."""


class Following:
    """One run of a forward; :func:`follow` creates it."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor], guards: Guards) -> None:
        self.module, self.parameters, self.guards = module, parameters, guards
        self.graph = Graph()
        self.nodes: dict[int, Node] = {}
        self._widths: dict[int, int] = {}
        self.numbers: dict[str, float] = {}
        self.decides_by_width = False
        self.asks_for: set[str] = set()
        self._has_one_row = False

    def add_input(self, name: str, tensor: Tensor, width_dims: int) -> Node:
        """Adds an argument of the forward, whose last ``width_dims`` dimensions are not rows."""
        self._widths[id(tensor)] = width_dims
        self._has_one_row |= 1 in tensor.shape[: tensor.dim() - width_dims]
        return self._add(self.graph.placeholder(name), tensor)

    def _add(self, node: Node, tensor: Tensor) -> Node:
        node.meta["example_value"] = tensor  # keeps the tensor alive, so that its id stays unique
        self.nodes[id(tensor)] = node
        return node

    # Functions.

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a Python function."""
        code = function.__code__
        if code.co_flags & (CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR):
            refuse("is a coroutine or a generator")
        node = source_of(function)
        if node is None:
            refuse(f"has no source that {code.co_name} is known to be compiled from")
        if len(args) + len(kwargs) < code.co_argcount:
            self.judged(function.__defaults__, f"the defaults of {function.__name__}")
        if code.co_kwonlyargcount:
            refuse(f"calls {function.__name__}, which has keyword-only arguments")
        try:
            local = bound_arguments(function, args, kwargs)
        except TypeError as error:
            raise Raises(str(error)) from error
        frame = Frame(self, function, local)
        if isinstance(node, ast.Lambda):
            return frame.value_of(node.body)
        returned = frame.run(node.body)
        return returned[0] if returned else None

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call."""
        if isinstance(function, _Method):
            return self._method(function, args, kwargs)
        if isinstance(function, MethodType):
            return self.run(function.__func__, (function.__self__, *args), kwargs)
        if _is_among(function, OPERATIONS):
            return self.operation(function, function.__name__, args, kwargs)
        if _is_among(function, _PURE):
            return self._pure(function, args, kwargs)
        if type(function) is FunctionType and not is_of(function.__module__, "torch"):
            return self.run(function, args, kwargs)
        return refuse(f"calls {_full_name(function)}")

    def _method(self, method: _Method, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensor, name = method
        if name not in PROPERTIES:
            return self.operation(name, name, (tensor, *args), kwargs)
        self.asks_for.add("dimensions")
        if kwargs or len(args) > (name == "size"):
            refuse(f"calls {name} with {', '.join(kwargs) or 'several arguments'}")
        extents = self._extents(tensor)
        return tensor.dim() if name == "dim" else self.item(extents, *args) if args else extents

    def _pure(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = function.__name__
        if function in _FALSE and not args:
            return False
        if kwargs or not args:
            refuse(f"calls {name}")
        first = args[0]
        if function in (all, any) and type(first) in (tuple, list) and len(args) == 1:
            return function([self.truth(each) for each in first])
        if function in (len, list, tuple):
            if type(first) not in (tuple, list) or len(args) > 1:
                refuse(f"calls {name} with a {type(first).__name__}")
            return function(first)
        if function not in _OF_NUMBERS:
            refuse(f"calls {name}")
        return self.computed(function, args)

    def computed(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Returns the result of a function of plain values, some of which may be sizes."""
        if any(isinstance(each, Tensor) for each in args):
            refuse(f"calls {getattr(function, '__name__', 'an operator')} with a tensor")
        noted = [each for each in args if isinstance(each, _Noted) and not each.attribute]
        given = [each.value if each in noted else self.plain(each) for each in args]
        if not all(map(is_plain, given)):
            kind = next(type(each) for each in given if not is_plain(each))
            refuse(f"calls {function.__name__} with a {kind.__name__}")
        is_width = all(each.is_width for each in noted)
        if not is_width and (function is not operator.mul or not all(type(each) is int for each in given)):
            refuse("decides by the number of its rows")
        # Functions other than products and ratios may agree for the widths that are tried, and not for all widths.
        self.decides_by_width |= bool(noted) and is_width and function not in (operator.mul, operator.truediv)
        try:
            result = function(*given)
        except Exception as error:
            raise Raises(str(error)) from error
        return _Noted(result, is_width=is_width) if noted else result

    def operation(self, target: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Adds an operation of torch to the graph and returns its result; a string as ``target`` is a method."""
        is_given_sizes = target in RESHAPES
        if name == "squeeze" and not self._drops_a_constant(args, kwargs):
            refuse("calls squeeze, which depends on the number of rows")

        def pair(value: Any) -> tuple[Any, Any]:
            """Returns the value for torch, and the one for the graph."""
            if isinstance(value, Tensor):
                return value, self.nodes[id(value)]
            if isinstance(value, _Noted):
                if value.attribute:
                    number = TracedFloat(value.value)
                    number.attribute = value.attribute
                    return value.value, number
                if not value.is_width and not is_given_sizes:
                    refuse("computes with the number of its rows")
                value = value.value
            elif type(value) in (tuple, list):
                pairs = [pair(each) for each in value]
                return tuple(each for each, _ in pairs), tuple(each for _, each in pairs)
            if value is not None and type(value) not in (bool, int, float, torch.dtype):
                refuse(f"calls {name} with a {type(value).__name__}")
            return value, value

        given, named = [pair(each) for each in args], {key: pair(each) for key, each in kwargs.items()}
        function = getattr(given[0][0], name) if target == name else target
        first = int(target == name)
        try:
            result = function(*[each for each, _ in given[first:]], **{key: each for key, (each, _) in named.items()})
        except Exception as error:
            raise Raises(str(error)) from error
        if not isinstance(result, Tensor):
            refuse(f"calls {name}")
        if id(result) in self.nodes:
            if name not in CASTS and not is_given_sizes:
                refuse(f"writes into a tensor: {name}")
            return result  # a cast to its own dtype, or a reshape to its own shape
        arguments = tuple(each for _, each in given), {key: each for key, (_, each) in named.items()}
        kind = "call_method" if target == name else "call_function"
        node = self._add(self.graph.create_node(kind, target, *arguments), result)
        tensors = [each.meta["example_value"] for each in node.all_input_nodes]
        largest = max(tensors, key=Tensor.dim)
        # In a result of another shape, each size may be computed from numbers of rows.
        if not is_given_sizes and largest.dim() == result.dim() and all(id(each) in self._widths for each in tensors):
            self._widths[id(result)] = self._widths[id(largest)]
        return result

    def _drops_a_constant(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Returns whether the squeezed dimension is 1 for every number of rows; no number of rows here is 1."""
        tensor, dim = (*args, None)[:2]
        if kwargs or self._has_one_row or type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
            return False
        return bool(tensor.shape[dim] == 1)

    # Values.

    def plain(self, value: Any) -> Any:
        """Returns the plain value of a number that the forward branches on or computes with."""
        if isinstance(value, _Noted):
            if value.attribute:
                self.numbers.pop(value.attribute, None)
                self.guards.note(None, value.attribute, value.value)
            elif not value.is_width:
                refuse("decides by the number of its rows")
            else:
                self.decides_by_width = True
            return value.value
        if type(value) in (tuple, list):
            return type(value)(map(self.plain, value))
        return slice(*map(self.plain, (value.start, value.stop, value.step))) if type(value) is slice else value

    def truth(self, value: Any) -> bool:
        """Returns the truth of a condition of the forward."""
        if type(value) in (tuple, list):
            return bool(value)
        if isinstance(value, Tensor):
            refuse("decides by what it computes")
        value = self.plain(value)
        return bool(value) if is_plain(value) else refuse(f"decides by a {type(value).__name__}")

    def compared(self, compare: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        """Returns the result of a comparison."""
        is_identity = compare in (operator.is_, operator.is_not)
        if is_identity and (a is None or b is None):
            return compare(a, b)
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            refuse(f"calls {compare.__name__} with a tensor")
        a, b = self.plain(a), self.plain(b)
        if not all(is_plain(tuple(each) if type(each) is list else each) for each in (a, b)):
            refuse(f"compares a {type(a).__name__} with a {type(b).__name__}")
        if is_identity and not all(type(each) is torch.dtype for each in (a, b)):
            refuse("compares identities")  # (True, 1) may become (1, True), which is equal
        try:
            return compare(a, b)
        except Exception as error:
            raise Raises(str(error)) from error

    def binary(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        """Returns the result of a binary operator."""
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            method = f"__{'' if isinstance(a, Tensor) else 'r'}{function.__name__}__"
            self.guards.note(Tensor, method, getattr(Tensor, method))
            return self.operation(function, function.__name__, (a, b), {})
        if function is operator.add and type(a) is type(b) and type(a) in (tuple, list):
            return a + b
        return self.computed(function, (a, b))

    def item(self, value: Any, index: Any) -> Any:
        """Returns the value of a subscript."""
        index = self.plain(index)
        if isinstance(value, Tensor):
            return self._with_dimensions(value, index)
        if value is _table():
            return self._activation(value, index)
        if type(value) not in (tuple, list, str):
            refuse(f"takes elements of a {type(value).__name__}")
        try:
            return value[index]
        except Exception as error:
            raise Raises(str(error)) from error

    def _with_dimensions(self, tensor: Tensor, index: Any) -> Any:
        """Returns a tensor whose subscript adds dimensions, as in ``weight[:, None, None]``: by ``unsqueeze``."""
        items = index if type(index) is tuple else (index,)
        kept = tensor.dim() - sum(type(each) is slice for each in items)  # by an ellipsis
        is_known = all(each is None or each is ... or (type(each) is slice and each == slice(None)) for each in items)
        if not is_known or None not in items or items.count(...) > 1:
            refuse("calls getitem, which is no part of an RMSNorm")
        self.guards.note(Tensor, "__getitem__", Tensor.__getitem__)
        dim = 0
        for each in items:
            if each is None:
                tensor = self.operation("unsqueeze", "unsqueeze", (tensor, dim), {})
            dim += kept if each is ... else 1
        return tensor

    def _activation(self, table: Any, key: Any) -> MethodType:
        """Returns the forward of a module in transformers' table of activations, which creates it at each access."""
        cls: Any = table.get(key) if type(key) is str else None
        is_module = is_plain_class(cls) and issubclass(cls, nn.Module) and cls.__call__ is nn.Module.__call__
        if not is_module or type(cls.forward) is not FunctionType:
            refuse(f"takes {key!r} of a table of activations")
        self.guards.note(table, key, cls)
        return MethodType(self.guards.note(cls, "forward", cls.forward), Absent)

    def judged(self, value: Any, what: str) -> Any:
        """Returns a value that was read, if guards can compare it; refuses others."""
        if not is_plain(value) and value is not _table():
            if isinstance(value, Tensor):
                refuse(f"reads {what}, a tensor that is no parameter")
            is_known = _is_among(value, OPERATIONS) or _is_among(value, _PURE)
            is_known |= type(value) in (FunctionType, ModuleType) or value is Tensor or is_plain_class(value)
            is_known |= isinstance(value, ModuleType) and type(value).__getattribute__ is ModuleType.__getattribute__
            if not is_known:
                refuse(f"calls {_full_name(value)}" if callable(value) else f"reads {what}, a {type(value).__name__}")
        return value

    def read(self, owner: Any, name: str, value: Any, what: str = "") -> Any:
        """Returns a value that was read from ``owner``, and adds a guard for it.

        Modules of torch and dtypes get no guard, because programs do not rebind their names.
        """
        self.judged(value, what or name)
        is_of_torch = isinstance(value, ModuleType) and is_of(value.__name__, "torch")
        return value if is_of_torch or type(value) is torch.dtype else self.guards.note(owner, name, value)

    # Attributes.

    def attribute(self, value: Any, name: str) -> Any:
        """Returns an attribute of a value."""
        if name.startswith("__") and not name.endswith("__"):
            refuse(f"uses {name}, which has another name at run time")
        if isinstance(value, Tensor):
            return self._of_tensor(value, name)
        if value is self.module:
            return self._of_module(name)
        if isinstance(value, Super):
            return self._of_super(value.cls, name)
        if isinstance(value, ModuleType) and name in vars(value):
            return self.read(value, name, vars(value)[name])
        if is_plain_class(value):
            return self._of_class(value, name)
        return refuse(f"uses {name}, which is no part of a norm")

    def _of_tensor(self, tensor: Tensor, name: str) -> Any:
        if name == "dtype":
            self.asks_for.add("dtypes")
            return tensor.dtype
        if name in ("shape", "ndim"):
            self.asks_for.add("dimensions")
            return self._extents(tensor) if name == "shape" else tensor.ndim
        if name not in METHODS and name not in PROPERTIES:
            refuse(f"uses {name}, which is no part of a norm")
        self.guards.note(Tensor, name, getattr(Tensor, name))
        return _Method(tensor, name)

    def _extents(self, tensor: Tensor) -> tuple[_Noted, ...]:
        first = tensor.dim() - self._widths.get(id(tensor), 0)
        return tuple(_Noted(size, is_width=dim >= first) for dim, size in enumerate(tensor.shape))

    def _of_module(self, name: str) -> Any:
        cls, own = type(self.module), vars(self.module)
        if name == "training":
            refuse("asks whether it is in training")
        if name in SLOTS:
            refuse(f"uses its own {name}")
        is_of_all = name in INTERNAL or (hasattr(nn.Module, name) and getattr(cls, name) is getattr(nn.Module, name))
        if is_of_all or name == "__class__":
            refuse(f"uses {name}, which is no part of a norm")
        found = _static(cls, name)
        is_function = isinstance(found, (FunctionType, staticmethod))
        if found is not Absent and not is_plain(found) and not is_function:
            refuse(f"reads its {name}, a {type(found).__name__}")
        if is_function and name not in own:
            self.guards.note(None, name, Absent)
            function = self.read(cls, name, getattr(cls, name))
            return MethodType(function, self.module) if isinstance(found, FunctionType) else function
        if name in own:
            value = own[name]
        elif found is not Absent:
            value = found
        elif name in self.parameters:
            return self.parameters[name]
        else:
            spaces = (self.module._parameters, self.module._buffers, self.module._modules)
            space: Any = next((space for space in spaces if name in space), None)
            if space is None:
                raise Raises(f"has no attribute {name}")
            value = space[name]
        if type(value) is float:
            self.numbers[name] = value
            return _Noted(value, attribute=name)
        return self.read(None, name, value, f"its {name}")

    def _of_super(self, cls: type, name: str) -> Any:
        function, mro = getattr(super(cls, type(self.module)), name, None), type(self.module).__mro__
        if type(function) is not FunctionType:
            refuse(f"uses {name} of a base, a {type(function).__name__}")
        self.guards.note(type(self.module), "__mro__", mro)
        for base in mro[mro.index(cls) + 1 :]:
            self.guards.note(base, name, getattr(base, name, Absent))
            if name in vars(base):
                break
        return MethodType(function, self.module)

    def _of_class(self, cls: type, name: str) -> Any:
        found = _static(cls, name)
        if name.startswith("__") or not (is_plain(found) or isinstance(found, (type, FunctionType, staticmethod))):
            refuse(f"reads {name}, a {type(found).__name__}")
        return self.read(cls, name, getattr(cls, name))


def follow(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    arguments: Sequence[tuple[str, Tensor]],
    width_dims: int,
    guards: Guards,
) -> Run:
    """Returns the operations and reads of a module's forward, called with other parameters.

    The last ``width_dims`` dimensions of the arguments are not rows.

    Raises:
        Unfit: with the reason, if the forward cannot be followed.
        Raises: if the forward would raise an error.
    """
    following = Following(module, parameters, guards)
    nodes = tuple(following.add_input(name, tensor, width_dims) for name, tensor in arguments)
    parameter_nodes = {name: following.add_input(name, each, each.dim()) for name, each in parameters.items()}
    forward = guards.note(type(module), "forward", type(module).forward)
    result = following.run(forward, (module, *(tensor for _, tensor in arguments)), {})
    if not isinstance(result, Tensor):
        refuse("returns something else than a tensor of its input's shape")
    return Run(
        following.graph,
        nodes,
        parameter_nodes,
        following.nodes[id(result)],
        following.numbers,
        following.decides_by_width,
        frozenset(following.asks_for),
    )


_SPACES = ("_parameters", "_buffers", "_modules")
SLOTS = ("_old_forward", "forward")
"""The attributes in which a module may have a forward that replaces its class's, innermost first.

Hooks of accelerate replace ``forward``, and store the previous one in ``_old_forward``, which they call.
"""

INTERNAL = {*vars(nn.Module()), *_SPACES} - {"training"}
"""Attributes that every module has."""


def is_of(name: object, package: str) -> bool:
    """Returns whether a module is in a package."""
    return isinstance(name, str) and (name == package or name.startswith(f"{package}."))


def _table() -> Any:
    """Returns transformers' table of activations, if it has been imported."""
    return getattr(sys.modules.get("transformers.activations"), "ACT2FN", Absent)


def _static(cls: type, name: str) -> Any:
    """Returns an attribute of a class without invoking descriptors."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), Absent)


def _is_among(value: Any, known: Collection[Any]) -> bool:
    return any(each is value for each in known)  # calls no value's __eq__


def _full_name(function: Any) -> str:
    if isinstance(function, MethodType | BuiltinMethodType) and not isinstance(
        function.__self__, type | ModuleType | None
    ):
        return function.__qualname__
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None) or "torch"
    return name if module == "builtins" or name.startswith("torch.") else f"{module}.{name}"
