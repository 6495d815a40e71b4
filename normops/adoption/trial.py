"""Calls of a module's forward, with tensors of our own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normops.adoption.following import SLOTS, Run, follow
from normops.adoption.guards import Guards


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of a parameter, all shards together; one that DeepSpeed has sharded is itself empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


MOST_DIMS = 5
"""The most dimensions of an input: those with more go to a module's own forward."""


@dataclass(frozen=True)
class Case:
    """How a forward is called.

    Training or not, and with gradients or without, are no cases: a forward that asks for these is refused.
    """

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of a row."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
    """The dtypes of input, parameters and gate."""

    def __str__(self) -> str:
        """In words, for the reason of a refusal."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(self.dtypes))
        dims = len(self.rows) + len(self.shape)
        return f"for {dims} dimensions, in {dtypes}"


class Trial:
    """Runs of a module's forward with parameters of our own."""

    dim: int | None = None
    """The dimension that is normalized, if it is not the last one."""
    parameter_ones = 0
    """How many dimensions of size 1 the parameters have behind that."""

    def __init__(self, module: nn.Module, parameters: list[str], arguments: list[str]) -> None:
        self.module, self.parameters, self.arguments = module, parameters, arguments
        self.shape = whole_shape(module.get_parameter(parameters[0])) if parameters else None
        """That of each parameter."""
        self.guards = Guards()

    @property
    def is_gated(self) -> bool:
        """Whether it takes a second tensor."""
        return len(self.arguments) == 2

    def takes(self, rows: tuple[int, ...]) -> bool:
        """Whether an input may have so many dimensions of rows."""
        return True

    def tensors(self, case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Parameters, and the arguments of the forward. They are full of ones, as nobody looks at their numbers."""

        def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.ones(shape, dtype=dtype, device="cpu", requires_grad=True)

        of_parameter = (*(self.shape or ())[:-1], case.shape[-1])
        parameters: dict[str, Tensor] = {
            name: nn.Parameter(ones(of_parameter, case.dtypes[1])) for name in self.parameters
        }
        dtypes = (case.dtypes[0], case.dtypes[2])[: len(self.arguments)]
        return parameters, [ones((*case.rows, *case.shape), dtype) for dtype in dtypes]

    def follow(self, case: Case) -> Run:
        """What the forward does."""
        parameters, tensors = self.tensors(case)
        with torch.enable_grad():
            arguments = list(zip(self.arguments, tensors, strict=True))
            return follow(self.module, parameters, arguments, len(case.shape), self.guards)

    def call(self, parameters: Mapping[str, Tensor], *tensors: Tensor) -> Tensor:
        """What the forward returns: that of a copy of the module, made without asking its class, with these."""
        copy = object.__new__(type(self.module))
        copy.__dict__.update({name: value for name, value in vars(self.module).items() if name not in SLOTS})
        copy.__dict__["_parameters"] = {**self.module._parameters, **parameters}
        copy.__dict__["_buffers"] = dict(self.module._buffers)
        return type(self.module).forward(copy, *tensors)
