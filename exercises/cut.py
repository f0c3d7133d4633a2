"""The exercises, and how their files come about: a solved source, of which some lines are cut out.

A source is a file of solutions/, or some parts of a kernel file of the repository. So nothing is kept twice. Places are
named as doc/places.py does it: by a function and how a line of it begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from device.cpp.compiler import installed_compiler
from device.errors import UserError
from doc.places import definition, only, resolve

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = HERE / "work"


@dataclass(frozen=True)
class Hole:
    """The lines from the place `first` to the one before the next that begins with `until`: a blank one may be the end
    of the file, and a brace is the one that closes what `first` is in. `text` takes their place, indented alike."""

    first: str
    until: str
    text: str = ""


@dataclass(frozen=True)
class Exercise:
    """source: under the repository's root; without one it is in solutions/. Of a kernel file its head is taken, down to
    the #includes, and each of `parts`: the function, struct or constant of this name, and the comment above it.
    header: one that the source includes and that has some of the parts; the text of it stands for its #include.
    head: takes the place of a head that gives away what is to be found.
    renamed: a name of the source, and what it is called in the exercise."""

    name: str
    holes: tuple[Hole, ...]
    kind: str = "cu"
    source: str = ""
    header: str = ""
    parts: tuple[str, ...] = ()
    head: str = ""
    renamed: tuple[str, str] = ("", "")
    microscope: bool = False     # the check needs the microscope

    @property
    def number(self) -> int:
        return [exercise.name for exercise in EXERCISES].index(self.name) + 1

    @property
    def file(self) -> str:
        return f"{self.number:02}_{self.name}.{self.kind}"

    def watched(self) -> bool:
        """Whether the check watches every access of the kernels: where it can, and where it must."""
        return self.kind == "cu" and (self.microscope or "clang" not in installed_compiler()[1])

    @property
    def path(self) -> Path:
        """The solved source."""
        return ROOT / self.source if self.source else HERE / "solutions" / self.file


def whole(exercise: Exercise) -> str:
    """The solved exercise as a file of WORK would have it."""
    text = exercise.path.read_text("utf-8")
    if not exercise.parts:
        return text
    if exercise.header:
        header = (exercise.path.parent / exercise.header).read_text("utf-8")
        text = text.replace(f'#include "{exercise.header}"\n', header)
    lines = text.splitlines()
    with mending(exercise):
        includes = [i for i, line in enumerate(lines) if line.startswith('#include "')]
        folder = f"../../{exercise.path.parent.relative_to(ROOT)}/"
        taken = exercise.head.splitlines() or lines[: includes[0]]
        taken += [lines[i].replace('"', f'"{folder}', 1) for i in includes]
        for part in exercise.parts:
            where = definition(lines, part)
            begin = where[0]
            while lines[begin - 1]:
                begin -= 1
            taken += ["", *lines[begin : where[-1] + 1]]
    return "\n".join(taken).replace(*exercise.renamed) + "\n"


def start(exercise: Exercise) -> str:
    """What the learner begins with: the same with the holes in it."""
    lines = whole(exercise).splitlines()
    for hole in exercise.holes:
        with mending(exercise):
            _, where, begins, _ = resolve(lines, hole.first)
            first = only(lines, where, begins)
            indent = lines[first][: -len(lines[first].lstrip())]
            rest = (i for i in range(first, len(lines)) if begins_with(lines[i].strip(), hole.until))
            last = next((i for i in rest if hole.until != "}" or not lines[i].startswith(indent)), None)
            if last is None and hole.until:
                raise UserError(f"no line `{hole.until}` after `{hole.first}`")
        lines[first:last] = [indent + line for line in hole.text.splitlines()]
    return "\n".join(lines) + "\n"


def begins_with(line: str, text: str) -> bool:
    return line.startswith(text) if text else not line


@contextmanager
def mending(exercise: Exercise) -> Iterator[None]:
    """An error says which exercise needs another place, and where its places are."""
    try:
        yield
    except UserError as error:
        source = exercise.path.relative_to(ROOT)
        raise UserError(f"exercises/cut.py, {exercise.name}: {source}: {error}: name another place there") from None


BODY = "// Write here."


def in_python(name: str, *places: str) -> Exercise:
    """An exercise whose holes are bodies of Python functions, from these places on."""
    return Exercise(name, tuple(Hole(place, "", "raise NotImplementedError  # Write here.") for place in places), "py")


EXERCISES = (
    Exercise("who_am_i", (Hole("who_am_i_kernel: const int i", "}", BODY),)),
    Exercise("guard", (Hole("twice_kernel: const int i", "}", BODY),)),
    Exercise("plane", (Hole("add_bias_kernel: const int c", "}", BODY),)),
    Exercise("neighbours", (Hole("neighbours_kernel: const int i", "}", BODY),), microscope=True),
    Exercise(
        "race",
        (
            Hole("row_sums_kernel: __syncthreads();  // the row", "for (int half"),
            Hole("row_sums_kernel: __syncthreads();  // this half", "}"),
        ),
        microscope=True,
    ),
    Exercise("shuffle", (Hole("warp_sums_kernel: float sum", "}", BODY),), microscope=True),
    in_python("sectors", "sectors: return"),
    in_python("banks", "passes: banks =", "passes_of_stride: return"),
    Exercise(
        "bias_gradient",
        (
            Hole("column_partials_kernel: Vec sum", "memory.store(", """\
Vec sum = {};
// Write here: sum.x[0] to sum.x[3] = the sums of columns i to i + 3 over the rows from `begin` to `end` - 1.
// memory.load(p, C - i) gives the four floats from p on, with 0 for those past the end of the row."""),
            Hole("add_partials_kernel: for (int offset", "out[i] =", """\
// Write here: thread (x, y) has column i's `sum` over every blockDim.y-th of the P chunks. Bring the blockDim.y sums
// of a column together; the thread that `adds` needs their total. `thread` counts the block's threads: lanes of a warp
// that are blockDim.x apart have the same column, so shuffles add these up. warp_sums brings the warps together.
if (!adds) return;
float total = 0.0f;"""),
        ),
        source="kernels/reduce.cu",
        head="""\
// Exercise 9: bias gradient, in two kernels.
//
// The gradient of a bias is the sum of the rows of dout (N, C). The first kernel adds up chunks of `rows` rows; its inp
// is dout. The second adds up the chunks' sums, and adds the result to what is in out: gradients accumulate. (It can do
// that for up to six outputs at once. Here there is one, so S is 1, and y and s are 0.)
// floatX is float here, and WIDTH is 4: a Vec v has the four numbers v.x[0] to v.x[3].
""",
        parts=("column_partials_kernel", "add_partials_kernel"),
        microscope=True,
    ),
    Exercise(
        "layernorm",
        (
            Hole("norm_row: float m = 0.0f", "if (threadIdx.x == 0)", """\
float m = 0.0f, s = 0.0f;
// Write here: m = the row's mean, s = its rstd, and the row of norm0.out.
// `sum` is what this thread's numbers add up to; row_sum(sum) gives all threads of the row the sum over it.
// The thread's numbers wait in `row`, at i = first, first + step, ... : Aligned::load(row + i, WIDTH) gives
// WIDTH of them: four in fp32. If C is no multiple of WIDTH, the last ones lie past the end of the row. The variance
// must leave those out. memory.load(norm0.weight + i, C - i) and memory.store(norm0.out + start + i, x, C - i) move
// WIDTH numbers, or what is there."""),
        ),
        source="kernels/layernorm.cu",
        header="norm.cuh",
        head="""\
// Exercise 10: layernorm, forward.
//
//   out = (x - mean) * rstd * weight + shift   for each row of x (N, C);   rstd = 1 / sqrt(variance + eps)
// mean and variance are those of the row. The kernel writes mean (N) and rstd (N), too. It is complete in how it starts
// early (PROGRAMMATIC, page 13), and in what others need: a second out, no mean. Here mean and norm0 are given, and
// norm1.out is null.
// floatX is float here, and WIDTH is 4: a Vec v has the four numbers v.x[0] to v.x[3]. rsqrtf(1.5f) is 1 / sqrt(1.5).
""",
        parts=(
            "scale_and_shift", "Norm", "normalised", "row_sum", "norm_row", "row_of_thread", "memory_of_row",
            "norm_forward", "layernorm_forward_kernel",
        ),
    ),
    in_python("tf32", "fields: bits =", "to_tf32: bits ="),
    Exercise("transpose", (Hole("transpose_tile_kernel: __shared__", "}", BODY),), microscope=True),
    Exercise(
        "gelu",
        (
            Hole("gradient: const float slope", "}", """\
// Write here: the derivative of gelu at x. s is share(x).
return 0.0f;"""),
            Hole("differentiate: const float x", "}", """\
// Write here: d, which is dout, becomes the gradient of the input, and inp becomes gelu(inp + bias)."""),
        ),
        source="kernels/gelu.cu",
        header="gelu.cuh",
        head="""\
// Exercise 13: GELU backward.
//
// gelu(x) = x * s(x) with s(x) = sigmoid(2u) and u = sqrt(2/pi) * (x + 0.044715 x^3). Here x = inp + bias, where inp is
// (N, C) and bias is (C). Given dout, the gradient of gelu's output, the kernel writes
//   dout (N, C): the gradient of inp, in place;
//   out_T (C, N): gelu(x), transposed by the tile;
//   partials (gridDim.y, C): of each chunk of rows the sums of the gradient, for the bias.
// share is s(x). gradient, the derivative of gelu, is not there yet.
""",
        parts=(
            "TWICE_SQRT_2_OVER_PI", "reciprocal", "share", "gradient", "differentiate", "backward",
            "gelu_backward_kernel",
        ),
    ),
    in_python("online_softmax", "fold: new =", "merge: largest = max("),
    Exercise(
        "softmax",
        (
            Hole("softmax_forward_kernel: float largest", "});", """\
// Write here: the first `length` numbers of the row, times scale, become their softmax, and all behind them 0.
// Scores may be large, but no exponential may overflow. The warp has the row to itself. Its lanes take four columns
// each, at s = 4 * lane, 4 * lane + 4 * WARP_SIZE, ... memory.load(row + s, T - s) and memory.store(row + s, x, T - s)
// move four; warp_max(x) and warp_sum(x) give every lane the largest x of the warp's lanes, and their sum."""),
        ),
        source="kernels/attention.cu",
        head="""\
// Exercise 15: softmax.
//
// att (B, NH, T, T) holds the scores of every query (row) and key (column), not yet multiplied by `scale`. A query sees
// the keys up to its own position. The kernel makes its scores attention weights, in place: softmax over the keys that
// the query sees, and 0 for all others, since the product that follows reads whole rows.
""",
        parts=("softmax_forward_kernel",),
    ),
    in_python("flash_forward", "flash_forward: largest, total ="),
    in_python("flash_backward", "flash_backward: D ="),
    in_python("fragments", *(f"{name}: return" for name in ("a_at", "b_at", "c_at", "holder_of_c"))),
    Exercise(
        "adamw",
        (
            Hole("adamw_kernel: const float grad", "}", """\
// Write here: m4.x[k], v4.x[k] and p.x[k] after the step; the gradient is scale * g.x[k]."""),
        ),
        source="kernels/adamw.cu",
        head="""\
// Exercise 19: AdamW.
//
// m is a moving average of the gradient, v one of its square: beta1 and beta2 say how much of the old average stays.
// Both began at 0, so after t steps they are too small, by the factors correction1 = 1 - beta1^t and correction2 =
// 1 - beta2^t. Correct that first. A step goes against m. Its unit is the root of v, and eps is added to the root. lr
// scales the step. Weight decay is a term of its own: the parameter loses the share lr * weight_decay.
""",
        parts=("MAX_GRADIENT", "split", "join", "Halves", "load_master", "store_master", "adamw_kernel"),
    ),
    Exercise("tensor_cores", (Hole("product_kernel: const auto a_at", "}", BODY),)),
    Exercise(
        "swizzle",
        (
            Hole("place: return", "}", "return 32 * row + 4 * chunk;  // Write here."),
            Hole("swizzled_transpose_kernel: for (int i", "}", """\
// Write here: each thread writes four floats of out. `place` says where they wait."""),
        ),
        microscope=True,
    ),
    in_python("bf16_sum", "stops_at: return", "sum_in_fp32: return", "sum_in_bf16: while"),
    in_python("ring", "all_reduce: parts ="),
    Exercise(
        "flash_attention",
        (
            Hole(": // The place of a float", "flash_attention_kernel(",
                 'extern "C" __global__ void __launch_bounds__(128)'),
            Hole("flash_attention_kernel: with_registers<true>(", "}", """\
const Head head(out, lse, qkv, T, NH);
// Write here."""),
        ),
        source="doc/ladder/flash_attention.cu",
        header="attention_tiles.cuh",
        renamed=("swizzled_kernel", "flash_attention_kernel"),
        parts=(
            "SCALE", "Head", "place", "load_rows", "load_operand", "in_tile", "add_scores", "add_sum", "store_rows",
            "store_result", "Queries", "with_registers", "swizzled_kernel",
        ),
        head="""\
// Exercise 24, a project: flash attention, forward.
//
//   out (B, T, NH, 64) = softmax(q k^T / 8) v, over the keys up to the query itself
//   lse (B, NH, T) = log(sum(exp(q k^T / 8)))
// from qkv (B, T, 3, NH, 64), for any T, without a matrix (T, T). The grid is (B * NH, T / 64), rounded up. A block has
// 128 threads, four warps, and takes the 64 queries from 64 * blockIdx.y on of head blockIdx.x.
//
// Head knows where that head begins. Row t of its queries is at head.q + t * head.stride, and so are keys, head.k, and
// values, head.v. Row t of its output is at head.out + t * head.out_stride, and lse of query t is head.lse[t].
//
// The check accepts any kernel that is right. Begin with the simplest one; the check says what to do next. Keep the
// kernel's name, and put functions of your own before it.
// tensor_cores.cuh has mma and to_tf32, async_copy.cuh copies that nobody waits for, common.cuh the rest.
#define WARP_SIZE 32
""",
        microscope=True,
    ),
    in_python("segments", "backward_through: every = max"),
    in_python("stages", "producer: for i in range", "consumer: for i in range"),
    in_python(
        "one_byte", "numbers_of: exponent, mantissa =", "scale_of: largest =", "quantize: sizes =", "product: return"
    ),
    Exercise("two_products", (Hole("two_products_kernel: float scores", "}", BODY),), microscope=True),
    in_python("four_bits", "scales_of: amax =", "quantize: sizes =", "product: a, b ="),
    Exercise(
        "tma_ring",
        (
            Hole("place: return", "}", "return 64 * row + column;  // Write here."),
            Hole("tma_ring_kernel: const int all", "}", BODY),
        ),
        microscope=True,
    ),
)
