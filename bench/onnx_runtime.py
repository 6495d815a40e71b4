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


def _element_type(dtype: torch.dtype) -> int:
    types = importlib.import_module("onnx").TensorProto
    return {
        torch.float32: types.FLOAT,
        torch.float64: types.DOUBLE,
        torch.float16: types.FLOAT16,
        torch.bfloat16: types.BFLOAT16,
    }[dtype]


@lru_cache
def _session(dtype: torch.dtype, threads: int) -> Any:
    helper = importlib.import_module("onnx.helper")
    onnxruntime = importlib.import_module("onnxruntime")
    kind = _element_type(dtype)
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
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _bind(session: Any, inputs: Tensors) -> Any:
    binding = session.io_binding()
    for name in ("input", "weight"):
        tensor = inputs[name]
        binding.bind_input(name, "cpu", 0, _element_type(tensor.dtype), tensor.shape, tensor.data_ptr())
    return binding


def preallocated(inputs: Tensors) -> Callable[[], object]:
    input = inputs["input"]
    session = _session(input.dtype, torch.get_num_threads())
    binding = _bind(session, inputs)
    output = torch.empty_like(input)
    binding.bind_output("output", "cpu", 0, _element_type(input.dtype), output.shape, output.data_ptr())

    def call() -> Tensor:
        session.run_with_iobinding(binding)
        return output

    return call


def fresh(inputs: Tensors) -> Callable[[], object]:
    """Prepares a call whose result is in memory of onnxruntime's allocator, which keeps and reuses it."""
    session = _session(inputs["input"].dtype, torch.get_num_threads())
    binding = _bind(session, inputs)
    binding.bind_output("output", "cpu")

    def call() -> Tensor:
        session.run_with_iobinding(binding)
        return from_dlpack(binding.get_outputs()[0])

    return call
