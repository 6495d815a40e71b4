"""Runs a module's own forward on the CPU with test tensors, without an effect on the module or on the process."""

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from normops.adoption.norm import DTYPES, Unfit

SLOTS = ("_old_forward", "forward")
"""The attributes that may hold a module's forward; accelerate's hooks use the second."""

INTERNAL = frozenset(vars(nn.Module()))
"""The attributes of every module."""

LARGEST = 24576
"""The maximum number of elements of a weight: a module with more is not a norm, and is not run."""

_one_at_a_time = RLock()  # catch_warnings changes the filters of all threads


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns the shape of a parameter with all its shards; a parameter that DeepSpeed has sharded is empty itself."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def parameters_of(module: nn.Module) -> list[str]:
    """Returns the names of the parameters: at most a weight and a bias, which have one shape and dtype."""
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if len(parameters) > 2:
        raise Unfit(f"has the parameters {', '.join(parameters)}, more than a weight and a bias")
    for name, parameter in parameters.items():
        if type(parameter) not in (nn.Parameter, *_sharded()):
            raise Unfit(f"its {name} is a {type(parameter).__name__}, not a plain parameter")
        if parameter.dtype not in DTYPES:
            raise Unfit(f"its {name} is {str(parameter.dtype).removeprefix('torch.')}")
        shape = whole_shape(parameter)
        is_of_channels = len(shape) > 1 and shape.numel() == shape[0]
        if len(shape) == 0 or shape.numel() < 2 or (shape[-1] == 1 and not is_of_channels):
            raise Unfit(f"has a {name} of the shape {tuple(shape)}, not one for each column of a row")
        if shape.numel() > LARGEST:
            raise Unfit(f"has a {name} of {shape.numel()} elements, more than any norm")
    if len({(whole_shape(parameter), parameter.dtype) for parameter in parameters.values()}) > 1:
        raise Unfit(f"its {' and its '.join(parameters)} differ in shape or dtype")
    return [*parameters]


def _sharded() -> tuple[type, ...]:
    """Returns DTensor, if it has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Runs code on the CPU outside of autocast, and restores the random generators."""
    numpy = sys.modules.get("numpy")
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


class Original:
    """A module's own forward, run on a copy of the module's attributes."""

    def __init__(self, module: nn.Module) -> None:
        """Copies the attributes.

        Raises:
            Unfit: if an attribute cannot be copied, or is a tensor that is no parameter.
        """
        self._cls = type(module)
        self.shape = next((tuple(whole_shape(p)) for p in module.parameters(recurse=False)), None)
        """The shape of the parameters."""
        self._absent = [name for name, parameter in module._parameters.items() if parameter is None]
        self._buffers = {name: None if b is None else tuple(b.shape) for name, b in module._buffers.items()}
        self.attributes: dict[str, Any] = {}
        for name, value in vars(module).items():
            if name in INTERNAL or name in SLOTS:
                continue
            if isinstance(value, Tensor):
                raise Unfit(f"has {name}, a tensor that is no parameter")
            try:
                self.attributes[name] = copy.deepcopy(value)
            except Exception as error:
                raise Unfit(f"its {name} cannot be copied") from error
        self.trials = 0
        self.failure = "does not run on its own"
        """The reason if no input is accepted."""

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        *tensors: Tensor,
        training: bool = False,
        buffer: float = 0.5,
        **attributes: Any,
    ) -> Tensor:
        """Calls the forward.

        Raises:
            Unfit: if the result is not a new tensor of the input's shape, or if the forward writes to its arguments.
        """
        module: Any = object.__new__(self._cls)
        own = {**vars(nn.Module()), **self.attributes, **attributes}
        own["_parameters"] = {**dict.fromkeys(self._absent), **parameters}
        own["_buffers"] = {
            name: None if s is None else torch.full(s, buffer, dtype=torch.float32) for name, s in self._buffers.items()
        }
        own["training"] = training
        vars(module).update(own)
        given = [*parameters.values(), *tensors]
        versions = [tensor._version for tensor in given]
        self.trials += 1
        result = self._cls.forward(module, *tensors)
        if not isinstance(result, Tensor) or result.shape != tensors[0].shape:
            self.failure = "returns something else than a tensor of its input's shape"
            raise ValueError(self.failure)
        if any(result is tensor or result._base is tensor for tensor in given):
            raise Unfit("returns its input, or a view of it")
        if versions != [tensor._version for tensor in given]:
            raise Unfit("writes to its input or its parameters")
        now = vars(module)
        if now.keys() != own.keys() or any(now[name] is not value for name, value in own.items()):
            raise Unfit("writes to its attributes")
        return result


def attempted(call: Callable[[], Tensor]) -> Tensor | None:
    """Returns a result, or None if the forward raises an error, as the patched module then would, too."""
    with suppress(NotImplementedError, RuntimeError, TypeError, ValueError, AssertionError, IndexError):
        return call()
    return None
