"""Running a module's forward on a few rows, and noting what it computes and all that this rests on.

The operations become a graph like Dynamo's, on which the passes for torch.compile find norms. What Python reads besides
(attributes, globals, closures) is noted where it is plain, to be compared whenever the module is called, and refused
where it is not: a list may be another one at the next call. So is all that could change anything or come out otherwise
the next time. The forward that was run is then known to compute this graph for as long as what was noted stays.
"""

import builtins
import gc
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from normops.adoption.instructions import Step, handles_errors, steps_of
from normops.adoption.telling_numbers import Extent, HandedOn, extent, handed_on
from normops.inductor.calls import CASTS, METHODS


class Unfit(Exception):  # noqa: N818  nothing failed
    """Why a module is not, or cannot be treated as, an RMSNorm."""


class _Stop(BaseException):
    """Ends a run that was refused."""


class Global(NamedTuple):
    """A plain value or a function that a forward read, and the class, or the name of the module, that it belongs to."""

    owner: str | type
    name: str
    value: Any


class Run(NamedTuple):
    """One call of a forward."""

    graph: Graph
    arguments: tuple[Node, ...]
    weight: Node | None
    result: Node
    attributes: dict[str, Any]
    """The attributes of the module that were read, but for its weight, and their values."""
    at_call: frozenset[str]
    """The attributes whose numbers went into operations of torch as they are, and nowhere else."""
    globals: tuple[Global, ...]
    decided_by: frozenset[str]
    """The sizes by which something was decided: "width", "number of rows"."""
    asks_for: frozenset[str]
    """What the forward asked its tensors for, so that it may decide by it: "dtypes", "sizes"."""


_PLAIN = {bool, int, float, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.memory_format}


def is_plain(value: Any) -> bool:
    """Whether a value can be compared with ``==``, and can never change."""
    return type(value) in _PLAIN or (type(value) in (tuple, torch.Size) and all(map(is_plain, value)))


class _Attributes(dict[str, Any]):
    """Stands in the place of a module's parameters, and notes which attributes are read."""

    def __init__(self, values: dict[str, Any], weight: Tensor | None, watch: "_Watch") -> None:
        super().__init__(values)
        self._weight, self._watch = weight, watch

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "training":
            self._watch.refuse("asks whether it is in training")
        if value is self._weight and value is not None:
            return value
        self._watch.judge(value, f"its {name}")
        self._watch.attributes[name] = value
        if type(value) is not float:
            return value
        self._watch.reads.append(name)
        return handed_on(value, name, self._watch.looked_at)


# What a forward may call besides operations of torch and functions in Python. These depend on nothing but what they are
# given, and change nothing.
_PURE = {
    *(abs, bool, float, int, isinstance, len, list, max, min, round, super, tuple),
    *(torch.jit.is_scripting, torch.jit.is_tracing),  # type: ignore[attr-defined]
}
_OURS = __name__.rpartition(".")[0]
# Tables of activations, which stay the same for as long as a process lives. Their modules are not followed.
_TABLES = (("transformers.activations", "ACT2FN"),)
# What a forward may ask of a tensor, and what it then knows.
_PROPERTIES = {"shape": "sizes", "ndim": "sizes", "dtype": "dtypes"}
_QUESTIONS = {"size": "sizes", "dim": "sizes", "ndimension": "sizes", "is_floating_point": "dtypes"}
_OF_TENSORS = {*_PROPERTIES, *_QUESTIONS, *METHODS}


class _Watch(TorchFunctionMode):
    """Notes the operations of torch; :meth:`trace` is called for what Python does besides."""

    def __init__(self, copy: nn.Module, operations: frozenset[Any]) -> None:
        super().__init__()
        self.graph = Graph()
        self.nodes: dict[int, Node] = {}
        self.attributes: dict[str, Any] = {}
        self.reads: list[str] = []
        self.handed_on: list[str] = []
        self.looked_at: set[str] = set()
        self.decided: list[str] = []
        self.globals: dict[tuple[int, str], Global] = {}
        self.functions: list[Any] = []
        self.names: set[str] = set()
        self._asked: set[str] = set()
        self.asks_for: set[str] = set()
        self.caught: list[str] = []
        self.not_followed: set[int] = set()
        self.refusals: list[str] = []
        self._is_busy = False
        self._copy, self._operations = copy, operations
        self.of_class = _class_attributes(type(copy))
        spaces = (self.of_class, vars(copy), copy._parameters, copy._buffers)
        self._own = {name for space in spaces for name in space} - INTERNAL
        self._is_grad_enabled = torch.is_grad_enabled()
        self._fixed: Tensor | None = None

    def refuse(self, reason: str) -> NoReturn:
        """Ends the run. The reason is noted as well as raised, since the forward may catch the exception."""
        self.refusals.append(reason)
        raise _Stop

    def add_input(self, name: str, tensor: Tensor, *, is_fixed: bool = False) -> Node:
        """Adds a tensor that the forward is given. One that is fixed, the weight, has the same shape in every call."""
        self._fixed = tensor if is_fixed else self._fixed
        return self._add(self.graph.placeholder(name), tensor)

    def _add(self, node: Node, tensor: Tensor) -> Node:
        node.meta["example_value"] = tensor  # keeps the tensor alive, and so its id its own
        node.meta["version"] = tensor._version
        self.nodes[id(tensor)] = node
        return node

    def at_call(self) -> frozenset[str]:
        """The attributes whose numbers went into operations of torch as they are, and nowhere else."""
        only_handed_on = {name for name in self.reads if self.reads.count(name) == self.handed_on.count(name)}
        return frozenset(only_handed_on - self.looked_at)

    # Calls of torch.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._is_busy = True
        try:
            return self._called(func, args, kwargs or {})
        finally:
            self._is_busy = False

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            return self._property(func, name, args)
        if name in _QUESTIONS:
            return self._question(func, name, args, kwargs)
        if torch.is_grad_enabled() != self._is_grad_enabled or name == "_set_grad_enabled":
            self.refuse("computes without gradients")
        values = [*_flat(args), *_flat(tuple(kwargs.values()))]
        if not all(id(value) in self.nodes for value in values if isinstance(value, Tensor)):
            self.refuse(f"calls {name} with a tensor besides its input and weight")
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.caught.append(name)  # if the run goes on, somebody has caught it
            raise
        if any(node.meta["version"] != node.meta["example_value"]._version for node in self.nodes.values()):
            self.refuse(f"writes into a tensor: {name}")
        if not isinstance(result, Tensor):
            self.refuse(f"calls {name}")
        if id(result) in self.nodes:
            if name not in CASTS:
                self.refuse(f"calls {name}")
            return result  # a cast to the dtype that it has
        self.handed_on += [value.attribute for value in values if isinstance(value, HandedOn)]
        given, named = _with_nodes(args, self.nodes), _with_nodes(kwargs, self.nodes)
        if func in self._operations or not hasattr(Tensor, name):
            node = self.graph.call_function(func, given, named)
        elif name == "__rdiv__":
            node = self.graph.call_function(operator.truediv, given[::-1])
        else:
            node = self.graph.call_method(name, given, named)
        self._add(node, result)
        return result

    def _property(self, func: Any, action: str, args: tuple[Any, ...]) -> Any:
        name = func.__self__.__name__
        if action != "__get__":
            self.refuse(f"sets {name} of a tensor")
        if name not in _PROPERTIES:
            self.refuse(f"asks for {name} of a tensor")
        self.asks_for.add(_PROPERTIES[name])
        return self._extents(args[0]) if name == "shape" else func(*args)

    def _question(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.asks_for.add(_QUESTIONS[name])
        if name != "size":
            return func(*args, **kwargs)
        tensor, *dims = (*args, *kwargs.values())
        extents = self._extents(tensor)
        return extents[dims[0]] if dims else extents

    def _extents(self, tensor: Tensor) -> tuple[int, ...]:
        last = 0 if tensor is self._fixed else tensor.dim() - 1
        whats = ["width" if dim >= last else "number of rows" for dim in range(tensor.dim())]
        return tuple(extent(size, what, self.decided) for size, what in zip(tensor.shape, whats, strict=True))

    # What Python does besides calling torch.

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Called by Python for every function: those that are not torch's, nor ours, are followed step by step."""
        code, space = frame.f_code, frame.f_globals
        module = space.get("__name__", "")
        if self._is_busy or is_of(module, _OURS) or is_of(module, "torch") or module in dict(_TABLES):
            return None
        is_called_by_torch = frame.f_back is None or frame.f_back.f_trace is None
        if is_called_by_torch and module.partition(".")[0] in sys.stdlib_module_names:
            return None
        if handles_errors(code):
            self.refuse(f"handles errors, or what with may do, in {code.co_name}")
        for name, value in _arguments(frame):
            if value is not self._copy and not isinstance(value, (Tensor, HandedOn, Extent)):
                self.judge(value, f"the argument {name} of {code.co_name}")
        steps = steps_of(code)
        self.not_followed.add(id(frame))

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                self.not_followed.discard(id(frame))
                if (found := steps.get(frame.f_lasti)) is not None:
                    self._step(frame, found)
            return step

        # In this order: Python 3.13 tells of instructions only if there is a function to tell them to.
        frame.f_trace = step
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def _step(self, frame: FrameType, step: Step) -> None:
        if step.action == "attribute":
            self.names.add(step.name)
            own = self.of_class.get(step.name)
            if step.name not in _OF_TENSORS and step.name not in self._own and step.name not in self._asked:
                self.refuse(f"uses {step.name}, which is no part of a norm")
            if not is_plain(own) and not _is_method(own):
                self.refuse(f"reads its {step.name}, a {type(own).__name__}")
        elif step.action == "closure":
            value = frame.f_locals.get(step.name)
            if step.name != "__class__" and value is not self._copy and not isinstance(value, Tensor):
                self._resolve(None, step.name, value, step.chain)
        elif step.action == "global":
            space = frame.f_globals if step.name in frame.f_globals else vars(builtins)
            if step.name not in space:
                self.refuse(f"reads {step.name}, which is nowhere")
            else:
                module = sys.modules.get(space.get("__name__", ""))
                is_whole = module is not None and vars(module) is space
                self._resolve(module if is_whole else None, step.name, space[step.name], step.chain)
        else:
            self.refuse(step.action)

    def _resolve(self, owner: Any, name: str, value: Any, chain: tuple[str, ...]) -> None:
        """Notes or refuses what a name stands for, or the attribute that is read of it right away, ``a.b.c``."""
        for attribute in chain:
            if not isinstance(value, (ModuleType, type)) or attribute not in vars(value):
                break
            self._asked.add(attribute)
            owner, name, value = value, attribute, vars(value)[attribute]
        if isinstance(value, ModuleType):
            self.refuse(f"reads {name}, a module")
        if not is_plain(value):
            self.judge(value, name)
            if not isinstance(value, FunctionType) or is_of(value.__module__, "torch") or owner is None:
                return
            if _of(value.__module__, value.__qualname__) is not value:
                self.refuse(f"calls {name}, a function that has no name in a module")
        if isinstance(owner, ModuleType) and sys.modules.get(owner.__name__) is not owner:
            owner = None
        if owner is None:
            self.refuse(f"reads {name}, which is neither its own nor a module's")
        if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            self.globals[id(owner), name] = Global(owner if isinstance(owner, type) else owner.__name__, name, value)

    def judge(self, value: Any, what: str) -> None:
        """Refuses a value that may be another one at the next call, or that may change something when it is called."""
        if is_plain(value) or _is_among(value, _PURE):
            return
        if _is_among(value, self._operations) or any(_of(*table) is value for table in _TABLES):
            return
        if isinstance(value, MethodType) and value.__self__ is not self._copy:
            self.judge(value.__self__, f"what {value.__name__} is a method of")
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and not is_of(function.__module__, "torch"):
            if hasattr(value, "_torchdynamo_orig_callable"):
                self.refuse(f"calls {_full_name(value)}, which is compiled")
            self.functions.append(value)
            return  # it is in Python, and will be followed
        if value is Tensor or (isinstance(value, type) and issubclass(type(self._copy), value)) or _is_error(value):
            return
        if isinstance(value, Tensor):
            self.refuse(f"reads {what}, a tensor that is no parameter")
        if callable(value):
            self.refuse(f"calls {_full_name(value)}")
        self.refuse(f"reads {what}, a {type(value).__name__}")


def watch(
    forward: Callable[..., Any],
    copy: nn.Module,
    weight: tuple[str, Tensor] | None,
    arguments: Sequence[tuple[str, Tensor]],
    operations: frozenset[Any],
) -> Run:
    """Calls a forward with a copy of its module, and notes what it computes and reads.

    ``operations`` are the functions of torch that it may call. The copy is of no use afterwards.

    Raises:
        Unfit: with the reason, if what the forward computes cannot be known.
    """
    seen = _Watch(copy, operations)
    spaces = _take_attributes(copy, weight, seen)
    nodes = tuple(seen.add_input(name, tensor) for name, tensor in arguments)
    weight_node = None if weight is None else seen.add_input("weight", weight[1], is_fixed=True)
    before, collects = sys.gettrace(), gc.isenabled()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks here when tracing begins
    try:
        with seen:
            gc.disable()  # or what other people have called at a collection would be taken for a part of the forward
            sys.settrace(seen.trace)
            try:
                result = forward(copy, *(tensor for _, tensor in arguments))
            finally:
                sys.settrace(before)
                if collects:
                    gc.enable()
    except _Stop:
        raise Unfit(seen.refusals[0]) from None
    except SystemExit:
        raise Unfit("ends the process") from None
    if seen.refusals:
        raise Unfit(seen.refusals[0])
    if seen.caught:
        raise Unfit(f"goes on after an error of {seen.caught[0]}")
    if seen.not_followed:
        raise Unfit("cannot be followed: this Python does not tell what it executes")
    left = vars(copy)
    are_same = left.keys() == spaces.keys() and all(left[name] is value for name, value in spaces.items())
    if not are_same or left["_buffers"] or left["_modules"]:
        raise Unfit("changes its attributes")
    _check_names(seen, spaces)
    if not isinstance(result, Tensor) or id(result) not in seen.nodes:
        raise Unfit("returns something else than a tensor of its input's shape")
    globals_ = tuple(seen.globals.values())
    attributes = seen.attributes
    return Run(
        seen.graph,
        nodes,
        weight_node,
        seen.nodes[id(result)],
        attributes,
        seen.at_call(),
        globals_,
        frozenset(seen.decided),
        frozenset(seen.asks_for),
    )


def _check_names(seen: _Watch, spaces: dict[str, Any]) -> None:
    """Refuses what may have been read of a class or function by a name that was read, unless it is plain or code."""
    own = {**seen.of_class, **spaces}
    for name in seen.names & own.keys():
        if not is_plain(own[name]) and not _is_method(own[name]):
            raise Unfit(f"reads its {name}, a {type(own[name]).__name__}")
    functions = [value for value in own.values() if isinstance(value, FunctionType)]
    for function in (*functions, *seen.functions):
        if seen.names & vars(function).keys():
            raise Unfit(f"may read attributes of {function.__name__}")


def _take_attributes(copy: nn.Module, weight: tuple[str, Tensor] | None, seen: _Watch) -> dict[str, Any]:
    """Moves a copy's attributes into :class:`_Attributes`, so that none is read unnoticed; returns those it has now."""
    values = {name: value for name, value in vars(copy).items() if name not in INTERNAL}
    values |= copy._buffers
    values |= {name: None for name, parameter in copy._parameters.items() if parameter is None}
    values |= {} if weight is None else dict((weight,))
    # nn.Module.__getattr__ looks there for what neither the instance nor its class has. Names that the class has, too,
    # stay attributes of the instance: Python would find the class's.
    spaces: dict[str, Any] = {name: values.pop(name) for name in list(values) if hasattr(type(copy), name)}
    for name, value in {**seen.of_class, **spaces}.items():
        if is_plain(value):
            seen.attributes[name] = value
    attributes = _Attributes(values, None if weight is None else weight[1], seen)
    spaces |= zip(_SPACES, (attributes, {}, {}), strict=True)
    copy.__dict__.clear()
    copy.__dict__.update(spaces)
    return spaces


_SPACES = ("_parameters", "_buffers", "_modules")
INTERNAL = {*vars(nn.Module()), *_SPACES} - {"training"}
"""Attributes that every module has."""


def _class_attributes(cls: type) -> dict[str, Any]:
    bases = [base for base in cls.__mro__ if base not in nn.Module.__mro__]
    return {name: v for base in reversed(bases) for name, v in vars(base).items() if not name.startswith("__")}


def is_of(name: object, package: str) -> bool:
    """Whether a module is in a package."""
    return isinstance(name, str) and (name == package or name.startswith(f"{package}."))


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception) and value.__module__ == "builtins"


def _is_method(value: Any) -> bool:
    return isinstance(value, (FunctionType, MethodType, property, staticmethod, classmethod))


def _arguments(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The arguments that a function was called with, those of *args and **kwargs one by one."""
    code, names = frame.f_code, iter(frame.f_code.co_varnames)
    values = frame.f_locals
    for name in islice(names, code.co_argcount + code.co_kwonlyargcount):
        yield name, values.get(name)
    if code.co_flags & inspect.CO_VARARGS:
        name = next(names)
        yield from ((name, value) for value in values.get(name, ()))
    if code.co_flags & inspect.CO_VARKEYWORDS:
        yield from values.get(next(names), {}).items()


def _of(module: str, name: str) -> Any:
    """What a module has under a name, which may have dots."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _is_among(value: Any, known: Collection[Any]) -> bool:
    try:
        return value in known
    except TypeError:  # is not hashable
        return False


def _full_name(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    module = getattr(function, "__module__", None) or "torch"
    return name if module == "builtins" or name.startswith("torch.") else f"{module}.{name}"


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _with_nodes(value: Any, nodes: dict[int, Node]) -> Any:
    if isinstance(value, Tensor):
        return nodes[id(value)]
    if isinstance(value, dict):
        return {name: _with_nodes(each, nodes) for name, each in value.items()}
    return type(value)(_with_nodes(each, nodes) for each in value) if type(value) in (tuple, list) else value
