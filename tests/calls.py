"""Records which operators of normops run."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Collects the operators' names, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.names)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "normops":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
