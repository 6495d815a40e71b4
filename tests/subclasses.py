"""Tensor subclasses that define ``__torch_dispatch__``."""

from torch import Tensor
from torch.utils._pytree import tree_map_only


class KnowsTorchAlone(Tensor):
    """Wraps a tensor and rejects operators that are not torch's own."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "KnowsTorchAlone":
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return "KnowsTorchAlone()"  # torch's own reads values, which tracing does not have

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *others: object) -> "KnowsTorchAlone":
        return KnowsTorchAlone(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if func.namespace != "aten":
            raise NotImplementedError(str(func))
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))
