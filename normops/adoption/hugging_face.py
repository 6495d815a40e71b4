"""normops in the mapping of Hugging Face's package ``kernels``, from layer names to what computes them."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeGuard

from torch import Tensor, nn

from normops.adoption.computing import gate_beside
from normops.functional import Activation, gated_rms_norm, rms_norm
from normops.inductor.calls import DTYPES


class _Layer(nn.Module):
    """Nothing but a forward, which ``kernels`` puts into modules of other classes.

    Where a weight of another dtype decides on the dtype of the output, classes with one name do so in several ways:
    their own forward, which the class still has, then computes.
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
    """Its output has the dtype of its input, whatever that of the weight."""

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
    """Whether the operator can take the gate, perhaps cast; it cannot if that is None, or has another shape."""
    return isinstance(gate, Tensor) and gate.dtype in DTYPES and gate.shape == input.shape


class _Here:
    """What ``kernels`` calls a repository; nothing has to be fetched."""

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
    """Puts normops into the kernel mapping of Hugging Face's package ``kernels``, for CPU and CUDA.

    Models of transformers then run it after ``model.use_kernels = True``, or ``kernels.kernelize``: layers that carry
    the names "RMSNorm" (the kind of Llama), "RMSNormZeroCentered" and "RMSNormGated" (of Qwen3-Next). Nothing is
    downloaded for them; on CUDA they take the place of those that transformers would fetch, for the whole process. A
    norm whose weight has another dtype than its input is computed by its own forward, unless it is gated. :func:`patch`
    finds more norms, and needs neither package.

    Returns:
        The names.

    Raises:
        RuntimeError: if ``kernels`` is not installed, or not in a version that the installed transformers works with:
            no layer of its models would have a name, and nothing would run normops.

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
    """What ``use_kernels`` registers, each time."""
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
