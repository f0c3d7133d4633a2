"""The exercises: each is accepted when it is solved, and refused, with its fault named, when it is not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from device.errors import UserError
from exercises import check
from exercises.cut import EXERCISES, start, whole

import pytest

ROOT = Path(__file__).resolve().parents[1]
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
BY_THREAD = r"by thread \({}, 0, 0\) of block \({}, 0, 0\)\n    {}: "

# A fault in a solved exercise: what is replaced, by what, and what the check says of it.
FAULTS = [
    ("who_am_i", "1000 * blockIdx.x", "100 * blockIdx.x",
     r"who\[64\]: expected 1000, got 100, written " + BY_THREAD.format(0, 1, 10)),
    ("who_am_i", "blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x - (1 << 30)", r"far outside: who\[-\d+\]"),
    ("guard", "if (i < N)", "if (i <= N)", r"x\[1000\] is outside of .* read " + BY_THREAD.format(232, 3, 9)),
    ("plane", " && c < C", "", r"^N = 10, C = 70: bias\[70\] is outside"),
    ("neighbours", "    __syncthreads();\n", "", r"threads race: .*\n    11: .*\n    12: .*\n.*tile\[\d+\]: .*thread"),
    ("neighbours", "(i < 127 ? tile[i + 1] : 0.0f)", "tile[i + 1]", r"index 128 is outside of the array.*\n    13: "),
    ("neighbours", "tile[i - 1]", "x[at - 1]", "numbers of x that are read: 765, and 384 would do"),
    ("race", "if (i < half) tile[i] += tile[i + half];\n            __syncthreads();",
     "if (i < half) {\n tile[i] += tile[i + half];\n __syncthreads();\n } else {\n __syncthreads();\n }",
     r"two barriers at once, .*\n    16: __syncthreads\(\);\n    18: __syncthreads\(\);"),
    ("shuffle", "o = 16", "o = 8", r"out\[0\]: expected"),
    ("shuffle", "sum += ", "__shfl_xor_sync(0xffffffffu, sum, o), sum += ", "shuffles of a warp.*: 10, and 6 would do"),
    ("sectors", "address // 32", "address // 128", "from byte 4 \\* i on: sectors: expected 4, got 1"),
    ("sectors", "return len", "raise SystemExit(__import__('os').getpid())  #", r"line 11: SystemExit: \d+"),
    ("banks", "set(words)", "words", "lane i reads word 5: passes: expected 1, got 32"),
    ("bias_gradient", "n < end", "n + 1 < end", r"partials\[0, 0\]: expected"),
    ("bias_gradient", "total += warp_sums", "total = warp_sums", r"out0\[0\]: expected"),
    ("layernorm", "i + k < C ? (x.x[k] - m)", "true ? (x.x[k] - m)", r"^N=17, C=5: out\[0, 0\]: expected"),
    ("layernorm", "norm0.store_out(", "norm1.store_out(", "a null pointer was followed"),
    ("tf32", "0x1000", "0x0fff", r"to_tf32\[2\] of 1.000488: expected 1.000977, got 1$"),
    ("transpose", "[32][33]", "[32][32]", r"passes of an access to tile \(bank conflicts\): 32, .*\n    18: "),
    ("transpose",
     "= n0 + threadIdx.x, c = c0 + column;\n        if (n < N && c < C) out[c * N + n] = tile[threadIdx.x][column];",
     "= n0 + column, c = c0 + threadIdx.x;\n        if (n < N && c < C) out[c * N + n] = tile[column][threadIdx.x];",
     r"sectors of out that move: 6144, and 768 would do\n    18: "),
    ("gelu", "s + x * s *", "s + x *", r"^N=70, C=68: dout\[0, 0\]: expected"),
    ("online_softmax", "    if largest == -np.inf:\n        return EMPTY\n", "",
     r"expected \(-inf, 0\), got \(-inf, nan\)"),
    ("online_softmax", "total * np.exp(largest - new)", "total", "^rising numbers, 1 at a time, after 2: fold: "),
    ("online_softmax", "np.exp(piece - new).sum()", "np.exp(piece).sum() * np.exp(-new)",
     r"^large numbers, 1 at a time, .*: line 18: FloatingPointError: overflow .*\n    18: "),
    ("softmax", "x.x[k] = s + k < length", "x.x[k] = s + k <= length", r"^H=2, T=37, .*: att\[0, 1\]: expected 0"),
    ("softmax", "new_largest = s + k < length ?", "new_largest = true ? 0.0f : s + k < length ?", "^H=2, T=40.* nan"),
    ("flash_forward", "for k, v in tiles", "for k, v in list(tiles)", r"^one tile: lse\[0\]: expected .*, got nan"),
    ("flash_forward", "    largest, total = np.full(len(q), -np.inf), np.zeros(len(q))\n",
     "    copies = [(k.copy(), v.copy()) for k, v in tiles]\n    tiles = [tuple(map(np.concatenate, zip(*copies)))]\n"
     "    largest, total = np.full(len(q), -np.inf), np.zeros(len(q))\n",
     r"^64 tiles of 16 keys: .* rows of 64 numbers in memory at a time: \d+, and 256 would do"),
    ("flash_backward", "(dout @ v.T - D[:, None])", "(dout @ v.T - (p * (dout @ v.T)).sum(1)[:, None])", "tiles: dq"),
    ("fragments", "lane % 4 + i // 2 * 4", "lane % 4 * 2 + i // 2", r"^a_at\(0, 2\): expected \(0, 4\), got \(0, 1\)"),
    ("adamw", "(sqrtf(v4.x[k] / correction2) + eps)", "sqrtf(v4.x[k] / correction2)", r"^step 1: params\[0\]"),
    ("tensor_cores", "a_at(row + g + 8, k + t),", "a_at(row + g, k + t + 4),", r"^M = 32, N = 16, .*: out\[8, 0\]:"),
    ("tensor_cores", "to_tf32(b[k * N + n])", "b[k * N + n]", r"K = 40, any numbers: out\[0, 0\]: expected"),
    ("swizzle", "tile[32 * 32]", "tile[32 * 36]", "bytes of shared memory: 4608, and 4096 would do"),
    ("swizzle", "return 32 * row + 4 * (chunk ^ row % 8);", "return 36 * row + 4 * chunk;",
     r"index \d+ is outside of the array, a 'float \[1024\]'"),
    ("bf16_sum", "return 256 * 2.0 ** math.ceil(math.log2(term))",
     "total = 0\n    while total != bf16(total + term): total = bf16(total + term)\n    return total",
     "stops_at adds up in bf16, step by step: write a formula"),
    ("bf16_sum", "    while len(x) > 1:\n        x = bf16(x[: len(x) // 2] + x[len(x) // 2 :])\n    return x[0]",
     "    return bf16(x.astype(np.float64).sum())", "sum_in_bf16 adds in more than bf16"),
    ("bf16_sum", "math.ceil", "math.floor", r"stops_at\(1.5\): expected 512, got 256"),
    ("bf16_sum", "    while len(x) > 1:\n        x = bf16(x[: len(x) // 2] + x[len(x) // 2 :])\n    return x[0]",
     "    return np.float32(x.sum())", "sum_in_bf16, as bf16 has it: expected"),
    ("ring", "        send(parts[(rank - step) % ranks])\n        parts[(rank - step - 1)",
     "        got = receive()\n        parts[(rank - step - 1)", r"rank 0: line 24: TimeoutError: it waits for rank 2"),
    ("ring", "parts[(rank - step) % ranks][...] = receive()", "parts[(rank - step) % ranks][...] = 3 * receive()",
     r"^n = 3: rank \d's x\[\d\]: expected"),
    ("ring", "        parts[(rank - step) % ranks][...] = receive()",
     "        parts[(rank - step) % ranks][...] = receive()\n        if step == ranks - 2: send(x)",
     "arrays that rank 0 has not received: 1"),
    ("ring", "        send(parts[(rank - step + 1) % ranks])\n        parts[(rank - step) % ranks][...] = receive()",
     "        send(np.resize(parts[(rank - step + 1) % ranks], 9))\n        got = parts[(rank - step) % ranks]\n"
     "        got[...] = receive()[: got.size]", "numbers that rank 0 has sent: 20, and 4 would do"),
    ("ring", "    parts = np.array_split(x, ranks)\n", "    x[...] = np.nan\n    return\n",
     r"x\[0\]: expected .*, got nan"),
    ("flash_attention", "if (s0 < row0 + 16) q", "if (s0 < row0) q", r"^B=1, T=69, NH=2: out\[0, 0, 0, 0\]"),
    ("flash_attention", "SCALE = 0.125f;", "SCALE = 0.1255f;", "NH=2: the relative error of out: expected 0, got"),
    ("segments", "max(1, math.isqrt(len(layers)))", "1", r"^layers: 16: .*arrays in memory at a time: 17, and 11"),
    ("segments", "        x = forward(x)\n", "        forward(x)\n        x = forward(x)\n", "run forward: 3"),
    ("segments", "forward(inputs[-1])", "forward(inputs[0])", r"^layers: 16: the gradient of x\[\d+, \d+\]: expected"),
    ("segments", "    every = max", "    dout *= 1 + 1e-12\n    every = max",
     r"^layers: 1: dout, which may not change\["),
    ("stages", "if i % steps > 0:", "if i % steps > 1:\n            yield 'finish', 0\n        if i % steps > 0:",
     "products under way at a time: expected 2, got 1"),
    ("stages", '        if i % steps > 0:\n            yield "finish", 1\n'
     '            yield "arrive", (i - 1) % stages\n'
     '        if i % steps == steps - 1:\n            yield "finish", 0\n            yield "arrive", i % stages\n',
     '        if i % steps % 2 or i % steps == steps - 1:\n            yield "finish", 0\n'
     '            for j in range(i - i % steps % 2, i + 1): yield "arrive", j % stages\n'
     '        if i % steps == steps - 1:\n', "products under way at a time: expected 2, got 1"),
    ("stages", 'yield "wait", "empty", i % stages, 1 - i // stages % 2', "pass", r"producer does \('copy', \d\)"),
    ("stages", 'yield "wait", "full", i % stages, i // stages % 2', "pass", r"does \('start', 0\) too early"),
    ("stages", "1 - i // stages % 2", "i // stages % 2", "nobody can go on: producer at .'wait', 'empty', 0, 0"),
    ("stages", 'yield "finish", 1\n            yield "arrive", (i - 1) % stages', 'yield "arrive", (i - 1) % stages',
     r"consumer \d does \('arrive', \d\) too early"),
    ("stages", '        if i % steps > 0:\n            yield "finish", 1\n'
     '            yield "arrive", (i - 1) % stages\n'
     '        if i % steps == steps - 1:\n            yield "finish", 0\n            yield "arrive", i % stages\n',
     '        yield "finish", 0\n        yield "arrive", i % stages\n        if i % steps == steps - 1:\n',
     "products under way at a time: expected 2, got 1"),
    ("stages", 'yield "finish", 0\n            yield "arrive", i % stages\n            yield ("store",)',
     'yield ("store",)\n            yield "finish", 0\n            yield "arrive", i % stages',
     r"consumer \d does \('store',\) too early"),
    ("stages", 'yield "finish", 0', 'yield "finish", -1', r"yields \('finish', -1\), which is no instruction"),
    ("one_byte", "2.0**-9, (8 + mantissa)", "2.0**-10, (8 + mantissa)", r"numbers_of\[1\] of 1: expected 0.001953125"),
    ("one_byte", "if np.isfinite(largest) else np.nan", "", "^largest number -inf: scale_of: expected nan, got inf"),
    ("one_byte", "np.round(", "np.floor(0.5 + ", r"^scale 1: quantize.* of 0.0009765625: expected 0"),
    ("one_byte", "(numbers_of(a) @ numbers_of(b).T)", "(abs(numbers_of(a)) @ abs(numbers_of(b)).T)", r"^product\["),
    ("one_byte", "scale_a * scale_b * ", "scale_a * ", r"^product\[0, 0\]: expected"),
    ("four_bits", " - (share == 0.5)", "", r"^scales_of\[1, 0\]: expected 1, got 2"),
    ("four_bits", "2.0 ** (exponent - (share == 0.5))", "amax / 6", r"^scales_of\[0, 0\]: expected 1, got 0"),
    ("four_bits", "np.round(", "np.floor(0.5 + ", r"^quantize\[\d, \d+\] of -?0.25: expected -?0, got"),
    ("four_bits", "8 * np.signbit(x)", "0", r"^quantize\[0, 3\] of -1.5: expected -1.5, got 1.5"),
    ("four_bits", " * scales_b[None]", "", r"^product\[0, 0\]: expected"),
    ("two_products", "load_matrices<true>", "load_matrices<false>", r"^q and v pick: .*out\[\d+, \d+, \d+\]: expected"),
    ("two_products", "scores[e / 2][e % 2 * 2], scores[e / 2][e % 2 * 2 + 1]",
     "scores[e % 2][e / 2 * 2], scores[e % 2][e / 2 * 2 + 1]", r"^q and v pick: .*out\[\d+, \d+, \d+\]: expected"),
    ("two_products", "8 * (chunk ^ row % 8)", "8 * chunk", r"passes of an access to queries \(bank conflicts\): 8, "),
    ("tma_ring", "64 * row + (column ^ row % 8 * 8)", "64 * row + column",
     r"^N = 16: out\[0, 0\]: expected .*, written by thread \(0, 0, 0\) of block .*\n    57: out\[64"),
    ("tma_ring", "            barrier_wait(empty[stage], parity ^ 1);\n", "", "^N = 203: .*: deadlock: 64 threads"),
    ("tma_ring", "empty[stage], parity ^ 1", "empty[stage], parity",
     r"deadlock: 1 thread waits at mbarrier_wait \(30_tma_ring.cu:45,.*\n    45: barrier_wait\(empty"),
    ("tma_ring", "            barrier_wait(full[stage], parity);\n", "", "^N = 203: .*: deadlock: 1 thread waits"),
    ("tma_ring", "sizeof tiles[stage])", "ROWS * 64)", r"deadlock: 64 threads .*\n    53: barrier_wait\(full"),
    ("tma_ring", "sizeof tiles[stage])", "min(ROWS, N - ROWS * i) * 128)", "^N = 40: .*deadlock: 64 threads"),
    ("tma_ring", "            warp_arrive(empty[stage]);\n        }", "        }",
     "warp 0 of block 0 does not wait for its lanes"),
    ("tma_ring", "warp_arrive(empty[stage])", "if (threadIdx.x % 32 == 0) barrier_arrive(empty[stage])",
     r"numbers are right, but warp 0 of block 0 does not wait for its lanes .* tile 0 .*\n    54: for \(int row"),
    # What does not run
    ("who_am_i", "threadIdx.x;\n}", "threadIdx.x\n}", r"line 10 does not compile: expected .*\n    10: who\[i\] ="),
    ("who_am_i", "(int* who)", "(int* who, int n)", "names and parameters must stay"),
    ("layernorm", "layernorm_forward_kernel", "forward_kernel", "names and parameters must stay .*forward_kernel"),
    ("neighbours", "    __syncthreads();", "    if (i == 3) __shfl_xor_sync(~0u, i, 1); else __syncthreads();",
     "neighbours_kernel, .*: deadlock:"),
    ("sectors", "    return len", "    retrun len", r"line 11 is not Python: .*\n    11: retrun"),
    ("sectors", "// 32", "// 0", r"line 11: ZeroDivisionError: .*\n    11: return len"),
    ("sectors", "def sectors(", "def sector(", "the file has no function sectors any more"),
    ("flash_forward", "return out /", "return out, out /", "has to return 2 results"),
]  # fmt: skip

# A solved exercise that is changed and right nevertheless, and the remark that it gets, if any.
REMARKS = [
    ("race", "if (i == 0) out[r]", "__syncthreads();\n        if (i == 0) out[r]",
     "^9 barriers per row; 8 are enough"),
    ("one_byte", "-sizes, sizes)", "-sizes, sizes).astype(np.float32)", "^$"),
    ("segments", "    return dout\n", "    return dout.astype(np.float32)\n", "^$"),
    ("flash_attention", "    const Head head(out, lse, qkv, T, NH);\n",
     "    const Head head(out, lse, qkv, T, NH);\n    volatile float sum = 0.0f;\n"
     "    for (int i = 0; i < 4000 * T; i++) sum += head.q[i % 64];\n",
     "^It loads so often .* Next: keep in registers"),
    ("flash_attention", "with_registers<true>", "with_registers<false>", r"^It moves 1.50 bytes .* 4.85 .*swizzle"),
]  # fmt: skip

# In a process of its own: a faulty kernel may write anywhere in it, and the microscope's runtime is another one.
RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, ".")
from device import cpp
from device.errors import UserError
from exercises.checks import prepare, run_check
from exercises.cut import EXERCISES
runs = [(EXERCISES[number - 1], Path(file)) for number, file in json.load(sys.stdin)]
prepare(runs[0][0])  # with the microscope, or without, as all of them
try:
    cpp.compile_all([file for _, file in runs if file.suffix == ".cu"])  # on all cores
except UserError:
    pass  # it is one of the faults that a file does not compile
json.dump([run_check(exercise, file) for exercise, file in runs], sys.stdout)
"""


def run_checks(files: list[tuple[int, Path]], before: str = "") -> list[list[str]]:
    files = json.dumps([(number, str(file)) for number, file in files])
    done = subprocess.run([sys.executable, "-c", before + RUN], input=files, stdout=-1, text=True, cwd=ROOT)
    assert done.returncode == 0
    return json.loads(done.stdout)


def changed(name: str, old: str, new: str) -> str:
    text = whole(BY_NAME[name])
    assert text.count(old) == 1, f"{name} is solved without `{old}`: quote it anew"
    return text.replace(old, new)


@pytest.fixture(scope="module")
def verdicts(pytestconfig) -> dict[tuple, list[str]]:
    """What is wrong, and the remark, of each exercise solved and empty, and of the rows of FAULTS and REMARKS."""
    root = pytestconfig.cache.mkdir("exercises")  # stays: a library for the microscope is kept for a file at its place
    for folder in "kernels", "doc":
        if not (root / folder).exists():
            (root / folder).symlink_to(ROOT / folder)
    texts = {(name, "solved"): whole(exercise) for name, exercise in BY_NAME.items()}
    texts |= {(name, "empty"): start(exercise) + "\n" for name, exercise in BY_NAME.items()}
    texts |= {(row[0], i): changed(*row[:3]) for i, row in enumerate(FAULTS + REMARKS)}
    found = {}
    for watched in True, False:
        keys, files = [key for key in texts if BY_NAME[key[0]].watched() is watched], []
        for name, which in keys:
            file = root / "exercises" / f"{name}-{which}" / BY_NAME[name].file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(texts[name, which])
            files.append((BY_NAME[name].number, file))
        found |= dict(zip(keys, run_checks(files), strict=True))
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_a_solved_exercise_is_right_and_one_without_its_lines_is_not(verdicts, name):
    assert verdicts[name, "solved"][0] == ""
    unwritten = "race: " if name == "race" else r"nothing is written yet in line \d+|\]: expected"
    assert re.search(unwritten, verdicts[name, "empty"][0]), verdicts[name, "empty"]
    assert any(name == of for of, *_ in FAULTS)


@pytest.mark.parametrize("i", range(len(FAULTS + REMARKS)), ids=lambda i: " ".join((FAULTS + REMARKS)[i][0:3:2]))
def test_a_fault_is_named(verdicts, i):
    name, *_, says = (FAULTS + REMARKS)[i]
    fault, remark = verdicts[name, i]
    assert bool(fault) == (i < len(FAULTS)) and re.search(says, fault or remark), fault or remark
    assert len(fault.splitlines()) < 20 and f"SystemExit: {os.getpid()}" not in fault


def test_without_the_microscope_what_is_written_outside_is_seen(tmp_path):
    """As with clang++, which cannot watch a kernel's accesses."""
    work = tmp_path / "02_guard.cu"
    work.write_text(changed("guard", "if (i < N)", "if (i <= N)"))
    unwatched = "from exercises.cut import Exercise\nExercise.watched = lambda self: False\n"
    found = run_checks([(2, BY_NAME["guard"].path), (2, work)], unwatched)
    assert found == [["", ""], ["N = 1000: out[1000] was written: that is outside of the array", ""]]


# ---- what the learner sees


@pytest.fixture
def learner(tmp_path, monkeypatch, capfd):
    """A folder for what the learner writes. To be called with arguments of exercises/check.py: exit status and text."""
    for folder in "kernels", "doc":
        (tmp_path / folder).symlink_to(ROOT / folder)
    work = tmp_path / "exercises" / "work"
    work.mkdir(parents=True)
    monkeypatch.setattr(check, "WORK", work)
    monkeypatch.setattr(check, "SOLVED", work / ".solved.json")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
        try:
            check.main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, capfd.readouterr().out

    run.work = work
    return run


def test_an_exercise_is_begun_refused_solved_and_never_overwritten(learner):
    status, text = learner("7")
    work = learner.work / "07_sectors.py"
    assert status == 0 and "7. Sectors" in text and "(line 11)" in text and work.exists()
    assert "Byte b lies in sector" not in text, "the hint is for who looks for it"
    assert learner("7") == (1, f"{os.path.relpath(work)} is not right yet.\n\nNothing is written yet in line 11.\n")
    assert learner()[1].count("untried") == len(EXERCISES)
    assert f"make exercise lists all {len(EXERCISES)}" in (ROOT / "README.md").read_text()

    wrong = work.read_text().replace("raise NotImplementedError", "return len(set(addresses))")
    work.write_text(wrong)
    status, text = learner("7")
    assert status == 1 and "expected 4, got 32" in text and work.read_text() == wrong
    assert re.search(r"7  Sectors .* open", learner()[1])

    work.write_text(whole(BY_NAME["sectors"]))
    status, text = learner("7")
    assert status == 0 and "07_sectors.py is right." in text and "then exercise 8" in text
    assert re.search(r"7  Sectors .* solved\n", learner()[1])

    work.write_text(wrong)
    assert re.search(r"7  Sectors .* open\n", learner()[1]), "it was right, but is not what was right"


@pytest.mark.parametrize("fault", [False, True])
def test_the_microscope_shows_what_the_learners_kernel_does(learner, fault):
    work = learner.work / BY_NAME["neighbours"].file
    work.write_text(changed("neighbours", "tile[i - 1]", "x[at - 1]") if fault else whole(BY_NAME["neighbours"]))
    status, text = learner("4")
    assert status == fault and f"open {os.path.relpath(work.with_suffix('.html'))} in a browser" in text
    assert '"neighbours_kernel"' in work.with_suffix(".html").read_text()


def test_the_list_names_the_next_step_of_a_project_that_is_right_so_far(learner):
    work = learner.work / BY_NAME["flash_attention"].file
    work.write_text(changed("flash_attention", "with_registers<true>", "with_registers<false>"))
    assert learner("24")[0] == 0 and re.search(r"24  Flash attention .* right, next: a swizzle\n", learner()[1])
    work.write_text(whole(BY_NAME["flash_attention"]))
    assert learner("24")[0] == 0 and re.search(r"24  Flash attention .* solved\n", learner()[1])


@pytest.mark.parametrize(("name", "old", "new", "says"), [
    ("who_am_i", "threadIdx.x;\n}", "(__builtin_trap(), 0);\n}", r"SIG[A-Z]+ ended it\. Is an index far outside"),
    ("shuffle", "out[i] = sum;", "out[i] = *new float[3ll << 28];", "more memory than a check"),
    ("sectors", "    return len", "    while True:\n        pass\n    return len", "not ended after 2 seconds"),
])  # fmt: skip
def test_what_ends_the_checks_process_is_said(learner, monkeypatch, name, old, new, says):
    monkeypatch.setattr(check, "SECONDS", 2 if "while True" in new else check.SECONDS)
    (learner.work / BY_NAME[name].file).write_text(changed(name, old, new))
    status, text = learner(str(BY_NAME[name].number))
    assert status == 1 and re.search(says, text), text


@pytest.mark.parametrize("number", ["0", str(len(EXERCISES) + 1), "x"])
def test_a_number_that_no_exercise_has_is_refused_in_one_line(learner, number):
    with pytest.raises(UserError, match=f"^there is no exercise {number}: they are numbered 1 to {len(EXERCISES)}$"):
        learner(number)


# ---- how they are made


def test_the_readme_has_a_section_for_each_exercise():
    sections = check.sections()
    assert list(sections) == [exercise.number for exercise in EXERCISES]
    for number, (_, text) in sections.items():
        assert re.match(r"Goes with \[[^]]+\]\(\.\./doc/\d\d-[\w-]+\.md\)\.\n\n", text), number
        assert "<details><summary>Hint</summary>\n\n" in text and "</details>\n\nNext: " in text, number
        assert re.search(rf"then\sexercise {number + 1}\.$", text) or number == len(EXERCISES), number


@pytest.mark.parametrize(("name", "formula"), [("gelu", "(1 - s)"), ("softmax", "exp("), ("adamw", "sqrt(")])
def test_what_the_learner_begins_with_does_not_say_the_formula(name, formula):
    assert formula not in start(BY_NAME[name]).replace("sqrt(2/pi)", "")
