"""Putting normops under the norms of a model that somebody else wrote, in place."""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normops.adoption.following import INTERNAL
from normops.adoption.guards import Guard, holding
from normops.adoption.installation import has_foreign_forward, install, is_covered, own_class, uninstall, view_of
from normops.adoption.norm import Norm
from normops.adoption.patched_class import Patched
from normops.adoption.reasons import Unfit
from normops.adoption.recognition import check_class, find_norm
from normops.inductor import ModelRounding, check_rounding
from normops.modules import GatedRMSNorm, RMSNorm


@dataclass(frozen=True)
class PatchReport:
    """What :func:`patch` did. Prints as a table."""

    patched: Mapping[str, str] = field(default_factory=dict)
    """The modules that run normops from now on: by name, the class and what it computes."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """The norms that were left as they are: by name, the class and why."""
    others: Mapping[str, str] = field(default_factory=dict)
    """torch's own norms of another kind, such as LayerNorm: by name, the class."""
    already: Mapping[str, str] = field(default_factory=dict)
    """The modules that ran normops before: by name, the class."""

    def __str__(self) -> str:
        """A table, in which modules whose names differ in numbers alone, as those of layers do, share a row."""
        titles = {
            "patched": self.patched,
            "skipped": self.skipped,
            "not RMSNorms": self.others,
            "ran normops before": self.already,
        }
        counts = [f"{len(modules)} {title}" for title, modules in titles.items() if modules or title == "patched"]
        rows = [
            (f"{title}:", f"{len(names)} x" if len(names) > 1 else "", pattern if len(names) > 1 else names[0], text)
            for title, modules in titles.items()
            for (pattern, text), names in _alike(modules).items()
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [f"{a:{widths[0]}} {b:>{widths[1]}} {c:{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        return "\n".join([f"norms: {', '.join(counts)}", *lines])


def patch(model: nn.Module, *, rounding: ModelRounding = "once", strict: bool = False) -> PatchReport:
    """Lets every RMSNorm in a model run normops, in place, whoever wrote it.

    Whether a module is an RMSNorm is read off its own forward, whose source is evaluated step by step, so that every
    operation that it calls, and every value that it reads, is known: those of torch, transformers, diffusers or your
    own, with or without a weight or a bias, with ``1 + weight`` as in Gemma, in groups, gated as in Mamba 2 and
    Qwen3-Next. A module that does anything besides, cannot be followed, or has no source, is unchanged. A norm gets a
    subclass of its class: ``isinstance`` and the name of the class stay, ``type(module) is ...`` does not. Parameters,
    attributes, ``state_dict`` and hooks stay, under ``torch.compile``, ``torch.export``, DDP and FSDP2, too, before or
    after.

    ``eps``, weight and bias are read at every call. Other attributes, methods, functions and globals that the forward
    was seen to read are compared at every call (docs/adoption-details.md lists them). If one has changed, the module's
    own forward runs, as it does in cases that were not verified: other dtypes than float16, bfloat16, float32 and
    float64, more than five dimensions, a weight of another shape, a bias of another shape or dtype than the weight, a
    gate of another shape than the input's or None, ``torch.jit.trace``, ``torch.onnx.export``, tensors of classes that
    know torch's own operators alone. Dtype and strides of the output are those of the module. Where it saves a copy of
    a 16-bit input for its backward, because it computes in float32, normops saves one, too, so that the input may be
    written afterwards. Pickled, a patched module is one again when it is loaded, where normops is installed.

    Args:
        model: any module; a single norm, too. On any device, meta included, sharded or not.
        rounding: how 16-bit results are rounded. ``"once"``: the exact result, rounded, which is nearer to that of the
            model in float32 than the model's own. ``"original"``: in the model's own order, so that its bits are those
            of the model but for a few in ten thousand (Llama rounds the normalized input, then its product with the
            weight); a norm with an order of its own is skipped. Gradients have the model's bits, too, but for that of
            an input which a norm casts twice, as T5's does: autograd rounds that of each cast, and their sum; normops
            rounds once.
        strict: raise, and change nothing, if a norm would be left as it is. torch's own norms of another kind, such as
            LayerNorm, do not count.

    Returns:
        Which modules were patched, and which not, and why. Print it.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if ``rounding`` is something else.
        RuntimeError: with ``strict``, and the report.

    Example:
        >>> import torch, normops
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
        >>> print(normops.patch(model))
        norms: 1 patched
        patched:  1  RMSNorm: weight, eps: None
        >>> normops.unpatch(model)
        1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, but got {type(model).__name__}")
    check_rounding(rounding)
    found: dict[str, tuple[nn.Module, Norm]] = {}
    skipped, others, already = {}, {}, {}
    all_found = _Found()
    for name, module in model.named_modules():
        title = type(module).__name__
        try:
            runs = isinstance(module, (RMSNorm, GatedRMSNorm)) or is_covered(module)
            if runs or (isinstance(module, Patched) and module.normops_made.rounding == rounding):
                already[name] = title
            elif _is_of_torch(module) and not isinstance(module, nn.RMSNorm):
                if "Norm" in title:
                    others[name] = title
            elif not isinstance(norm := all_found.norm_of(module), Norm):
                if _is_called_norm(name, module):
                    skipped[name] = f"{title}: {norm}"
            elif not has_order(norm, rounding):
                skipped[name] = f"{title}: {NO_ORDER}"
            else:
                found[name] = module, norm
        except Exception as error:  # a class may raise anything when its attributes are read
            skipped[name] = f"{title}: {_cannot_be_examined(error)}"
    if strict and skipped:
        left = PatchReport(skipped=skipped)
        raise RuntimeError(f"expected to patch every norm (strict=True), but cannot, and changed nothing:\n{left}")
    patched = {name: f"{type(module).__name__}: {norm}" for name, (module, norm) in found.items()}
    install([(module, norm, rounding) for module, norm in found.values()])
    return PatchReport(patched, skipped, others, already)


NO_ORDER = 'rounds in an order of its own, which rounding="original" does not have'


def has_order(norm: Norm, rounding: ModelRounding) -> bool:
    """Whether normops can round in the order that is asked for."""
    return rounding == "once" or norm.rounds != "otherwise"


def _cannot_be_examined(error: Exception) -> str:
    return f"cannot be examined: {type(error).__name__}: {str(error)[:80]}"


def unpatch(model: nn.Module) -> int:
    """Undoes :func:`patch`: every module has its own class again.

    Returns:
        How many modules were patched.
    """
    return sum(uninstall(module) for module in model.modules())


def recognised(module: nn.Module, rounding: ModelRounding) -> Norm | Unfit:
    """The norm of a module that is loaded from a pickle, or why it cannot be patched; once for a class and process."""
    try:
        norm = _loaded.norm_of(module)
    except Exception as error:  # as in patch
        return Unfit(_cannot_be_examined(error))
    return norm if isinstance(norm, Unfit) or has_order(norm, rounding) else Unfit(NO_ORDER)


class _Found:
    """What modules compute. Those that are alike are examined only once."""

    def __init__(self, most_norms: int | None = None) -> None:
        """``most_norms``: of what outlives a call of patch, as a program may define classes again and again.

        Then a reason to leave a module alone is not kept either: it may be gone the next time.
        """
        self._most_norms = most_norms
        self._norms = 0
        self._known: dict[Any, list[tuple[Callable[[nn.Module], bool], Norm | Unfit]]] = {}

    def norm_of(self, module: nn.Module) -> Norm | Unfit:
        """The norm that a module is, or why it is none."""
        try:
            check_class(cls := own_class(module))
            if has_foreign_forward(module):
                return Unfit("was given another forward than its class's")
            module = view_of(module, cls)
            parameters = module.named_parameters(recurse=False, remove_duplicate=False)
            key = (
                cls,
                *((name, type(p), p.dtype, getattr(p, "ds_shape", p.shape)) for name, p in parameters),
                *(name for name, _ in (*module.named_buffers(recurse=False), *module.named_children())),
            )
            for is_alike, norm in self._known.get(key, ()):
                if is_alike(module):
                    return norm
            try:
                norm = find_norm(module)
                if self._norms == self._most_norms:
                    self._known.clear()
                    self._norms = 0
                self._known.setdefault(key, []).append((holding(norm.guards, cls), norm))
                self._norms += 1
            except Unfit as reason:
                norm = reason
                if self._most_norms is None:
                    attributes = [Guard(None, *each) for each in vars(module).items() if each[0] not in INTERNAL]
                    self._known.setdefault(key, []).append((holding(attributes, cls), norm))
        except Unfit as reason:
            return reason
        return norm


_loaded = _Found(most_norms=256)


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module is of a class of torch's, and not of one that torch made to parametrize somebody's module."""
    return type(module).__module__.startswith("torch.nn.") and not is_parametrized(module)


def _is_called_norm(name: str, module: nn.Module) -> bool:
    """Whether a module's name or class says that it is a norm, or its code calls what norms call.

    Containers are no norms, though their parts may be.
    """
    names = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    has_parts = next(module.children(), None) is not None and not is_parametrized(module)
    is_container = has_parts and next(module.parameters(recurse=False), None) is None
    functions = [f for base in type(module).__mro__ for f in vars(base).values() if base not in nn.Module.__mro__]
    used = {name for f in functions if inspect.isfunction(f) for name in f.__code__.co_names}
    return not is_container and ("norm" in names or not {"rsqrt", "rms_norm"}.isdisjoint(used))


def _alike(modules: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    alike = defaultdict(list)
    for name, text in modules.items():
        alike[re.sub(r"\b\d+\b", "*", name), text].append(name or "(the model)")
    return alike
