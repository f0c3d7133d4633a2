"""Times a training step of ours beside PyTorch's and llm.c's, and beside what the machine allows.

    python dev/bench.py                              # 124M: B4 T1024 on a GPU; B4 T64, and a small model, on the CPU
    python dev/bench.py -b 16 --peers compile        # against torch.compile alone
    python dev/bench.py --llmc ../llm.c/train_gpt2fp32cu
    python dev/bench.py --start                      # also from start to the first finished step

All train the same model, from the same weights, on the same made-up tokens, one after the other in one process (llm.c
in its own), each with its memory to itself. A step is that of train_gpt2_fp32.py: a batch goes to the device, forward,
backward, AdamW, and the host reads the loss, while the device may work on the next step already; PyTorch may do so too.
Milliseconds are the median over steps, each from the end of the one before to its own.

PyTorch gets TF32 products where ours has them, the fused AdamW, gradients set to None, and on a GPU a padded vocabulary
(which raises GPT-2's first loss by 0.001). On the CPU, `eager` has its default AdamW and the others the fused one.

Memory: ours is what the device has less of after the steps than before the model was made, and cuBLAS's workspace;
PyTorch's is torch.cuda.max_memory_reserved; llm.c's is what the device has less of while it runs, with its CUDA context
(some 500 MiB, which the others leave out). On the CPU it is the growth of the process's resident memory to its peak,
and for llm.c what the machine has less of.
"""

import sys
from pathlib import Path

if not __package__:  # run as a program: dev/profile.py would hide the standard library's profile, which torch imports
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import ctypes
import gc
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

from llmc import device  # first: it sets what NumPy must find in the environment

import numpy as np  # isort: skip

from llmc.arguments import Parser, parse_arguments, positive
from llmc.checkpoint import GPT2Config, num_parameters, write_model
from llmc.dataloader import DataLoader, write_tokens
from llmc.errors import UserError
from llmc.report import StepTimer, flops_per_token
from train_gpt2_fp32 import (
    Batches,
    build_model,
    gpt2_backward,
    gpt2_forward,
    gpt2_loss,
    gpt2_update,
    gpt2_zero_grad,
)

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATE = 3e-4
PEERS = {
    "eager": "PyTorch eager",
    "eager-sdpa": "PyTorch eager, SDPA",
    "compile": "PyTorch compile",
    "compile-sdpa": "PyTorch compile, SDPA",
    "compile-graphs": "PyTorch compile, CUDA graphs",
}
DEFAULT_PEERS = {"cuda": list(PEERS), "cpu": ["eager", "eager-sdpa"]}


@dataclass(frozen=True)
class Workload:
    """What every trainer is given: a model (-e), a batch (B, T), and token files `<data>_train.bin`, `<data>_val.bin`
    of vocabulary V. flags: further flags for ours."""

    model: str
    B: int
    T: int
    V: int
    data: str
    flags: tuple[str, ...]

    def arguments(self) -> argparse.Namespace:
        """The command line of train_gpt2_fp32.py, parsed."""
        return parse_arguments([
            "-e", self.model, "-b", str(self.B), "-t", str(self.T), "-i", self.data,
            "--device", device.kind(), *self.flags,
        ])  # fmt: skip

    def loader(self, config: GPT2Config) -> DataLoader:
        return DataLoader(self.data, "train", self.B, self.T, config.vocab_size)


# Tokens


def zipf_tokens(count: int, V: int, most: float = 0.037, seed: int = 1337) -> np.ndarray:
    """`count` tokens below V, of which the one of rank r comes with a probability proportional to 1 / (r + q)
    (Zipf-Mandelbrot), where q makes the most frequent one as frequent as in English text: 3.7%."""
    ranks = np.arange(1.0, V + 1)
    low, high = -1 + 1e-9, 1e9
    for _ in range(200):
        q = (low + high) / 2
        weights = 1 / (ranks + q)
        low, high = (q, high) if weights[0] / weights.sum() > most else (low, q)
    random = np.random.default_rng(seed)
    drawn = np.searchsorted(np.cumsum(weights) / weights.sum(), random.random(count), side="right")
    return random.permutation(V)[np.minimum(drawn, V - 1)]


def write_data(prefix: str, B: int, T: int, V: int) -> None:
    """Token files for training, of at least 64 batches, and for validation, of one."""
    write_tokens(f"{prefix}_train.bin", zipf_tokens(max(1 << 18, 64 * B * T) + 1, V))
    write_tokens(f"{prefix}_val.bin", zipf_tokens(B * T + 1, V, seed=1338))


# What the machine can do


def seconds(work: Callable[[], None], calls: int = 10, rounds: int = 5, record: bool = True) -> float:
    """What `work` takes on the device, called over and over: the best of some rounds of `calls`. On CUDA it is
    recorded, so that the host's time is not in it, unless `record` is False."""

    def repeat() -> None:
        for _ in range(calls):
            work()

    recorded = device.record(repeat) if record else repeat
    for _ in range(2 if device.kind() == "cuda" else 1):
        recorded()
    device.synchronize()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        recorded()
        device.synchronize()
        times.append(time.perf_counter() - started)
    return min(times) / calls


def random_array(*shape: int):
    return device.asarray(np.random.default_rng(1).standard_normal(shape, dtype=np.float32))


def product_seconds(m: int, n: int, k: int, layouts: tuple = ((False, True),)) -> float:
    """A product of (m, k) and (k, n) on random numbers, in the fastest of these layouts (trans_a, trans_b)."""
    a, b, c = random_array(m * k), random_array(k * n), device.empty((m * n,))
    calls = max(1, min(20, round(4e11 / (2 * m * n * k)))) if device.kind() == "cuda" else 1
    return min(seconds(lambda: device.sgemm(c, a, b, m, n, k, ta, tb), calls, 3) for ta, tb in layouts)  # noqa: B023


def layouts() -> tuple:
    """The layouts that a product might take: on the CPU they make little difference."""
    return ((False, False), (False, True), (True, False), (True, True)) if device.kind() == "cuda" else ((False, True),)


@dataclass(frozen=True)
class Ceilings:
    """product: FLOP/s of a large square matrix product; copy: bytes/s, read and written, of a large copy."""

    product: float
    copy: float
    description: str


def measure_ceilings() -> Ceilings:
    n, megabytes = (8192, 1024) if device.kind() == "cuda" else (2048, 256)
    free, _ = device.memory()
    while 3 * 4 * n * n > free // 2:
        n //= 2
    product = 2 * n**3 / product_seconds(n, n, n, layouts())
    size = min(megabytes << 20, free // 8) // 4
    src, dst = device.zeros((size,)), device.zeros((size,))
    if device.kind() == "cuda":
        # Not recorded: in a graph, a copy is left to the copy engines, which are slower than the multiprocessors.
        copy = 2 * src.nbytes / seconds(lambda: dst.data.copy_from_device_async(src.data, src.nbytes), record=False)
    else:
        parts = [slice(i * size // 8, (i + 1) * size // 8) for i in range(8)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            copy = 2 * src.nbytes / seconds(
                lambda: list(pool.map(lambda part: np.copyto(dst[part], src[part]), parts)), calls=1
            )  # fmt: skip
    kind = "TF32" if device.tf32() else "fp32"
    description = (
        f"ceilings: {kind} matrix product {n}^3 {product / 1e12:.4g} TFLOP/s, copy {copy / 1e9:.0f} GB/s (read + write)"
    )
    return Ceilings(product, copy, description)


def limits(config: GPT2Config, B: int, T: int, ceilings: Ceilings) -> list[tuple[str, float]]:
    """What no step can be faster than: parts with their milliseconds. The first is the linear layers' products as fast
    as the largest product; the second the same in their own shapes; one of the two counts."""
    L, C, Vp, N = config.num_layers, config.channels, config.padded_vocab_size, B * T
    linear = [(C, 3 * C, L), (C, C, L), (C, 4 * C, L), (4 * C, C, L), (C, Vp, 1)]  # in, out, how many
    flops = sum(3 * 2 * N * inp * out * count for inp, out, count in linear)
    own_shapes = sum(
        count * product_seconds(*shape, layouts())
        for inp, out, count in linear
        for shape in ((N, out, inp), (N, inp, out), (out, inp, N))  # forward, input's and weight's gradient
    )
    # A causal matrix is half a matrix: forward takes 2 products of it, backward 5.
    attention = 7 * L * B * T * T * C
    # What linear layers, attention and residual connections put out: 12 C a layer. Each is written and read again once,
    # and so is its gradient.
    activations = L * 12 * C * N * 4 * 4
    parts = [
        ("linear products at the ceiling", flops / ceilings.product),
        ("linear products in their own shapes", own_shapes),
        ("causal attention at the ceiling", attention / ceilings.product),
        ("AdamW's bytes at copy speed", 7 * 4 * num_parameters(config) / ceilings.copy),
        ("activations across memory once", activations / ceilings.copy),
        ("logits across memory once", 2 * 4 * N * Vp / ceilings.copy),
    ]
    return [(name, 1000 * part) for name, part in parts]


def print_limits(parts: list[tuple[str, float]]) -> None:
    others = sum(ms for _, ms in parts[2:])
    print("limit for this shape, ms:")
    for name, ms in parts:
        print(f"  {name:36} {ms:10.3f}")
    print(f"  {'sum, products at the ceiling':36} {parts[0][1] + others:10.3f}")
    print(f"  {'sum, products in their own shapes':36} {parts[1][1] + others:10.3f}", flush=True)


# The trainers. launch(step) returns a mark whose wait() gives the time when the step ended; then loss(step) is known.


class Ours:
    """The training step of train_gpt2_fp32.py's loop."""

    def __init__(self, workload: Workload):
        args = workload.arguments()
        self.model, _ = build_model(args, SimpleNamespace(vocab_size=workload.V))
        self.name = f"llm.cupy ({' '.join((self.model.attention, *workload.flags))})"
        self.batches = Batches(self.model, workload.loader(self.model.config))
        device.compile_all()
        self.train = device.record(self.forward_backward)

    def forward_backward(self) -> None:
        model = self.model
        gpt2_zero_grad(model)
        gpt2_forward(model, model.B, model.T)
        gpt2_loss(model, model.B, model.T, dloss=1.0 / (model.B * model.T))
        gpt2_backward(model, model.B, model.T)

    def update(self, step: int) -> None:
        gpt2_update(self.model, LEARNING_RATE, 0.9, 0.999, 1e-8, 0.0, step + 1)

    def launch(self, step: int):
        self.batches.send(step, 0)
        self.train()
        self.batches.fetch_losses(step, 0)
        self.update(step)
        return device.event()

    def loss(self, step: int) -> float:
        return self.batches.mean_loss(step)


class TorchEvent:
    def __init__(self, torch, cuda: bool):
        self.event = torch.cuda.Event() if cuda else None
        if cuda:
            self.event.record()
        self.time = time.perf_counter()

    def wait(self) -> float:
        if self.event is None:
            return self.time
        self.event.synchronize()
        return time.perf_counter()


class Torch:
    """PyTorch's training step. As ours, it sends batches from and fetches losses to page-locked memory, of which there
    are two lots, and never waits for the device before the next step is launched."""

    def __init__(self, peer: str, workload: Workload, config: GPT2Config, params: np.ndarray, attention: str):
        import torch

        from dev.torch_gpt2 import GPT2

        self.torch, self.name, self.graphs = torch, PEERS[peer], peer == "compile-graphs"
        self.cuda = device.kind() == "cuda"
        self.device = torch.device("cuda" if self.cuda else "cpu")
        torch.set_float32_matmul_precision("high" if device.tf32() else "highest")
        with self.device:
            model = GPT2(config, "sdpa" if "sdpa" in peer else attention, padded=self.cuda)
        model.load(params)
        self.model_loss = model.loss
        if peer.startswith("compile"):
            mode = "reduce-overhead" if self.graphs else "default"
            self.model_loss = torch.compile(model.loss, mode=mode, dynamic=False)
        fused = self.cuda or peer != "eager"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=fused or None
        )
        if not self.cuda:
            self.name += ", fused AdamW" if fused else ", default AdamW"
        self.loader = workload.loader(config)
        shape = (2, workload.B, workload.T)
        self.staged = np.empty(shape, np.int32)
        self.host_tokens = torch.empty((2, *shape), dtype=torch.int64, pin_memory=self.cuda)
        self.host_losses = torch.empty(2, pin_memory=self.cuda)

    def launch(self, step: int) -> TorchEvent:
        if self.graphs:
            self.torch.compiler.cudagraph_mark_step_begin()
        self.loader.next_batch(*self.staged)
        host = self.host_tokens[step % 2]
        host.copy_(self.torch.from_numpy(self.staged))
        tokens, targets = host.to(self.device, non_blocking=True)
        loss = self.model_loss(tokens, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.host_losses[step % 2].copy_(loss.detach(), non_blocking=True)
        return TorchEvent(self.torch, self.cuda)

    def loss(self, step: int) -> float:
        return self.host_losses[step % 2].item()


@dataclass(frozen=True)
class Result:
    """ms: of a step; loss: of the first step, None where it is not known; mebibytes: of memory at the peak."""

    name: str
    ms: float
    loss: float | None
    mebibytes: float


def time_steps(trainer, steps: int | None) -> tuple[float, float]:
    """The median milliseconds of a step after the first few, and the loss of the very first step. Without `steps`, as
    many are timed as take ten seconds, at least 5 and at most 100."""
    cpu = device.kind() == "cpu"
    warm_up = 2 if cpu else 10
    timer, running, first_loss = StepTimer(), None, None

    def finish() -> None:
        nonlocal first_loss
        if running is not None:
            step, started, end = running
            timer.add(started, end.wait())
            loss = trainer.loss(step)
            first_loss = loss if step == 0 else first_loss

    def enough() -> bool:
        timed = timer.milliseconds[warm_up:]
        return len(timed) >= (steps or 100) or steps is None and len(timed) >= 5 and sum(timed) > 10_000

    step = 0
    while not enough():
        started = time.perf_counter()
        end = trainer.launch(step)
        finish()  # the step before, while the device works on this one
        running = step, started, end
        if cpu:
            finish()
            running = None
        step += 1
    device.synchronize()
    return float(np.median(timer.milliseconds[warm_up:])), first_loss


# Memory


def release_memory() -> None:
    """Gives back what the trainer before has left free, so that it is not counted as the next one's or hidden by it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)
    if device.kind() == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


def resident_mebibytes(peak: bool) -> float:
    """The process's resident memory, or its peak since `reset_peak`. Not a number where the system does not tell."""
    try:
        found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        return int(found[1]) / 1024
    except (OSError, TypeError):
        return float("nan")


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def run_ours(workload: Workload, steps: int | None) -> tuple[Result, GPT2Config, np.ndarray, str]:
    """Ours timed; and its model's sizes, initial parameters and attention, for the others to start from."""
    release_memory()
    free, _ = device.memory()
    reset_peak()
    resident = resident_mebibytes(peak=False)
    trainer = Ours(workload)
    params = device.to_host(trainer.model.params_memory)
    ms, loss = time_steps(trainer, steps)
    if device.kind() == "cuda":
        mebibytes = (free - device.memory()[0] + device._device.workspace.nbytes) / 2**20
    else:  # less the parameters that are held for the others
        mebibytes = resident_mebibytes(peak=True) - resident - params.nbytes / 2**20
    return Result(trainer.name, ms, loss, mebibytes), trainer.model.config, params, trainer.model.attention


def run_torch(peer: str, workload: Workload, config: GPT2Config, params: np.ndarray, attention: str, steps) -> Result:
    import torch

    import dev.torch_gpt2  # noqa: F401, so that its import is not counted as memory of the first trainer that needs it

    release_memory()
    reset_peak()
    resident = resident_mebibytes(peak=False)
    if device.kind() == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer = Torch(peer, workload, config, params, "relu" if attention == "relu" else "softmax")
        ms, loss = time_steps(trainer, steps)
        if device.kind() == "cuda":
            mebibytes = torch.cuda.max_memory_reserved() / 2**20
        else:
            mebibytes = resident_mebibytes(peak=True) - resident
        return Result(trainer.name, ms, loss, mebibytes)
    finally:
        if peer.startswith("compile"):
            torch._dynamo.reset()


# llm.c


def llmc_command(binary: Path, directory: Path, workload: Workload, steps: int) -> list[str]:
    """The command that runs an llm.c trainer, in a directory with gpt2_124M.bin and token files in it. Its usage tells
    which of llm.c's trainers it is; the one for the CPU has no flags. Raises UserError for what it cannot run."""
    usage = subprocess.run([binary, "--help"], cwd=directory / "empty", capture_output=True, text=True, timeout=60)
    flags = set(re.findall(r"^\s*-(\w) ", usage.stdout + usage.stderr, re.M))
    if not flags:
        if (workload.B, workload.T) != (4, 64):
            raise UserError(f"--llmc {binary}: takes no flags, so it can only be run at -b 4 -t 64")
        return [str(binary)]
    # Before it took patterns of files with a header (-i, -j), it took a prefix of files without one.
    data = ["-i", "train.bin", "-j", "val.bin"] if "j" in flags else ["-i", "raw"]
    wanted = {
        "b": workload.B, "t": workload.T, "l": LEARNING_RATE, "v": 10**6, "m": 1, "s": 10**6, "g": 1, "x": steps,
        "f": int(device.tf32()), "e": "gpt2_124M.bin",
    }  # fmt: skip
    return [str(binary), *data, *(word for flag, value in wanted.items() if flag in flags
                                  for word in (f"-{flag}", str(value)))]  # fmt: skip


def terminal_lines(process: subprocess.Popen, terminal: int) -> Iterator[str]:
    """The lines that a process writes to a terminal of its own, where C's stdout is flushed after each."""
    with os.fdopen(terminal, "rb", buffering=0) as output:
        rest = b""
        while True:
            try:
                read = output.read(1 << 16)
            except OSError:  # EIO: the process has closed its end
                read = b""
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            yield from (line.decode(errors="replace").rstrip() for line in lines)
    process.wait()


def run_llmc(binary: Path, workload: Workload, config: GPT2Config, params: np.ndarray, steps: int | None) -> Result:
    """Runs an llm.c binary and takes the milliseconds from its lines. Raises UserError where it prints none."""
    import pty

    release_memory()
    warm_up, count = (1, steps or 5) if device.kind() == "cpu" else (10, steps or 45)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "empty").mkdir()
        command = llmc_command(binary, directory, workload, warm_up + count)
        write_model(directory / "gpt2_124M.bin", config, params)
        tokens = zipf_tokens((warm_up + count) * workload.B * workload.T + 1, workload.V)
        for split in ("train", "val"):
            write_tokens(directory / f"{split}.bin", tokens)
            tokens.astype("<i4").tofile(directory / f"raw_{split}.bin")
        for place in ("dev/data/tinyshakespeare", "data"):  # where the trainer for the CPU looks
            (directory / place).mkdir(parents=True)
            for split in ("train", "val"):
                (directory / place / f"tiny_shakespeare_{split}.bin").symlink_to(directory / f"{split}.bin")
        terminal, other_end = pty.openpty()
        free, _ = device.memory()
        least, milliseconds, printed = free, [], []
        process = subprocess.Popen(command, cwd=directory, stdout=other_end, stderr=other_end)
        os.close(other_end)
        try:
            for line in terminal_lines(process, terminal):
                printed.append(line)
                least = min(least, device.memory()[0])
                found = re.match(r"step +\d+.*?([\d.]+) ms", line)
                if found:
                    milliseconds.append(float(found[1]))
                if len(milliseconds) >= warm_up + count:
                    break
        finally:
            process.kill()
            process.wait()
    timed = milliseconds[warm_up:]
    if not timed:
        last = next((line for line in reversed(printed) if line), "nothing")
        raise UserError(f"--llmc {binary}: printed no milliseconds after {warm_up} steps; its last line: {last}")
    return Result(f"llm.c {binary.name}", float(np.median(timed)), None, (free - least) / 2**20)


# From start to the first finished step


def time_start(workload: Workload, config: GPT2Config, params: np.ndarray) -> None:
    """Runs train_gpt2_fp32.py for one step, in a new process: first with nothing compiled, then again."""
    release_memory()
    with tempfile.TemporaryDirectory() as directory:
        write_model(f"{directory}/model.bin", config, params)
        started = time.perf_counter()
        np.fromfile(f"{directory}/model.bin", np.float32)
        reading = time.perf_counter() - started
        caches = {name: directory for name in ("CUPY_CACHE_DIR", "CUDA_CACHE_PATH", "LLMC_CACHE_DIR")}
        command = [
            sys.executable, str(ROOT / "train_gpt2_fp32.py"), "-e", f"{directory}/model.bin", "-i", workload.data,
            "-b", str(workload.B), "-t", str(workload.T), "-x", "1", "-m", "1", "-g", "0",
            "--device", device.kind(), *workload.flags,
        ]  # fmt: skip
        print(f"start to first finished step, of which reading the model takes {reading:.2f} s:")
        for name in ("nothing compiled before", "kernels cached"):
            started = time.perf_counter()
            process = subprocess.Popen(
                command, env=os.environ | caches, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            lines, took = [], None
            for line in process.stdout:
                lines.append(line)
                if took is None and line.startswith("step "):
                    took = time.perf_counter() - started
            process.wait()
            if took is None:
                raise UserError(f"{' '.join(command)} finished no step: {lines[-1].strip() if lines else 'no output'}")
            print(f"  {name:36} {took:10.2f} s", flush=True)


# The table


COLUMNS = "{:40} {:>10} {:>11} {:>13} {:>11} {:>8} {:>12}"


def print_result(result: Result, ours: Result, config: GPT2Config, B: int, T: int, ceilings: Ceilings) -> None:
    rate = 1000 * B * T / result.ms
    share = rate * flops_per_token(config, T) / ceilings.product
    memory = f"{result.mebibytes:.0f} MiB" if np.isfinite(result.mebibytes) else "-"
    loss = f"{result.loss:.6f}" if result.loss is not None else "-"
    row = (result.name, f"{result.ms:.2f}", f"{rate:.0f}", f"{100 * share:.1f}%", memory)
    print(COLUMNS.format(*row, f"{result.ms / ours.ms:.2f}", loss), flush=True)


def usable_peers(asked: str | None, attention: str, stated: Callable[[str], None]) -> list[str]:
    """The peers to run. Raises UserError where one is asked for by a wrong name, or is asked for and not installed."""
    peers = DEFAULT_PEERS[device.kind()] if asked is None else [peer for peer in asked.split(",") if peer]
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peers {peer}: choose from {', '.join(PEERS)} (or '' for none)")
    if not peers:
        return []
    try:
        import torch
    except ImportError:
        torch = None
    missing = "PyTorch is not installed (pip install -r requirements-dev.txt)" if torch is None else None
    if torch and device.kind() == "cuda" and not torch.cuda.is_available():
        missing = "this PyTorch has no CUDA"
    if device.kind() == "cpu" and "compile-graphs" in peers:
        raise UserError("--peers compile-graphs: there are CUDA graphs only on a GPU")
    if missing and asked is not None:
        raise UserError(f"--peers {asked}: {missing}")
    if missing:
        stated(f"{missing}: ours is timed alone")
        return []
    if attention == "relu" and any("sdpa" in peer for peer in peers):
        stated("SDPA has no ReLU attention: left out")
        peers = [peer for peer in peers if "sdpa" not in peer]
    return peers


def bench(workload: Workload, args: argparse.Namespace, ceilings: Ceilings) -> None:
    B, T = workload.B, workload.T
    write_data(workload.data, B, T, workload.V)
    ours, config, params, attention = run_ours(workload, args.steps)
    print(f"\n{workload.model}, B {B}, T {T}, vocabulary {workload.V}: {num_parameters(config):,} parameters")
    release_memory()
    print_limits(limits(config, B, T, ceilings))
    print()
    print(COLUMNS.format("trainer", "ms/step", "tokens/s", "of ceiling", "memory", "x ours", "first loss"))
    print_result(ours, ours, config, B, T, ceilings)
    for peer in usable_peers(args.peers, attention, print):
        try:
            result = run_torch(peer, workload, config, params, attention, args.steps)
        except Exception as error:  # out of memory, no compiler, ...: the others can still be timed
            print(f"{PEERS[peer]:40} did not run: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            continue
        print_result(result, ours, config, B, T, ceilings)
    if args.llmc:
        print_result(run_llmc(args.llmc, workload, config, params, args.steps), ours, config, B, T, ceilings)
    if args.start:
        print()
        time_start(workload, config, params)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-e", "--model", metavar="MODEL", help="d12 or layers=4,heads=4,channels=128 (d12)")
    parser.add_argument("-b", "--batch-size", type=positive, metavar="B", help="sequences a batch (4)")
    parser.add_argument("-t", "--sequence-length", type=positive, metavar="T", help="tokens (1024; on the CPU 64)")
    parser.add_argument("-a", "--attention", choices=("auto", "flash", "softmax", "relu"), default="auto")
    parser.add_argument("--vocab-size", type=positive, metavar="V", help="tokens in the vocabulary (50257)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")


def workload_of(args: argparse.Namespace, rest: list[str], directory: str) -> Workload:
    """What the flags ask for; those that are not known here are handed on to train_gpt2_fp32.py's parser."""
    V = args.vocab_size or 50257
    if V > 1 << 16:
        raise UserError(f"--vocab-size {V}: token files hold tokens below 65536")
    T = args.sequence_length or (1024 if device.kind() == "cuda" else 64)
    flags = (["-a", args.attention] if args.attention != "auto" else []) + rest
    workload = Workload(args.model or "d12", args.batch_size or 4, T, V, f"{directory}/tokens", tuple(flags))
    device.use_tf32(workload.arguments().tf32)
    return workload


def main() -> None:
    parser = Parser(
        description="Time a training step beside PyTorch's, llm.c's and the machine's limits.",
        epilog="Flags not listed here go to train_gpt2_fp32.py.",
        allow_abbrev=False,
    )
    add_workload_arguments(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="steps to time (what takes 10 s, 5 to 100)")
    parser.add_argument("--peers", metavar="NAMES", help=f"of {','.join(PEERS)}; '' for none")
    parser.add_argument("--llmc", type=Path, metavar="PATH", help="an llm.c trainer to time as well")
    parser.add_argument("--start", action="store_true", help="also time from start to first finished step")
    args, rest = parser.parse_known_args()
    if args.llmc:
        args.llmc = args.llmc.resolve()
        if not (args.llmc.is_file() and os.access(args.llmc, os.X_OK)):
            raise UserError(f"--llmc {args.llmc}: no such program; build one in llm.c, with make train_gpt2fp32cu")
    device.use(args.device)
    with tempfile.TemporaryDirectory() as directory:
        workload = workload_of(args, rest, directory)
        workloads = [workload]
        chosen = args.model or args.batch_size or args.sequence_length or args.vocab_size
        if device.kind() == "cpu" and not chosen:  # and the small model of `make train`
            workloads.append(Workload("layers=4,heads=4,channels=128", 12, 64, 257, workload.data, workload.flags))
        usable_peers(args.peers, args.attention, lambda text: None)  # complains before anything takes time
        ceilings = measure_ceilings()
        print(f"{device.name()}\n{ceilings.description}", flush=True)
        for workload in workloads:
            bench(workload, args, ceilings)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except MemoryError as error:
        sys.exit(f"error: out of memory ({error}): lower -b or -t")
