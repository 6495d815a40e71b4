"""Lists the private parts of torch that normops uses, which a new version of torch may change without notice.

tests/project/test_torch_versions.py compares the lists with the sources, and removes each name of :data:`USES` that is
imported once. No operator, function or module needs any of these: a feature imports its parts on first use.
"""

import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch

SEEN_IN = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch that normops was tested with; docs/notes/tested.md says which tests ran with each."""

USES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "normops._operators": (
        ("normops.override_torch in traced graphs",),
        (
            "torch._ops.OpOverload",
            "torch._subclasses.fake_tensor.FakeTensor",
            "torch._subclasses.functional_tensor.FunctionalTensor",
            "_schema",
        ),
    ),
    "normops.sharding": (
        ("DTensor",),
        (
            "torch.distributed._functional_collectives.AsyncCollectiveTensor",
            "torch.distributed.tensor._dtensor_spec.DTensorSpec",
            "torch.distributed.tensor._op_schema.OpSchema",
            "torch.distributed.tensor._op_schema.OpSpec",
            "torch.distributed.tensor._op_schema.OpStrategy",
            "torch.distributed.tensor._op_schema.RuntimeSchemaInfo",
            "torch.distributed.tensor._ops.utils.register_op_strategy",
            "torch.distributed.tensor.placement_types._StridedShard",
            "_prepare_input_fn",
            "_prepare_output_fn",
            "_replicate_module_fn",
        ),
    ),
    "normops.sharded_rows": (("DTensor",), ("torch.distributed.tensor.placement_types._StridedShard",)),
    "normops.nested": (
        ("nested tensors",),
        (
            "torch.nested._internal.nested_tensor.NestedTensor",
            "torch.nested._internal.ops.extract_kwargs",
            "torch.nested._internal.ops.raggedness_matches",
            "torch.nested._internal.ops.register_jagged_func",
            "_ragged_idx",
            "_values",
        ),
    ),
    "normops.recompute_graphs": (
        ("normops.recompute_norms",),
        (
            "torch._inductor.custom_graph_pass.CustomGraphPass",
            "torch._inductor.custom_graph_pass.get_hash_for_files",
        ),
    ),
    "normops.adoption.originals": (("normops.patch",), ("_base", "_buffers", "_parameters", "_version")),
    "normops.adoption.patched_class": (("normops.patch",), ("_dynamo_marked_constant",)),
    "normops.adoption.trees": (("normops.patch",), ("_parameters",)),
    "normops.recompute": (
        ("normops.recompute_norms",),
        (
            "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch._inductor.config",
            "_version",
        ),
    ),
}
"""The features that depend on each module of normops, and the private names that it uses.

Names with a dot are imported. Names without a dot are attributes that the module reads.
"""

UNDOCUMENTED: dict[str, tuple[str, ...]] = {
    "normops/adoption/patched_class.py": ("symbolic_shapes.guard_or_false",),
    "normops/compile_cache.py": ("torch.compiler.config", "__getattr__", "cache_key_tag"),
    "normops/functional.py": ("symbolic_shapes", "guard_or_false"),
    "normops/recompute.py": ("joint_custom_post_pass",),
    "normops/recompute_graphs.py": (
        "symbolic_shapes",
        "statically_known_true",
        'meta["val"]',
        '"recompute"',
        '"ac_graph_id"',
        '"tangents"',
    ),
    "csrc": (
        "ATen/EmptyTensor.h",
        "ATen/FunctionalTensorWrapper.h",
        "ATen/PythonTorchFunctionTLS.h",
        "ATen/core/LegacyTypeDispatch.h",
        "torch/csrc/Exceptions.h",
        "torch/csrc/autograd/engine.h",
        "torch/csrc/autograd/function.h",
        "torch/csrc/autograd/functions/utils.h",
        "torch/csrc/autograd/graph_task.h",
        "torch/csrc/autograd/python_variable.h",
        "torch/csrc/autograd/saved_variable.h",
        "torch/csrc/autograd/variable.h",
        "torch/csrc/dynamo/compiled_autograd.h",
        "torch/csrc/jit/frontend/tracer.h",
        "torch/csrc/jit/python/pybind_utils.h",
        "torch/csrc/utils/pybind.h",
    ),
}
"""The parts without an underscore that torch does not document, as the sources of each file contain them.

The headers of torch/csrc are internal, but for those of its C++ API; those of ATen here are not of operators and
tensors. A change of one fails the build.
"""


def warn_if_newer(torch_version: str) -> None:
    """Warns if torch is newer than all versions of :data:`SEEN_IN`."""
    major, minor = (int(number) for number in torch_version.split(".")[:2])
    last_major, last_minor = (int(number) for number in SEEN_IN[-1].split("."))
    if (major, minor) > (last_major, last_minor):
        features = ", ".join(dict.fromkeys(feature for features, _ in USES.values() for feature in features))
        warnings.warn(
            f"expected torch {SEEN_IN[0]} to {SEEN_IN[-1]}, with which normops was tested, but got torch "
            f"{torch_version}: {features} depend on private parts of torch and may not work; the rest should",
            RuntimeWarning,
            stacklevel=3,
        )


def warn_of(feature: str, error: Exception) -> None:
    """Warns that a feature is missing because its module cannot be imported."""
    warnings.warn(
        f"normops works without {feature}, which torch {torch.__version__} does not support: {error!r}",
        RuntimeWarning,
        stacklevel=3,
    )


@contextmanager
def explain(feature: str) -> Generator[None]:
    """Catches an ImportError of the block, and raises one that names the feature."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"expected torch {SEEN_IN[0]} to {SEEN_IN[-1]}, whose private parts {feature} uses, but got torch "
            f"{torch.__version__}: {error}; the operators, functions and modules of normops work without them",
            name=error.name,
        ) from error
