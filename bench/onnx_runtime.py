"""Calls ONNX Runtime's SimplifiedLayerNormalization, which is RMSNorm; forward only."""

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from bench.operators import EPS
from bench.problems import Tensors

TYPES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}


@lru_cache
def _session(dtype: torch.dtype, threads: int) -> tuple[Any, int]:
    """Returns a session and ONNX's number of the dtype."""
    helper, types = importlib.import_module("onnx.helper"), importlib.import_module("onnx").TensorProto
    onnxruntime = importlib.import_module("onnxruntime")
    kind = getattr(types, TYPES[dtype])
    input, weight, output = (
        helper.make_tensor_value_info(name, kind, dims)
        for name, dims in (("input", ["rows", "cols"]), ("weight", ["cols"]), ("output", ["rows", "cols"]))
    )
    node = helper.make_node("SimplifiedLayerNormalization", ["input", "weight"], ["output"], axis=-1, epsilon=EPS)
    graph = helper.make_graph([node], "rms_norm", [input, weight], [output])
    # Older versions of the format and the operators: onnxruntime supports the newest ones only some releases later.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads would otherwise keep spinning on the cores of the next timed call.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]), kind


def rms_norm(inputs: Tensors, output: Tensor | None) -> Callable[[], object]:
    """Prepares a call that writes the output, or memory of onnxruntime's allocator, which keeps and reuses it."""
    session, kind = _session(inputs["input"].dtype, torch.get_num_threads())
    binding = session.io_binding()
    for name in ("input", "weight"):
        tensor = inputs[name]
        binding.bind_input(name, "cpu", 0, kind, tensor.shape, tensor.data_ptr())
    if output is None:
        binding.bind_output("output", "cpu")
    else:
        binding.bind_output("output", "cpu", 0, kind, output.shape, output.data_ptr())

    def call() -> Tensor:
        session.run_with_iobinding(binding)
        return from_dlpack(binding.get_outputs()[0]) if output is None else output

    return call
