"""Putting normops under the norms of a model that somebody else wrote, in place."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import nn

from normops.modules import GatedRMSNorm, RMSNorm
from normops.patched_forward import ENTRIES, Rounding, give, give_back, given, has_foreign_forward
from normops.recognition import Norm, Unfit, find_norm, whole_shape


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
        """Modules that differ in numbers alone, like layers, share a row."""
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


def patch(model: nn.Module, *, rounding: Rounding = "once", strict: bool = False) -> PatchReport:
    """Lets every RMSNorm in a model run normops, in place, whoever wrote it.

    What is an RMSNorm is found out by running each norm on a few rows, not by its name: those of torch, transformers,
    timm, diffusers or your own, with or without a weight, with ``1 + weight`` as in Gemma, in groups, gated as in
    Mamba 2 and Qwen3-Next. Such a module gets another ``forward``; its class, parameters, ``state_dict`` and hooks stay
    as they were. That holds under ``torch.compile``, ``torch.export``, DDP and FSDP2, before or after. ``eps`` is read
    at every call. An input of another dtype than float16, bfloat16, float32 and float64 goes to the module's own
    forward; so does a gate of such a dtype or of another shape than the input's, and one that is None. Output dtypes
    are those of the module. Pickled, a patched module is one again when it is loaded, where normops is installed.

    Args:
        model: any module; a single norm, too. On any device, meta included, sharded or not.
        rounding: how 16-bit results are rounded. ``"once"``: the exact result, rounded, which is nearer to that of the
            model in float32 than the model's own. ``"original"``: in the model's own order, so that its bits are those
            of the model but for a few in ten thousand (Llama rounds the normalized input, then its product with the
            weight); a norm with an order of its own is skipped.
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
        patched:  1  RMSNorm: weight, eps: eps
        >>> normops.unpatch(model)
        1
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, but got {type(model).__name__}")
    if rounding not in get_args(Rounding):
        raise ValueError(f'rounding: expected "once" or "original", but got {rounding!r}')
    found: dict[str, tuple[nn.Module, Norm]] = {}
    skipped, others, already = {}, {}, {}
    seen: dict[Any, Norm | str] = {}
    for name, module in model.named_modules():
        title = type(module).__name__
        if isinstance(module, (RMSNorm, GatedRMSNorm)) or rounding in (made.rounding for made in given(module)):
            already[name] = title
        elif type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.RMSNorm):
            if "Norm" in title:
                others[name] = title
        else:
            norm = _norm_of(module, rounding, seen)
            if isinstance(norm, Norm):
                found[name] = module, norm
            elif _is_called_norm(name, module):
                skipped[name] = f"{title}: {norm}"
    if strict and skipped:
        left = PatchReport(skipped=skipped)
        raise RuntimeError(f"expected to patch every norm (strict=True), but cannot, and changed nothing:\n{left}")
    patched = {name: f"{type(module).__name__}: {norm}" for name, (module, norm) in found.items()}
    for module, norm in found.values():
        give(module, norm, rounding)
    return PatchReport(patched, skipped, others, already)


def unpatch(model: nn.Module) -> int:
    """Takes back :func:`patch`: every module has the forward again that it had.

    Returns:
        How many modules were patched.
    """
    return sum(give_back(module) for module in model.modules())


def _norm_of(module: nn.Module, rounding: Rounding, seen: dict[Any, Norm | str]) -> Norm | str:
    """What it computes, or why not; modules that are alike run once."""
    if has_foreign_forward(module):
        return "was given another forward than its class's"
    key = _key(module)
    if key not in seen:
        try:
            seen[key] = find_norm(module)
        except Unfit as reason:
            seen[key] = str(reason)
    norm = seen[key]
    if isinstance(norm, Norm) and rounding == "original" and norm.rounds == "otherwise":
        return 'rounds in an order of its own, which rounding="original" does not have'
    return norm


_NOT_SETTINGS = {*vars(nn.Module()), *ENTRIES}


def _key(module: nn.Module) -> Any:
    """Equal for modules that compute the same."""
    values = {name: value for name, value in vars(module).items() if name not in _NOT_SETTINGS}
    settings = [(name, v if isinstance(v, (int, float, str, torch.Size)) else id(v)) for name, v in values.items()]
    sizes = [(name, type(p), whole_shape(p)) for name, p in module.named_parameters(recurse=False)]
    parts = [name for name, _ in (*module.named_buffers(recurse=False), *module.named_children())]
    return type(module), type(module).forward, module.training, *settings, *sizes, *parts


def _is_called_norm(name: str, module: nn.Module) -> bool:
    """Containers are not norms, their parts may be."""
    names = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    is_container = next(module.children(), None) is not None and next(module.parameters(recurse=False), None) is None
    return "norm" in names and not is_container


def _alike(modules: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    alike = defaultdict(list)
    for name, text in modules.items():
        alike[re.sub(r"\b\d+\b", "*", name), text].append(name or "(the model)")
    return alike
