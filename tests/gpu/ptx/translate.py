"""Translates basic blocks to Python functions over numpy arrays, with one number per thread.

A register is an array over the threads of a group, or a numpy scalar while it is the same for all of them. An opcode is
matched as a whole, with all of its modifiers; opcodes that OPCODES does not have raise an error.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ptx.numbers import HELPERS
from ptx.program import BYTES, NUMPY, Block, Instruction, Kernel, UnknownPtxError

Handler = Callable[..., None]
OPCODES: list[tuple[str, Handler]] = []
SPECIAL = re.compile(r"%(n?(?:tid|ctaid))\.([xyz])$|%(laneid)$")


def opcode(pattern: str) -> Callable[[Handler], Handler]:
    """Registers a function that translates opcodes that match ``pattern``, and receives its groups."""

    def register(handler: Handler) -> Handler:
        OPCODES.append((pattern, handler))
        return handler

    return register


@cache
def handler_of(name: str) -> tuple[Handler, tuple[str, ...]] | None:
    for pattern, handler in OPCODES:
        if found := re.fullmatch(pattern, name):
            return handler, found.groups()
    return None


def function_of(kernel: Kernel, block: Block, is_masked: bool) -> Any:
    """Returns ``f(registers, mask, group)``, which executes a basic block except for a branch at its end."""
    if is_masked not in block.functions:
        block.functions[is_masked] = _Translator(kernel, is_masked).function(block)
    return block.functions[is_masked]


class _Translator:
    """Translates one basic block."""

    def __init__(self, kernel: Kernel, is_masked: bool) -> None:
        self.kernel, self.of_block = kernel, "m" if is_masked else "None"
        self.guard: str | None = None
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}

    @property
    def mask(self) -> str:
        return self.guard or self.of_block

    def function(self, block: Block) -> Any:
        waits = [block.last] if block.last is not None and block.waits else []
        for instruction in [*block.body, *waits]:
            self._translate(instruction)
        source = "def block(R, m, S):\n" + "".join(f"    {line}\n" for line in self.lines or ["pass"])
        scope = {"np": np, **HELPERS, **self.constants}
        exec(compile(source, f"<{self.kernel.name[:60]} block {block.number}>", "exec"), scope)
        return scope["block"]

    def _translate(self, i: Instruction) -> None:
        found = handler_of(i.opcode)
        if found is None:
            raise UnknownPtxError(f"line {i.line}: {i}: ptx.translate.OPCODES has no {i.opcode}")
        handler, groups = found
        if i.guard is not None:
            self.lines.append(f"g = S.guarded({self.of_block}, {'~' * i.is_negated}{self.read(i.guard, 'pred')})")
            self.lines.append("if g is not None and g.is_empty: pass")
            self.lines.append("else:")
            self.guard = "g"
        begin = len(self.lines)
        try:
            handler(self, i, *groups)
        except (AssertionError, ValueError, KeyError) as error:
            raise UnknownPtxError(f"line {i.line}: {i}: {error!r}") from error
        if i.guard is not None:
            self.lines[begin:] = [f"    {line}" for line in self.lines[begin:]]
            self.guard = None

    # Operands.

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def number(self, value: int, dtype: str) -> str:
        unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
        return self.constant(unsigned.type(value % 256**unsigned.itemsize).view(dtype))

    def _place(self, register: str) -> str:
        if register in self.kernel.crossing:
            return f"R[{self.kernel.numbers[register]}]"
        return "r_" + re.sub(r"\W", "_", register)

    def read(self, operand: str, kind: str) -> str:
        """Returns an expression of type NUMPY[kind] with the bits of the operand."""
        dtype = NUMPY[kind]
        if operand in self.kernel.types:
            declared, place = self.kernel.types[operand], self._place(operand)
            if NUMPY[declared] == dtype:
                return place
            if BYTES[declared] > BYTES[kind]:  # the lower part
                return f"{place}.astype('u{BYTES[kind]}').view('{dtype}')"
            assert BYTES[declared] == BYTES[kind], f"{operand} is .{declared}"
            return f"{place}.view('{dtype}')"
        if found := SPECIAL.fullmatch(operand):
            return f"S.{found[3] or f'{found[1]}_{found[2]}'}.astype('{dtype}')"
        if operand in self.kernel.symbols:
            return self.number(self.kernel.symbols[operand], dtype)
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}(?:[0-9a-fA-F]{8})?)", operand):
            bits = np.dtype(f"u{len(found[1]) // 2}").type(int(found[1], 16))
            assert bits.itemsize == BYTES[kind], operand
            return self.constant(bits.view(dtype))
        assert kind not in ("f32", "f64", "f16"), operand
        value = int(operand.rstrip("U"), 0)
        return self.constant(np.bool_(value)) if kind == "pred" else self.number(value, dtype)

    def write(self, operand: str, expression: str, kind: str) -> None:
        if operand == "_":
            self.lines.append(expression)
            return
        dtype, declared = NUMPY[kind], NUMPY[self.kernel.types[operand]]
        if declared != dtype:
            wide = np.dtype(declared).itemsize
            if np.dtype(dtype).itemsize < wide:  # extended by its sign, or by zeros
                expression = f"({expression}).astype('{'i' if dtype[0] == 'i' else 'u'}{wide}').view('{declared}')"
            else:
                assert np.dtype(dtype).itemsize == wide, f"{operand} is .{self.kernel.types[operand]}"
                expression = f"({expression}).view('{declared}')"
        place = self._place(operand)
        # A register that no other block reads must keep old values only under a guard.
        mask = self.mask if operand in self.kernel.crossing else self.guard or "None"
        if mask != "None":
            expression = f"merge({mask}, {expression}, {place})"
        self.lines.append(f"{place} = {expression}")

    def compute(self, i: Instruction, kind: str, template: str, *kinds: str) -> None:
        """Writes an expression of the operands, which have ``kinds``, or all have ``kind``."""
        operands = i.operands[1:]
        expressions = [self.read(o, k) for o, k in zip(operands, kinds or [kind] * len(operands), strict=True)]
        self.write(i.operands[0], template.format(*expressions), kind)

    def address(self, operand: str, kind: str) -> str:
        base, _, offset = operand.strip("[] ").partition("+")
        expression = self.read(base.strip(), kind)
        return f"({expression} + {self.number(int(offset), NUMPY[kind])})" if offset else expression

    def call(self, i: Instruction, function: str, *arguments: str) -> str:
        return f"S.{function}({', '.join([*arguments, self.mask, str(i.line)])})"


def names_of(vector: str) -> list[str]:
    return [name.strip() for name in vector.strip("{} ").split(",")]


# Integers and bits.

SYMBOLS = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "mul.lo": "{} * {}", "div": "{} / {}"}
SYMBOLS |= {"and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "~{}", "neg": "-{}", "abs": "np.abs({})"}
COMPARISONS = {"eq": "==", "ne": "!=", "neu": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@opcode(r"(add|sub|mul\.lo)\.[su](16|32|64)")
def _wrapping(t: _Translator, i: Instruction, operation: str, bits: str) -> None:
    t.compute(i, f"u{bits}", SYMBOLS[operation])


@opcode(r"mad\.lo\.[su](16|32|64)")
def _mad(t: _Translator, i: Instruction, bits: str) -> None:
    t.compute(i, f"u{bits}", "{} * {} + {}")


@opcode(r"(mul|mad)\.wide\.([su])(16|32)")
def _wide(t: _Translator, i: Instruction, operation: str, sign: str, bits: str) -> None:
    narrow, wide = f"{sign}{bits}", f"{sign}{2 * int(bits)}"
    product = "{}.astype('" + NUMPY[wide] + "') * {}.astype('" + NUMPY[wide] + "')"
    if operation == "mul":
        t.compute(i, wide, product, narrow, narrow)
    else:
        t.compute(i, wide, product + " + {}", narrow, narrow, wide)


@opcode(r"(div|rem)\.([su](?:32|64))")
def _integer_division(t: _Translator, i: Instruction, operation: str, kind: str) -> None:
    t.compute(i, kind, "int_division({0}, {1})" if operation == "div" else "{0} - int_division({0}, {1}) * {1}")


@opcode(r"(neg)\.(s32|s64|f32|f64)")
@opcode(r"(and|or|xor|not)\.(pred|b16|b32|b64)")
@opcode(r"(add|sub|mul|div)\.rn\.(f32|f64)")
@opcode(r"(abs)\.(f32|f64)")
def _operator(t: _Translator, i: Instruction, operation: str, kind: str) -> None:
    t.compute(i, kind, SYMBOLS[operation])


@opcode(r"(shl)\.(b16|b32|b64)")
@opcode(r"(shr)\.([sub](?:16|32|64))")
def _shift(t: _Translator, i: Instruction, operation: str, kind: str) -> None:
    amount, sign = i.operands[2], "<<" if operation == "shl" else ">>"
    if amount.isdigit() and int(amount) < 8 * BYTES[kind]:
        shifted = f"{t.read(i.operands[1], kind)} {sign} {t.number(int(amount), NUMPY[kind])}"
        t.write(i.operands[0], shifted, kind)
    else:
        t.compute(i, kind, operation + "({}, {})", kind, "u32")


@opcode(r"(min|max)\.([su](?:32|64))")
def _extreme(t: _Translator, i: Instruction, operation: str, kind: str) -> None:
    t.compute(i, kind, f"np.{operation}imum({{}}, {{}})")


@opcode(r"bfe\.([su]32)")
def _bit_field(t: _Translator, i: Instruction, kind: str) -> None:
    position, length = map(int, i.operands[2:])
    assert 0 < length <= 32 - position, i.operands
    t.compute(i, kind, "bit_field({}, {}, {})", kind, "u32", "u32")


@opcode(r"prmt\.b32")
def _permute(t: _Translator, i: Instruction) -> None:
    selector = int(i.operands[3].rstrip("U"), 0)  # a register is not supported
    assert not selector & 0x8888, i.operands  # nor is sign replication
    t.compute(i, "u32", "permuted_bytes({}, {}, {})", "u32", "u32", "u32")


# Floating point.


@opcode(r"fma\.rn\.(f32|f64)")
def _fma(t: _Translator, i: Instruction, kind: str) -> None:
    t.compute(i, kind, "fma_" + kind + "({}, {}, {})")


@opcode(r"sqrt\.rn\.(f32|f64)")
def _root(t: _Translator, i: Instruction, kind: str) -> None:
    t.compute(i, kind, "np.sqrt({})")


@opcode(r"rcp\.rn\.(f32|f64)")
def _reciprocal(t: _Translator, i: Instruction, kind: str) -> None:
    t.compute(i, kind, "1 / {}")


@opcode(r"(rcp|rsqrt)\.approx\.ftz\.f32")
def _approximation(t: _Translator, i: Instruction, function: str) -> None:
    t.compute(i, "f32", "S.approximate({}, '" + function + "')")


@opcode(r"div\.full\.f32")
def _approximate_division(t: _Translator, i: Instruction) -> None:
    t.compute(i, "f32", "S.approximate_division({}, {})")


@opcode(r"(add|sub|mul|fma)\.rn\.(bf16|f16)(x2)?")
@opcode(r"(abs)\.(bf16|f16)(x2)?")
def _halves(t: _Translator, i: Instruction, operation: str, kind: str, pair: str | None) -> None:
    operands = ", ".join("{}" for _ in i.operands[1:])
    t.compute(i, kind + (pair or ""), f"halves('{operation}', '{kind}', {pair is not None}, {operands})")


# Predicates, moves, conversions.


@opcode(r"setp\.(eq|ne)\.(b16|b32|b64)")
@opcode(r"setp\.(eq|ne|lt|le|gt|ge)\.([su](?:16|32|64))")
@opcode(r"setp\.(eq|neu|lt|le|gt|ge)\.(f32|f64)")
def _compare(t: _Translator, i: Instruction, comparison: str, kind: str) -> None:
    t.compute(i, "pred", "{} " + COMPARISONS[comparison] + " {}", kind, kind)


@opcode(r"setp\.(eq|neu|lt|le|gt|ge)\.(bf16|f16)(x2)?")
def _compare_halves(t: _Translator, i: Instruction, comparison: str, kind: str, pair: str | None) -> None:
    a, b = (t.read(o, kind + (pair or "")) for o in i.operands[1:])
    for number, target in enumerate(i.operands[0].split("|")):
        sides = [f"half_as_f32({x}, {number}, '{kind}')" for x in (a, b)]
        t.write(target, f" {COMPARISONS[comparison]} ".join(sides), "pred")


@opcode(r"selp\.([bsuf](?:16|32|64))")
def _select(t: _Translator, i: Instruction, kind: str) -> None:
    t.compute(i, kind, "select({2}, {0}, {1})", kind, kind, "pred")


@opcode(r"mov\.(pred|[bsu](?:16|32|64)|f32|f64)")
def _move(t: _Translator, i: Instruction, kind: str) -> None:
    target, source = i.operands
    names = names_of(target if target.startswith("{") else source)
    if len(names) == 1:
        t.compute(i, kind, "{}")
        return
    part = f"b{8 * BYTES[kind] // len(names)}"
    shifts = [t.number(8 * BYTES[part] * n, NUMPY[kind]) for n in range(len(names))]
    if target.startswith("{"):
        t.lines.append(f"t = {t.read(source, kind)}")
        for name, shift in zip(names, shifts, strict=True):
            t.write(name, f"(t >> {shift}).astype('{NUMPY[part]}')", part)
    else:
        terms = [f"({t.read(n, part)}.astype('{NUMPY[kind]}') << {s})" for n, s in zip(names, shifts, strict=True)]
        t.write(target, " | ".join(terms), kind)


@opcode(r"cvt\.([su](?:8|16|32|64))\.([su](?:8|16|32|64))")
@opcode(r"cvt\.rn\.(f32|f64)\.([su](?:32|64))")
@opcode(r"cvt\.(f64)\.(f32)")
@opcode(r"cvt\.rn\.(f32)\.(f64)")
@opcode(r"cvt\.(f32|f64)\.(f16)")
@opcode(r"cvt\.rn\.(f16)\.(f32|f64)")
def _convert(t: _Translator, i: Instruction, to: str, of: str) -> None:
    t.compute(i, to, "{}.astype('" + NUMPY[to] + "')", of)


@opcode(r"cvt\.(f32|f64)\.bf16")
def _from_bf16(t: _Translator, i: Instruction, to: str) -> None:
    t.compute(i, to, "f32_of_bf16({}).astype('" + NUMPY[to] + "')", "bf16")


@opcode(r"cvt\.rn\.bf16\.f32")
def _to_bf16(t: _Translator, i: Instruction) -> None:
    t.compute(i, "bf16", "bf16_of_f32({})", "f32")


@opcode(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _to_pair(t: _Translator, i: Instruction, kind: str) -> None:
    t.compute(i, f"{kind}x2", f"pair_of({{1}}, {{0}}, '{kind}')", "f32", "f32")


@opcode(r"cvta\.to\.global\.u64")
def _to_global(t: _Translator, i: Instruction) -> None:
    t.compute(i, "u64", "{}")


# Memory.


@opcode(r"(ld|st)(?:\.volatile)?(?:\.(global|shared|param))?(?:\.v[24])?\.([bsu](?:8|16|32|64)|f32|f64)")
def _access(t: _Translator, i: Instruction, direction: str, space: str | None, kind: str) -> None:
    values, address = i.operands if direction == "ld" else i.operands[::-1]
    names = names_of(values)
    base = address.strip("[] ").partition("+")[0].strip()
    is_narrow = space in ("shared", "param") and BYTES.get(t.kernel.types.get(base, "u32")) == 4
    where = t.address(address, "u32" if is_narrow else "u64")
    space = space or "global"  # shared memory has no generic addresses here
    if direction == "ld":
        t.lines.append(f"t = {t.call(i, f'load_{space}', where, repr(NUMPY[kind]), str(len(names)))}")
        for n, name in enumerate(names):
            t.write(name, f"t[{n}]", kind)
    else:
        assert space != "param", i.opcode
        sources = ", ".join(t.read(name, kind) for name in names)
        t.lines.append(t.call(i, f"store_{space}", where, f"({sources},)", repr(NUMPY[kind])))


@opcode(r"shfl\.sync\.(bfly|idx)\.b32")
def _shuffle(t: _Translator, i: Instruction, mode: str) -> None:
    operands = [t.read(operand, "u32") for operand in i.operands[1:]]
    target = i.operands[0].partition("|")[0]
    t.write(target, t.call(i, f"shuffle_{mode}", *operands), "u32")


@opcode(r"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _store_matrix(t: _Translator, i: Instruction, count: str, transposed: str | None) -> None:
    names = names_of(i.operands[1])
    assert len(names) == int(count), names
    sources = ", ".join(t.read(name, "b32") for name in names)
    t.lines.append(
        t.call(i, "store_matrix", t.address(i.operands[0], "u32"), f"({sources},)", str(transposed is not None))
    )


@opcode(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _load_matrix(t: _Translator, i: Instruction, count: str, transposed: str | None) -> None:
    names = names_of(i.operands[0])
    assert len(names) == int(count), names
    arguments = (t.address(i.operands[1], "u32"), count, str(transposed is not None))
    t.lines.append(f"t = {t.call(i, 'load_matrix', *arguments)}")
    for n, name in enumerate(names):
        t.write(name, f"t[{n}]", "b32")


# Barriers and clusters. Group.run resumes a waiting group.


@opcode(r"bar\.sync")
def _block_barrier(t: _Translator, i: Instruction) -> None:
    assert i.operands == ["0"], "expected the barrier of the block"


@opcode(r"bar\.warp\.sync")
def _warp_barrier(t: _Translator, i: Instruction) -> None:
    t.lines.append(t.call(i, "sync_warp", t.read(i.operands[0], "u32")))


@opcode(r"barrier\.cluster\.(arrive\.relaxed|wait)\.aligned")
def _cluster_barrier(t: _Translator, i: Instruction, half: str) -> None:
    if half != "wait":
        t.lines.append(t.call(i, "arrive_at_cluster"))


@opcode(r"mapa\.shared::cluster\.u32")
def _address_in_cluster(t: _Translator, i: Instruction) -> None:
    t.compute(i, "u32", "S.address_in_cluster({}, {})")


@opcode(r"mbarrier\.init\.shared::cta\.b64")
def _begin_arrivals(t: _Translator, i: Instruction) -> None:
    t.lines.append(t.call(i, "begin_arrivals", t.address(i.operands[0], "u32"), t.read(i.operands[1], "u32")))


@opcode(r"mbarrier\.arrive\.expect_tx\.shared::cta\.b64")
def _expect_arrivals(t: _Translator, i: Instruction) -> None:
    assert i.operands[0] == "_", i.operands
    t.lines.append(t.call(i, "expect_arrivals", t.address(i.operands[1], "u32"), t.read(i.operands[2], "u32")))


@opcode(r"mbarrier\.try_wait\.parity\.shared::cta\.b64")
def _try_wait(t: _Translator, i: Instruction) -> None:
    t.lines.append(f"S.awaited = {t.address(i.operands[1], 'u32')}, {t.read(i.operands[2], 'u32')}")


@opcode(r"fence\.mbarrier_init\.release\.cluster")
def _fence(t: _Translator, i: Instruction) -> None:
    t.lines.append(t.call(i, "fence_init"))


@opcode(r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes\.(b32|b64)")
def _send(t: _Translator, i: Instruction, kind: str) -> None:
    place, value, barrier = i.operands
    t.lines.append(t.call(i, "send", t.address(place, "u32"), t.read(value, kind), t.address(barrier, "u32")))


@opcode(r"griddepcontrol\.(wait|launch_dependents)")
def _grid_dependency(t: _Translator, i: Instruction, what: str) -> None:
    t.lines.append(t.call(i, "wait_for_previous_kernel" if what == "wait" else "launch_dependents"))
