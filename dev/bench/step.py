"""Times a training step of ours beside PyTorch's, and beside what the machine allows.

    python dev/bench                             # GPT-2 124M, B4 T1024; on the CPU T64
    python dev/bench train_llama3 -e llama3.2-1b -b 2 --peers compile,compile-sdpa
    python dev/bench -b 16 --peers ''            # ours alone
    python dev/bench --precision bf16            # all in bf16, PyTorch under autocast
    python dev/bench -b 32 -d 524288             # steps of half a million tokens, by accumulating gradients
    python dev/bench --share                     # ours alone, as a row for the table of doc/speed.md

All train the same model, from the same weights, on the same made-up tokens, one after the other in one process, each
with its memory to itself. A step is that of the model script: a batch goes to the device, forward, backward, AdamW, and
the host reads the loss, while the device may work on the next step already; PyTorch may do so too. Milliseconds are the
median over steps, each from the end of the one before to its own. On the CPU all train in three rounds, and the fastest
round of each trainer counts. A neighbour of a virtual machine can halve its speed for a minute. Without rounds a ratio
would say which trainer ran beside the neighbour.

PyTorch trains GPT-2 as torch_models.py has it, and transformers' classes of the other models. It gets TF32 products
where ours has them, autocast where ours is in bf16 or fp8 (with fp32 weights, as our master copy), the fused AdamW,
gradients set to None, and on a GPU a padded vocabulary (which raises GPT-2's first loss by 0.001). On the CPU, `eager`
has its default AdamW and the others the fused one. `compile-cudnn-fp8` needs torchao (pip install torchao).

Memory: ours is what the device has less of after the steps than before the model was made, and cuBLAS's workspaces;
PyTorch's is torch.cuda.max_memory_reserved. On the CPU it is the growth of the process's resident memory to its peak.
"""

import ctypes
import gc
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import device
from dev.bench.ceilings import Ceilings, limits, measure_ceilings
from dev.bench.workload import (
    LEARNING_RATE,
    Ours,
    Workload,
    make_parser,
    tensors_of,
    time_steps,
    workload_of,
    write_data,
)
from device.cublas import WORKSPACE
from device.errors import UserError, first_line
from llmc.model.tensors import flops_per_token, num_parameters
from llmc.run.arguments import positive
from llmc.run.peak import percent_of_peak

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

TRAINERS = {
    "ours": "llm.cupy",
    "eager": "PyTorch eager",
    "eager-sdpa": "PyTorch eager, SDPA",
    "compile": "PyTorch compile",
    "compile-sdpa": "PyTorch compile, SDPA",
    "compile-graphs": "PyTorch compile, CUDA graphs",
    "compile-cudnn": "PyTorch compile, cuDNN's attention",
    "compile-graphs-cudnn": "PyTorch compile, CUDA graphs, cuDNN's attention",
    "compile-cudnn-fp8": "PyTorch compile, cuDNN's attention, torchao",
    "compile-sdpa-bf16": "PyTorch compile, SDPA, products in bf16, as nanoGPT trains",
}
PEERS = tuple(TRAINERS)[1:]
DEFAULT_PEERS = {"cuda": PEERS[:5], "cpu": PEERS[:2]}
CUDNN_PEERS = PEERS[5:8]  # whose attention is bf16 alone


class TorchEvent:
    """device.event() of CUDA, in PyTorch."""

    def __init__(self, torch):
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def since(self, begin: "TorchEvent") -> float:
        self.event.synchronize()
        return begin.event.elapsed_time(self.event)


class Torch:
    """PyTorch's training step. As ours, it sends batches from and fetches losses to page-locked memory, of which there
    are two lots, and never waits for the device before the next step is launched."""

    def __init__(self, peer: str, workload: Workload, tensors: SimpleNamespace):
        from dev.bench.torch_models import build_torch_model, take_float8

        import torch

        self.torch, self.name, self.graphs = torch, TRAINERS[peer], "graphs" in peer
        self.cuda = device.kind == "cuda"
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.mark = partial(TorchEvent, torch) if self.cuda else device.event
        torch.set_float32_matmul_precision("high" if device.tf32 else "highest")
        with self.device:
            attention = "sdpa" if "sdpa" in peer or peer in CUDNN_PEERS else "eager"
            model = build_torch_model(workload.config, attention, padded=self.cuda)
        model.load(tensors)
        if peer.endswith("fp8"):
            take_float8(model)
        self.model_loss = model.loss
        bf16 = device.floatX == device.BF16 or peer.endswith(("bf16", "fp8"))
        self.autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)
        self.attention = nullcontext
        if peer in CUDNN_PEERS:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            self.attention = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
        if peer.startswith("compile"):
            mode = "reduce-overhead" if self.graphs else "default"
            self.model_loss = torch.compile(model.loss, mode=mode, dynamic=False)
        fused = self.cuda or peer != "eager"
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, fused=fused or None
        )
        if not self.cuda:
            self.name += ", fused AdamW" if fused else ", default AdamW"
        self.loader, self.count = workload.loader(), workload.batches
        shape = (2, workload.B, workload.T)
        self.staged = np.empty(shape, np.int32)
        self.host_tokens = torch.empty((2, self.count, *shape), dtype=torch.int64, pin_memory=self.cuda)
        self.host_losses = torch.empty((2, self.count), pin_memory=self.cuda)

    def launch(self, step: int) -> tuple:
        begin = self.mark()
        for i in range(self.count):
            if self.graphs:
                self.torch.compiler.cudagraph_mark_step_begin()
            self.loader.next_batch(*self.staged)
            host = self.host_tokens[step % 2, i]
            host.copy_(self.torch.from_numpy(self.staged))
            tokens, targets = host.to(self.device, non_blocking=True)
            with self.autocast, self.attention():
                loss = self.model_loss(tokens, targets)
            if i == 0:
                self.optimizer.zero_grad(set_to_none=True)
            (loss / self.count).backward()
            self.host_losses[step % 2, i].copy_(loss.detach(), non_blocking=True)
        self.optimizer.step()
        return begin, self.mark()

    def loss(self, step: int) -> float:
        return self.host_losses[step % 2].mean().item()


# Memory


def release_memory() -> float:
    """Gives back what the trainer before has left free, so that it is not counted as the next one's or hidden by it.
    Returns the process's resident memory in MiB, whose peak is measured from now on."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:
        trim(0)
    if device.kind == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")
    return resident_mebibytes(peak=False)


def resident_mebibytes(peak: bool) -> float:
    """The process's resident memory, or its peak. Not a number where the system does not tell."""
    try:
        status, name = Path("/proc/self/status").read_text("utf-8"), "VmHWM" if peak else "VmRSS"
        return int(re.search(rf"^{name}:\s*(\d+) kB", status, re.M)[1]) / 1024
    except (OSError, TypeError):
        return float("nan")


# A workload


@dataclass(frozen=True)
class Result:
    """ms: of a step; loss: of the first step; mebibytes: of memory at the peak."""

    name: str
    ms: float
    loss: float
    mebibytes: float


def run_ours(workload: Workload, steps: int | None, keep: bool) -> tuple[Result, SimpleNamespace | None]:
    """Ours timed, and with `keep` its first parameters, fp32 on the host."""
    resident, (free, _) = release_memory(), device.memory()
    trainer, tensors = Ours(workload), None
    training = trainer.training
    if keep:
        params, *_ = training.exchange.whole_state(training.adamw)
        tensors = tensors_of(training.model, np.concatenate(list(params)))
    ms, loss = time_steps(trainer, steps)
    if device.kind == "cuda":
        mebibytes = (free - device.memory()[0] + 2 * WORKSPACE) / 2**20
    else:  # less the parameters that are held for the others
        held = 4 * num_parameters(workload.config) if keep else 0
        mebibytes = resident_mebibytes(peak=True) - resident - held / 2**20
    return Result(trainer.name, ms, loss, mebibytes), tensors


def run_torch(peer: str, workload: Workload, tensors: SimpleNamespace, steps: int | None) -> Result:
    import dev.bench.torch_models  # noqa: F401, so that its import is not counted as memory of the first trainer that needs it

    import torch

    resident = release_memory()
    if device.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        trainer = Torch(peer, workload, tensors)
        ms, loss = time_steps(trainer, steps)
        if device.kind == "cuda":
            mebibytes = torch.cuda.max_memory_reserved() / 2**20
        else:
            mebibytes = resident_mebibytes(peak=True) - resident
        return Result(trainer.name, ms, loss, mebibytes)
    finally:
        if peer.startswith("compile"):
            torch._dynamo.reset()


def usable_peers(asked: str | None, precision: str, attention: str) -> list[str]:
    """The peers to run. Raises UserError where one is asked for by a wrong name."""
    cudnn = {"bf16": CUDNN_PEERS[:2], "fp8": CUDNN_PEERS} if device.kind == "cuda" else {}
    default = DEFAULT_PEERS[device.kind] + cudnn.get(precision, ())
    peers = [peer for peer in (default if asked is None else asked.split(",")) if peer]
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"--peers {peer}: choose from {', '.join(PEERS)} (or '' for none)")
    return peers if attention != "relu" else []  # which PyTorch has not


COLUMNS = "{:40} {:>10} {:>11} {:>11} {:>7} {:>11} {:>8} {:>12}"


def rate_and_mfu(result: Result, workload: Workload) -> tuple[float, float | None]:
    """Tokens per second, and the MFU in percent, or None if the GPU's peak is not known."""
    flops = flops_per_token(workload.config, workload.T) * workload.step_tokens
    return 1000 * workload.step_tokens / result.ms, percent_of_peak(flops, result.ms)


def print_result(result: Result, ours: Result, workload: Workload, ceilings: Ceilings) -> None:
    rate, mfu = rate_and_mfu(result, workload)
    flops = flops_per_token(workload.config, workload.T)
    memory = f"{result.mebibytes:.0f} MiB" if np.isfinite(result.mebibytes) else "-"
    shares = (f"{100 * rate * flops / ceilings.product:.1f}%", "-" if mfu is None else f"{mfu:.1f}%")
    row = (result.name, f"{result.ms:.2f}", f"{rate:.0f}", *shares, memory)
    print(COLUMNS.format(*row, f"{result.ms / ours.ms:.2f}", f"{result.loss:.6f}"), flush=True)


def bench(workload: Workload, args: Namespace, peers: list[str]) -> None:
    """Prints the table of a workload, in the precision in use."""
    ceilings = measure_ceilings()
    print(f"{device.name}\n{ceilings.description}", flush=True)
    write_data(workload)
    ours, tensors = run_ours(workload, args.steps, bool(peers))
    print(f"\n{workload}: {num_parameters(workload.config):,} parameters")
    release_memory()
    print("limit for this shape, ms:")
    parts = limits(workload.kind, workload.config, workload.B, workload.T, ceilings, workload.batches)
    for name, ms in (parts | {"sum": sum(parts.values())}).items():
        print(f"  {name:36} {ms:10.3f}")
    print()
    print(COLUMNS.format("trainer", "ms/step", "tokens/s", "of ceiling", "MFU", "memory", "x ours", "first loss"))
    rounds = args.rounds or (3 if device.kind == "cpu" and peers else 1)
    fastest: dict[str, Result] = {}
    for number in range(rounds):
        if number > 0:
            ours, _ = run_ours(workload, args.steps, bool(peers))
        for trainer in ["ours", *peers]:
            try:
                found = ours if trainer == "ours" else run_torch(trainer, workload, tensors, args.steps)
            except Exception as error:  # out of memory, no compiler, ...: the others can still be timed
                print(f"{TRAINERS[trainer]:40} did not run: {type(error).__name__}: {first_line(error)}", flush=True)
                continue
            print_result(found, ours, workload, ceilings)
            fastest[trainer] = min(fastest.get(trainer, found), found, key=lambda result: result.ms)
    if rounds > 1:
        print(f"\nthe fastest of {rounds} rounds:")
        for found in fastest.values():
            print_result(found, fastest["ours"], workload, ceilings)


def said_by(*command: str) -> str:
    """The first line that a program prints; "-" if there is no such program here, or it fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "-"
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else "-"


def share(workload: Workload, steps: int | None) -> None:
    """Prints the row of ours for the table in doc/speed.md."""
    write_data(workload)
    ours, _ = run_ours(workload, steps, keep=False)
    driver = cuda = "-"
    if device.kind == "cuda":
        from cupy.cuda import runtime

        driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        cuda = "{}.{}".format(*divmod(runtime.runtimeGetVersion() // 10, 100))
    commit = said_by("git", "describe", "--always", "--dirty", "--exclude=*")
    rate, mfu = rate_and_mfu(ours, workload)
    of_peak = "peak not known" if mfu is None else f"{mfu:.1f}%"
    cells = device.name, driver, cuda, commit, f"`{workload}`", f"{rate:,.0f}", of_peak, f"{ours.mebibytes:,.0f}"
    print(f"| {' | '.join(cells)} |")


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time a training step beside PyTorch's and the machine's limits.")
    add = parser.add_argument
    add("--steps", type=positive, metavar="N", help="steps to time (as many as take 10 s, 5 to 100)")
    add("--peers", metavar="NAMES", help=f"of {','.join(PEERS)}; '' for none")
    add("--rounds", type=positive, metavar="N", help="times that each trainer runs, in turn (3 on the CPU, else 1)")
    add("--share", action="store_true", help="print one row for the table of doc/speed.md: ours alone")
    args = parser.parse_args(arguments)
    if args.share and (args.peers or args.rounds):
        raise UserError("--share times ours alone, once: leave --peers and --rounds out")
    device.use(args.device)
    peers = usable_peers(args.peers, args.precision, args.attention)
    with tempfile.TemporaryDirectory() as directory:
        workload = workload_of(args, directory)
        share(workload, args.steps) if args.share else bench(workload, args, peers)
