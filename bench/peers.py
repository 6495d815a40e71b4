"""Defines the implementations to compare. A peer is one entry in PEERS, with a builder for each operator and memory.

A builder prepares a call on given inputs; the call returns the operator's results in the order of Operator.writes.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor

import normops
from bench import hugging_face, onnx_runtime
from bench.operators import EPS, MODULATIONS, TABLES, in_shape
from bench.problems import Problem, Tensors
from reference.operators import of_argument, positional

Norm = Callable[..., Any]
"""Takes the tensors of a norm in the order of TENSORS."""
Builder = Callable[[Tensors], Callable[[], object]]

TENSORS = {
    "rms_norm": ("input", "weight"),
    "add_rms_norm": ("input", "residual", "weight"),
    "gated_rms_norm": ("input", "gate", "weight"),
    "rms_norm_rope": ("input", "cos", "sin", "weight"),
    "modulated_rms_norm": ("input", "scale", "shift"),
    "channel_rms_norm": ("input", "weight", "bias"),
}
# The operator that computes the forward and the backward.
BOTH = {
    "rms_norm": "forward_backward",
    "gated_rms_norm": "gated_forward_backward",
    "rms_norm_rope": "rope_forward_backward",
    "modulated_rms_norm": "modulated_forward_backward",
    "channel_rms_norm": "channel_forward_backward",
}


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


def _gradients(inputs: Tensors) -> tuple[Tensor, ...]:
    """Returns the gradients of the outputs."""
    return tuple(inputs[name] for name in ("grad_output", "grad_residual") if name in inputs)


def _leaves(names: Sequence[str], inputs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the norm's arguments, and those that require a gradient."""
    # The residual of a backward is 0, so that the sum is the input.
    given = {name: inputs[name] if name in inputs else torch.zeros_like(inputs["input"]) for name in names}
    leaves = [tensor.detach().requires_grad_(name not in TABLES) for name, tensor in given.items()]
    return leaves, [leaf for leaf in leaves if leaf.requires_grad]


def _forward(names: Sequence[str], norm: Norm, inputs: Tensors) -> Callable[[], object]:
    return partial(norm, *(inputs[name] for name in names))


def _backward(names: Sequence[str], norm: Norm, inputs: Tensors) -> Callable[[], object]:
    leaves, differentiable = _leaves(names, inputs)
    # A compiled backward must not reuse the memory of saved tensors, as it runs repeatedly.
    with torch._functorch.config.patch(donated_buffer=False):
        outputs = norm(*leaves)
    grad = partial(torch.autograd.grad, outputs, differentiable, _gradients(inputs), retain_graph=True)
    if "residual" not in names:
        return grad
    return lambda: grad()[::2]  # the second gradient is that of the residual


def _forward_backward(names: Sequence[str], norm: Norm, inputs: Tensors) -> Callable[[], object]:
    leaves, differentiable = _leaves(names, inputs)

    def call() -> tuple[Tensor, ...]:
        output = norm(*leaves)
        return output.detach(), *torch.autograd.grad(output, differentiable, inputs["grad_output"])

    return call


def _forward_into(names: Sequence[str], norm: Norm, inputs: Tensors) -> Callable[[], object]:
    """Prepares a compiled call that writes into given memory; the compiler fuses that copy with the computation."""

    def write(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        results = norm(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        return tuple(target.copy_(result) for target, result in zip(targets, results, strict=True))

    targets = [torch.empty_like(inputs[name]) for name in ("input", "residual") if name in names]
    return partial(_compile(write), targets, [inputs[name] for name in names])


def _backward_into(names: Sequence[str], norm: Norm, inputs: Tensors) -> Callable[[], object]:
    def write(targets: Tensors, gradients: Sequence[Tensor], tensors: Tensors) -> tuple[Tensor, ...]:
        def of_leaves(*leaves: Tensor) -> Any:
            given = {**tensors, **dict(zip(targets, leaves, strict=True))}
            return norm(*(given.get(name, 0.0) for name in names))  # there is no residual: the input is the sum

        differentiate = torch.func.vjp(of_leaves, *(tensors[name] for name in targets))[1]
        found = differentiate(gradients if len(gradients) > 1 else gradients[0])
        return tuple(target.copy_(gradient) for target, gradient in zip(targets.values(), found, strict=True))

    tensors = {name: inputs[name] for name in names if name in inputs}
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items() if name not in TABLES}
    return partial(_compile(write), targets, _gradients(inputs), tensors)


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _builder(build: Callable[..., Callable[[], object]], name: str, norm: Norm, compiles: bool = False) -> Builder:
    # torch.compile is called only here, as its imports take seconds.
    return lambda inputs: build(TENSORS[name], _compile(norm) if compiles else norm, in_shape(inputs))


def _with_autograd(norms: Mapping[str, Norm], compiles: bool = False) -> dict[str, Builder]:
    """Returns the builders of norms, of their backwards, and of both."""
    builders = {}
    for name, norm in norms.items():
        builders[name] = _builder(_forward, name, norm, compiles)
        builders[f"{name}_backward"] = _builder(_backward, name, norm, compiles)
        if name in BOTH:
            builders[BOTH[name]] = _builder(_forward_backward, name, norm, compiles)
    return builders


def _compiled_into(norms: Mapping[str, Norm]) -> dict[str, Builder]:
    forwards = {name: _builder(_forward_into, name, norm) for name, norm in norms.items()}
    return forwards | {f"{name}_backward": _builder(_backward_into, name, norm) for name, norm in norms.items()}


def _composed(norm: Norm) -> dict[str, Norm]:
    """Returns the norm, and the norm before or after other operators of torch."""

    def add_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        residual_out = input + residual
        return norm(residual_out, weight), residual_out

    def gated_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Any:
        return norm(input, weight) * F.silu(gate)

    def rotated_norm(input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Any:
        """Rotates as apply_rotary_pos_emb of Hugging Face's transformers."""
        normed = norm(input, weight)
        first, second = normed.chunk(2, -1)
        return normed * cos + torch.cat((-second, first), -1) * sin

    return {"rms_norm": norm, "add_rms_norm": add_norm, "gated_rms_norm": gated_norm, "rms_norm_rope": rotated_norm}


def _of_normops(**options: Any) -> dict[str, Norm]:
    return {
        "rms_norm": lambda x, w: normops.rms_norm(x, w.shape, w, EPS, **options),
        "add_rms_norm": lambda x, residual, w: normops.add_rms_norm(x, residual, w.shape, w, EPS, **options),
        "gated_rms_norm": lambda x, gate, w: normops.gated_rms_norm(x, gate, w.shape, w, EPS, **options),
        "rms_norm_rope": lambda x, cos, sin, w: normops.rms_norm_rope(x, cos, sin, w.shape, w, EPS, **options),
        "modulated_rms_norm": lambda x, scale, shift: normops.rms_norm(
            x, x.shape[-1], scale, EPS, weight_offset=1.0, bias=shift, **options
        ),
        "channel_rms_norm": lambda x, w, bias: normops.rms_norm(
            x, len(w), w, EPS, bias=bias, dim=1, activation="silu", **options
        ),
    }


def _out(operator: str, options: Mapping[str, object], inputs: Tensors) -> Callable[[], object]:
    """Prepares a call of an .out overload of normops."""
    overload = getattr(torch.ops.normops, operator).out
    given = {MODULATIONS.get(name, name): tensor for name, tensor in in_shape(inputs).items()}
    weight = given["weight"]
    shape = {"normalized_shape": weight.shape[-1:], "eps": EPS}
    args, kwargs = positional(overload, {**given, **shape, **options})
    outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
    targets = {name: torch.empty_like(given.get(of_argument(name), weight)) for name in outs}
    call = partial(overload, *args, **kwargs, **targets)
    # Without a bias, its gradient is not written.
    return (lambda: call()[:-1]) if "grad_bias" in targets and "bias" not in given else call


def _add_then_norm_out(inputs: Tensors) -> Callable[[], object]:
    residual_out = torch.empty_like(inputs["residual"])
    norm = _out("rms_norm", {}, {"input": residual_out, "weight": inputs["weight"]})

    def call() -> tuple[object, Tensor]:
        torch.add(inputs["input"], inputs["residual"], out=residual_out)
        return norm(), residual_out

    return call


def _backward_then_add_out(inputs: Tensors) -> Callable[[], object]:
    backward: Callable[[], Any] = _out(
        "rms_norm_backward", {}, {name: tensor for name, tensor in inputs.items() if name != "grad_residual"}
    )

    def call() -> tuple[Tensor, Tensor]:
        grad_input, grad_weight = backward()
        return grad_input.add_(inputs["grad_residual"]), grad_weight

    return call


def normalized_channels(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Computes the norm and SiLU as in the autoencoders of Wan and Qwen-Image, without an eps."""
    return F.silu(F.normalize(input, dim=1) * len(weight) ** 0.5 * weight[:, None] + bias[:, None])


def llama_rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    """Computes LlamaRMSNorm.forward of Hugging Face's transformers."""
    hidden = input.to(torch.float32)
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * hidden.to(input.dtype)


def qwen3_next_rms_norm_gated(input: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Computes Qwen3NextRMSNormGated.forward of Hugging Face's transformers."""
    return (llama_rms_norm(input, weight) * F.silu(gate.to(torch.float32))).to(input.dtype)


LIGER_OPTIONS = 0.0, "llama", False  # offset, rounding as in Llama, not in place


def liger_rms_norm(input: Tensor, weight: Tensor) -> Any:
    function = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    return function.apply(input, weight, EPS, *LIGER_OPTIONS)


def liger_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> Any:
    function = importlib.import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return function.apply(input, residual, weight, EPS, *LIGER_OPTIONS)


def liger_rms_norm_rope(input: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    rotate = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    queries, keys = liger_rms_norm(input, weight)[None].transpose(1, 2).chunk(2, 1)  # it rotates both at once
    rotated = rotate.apply(queries, keys, cos.transpose(0, 1), sin.transpose(0, 1))
    return torch.cat(rotated[:2], 1).transpose(1, 2)[0]


def quack_rms_norm(input: Tensor, weight: Tensor, **options: Any) -> Any:
    return importlib.import_module("quack").rmsnorm(input, weight, eps=EPS, **options)


def quack_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return quack_rms_norm(input, weight, residual=residual, prenorm=True)


def fla_gated_rms_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Any:
    return importlib.import_module("fla.modules.fused_norm_gate").rms_norm_gated(input, gate, weight, None, eps=EPS)


def mamba_gated_rms_norm(input: Tensor, gate: Tensor, weight: Tensor) -> Any:
    function = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").rmsnorm_fn
    return function(input, weight, None, z=gate, eps=EPS)


def _in_triton(build: Builder) -> Builder:
    def build_in_triton(inputs: Tensors) -> Callable[[], object]:
        call = build(inputs)

        def call_in_triton() -> object:
            with normops.set_backend("triton"):
                return call()

        return call_in_triton

    return build_in_triton


def _not_installed(*names: str) -> Callable[[], str | None]:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return lambda: f"{' and '.join(missing)} not installed" if missing else None


def _of_package(name: str, package: str, norms: Mapping[str, Norm]) -> Peer:
    return Peer(name, _with_autograd(norms), devices=("cuda",), missing=_not_installed(package))


# Operators with other names or options than the measured ones.
_OPTIONS: dict[str, dict[str, object]] = {
    "modulated_rms_norm": {"weight_offset": 1.0},
    "channel_rms_norm": {"dim": -2, "activation": "silu"},
}
_NAMES = {
    "add_rms_norm_backward": "rms_norm_backward",
    "modulated_rms_norm": "rms_norm",
    "modulated_rms_norm_backward": "rms_norm_backward",
}
NORMOPS = Peer(
    "normops",
    _with_autograd(_of_normops()),
    {
        operator: partial(_out, _NAMES.get(operator, operator), _OPTIONS.get(name, {}))
        for name in TENSORS
        for operator in (name, f"{name}_backward")
    },
    has_bounds=True,
)

_WITH_NORMOPS = _composed(_of_normops()["rms_norm"])
_ROTATED = {"rms_norm_rope": _WITH_NORMOPS["rms_norm_rope"]}
# Models rotate the rounded norm in a separate operation.
_BUT_ROTATED = ("rms_norm", "add_rms_norm", "gated_rms_norm")
_AS_LLAMA = _of_normops(rounding="llama")
# The same bits, by a rounded norm and torch's multiplication.
_WITH_WEIGHT = _composed(lambda x, w: w * normops.rms_norm(x, w.shape, None, EPS))
# One weight for all rows, through which scale and shift get their gradients.
_ONE_WEIGHT: dict[str, Norm] = {
    "modulated_rms_norm": lambda x, s, shift: normops.rms_norm(x, x.shape[-1], (s + shift)[0, 0], EPS)
}
_OF_TORCH: dict[str, Norm] = {
    **_composed(lambda x, w: F.rms_norm(x, w.shape, w, EPS)),
    "modulated_rms_norm": lambda x, s, shift: F.rms_norm(x, x.shape[-1:], None, EPS) * (1 + s) + shift,
}
_OF_LLAMA = _composed(llama_rms_norm) | {"gated_rms_norm": qwen3_next_rms_norm_gated}
_NORMALIZED = {"channel_rms_norm": normalized_channels}
PEERS = (
    NORMOPS,
    # Calls on a GPU are captured into graphs, so that selecting the backend takes no time.
    replace(
        NORMOPS,
        name="normops-triton",
        fresh={name: _in_triton(build) for name, build in NORMOPS.fresh.items()},
        preallocated={name: _in_triton(build) for name, build in NORMOPS.preallocated.items()},
        devices=("cuda",),
        missing=_not_installed("triton"),
    ),
    # The baseline of the fused operators: an addition, then the norm.
    Peer(
        "add, normops",
        _with_autograd({"add_rms_norm": _WITH_NORMOPS["add_rms_norm"]}),
        {"add_rms_norm": _add_then_norm_out, "add_rms_norm_backward": _backward_then_add_out},
    ),
    Peer("normops, llama", _with_autograd({name: _AS_LLAMA[name] for name in _BUT_ROTATED})),
    Peer("normops, weight", _with_autograd({name: _WITH_WEIGHT[name] for name in _BUT_ROTATED})),
    Peer("normops, rotation", _with_autograd(_ROTATED)),
    Peer("normops, rotation-compiled", _with_autograd(_ROTATED, compiles=True)),
    Peer("normops, one weight", _with_autograd(_ONE_WEIGHT), own_definition=True),
    Peer("F.normalize", _with_autograd(_NORMALIZED), own_definition=True),
    Peer("F.normalize-compiled", _with_autograd(_NORMALIZED, compiles=True), own_definition=True),
    Peer("F.rms_norm", _with_autograd(_OF_TORCH)),
    Peer("F.rms_norm-compiled", _with_autograd(_OF_TORCH, compiles=True), _compiled_into(_OF_TORCH)),
    Peer("LlamaRMSNorm", _with_autograd(_OF_LLAMA)),
    Peer("LlamaRMSNorm-compiled", _with_autograd(_OF_LLAMA, compiles=True), _compiled_into(_OF_LLAMA)),
    Peer(
        "onnxruntime",
        {"rms_norm": lambda inputs: onnx_runtime.rms_norm(inputs, None)},
        {"rms_norm": lambda inputs: onnx_runtime.rms_norm(inputs, torch.empty_like(inputs["input"]))},
        devices=("cpu",),
        missing=_not_installed("onnx", "onnxruntime"),
    ),
    Peer(
        "HF rmsnorm",
        _with_autograd({"rms_norm": hugging_face.rms_norm}),
        devices=("cpu",),
        missing=hugging_face.missing,
    ),
    _of_package(
        "Liger",
        "liger_kernel",
        {**_composed(liger_rms_norm), "add_rms_norm": liger_add_rms_norm, "rms_norm_rope": liger_rms_norm_rope},
    ),
    _of_package("quack", "quack", {**_composed(quack_rms_norm), "add_rms_norm": quack_add_rms_norm}),
    _of_package("fla", "fla", {"gated_rms_norm": fla_gated_rms_norm}),
    _of_package("mamba", "mamba_ssm", {"gated_rms_norm": mamba_gated_rms_norm}),
    Peer(
        "F.layer_norm",
        _with_autograd(_composed(lambda x, w: F.layer_norm(x, w.shape, w, None, EPS))),
        own_definition=True,
    ),
)
