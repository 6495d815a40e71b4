"""Prints the rows that the table of known norms lacks.

``python -m normops.adoption.fingerprints transformers diffusers`` creates an instance of each norm class of these
packages, for each combination of its options, and measures those whose source is unknown. It prints nothing if the
table is complete. A new form needs a name.
"""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from normops.adoption.guards import Absent, is_plain
from normops.adoption.norm import Form, Norm, Unfit
from normops.adoption.originals import LARGEST, whole_shape
from normops.adoption.recognition import arguments_of, by_measurement, by_source, check_class
from normops.adoption.table import FORMS, LETTERS, TREES
from normops.adoption.trees import NoFingerprint, fingerprint_of

SIZE = 64
"""The size of a row; a multiple of every size and number of groups below."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "activation": ("silu", "sigmoid"),
    "group_size": (16, SIZE),
    "n_groups": (4, 1),
    "num_groups": (4, 1),
}
"""The values of arguments by name. Without an entry, booleans have both values, and a missing default is SIZE."""

MOST_INSTANCES = 64
CALLS = {"rsqrt", "sqrt", "rms_norm", "normalize", "linalg_vector_norm"}
_DEFINES = re.compile(r"^class \w*norm\w*\(", re.IGNORECASE | re.MULTILINE)


def norms_of(package: str) -> Iterator[nn.Module]:
    """Yields instances of the classes of a package that may be RMSNorms."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"package: expected an installed package, but {package!r} is not installed")
    root = Path(spec.submodule_search_locations[0])
    for file in sorted(root.rglob("*.py")):
        if file.name.startswith("modular_") or not _DEFINES.search(file.read_text(encoding="utf8")):
            continue
        parts = file.relative_to(root.parent).with_suffix("").parts
        try:
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        except Exception:  # optional dependencies of one file
            continue
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == module.__name__ and _may_be_norm(value):
                yield from instances_of(value)


def _may_be_norm(cls: type) -> TypeGuard[type[nn.Module]]:
    if not issubclass(cls, nn.Module) or "norm" in cls.__name__.lower():
        return issubclass(cls, nn.Module)
    functions = [f for base in cls.__mro__ if base not in nn.Module.__mro__ for f in vars(base).values()]
    names = {name for f in functions if inspect.isfunction(f) for name in f.__code__.co_names}
    return not CALLS.isdisjoint(names)


def instances_of(cls: type[nn.Module]) -> Iterator[nn.Module]:
    """Yields modules of a class without submodules, for each combination of its options."""
    values = []
    for name, parameter in islice(inspect.signature(cls.__init__).parameters.items(), 1, None):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        has_flag = isinstance(default, bool) or parameter.annotation in (bool, "bool")
        required: tuple[Any, ...] = (1e-6 if "eps" in name else SIZE,) if default is parameter.empty else (default,)
        values.append([(name, value) for value in OPTIONS.get(name, (True, False) if has_flag else required)])
    for arguments in islice(product(*values), MOST_INSTANCES):
        try:
            with torch.device("meta"):
                module = cls(**dict(arguments))
            if next(module.children(), None) is None and all(p.numel() <= LARGEST for p in module.parameters()):
                yield cls(**dict(arguments))
        except Exception:  # needs a configuration
            return


def row_of(module: nn.Module, norm: Norm) -> tuple[str, str]:
    """Returns the fingerprint of a measured norm, and the roles of the attributes that its forward reads.

    Raises:
        NoFingerprint: if it has no source.
    """
    fingerprint = fingerprint_of(module)
    return fingerprint.hash, " ".join(_role(module, norm, name) for name in fingerprint.attributes)


def _role(module: nn.Module, norm: Norm, name: str) -> str:
    value = getattr(module, name, Absent)
    if value is Absent:
        return "absent"
    shape = next((tuple(whole_shape(p)) for p in module.parameters(recurse=False)), None)
    size = SIZE if shape is None else shape[0 if norm.form.dim is not None else -1]
    for role, attribute in (("weight", norm.weight), ("bias", norm.bias), ("eps", norm.eps)):
        if name == attribute:
            return role
    if isinstance(value, tuple) and tuple(value) == (shape or (SIZE,)):
        return "shape"
    if (
        type(value) is float
        and norm.form.eps == "normalize"
        and math.isclose(value, math.sqrt(math.prod(shape or (1,))))
    ):
        return "scale"
    if type(value) is int and "group" in name:
        return "group_size" if value == (norm.group_size or size) and "size" in name else "groups"
    if type(value) is int and value == size:
        return "size"
    if not is_plain(value):
        raise NoFingerprint(f"reads {name}, a {type(value).__name__}")
    return f"={value!r}"


def missing_rows(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, str, Norm]]:
    """Yields the modules whose source is unknown, with their fingerprint, the roles and the measured norm."""
    for module in modules:
        try:
            check_class(type(module))
            arguments_of(module)
            if by_source(module) is None:
                norm, _ = by_measurement(module)
                yield module, *row_of(module, norm), norm
        except (Unfit, NoFingerprint):
            continue


def text_of(form: Form) -> str:
    """Returns the call that creates a form in the table."""
    letters = {dtype: letter for letter, dtype in LETTERS.items()}
    patterns: dict[tuple[str, int], set[str]] = {}
    for saved in form.saves:
        pair = letters[saved.dtype] + letters[saved.weight_dtype]
        flags = "".join(str(int(flag)) for flag in saved.requires_grad)
        patterns.setdefault((pair, saved.tensor), set()).add(flags)
    groups: dict[tuple[str, int], list[str]] = {}
    for (pair, tensor), flags_of_pair in sorted(patterns.items()):
        groups.setdefault((",".join(sorted(flags_of_pair)), tensor), []).append(pair)
    saves = "; ".join(f"{','.join(pairs)} {flags} {tensor}" for (flags, tensor), pairs in groups.items())
    excludes = " ".join(sorted("".join(letters.get(d, "-") if d else "-" for d in each) for each in form.excludes))
    options = {
        "excludes": (excludes, ""),
        "offset": (form.weight_offset, 0.0),
        "eps": (form.eps, None),
        "dim": (form.dim, None),
        "gate": (None if form.gating is None else tuple(form.gating), None),
        "order": (form.order, "kept"),
        "autocasts": (form.autocasts, False),
        "dims": (form.dims, None),
    }
    others = "".join(f", {name}={value!r}" for name, (value, default) in options.items() if value != default)
    return f"_form({form.output_dtype!r}, {form.rounds!r}, {saves!r}{others})"


def main(packages: list[str]) -> int:
    """Prints the missing rows; returns their number."""
    count = 0
    for package in packages:
        for module, digest, roles, norm in missing_rows(norms_of(package)):
            cls = type(module)
            name = next((name for name, form in FORMS.items() if form == norm.form), None)
            if name is None:
                name = f"{cls.__name__} {len(FORMS)}"
                FORMS[name] = norm.form
                print(f"FORMS[{name!r}] = {text_of(norm.form)}")
            TREES.setdefault(digest, {})[roles] = name
            if by_source(module) is None:
                raise AssertionError(f"{cls.__name__}: the new row {roles!r} does not describe it")
            count += 1
            print(f"TREES[{digest!r}][{roles!r}] = {name!r}  # {package}: {cls.__name__}")
    return count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
