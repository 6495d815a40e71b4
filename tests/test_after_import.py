"""Modules of ours that register with parts of torch, if and when these are imported."""

import pytest
from other_process import printed


def test_importing_normops_does_not_import_them() -> None:
    """It waits for them, and leaves the package a module that cloudpickle takes."""
    printed(
        "import pickle, sys, torch\n"
        "before = set(sys.modules)\n"
        "import normops\n"
        "theirs = {'torch.distributed.tensor', 'torch.utils.flop_counter', 'torch.nested._internal.ops'}\n"
        "ours = {'normops.sharding', 'normops.flops', 'normops.nested'}\n"
        "compiler = {'torch._dynamo', 'torch._inductor'}\n"
        "found = (theirs | ours | compiler) & (set(sys.modules) - before)\n"
        "assert not found, found\n"
        "assert pickle.loads(pickle.dumps(torch.distributed)) is torch.distributed"
    )


CHECKS = """
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry
import torch.nested._internal.ops
import torch

assert torch.ops.normops.rms_norm.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert torch.ops.normops.rms_norm in flop_registry
nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
assert normops.rms_norm(nested, 8).is_nested
"""

# Finds what they register with, as its own, and is asked first.
FINDER = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location


class Loader(SourceFileLoader):
    pass


class Finder:
    def find_spec(name, path, target=None):
        if name not in ("torch.distributed.tensor", "torch.utils.flop_counter", "torch.nested._internal.ops"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        loader, folders = Loader(name, spec.origin), spec.submodule_search_locations
        return spec_from_file_location(name, spec.origin, loader=loader, submodule_search_locations=folders)


"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch.distributed.tensor, torch.utils.flop_counter, torch.nested._internal.ops, normops",
        # To ask whether there is such a module is not to import it.
        "import normops, threading, importlib.util; importlib.util.find_spec('torch.distributed.tensor')\n"
        "thread = threading.Thread(target=importlib.import_module, args=['torch.distributed.tensor'])\n"
        "thread.start(); thread.join()",
        FINDER + "import normops; sys.meta_path.insert(0, Finder)",
        # Which finds it then, too.
        FINDER + "sys.meta_path.insert(0, Finder); import normops\n"
        "import torch.distributed.tensor; assert type(torch.distributed.tensor.__spec__.loader) is Loader",
    ],
    ids=["before", "later, in a thread", "found by others", "found by others from before"],
)
@pytest.mark.full
def test_rules_are_there_whatever_is_imported_first(imports: str) -> None:
    printed(f"{imports}\n{CHECKS}")


def test_a_torch_without_dtensor() -> None:
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


def test_an_import_that_fails_is_a_warning() -> None:
    """Who imports DTensor for other reasons is not kept from it."""
    printed(
        "import sys, warnings, torch, normops\n"
        "sys.modules['normops.sharding'] = None\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import torch.distributed.tensor\n"
        "(text,) = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]\n"
        "assert text.startswith('normops works without DTensor, which torch 2.')"
    )
