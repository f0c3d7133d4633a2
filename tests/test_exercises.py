"""The exercises: each is accepted when it is solved, and refused, with its fault named, when it is not."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from device import cpp
from exercises import check
from exercises.cut import EXERCISES, Exercise, start, whole

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
BY_NAME = {exercise.name: exercise for exercise in EXERCISES}
RACE = r"threads race: .*\n    {}: .*\n    {}: .*\n.*tile\[\d+\]: .*thread \(\d+, 0, 0\) of block"

# A fault in a solved exercise: what is replaced, by what, and what the check says of it.
FAULTS = [
    ("who_am_i", "1000 * blockIdx.x", "100 * blockIdx.x",
     r"who\[64\]: expected 1000, got 100; thread 0 of block 1 has to"),
    ("who_am_i", "+ threadIdx.x;\n    who", "+ threadIdx.x + 1;\n    who",
     r"who\[320\] was written by thread 63 of block 4: that is past the end of the array, .* 320 elements\n    10: "),
    ("who_am_i", "blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x - (1 << 30)",  # where nothing is: 4 GiB below
     r"who_am_i_kernel, .*: an index far outside of its arrays: who\[-\d+\], if it is who that was meant"),
    ("guard", "if (i < N)", "if (i <= N)", r"x\[1000\] was read by thread 232 of block 3: that is past the end"),
    ("guard", "if (i < N) out[i] = 2.0f * x[i];", "out[i] = i < N ? 2.0f * x[i] : 0.0f;",
     r"out\[1000\] was written by thread 232 of block 3: that is past the end of the array, .*\n    9: out\[i\] ="),
    ("guard", "if (i < N) out[i] = 2.0f * x[i];", "out[i < N ? i : 0] = 2.0f * x[i < N ? i : 0];", r"blocks|race"),
    ("plane", " && c < C", "", r"bias\[70\] was read by thread \(6, 0\) of block \(2, 0\): that is past the end"),
    ("neighbours", "    __syncthreads();\n", "", RACE.format(11, 12)),
    ("neighbours", "(i < 127 ? tile[i + 1] : 0.0f)", "tile[i + 1]",
     r"thread \(127, 0, 0\): index 128 is outside of the array, a 'float ?\[128\]', .*:13\n    13: out\[at\] ="),
    ("neighbours", "tile[i - 1]", "x[at - 1]", r"right, but x was read 765 times; 384, once each, would do"),
    ("race", "            __syncthreads();  // this half is complete\n", "", "threads race"),
    ("race", "if (i < half) tile[i] += tile[i + half];\n            __syncthreads();",
     "if (i < half) {\n tile[i] += tile[i + half];\n __syncthreads();\n } else {\n __syncthreads();\n }",
     r"wait at two barriers at once, because .*\n    16: __syncthreads\(\);\n    18: __syncthreads\(\);"),
    ("shuffle", "o = 16", "o = 8", r"out\[0\]: expected \S+, got \S+; thread 0 of block 0 has to write it"),
    ("sectors", "address // 32", "address // 128", r"lane i reads float i: expected 4, got 1"),
    ("sectors", "return len", "raise SystemExit(__import__('os').getpid())  #", r"^line 11: SystemExit: \d+"),
    ("banks", "set(words)", "words", r"passes, all lanes read word 5: expected 1, got 32"),
    ("bias_gradient", "n < end", "n + 1 < end",
     r"partials\[0, 0\]: expected .*column_partials_kernel's thread 0 of block"),
    ("bias_gradient", "out[i] = before", "out[C + i] = before",
     r"add_partials_kernel: out0\[70\] was .*: that is past the end of the array, which has 70 elements"),
    ("bias_gradient", "n < end", "n < begin + rows", r"inp\[42210\] was read by .*: that is past the end of"),
    ("bias_gradient", "    __syncthreads();\n", "", r"threads race: [^$]*warp_sums\[\d+\]"),
    ("layernorm", "i + k < C ? (x.x[k] - m)", "true ? (x.x[k] - m)",
     r"with C = 130, rstd\[0\]: expected .* thread 0 of block 0 has to write it"),
    ("layernorm", "norm0.store_out(", "norm1.store_out(",
     r"layernorm_forward_kernel, .*: a null pointer was followed: an array that is not there"),
    ("tf32", "0x1000", "0x0fff", r"to_tf32 of 1.00048828125 .*\nexpected 1.0009765625 .*\ngot      1.0 "),
    ("transpose", "[32][33]", "[32][32]",
     r"tile takes up to 32 times the passes that it needs \(bank conflicts\):\n    18: "),
    ("transpose",
     "= n0 + threadIdx.x, c = c0 + column;\n        if (n < N && c < C) out[c * N + n] = tile[threadIdx.x][column];",
     "= n0 + column, c = c0 + threadIdx.x;\n        if (n < N && c < C) out[c * N + n] = tile[column][threadIdx.x];",
     r"6144 sectors of out move where 768 would do: .*\n    18: "),
    ("transpose", "        if (n < N && c < C) out[c * N + n]", "        out[c * N + n]",
     r"^out\[2800\] was written by thread \(\d+, \d\) of block \(\d, \d\): that is past the end"),
    ("transpose", "        if (n < N && c < C) out[c * N + n]", "        if (c * N + n < C * N) out[c * N + n]",
     r"^two blocks touch one address, .* Is a guard missing"),
    ("gelu", "s + x * s *", "s + x *",
     r"dinp\[0, 0\]: expected .* thread \(0, 0\)"),
    ("online_softmax", "    if largest == -np.inf:\n        return EMPTY\n", "",
     r"^merge, both EMPTY: expected \(-inf, 0\), got \(-inf, nan\)"),
    ("online_softmax", "    largest = max(a[0], b[0])\n    if largest == -np.inf:\n        return EMPTY\n",
     "    largest = np.max([a[0], b[0]])\n",
     r"^merge, both EMPTY: line 24: a result here is not a number \(NaN\), as -inf - -inf, .*\n    24: return largest"),
    ("online_softmax", "np.exp(piece - new).sum()", "np.exp(piece).sum() * np.exp(-new)",
     r"^fold, large numbers, 1 at a time, after \d+: line 18: a result here is too large for a float\."),
    ("softmax", "x.x[k] = s + k < length", "x.x[k] = s + k <= length",
     r"with T = 37 and scale 0.125, att\[0, 1\]: expected 0"),
    ("softmax", "new_largest = s + k < length ?", "new_largest = true ? 0.0f : s + k < length ?",
     r"with T = 40 and scale 60, att\[\d+, \d+\]: expected 1, got nan"),
    ("flash_forward", "rescale[:, None] * out + p @ v", "out + p @ v", r"two tiles: out\[\d, \d\]: expected"),
    ("flash_forward", "for k, v in tiles", "for k, v in list(tiles)", r"after the next one had taken its place\?"),
    ("flash_backward", "(dout @ v.T - D[:, None])", "(dout @ v.T - (p * (dout @ v.T)).sum(1)[:, None])",
     r"two tiles: dq\[0, 0\]: expected"),
    ("fragments", "lane % 4 + i // 2 * 4", "lane % 4 * 2 + i // 2",
     r"row and column of lane 0's a\[2\]: expected \(0, 4\), got \(0, 1\)"),
    ("adamw", "v4.x[k] / correction2", "v4.x[k]",
     r"after step 1, params\[0\]: expected .* thread 0 of block 0 has to write it"),
    ("adamw", "(sqrtf(v4.x[k] / correction2) + eps)", "sqrtf(v4.x[k] / correction2)",
     r"after step 1, params\[0\]: expected"),
    ("tensor_cores", "return m < M && k < K ? to_tf32(a[m * K + k]) : 0.0f;",
     "const float x = a[m * K + k]; return m < M && k < K ? to_tf32(x) : 0.0f;",
     r"^with M = 37, N = 21, K = 13 .*, a\[\d+\] was read by thread \d+ of block \(0, 1\): that is past the end"),
    ("tensor_cores", "a_at(row + g + 8, k + t),", "a_at(row + g, k + t + 4),",
     r"M = 32, N = 16, K = 8 .* out\[8, 0\]: expected .*; lane 0 of warp 0 of block \(0, 0\), as its d\[2\], has to"),
    ("tensor_cores", "to_tf32(b[k * N + n])", "b[k * N + n]", r"K = 40 and any numbers, out\[0, 0\]: expected"),
    ("tensor_cores", "    float d[4] = {};", "    float d[4] = {};\n    if (row + g >= M) return;",
     r"a lane that has left before an instruction of the whole warp|deadlock"),
    ("swizzle", "chunk ^ row % 8", "chunk ^ row % 4",
     r"tile takes up to 2 times the passes that it needs \(bank conflicts\):\n    27: "),
    ("swizzle", "8 * i + lane % 8, column = 4 * warp + lane / 8;", "4 * warp + lane / 8, column = 8 * i + lane % 8;",
     r"\d+ sectors of out move where 768 would do|bank conflicts"),
    ("swizzle", "tile[32 * 32]", "tile[32 * 36]", r"the tile has 4608 bytes; 4096 are enough"),
    ("bf16_sum", "math.ceil", "math.floor", r"stops_at\(1.5\): expected 512.0, got 256.0"),
    ("bf16_sum", "    while len(x) > 1:\n        x = bf16(x[: len(x) // 2] + x[len(x) // 2 :])\n    return x[0]",
     "    total = np.float32(0)\n    for one in x:\n        total = bf16(total + one)\n    return total",
     r"sum_in_bf16, 4096 ones: expected 4096, give or take 2.0%, got 256"),
    ("ring", "        send(parts[(rank - step) % ranks])\n        parts[(rank - step - 1)",
     "        got = receive()\n        parts[(rank - step - 1)",
     r"rank 0: line 24: TimeoutError: it waits for rank 2, which sends nothing\n    24: got = receive\(\)"),
    ("ring", "    parts = np.array_split(x, ranks)\n", "    whole = x.copy()\n    for _ in range(ranks - 1):\n"
     "        send(whole)\n        whole = receive()\n        x += whole\n    return\n    parts = []\n",
     r"n = \d+: ranks 0 and \d have sums with different bits|n = \d+: the sums are right, but rank 0 has sent"),
    ("flash_attention", "if (s0 < row0 + 16) q", "if (s0 < row0) q",
     r"with B=1, T=69, NH=2, out of query 0 of head 0, channel 0: expected"),
    ("flash_attention", "if (row >= T) continue;", "",
     r"^swizzled_kernel: out\[\d+\] was written by thread \d+ of block \(\d, 1\): that is past the end"),
    ("flash_attention", "p[k][0], p[k][2], p[k][1], p[k][3]", "p[k][0], p[k][1], p[k][2], p[k][3]",
     r"with B=1, T=69, NH=2, out of query \d+ of head 0, channel 0: expected"),
    ("segments", "max(1, math.isqrt(len(layers)))", "1",
     r"^with 16 layers: the gradient is right, but 1\d arrays were in memory at a time; 11 are enough"),
    ("segments", "        x = forward(x)\n", "        forward(x)\n        x = forward(x)\n",
     r"^with 7 layers: the gradient is right, but layer 0 has run forward 3 times; 2 are enough"),
    ("segments", "forward(inputs[-1])", "forward(inputs[0])",
     r"^with 16 layers: the gradient of x\[\d+, \d+\]: expected"),
    ("stages", 'yield "wait", "empty", i % stages, 1 - i // stages % 2', "pass",
     r"^with 1 tile of 7 pairs and 2 stages: pair \d overwrites pair \d in stage \d, which consumer \d has not read"),
    ("stages", "1 - i // stages % 2", "i // stages % 2",
     r"nobody can go on: the producer at \('wait', 'empty', 0, 0\), consumer 0 at \('wait', 'full', 0, 0\)"),
    ("stages", 'yield "wait", "full", i % stages, i // stages % 2',
     'yield "wait", "full", i % steps % stages, i % steps // stages % 2',
     r"^with 3 tiles of 5 pairs and 4 stages: nobody can go on: .*consumer 0 at \('wait', 'full', 1, 0\)"),
    ("stages", 'yield "arrive", (i - 1) % stages', 'yield "arrive", i % stages',
     r"arrives at empty\[\d\] while its product still reads this stage"),
    ("stages", 'yield "finish", 1\n            yield "arrive", (i - 1) % stages', 'yield "arrive", (i - 1) % stages',
     r"arrives at empty\[\d\] while its product still reads this stage"),
    ("stages", '        if i % steps > 0:\n            yield "finish", 1\n'
     '            yield "arrive", (i - 1) % stages\n'
     '        if i % steps == steps - 1:\n            yield "finish", 0\n            yield "arrive", i % stages\n',
     '        yield "finish", 0\n        yield "arrive", i % stages\n        if i % steps == steps - 1:\n',
     r"with 1 tile of 4 pairs and 4 stages: the sums are right, but a consumer has only one product under way"),
    ("stages", 'yield "finish", 0\n            yield "arrive", i % stages\n            yield ("store",)',
     'yield ("store",)\n            yield "finish", 0\n            yield "arrive", i % stages',
     r"consumer \d stores tile 0 when \d products are done"),
    ("one_byte", "2.0**-9, (8 + mantissa)", "2.0**-10, (8 + mantissa)",
     r"^numbers_of, byte 0x01: expected 0.001953125, got 0.0009765625"),
    ("one_byte", "np.ceil", "np.round", r"^scale_of, largest number 448.1: expected 2, got 1"),
    ("one_byte", "if np.isfinite(largest) else np.nan", "", r"^scale_of, largest number -inf: expected nan, got inf"),
    ("one_byte", "np.round", "np.floor", r"^quantize, \S+ with scale 1: expected \S+, got"),
    ("one_byte", "np.round(", "np.floor(0.5 + ", r"^quantize, 0.0009765625 with scale 1: expected 0, got 0.001953125"),
    ("one_byte", "np.maximum(sizes, 2.0**-6)", "sizes", r"^quantize, 0 with scale 1: expected 0, got 0.25"),
    ("one_byte", ", 448)", ", 480)", r"^quantize, 1000000 with scale 1: expected 448, got nan"),
    ("one_byte", "scale_a * scale_b * ", "scale_a * ", r"^product\[0, 0\]: expected"),
]  # fmt: skip

# What the checks say of an exercise in which nothing is written but a comment.
EMPTY = {
    "race": RACE.format(11, 13),
    "bias_gradient": r"partials\[0, 0\]: expected",
    "layernorm": r"mean\[0\]: expected",
    "gelu": r"out_T\[0, 0\]: expected",
    "softmax": r"att\[0, 0\]: expected 1, got",
    "adamw": r"after step 1, m\[0\]: expected",
    "ring": r"rank 0: nothing is written yet in line 22",
    "flash_attention": r"with B=1, T=69, NH=2, out of query 0 of head 0, channel 0: nothing was written",
}


# A solved exercise that is changed and right nevertheless, and the remark that it gets.
REMARKS = {
    "race": ("if (i == 0) out[r]", "__syncthreads();\n        if (i == 0) out[r]", r"^9 barriers a row; 8 are enough"),
    "flash_attention": ("with_registers<true>", "with_registers<false>", r"^It moves 1.50 bytes .* takes 4.85 passes"),
}  # fmt: skip


@pytest.fixture(scope="module")
def verdicts(pytestconfig) -> dict[tuple, list[str]]:
    """What is wrong, and the remark, by (exercise, "solved"), (exercise, "empty"), (exercise, number of FAULTS) and
    (exercise, "remark")."""
    root = pytestconfig.cache.mkdir("exercises")  # stays: a library for the microscope is kept for a file at its place
    for folder in "kernels", "doc":
        if not (root / folder).exists():
            (root / folder).symlink_to(ROOT / folder)
    texts = {(exercise.name, "solved"): whole(exercise) for exercise in EXERCISES}
    for name, old, *_ in FAULTS:
        count = whole(BY_NAME[name]).count(old)
        assert count == 1, f"FAULTS in {__file__}, {name}: the solved exercise has `{old}` {count} times: quote it anew"
    texts |= {(name, i): whole(BY_NAME[name]).replace(old, new) for i, (name, old, new, _) in enumerate(FAULTS)}
    texts |= {(name, "remark"): whole(BY_NAME[name]).replace(old, new) for name, (old, new, _) in REMARKS.items()}
    for exercise in EXERCISES:
        texts[exercise.name, "empty"] = start(exercise) + ("// begun\n" if exercise.kind == "cu" else "# begun\n")
    files = {}
    for name, which in texts:
        files[name, which] = root / "exercises" / f"{name}-{which}" / BY_NAME[name].file
        files[name, which].parent.mkdir(parents=True, exist_ok=True)
        files[name, which].write_text(texts[name, which])

    keys = [[key for key in files if BY_NAME[key[0]].watched() is watched] for watched in (True, False)]
    processes = [subprocess.Popen([sys.executable, ROOT / "tests" / "exercise_runs.py"], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True) for _ in keys]  # fmt: skip
    for process, of_process in zip(processes, keys, strict=True):
        json.dump([[BY_NAME[key[0]].number, str(files[key])] for key in of_process], process.stdin)
        process.stdin.close()
    found = {}
    for process, of_process in zip(processes, keys, strict=True):
        said = process.stdout.read()
        assert process.wait() == 0
        found |= dict(zip(of_process, json.loads(said), strict=True))
    return found


@pytest.fixture(scope="module")
def faults(verdicts) -> dict[tuple, str]:
    return {key: fault for key, (fault, _) in verdicts.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_solved_exercise_is_right(faults, name):
    assert faults[name, "solved"] == ""


@pytest.mark.parametrize("name", BY_NAME)
def test_an_exercise_in_which_nothing_is_written_is_refused(faults, name):
    fault = faults[name, "empty"]
    assert re.search(EMPTY.get(name, r"^nothing is written yet in line \d+$|nothing was written; "), fault), fault


@pytest.mark.parametrize("i", range(len(FAULTS)), ids=lambda i: f"{FAULTS[i][0]}: {FAULTS[i][2].strip() or 'left out'}")
def test_a_fault_is_named(faults, i):
    name, *_, says = FAULTS[i]
    assert re.search(says, faults[name, i]), faults[name, i]
    assert len(faults[name, i].splitlines()) < 20


def test_a_faulty_exercise_runs_in_another_process_whose_memory_it_may_damage(faults):
    ends = next(i for i, (_, _, new, _) in enumerate(FAULTS) if "getpid" in new)
    assert faults["sectors", ends].splitlines()[0] != f"line 11: SystemExit: {os.getpid()}"


@pytest.mark.parametrize("name", REMARKS)
def test_what_could_be_better_is_remarked_on(verdicts, name):
    fault, remark = verdicts[name, "remark"]
    assert not fault and re.search(REMARKS[name][2], remark), remark


def test_without_the_microscope_what_is_written_outside_is_seen(tmp_path):
    """As with clang++, which cannot watch a kernel's accesses."""
    work = tmp_path / "02_guard.cu"
    work.write_text(whole(BY_NAME["guard"]).replace("i < N", "i <= N"))
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from exercises.checks import EXERCISES, run_check
from exercises.cut import Exercise
Exercise.watched = lambda self: False
print(*run_check(EXERCISES[1], EXERCISES[1].path), *run_check(EXERCISES[1], Path({str(work)!r})))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
    where = "that is past the end of the array, which has 1000 elements"
    assert said == f"out[1000] was written by thread 232 of block 3: {where}"


def test_every_exercise_has_a_fault_to_be_found():
    assert {name for name, *_ in FAULTS} == set(BY_NAME)


# ---- what the learner sees


@pytest.fixture
def learner(tmp_path, monkeypatch, capfd):
    """A folder for what the learner writes. To be called with arguments of exercises/check.py: exit status and text."""
    for folder in "kernels", "doc":
        (tmp_path / folder).symlink_to(ROOT / folder)
    work = tmp_path / "exercises" / "work"
    work.parent.mkdir()
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

    wrong = work.read_text().replace("raise NotImplementedError", "return len(set(addresses))")
    work.write_text(wrong)
    status, text = learner("7")
    assert status == 1 and "lane i reads float i: expected 4, got 32" in text
    assert work.read_text() == wrong
    assert re.search(r"7  Sectors .* open", learner()[1])

    work.write_text(whole(BY_NAME["sectors"]))
    status, text = learner("7")
    assert status == 0 and "07_sectors.py is right." in text and "then exercise 8" in text
    assert re.search(r"7  Sectors .* solved\n", learner()[1])

    work.write_text(wrong)
    assert re.search(r"7  Sectors .* open\n", learner()[1]), "it was right, but is not what was right"
    learner("7")
    work.write_text(whole(BY_NAME["sectors"]))
    assert re.search(r"7  Sectors .* open\n", learner()[1]), "what is refused is no longer solved"


@pytest.mark.parametrize(
    ("number", "old", "new", "says"),
    [
        (1, "threadIdx.x;\n}", "threadIdx.x\n}", r"line 10 does not compile: expected .*\n    10: who\[i\] ="),
        (2, "out[i] =", "oud[i] =", r"line 9 does not compile: .oud. was not declared .*\n    9: if \(i < N\) oud"),
        (1, "who_am_i_kernel(int* who)", "who_am_i_kernel(int* who, int n)",
         r"parameters are no longer what they were"),
        (1, "who_am_i_kernel", "who_kernel", r"the file has no kernel who_am_i_kernel any more"),
        (10, "layernorm_forward_kernel", "forward_kernel",
         r"the kernels' names and parameters must stay .*forward_kernel"),
        (4, "__sync", "if (i == 3) __shfl_xor_sync(~0u, i, 1); else __sync", r"neighbours_kernel, .*: deadlock:"),
        (1, "1000 *", "(__builtin_trap(), 0) +", r"SIG[A-Z]+ ended it\. Is an index far outside"),
        (7, "    return len", "    retrun len", r"line 11 is not Python: .*\n    11: retrun"),
        (7, "// 32", "// 0", r"line 11: ZeroDivisionError: .*\n    11: return len"),
        (7, "def sectors(", "def sector(", r"the file has no function sectors any more"),
        (14, "np.exp(piece - new)", "np.divide(1, 0 * piece)",
         r"fold, rising numbers, .*: line 18: here a number is divided by zero"),
        (16, "return out /", "return out, out /", r"has to return out and lse"),
    ],
)
def test_what_does_not_run_is_said_by_its_line(learner, number, old, new, says):
    exercise = EXERCISES[number - 1]
    text = whole(exercise)
    assert old in text
    learner.work.mkdir()
    (learner.work / exercise.file).write_text(text.replace(old, new))
    status, said = learner(str(number))
    assert status == 1 and re.search(says, said), said


def test_a_solution_that_does_not_end_is_given_up(learner, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 1)
    learner("7")
    (learner.work / "07_sectors.py").write_text("while True:\n    pass\n")
    status, said = learner("7")
    assert status == 1 and "It has not ended after 1 seconds. Is there a loop that never ends?" in said


def test_a_loop_without_end_that_is_watched_takes_no_more_memory_than_it_may(learner):
    learner("6")
    endless = "for (int k = 0; k >= 0; k = (k + 1) % 7) out[i] = sum + k;"
    (learner.work / "06_shuffle.cu").write_text(whole(BY_NAME["shuffle"]).replace("out[i] = sum;", endless))
    status, said = learner("6")
    assert status == 1 and "It needs more memory than a check may have." in said


@pytest.mark.parametrize("number", ["0", str(len(EXERCISES) + 1), "x"])
def test_a_number_that_no_exercise_has_is_refused_in_one_line(number):
    done = subprocess.run([sys.executable, ROOT / "exercises/check.py", number], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"error: there is no exercise {number}: they are numbered 1 to {len(EXERCISES)}\n"


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


def test_the_fragments_are_those_of_flash_attentions_instruction(tmp_path):
    names: dict = {}
    exec(BY_NAME["fragments"].path.read_text(), names)
    head, parts = "#define WARP_SIZE 32", ("tf32_bits", "mma")
    text = whole(Exercise("fragments", (), source="kernels/mma.cuh", parts=parts, head=head))
    (tmp_path / "mma.cu").write_text(text.replace("../../kernels", str(ROOT / "kernels")) + """
extern "C" __global__ void mma_kernel(float* d, const float* a, const float* b, const float* c) {
    float result[4], lane_a[4], lane_c[4];
    for (int i = 0; i < 4; i++) lane_a[i] = a[4 * threadIdx.x + i], lane_c[i] = c[4 * threadIdx.x + i];
    mma(result, lane_a, b[2 * threadIdx.x], b[2 * threadIdx.x + 1], lane_c);
    for (int i = 0; i < 4; i++) d[4 * threadIdx.x + i] = result[i];
}
""")
    rng = np.random.default_rng(0)
    A, B, C = (rng.integers(-9, 9, shape).astype(np.float32) for shape in [(16, 8), (8, 8), (16, 8)])

    def spread(matrix: np.ndarray, place, count: int) -> np.ndarray:
        return np.array([[matrix[place(lane, i)] for i in range(count)] for lane in range(32)], np.float32)

    lanes = spread(A, names["a_at"], 4), spread(B, names["b_at"], 2), spread(C, names["c_at"], 4)
    result = np.zeros((32, 4), np.float32)
    cpp.compile_source(tmp_path / "mma.cu").kernel("mma_kernel")((1,), (32,), (result, *lanes))
    want = A @ B + C
    assert np.array_equal(result, spread(want, names["c_at"], 4))
    for row, column in np.ndindex(16, 8):
        assert result[names["holder_of_c"](row, column)] == want[row, column]
