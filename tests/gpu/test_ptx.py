"""Tests the interpreter of PTX in which tests/gpu/triton_on_ptx.py and tests/gpu/cuda_on_ptx.py run kernels."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx.machine import Launch, Machine
from ptx.memory import Memory, Region
from ptx.program import BYTES, NUMPY, PtxError, UnknownPtxError, kernels_of
from ptx.translate import OPCODES

Array = Any
LIBM = ctypes.CDLL("libm.so.6")
LIBM.fmaf.argtypes, LIBM.fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
LIBM.fma.argtypes, LIBM.fma.restype = [ctypes.c_double] * 3, ctypes.c_double

TEMPLATE = """
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
.visible .entry test({params})
.maxntid 128
{{
	.reg .pred %p<9>;
	.reg .b16 %h<9>;
	.reg .b32 %r<99>;
	.reg .f32 %f<9>;
	.reg .b64 %rd<99>;
	.reg .f64 %d<9>;
	.shared .align 16 .b8 static[512];
	mov.u32 %r90, %tid.x;
	mov.u32 %r91, %ctaid.x;
	mov.u32 %r92, %ctaid.y;
	mov.u32 %r93, %nctaid.x;
	mov.u32 %r94, %ntid.x;
	mad.lo.s32 %r95, %r92, %r93, %r91;
	mad.lo.s32 %r95, %r95, %r94, %r90;
	mul.wide.u32 %rd90, %r95, 4;
{body}
	ret;
}}
"""


def run(body: str, arrays: list[Array], written: tuple[int, ...] = (-1,), threads: int = 32, **options: Any) -> None:
    """Runs a kernel with ``arrays`` as parameters; those in ``written`` are outputs, which it must not read first."""
    memory, params = Memory(), b""
    for number, array in enumerate(arrays):
        is_written = number in written or number - len(arrays) in written
        inside = np.arange(array.nbytes)
        readable, writable = (inside[:0], inside) if is_written else (None, None)
        memory.add(Region(array.ctypes.data, array.nbytes, f"array {number}", readable, writable))
        params += array.ctypes.data.to_bytes(8, "little")
    declared = ", ".join(f".param .u64 p{number}" for number in range(len(arrays)))
    kernel = kernels_of(TEMPLATE.format(params=declared, body=body))["test"]
    grid = options.pop("grid", (1, 1, 1))
    Machine(Launch(kernel, grid, (threads, 1, 1), params, memory, **options)).run()


def aligned(count: int, kind: str) -> Array:
    """Returns zeros at a multiple of 16 bytes."""
    memory = np.zeros(count * np.dtype(kind).itemsize + 16, "u1")
    begin = -memory.ctypes.data % 16
    return memory[begin : begin + count * np.dtype(kind).itemsize].view(kind)


def numbers(kind: str, count: int, seed: int) -> Array:
    """Returns numbers with random bits, special values, and values close to each other."""
    random = np.random.default_rng(seed)
    result = aligned(count, NUMPY[kind])
    result.view("u1")[:] = random.integers(0, 256, result.nbytes, "u1")
    if NUMPY[kind][0] == "f":
        result[::2] = random.standard_normal(result[::2].size).astype(result.dtype)
        result[:8] = [0, -0.0, np.inf, -np.inf, np.nan, 1, -1, np.finfo(result.dtype).smallest_subnormal]
        result[8:12] = 1 + np.finfo(result.dtype).eps * np.arange(1, 5)
    else:
        result[::2] = random.integers(-3, 40, result[::2].size).astype(result.dtype)
    return result


PLACES = {1: "h", 2: "h", 4: "r", 8: "rd"}
BITS = {"f32": "f", "f64": "d"}


def register(kind: str, number: int) -> str:
    return f"%{BITS.get(kind) or PLACES[BYTES[kind]]}{number}"


def accessed(kind: str) -> str:
    return kind if kind in BITS else f"b{8 * BYTES[kind]}"


def elementwise(opcode: str, of: list[str], to: str, operands: str | None = None, count: int = 64) -> list[Array]:
    """Runs an instruction with different numbers in each thread; returns its inputs and its output."""
    body, inputs = [], [numbers(kind, count, seed) for seed, kind in enumerate(of)]
    for number, kind in enumerate([*of, to]):
        size = BYTES[kind]
        address = f"%rd{50 + number}"
        body.append(f"ld.param.u64 {address}, [p{number}];\nmul.wide.u32 %rd80, %r95, {size};")
        body.append(f"add.s64 {address}, {address}, %rd80;")
        if number < len(of):
            body.append(f"ld.global.{accessed(kind)} {register(kind, number)}, [{address}];")
    target, sources = register(to, 8), ", ".join(register(kind, number) for number, kind in enumerate(of))
    body.append(f"{opcode} {operands.format(target, sources) if operands else f'{target}, {sources}'};")
    body.append(f"st.global.{accessed(to)} [%rd{50 + len(of)}], {target};")
    output = aligned(count, NUMPY[to])
    run("\n".join(body), [*inputs, output], threads=count)
    return [*inputs, output]


def bf16(x: Array) -> Array:
    return (x.astype("u4") << 16).view("f4")


def to_bf16(x: Array) -> Array:
    import torch

    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view("u2")


def fma(a: Array, b: Array, c: Array) -> Array:
    function = LIBM.fmaf if a.dtype == np.float32 else LIBM.fma
    return np.array([function(*operands) for operands in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)], a.dtype)


def toward_zero(a: Array, b: Array) -> Array:
    return np.array(
        [
            int(abs(x) // abs(y) * np.sign(x) * np.sign(y)) if y else 0
            for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
    )


def pairs(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *operands: function(*(operand.view("f2") for operand in operands)).view("u4")


USUAL: list[tuple[str, list[str], str, Callable[..., Array]]] = [
    ("add.s32", ["s32"] * 2, "s32", lambda a, b: a + b),
    ("sub.s64", ["s64"] * 2, "s64", lambda a, b: a - b),
    ("mul.lo.s32", ["s32"] * 2, "s32", lambda a, b: a * b),
    ("mul.wide.s32", ["s32"] * 2, "s64", lambda a, b: a.astype("i8") * b),
    ("mad.wide.u32", ["u32", "u32", "u64"], "u64", lambda a, b, c: a.astype("u8") * b + c),
    ("mad.lo.s32", ["s32"] * 3, "s32", lambda a, b, c: a * b + c),
    ("min.s32", ["s32"] * 2, "s32", np.minimum),
    ("max.u64", ["u64"] * 2, "u64", np.maximum),
    ("neg.s32", ["s32"], "s32", lambda a: -a),
    ("and.b32", ["b32"] * 2, "b32", lambda a, b: a & b),
    ("xor.b64", ["b64"] * 2, "b64", lambda a, b: a ^ b),
    ("not.b32", ["b32"], "b32", lambda a: ~a),
    ("shl.b32", ["b32", "u32"], "b32", lambda a, n: np.where(n < 32, a << (n % 32), 0)),
    ("shr.s32", ["s32", "u32"], "s32", lambda a, n: a >> np.minimum(n, 31).astype("i4")),
    ("shr.u64", ["u64", "u32"], "u64", lambda a, n: np.where(n < 64, a >> (n % 64).astype("u8"), 0)),
    ("add.rn.f32", ["f32"] * 2, "f32", lambda a, b: a + b),
    ("sub.rn.f64", ["f64"] * 2, "f64", lambda a, b: a - b),
    ("mul.rn.f32", ["f32"] * 2, "f32", lambda a, b: a * b),
    ("div.rn.f32", ["f32"] * 2, "f32", lambda a, b: a / b),
    ("fma.rn.f32", ["f32"] * 3, "f32", fma),
    ("fma.rn.f64", ["f64"] * 3, "f64", fma),
    ("abs.f64", ["f64"], "f64", np.abs),
    ("sqrt.rn.f32", ["f32"], "f32", np.sqrt),
    ("rcp.rn.f64", ["f64"], "f64", lambda a: 1 / a),
    ("add.rn.bf16", ["bf16"] * 2, "bf16", lambda a, b: to_bf16(bf16(a) + bf16(b))),
    ("fma.rn.f16x2", ["f16x2"] * 3, "f16x2", pairs(lambda a, b, c: (a.astype("f8") * b + c).astype("f2"))),
    ("abs.f16x2", ["f16x2"], "f16x2", pairs(np.abs)),
    ("cvt.s64.s32", ["s32"], "s64", lambda a: a.astype("i8")),
    ("cvt.u16.u32", ["u32"], "u16", lambda a: a.astype("u2")),
    ("cvt.rn.f32.s32", ["s32"], "f32", lambda a: a.astype("f4")),
    ("cvt.f64.f32", ["f32"], "f64", lambda a: a.astype("f8")),
    ("cvt.rn.f32.f64", ["f64"], "f32", lambda a: a.astype("f4")),
    ("cvt.f32.f16", ["f16"], "f32", lambda a: a.astype("f4")),
    ("cvt.rn.f16.f32", ["f32"], "f16", lambda a: a.astype("f2")),
    ("cvt.f32.bf16", ["bf16"], "f32", bf16),
    ("cvt.rn.bf16.f32", ["f32"], "bf16", to_bf16),
    (
        "cvt.rn.f16x2.f32",
        ["f32"] * 2,
        "f16x2",
        lambda a, b: b.astype("f2").view("u2") | (a.astype("f2").view("u2").astype("u4") << 16),
    ),
    ("mov.b32", ["b32"], "b32", lambda a: a),
]


IS_TRUE = "%p1, {1};\n\tselp.u32 {0}, 1, 0, %p1"


def bits_3_to_9(a: Array) -> Array:
    field = (a.view("u4") >> 3 & 0x7F).astype("i8")
    return field - (128 * (field >> 6) if a.dtype == np.int32 else 0)


def permuted(a: Array, b: Array) -> Array:
    first, second = (x.view("u1").reshape(-1, 4) for x in (a, b))
    return np.stack([first[:, 1], first[:, 0], first[:, 3], second[:, 3]], 1).view("u4").ravel()


# Opcode, types of operands and result, definition, and the format of the operands if there are more.
ARITHMETIC: list[tuple[str, list[str], str, Callable[..., Array], str | None]] = [
    *((*usual, None) for usual in USUAL),
    ("selp.b32", ["b32", "b32"], "b32", lambda a, b: b, "{0}, {1}, 0"),
    ("bfe.u32", ["u32"], "u32", bits_3_to_9, "{0}, {1}, 3, 7"),
    ("bfe.s32", ["s32"], "s32", bits_3_to_9, "{0}, {1}, 3, 7"),
    ("prmt.b32", ["b32"] * 2, "b32", permuted, "{0}, {1}, 0x7301U"),
    ("setp.lt.s32", ["s32"] * 2, "u32", np.less, IS_TRUE),
    ("setp.ge.u32", ["u32"] * 2, "u32", np.greater_equal, IS_TRUE),
    ("setp.eq.b64", ["b64"] * 2, "u32", np.equal, IS_TRUE),
    ("setp.le.f32", ["f32"] * 2, "u32", np.less_equal, IS_TRUE),
    ("setp.neu.f64", ["f64"] * 2, "u32", np.not_equal, IS_TRUE),
    ("setp.lt.f16", ["f16"] * 2, "u32", np.less, IS_TRUE),
    ("setp.gt.bf16", ["bf16"] * 2, "u32", lambda a, b: bf16(a) > bf16(b), IS_TRUE),
]


def assert_same(actual: Array, expected: Array) -> None:
    """Compares bits, except for those of NaN, which PTX does not specify."""
    expected = np.asarray(expected).astype(actual.dtype)
    is_nan = expected != expected
    assert np.array_equal(actual != actual, is_nan)
    bits = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual[~is_nan].view(bits), expected[~is_nan].view(bits))


@pytest.mark.parametrize(
    ("opcode", "of", "to", "expected", "operands"), ARITHMETIC, ids=[each[0] for each in ARITHMETIC]
)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_arithmetic(opcode: str, of: list[str], to: str, expected: Callable[..., Array], operands: str | None) -> None:
    *inputs, output = elementwise(opcode, of, to, operands)
    halves = {"f16x2": lambda x: x.view("f2"), "bf16": bf16}.get(to, lambda x: x)
    assert_same(halves(output), halves(expected(*inputs)))


@pytest.mark.parametrize("opcode", ["div.s32", "rem.s32", "div.u32"])
def test_integer_division_rounds_toward_zero(opcode: str) -> None:
    a, b, result = elementwise(opcode, [opcode[4:]] * 2, opcode[4:])
    of = b != 0
    quotient = toward_zero(a[of].astype("i8"), b[of].astype("i8"))
    expected = a[of] - quotient * b[of] if opcode.startswith("rem") else quotient
    np.testing.assert_array_equal(result[of], expected.astype(result.dtype))


@pytest.mark.parametrize(
    ("opcode", "expected", "error"),
    [
        ("rcp.approx.ftz.f32", lambda a: 1 / a, 2.0**-23),
        ("rsqrt.approx.ftz.f32", lambda a: 1 / np.sqrt(a), 2.0**-22.9),
        ("div.full.f32", lambda a, b: a / b, 2.0**-22),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_approximations_are_as_wrong_as_ptx_allows(opcode: str, expected: Callable[..., Array], error: float) -> None:
    of = ["f32"] * (2 if opcode.startswith("div") else 1)
    *inputs, result = elementwise(opcode, of, "f32", count=128)
    usual = np.all([np.isfinite(x) & (np.abs(x) < 1e10) & (np.abs(x) > 1e-10) for x in inputs], 0)
    exact = expected(*(x[usual].astype("f8") for x in inputs))
    assert usual.sum() > 30
    distance = np.abs(result[usual] / exact - 1)[~np.isnan(exact)]
    assert 0.6 * error < distance.max() <= error


ADDRESS = "ld.param.u64 %rd0, [p0];\ncvta.to.global.u64 %rd0, %rd0;\nadd.s64 %rd1, %rd0, %rd90;\n"
SHARED = "mov.u32 %r1, static;\nshl.b32 %r2, %r90, 2;\nadd.s32 %r2, %r1, %r2;\n"
ROTATED = "add.s32 %r3, %r90, 32;\nrem.u32 %r3, %r3, %r94;\nshl.b32 %r3, %r3, 2;\nadd.s32 %r3, %r1, %r3;\n"


@pytest.mark.parametrize("group", ["grid", "block", "warp"])
def test_divergent_threads_reconverge(group: str) -> None:
    """Thread i loops i times; odd threads take another branch."""
    body = (
        ADDRESS
        + """
	mov.u32 %r10, 0;
	mov.u32 %r11, 0;
	and.b32 %r12, %r90, 1;
	setp.eq.s32 %p1, %r12, 0;
LOOP:
	setp.ge.u32 %p2, %r11, %r90;
	@%p2 bra DONE;
	@%p1 bra EVEN;
	add.s32 %r10, %r10, 100;
	bra.uni NEXT;
EVEN:
	add.s32 %r10, %r10, 1;
NEXT:
	add.s32 %r11, %r11, 1;
	bra.uni LOOP;
DONE:
	@!%p1 add.s32 %r10, %r10, 7;
	st.global.u32 [%rd1], %r10;
"""
    )
    output = aligned(64, "u4")
    run(body, [output], threads=64, group=group)
    number = np.arange(64)
    np.testing.assert_array_equal(output, np.where(number % 2, 100 * number + 7, number))


@pytest.mark.parametrize("group", ["grid", "block", "warp"])
def test_shared_memory_is_visible_after_a_barrier(group: str) -> None:
    body = ADDRESS + SHARED + ROTATED
    body += "st.shared.u32 [%r2], %r90;\nbar.sync 0;\nld.shared.u32 %r4, [%r3];\nst.global.u32 [%rd1], %r4;"
    output = aligned(256, "u4")
    run(body, [output], threads=128, grid=(2, 1, 1), group=group)
    np.testing.assert_array_equal(output, np.tile(np.roll(np.arange(128), -32), 2))


def test_lanes_of_a_warp_take_turns_in_shared_memory() -> None:
    """Lanes read each other's writes after a warp barrier, and write again after another barrier."""
    body = ADDRESS + SHARED + "mov.u32 %r5, 0;\n"
    body += "and.b32 %r8, %r90, 32;\nshl.b32 %r8, %r8, 2;\nadd.s32 %r8, %r1, %r8;\n"
    for turn in range(2):
        body += f"add.s32 %r9, %r90, {turn};\nst.shared.u32 [%r2], %r9;\nbar.warp.sync -1;\n"
        body += "ld.shared.v2.u32 {%r10, %r11}, [%r8+8];\nadd.s32 %r5, %r5, %r10;\nbar.warp.sync -1;\n"
    output = aligned(64, "u4")
    run(body + "st.global.u32 [%rd1], %r5;", [output], threads=64)
    np.testing.assert_array_equal(output, np.repeat([2 + 3, 34 + 35], 32))


def test_shuffles_and_vector_stores() -> None:
    body = ADDRESS + "shfl.sync.bfly.b32 %r10|%p1, %r90, 5, 31, -1;\nshfl.sync.idx.b32 %r11, %r10, 3, 31, -1;\n"
    body += "add.s64 %rd2, %rd0, %rd90;\nadd.s64 %rd2, %rd2, %rd90;\nst.global.v2.u32 [%rd2], {%r10, %r11};"
    output = aligned(64, "u4")
    run(body, [output])
    np.testing.assert_array_equal(output.reshape(-1, 2), np.stack([np.arange(32) ^ 5, np.full(32, 6)], 1))


STORES = ("stmatrix.sync.aligned.m8n8.x1.shared.b16", "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16")
LOADS = ("ldmatrix.sync.aligned.m8n8.x1.shared.b16", "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16")


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("load", LOADS)
def test_matrix_stores_and_loads(store: str, load: str) -> None:
    """Each lane holds two adjacent 16-bit numbers of an 8 x 8 matrix."""
    body = ADDRESS + "mov.u32 %r1, static;\nand.b32 %r2, %r90, 7;\nshl.b32 %r2, %r2, 4;\nadd.s32 %r2, %r1, %r2;\n"
    body += "shl.b32 %r5, %r90, 1;\nshl.b32 %r6, %r5, 16;\nadd.s32 %r6, %r6, 65536;\nor.b32 %r5, %r5, %r6;\n"
    body += f"{store} [%r2], {{%r5}};\nbar.sync 0;\n{load} {{%r7}}, [%r2];\nst.global.u32 [%rd1], %r7;"
    output = aligned(32, "u4")
    run(body, [output])
    matrix = np.arange(64).reshape(8, 8)
    np.testing.assert_array_equal(
        output.view("u2").reshape(8, 8), matrix if STORES.index(store) == LOADS.index(load) else matrix.T
    )


CLUSTER = """
	mov.u32 %r1, static;
	setp.ne.u32 %p1, %r90, 0;
	@%p1 bra BEGUN;
	mbarrier.init.shared::cta.b64 [%r1], 1;
	fence.mbarrier_init.release.cluster;
BEGUN:
	barrier.cluster.arrive.relaxed.aligned;
	barrier.cluster.wait.aligned;
	@%p1 bra WAIT;
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 4;
	add.s32 %r2, %r1, 16;
	mov.u32 %r3, 1;
	sub.s32 %r3, %r3, %r92;
	mapa.shared::cluster.u32 %r4, %r2, %r3;
	mapa.shared::cluster.u32 %r5, %r1, %r3;
	add.s32 %r6, %r92, 70;
	st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4], %r6, [%r5];
WAIT:
	mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
	@!%p2 bra WAIT;
	ld.shared.u32 %r7, [static+16];
	st.global.u32 [%rd1], %r7;
"""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("group", ["grid", "cluster", "block", "warp"])
def test_blocks_of_a_cluster_send_each_other_numbers(group: str, seed: int) -> None:
    output = aligned(2 * 2 * 64, "u4")
    run(ADDRESS + CLUSTER, [output], threads=64, grid=(2, 2, 1), cluster=2, group=group, seed=seed)
    np.testing.assert_array_equal(
        output.reshape(2, 2, 64), np.array([71, 70])[:, None, None].repeat(2, 1).repeat(64, 2)
    )


STORE = "st.global.u32 [%rd1], %r90;"
EARLY: dict[str, Any] = {"starts_early": True}
TWO: dict[str, Any] = {"threads": 64}
PAIR: dict[str, Any] = {"grid": (1, 2, 1), "cluster": 2}
# Mistakes in a kernel whose only array is an output with one number per thread, and their error messages.
WRONG: dict[str, tuple[str, str, dict[str, Any]]] = {
    "write behind": (
        "add.s64 %rd1, %rd1, 4;\n" + STORE,
        r"write of 4 bytes at 0x\w+, which is outside of all memory",
        {},
    ),
    "read of nothing": (
        "mov.u64 %rd1, 64;\nld.global.u32 %r1, [%rd1];",
        r"read of 4 bytes at 0x40, which is outside",
        {},
    ),
    "misaligned": ("add.s64 %rd1, %rd1, 2;\n" + STORE, r"line \d+: write of 4 bytes at 0x\w+$", {}),
    "unwritten output": ("ld.global.u32 %r1, [%rd1];", r"read of 4 bytes at 0 of array 0, which is .* unwritten", {}),
    "same place": (
        "st.global.u32 [%rd0], %r90;",
        r"race in array 0 at byte 0: thread \d+ writes .* thread \d+ writes",
        {},
    ),
    "before the kernel before": (STORE, "global memory is accessed before griddepcontrol.wait", EARLY),
    "wait of some": (
        "setp.eq.s32 %p1, %r90, 0;\n@%p1 bra OUT;\ngriddepcontrol.wait;\nOUT:",
        "griddepcontrol.wait by some",
        EARLY,
    ),
    "no barrier": (
        SHARED + ROTATED + "st.shared.u32 [%r2], %r90;\nld.shared.u32 %r4, [%r3];",
        r"race in shared memory at 128: thread 0 reads what thread 32 wrote without a barrier",
        TWO,
    ),
    "a branch to what follows, which is no barrier": (
        SHARED + ROTATED + "st.shared.u32 [%r2], %r90;\nbra.uni NEXT;\nNEXT:\nld.shared.u32 %r4, [%r3];",
        r"race in shared memory at 128: thread 0 reads what thread 32 wrote without a barrier",
        TWO,
    ),
    "write after read": (
        SHARED
        + ROTATED
        + "st.shared.u32 [%r2], %r90;\nbar.sync 0;\nld.shared.u32 %r4, [%r3];\nst.shared.u32 [%r2], 7;",
        r"race in shared memory at 0: thread 0 writes what thread 32 reads",
        TWO,
    ),
    "no barrier of the warp": (
        SHARED + "xor.b32 %r3, %r2, 4;\nst.shared.u32 [%r2], %r90;\nbar.warp.sync -1;\nld.shared.u32 %r4, [%r1];\n"
        "st.shared.u32 [%r2], 7;",
        "race in shared memory at 0: thread 0 writes what several threads reads",
        {},
    ),
    "what several agreed to write": (
        SHARED + "mov.u32 %r3, 5;\nand.b32 %r4, %r90, 15;\nshl.b32 %r4, %r4, 2;\nadd.s32 %r4, %r1, %r4;\n"
        "st.shared.u32 [%r4], %r3;\nld.shared.v2.u32 {%r5, %r6}, [%r1];",
        "race in shared memory at 4: thread 0 reads what several threads wrote",
        {},
    ),
    "two writers": (SHARED + "st.shared.u32 [%r1], %r90;", "race in shared memory at 0: .* writes what thread", {}),
    "uninitialized": (SHARED + "ld.shared.u32 %r4, [%r2];", "read of unwritten shared memory at 0", {}),
    "beyond shared memory": ("st.shared.u32 [static+512], %r90;", "4 bytes of shared memory at 512 of 512", {}),
    "barrier of some": (
        "setp.ge.u32 %p1, %r90, 32;\n@%p1 bra OUT;\nbar.sync 0;\nOUT:",
        "32 of 64 threads of block 0 are at the barrier",
        TWO,
    ),
    "barrier of a warp": (
        "setp.ge.u32 %p1, %r90, 32;\n@%p1 bra OUT;\nbar.sync 0;\nOUT:",
        "deadlock: 32 threads, among them 0, wait at line",
        {**TWO, "group": "warp"},
    ),
    "shuffle of some": (
        "setp.ge.u32 %p1, %r90, 5;\n@%p1 bra OUT;\nshfl.sync.bfly.b32 %r1, %r90, 1, 31, -1;\nOUT:",
        "5 of 32 lanes of warp 0 are there",
        {},
    ),
    "no mbarrier": (
        "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [static], 4;",
        "no mbarrier has begun at 0 of block 0",
        PAIR,
    ),
}
# Mistakes in the kernel of test_blocks_of_a_cluster_send_each_other_numbers, and their error messages.
WRONG_CLUSTERS: dict[str, tuple[str, str, str]] = {
    "no wait for others": ("barrier.cluster.wait.aligned;", "", "sent to a block of the cluster that may not run yet"),
    "no arrival": ("barrier.cluster.arrive.relaxed.aligned;", "", "deadlock: "),
    "no fence": ("fence.mbarrier_init.release.cluster;", "", "sent to an mbarrier that may not have begun"),
    "too many bytes": ("[%r1], 4;", "[%r1], 8;", "deadlock: "),
    "too few bytes": ("[%r1], 4;", "[%r1], 0;", "read of unwritten shared memory"),
    "no wait for numbers": ("@!%p2 bra WAIT;", "", "read of unwritten shared memory"),
    "other parity": ("[%r1], 0;", "[%r1], 1;", "deadlock: "),
    "to oneself": ("%r4, %r2, %r3;", "%r4, %r2, 0;", "sent to block 0 of the cluster, to be counted by 1"),
    "begun twice": ("@%p1 bra BEGUN;", "", "an mbarrier at 0 begins twice"),
    "arrives twice": (
        "_, [%r1], 4;",
        "_, [%r1], 4;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 4;",
        "more arrivals than expected",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_kernels_raise(name: str) -> None:
    body, message, options = WRONG[name]
    threads = options.get("threads", 32)
    with pytest.raises(PtxError, match=message):
        run(ADDRESS + body, [aligned(threads, "u4")], **{"threads": threads} | options)


@pytest.mark.parametrize("name", WRONG_CLUSTERS)
def test_invalid_cluster_kernels_raise(name: str) -> None:
    right, wrong, message = WRONG_CLUSTERS[name]
    assert CLUSTER.count(right) == 1
    with pytest.raises(PtxError, match=re.escape(message)):
        run(ADDRESS + CLUSTER.replace(right, wrong), [aligned(64, "u4")], grid=(1, 2, 1), cluster=2)


def test_inner_scopes_need_no_indentation() -> None:
    """cuobjdump prints no indentation, so that the brace of an inner scope looks like the end of the kernel."""
    result = aligned(32, "u4")
    run(
        "{\n.reg .b32 inner;\nmov.u32 inner, 7;\n}\nmov.u32 %r1, 3;\nld.param.u64 %rd1, [p0];\n"
        "add.s64 %rd1, %rd1, %rd90;\nst.global.u32 [%rd1], %r1;",
        [result],
    )
    assert (result == 3).all()
    with pytest.raises(UnknownPtxError, match="a scope without end"):
        kernels_of(".entry test()\n{\n\tret;\n")


def test_block_that_ends_before_its_arrivals_raises() -> None:
    body = CLUSTER[: CLUSTER.index("WAIT:\n\tmbar")] + "WAIT:\n"
    with pytest.raises(PtxError, match="a block ended before all data sent to it arrived"):
        run(ADDRESS + body, [aligned(64, "u4")], grid=(1, 2, 1), cluster=2)


def test_write_to_an_input_raises() -> None:
    with pytest.raises(PtxError, match="write to array 0, which is an input"):
        run(ADDRESS + STORE, [aligned(32, "u4")], written=())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 160}, "cannot launch test with 160 threads"),
        ({"threads": 40}, "cannot launch test with 40 threads"),
        ({"grid": (1, 3, 1), "cluster": 2}, "cannot launch test with clusters of 2"),
        ({"dynamic_shared": 227 << 10}, "cannot launch test with 232960 bytes of shared memory"),
    ],
)
def test_impossible_launches_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PtxError, match=message):
        run("mov.u32 %r1, dynamic;", [aligned(1, "u4")], **options)


@pytest.mark.parametrize(
    "instruction",
    [
        "add.sat.s32 %r1, %r1, %r1",
        "add.f32 %f1, %f1, %f1",  # which ptxas may contract
        "fma.rz.f32 %f1, %f1, %f1, %f1",
        "ld.global.nc.u32 %r1, [%rd1]",
        "ld.global.v8.f32 {%f1, %f1, %f1, %f1, %f1, %f1, %f1, %f1}, [%rd1]",
        "cvt.rz.f16.f32 %h1, %f1",
        "ex2.approx.ftz.f32 %f1, %f1",
        "atom.global.add.u32 %r1, [%rd1], 1",
        "bar.sync 1",
        "bar.warp.sync 255",
        "shfl.sync.bfly.b32 %r1, %r1, 1, 15, -1",
        "shfl.sync.down.b32 %r1, %r1, 1, 31, -1",
        "mul.hi.u32 %r1, %r1, %r1",
        "st.shared.relaxed.u32 [static], %r1",
    ],
)
def test_unknown_instruction_raises_and_names_its_line(instruction: str) -> None:
    with pytest.raises(UnknownPtxError, match=r"line 2\d: "):
        run(instruction + ";", [aligned(1, "u4")])


def test_every_opcode_is_in_a_test() -> None:
    """Each pattern of the table matches one of the instructions in this file."""
    used = set(re.findall(r"\b[a-z0-9]+(?:\.[a-z0-9_:]+)+", Path(__file__).read_text().replace("\\n", "\n") + TEMPLATE))
    untried = [pattern for pattern, _ in OPCODES if not any(re.fullmatch(pattern, opcode) for opcode in used)]
    assert untried == []
