"""Registers normops in the layer mapping of Hugging Face's package ``kernels``."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeGuard

from torch import Tensor, nn

from normops.adoption.computing import gate_beside
from normops.functional import Activation, gated_rms_norm, rms_norm
from normops.inductor.calls import DTYPES


class _Layer(nn.Module):
    """A layer whose forward ``kernels`` assigns to modules of other classes.

    If the weight has another dtype than the input, the output dtype depends on the module's class, although the layer
    name is the same. The class's own forward then runs.
    """

    can_torch_compile = True
    has_backward = True


class _RMSNorm(_Layer):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != self.weight.dtype:
            return type(self).forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class _RMSNormZeroCentered(_Layer):
    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps, weight_offset=1.0)


class _RMSNormGated(_Layer):
    """A gated norm, whose output has the input's dtype for every dtype of the weight."""

    weight: Tensor
    variance_epsilon: float
    activation: Activation

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if not _is_gate(gate, hidden_states):
            return type(self).forward(self, hidden_states, gate)
        gate = gate_beside(gate, hidden_states.dtype)
        shape, eps, activation = self.weight.shape, self.variance_epsilon, self.activation
        return gated_rms_norm(hidden_states, gate, shape, self.weight, eps, activation=activation)


def _is_gate(gate: object, input: Tensor) -> TypeGuard[Tensor]:
    """Returns whether the operator supports the gate, possibly cast; it does not support None or another shape."""
    return isinstance(gate, Tensor) and gate.dtype in DTYPES and gate.shape == input.shape


class _Here:
    """Implements the repository interface of ``kernels`` without a download."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Here) and other.layer is self.layer

    def __hash__(self) -> int:
        return hash(self.layer)

    def __str__(self) -> str:
        return f"normops ({self.layer.__name__})"


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": _RMSNorm,
    "RMSNormZeroCentered": _RMSNormZeroCentered,
    "RMSNormGated": _RMSNormGated,
}
DEVICES = ("cpu", "cuda")


def register_kernels() -> tuple[str, ...]:
    """Registers normops in the layer mapping of Hugging Face's package ``kernels``, for CPU and CUDA.

    ``model.use_kernels = True`` and ``kernels.kernelize`` then make models of transformers run normops, in layers with
    the names "RMSNorm" (Llama's kind), "RMSNormZeroCentered" and "RMSNormGated" (both in Qwen3-Next). These layers need
    no download. On CUDA they replace those that transformers would download, for the whole process. A layer "RMSNorm"
    whose weight has another dtype than its input runs the module's own forward. :func:`patch` finds more norms, and
    needs neither package.

    Returns:
        The names of the layers.

    Raises:
        RuntimeError: if ``kernels`` is not installed, or in a version that the installed transformers does not support.
            Layers of its models would then have no names, and would not run normops.

    Example:
        >>> import normops
        >>> normops.register_kernels()  # doctest: +SKIP
        ('RMSNorm', 'RMSNormZeroCentered', 'RMSNormGated')
    """
    found = _version("kernels")
    if found is None:
        raise RuntimeError("expected the package kernels to be installed, but it is not: pip install kernels")
    mapping = _mapping()
    if _version("transformers") is not None:
        of_transformers = _mapping_of_transformers(found)
        for name, devices in mapping.items():
            of_transformers.setdefault(name, {}).update(devices)
    from kernels import register_kernel_mapping

    register_kernel_mapping(mapping)
    return tuple(LAYERS)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _mapping() -> dict[str, Any]:
    from kernels import Mode

    modes = (Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE, Mode.INFERENCE | Mode.TORCH_COMPILE)
    return {name: {device: dict.fromkeys(modes, _Here(layer)) for device in DEVICES} for name, layer in LAYERS.items()}


def _mapping_of_transformers(kernels_version: str) -> dict[str, Any]:
    """Returns the mapping that transformers registers at each ``use_kernels``."""
    from transformers.integrations import hub_kernels
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        wanted = f">={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"
        raise RuntimeError(
            f"expected kernels {wanted}, with which transformers {_version('transformers')} works, but got "
            f"{kernels_version}: its layers then carry no names, and nothing would run normops. "
            f"pip install 'kernels{wanted}' if there is one, or use normops.patch(model), which needs neither"
        )
    return hub_kernels.get_kernel_mapping_transformers()
