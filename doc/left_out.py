"""Times flash attention's forward kernel as it is, and with one thing left out at a time: what does each cost?

    python doc/left_out.py                        # prints the tables, in TF32 and in bf16
    python doc/left_out.py --precision bf16       # in one of them
    python doc/left_out.py --keep                 # keeps them in doc/left_out.json, for page 10 and its picture
    python doc/left_out.py --write                # writes page 10's tables from there

The text of kernels/flash_attention.cu is changed by replacements (LEFT_OUT), and each changed kernel is compiled and
timed. What it computes is wrong. What it costs is right only if the compiler removes no more than we did: each
replacement says how it prevents that, and the instructions of the main loop are counted to see it (`instructions`).

Counts are of the machine code for compute capability 9.0, which NVRTC makes on any machine. The main loop goes over the
tiles left of the diagonal. What it skips as long as the reference stays where it is does not count.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
import re
import statistics
import struct
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial

import device
from dev.bench.attention import median_us
from dev.bench.ceilings import random_array
from dev.microscope.report import columns
from device.bf16 import DEFINES, floatX_of
from device.cuda import NVRTC_OPTIONS
from device.errors import UserError
from llmc.files.files import replacing
from llmc.run.arguments import Parser
from llmc.run.program import run_program

ROOT = Path(__file__).resolve().parents[1]
KERNEL = ROOT / "kernels" / "flash_attention.cu"
PAGE = ROOT / "doc" / "10-flash-attention-machine.md"
KEPT = Path(__file__).with_name("left_out.json")
NAME = "flash_attention_forward_kernel_64"

NH, HS = 12, 64
SHAPES = (4, 1024), (16, 1024), (4, 4096)  # B, T
BATCHES = 1, 2, 3, 4, 6, 8, 16, 32, 64     # at T 1024: how much do the waves of blocks cost?
PRECISIONS = "tf32", "bf16"
LAYERS, ROUNDS, RUNS = 3, 5, 20            # sets of arrays in turn; times that a variant is measured, and its launches

# ---- what is left out

# A piece of the forward kernel, what takes its place, and how often the piece is there.
Replacement = tuple[str, str, int]

# MUFU goes, and the exponent itself is summed. A hidden score of -inf would make all sums NaN, and tensor cores draw
# less power on NaNs: it becomes -8.
EXPONENTIALS: list[Replacement] = [
    ("const float x = exp2_approx(p[m][n][i]);", "const float x = p[m][n][i];", 1),
    ("16 * m + 8 * h + g) x = -INFINITY;", "16 * m + 8 * h + g) x = -8.0f;", 1),
]
# A lane loads its operands once, before the loop, and holds them. If they stayed the same, so would the scores, and the
# compiler could take their products out of the loop. In TF32 rounding adds 0x1000 to each number that is loaded. Here
# the sum is the next number: there are as many additions as before, and each product has other operands. In bf16 the
# operands of a step's first products grow by a number that is 0, but which the compiler does not know.
LOADS: list[Replacement] = [
    (
        "    int copy;             // the first chunk",
        "    mutable float4 held;\n"
        "    __device__ void hold(const float* tile, unsigned) const {\n"
        "        held = *reinterpret_cast<const float4*>(tile + score(0));\n"
        "    }\n"
        "    __device__ float4 next() const {\n"
        "        const float4 x = held;\n"
        "        held = make_float4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w));\n"
        "        return x;\n"
        "    }\n"
        "    int copy;             // the first chunk",
        1,
    ),
    (
        "    int by_row, by_column, copy;\n",
        "    int by_row, by_column, copy;\n"
        "    mutable unsigned held[2][4], zero;\n"
        "    __device__ void hold(const bf16* tile, unsigned none) const {\n"
        "        for (int i = 0; i < 2; i++) load_matrices<false>(held[i], tile + at(by_row, 16 * i, 0));\n"
        "        zero = none;\n"
        "    }\n"
        "    __device__ void next(unsigned (&r)[4], int n, bool changed) const {\n"
        "        if (changed) held[n][0] += zero, held[n][2] += zero;\n"
        "        for (int i = 0; i < 4; i++) r[i] = held[n][i];\n"
        "    }\n",
        1,
    ),
    (
        "    copies_finish();\n    q.finish(offsets);\n",
        "    copies_finish();\n    q.finish(offsets);\n    offsets.hold(tiles[0][0], (unsigned)T >> 24);\n",
        1,
    ),
    ("b[n] = *reinterpret_cast<const float4*>(tile + offsets.score(k) + 8 * n * HS);", "b[n] = offsets.next();", 1),
    (
        "const float2 even = *reinterpret_cast<const float2*>(tile + offsets.sum[0](j) + 8 * n * HS);",
        "const float4 next = offsets.next();",
        1,
    ),
    (
        "const float2 odd = *reinterpret_cast<const float2*>(tile + offsets.sum[1](j) + 8 * n * HS);",
        "const float2 even = make_float2(next.x, next.y), odd = make_float2(next.z, next.w);",
        1,
    ),
    ("load_matrices<false>(b[n], tile + offsets.at(offsets.by_row, 16 * n, k));", "offsets.next(b[n], n, k == 0);", 1),
    ("load_matrices<true>(b, tile + offsets.at(offsets.by_column, 8 * n, j));", "offsets.next(b, n / 2, false);", 1),
]
# Both stages are filled once. Nothing more can go: the compiler takes shared memory for changed behind each barrier.
COPIES: list[Replacement] = [
    ("    start(tile, stage);\n", "    start(tile, 0);\n    start(tile, 1);\n", 1),
    ("        start(tile - 1, stage ^ 1);\n", "", 2),
]
# The wait for the copies stays, and being volatile it keeps the loads behind it.
BARRIER: list[Replacement] = [("    copies_wait();\n    __syncthreads();\n", "    copies_wait();\n", 1)]
# With the question go the largest scores, which nothing else needs.
QUESTION: list[Replacement] = [
    ("if (DIAGONAL || __any_sync(ALL_LANES, highest > 8.0f)) {", "if (DIAGONAL) {", 1),
]
# The tensor core cuts off the bits that it does not take. All else of an operand stays.
ROUNDING: list[Replacement] = [("return __uint_as_float(__float_as_uint(x) + 0x1000u);", "return x;", 1)]
# Each product becomes one multiply-add of one number of each operand. Over a tile these take every number that is
# loaded and rounded, and every p, and give every score: so none of those goes.
SCORES: list[Replacement] = [
    (
        "mma(s[m][n], a[m][0], to_tf32(b[n].x, b[n].y, keep_nan), to_tf32(b[n].y), s[m][n]);",
        "s[m][n][2 * k % 4] = fmaf(a[m][0][k], m == 0 ? to_tf32(b[n].x, b[n].y, keep_nan) : to_tf32(b[n].y), "
        "s[m][n][2 * k % 4]);",
        1,
    ),
    (
        "mma(s[m][n], a[m][1], to_tf32(b[n].z, b[n].w, keep_nan), to_tf32(b[n].w), s[m][n]);",
        "s[m][n][2 * k % 4 + 1] = fmaf(a[m][1][k], m == 0 ? to_tf32(b[n].z, b[n].w, keep_nan) : to_tf32(b[n].w), "
        "s[m][n][2 * k % 4 + 1]);",
        1,
    ),
    (
        "mma_bf16(s[m][n], a[m][0], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], s[m][n]);",
        "s[m][n][k] = fmaf(__uint_as_float(a[m][0][k]), __uint_as_float(b[n / 2][n % 2 * 2 + m]), s[m][n][k]);",
        1,
    ),
]
SUMS: list[Replacement] = [
    (
        "mma(sum[j][2 * m + h], a, p[m][n][2 * h], p[m][n][2 * h + 1], sum[j][2 * m + h]);",
        "sum[j][2 * m + h][n] = fmaf(a[2 * m + h], p[m][n][2 * h + j % 2], sum[j][2 * m + h][n]);",
        1,
    ),
    (
        "mma_bf16(sum[j][2 * m + h], a[m], b[2 * h], b[2 * h + 1], sum[j][2 * m + h]);",
        "sum[j][2 * m + h][n] = fmaf(__uint_as_float(a[m][j]), __uint_as_float(b[2 * h + m]), sum[j][2 * m + h][n]);",
        1,
    ),
]
# Every block takes the rows in the middle, whose number of tiles is the mean.
TRIANGLE: list[Replacement] = [
    ("const int first = (gridDim.y - 1 - blockIdx.y) * WARPS,", "const int first = (gridDim.y - 1) * WARPS / 2,", 1),
]
LEFT_OUT = {
    "nothing": [],
    "the exponentials": EXPONENTIALS,
    "the loads from shared memory": LOADS,
    "the copies from device memory, but the first": COPIES,
    "the barrier": BARRIER,
    "the question whether the reference moves": QUESTION,
    "the rounding to TF32": ROUNDING,
    "the products of the scores": SCORES,
    "the products of the sums": SUMS,
    "all products": SCORES + SUMS,
    "all but the products and the rounding": EXPONENTIALS + LOADS + COPIES + BARRIER + QUESTION,
    "the triangle: all blocks have the mean length": TRIANGLE,
}
# What then goes of each kind of instruction in SURE, as a share; of the others nothing may.
GOES = {
    "nothing": {},
    "the exponentials": {"exponentials": 1},
    "the loads from shared memory": {"loads from shared memory": 1},
    "the copies from device memory, but the first": {"copies from device memory": 1},
    "the barrier": {"barrier": 1},
    "the question whether the reference moves": {"maxima and votes": 1},
    "the rounding to TF32": {},
    "the products of the scores": {"products": 0.5},
    "the products of the sums": {"products": 0.5},
    "all products": {"products": 1},
    "all but the products and the rounding": {
        "exponentials": 1, "loads from shared memory": 1, "copies from device memory": 1, "barrier": 1,
        "maxima and votes": 1,
    },
    "the triangle: all blocks have the mean length": {},
}  # fmt: skip


def parts(precision: str) -> list[str]:
    """What is left out in a precision."""
    return [part for part in LEFT_OUT if precision == "tf32" or part != "the rounding to TF32"]


def forward_text() -> str:
    """Of the kernel's file, with what it includes, all that the forward kernel for heads of 64 channels needs."""
    shared, _, behind = device.cuda_source(KERNEL).partition("// ---- backward\n")
    before, name, after = behind.partition(f"{NAME}(")
    return shared + before[before.rindex('extern "C"') :] + name + after[: after.index("\n}\n") + 3]


def replaced(replacements: list[Replacement]) -> str:
    """The same with these replacements. Raises UserError where a piece is not there as often as it should be."""
    text = forward_text()
    for old, new, times in replacements:
        if text.count(old) != times:
            raise UserError(f"flash_attention.cu has `{old.strip()}` {text.count(old)} times, not {times}")
        text = text.replace(old, new)
    return text


# ---- the instructions of the main loop

INTEGERS = "integers"
# By bits 0 to 8 of an instruction of compute capability 9.0.
KINDS = {
    "products": (0x03C,),                          # HMMA
    "loads from shared memory": (0x184, 0x03B),    # LDS, LDSM
    "copies from device memory": (0x1AE,),         # LDGSTS
    "barrier": (0x11D,),                           # BAR
    "exponentials": (0x108,),                      # MUFU
    "maxima and votes": (0x009, 0x006),            # FMNMX, VOTE
    "multiplications and additions": (0x020, 0x021, 0x023),  # FMUL, FADD, FFMA
    "roundings to bf16": (0x03E,),                 # F2FP
    "spilled registers": (0x183, 0x187),           # LDL, STL
    INTEGERS: (
        0x010, 0x011, 0x012, 0x019, 0x024, 0x025, 0x027, 0x036, 0x007, 0x00C,  # IADD3, LEA, LOP3, SHF, IMAD, VIADD, ...
    ),
}  # fmt: skip
KIND_OF = {code: kind for kind, codes in KINDS.items() for code in codes}
REST = "all else"
OF_INTEGERS = {"tf32": "roundings to TF32, addresses", "bf16": "addresses, the loop"}  # what they are, by precision
BRANCH, WAIT = 0x147, 0x1AF  # BRA, LDGDEPBAR
NEVER = -1                   # what is under the predicate @!PT only takes its turn
SURE = (
    "products", "loads from shared memory", "copies from device memory", "barrier", "exponentials", "maxima and votes",
    "spilled registers",
)  # fmt: skip


def machine_code(text: str, precision: str) -> list[tuple[int, int]]:
    """The kernel's instructions for compute capability 9.0, each as its two words of 64 bits."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(text, KERNEL.name, [], [])
    options = (*NVRTC_OPTIONS, "--device-as-default-execution-space", "--gpu-architecture=sm_90")
    try:
        nvrtc.compileProgram(program, (*options, *DEFINES[floatX_of(precision)]))
        elf = nvrtc.getCUBIN(program) + b"\0"  # CuPy drops the last byte
    except nvrtc.NVRTCError:
        raise UserError(nvrtc.getProgramLog(program).strip("\0")) from None
    finally:
        nvrtc.destroyProgram(program)
    (table,) = struct.unpack_from("<Q", elf, 40)  # of the sections
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]  # name, ., ., ., at, bytes
    for name, _, _, _, at, length in sections:
        if elf[sections[names][4] + name :].startswith(f".text.{NAME}\0".encode()):
            return list(struct.iter_unpack("<QQ", elf[at : at + length]))
    raise UserError(f"NVRTC's machine code has no kernel {NAME}")


def target(i: int, low: int, high: int) -> int:
    """Where the branch that is instruction i leads, as the number of an instruction."""
    offset = (high & 0x3FFFF) << 38 | low >> 34 << 8 | low >> 16 & 0xFF  # in words of 4 bytes
    return i + 1 + (offset - (offset >> 55 << 56)) // 4


def instructions(text: str, precision: str) -> dict[str, int]:
    """Instructions in a round of the main loop, by kind: those that are not skipped as long as the reference stays."""
    code = machine_code(text, precision)
    kinds = [NEVER if low >> 12 & 0xF == 0xF else low & 0x1FF for low, _ in code]
    branches = {i: target(i, *code[i]) for i in range(len(code)) if kinds[i] == BRANCH}
    # Both of forward's loops over tiles wait for copies, whatever is left out, and the main one is the second.
    begin, end = max((begin, i) for i, begin in branches.items() if WAIT in kinds[begin:i])
    counted, i = Counter(), begin
    while i <= end:
        counted[KIND_OF.get(kinds[i], REST)] += 1
        i = branches[i] if i in branches and i < branches[i] <= end else i + 1
    return {kind: counted[kind] for kind in (*KINDS, REST)}


def more_than_meant(part: str, counted: dict[str, int], whole: dict[str, int]) -> str:
    """What the compiler removed or added beside what was left out, in a line; empty where it did not."""
    want = {kind: round(whole[kind] * (1 - GOES[part].get(kind, 0))) for kind in SURE}
    return ", ".join(f"{kind}: {counted[kind]}, not {want[kind]}" for kind in SURE if counted[kind] != want[kind])


# ---- times

# The longest block's clocks and nanoseconds, taken by the thread that has written this row of lse.
CLOCK: Replacement = (
    "    forward<64, 2, 4, true>(out, lse, qkv, T, NH, NKV);\n",
    "    const long long clocks = clock64();\n"
    "    unsigned long long begin, end;\n"
    '    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));\n'
    "    forward<64, 2, 4, true>(out, lse, qkv, T, NH, NKV);\n"
    '    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));\n'
    "    if (threadIdx.x == 124 && blockIdx.x + blockIdx.y == 0)\n"
    "        lse[T - 1] = 1e3f * (clock64() - clocks) / (end - begin);  // MHz\n",
    1,
)
# A loop of nothing but products, on as many warps as forward has: the most that these instructions can do.
PRODUCTS_KERNEL = """
extern "C" __global__ void __launch_bounds__(THREADS, 2) products_kernel(float* out, int rounds) {
    float d[8][4] = {}, sum = 0.0f;
    Word a[4], b[2];
    for (int i = 0; i < 6; i++) {
        const unsigned bits = 0x3f803f80u | (threadIdx.x * 37 + i * 11) % 128 * 0x00010001u;  // from 1 to 2
        (i < 4 ? a[i] : b[i - 4]) = reinterpret_cast<const Word&>(bits);
    }
    for (int i = 0; i < 8; i++) d[i][0] = i;
    #pragma unroll 4
    for (int round = 0; round < rounds; round++) {
        #pragma unroll
        for (int i = 0; i < 8; i++) MMA(d[i], a, b[0], b[1], d[i]);
    }
    for (int i = 0; i < 8; i++) sum += d[i][0] + d[i][1] + d[i][2] + d[i][3];
    out[blockIdx.x * THREADS + threadIdx.x] = sum;
}
"""
PRODUCTS_ROUNDS = 20_000


def timed(recorded: Callable[[], None]) -> float:
    """Microseconds of recorded work between two events: the median."""
    from cupy.cuda import Event, get_elapsed_time

    return median_us(recorded, RUNS, Event, get_elapsed_time)


def arrays(B: int, T: int) -> tuple:
    """out, lse and qkv of a layer."""
    return random_array(B * T * NH * HS), device.zeros((B, NH, T)), random_array(B * T * 3 * NH * HS)


class Variants:
    """The variants of the kernel, compiled for the device in a precision, which is the one in use."""

    def __init__(self, precision: str, folder: Path):
        self.precision = precision
        bf16 = precision == "bf16"
        texts = {part: replaced(LEFT_OUT[part]) for part in parts(precision)}
        texts["clock"] = replaced([CLOCK])
        texts["products"] = forward_text() + PRODUCTS_KERNEL.replace("MMA", "mma_bf16" if bf16 else "mma")
        self.sources = {}
        for i, (part, text) in enumerate(texts.items()):
            path = folder / f"{precision}_{i}.cu"
            path.write_text(text, "utf-8")
            self.sources[part] = device.Source(path)
        device.current.device.compile_all([source.path for source in self.sources.values()])
        self.operand_bytes = 128 * HS * 2 if bf16 else 0  # of a block's queries in shared memory

    def launch(self, part: str, out, lse, qkv, B: int, T: int) -> None:
        grid, args = (B * NH, device.ceil_div(T, 128)), (out, lse, qkv, T, NH, NH)
        self.sources[part].launch(NAME, grid, (128,), args, shared_mem=self.operand_bytes)

    def times(self, B: int, T: int, parts: list[str]) -> dict[str, float]:
        """Microseconds of each variant. They are measured in turn, again and again: a GPU's clock changes as it
        warms."""
        layers = [arrays(B, T) for _ in range(LAYERS)]

        def work(part: str) -> None:
            for layer in layers:
                self.launch(part, *layer, B, T)

        recorded = {part: device.record(partial(work, part)) for part in parts}
        rounds = [{part: timed(replay) / LAYERS for part, replay in recorded.items()} for _ in range(ROUNDS)]
        return {part: round(statistics.median(times[part] for times in rounds), 2) for part in parts}

    def clock_mhz(self, B: int, T: int) -> float:
        """The multiprocessors' clock while the kernel runs, the mean of some launches."""
        out, lse, qkv = arrays(B, T)
        found = []
        for _ in range(RUNS):
            for _ in range(50):
                self.launch("clock", out, lse, qkv, B, T)
            found.append(float(device.to_host(lse)[0, 0, T - 1]))
        return round(statistics.mean(found))

    def product_flops(self) -> float:
        """FLOP/s of a loop of nothing but products."""
        blocks = 2 * device.multiprocessors
        out = device.zeros((blocks * 128,))
        launch = partial(self.sources["products"].launch, "products_kernel", (blocks,), (128,), (out, PRODUCTS_ROUNDS))
        us = timed(device.record(launch))
        return blocks * 4 * 8 * PRODUCTS_ROUNDS * product_size(self.precision) / (us * 1e-6)


def product_size(precision: str) -> int:
    """FLOPs of one instruction: 16 x 8 x 8, or in bf16 16 x 8 x 16."""
    return 2 * 16 * 8 * (16 if precision == "bf16" else 8)


def measure(precision: str, folder: Path) -> dict:
    """What is kept of a precision."""
    device.use_precision(precision)
    print(f"{precision}: compiling", flush=True)
    variants, counts = Variants(precision, folder), {}
    for part in parts(precision):
        counts[part] = instructions(replaced(LEFT_OUT[part]), precision)
        if more := more_than_meant(part, counts[part], counts["nothing"]):
            print(f"without {part} the compiler changed more than was meant: {more}", flush=True)
    kept = {"MHz": {}, "products": round(variants.product_flops() / 1e12, 1), "times": {}}
    for B, T in SHAPES:
        print(f"{precision}: measuring {name_of(B, T)}", flush=True)
        kept["MHz"][name_of(B, T)] = variants.clock_mhz(B, T)
        kept["times"][name_of(B, T)] = variants.times(B, T, parts(precision))
    T = SHAPES[0][1]
    print(f"{precision}: measuring B {', '.join(map(str, BATCHES))} at T {T}", flush=True)
    kept["batches"] = {str(B): variants.times(B, T, ["nothing"])["nothing"] for B in BATCHES}
    return kept | {"instructions": counts}


# ---- what is shown


def name_of(B: int, T: int) -> str:
    return f"B {B}, T {T}"


def percent(share: float, sign: str = "") -> str:
    """As the tables have it; with the sign "+" gains have one, too. What rounds to 0 has none."""
    text = f"{share:{sign}.0%}"
    return "0%" if text in ("-0%", "+0%") else text


def rows_left_out(kept: dict) -> list[tuple[str, ...]]:
    """What is left out; at each shape the microseconds, and the share of the time that is gained."""
    rows = [("left out", *(head for name in kept["times"] for head in (f"{name}: µs", "gained")))]
    for part in parts(kept["precision"]):
        cells = [part]
        for times in kept["times"].values():
            gained = percent(1 - times[part] / times["nothing"]) if part != "nothing" else ""
            cells += [f"{times[part]:.1f}", gained]
        rows.append(tuple(cells))
    return rows


def rows_of_instructions(kept: dict) -> list[tuple[str, ...]]:
    """Warp instructions in a round of the main loop, and for each product of 16 x 8 x 8."""
    counted, scale = kept["instructions"]["nothing"], 2048 / product_size(kept["precision"])
    rows = [("instructions of a warp", "in a round", "for each product of 16 x 8 x 8")]
    for kind, count in (counted | {"all": sum(counted.values())}).items():
        if count:
            kind = f"{kind}: {OF_INTEGERS[kept['precision']]}" if kind == INTEGERS else kind
            rows.append((kind, str(count), f"{count / counted['products'] * scale:.2f}"))
    return rows


def rounds(precision: str, B: int, T: int) -> float:
    """Rounds of all warps: of 32 queries and, in a round, 32 keys, or 64 in bf16."""
    tiles = T // 32
    return B * NH * tiles * (tiles + 1) / 2 / (2 if precision == "bf16" else 1)


def least_times(kept: dict, name: str) -> dict[str, tuple[str, float]]:
    """For each thing that could bound the kernel, what a round needs of it, and the microseconds that all rounds take
    if it is never idle."""
    B, T = (int(word) for word in re.findall(r"\d+", name))
    counted, all_rounds = kept["instructions"]["nothing"], rounds(kept["precision"], B, T)
    flops = all_rounds * counted["products"] * product_size(kept["precision"])
    of_products = f"{counted['products']} products, at {kept['products']:.0f} TFLOP/s"
    found = {"tensor cores": (of_products, flops / kept["products"] / 1e6)}
    # A warp reads the tile of 16 KiB whole, and writes a quarter of the next, 128 bytes a pass.
    passes, exponentials, issued = 128 + 32, counted["exponentials"], sum(counted.values())
    for bound, (needs, clocks) in {
        "issue of instructions": (f"{issued} instructions, 4 a clock", issued / 4),
        "shared memory": (f"{passes} passes, 1 a clock", passes),
        "exponentials": (f"{exponentials} instructions, 1 in 2 clocks", 2 * exponentials),
    }.items():
        found[bound] = needs, all_rounds * clocks / kept["multiprocessors"] / kept["MHz"][name]
    return found


def rows_of_bounds(kept: dict) -> list[tuple[str, ...]]:
    heads = (head for name in kept["times"] for head in (f"{name}: µs", "share"))
    rows = [("bound", "a round needs of a multiprocessor", *heads)]
    of_shapes = [(least_times(kept, name), times["nothing"]) for name, times in kept["times"].items()]
    for bound, (needs, _) in of_shapes[0][0].items():
        shares = ((f"{least[bound][1]:.1f}", percent(least[bound][1] / us)) for least, us in of_shapes)
        rows.append((bound, needs, *(cell for pair in shares for cell in pair)))
    return rows


def rows_of_batches(kept: dict) -> list[tuple[str, ...]]:
    T = SHAPES[0][1]
    rows = [("B", "blocks", "waves", "µs", "µs a sequence", "TFLOP/s")]
    for B, us in ((int(B), us) for B, us in kept["batches"].items()):
        blocks = B * NH * T // 128
        waves = blocks / (2 * kept["multiprocessors"])
        flops = 2 * 2 * B * NH * HS * T * T / 2
        rows.append((str(B), str(blocks), f"{waves:.2f}", f"{us:.1f}", f"{us / B:.2f}", f"{flops / us / 1e6:.0f}"))
    return rows


TABLES = rows_left_out, rows_of_bounds, rows_of_instructions, rows_of_batches


def markdown(rows: list[tuple[str, ...]]) -> str:
    head, *others = rows
    lines = [head, ("---", *("--:" for _ in head[1:])), *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def kept_measurement() -> dict:
    return json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}


def of_precision(kept: dict, precision: str) -> dict:
    return kept[precision] | {"precision": precision, "multiprocessors": kept["multiprocessors"]}


MARKERS = re.compile(r"^(<!-- left out: (\w+), (\w+) -->)$.*?^(<!-- end of left out -->)$", re.M | re.S)


def with_tables(page: str, kept: dict) -> str:
    """A page's text with each table between its markers, nothing between those of what has not been measured."""

    def fill(match: re.Match) -> str:
        begin, precision, table, end = match.groups()
        functions = {function.__name__.rpartition("_")[2]: function for function in TABLES}
        rows = f"{markdown(functions[table](of_precision(kept, precision)))}\n" if precision in kept else ""
        return f"{begin}\n{rows}{end}"

    return MARKERS.sub(fill, page)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=PRECISIONS, help="of the products (both)")
    parser.add_argument("--keep", action="store_true", help=f"keep what was measured in doc/{KEPT.name}")
    parser.add_argument("--write", action="store_true", help=f"only write the tables of {PAGE.name} from there")
    args = parser.parse_args()
    if args.write:
        before = PAGE.read_text("utf-8")
        if (after := with_tables(before, kept_measurement())) != before:
            with replacing(PAGE) as file:
                file.write(after.encode())
            print(f"written: {PAGE.relative_to(ROOT)}")
        return
    if device.use() != "cuda":
        raise UserError(f"left_out: times are measured on a GPU, and CUDA does not work here ({device.why_not_cuda})")
    if device.compute_capability < 80:
        raise UserError(f"{device.name} has no TF32, which flash attention uses")
    kept = kept_measurement() if args.keep else {}
    kept |= {"device": device.name, "multiprocessors": device.multiprocessors}
    print(f"{device.name}, {NH} heads of {HS}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for precision in [args.precision] if args.precision else PRECISIONS:
            kept[precision] = measure(precision, Path(folder))
            clocks = ", ".join(f"{clock} MHz at {name}" for name, clock in kept[precision]["MHz"].items())
            print(f"\n{precision}: {clocks}")
            for table in TABLES:
                print(*columns(table(of_precision(kept, precision)), left=1), "", sep="\n", flush=True)
    if args.keep:
        with replacing(KEPT) as file:
            file.write((json.dumps(kept, indent=1) + "\n").encode())
        print(f"written: {KEPT.relative_to(ROOT)}")


if __name__ == "__main__":
    run_program(main)
