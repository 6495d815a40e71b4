"""Calls the launchers of the CUDA kernels, as they were built in place, and runs the PTX that they launch.

cuda_runtime_stub.cpp replaces the CUDA runtime and passes launched kernels to the interpreter in ptx.
"""

import ctypes
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from ctypes import Structure
from pathlib import Path
from typing import Any

import fake_gpus
import pytest
import torch
from cuda_code import cuobjdump
from fake_gpu_builds import BUILT, RUNTIME, compiled, need_cuda, toolkit_includes
from kept_builds import kept
from ptx.machine import Launch, Machine
from ptx.memory import Memory, memory_of
from ptx.program import Kernel, kernels_of
from structures import TENSORS, read_structs
from torch import Tensor

from reference.cases import DTYPES, Case, compute_dtype
from reference.operators import OPERATORS, Operator, narrower_or_wider

LIBRARY = "libcuda_kernels.so"


def is_quick(case: Case) -> bool:
    """Returns False for many float64 rows, which take the interpreter 512 threads each."""
    return case.dtype != torch.float64 or math.prod(case.shape[:-1]) <= 10


def build_library() -> Path:
    """Links the launchers of the build with the stub, and returns the library, with the PTX of the build beside it."""
    need_cuda()
    objects = sorted(BUILT.glob("cuda/*.o"))
    added = [compiled(source, "-O1", *toolkit_includes()) for source in ("cuda_launchers.cpp", RUNTIME)]

    def build(folder: Path) -> None:
        subprocess.run(["g++", "-shared", *map(str, objects), *added, "-o", str(folder / LIBRARY)], check=True)
        for path in objects:
            subprocess.run([cuobjdump(), "-xptx", "all", str(path)], cwd=folder, stdout=subprocess.PIPE, check=True)

    return kept("cuda_on_ptx", build, objects, *added) / LIBRARY


def ptx_of(library: Path, arch: int) -> dict[str, Kernel]:
    """Returns the kernels that the build embeds as PTX: of its last architecture, and of those with ``+PTX``."""
    files = [*library.parent.glob(f"*.sm_{arch}.ptx")]
    if not files:
        pytest.skip(f"the build has no PTX for sm_{arch}; TORCH_CUDA_ARCH_LIST='8.0+PTX;9.0' has all that is tested")
    return {name: kernel for path in files for name, kernel in kernels_of(path.read_text()).items()}


# The stub calls it with the kernel's name, grid, block, blocks of a cluster, bytes of shared memory, whether the kernel
# starts early, and pointers to its arguments.
Run = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
)

# Allocates a number of partial sums of grad_weight and returns their address.
Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64)


class Gpu:
    """Runs the PTX of the kernels that a library launches through the stub."""

    def __init__(self, kernels: dict[str, Kernel], memory: Callable[[], Memory]) -> None:
        self.kernels, self._memory = kernels, memory
        self.ran: Counter[str] = Counter()
        self.seed = self.hardware = 0
        self.error: BaseException | None = None
        self.run = Run(self._launched)

    def _launched(self, name: bytes, grid: Any, block: Any, cluster: int, shared: int, early: int, args: Any) -> int:
        try:
            kernel = self.kernels[name.decode()]
            params = bytearray(kernel.param_bytes)
            for number, (offset, size) in enumerate(kernel.params.values()):
                params[offset : offset + size] = ctypes.string_at(args[number], size)
            sizes = (grid[0], grid[1], grid[2]), (block[0], block[1], block[2])
            launch = Launch(kernel, *sizes, bytes(params), self._memory(), cluster, shared, bool(early), seed=self.seed)
            launch.hardware = self.hardware
            # Scheduling single warps takes many times as long as running all threads together.
            is_small = math.prod(launch.grid + launch.block) <= 1024
            launch.group = ("grid", "block", "warp" if is_small else "cluster")[self.seed % 3]
            machine = Machine(launch)
            machine.run()
            assert (machine.has_triggered == launch.starts_early).all(), f"{kernel.name}: launch_dependents"
            self.ran[kernel.name] += 1
            return 0
        except BaseException as error:
            self.error = error  # check() raises it
            return 1

    def check(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


_structs = read_structs()
RowLayout, RowsArg, RowConfig, Weight, Gating, Rounding, Rotation, KernelArgs, Device = (
    _structs[name]
    for name in (
        *("RowLayout", "RowsArg", "RowConfig"),
        *("Weight", "Gating", "Rounding", "Rotation", "KernelArgs", "Device"),
    )
)


def device(multiprocessors: int = 2, shared_bytes: int = 227 << 10, cluster: int = 1, pdl: bool = True) -> Structure:
    """Returns a device; architectures without programmatic dependent launch ignore ``pdl``."""
    return Device(multiprocessors, shared_bytes, cluster, pdl)


FORMED, GIVEN, WANTED = range(3)
"""The values of Sums in csrc/kernel_args.h."""

ACTIVATIONS = ("silu", "sigmoid", "identity")
"""The activations, in the order of csrc/kernel_args.h."""

ROUNDINGS = {"once": (False, False), "llama": (True, True)}
"""The members of Rounding, as in csrc/check.cpp."""

GUARD = 64  # elements before and after an output; a multiple of any alignment
UNTOUCHED = 0x5A
END = 1024  # the kernel sums this many columns at either end of a wide weight, torch sums the others


class Output:
    """Rows to write, with guard memory around them that must stay unchanged."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0, padding: int = 0) -> None:
        cols = shape[-1]
        strides = [1]
        for size in (cols + padding, *shape[-2:0:-1]):
            strides.append(strides[-1] * size)
        strides = strides[: len(shape)][::-1]
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        self.memory = torch.full(((2 * GUARD + offset + reach) * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8)
        self.place = (shape, strides, GUARD + offset)
        self.rows = self.memory.view(dtype).as_strided(*self.place)

    def result(self) -> Tensor:
        """Returns a copy of the rows, after a check that the memory around them is untouched."""
        result = self.rows.clone()
        around = self.memory.clone()
        around.view(self.rows.dtype).as_strided(*self.place).view(torch.uint8).fill_(UNTOUCHED)
        assert (around == UNTOUCHED).all(), "written outside of the rows"
        return result


def flat(operator: Operator, name: str, value: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns an argument with its normalized dimensions flattened, as a view if possible."""
    if not isinstance(value, Tensor) or name in operator.tables:
        return value
    return (
        value.unsqueeze(-1)
        if name in operator.sums
        else value.flatten(value.dim() - len(arguments["normalized_shape"]))
    )


def targets_of(
    operator: Operator, arguments: Mapping[str, Any], offset: int = 0, padding: int = 0
) -> dict[str, Output]:
    """Allocates outputs of rows, or of one number per row, with an offset and padding in elements."""
    shape = tuple(flat(operator, "input", arguments["input"], arguments).shape)
    return {
        name: Output(
            (*shape[:-1], 1) if name in operator.sums else shape, operator.dtype_of(name, arguments), offset, padding
        )
        for name in operator.outputs
        if name not in ("grad_weight", "grad_bias")
    }


def row_layout(tensor: Tensor) -> Structure | None:
    """Returns the layout of make_rows in csrc/tensor_rows.cpp for one normalized dimension; None if it needs a copy."""
    layout = RowLayout()
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return None
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        last = layout.dims - 1
        stride_bytes = stride * tensor.itemsize
        if size == 1:
            continue
        if layout.dims > 0 and layout.strides[last] == stride_bytes * size:
            layout.sizes[last] *= size
            layout.strides[last] = stride_bytes
        elif layout.dims == 8:
            return None
        else:
            layout.sizes[layout.dims] = size
            layout.strides[layout.dims] = stride_bytes
            layout.dims += 1
    return layout


def launcher_of(operator: Operator) -> str:
    """Returns the function that launches the kernels; operators with sums share that of the operator without."""
    return re.sub("(_from)?_stats$", "", operator.name)


class Kernels:
    """The functions of cuda_kernels.cu.

    ``seed`` selects the order in which threads run and the size of their groups.
    """

    def __init__(self, arch: int) -> None:
        library = build_library()
        self._library = ctypes.CDLL(str(library))
        self._library.stub_gpu.restype = ctypes.POINTER(fake_gpus.Gpu)
        self._arch = arch
        self._tensors: list[tuple[str, Tensor, bool]] = []
        self._memory: Memory | None = None
        self.gpu = Gpu(ptx_of(library, arch), self._memory_of_call)
        sizes = (ctypes.c_int64 * len(_structs)).in_dll(self._library, "structure_bytes")
        assert list(sizes) == [ctypes.sizeof(struct) for struct in _structs.values()]
        for operator in OPERATORS:
            getattr(self._library, launcher_of(operator)).restype = ctypes.c_char_p
        self._library.grad_weight.restype = ctypes.c_char_p
        for name in ("forward_config_of", "backward_config_of", "gated_config_of", "rope_config_of"):
            getattr(self._library, name).restype = RowConfig

    def _memory_of_call(self) -> Memory:
        self._memory = self._memory or memory_of(self._tensors)
        return self._memory

    def _rows(self, name: str, tensor: Tensor, is_written: bool = False) -> Structure:
        """Returns rows as kernels take them, and keeps the memory alive until the kernels have run."""
        layout = row_layout(tensor)
        if layout is None:
            tensor = tensor.contiguous()
            layout = row_layout(tensor)
            assert layout is not None
        self._tensors.append((name, tensor, is_written))
        return RowsArg(tensor.data_ptr(), DTYPES.index(tensor.dtype), layout)

    def _choose_device(self, on: Structure) -> None:
        # Launchers query a device once, so each number of multiprocessors needs another device index.
        self._library.stub_set_device(on.multiprocessors)
        self._library.stub_gpu(on.multiprocessors).contents.multiprocessors = on.multiprocessors
        on.pdl = on.pdl and self._arch >= 90

    def _call(self, function: str, *arguments: Any, on: Structure | None = None, seed: int = 0) -> None:
        """Calls a function whose kernels may access only the rows taken since the previous call."""
        if on is not None:
            self._choose_device(on)
        self._library.stub_run_kernels(self.gpu.run)
        self.gpu.seed = seed
        message = getattr(self._library, function)(*arguments, *([ctypes.byref(on)] if on is not None else []))
        self._tensors, self._memory = [], None
        self.gpu.check()
        assert message is None, message.decode()

    def config(self, operator: Operator, dtype: torch.dtype, packs: int, on: Structure) -> Structure:
        """Returns the launch configuration of rows of ``packs`` packs, or of twice as many for rotated rows."""
        kind = "rope" if operator.tables else "gated" if "gate" in operator.tensors else "forward"
        of_dtype = []
        if kind == "forward" and "grad_output" in operator.tensors:
            kind, of_dtype = "backward", [16 // dtype.itemsize, compute_dtype(dtype).itemsize]
        function = getattr(self._library, f"{kind}_config_of")
        return function(*map(ctypes.c_int64, [packs, *of_dtype]), ctypes.byref(on))

    def partials(self, dtype: torch.dtype, rows: int, cols: int, on: Structure, groups: int = 1) -> int:
        """Returns the number of partial sums that rms_norm_backward allocates per group, without running the kernel."""
        args, tensors = KernelArgs(rows=rows, cols=cols, size=cols), [RowsArg(), RowsArg(), RowsArg()]
        args.weight.groups = groups
        for name, tensor in zip(("input", "grad_output", "grad_weight"), tensors, strict=True):
            tensor.dtype = DTYPES.index(dtype)
            args.tensors[TENSORS.index(name)] = ctypes.addressof(tensor)
        counts: list[int] = []
        self._choose_device(on)
        self._library.stub_run_kernels(Run())
        message = self._library.rms_norm_backward(ctypes.byref(args), Allocate(counts.append), ctypes.byref(on))
        assert message is None, message.decode()
        (count,) = counts
        return count

    def call(
        self,
        operator: Operator,
        arguments: Mapping[str, Any],
        targets: Mapping[str, Output] | None = None,
        on: Structure | None = None,
        seed: int = 0,
    ) -> tuple[Tensor | None, ...]:
        """Returns the results of the kernels that an operator launches with these arguments, written to ``targets``."""
        on, targets = on or device(), targets or targets_of(operator, arguments)
        given = {name: flat(operator, name, value, arguments) for name, value in arguments.items()}
        mask = given.get("output_mask", [True] * len(operator.outputs))
        wanted = [
            name for name, is_wanted in zip(operator.outputs, mask, strict=True) if is_wanted and name != "grad_bias"
        ]
        if "grad_input" not in wanted:
            given["grad_residual"] = None
        written: dict[str, Output | None] = {name: targets.get(name) for name in wanted}
        bias = given.pop("bias", None)
        if bias is not None and "grad_output" not in given:  # as TensorArgs::add_input in csrc/tensor_args.cpp does
            dtypes = narrower_or_wider(given["input"].dtype)
            bias = bias if bias.dtype in dtypes else bias.to(compute_dtype(given["input"].dtype))
            given["bias"] = bias.expand_as(given["input"])
        args = self._args(operator, given)
        read = {name: value for name, value in given.items() if isinstance(value, Tensor) and name != "weight"}
        if operator.tables:
            read |= self._tables(given, args)
        tensors = {name: self._rows(name, tensor) for name, tensor in read.items()}
        tensors |= {name: self._rows(name, out.rows, True) for name, out in written.items() if out is not None}
        for name, rows in tensors.items():
            args.tensors[TENSORS.index(name)] = ctypes.addressof(rows)

        def allocate(count: int) -> int | None:
            partials = written["grad_weight"] = Output((count, args.weight.groups * args.cols), sums_dtype)
            address: int | None = self._rows("partials", partials.rows, True).data
            return address

        sums_dtype, grad_weight = compute_dtype(given["input"].dtype), RowsArg()
        if "grad_weight" in wanted and given["weight"] is not None:
            args.tensors[TENSORS.index("grad_weight")] = ctypes.addressof(grad_weight)
        of_backward = [Allocate(allocate)] if "grad_output" in given else []
        self._call(launcher_of(operator), ctypes.byref(args), *of_backward, on=on, seed=seed)
        shape = arguments["input"].shape
        results: dict[str, Tensor | None] = {
            name: output.result().squeeze(-1) if name in operator.sums else output.result().view(shape)
            for name, output in written.items()
            if output is not None and name != "grad_weight"
        }
        results["grad_weight"] = self._grad_weight(given["input"], arguments.get("weight"), written, on, seed)
        return tuple(results.get(name) for name in operator.outputs)

    def _args(self, operator: Operator, given: Mapping[str, Any]) -> Structure:
        """Returns the kernels' arguments except for the tensors."""
        input, eps = given["input"], given.get("eps")
        cols = input.shape[-1]
        args = KernelArgs(
            rows=input.shape[:-1].numel(),
            cols=cols,
            size=given.get("row_size", cols),
            eps=torch.finfo(compute_dtype(input.dtype)).eps if eps is None else eps,
            alpha=given.get("alpha", 1.0),
            weight=self._weight(given.get("weight"), given.get("weight_offset", 0.0)),
            rounding=Rounding(*ROUNDINGS[given.get("rounding", "once")]),
            sums=GIVEN if "row_size" in given else WANTED if "square_sum" in operator.outputs else FORMED,
        )
        if "activation" in given:
            args.gating = Gating(ACTIVATIONS.index(given["activation"]), given["norm_before_gate"])
        return args

    def _tables(self, given: Mapping[str, Any], args: Structure) -> dict[str, Tensor]:
        """Sets the rotation and expands cos and sin like TensorArgs::rotate in csrc/tensor_args.cpp."""
        cos, sin, rotary_dim = given["cos"], given["sin"], given.get("rotary_dim")
        columns = cos.shape[-1]
        pairs = (columns if rotary_dim is None else rotary_dim) // 2
        interleaved, offset = given.get("interleaved", False), given.get("rotary_offset", 0)
        args.rotation = Rotation(interleaved, columns == pairs, offset, pairs)
        are_alike = cos.stride() == sin.stride()
        return {
            name: (table if are_alike else table.contiguous()).expand(*given["input"].shape[:-1], -1)
            for name, table in (("cos", cos), ("sin", sin))
        }

    def _grad_weight(
        self, input: Tensor, weight: Tensor | None, written: Mapping[str, Output | None], on: Structure, seed: int
    ) -> Tensor | None:
        partials = written.get("grad_weight")
        if partials is None or weight is None:
            return None
        dtype = DTYPES.index(input.dtype)
        sums = partials.result()
        cols = sums.shape[1]
        if cols <= 2 * END:
            return self._sum_columns(dtype, sums, weight.dtype, on, seed).view(weight.shape)
        # A block uses 1024 threads to sum 32 columns: interpreting all columns would take most of the time.
        last = END + cols % 32
        summed = (
            self._sum_columns(dtype, sums[:, :END], weight.dtype, on, seed),
            sums[:, END:-last].sum(0).to(weight.dtype),
            self._sum_columns(dtype, sums[:, -last:], weight.dtype, on, seed),
        )
        return torch.cat(summed).view(weight.shape)

    def _sum_columns(self, dtype: int, partials: Tensor, weight_dtype: torch.dtype, on: Structure, seed: int) -> Tensor:
        partials = partials.contiguous()
        count, cols = partials.shape
        grad_weight = Output((cols,), weight_dtype)
        self._call(
            "grad_weight",
            dtype,
            DTYPES.index(weight_dtype),
            ctypes.c_void_p(self._rows("partials", partials).data),
            ctypes.c_int64(count),
            ctypes.c_int64(cols),
            ctypes.c_void_p(self._rows("grad_weight", grad_weight.rows, True).data),
            on=on,
            seed=seed,
        )
        return grad_weight.result()

    def _weight(self, weight: Tensor | None, offset: float) -> Structure:
        if weight is None:
            return Weight(None, 0, offset, 1)
        self._tensors.append(("weight", weight, False))
        return Weight(weight.data_ptr(), DTYPES.index(weight.dtype), offset, weight.shape[:-1].numel())
