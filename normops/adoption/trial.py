"""Calls a module's forward with test tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normops.adoption.following import SLOTS, Run, follow
from normops.adoption.guards import Guards


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns the shape of a parameter with all its shards; a parameter that DeepSpeed has sharded is empty itself."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


MOST_DIMS = 5
"""The maximum number of dimensions of an input: the module's own forward runs for more."""


@dataclass(frozen=True)
class Case:
    """The arguments of a forward.

    Training and gradient mode are not part of a case, because a forward that reads them is refused.
    """

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of a row."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
    """The dtypes of input, parameters and gate."""

    def __str__(self) -> str:
        """Returns a text for the reason of a refusal."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(self.dtypes))
        dims = len(self.rows) + len(self.shape)
        return f"for {dims} dimensions, in {dtypes}"


class Trial:
    """Runs a module's forward with test parameters."""

    dim: int | None = None
    """The normalized dimension, if it is not the last one."""
    parameter_ones = 0
    """The number of dimensions of size 1 that the parameters have after that one."""

    def __init__(self, module: nn.Module, parameters: list[str], arguments: list[str]) -> None:
        self.module, self.parameters, self.arguments = module, parameters, arguments
        self.shape = whole_shape(module.get_parameter(parameters[0])) if parameters else None
        """The shape of each parameter."""
        self.guards = Guards()

    @property
    def is_gated(self) -> bool:
        """Returns whether the forward takes a second tensor."""
        return len(self.arguments) == 2

    def takes(self, rows: tuple[int, ...]) -> bool:
        """Returns whether an input may have these row dimensions."""
        return True

    def tensors(self, case: Case) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns parameters and arguments of the forward. All elements are 1, because no graph depends on them."""

        def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.ones(shape, dtype=dtype, device="cpu", requires_grad=True)

        of_parameter = (*(self.shape or ())[:-1], case.shape[-1])
        parameters: dict[str, Tensor] = {
            name: nn.Parameter(ones(of_parameter, case.dtypes[1])) for name in self.parameters
        }
        dtypes = (case.dtypes[0], case.dtypes[2])[: len(self.arguments)]
        return parameters, [ones((*case.rows, *case.shape), dtype) for dtype in dtypes]

    def follow(self, case: Case) -> Run:
        """Returns a run of the forward."""
        parameters, tensors = self.tensors(case)
        with torch.enable_grad():
            arguments = list(zip(self.arguments, tensors, strict=True))
            return follow(self.module, parameters, arguments, len(case.shape), self.guards)

    def call(self, parameters: Mapping[str, Tensor], *tensors: Tensor) -> Tensor:
        """Returns the forward's result with these tensors, from a copy of the module that its class does not make."""
        copy = object.__new__(type(self.module))
        copy.__dict__.update({name: value for name, value in vars(self.module).items() if name not in SLOTS})
        copy.__dict__["_parameters"] = {**self.module._parameters, **parameters}
        copy.__dict__["_buffers"] = dict(self.module._buffers)
        return type(self.module).forward(copy, *tensors)
