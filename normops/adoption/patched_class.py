"""The class that :func:`normops.patch` gives a module: a subclass of the module's own, whose forward runs normops."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from normops import _C
from normops._arguments import is_tracing
from normops._operators import has_rules
from normops.adoption.computing import copies_of, function_of, mode_of, writable
from normops.adoption.guards import holding
from normops.adoption.norm import ModelRounding, Norm


class Made(NamedTuple):
    """The key of a patched class: modules with the same key share one."""

    cls: type[nn.Module]
    norm: Norm
    rounding: ModelRounding


class Patched:
    """The base of patched classes, after the module's own class, which determines the memory layout."""

    normops_made: ClassVar[Made]

    def __copy__(self) -> Any:  # noqa: D105
        again = object.__new__(type(self))
        vars(again).update(vars(self))
        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: D105
        again = memo[id(self)] = object.__new__(type(self))  # what refers to the module then refers to the copy
        vars(again).update(copy.deepcopy(vars(self), memo))
        return again

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A pickle holds the module's own class, and the options of patch, which runs again when it is loaded."""
        from normops.adoption.installation import new_of, own_class

        if not issubclass(cls := type(self), Patched):  # another thread has unpatched it
            return object.__reduce_ex__(self, protocol)
        made = cls.normops_made
        by = "measurement" if made.norm.is_measured else "source"
        return new_of, (own_class(self), made.rounding, by), vars(self)


# Weak references: a patched class refers to the module's own class, which a program may define repeatedly.
_classes: WeakValueDictionary[Made, type[nn.Module]] = WeakValueDictionary()


def class_of(made: Made) -> type[nn.Module]:
    """Returns the class for this key, which all modules with the key share."""
    ours = _classes.get(made)
    if ours is None:
        cls: Any = made.cls
        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        ours = type(cls)(cls.__name__, (cls, Patched), {**names, "normops_made": made})
        ours.forward, ours.__repr__ = _forward_of(made), _repr_of(cls)
        ours = _classes.setdefault(made, ours)  # another thread may have added one
    return ours


def _repr_of(cls: Any) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:  # noqa: N807
        return f"{cls.__repr__(self)} (normops)"

    return __repr__


def _forward_of(made: Made) -> Callable[..., Any]:
    """Returns the forward of a patched class, which runs normops in the supported cases."""
    cls, norm, rounding = made
    form = norm.form
    own_forward: Any = cls.forward
    compute, copies = function_of(norm, rounding), copies_of(norm)
    holds = holding(norm.guards, cls)
    names, is_gated = norm.arguments, form.gating is not None
    # The bias is the first parameter of a norm without a weight.
    first_name, second_name = (norm.weight, norm.bias) if norm.weight is not None else (norm.bias, None)
    has_weight = norm.weight is not None
    eps_name, fixed_eps = (norm.eps, None) if isinstance(norm.eps, str) else (None, norm.eps)
    parameter_dims, normalized_dims, shape = norm.parameter_dims, norm.normalized_dims, norm.shape
    # A set: Dynamo converts numbers in tuples to symbols.
    dims, taken, dim = frozenset(norm.dims), norm.dtypes, form.dim
    if norm.bias is not None and rounding == "original":
        # The rounding of the product before the bias is known only for equal dtypes.
        taken = frozenset(dtypes for dtypes in taken if dtypes[0] == dtypes[1])
    offset, mode, autocasts = form.weight_offset, mode_of(norm, rounding), form.autocasts
    ones = (1,) * (parameter_dims - 1)
    is_compiling, is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
    is_grad_enabled, is_dynamo_compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
    has_fast_path = not is_gated and norm.group_size is None and normalized_dims == parameter_dims == 1 and dim is None
    has_fast_path &= norm.weight is not None and norm.bias is None
    plain = frozenset(x for x, weight, _ in taken if x == weight)
    uncopied = plain - {dtypes[0] for dtypes, _ in copies}

    @wraps(own_forward, updated=())
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        if has_fast_path and not is_dynamo_compiling():
            try:
                (x,) = args
                own = self.__dict__
                weight = own["_parameters"][first_name]
                eps = fixed_eps if eps_name is None else own[eps_name]
                if (
                    type(x) in _PLAIN
                    and type(weight) in _PLAIN
                    and (dtype := x.dtype) is weight.dtype
                    and dtype in (uncopied if is_grad_enabled() else plain)
                    and type(width := (sizes := x.shape)[-1]) is int  # a tensor while torch.jit traces
                    and len(shape_of_weight := weight.shape) == 1
                    and shape_of_weight[0] == width
                    and len(sizes) in dims
                    and (_has_usual_strides(sizes, x.stride()) if 1 in sizes else x.is_contiguous())
                    and (eps_name is None or (type(eps) is float and eps == eps))
                    and not (autocasts and x.is_cuda)
                    and isinstance(self, Patched)  # a hook may hold the forward of a module that has been unpatched
                    and holds(self)
                ):
                    # Answers NotImplemented for transforms and modes.
                    y = _C.rms_norm(x, width, weight, eps, offset, mode, None)
                    if y is not NotImplemented:
                        return y
            except (AttributeError, KeyError, ValueError, IndexError):
                pass
        tensors = _in_order(names, args, named) if named else args
        first: Any = None
        second: Any = None
        gate: Any = None
        order: tuple[int, ...] | None = None
        eps = fixed_eps
        try:
            if is_gated:
                x, gate = tensors
            else:
                (x,) = tensors
            if first_name is not None:
                first = _parameter(self, first_name)
            if second_name is not None:
                second = _parameter(self, second_name)
            if eps_name is not None:
                eps = getattr(self, eps_name)
            is_known = (
                isinstance(self, Patched)
                and all(
                    each is None or type(each) in _PLAIN or _is_served(type(each)) for each in (first, second, gate)
                )
                and (type(x) in _PLAIN or _is_served(type(x)))
                and not is_tracing()
            )
            if is_known:  # attributes of other tensor classes may raise, and a trace would record their use
                dtypes = (x.dtype, None if first is None else first.dtype, None if gate is None else gate.dtype)
                is_known = (
                    dtypes in taken
                    and x.dim() in dims
                    and (
                        first is None
                        or _are_equal(x.shape[-parameter_dims:] if dim is None else (x.shape[dim], *ones), first.shape)
                    )
                    and (second is None or (second.dtype, second.shape) == (first.dtype, first.shape))
                    and (
                        shape is None
                        or _are_equal(x.shape[-len(shape) :] if dim is None else x.shape[dim : dim + 1], shape)
                    )
                    and (gate is None or _are_equal(gate.shape, x.shape))
                    and (eps_name is None or (type(eps) is float and eps == eps))
                    and not (is_exporting() and _is_in_onnx_export())
                    and holds(self)
                    and not (autocasts and x.is_cuda and torch.is_autocast_enabled("cuda"))
                )
            if is_known and dim is not None:
                # Results of other inputs would have other strides.
                is_known = _is_canonical(x) or (_is_canonical(x.movedim(dim, -1)) and not _has_ones(x))
            elif is_known and not (_is_canonical(x) and (gate is None or _is_canonical(gate))):
                order = _order_of(x, max(parameter_dims, normalized_dims))
                if form.order == "unknown":
                    is_known = order is None and (gate is None or _order_of(gate, normalized_dims) is None)
                is_known = is_known and order != ()
                # Views and torch's operator give dimensions of size 1, and empty tensors, other strides.
                is_dense = norm.group_size is None and form.order == "kept"
                is_known = is_known and (order is None or is_dense or not _has_ones(x))
        except (AttributeError, KeyError, ValueError):  # something is missing that was there when it was patched
            is_known = False
        if not is_known:
            return _own_forward(self, cls)(*args, **named)
        if is_grad_enabled() and not is_compiling():
            requires = (x.requires_grad, first is not None and first.requires_grad, is_gated and gate.requires_grad)
            if (which := copies.get((dtypes, requires))) is not None:
                x, first, gate = (
                    each.clone() if copied else each for each, copied in zip((x, first, gate), which, strict=True)
                )
        weight, bias = (first, second) if has_weight else (None, first)
        if order is None or form.order != "kept":
            return compute(x, gate, weight, bias, eps)
        y = compute(x.permute(order), gate, weight, bias, eps)
        return writable(y.permute([order.index(dim) for dim in range(len(order))]))

    return forward


def _is_true(condition: Any) -> bool:
    """Returns whether a condition holds; False if it depends on data that a compiler does not have."""
    # Dynamo has imported this module, which imports sympy.
    is_compiling = torch.compiler.is_compiling()
    return bool(torch.fx.experimental.symbolic_shapes.guard_or_false(condition) if is_compiling else condition)


def _are_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(_is_true(m == n) for m, n in zip(a, b, strict=True))


def _has_usual_strides(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    if len(sizes) == 2 and sizes[1]:  # these take less time than the loop
        return strides == (sizes[1], 1)
    if len(sizes) == 3 and sizes[1] and sizes[2]:
        return strides == (sizes[1] * sizes[2], sizes[2], 1)
    step = 1
    for i in range(len(sizes) - 1, -1, -1):
        if strides[i] != step:
            return False
        step *= sizes[i] or 1
    return True


def _is_canonical(tensor: Tensor, ignores_ones: bool = False) -> bool:
    """Returns whether a tensor has the strides of a new one; ``is_contiguous`` ignores dimensions of size 1."""
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and not ignores_ones:
        return _has_usual_strides(tensor.shape, tensor.stride())
    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not (_is_true(stride == step) or (ignores_ones and _is_true(size == 1))):
            return False
        step = step * (torch.sym_max(size, 1) if is_compiling else size or 1)
    return True


def _has_ones(tensor: Tensor) -> bool:
    return not all(_is_true(size > 1) for size in tensor.shape)


def _in_order(names: tuple[str, ...], args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of a forward in order if all of them are given, else an empty tuple."""
    rest = names[len(args) :]
    has_all = len(rest) == len(named) and all(name in named for name in rest)
    return (*args, *[named[name] for name in rest]) if has_all else ()


def _parameter(module: nn.Module, name: str) -> Any:
    """Returns a parameter as the module's own forward finds it; nn.Module.__getattr__ alone takes 1.5 times as long."""
    own = module.__dict__
    parameter = own[name] if name in own else own["_parameters"].get(name)
    return getattr(module, name) if parameter is None else parameter  # None: a parametrization may have it


def _own_forward(module: Any, cls: type[nn.Module]) -> Any:
    """Returns the forward that a class has now, bound as Python would bind it."""
    if torch.compiler.is_compiling():  # Dynamo does not support descriptors
        return partial(cls.forward, module)
    forward = next(vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base))
    return forward.__get__(module, type(module)) if hasattr(type(forward), "__get__") else forward


def _order_of(tensor: Tensor, last_dims: int) -> tuple[int, ...] | None:
    """Returns the dimensions in their order in memory, or None if that is the order of the dimensions.

    Returns an empty tuple if the strides of the module's own result are unknown. Rows in another order must not have
    gaps, elements must not overlap, and the dimensions of a row must be the last ones. A dimension of size 1 must not
    have an unusual stride in a tensor that is contiguous otherwise.
    """
    strides = tensor.stride()
    if any(_is_true(stride == 0) for stride in strides):
        return ()
    if all(_is_true(a >= b) for a, b in pairwise(strides)):
        is_contiguous = _is_canonical(tensor, ignores_ones=True)
        return None if _is_canonical(tensor) or not is_contiguous else ()
    order: list[int] = []
    for dim in range(tensor.dim()):  # not sorted(): Dynamo cannot sort symbolic sizes
        place = len(order)
        while place > 0 and _is_true(strides[order[place - 1]] < strides[dim]):
            place -= 1
        order.insert(place, dim)
    is_kept = order[-last_dims:] == [*range(tensor.dim() - last_dims, tensor.dim())]
    return tuple(order) if is_kept and _is_canonical(tensor.permute(order)) else ()


_PLAIN = (Tensor, nn.Parameter)


def _is_served(cls: type[Tensor]) -> bool:
    """Returns whether the operators support a tensor class; others may support only torch's operators."""
    return has_rules(cls)


def _is_in_onnx_export() -> bool:
    """Returns whether torch.onnx exports, which supports the modules' own forwards but not our operators."""
    return torch.onnx.is_in_onnx_export()


# Same as torch.compiler.assume_constant_result, which imports torch._dynamo. Dynamo would evaluate the second to False.
_is_served._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]
