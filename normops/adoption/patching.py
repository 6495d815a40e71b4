"""Makes the RMSNorm modules of an existing model run normops, in place."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normops.adoption.guards import Guard, holding
from normops.adoption.installation import has_foreign_forward, install, is_covered, own_class, uninstall, view_of
from normops.adoption.norm import By, ModelRounding, Norm, Unfit, check_by, check_rounding
from normops.adoption.originals import INTERNAL
from normops.adoption.patched_class import Patched
from normops.adoption.recognition import check_class, find_norm, is_called_norm
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


def patch(
    model: nn.Module, *, rounding: ModelRounding = "once", by: By = "source", strict: bool = False
) -> PatchReport:
    """Makes every RMSNorm in a model run normops, in place.

    ``patch`` knows the source of the norms of torch, transformers, diffusers, timm and torchtune, and of spellings that
    many repositories share. It compares statements, not names: a copy of a class is recognised, too. With
    ``by="measurement"`` it also takes a norm of unknown source if it computes an RMSNorm on about 200 trial inputs. All
    other modules are unchanged.

    A patched module gets a subclass of its class with the same name. ``isinstance`` still holds for its class, but
    ``type(module) is ...`` does not. Parameters, attributes, ``state_dict`` and hooks are unchanged. ``patch`` works
    before and after ``torch.compile``, ``torch.export``, DDP and FSDP2. A pickled module is patched again when it is
    loaded, if normops is installed.

    Each call reads ``eps``, weight and bias. It compares the forward of the class and its helpers, flags of the module,
    and constants and functions of the file with their values at the time of ``patch``. If one has changed, the module's
    own forward runs. After any other change, call ``patch`` again. The own forward also runs for

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
        by: ``"source"`` takes norms of known source. ``"measurement"`` also takes norms of unknown source that compute
            an RMSNorm on trial inputs: it runs their forward on the CPU, with copies of their attributes. Trials do not
            find a norm that computes something else in rare cases.
        strict: True raises an error, and changes nothing, if a norm would be skipped. torch's own norms of other kinds,
            such as LayerNorm, do not count.

    Returns:
        A report, which prints as a table. Its attributes map names of modules to their class and, in ``patched``, the
        recognised norm, in ``skipped``, the reason. ``others`` are torch's own norms of other kinds, and ``already``
        the modules that ran normops before.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if ``rounding`` or ``by`` has another value.
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
    check_by(by)
    found: dict[str, tuple[nn.Module, Norm]] = {}
    skipped, others, already = {}, {}, {}
    all_found = _Found(by)
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
                if is_called_norm(module, name):
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


NO_ORDER = 'rounds in an order that rounding="original" does not support; patch(model, rounding="once") takes it'


def has_order(norm: Norm, rounding: ModelRounding) -> bool:
    """Returns whether normops can round in the requested order."""
    return rounding == "once" or norm.form.rounds != "otherwise"


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


def is_patched(module: nn.Module) -> bool:
    """Returns whether a module is a norm that :func:`patch` has changed. Its repr ends with ``(normops)``, too.

    Args:
        module: any module; a model is not patched itself, but its norms may be.

    Example:
        >>> import torch, normops
        >>> norm = torch.nn.RMSNorm(8)
        >>> report = normops.patch(norm)
        >>> normops.is_patched(norm), norm
        (True, RMSNorm((8,), eps=None, elementwise_affine=True) (normops))
    """
    return isinstance(module, Patched)


def recognised(module: nn.Module, rounding: ModelRounding, by: By) -> Norm | Unfit:
    """Returns the norm of an unpickled module, or why it cannot be patched; examines each class once per process."""
    try:
        norm = _loaded[by].norm_of(module)
    except Exception as error:  # as in patch
        return Unfit(_cannot_be_examined(error))
    return norm if isinstance(norm, Unfit) or has_order(norm, rounding) else Unfit(*NO_ORDER.split("; "))


class _Found:
    """Remembers the norms of modules, so that equal ones are examined only once."""

    def __init__(self, by: By, most_norms: int | None = None) -> None:
        """Remembers at most ``most_norms``, as a program may define classes repeatedly; None is for one call of patch.

        With a limit, reasons are not remembered, because they may no longer apply the next time.
        """
        self._by = by
        self._most_norms = most_norms
        self._norms = 0
        self._known: dict[Any, list[tuple[Callable[[nn.Module], bool], Norm | Unfit]]] = {}

    def norm_of(self, module: nn.Module) -> Norm | Unfit:
        """Returns the norm that a module is, or why it is none."""
        try:
            check_class(cls := own_class(module))
            if has_foreign_forward(module):
                return Unfit("was given another forward than its class's", "undo that, or patch before it")
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
                norm = find_norm(module, self._by)
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


_loaded: dict[By, _Found] = {"source": _Found("source", 256), "measurement": _Found("measurement", 256)}


def _is_of_torch(module: nn.Module) -> bool:
    """Returns whether a module's class is torch's, and not one that torch created to parametrize another module."""
    return type(module).__module__.startswith("torch.nn.") and not is_parametrized(module)


def _alike(modules: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    alike = defaultdict(list)
    for name, text in modules.items():
        alike[re.sub(r"\b\d+\b", "*", name), text].append(name or "(the model)")
    return alike
