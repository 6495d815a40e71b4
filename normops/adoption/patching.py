"""Makes the RMSNorm modules of an existing model run normops, in place."""

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
    """The result of :func:`patch`. Prints as a table."""

    patched: Mapping[str, str] = field(default_factory=dict)
    """The modules that now run normops. Maps a module's name to its class and the recognised norm."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """The norms that are unchanged. Maps a module's name to its class and the reason."""
    others: Mapping[str, str] = field(default_factory=dict)
    """torch's own norms of other kinds, such as LayerNorm. Maps a module's name to its class."""
    already: Mapping[str, str] = field(default_factory=dict)
    """The modules that ran normops before. Maps a module's name to its class."""

    def __str__(self) -> str:
        """Returns a table in which modules whose names differ only in numbers, such as those of layers, share a row."""
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
    """Makes every RMSNorm in a model run normops, in place.

    ``patch`` recognises a norm by its own forward, not by its class. It evaluates the source of the forward step by
    step, and checks every operation that the forward calls and every value that it reads. It supports norms of torch,
    transformers, diffusers and your own code. They may have a weight, a bias, ``1 + weight`` as in Gemma, groups, or a
    gate as in Mamba 2 and Qwen3-Next, and may normalize channels. A module is unchanged if it computes anything else,
    if it cannot be followed, or if it has no source.

    A patched module gets a subclass of its class with the same name. ``isinstance`` still holds for its class, but
    ``type(module) is ...`` does not. Parameters, attributes, ``state_dict`` and hooks are unchanged. ``patch`` works
    before and after ``torch.compile``, ``torch.export``, DDP and FSDP2. A pickled module is patched again when it is
    loaded, if normops is installed.

    Each call reads ``eps``, weight and bias. It also compares the other attributes, methods, functions and globals that
    the forward read with their values at the time of ``patch`` (docs/adoption.md lists them). If one has changed, the
    module's own forward runs. It also runs in all cases that were not verified:

    * dtypes other than float16, bfloat16, float32 and float64, and more than five dimensions;
    * a weight of another shape, or a bias of another shape or dtype than the weight;
    * a gate of another shape than the input, or None;
    * ``torch.jit.trace`` and ``torch.onnx.export``;
    * tensor classes that support only torch's own operators.

    The output has the dtype and the strides of the module's own output. If the module saves a float32 copy of a 16-bit
    input for its backward, normops saves a copy, too: a program may then overwrite the input.

    Args:
        model: any module, or a single norm; on any device, including meta; sharded or not.
        rounding: how 16-bit results are rounded. ``"once"`` rounds the exact result, which is closer to the model in
            float32 than the model's own result. ``"original"`` rounds in the model's order. Llama, for example, rounds
            the normalized input, then its product with the weight. All but a few results in ten thousand then have the
            model's bits. A norm whose order normops does not support is skipped. Gradients have the model's bits, with
            one exception. If a norm casts its input twice, as T5's does, autograd rounds the gradient of each cast and
            their sum; normops rounds once.
        strict: True raises an error, and changes nothing, if a norm would be skipped. torch's own norms of other kinds,
            such as LayerNorm, do not count.

    Returns:
        A report of the patched modules, and of the skipped ones with the reasons. Print it.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if ``rounding`` is neither ``"once"`` nor ``"original"``.
        RuntimeError: with ``strict``, if a norm would be skipped. The message contains the report.

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


NO_ORDER = 'rounds in an order that rounding="original" does not support'


def has_order(norm: Norm, rounding: ModelRounding) -> bool:
    """Returns whether normops can round in the requested order."""
    return rounding == "once" or norm.rounds != "otherwise"


def _cannot_be_examined(error: Exception) -> str:
    return f"cannot be examined: {type(error).__name__}: {str(error)[:80]}"


def unpatch(model: nn.Module) -> int:
    """Undoes :func:`patch`: restores the own class of every module.

    Args:
        model: any module, or a single norm.

    Returns:
        The number of modules that were patched.

    Example:
        >>> import torch, normops
        >>> model = torch.nn.Sequential(torch.nn.RMSNorm(8))
        >>> report = normops.patch(model)
        >>> normops.unpatch(model)
        1
    """
    return sum(uninstall(module) for module in model.modules())


def recognised(module: nn.Module, rounding: ModelRounding) -> Norm | Unfit:
    """Returns the norm of an unpickled module, or why it cannot be patched; examines each class once per process."""
    try:
        norm = _loaded.norm_of(module)
    except Exception as error:  # as in patch
        return Unfit(_cannot_be_examined(error))
    return norm if isinstance(norm, Unfit) or has_order(norm, rounding) else Unfit(NO_ORDER)


class _Found:
    """Remembers the norms of modules, so that equal ones are examined only once."""

    def __init__(self, most_norms: int | None = None) -> None:
        """Remembers at most ``most_norms``, as a program may define classes repeatedly; None is for one call of patch.

        With a limit, reasons are not remembered, because they may no longer apply the next time.
        """
        self._most_norms = most_norms
        self._norms = 0
        self._known: dict[Any, list[tuple[Callable[[nn.Module], bool], Norm | Unfit]]] = {}

    def norm_of(self, module: nn.Module) -> Norm | Unfit:
        """Returns the norm that a module is, or why it is none."""
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
    """Returns whether a module's class is torch's, and not one that torch created to parametrize another module."""
    return type(module).__module__.startswith("torch.nn.") and not is_parametrized(module)


def _is_called_norm(name: str, module: nn.Module) -> bool:
    """Returns whether a module's name, its class's name, or the functions that its code calls suggest a norm.

    Containers are not norms, although their children may be.
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
