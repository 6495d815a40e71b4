"""normops.rms_norm goes past torch.ops, and through it where somebody has to see the call."""

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import normops
from normops import _C
from reference import cases

OP = torch.ops.normops.rms_norm.default


def goes_direct(*arguments: object) -> bool:
    return _C.rms_norm(*arguments) is not NotImplemented  # type: ignore[arg-type]


def test_direct_for_plain_arguments() -> None:
    x, w = cases.values((3, 8), torch.float32), nn.Parameter(torch.ones(8))
    for shape in (8, (8,), [8], torch.Size([8])):
        assert goes_direct(x, shape, w, 1e-5, 0.0, "gemma")
    assert goes_direct(x, (3, 8), None, None, 1.0, "llama")
    plain = (x, 8, w, 1e-5, 0.0, "gemma")
    assert not goes_direct(*plain[:2])
    for index, other in ((3, 1), (4, 0), (1, True), (0, 8), (5, None)):
        assert not goes_direct(*plain[:index], other, *plain[index + 1 :])


class Logged(Tensor):
    calls: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_subclass_sees_the_operator() -> None:
    Logged.calls.clear()
    x = cases.values((3, 8), torch.float32)
    output = normops.rms_norm(x.as_subclass(Logged), 8)
    assert type(output) is Logged
    assert torch.ops.normops.rms_norm in Logged.calls or OP in Logged.calls
    assert torch.equal(output.as_subclass(Tensor), normops.rms_norm(x, 8))


def test_a_subclass_sees_the_addition_too() -> None:
    Logged.calls.clear()
    x = cases.values((3, 8), torch.float32)
    outputs = normops.add_rms_norm(x.as_subclass(Logged), x, 8)
    assert all(type(output) is Logged for output in outputs)
    assert {torch.ops.normops.add_rms_norm, torch.ops.normops.add_rms_norm.default} & set(Logged.calls)
    assert _C.add_rms_norm(x, x, 8, None, None, 0.0, "gemma", 1.0) is not NotImplemented


def test_the_gated_norm_goes_direct_too() -> None:
    x = cases.values((3, 8), torch.float32)
    arguments = (x, x, 8, None, None, 0.0, "gemma", "silu", True)
    assert _C.gated_rms_norm(*arguments) is not NotImplemented
    for index, other in ((5, 0), (7, b"silu"), (7, "\udc00"), (7, None), (8, 1), (1, x.as_subclass(Logged))):
        changed = [*arguments[:index], other, *arguments[index + 1 :]]
        assert _C.gated_rms_norm(*changed) is NotImplemented  # type: ignore[arg-type]
    Logged.calls.clear()
    assert type(normops.gated_rms_norm(x.as_subclass(Logged), x, 8)) is Logged
    assert {torch.ops.normops.gated_rms_norm, torch.ops.normops.gated_rms_norm.default} & set(Logged.calls)


def test_the_rotated_norm_goes_direct_too() -> None:
    x = cases.values((3, 8), torch.float32)
    arguments = (x, x, x, 8, None, None, 0.0, "gemma", False, 8, 0)
    assert _C.rms_norm_rope(*arguments) is not NotImplemented
    assert _C.rms_norm_rope(*arguments[:9], None, 0) is not NotImplemented
    for index, other in ((8, 1), (9, 8.0), (9, 2**70), (10, None), (10, True), (1, x.as_subclass(Logged))):
        changed = [*arguments[:index], other, *arguments[index + 1 :]]
        assert _C.rms_norm_rope(*changed) is NotImplemented  # type: ignore[arg-type]
    Logged.calls.clear()
    assert type(normops.rms_norm_rope(x.as_subclass(Logged), x, x, 8)) is Logged
    assert {torch.ops.normops.rms_norm_rope, torch.ops.normops.rms_norm_rope.default} & set(Logged.calls)


def test_a_function_mode_sees_the_operator() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        normops.rms_norm(torch.ones(3, 8), 8)
    assert torch.ops.normops.rms_norm in seen or OP in seen


def test_a_dispatch_mode_sees_the_operator() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, 8, requires_grad=True)
    with Mode():  # type: ignore[no-untyped-call]
        normops.rms_norm(x, 8).sum().backward()
    assert OP in seen
    assert torch.ops.normops.rms_norm_backward.default in seen


def test_jit_trace_records_the_operator() -> None:
    x = cases.values((3, 8), torch.float32)
    traced = torch.jit.trace(lambda x: normops.rms_norm(x, 8, None, 1e-3), x, check_trace=False)
    assert "normops::rms_norm" in str(traced.graph)
    other = cases.values((3, 8), torch.float32, 1)
    assert torch.equal(traced(other), normops.rms_norm(other, 8, None, 1e-3))


@pytest.mark.parametrize("strict", [True, False])
def test_export_records_the_operator(strict: bool) -> None:
    exported = torch.export.export(normops.RMSNorm(8), (torch.ones(3, 8),), strict=strict)
    assert [node.target for node in exported.graph.nodes if node.op == "call_function"] == [OP]


def test_the_profiler_names_the_operator() -> None:
    with torch.profiler.profile() as profile:
        normops.rms_norm(torch.ones(3, 8), 8)
    assert "normops::rms_norm" in {event.key for event in profile.key_averages()}
