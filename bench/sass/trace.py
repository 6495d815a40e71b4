"""What a warp executes, when, and where it waits."""

import operator
import re
import struct
from dataclasses import dataclass, field

from bench.sass.machine_code import Instruction, Kernel

PARAMETERS_AT = 0x210  # in constant bank 0

# Cycles, all of them ASSUMPTIONS: until the barrier of an instruction is set, or for those of STOPS until the next one
# is issued. DRAM is taken to be busy. STAS sends to another block of the cluster, which a SYNCS waits for.
LOAD_FROM_DRAM, LOAD_FROM_L2, LOAD_FROM_L1 = 900, 270, 40
LATENCY = {
    **{"STAS": 220, "LDS": 29, "LDL": 40, "STG": 12, "STS": 12, "STL": 12, "LDC": 30, "S2R": 24, "S2UR": 24},
    **{"SHFL": 24, "MUFU": 22, "F2F": 24, "I2F": 20, "F2I": 20, "DADD": 18, "DMUL": 18, "DFMA": 18, "DSETP": 18},
    **{"R2UR": 12, "VOTEU": 12, "P2R": 12, "BAR": 30, "CCTL": 40, "MEMBAR": 600, "UCGABAR_WAIT": 200},
}
OTHER_LATENCY, SKIPPED_LATENCY, LONGEST_READ = 10, 4, 20  # skipped: its predicate is false; read: of source registers

LOADS, STORES, STOPS = {"LDG", "LDGSTS"}, {"STAS", "STG", "STS", "STL"}, {"BAR", "MEMBAR", "UCGABAR_WAIT"}
WITHOUT_EFFECT = STORES | STOPS
WITHOUT_EFFECT |= {"ACQBULK", "BSSY", "BSYNC", "CCTL", "FENCE", "NOP", "PREEXIT", "UCGABAR_ARV", "WARPSYNC"}
ZEROS = {"S2R", "S2UR", "CS2R", "LDG", "LDS", "LDL", "HADD2", "HMUL2", "HFMA2", "F2FP"}  # 16 bits: as loaded
ONES = {"FADD", "FMUL", "FFMA", "DADD", "DMUL", "DFMA", "F2F", "MUFU"}
COMPARISONS = {name: getattr(operator, name.lower()) for name in ("LT", "LE", "GT", "GE", "EQ", "NE")}
WORD = 0xFFFFFFFF

Parameters = list[tuple[int, "int | float", int]]  # offset, value, bytes; a float is stored as float32 or float64


@dataclass
class Launch:
    """How a kernel is launched. Blocks and grids have x and y."""

    block: tuple[int, int]
    grid: tuple[int, int]
    parameters: Parameters
    near: list[tuple[int, int]] = field(default_factory=list)  # 16 MiB in a cache: address, cycles of a load
    cluster: int = 1


def float_bits(number: float, words: int = 1) -> int:
    """The bits of a float32 or, in two words, a float64."""
    return int.from_bytes(struct.pack("<f" if words == 1 else "<d", number), "little")


def bits_float(bits: int) -> float:
    """The number in a float32."""
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def signed(bits: int, words: int = 1) -> int:
    """The number in two's complement."""
    return bits - (1 << 32 * words) if bits >> 32 * words - 1 else bits


class Thread:
    """A thread's registers and predicates, and what instructions do to them."""

    def __init__(self, launch: Launch):
        self.values: dict[str, int] = {}  # R0, UR0, P0, UP0...
        self.constants = bytearray(1 << 16)
        struct.pack_into("<6I", self.constants, 0, *launch.block, 1, *launch.grid, 1)
        struct.pack_into("<I", self.constants, 0x140, launch.cluster > 1)  # whether cluster_sync can be used
        struct.pack_into("<I", self.constants, 0x188, launch.cluster)  # blocks of a cluster
        for offset, value, size in launch.parameters:
            bits = float_bits(value, size // 4) if isinstance(value, float) else value & (1 << 8 * size) - 1
            self.constants[PARAMETERS_AT + offset : PARAMETERS_AT + offset + size] = bits.to_bytes(size, "little")

    def read(self, operand: str, words: int = 1) -> int:
        """The bits of a register, predicate, constant or number. With two words, also of the register behind it."""
        if re.fullmatch(r"[-+]?(\d[\d.e+-]*|INF)", operand):  # of a float, for integers are written 0x...
            return float_bits(float(operand), words)
        if operand[0] in "-~!|":
            bits, mask = self.read(operand[1:], words), (1 << 32 * words) - 1
            return {"-": -bits, "~": ~bits, "!": 1 - bits, "|": bits & mask >> 1}[operand[0]] & mask
        if name := re.match(r"(U?[RP])(?:(\d+)|Z|T)", operand):
            numbers = range(int(name[2]), int(name[2]) + words) if name[2] else ()
            bits = sum(self.values.get(f"{name[1]}{number}", 0) << 32 * word for word, number in enumerate(numbers))
            return bits if numbers else int(name[0].endswith("PT"))  # PT is 1, RZ 0
        if operand.startswith("c["):
            address = self.address(operand)
            return int.from_bytes(self.constants[address : address + 4 * words], "little")
        return int(operand, 16)

    def number(self, operand: str, modifiers: list[str], words: int = 1) -> int:
        """The integer that an operand stands for: with a sign, unless the instruction is for U32."""
        bits = self.read(operand, words)
        return bits if "U32" in modifiers else signed(bits, words)

    def address(self, operand: str) -> int:
        """What is in the last brackets of an operand."""
        terms = operand[operand.rindex("[") + 1 : -1].split("+")
        return sum(int(term, 16) if "0x" in term else self.read(term, 2 if ".64" in term else 1) for term in terms)

    def write(self, name: str, bits: int, words: int = 1) -> None:
        """Sets a predicate or registers, unless the name stands for a constant."""
        if match := re.match(r"(U?[RP])(\d+)", name):
            for word in range(words):
                self.values[f"{match[1]}{int(match[2]) + word}"] = bits >> 32 * word & WORD

    def execute(self, instruction: Instruction) -> bool:
        """Does what an instruction does, if it is known. A U before an opcode means registers that the warp shares."""
        opcode, modifiers = instruction.opcode.removeprefix("U"), instruction.modifiers
        target, sources = instruction.target, instruction.sources
        is_wide = "WIDE" in modifiers or "F64" in modifiers[:1] or opcode in ("CS2R", "DADD", "DMUL", "DFMA")
        bits, words = 0, 2 if is_wide else instruction.words
        match opcode:
            case "MOV" | "R2UR" | "SHFL":  # all lanes hold the same
                bits = self.read(sources[0])
            case "HFMA2" if sources[:2] == ["-RZ", "RZ"]:  # HFMA2.MMA R2, -RZ, RZ, 1.875, 0: loads a constant
                bits = int.from_bytes(struct.pack("<2e", float(sources[3]), float(sources[2])), "little")
            case "LDC":
                bits = self.read(sources[0], words) & (255 if "U8" in modifiers else -1)
            case "SEL" | "FSEL":
                bits = self.read(sources[0 if self.read(sources[2]) else 1])
            case "IADD3" | "VIADD" | "IMAD" | "LEA":
                bits = self.add(instruction, opcode)
            case "SHF":  # SHF.R.U32.HI R2, RZ, 0x5, R3: 64 bits in two registers, and one word of the result
                low, count, high = map(self.read, sources)
                both = signed(high << 32 | low, 2) if modifiers[1][0] == "S" else high << 32 | low
                bits = (both << count if modifiers[0] == "L" else both >> count) >> (32 if "HI" in modifiers else 0)
            case "LOP3":  # LOP3.LUT P0, R2, R3, 0x1f, RZ, 0xc0, !PT: a truth table of three inputs
                *inputs, table = map(self.read, sources[:4])
                for row in (row for row in range(8) if table >> row & 1):
                    first, second, third = (inputs[n] if row & 4 >> n else ~inputs[n] for n in range(3))
                    bits |= first & second & third & WORD
                self.write("".join(instruction.outputs), bits != 0)
            case "PRMT":  # PRMT R2, R3, 0x7632, R4: bytes of two registers, or their signs
                low, selector, high = map(self.read, sources)
                picks = [selector >> 4 * place & 15 for place in range(4)]
                found = [((high << 32 | low) >> 8 * (pick & 7) & 255, pick > 7) for pick in picks]
                bits = int.from_bytes([byte // 128 * 255 if sign else byte for byte, sign in found], "little")
            case "ISETP" | "FSETP" | "DSETP":
                return self.compare(instruction, 2 if opcode == "DSETP" else 1)
            case "PLOP3":  # PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0: a truth table for each output
                row = sum(self.read(source) << 2 - place for place, source in enumerate(instruction.operands[2:5]))
                self.write(instruction.operands[1], int(instruction.operands[6], 16) >> row & 1)
                target, bits = instruction.operands[0], int(instruction.operands[5], 16) >> row & 1
            case "VOTE" | "VOTEU":  # VOTEU.ALL UP0, P0: all lanes agree
                target, bits = instruction.operands[0], self.read(instruction.operands[-1])
            case "SYNCS":  # SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2: what was waited for has come
                target, bits = instruction.operands[0], int("PHASECHK" in modifiers)
            case "P2R":
                bits = sum(self.read(f"P{number}") << number for number in range(7)) & self.read(sources[2])
            case "IABS":
                bits = abs(self.number(sources[0], modifiers))
            case "VIMNMX" | "IMNMX":  # VIMNMX R2, R3, R4, PT: the minimum, with !PT the maximum
                numbers = [self.number(source, modifiers) for source in sources[:2]]
                bits = min(numbers) if self.read(sources[2]) else max(numbers)
            case "I2F" if "U64" not in modifiers:  # this, MUFU.RCP and F2I: how integers are divided
                bits = float_bits(self.number(sources[0], modifiers), words)
            case "MUFU" if modifiers == ["RCP"] and (number := bits_float(self.read(sources[0]))):
                bits = float_bits(1 / number)
            case "F2I" if not {"U64", "F64"} & {*modifiers}:
                bits = int(bits_float(self.read(sources[0])))
            case _ if opcode in ONES:
                bits = float_bits(1, words)
            case _ if opcode not in ZEROS:
                return instruction.opcode in WITHOUT_EFFECT
        self.write(target, bits, words)
        return True

    def add(self, instruction: Instruction, opcode: str) -> int:
        """An integer sum. Its carries set the predicates beside the target; predicates behind the sources are added."""
        sources, upper, width = instruction.sources, "HI" in instruction.modifiers, 32
        if opcode == "IMAD":  # IMAD.WIDE.U32 R2, P0, R4, R5, R6
            width = 64 if upper or "WIDE" in instruction.modifiers else 32
            left, right = (self.number(source, instruction.modifiers) for source in sources[:2])
            total, carries = left * right + self.read(sources[2], width // 32), sources[3:]
        elif opcode == "LEA":  # LEA.HI.X R2, R3, R4, R5, 0x1, P0: the upper word of (R5, R3) << 1, plus R4
            value, rest = self.read(sources[0]), sources[2:]
            if "SX32" in instruction.modifiers:
                value = signed(value)
            elif upper:
                value |= self.read(rest.pop(0)) << 32
            value <<= self.read(rest[0])
            total, carries = (value >> 32 if upper else value & WORD) + self.read(sources[1]), rest[1:]
        else:
            addends, carries = (sources[:2], []) if opcode == "VIADD" else (sources[:3], sources[3:])
            total = sum(self.read(addend) or (addend[0] == "-") << 32 for addend in addends)  # -0 carries
        total += sum(map(self.read, carries))
        for number, predicate in enumerate(instruction.outputs):
            self.write(predicate, total >> width > number)
        return total >> 32 if upper and width == 64 else total

    def compare(self, instruction: Instruction, words: int) -> bool:
        """ISETP.GE.AND.EX P0, PT, R2, R3, P1, P2: P0 = R2 >= R3 and P1; P2 is of the lower words, if R2 is R3."""
        left, right = (self.number(source, instruction.modifiers, words) for source in instruction.operands[2:4])
        if "ISETP" not in instruction.opcode:  # the bits of negative floats compare the other way round
            left, right = (number if number >= 0 else -number - (1 << 32 * words - 1) for number in (left, right))
        result = COMPARISONS[instruction.modifiers[0][:2]](left, right)
        if "EX" in instruction.modifiers and left == right:
            result = bool(self.read(instruction.operands[5]))
        other = bool(self.read(instruction.operands[4]))
        for predicate, value in zip(instruction.operands[:2], (result, not result), strict=True):
            self.write(predicate, value and other if "AND" in instruction.modifiers else value or other)
        return True


@dataclass
class Trace:
    """What a warp did."""

    ended: str = ""  # "exit", or why the trace ends before
    instructions: int = 0
    cycles: int = 0


def trace(kernel: Kernel, launch: Launch, most_instructions: int = 1_000_000) -> Trace:
    """Follows a thread through a kernel."""
    thread, result, place, barriers = Thread(launch), Trace(), 0, [0] * 6
    place_of = {instruction.address: place for place, instruction in enumerate(kernel.instructions)}
    copied, groups = 0, list[int]()  # when copies to shared memory arrive: those of no group yet, and groups
    cluster = {"STAS": 0, "UCGABAR_ARV": 0}  # when they were issued

    def wait(until: int) -> None:
        result.cycles = max(result.cycles, until)

    while not result.ended and result.instructions < most_instructions:
        instruction = kernel.instructions[place]
        opcode, operands = instruction.opcode, instruction.operands
        place += 1
        wait(max((barriers[barrier] for barrier in instruction.waits_for), default=0))
        issued, executes = result.cycles, thread.read(instruction.guard)
        result.cycles += instruction.stall
        result.instructions += 1

        latency, arrival = LATENCY.get(opcode, OTHER_LATENCY), 0
        if opcode in LOADS:
            address = thread.address(next(operand for operand in operands if operand.startswith("desc[")))
            near = (cycles for start, cycles in launch.near if 0 <= address - start < 1 << 24)
            arrival = next(near, LOAD_FROM_DRAM)
            latency = arrival if opcode == "LDG" else latency
        if opcode in cluster and executes:
            cluster[opcode] = issued
        elif "PHASECHK" in instruction.modifiers:
            latency = max(latency, cluster["STAS"] + LATENCY["STAS"] - issued)
        elif opcode == "UCGABAR_WAIT":
            latency = max(OTHER_LATENCY, cluster["UCGABAR_ARV"] + latency - issued)
        latency = latency if executes else SKIPPED_LATENCY
        for barrier, cycles in zip(instruction.sets, (latency, min(latency, LONGEST_READ)), strict=True):
            if barrier < 6:
                barriers[barrier] = max(barriers[barrier], issued + cycles)
        if opcode in STOPS:
            wait(issued + latency)

        match opcode if executes else "":
            case "EXIT":
                result.ended = "exit"
            case "BRA":  # DIV: if the lanes differ
                if "DIV" not in instruction.modifiers and all(map(thread.read, operands[:-1])):
                    place = place_of[int(operands[-1], 16)]
            case "LDGSTS":
                copied = max(copied, issued + arrival)
            case "LDGDEPBAR":
                groups, copied = [*groups, copied], 0
            case "DEPBAR":  # DEPBAR.LE SB0, 0x1: until all groups but one have arrived
                wait(max(groups[: len(groups) - int(operands[1], 16)], default=0))
            case _ if executes and not thread.execute(instruction):
                result.ended = f"an unknown instruction at {instruction.address:#x}: {instruction.text}"
    result.ended = result.ended or f"the limit of {most_instructions} instructions"
    return result
