"""Tests normops modules that register with optional parts of torch once these are imported."""

import pytest
from other_process import printed


def test_importing_normops_imports_no_optional_modules() -> None:
    """normops registers when they are imported, and torch.distributed stays a module that cloudpickle accepts."""
    printed(
        "import pickle, sys, torch\n"
        "before = set(sys.modules)\n"
        "import normops\n"
        "theirs = {'torch.distributed.tensor', 'torch.nested._internal.ops'}\n"
        "ours = {'normops.sharding', 'normops.nested'}\n"
        "compiler = {'torch._dynamo', 'torch._inductor'}\n"
        "found = (theirs | ours | compiler) & (set(sys.modules) - before)\n"
        "assert not found, found\n"
        "assert pickle.loads(pickle.dumps(torch.distributed)) is torch.distributed"
    )


CHECKS = """
from torch.distributed.tensor import DTensor
import torch.nested._internal.ops
import torch

assert torch.ops.normops.rms_norm.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
assert normops.rms_norm(nested, 8).is_nested
"""

# Finder that comes first in sys.meta_path and loads these torch modules with its own loader.
FINDER = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location


class Loader(SourceFileLoader):
    pass


class Finder:
    def find_spec(name, path, target=None):
        if name not in ("torch.distributed.tensor", "torch.nested._internal.ops"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader, folders = Loader(name, spec.origin), spec.submodule_search_locations
        return spec_from_file_location(name, spec.origin, loader=loader, submodule_search_locations=folders)


"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch.distributed.tensor, torch.nested._internal.ops, normops",
        # find_spec does not import the module.
        "import normops, threading, importlib.util; importlib.util.find_spec('torch.distributed.tensor')\n"
        "thread = threading.Thread(target=importlib.import_module, args=['torch.distributed.tensor'])\n"
        "thread.start(); thread.join()",
        FINDER + "import normops; sys.meta_path.insert(0, Finder)",
        # The first finder still loads the module.
        FINDER + "sys.meta_path.insert(0, Finder); import normops\n"
        "import torch.distributed.tensor; assert type(torch.distributed.tensor.__spec__.loader) is Loader",
    ],
    ids=["before", "later, in a thread", "another finder", "another finder from the start"],
)
@pytest.mark.full
def test_rules_are_registered_in_any_import_order(imports: str) -> None:
    printed(f"{imports}\n{CHECKS}")


def test_import_works_without_dtensor() -> None:
    printed(
        "import sys, torch\n"
        "class Missing:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name.startswith('torch.distributed.tensor'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing)\n"
        "import normops\n"
        "assert normops.rms_norm(torch.ones(2, 8), 8).shape == (2, 8)"
    )


def test_failed_registration_warns() -> None:
    """The import of DTensor itself still succeeds."""
    printed(
        "import sys, warnings, torch, normops\n"
        "sys.modules['normops.sharding'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import torch.distributed.tensor\n"
        "(text,) = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]\n"
        "assert text.startswith('normops works without DTensor, which torch 2.')"
    )
