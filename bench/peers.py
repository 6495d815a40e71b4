"""Defines the implementations to compare. A peer is one entry in PEERS, with a builder for each operator and memory.

A builder prepares a call on given inputs; the call returns the operator's results in the order of Operator.writes.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import normops
from bench import hugging_face, onnx_runtime
from bench.operators import EPS, TABLES, of_channels, of_samples
from bench.problems import Problem, Tensors

Norm = Callable[[Tensor, Tensor], Tensor]
AddNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
GatedNorm = Callable[[Tensor, Tensor, Tensor], Tensor]
ModulatedNorm = Callable[[Tensor, Tensor, Tensor], Tensor]
ChannelNorm = Callable[[Tensor, Tensor, Tensor], Tensor]
RotatedNorm = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Builder = Callable[[Tensors], Callable[[], object]]


@dataclass(frozen=True)
class Peer:
    name: str
    fresh: Mapping[str, Builder]
    """By operator: calls that allocate their results."""
    preallocated: Mapping[str, Builder] = field(default_factory=dict)
    """By operator: calls that write into memory that the builder allocated."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    missing: Callable[[], str | None] = lambda: None
    """Returns why it cannot be used here, or None."""
    has_bounds: bool = False
    """Checks results against the oracle's bounds instead of a tolerance."""
    own_definition: bool = False
    """Computes another function, for scale; it is checked against itself in float64."""

    def builder(self, problem: Problem) -> Builder | None:
        builders = self.fresh if problem.memory == "fresh" else self.preallocated
        return builders.get(problem.operator.name)

    def why_not(self, problem: Problem) -> str | None:
        """Returns why the problem cannot be measured, or None."""
        if reason := self.missing():
            return reason
        if problem.size.device not in self.devices:
            return f"not for {problem.size.device}"
        if problem.operator.name not in self.fresh:
            return f"has no {problem.operator.name}"
        return None if self.builder(problem) else "cannot write into given memory"


def _not_installed(*names: str) -> Callable[[], str | None]:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return lambda: f"{' and '.join(missing)} not installed" if missing else None


def layer_norm(input: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(input, weight.shape, weight, None, EPS)


def rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, EPS)


def llama_rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    """Computes LlamaRMSNorm.forward of Hugging Face's transformers."""
    hidden = input.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * hidden.to(input.dtype)


def liger_rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(input, weight, EPS, 0.0, "llama", False)  # offset, rounding as in Llama, not in place


def quack_rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    return importlib.import_module("quack").rmsnorm(input, weight, eps=EPS)


def unfused(norm: Norm) -> AddNorm:
    """Returns an addition followed by the norm."""

    def add_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual_out = input + residual
        return norm(residual_out, weight), residual_out

    return add_norm


def then_gate(norm: Norm) -> GatedNorm:
    """Returns the norm followed by the gate."""

    def gated_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        return norm(input, weight) * F.silu(gate)

    return gated_norm


def then_rotate(norm: Norm) -> RotatedNorm:
    """Returns the norm followed by apply_rotary_pos_emb of Hugging Face's transformers."""

    def rotated_norm(input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
        normed = norm(input, weight)
        first, second = normed.chunk(2, -1)
        return normed * cos + torch.cat((-second, first), -1) * sin

    return rotated_norm


def qwen3_next_rms_norm_gated(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Computes Qwen3NextRMSNormGated.forward of Hugging Face's transformers."""
    return (llama_rms_norm(input, weight) * F.silu(gate.to(torch.float32))).to(input.dtype)


def liger_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    function = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return function.apply(input, residual, weight, EPS, 0.0, "llama", False)


def quack_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return importlib.import_module("quack").rmsnorm(input, weight, residual=residual, eps=EPS, prenorm=True)


def fla_gated_rms_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated(input, gate, weight, None, eps=EPS)


def mamba_gated_rms_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn(
        input, weight, None, z=gate, eps=EPS
    )


def liger_rms_norm_rope(input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    rotate = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    queries, keys = liger_rms_norm(input, weight)[None].transpose(1, 2).chunk(2, 1)  # it rotates both at once
    rotated = rotate.apply(queries, keys, cos.transpose(0, 1), sin.transpose(0, 1))
    return torch.cat(rotated[:2], 1).transpose(1, 2)[0]


def axolotl_rms_norm_rope(input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    function = importlib.import_module("axolotl.kernels.gemma4_fused_rope").fused_rms_norm_rope
    return function(input[None], weight, cos.transpose(0, 1), sin.transpose(0, 1), eps=EPS)[0]


def normops_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return normops.add_rms_norm(input, residual, weight.shape, weight, EPS)


def normops_gated_rms_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return normops.gated_rms_norm(input, gate, weight.shape, weight, EPS)


def normops_rms_norm_rope(input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    return normops.rms_norm_rope(input, cos, sin, weight.shape, weight, EPS)


def modulated_rms_norm(input: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.rms_norm(input, input.shape[-1:], None, EPS) * (1 + scale) + shift


def normops_modulated_rms_norm(input: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return normops.rms_norm(input, input.shape[-1], scale, EPS, weight_offset=1.0, bias=shift)


def normalized_channels(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes the norm and SiLU as in the autoencoders of Wan and Qwen-Image, without an eps."""
    return F.silu(F.normalize(input, dim=1) * len(weight) ** 0.5 * weight[:, None] + bias[:, None])


def normops_channel_rms_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normops.rms_norm(input, len(weight), weight, EPS, bias=bias, dim=1, activation="silu")


def not_modulated_rms_norm(input: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Uses one weight for all rows, through which scale and shift get their gradients."""
    return normops.rms_norm(input, input.shape[-1], (scale + shift)[0, 0], EPS)


def normops_rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    return normops.rms_norm(input, weight.shape, weight, EPS)


def normops_rms_norm_in_order(input: Tensor, weight: Tensor) -> Tensor:
    """Rounds where LlamaRMSNorm rounds."""
    return normops.rms_norm(input, weight.shape, weight, EPS, rounding="llama")


def normops_add_rms_norm_in_order(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return normops.add_rms_norm(input, residual, weight.shape, weight, EPS, rounding="llama")


def normops_gated_rms_norm_in_order(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return normops.gated_rms_norm(input, gate, weight.shape, weight, EPS, rounding="llama")


def normops_rms_norm_then_weight(input: Tensor, weight: Tensor) -> Tensor:
    """Computes the same bits with a rounded norm and torch's multiplication."""
    return weight * normops.rms_norm(input, weight.shape, None, EPS)


def _add_forward(norm: AddNorm) -> Builder:
    return lambda inputs: partial(norm, inputs["input"], inputs["residual"], inputs["weight"])


def _add_backward(norm: AddNorm) -> Builder:
    def build(inputs: Tensors) -> Callable[[], object]:
        input, weight = (inputs[name].detach().requires_grad_() for name in ("input", "weight"))
        residual = torch.zeros_like(input).requires_grad_()  # so that the sum is the input
        with torch._functorch.config.patch(donated_buffer=False):
            outputs = norm(input, residual, weight)
        gradients = inputs["grad_output"], inputs["grad_residual"]

        def call() -> tuple[Tensor, Tensor]:
            grads = torch.autograd.grad(outputs, (input, residual, weight), gradients, retain_graph=True)
            return grads[0], grads[2]

        return call

    return build


def _in_shape(inputs: Tensors) -> Tensors:
    """Views the inputs in the operator's shape: by samples, by channels, or by heads that share tables."""
    if "scale" in inputs:
        return of_samples(inputs)
    if "bias" in inputs:
        return of_channels(inputs)
    if "cos" not in inputs:
        return inputs
    cols = inputs["weight"].shape[0]
    heads = inputs["input"].shape[0] // inputs["cos"].shape[0]
    return {
        name: tensor if name == "weight" else tensor.view(-1, 1 if name in TABLES else heads, cols)
        for name, tensor in inputs.items()
    }


def _three_ways(name: str, of_both: str, names: tuple[str, ...], norm: Callable[..., Tensor]) -> dict[str, Builder]:
    """Returns the builders of a norm of tensors of these names, of its backward, and of both."""

    def leaves_of(inputs: Tensors) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Returns the arguments, those that require gradients, and the gradient of the output."""
        inputs = _in_shape(inputs)
        arguments = [inputs[name].detach().requires_grad_(name not in TABLES) for name in names]
        return arguments, [tensor for tensor in arguments if tensor.requires_grad], inputs["grad_output"]

    def forward(inputs: Tensors) -> Callable[[], object]:
        inputs = _in_shape(inputs)
        return partial(norm, *(inputs[name] for name in names))

    def backward(inputs: Tensors) -> Callable[[], object]:
        arguments, leaves, grad_output = leaves_of(inputs)
        # A compiled backward must not reuse the memory of saved tensors, as it runs repeatedly.
        with torch._functorch.config.patch(donated_buffer=False):
            output = norm(*arguments)
        return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

    def forward_backward(inputs: Tensors) -> Callable[[], object]:
        arguments, leaves, grad_output = leaves_of(inputs)

        def call() -> tuple[Tensor, ...]:
            output = norm(*arguments)
            return output.detach(), *torch.autograd.grad(output, leaves, grad_output)

        return call

    return {name: forward, f"{name}_backward": backward, of_both: forward_backward}


def _gated_with_autograd(norm: GatedNorm) -> dict[str, Builder]:
    return _three_ways("gated_rms_norm", "gated_forward_backward", ("input", "gate", "weight"), norm)


def _rotated_with_autograd(norm: RotatedNorm) -> dict[str, Builder]:
    return _three_ways("rms_norm_rope", "rope_forward_backward", ("input", "cos", "sin", "weight"), norm)


def _modulated_with_autograd(norm: ModulatedNorm) -> dict[str, Builder]:
    names = "input", "scale", "shift"
    return _three_ways("modulated_rms_norm", "modulated_forward_backward", names, norm)


def _over_channels_with_autograd(norm: ChannelNorm) -> dict[str, Builder]:
    return _three_ways("channel_rms_norm", "channel_forward_backward", ("input", "weight", "bias"), norm)


def _with_autograd(
    norm: Norm,
    add_norm: AddNorm | None = None,
    gated_norm: GatedNorm | None = None,
    rotated_norm: RotatedNorm | None = None,
) -> dict[str, Builder]:
    add_norm = add_norm or unfused(norm)
    return {
        **_three_ways("rms_norm", "forward_backward", ("input", "weight"), norm),
        "add_rms_norm": _add_forward(add_norm),
        "add_rms_norm_backward": _add_backward(add_norm),
        **_gated_with_autograd(gated_norm or then_gate(norm)),
        **_rotated_with_autograd(rotated_norm or then_rotate(norm)),
    }


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _compiled(norm: Norm, gated_norm: GatedNorm | None = None) -> dict[str, Builder]:
    gated_norm = gated_norm or then_gate(norm)

    def build(operator: str) -> Builder:
        # torch.compile is called only here, as its imports take seconds.
        return lambda inputs: _with_autograd(
            _compile(norm), _compile(unfused(norm)), _compile(gated_norm), _compile(then_rotate(norm))
        )[operator](inputs)

    return {operator: build(operator) for operator in _with_autograd(norm)}


def _modulated_and_compiled(operator: str) -> Builder:
    return lambda inputs: _modulated_with_autograd(_compile(modulated_rms_norm))[operator](inputs)


def _compiled_into(norm: Norm, gated_norm: GatedNorm | None = None) -> dict[str, Builder]:
    """Returns compiled calls that write into given memory; the compiler fuses that copy with the computation."""
    gate = gated_norm or then_gate(norm)

    def write_gated(output: Tensor, input: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
        return output.copy_(gate(input, gates, weight))

    def gated_forward(inputs: Tensors) -> Callable[[], object]:
        given = inputs["input"], inputs["gate"], inputs["weight"]
        return partial(_compile(write_gated), torch.empty_like(inputs["input"]), *given)

    def write(output: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return output.copy_(norm(input, weight))

    def write_gradients(
        grad_input: Tensor, grad_weight: Tensor, input: Tensor, weight: Tensor, grad_output: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradients = torch.func.vjp(norm, input, weight)[1](grad_output)
        return grad_input.copy_(gradients[0]), grad_weight.copy_(gradients[1])

    def write_sum(
        output: Tensor, residual_out: Tensor, input: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        h = input + residual
        return output.copy_(norm(h, weight)), residual_out.copy_(h)

    def write_gradients_of_sum(
        grad_input: Tensor,
        grad_weight: Tensor,
        input: Tensor,
        weight: Tensor,
        grad_output: Tensor,
        grad_residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gradients = torch.func.vjp(norm, input, weight)[1](grad_output)
        return grad_input.copy_(gradients[0] + grad_residual), grad_weight.copy_(gradients[1])

    def forward(inputs: Tensors) -> Callable[[], object]:
        input, weight = inputs["input"], inputs["weight"]
        return partial(_compile(write), torch.empty_like(input), input, weight)

    def add_forward(inputs: Tensors) -> Callable[[], object]:
        input, residual, weight = inputs["input"], inputs["residual"], inputs["weight"]
        targets = torch.empty_like(input), torch.empty_like(residual)
        return partial(_compile(write_sum), *targets, input, residual, weight)

    def add_backward(inputs: Tensors) -> Callable[[], object]:
        input, weight = inputs["input"], inputs["weight"]
        targets = torch.empty_like(input), torch.empty_like(weight)
        gradients = inputs["grad_output"], inputs["grad_residual"]
        return partial(_compile(write_gradients_of_sum), *targets, input, weight, *gradients)

    def backward(inputs: Tensors) -> Callable[[], object]:
        input, weight = inputs["input"], inputs["weight"]
        targets = torch.empty_like(input), torch.empty_like(weight)
        return partial(_compile(write_gradients), *targets, input, weight, inputs["grad_output"])

    return {
        "rms_norm": forward,
        "rms_norm_backward": backward,
        "add_rms_norm": add_forward,
        "add_rms_norm_backward": add_backward,
        "gated_rms_norm": gated_forward,
    }


def _normops_out(inputs: Tensors) -> Callable[[], object]:
    input, weight = inputs["input"], inputs["weight"]
    out = torch.empty_like(input)
    return partial(torch.ops.normops.rms_norm.out, input, weight.shape, weight, EPS, out=out)


def _normops_backward_out(inputs: Tensors) -> Callable[..., tuple[Tensor, Tensor]]:
    input, weight = inputs["input"], inputs["weight"]
    targets = {"grad_input": torch.empty_like(input), "grad_weight": torch.empty_like(weight)}
    call = partial(torch.ops.normops.rms_norm_backward.out, inputs["grad_output"], input, weight.shape, weight, EPS)
    return lambda **others: call(**targets, **others, grad_bias=weight)[:2]  # not written without a bias


def _normops_add_out(inputs: Tensors) -> Callable[[], object]:
    input, residual, weight = inputs["input"], inputs["residual"], inputs["weight"]
    targets = {"out": torch.empty_like(input), "residual_out": torch.empty_like(residual)}
    return partial(torch.ops.normops.add_rms_norm.out, input, residual, weight.shape, weight, EPS, **targets)


def _normops_add_backward_out(inputs: Tensors) -> Callable[[], object]:
    return partial(_normops_backward_out(inputs), grad_residual=inputs["grad_residual"])


def _normops_gated_out(inputs: Tensors) -> Callable[[], object]:
    input, gate, weight = inputs["input"], inputs["gate"], inputs["weight"]
    out = torch.empty_like(input)
    return partial(torch.ops.normops.gated_rms_norm.out, input, gate, weight.shape, weight, EPS, out=out)


def _normops_gated_backward_out(inputs: Tensors) -> Callable[[], object]:
    input, gate, weight = inputs["input"], inputs["gate"], inputs["weight"]
    given = {"grad_input": input, "grad_gate": gate, "grad_weight": weight}
    targets = {name: torch.empty_like(tensor) for name, tensor in given.items()}
    operator = torch.ops.normops.gated_rms_norm_backward.out
    return partial(operator, inputs["grad_output"], input, gate, weight.shape, weight, EPS, **targets)


def _normops_modulated_out(inputs: Tensors) -> Callable[[], object]:
    given = _in_shape(inputs)
    input, scale, shift = given["input"], given["scale"], given["shift"]
    return partial(
        torch.ops.normops.rms_norm.out,
        input,
        input.shape[-1:],
        scale,
        EPS,
        weight_offset=1.0,
        bias=shift,
        out=torch.empty_like(input),
    )


def _normops_modulated_backward_out(inputs: Tensors) -> Callable[[], object]:
    given = _in_shape(inputs)
    input, scale, shift = given["input"], given["scale"], given["shift"]
    like = {"grad_input": input, "grad_weight": scale, "grad_bias": shift}
    targets = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    operator = torch.ops.normops.rms_norm_backward.out
    return partial(operator, given["grad_output"], input, input.shape[-1:], scale, EPS, 1.0, bias=shift, **targets)


def _normops_channel_out(inputs: Tensors) -> Callable[[], object]:
    given = of_channels(inputs)
    input, weight, bias = given["input"], given["weight"], given["bias"]
    others = {"bias": bias, "dim": -2, "activation": "silu", "out": torch.empty_like(input)}
    return partial(torch.ops.normops.channel_rms_norm.out, input, weight.shape, weight, EPS, **others)


def _normops_channel_backward_out(inputs: Tensors) -> Callable[[], object]:
    given = of_channels(inputs)
    input, weight, bias = given["input"], given["weight"], given["bias"]
    like = {"grad_input": input, "grad_weight": weight, "grad_bias": bias}
    others = {"bias": bias, "dim": -2, "activation": "silu"}
    targets = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    operator = torch.ops.normops.channel_rms_norm_backward.out
    return partial(operator, given["grad_output"], input, weight.shape, weight, EPS, **others, **targets)


def _normops_rope_out(inputs: Tensors) -> Callable[[], object]:
    given = _in_shape(inputs)
    input, weight, tables = given["input"], given["weight"], (given["cos"], given["sin"])
    out = torch.empty_like(input)
    return partial(torch.ops.normops.rms_norm_rope.out, input, *tables, weight.shape, weight, EPS, out=out)


def _normops_rope_backward_out(inputs: Tensors) -> Callable[[], object]:
    given = _in_shape(inputs)
    input, weight, tables = given["input"], given["weight"], (given["cos"], given["sin"])
    targets = {"grad_input": torch.empty_like(input), "grad_weight": torch.empty_like(weight)}
    operator = torch.ops.normops.rms_norm_rope_backward.out
    return partial(operator, given["grad_output"], input, *tables, weight.shape, weight, EPS, **targets)


def _unfused_out(inputs: Tensors) -> Callable[[], object]:
    input, residual, weight = inputs["input"], inputs["residual"], inputs["weight"]
    out, residual_out = torch.empty_like(input), torch.empty_like(residual)

    def call() -> tuple[Tensor, Tensor]:
        torch.add(input, residual, out=residual_out)
        return torch.ops.normops.rms_norm.out(residual_out, weight.shape, weight, EPS, out=out), residual_out

    return call


def _unfused_backward_out(inputs: Tensors) -> Callable[[], object]:
    backward = _normops_backward_out(inputs)
    grad_residual = inputs["grad_residual"]

    def call() -> tuple[Tensor, Tensor]:
        grad_input, grad_weight = backward()
        return grad_input.add_(grad_residual), grad_weight

    return call


NORMOPS = Peer(
    "normops",
    {
        **_with_autograd(normops_rms_norm, normops_add_rms_norm, normops_gated_rms_norm, normops_rms_norm_rope),
        **_modulated_with_autograd(normops_modulated_rms_norm),
        **_over_channels_with_autograd(normops_channel_rms_norm),
    },
    {
        "rms_norm": _normops_out,
        "rms_norm_backward": _normops_backward_out,
        "add_rms_norm": _normops_add_out,
        "add_rms_norm_backward": _normops_add_backward_out,
        "gated_rms_norm": _normops_gated_out,
        "gated_rms_norm_backward": _normops_gated_backward_out,
        "rms_norm_rope": _normops_rope_out,
        "rms_norm_rope_backward": _normops_rope_backward_out,
        "modulated_rms_norm": _normops_modulated_out,
        "modulated_rms_norm_backward": _normops_modulated_backward_out,
        "channel_rms_norm": _normops_channel_out,
        "channel_rms_norm_backward": _normops_channel_backward_out,
    },
    has_bounds=True,
)

# The baseline of the fused operators: an addition, then the norm.
UNFUSED = Peer(
    "add, normops",
    {name: build for name, build in _with_autograd(normops_rms_norm).items() if name.startswith("add_")},
    {"add_rms_norm": _unfused_out, "add_rms_norm_backward": _unfused_backward_out},
)


def _rotated_and_compiled(operator: str) -> Builder:
    return lambda inputs: _rotated_with_autograd(_compile(then_rotate(normops_rms_norm)))[operator](inputs)


_NORM_THEN_ROTATION = _rotated_with_autograd(then_rotate(normops_rms_norm))


def _but_rotated(builders: Mapping[str, Builder]) -> dict[str, Builder]:
    """Removes the operators with a rotation: models rotate the rounded norm in a separate operation."""
    return {name: build for name, build in builders.items() if "rope" not in name}


# Norms that round as a model does.
_IN_ORDER = _with_autograd(normops_rms_norm_in_order, normops_add_rms_norm_in_order, normops_gated_rms_norm_in_order)


def _in_triton(build: Builder) -> Builder:
    def build_in_triton(inputs: Tensors) -> Callable[[], object]:
        call = build(inputs)

        def call_in_triton() -> object:
            with normops.set_backend("triton"):
                return call()

        return call_in_triton

    return build_in_triton


_MODULATED = _modulated_with_autograd(modulated_rms_norm)
_OVER_CHANNELS = _over_channels_with_autograd(normalized_channels)


def _over_channels_and_compiled(operator: str) -> Builder:
    return lambda inputs: _over_channels_with_autograd(_compile(normalized_channels))[operator](inputs)


PEERS = (
    NORMOPS,
    # Calls on a GPU are captured into graphs, so that selecting the backend takes no time.
    Peer(
        "normops-triton",
        {name: _in_triton(build) for name, build in NORMOPS.fresh.items()},
        {name: _in_triton(build) for name, build in NORMOPS.preallocated.items()},
        devices=("cuda",),
        missing=_not_installed("triton"),
        has_bounds=True,
    ),
    UNFUSED,
    Peer("normops, llama", _but_rotated(_IN_ORDER)),
    Peer("normops, weight", _but_rotated(_with_autograd(normops_rms_norm_then_weight))),
    Peer("normops, rotation", _NORM_THEN_ROTATION),
    Peer(
        "normops, rotation-compiled",
        {name: _rotated_and_compiled(name) for name in _NORM_THEN_ROTATION},
    ),
    Peer("normops, one weight", _modulated_with_autograd(not_modulated_rms_norm), own_definition=True),
    Peer("F.normalize", _OVER_CHANNELS, own_definition=True),
    Peer(
        "F.normalize-compiled",
        {name: _over_channels_and_compiled(name) for name in _OVER_CHANNELS},
        own_definition=True,
    ),
    Peer("F.rms_norm", {**_with_autograd(rms_norm), **_modulated_with_autograd(modulated_rms_norm)}),
    Peer(
        "F.rms_norm-compiled",
        {**_compiled(rms_norm), **{name: _modulated_and_compiled(name) for name in _MODULATED}},
        _compiled_into(rms_norm),
    ),
    # The corresponding gated norm is Qwen3NextRMSNormGated.
    Peer("LlamaRMSNorm", _with_autograd(llama_rms_norm, gated_norm=qwen3_next_rms_norm_gated)),
    Peer(
        "LlamaRMSNorm-compiled",
        _compiled(llama_rms_norm, qwen3_next_rms_norm_gated),
        _compiled_into(llama_rms_norm, qwen3_next_rms_norm_gated),
    ),
    Peer(
        "onnxruntime",
        {"rms_norm": onnx_runtime.fresh},
        {"rms_norm": onnx_runtime.preallocated},
        devices=("cpu",),
        missing=_not_installed("onnx", "onnxruntime"),
    ),
    Peer(
        "HF rmsnorm",
        {
            name: build
            for name, build in _with_autograd(hugging_face.rms_norm).items()
            if name in ("rms_norm", "rms_norm_backward", "forward_backward")
        },
        devices=("cpu",),
        missing=hugging_face.missing,
    ),
    Peer(
        "Liger",
        _with_autograd(liger_rms_norm, liger_add_rms_norm, rotated_norm=liger_rms_norm_rope),
        devices=("cuda",),
        missing=_not_installed("liger_kernel"),
    ),
    Peer(
        "quack", _with_autograd(quack_rms_norm, quack_add_rms_norm), devices=("cuda",), missing=_not_installed("quack")
    ),
    Peer("fla", _gated_with_autograd(fla_gated_rms_norm), devices=("cuda",), missing=_not_installed("fla")),
    Peer("mamba", _gated_with_autograd(mamba_gated_rms_norm), devices=("cuda",), missing=_not_installed("mamba_ssm")),
    Peer(
        "axolotl", _rotated_with_autograd(axolotl_rms_norm_rope), devices=("cuda",), missing=_not_installed("axolotl")
    ),
    Peer("F.layer_norm", _with_autograd(layer_norm), own_definition=True),
)
