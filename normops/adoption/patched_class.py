"""The class that :func:`normops.patch` gives a module: a subclass of the module's own, whose forward runs normops."""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from normops import _C
from normops._operators import has_rules
from normops.adoption.computing import copies_of, function_of, mode_of, writable
from normops.adoption.following import PROPERTIES
from normops.adoption.guards import holding
from normops.adoption.norm import Norm
from normops.functional import is_tracing
from normops.inductor import ModelRounding
from normops.inductor.calls import METHODS


class Made(NamedTuple):
    """The key of a patched class: modules with the same key share one."""

    cls: type[nn.Module]
    norm: Norm
    rounding: ModelRounding


class Patched:
    """The base of patched classes, after the module's own class, which determines the memory layout."""

    normops_made: ClassVar[Made]


# Weak references: a patched class refers to the module's own class, which a program may define repeatedly.
_classes: WeakValueDictionary[Made, type[nn.Module]] = WeakValueDictionary()


def class_of(made: Made) -> type[nn.Module]:
    """Returns the class for this key, which all modules with the key share."""
    ours = _classes.get(made)
    if ours is None:
        cls: Any = made.cls
        names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        ours = type(cls)(cls.__name__, (cls, Patched), {**names, "normops_made": made})
        ours.forward, ours.__reduce_ex__ = _forward_of(made), _reduce_of(cls)
        ours = _classes.setdefault(made, ours)  # another thread may have added one
    return ours


def _reduce_of(cls: Any) -> Callable[[Any, Any], Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807
        from normops.adoption.installation import reduced

        return reduced(self, protocol, cls.__reduce_ex__)

    return __reduce_ex__


def _forward_of(made: Made) -> Callable[..., Any]:
    """Returns the forward of a patched class, which runs normops in the verified cases."""
    cls, norm, rounding = made
    own_forward: Any = cls.forward
    compute, copies = function_of(norm, rounding), copies_of(norm)
    holds = holding(norm.guards, cls)
    names, is_gated = norm.arguments, norm.gate is not None
    # The bias is the first parameter of a norm without a weight.
    first_name, second_name = (norm.weight, norm.bias) if norm.weight is not None else (norm.bias, None)
    has_weight = norm.weight is not None
    eps_name, fixed_eps = (norm.eps, None) if isinstance(norm.eps, str) else (None, norm.eps)
    parameter_dims, normalized_dims, shape = norm.parameter_dims, norm.normalized_dims, norm.shape
    order_of_result = norm.order
    # A set: Dynamo converts numbers in tuples to symbols.
    dims, taken, takes_empty, autocasts = frozenset(norm.dims), norm.dtypes, norm.takes_empty, norm.autocasts
    if norm.bias is not None and rounding == "original":
        # The rounding of the product before the bias is known only for equal dtypes.
        taken = frozenset(dtypes for dtypes in taken if dtypes[0] == dtypes[1])
    is_compiling, is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
    is_grad_enabled = torch.is_grad_enabled

    offset, mode = norm.weight_offset, mode_of(norm, rounding)
    dim, ones = norm.dim, (1,) * (parameter_dims - 1)
    is_one_call = not is_gated and norm.group_size is None and normalized_dims == 1 and dim is None
    is_one_call &= has_weight or first_name is None

    @wraps(own_forward, updated=())
    def forward(self: Any, *args: Any, **named: Any) -> Any:
        tensors = _in_order(names, args, named) if named else args
        first: Any = None
        second: Any = None
        gate: Any = None
        order = width = None
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
                isinstance(self, Patched)  # a hook may hold the forward of a module that has been unpatched
                and (type(x) in _PLAIN or _is_served(type(x)))
                and (first is None or type(first) in _PLAIN or _is_served(type(first)))
                and (second is None or type(second) in _PLAIN or _is_served(type(second)))
                and (gate is None or type(gate) in _PLAIN or _is_served(type(gate)))
                and not is_tracing()
            )
            if is_known:  # attributes of other tensor classes may raise, and a trace would record their use
                dtypes = (x.dtype, None if first is None else first.dtype, None if gate is None else gate.dtype)
                is_known = (
                    dtypes in taken
                    and x.dim() in dims
                    and (
                        first is None
                        or (
                            (first.dim() == 1 and first.numel() == (width := x.shape[-1]))
                            if parameter_dims == 1 and dim is None  # a slice of a shape takes longer
                            else (x.shape[-parameter_dims:] if dim is None else (x.shape[dim], *ones)) == first.shape
                        )
                    )
                    and (second_name is None or (second.dtype, second.shape) == (first.dtype, first.shape))
                    and (shape is None or (x.shape[-len(shape) :] if dim is None else x.shape[dim : dim + 1]) == shape)
                    and (gate is None or gate.shape == x.shape)
                    and (eps_name is None or (type(eps) is float and eps == eps))
                    and (takes_empty or x.numel() > 0)
                    and not (is_exporting() and _is_in_onnx_export())
                    and holds(self)
                    and not (autocasts and x.is_cuda and torch.is_autocast_enabled("cuda"))
                )
            if is_known and dim is not None:
                # Results of other inputs would have other strides.
                is_known = x.is_contiguous() or x.movedim(dim, -1).is_contiguous()
            elif is_known and not (x.is_contiguous() and (gate is None or gate.is_contiguous())):
                order = _order_of(x, max(parameter_dims, normalized_dims))
                if order_of_result == "unknown":
                    is_known = order is None and (gate is None or _order_of(gate, normalized_dims) is None)
                is_known = is_known and order_of_result != "raises" and order != ()
        except (AttributeError, KeyError, ValueError):  # something is missing that was there when it was patched
            is_known = False
        if not is_known:
            return _own_forward(self, cls)(*args, **named)
        is_compiled = is_compiling()
        if is_grad_enabled() and not is_compiled:
            requires = (x.requires_grad, first is not None and first.requires_grad, is_gated and gate.requires_grad)
            if (which := copies.get((dtypes, requires))) is not None:
                x, first, gate = (
                    each.clone() if copied else each for each, copied in zip((x, first, gate), which, strict=True)
                )
        if is_one_call and order is None and (first is None or x.dtype == first.dtype) and not is_compiled:
            # Same as compute, with fewer Python calls.
            y = _C.rms_norm(x, x.shape[-1] if width is None else width, first, eps, offset, mode, second)
            if y is not NotImplemented:
                return y
        weight, bias = (first, second) if has_weight else (None, first)
        if order is None or order_of_result != "kept":
            return compute(x, gate, weight, bias, eps)
        y = compute(x.permute(order), gate, weight, bias, eps)
        return writable(y.permute([order.index(dim) for dim in range(len(order))]))

    return forward


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

    Returns an empty tuple if the strides of the module's own result are unknown. This holds if rows in another order
    have gaps or overlap, or if the dimensions of a row are not the last ones.
    """
    sizes, strides = tensor.shape, tensor.stride()
    dims = [dim for dim in range(tensor.dim()) if sizes[dim] != 1]
    if any(strides[dim] == 0 for dim in dims):
        return ()
    if all(strides[a] >= strides[b] for a, b in pairwise(dims)):
        return None
    order: list[int] = []
    for dim in range(tensor.dim()):  # not sorted(): Dynamo cannot sort symbolic sizes
        place = len(order)
        while place > 0 and strides[order[place - 1]] < strides[dim]:
            place -= 1
        order.insert(place, dim)
    is_kept = order[-last_dims:] == [*range(tensor.dim() - last_dims, tensor.dim())]
    return tuple(order) if is_kept and tensor.permute(order).is_contiguous() else ()


_PLAIN = (Tensor, nn.Parameter)
_SPECIAL = (
    "__getattribute__",
    *(f"__{r}{each}__" for each in ("add", "sub", "mul", "truediv", "pow") for r in ("", "r")),
)


def _is_served(cls: type) -> bool:
    """Returns whether a tensor class other than the plain ones supports the operators, and overrides no methods.

    Other classes may support only torch's operators, and their methods have not been verified.
    """
    if not issubclass(cls, Tensor) or has_rules(cls):
        return issubclass(cls, Tensor)
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    is_plain = function in (nn.Parameter.__torch_function__, vars(Tensor)["__torch_function__"].__func__)
    is_plain &= cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    names = (*METHODS, *PROPERTIES, *_SPECIAL)
    return is_plain and all(getattr(cls, name) is getattr(Tensor, name) for name in names)


def _is_in_onnx_export() -> bool:
    """Returns whether torch.onnx exports, which supports the modules' own forwards but not our operators."""
    return torch.onnx.is_in_onnx_export()


# Same as torch.compiler.assume_constant_result, which imports torch._dynamo. Dynamo would evaluate the second to False.
_is_served._dynamo_marked_constant = True  # type: ignore[attr-defined]
_is_in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]
