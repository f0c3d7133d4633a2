"""Compares what the microscope counts with what NVIDIA's profiler counts on a GPU: python dev/microscope/compare_ncu.py

Every launcher runs at its small sizes (kernels/launches.py), and some in bf16 too: once on the GPU under ncu, and once
under the microscope. tests/data/microscope.json keeps, for each kernel and counter, both numbers and the GPU. ncu must
be on the PATH; it may lack the permission to read the counters (NVIDIA explains what to do under "ERR_NVGPUCTRPERM").
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import csv
import json
import shutil
import subprocess

import device
from dev.microscope.launches import LAUNCHES, launches_in
from dev.microscope.watch import FILES, LOAD, STORE, Watched, distinct, passes_of, sectors_of, use_microscope, watch
from device.errors import UserError
from llmc.files.files import replacing
from llmc.run.arguments import Parser
from llmc.run.program import run_program

import numpy as np

KEPT = Path(__file__).resolve().parents[2] / "tests" / "data" / "microscope.json"

# Launchers with their precisions: all, then those whose kernels show what two-byte accesses count.
RUNS = [(name, "tf32") for name in launches_in("tf32")] + [(name, "bf16") for name in (
    "encoder_forward", "layernorm_forward", "layernorm_backward", "gelu_backward", "swiglu_backward",
    "fused_classifier", "attention_forward", "flash_attention_forward", "flash_attention_backward", "adamw",
)]  # fmt: skip

L1 = "l1tex__"
COUNTERS = {
    "global load requests": f"{L1}t_requests_pipe_lsu_mem_global_op_ld.sum",
    "global load sectors": f"{L1}t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global store requests": f"{L1}t_requests_pipe_lsu_mem_global_op_st.sum",
    "global store sectors": f"{L1}t_sectors_pipe_lsu_mem_global_op_st.sum",
    "shared loads": "smsp__inst_executed_op_shared_ld.sum",
    "shared load conflicts": f"{L1}data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared stores": "smsp__inst_executed_op_shared_st.sum",
    "shared store conflicts": f"{L1}data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "copies to shared memory": "smsp__inst_executed_op_ldgsts.sum",
}


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--launch", action="store_true", help="only launch everything once: what ncu watches")
    parser.add_argument("--ours", action="store_true", help="count ours again, beside ncu's counts that are kept")
    args = parser.parse_args()
    if args.launch:
        device.use("cuda")
        for name, precision in RUNS:
            device.use_precision(precision)
            LAUNCHES[name].prepare(LAUNCHES[name].sizes)()
            device.synchronize()
        return
    kept = json.loads(KEPT.read_text("utf-8")) if args.ours else {"machine": "", "kernels": counts_of_ncu()}
    launchers = {row["launcher"] for row in kept["kernels"]} if args.ours else {name_of(*run) for run in RUNS}
    use_microscope()
    watched = []
    for launcher, precision in RUNS:
        if (name := name_of(launcher, precision)) in launchers:
            device.use_precision(precision)
            watched += [(name, one) for one in watch(LAUNCHES[launcher], LAUNCHES[launcher].sizes)]
    if [one.kernel for _, one in watched] != [row["kernel"] for row in kept["kernels"]]:
        raise UserError("ncu saw other kernels than the microscope")
    for row, (name, one) in zip(kept["kernels"], watched, strict=True):
        row |= {"launcher": name, "ours": {key: count for key, count in counts_of(one).items() if key in row["ncu"]}}
    if not args.ours:
        device.use("cuda")
        kept["machine"] = device.name
    with replacing(KEPT) as file:
        file.write(json.dumps(kept).replace("}}, {", "}},\n{").encode() + b"\n")
    counts = [(row, counter) for row in kept["kernels"] for counter in row["ncu"]]
    differ = [(row, counter) for row, counter in counts if row["ours"][counter] != row["ncu"][counter]]
    for row, counter in differ:
        numbers = f"{row['ours'][counter]:>9,} {row['ncu'][counter]:>9,}"
        print(f"{row['launcher']:36} {row['kernel']:44} {counter:24} {numbers}")
    print(f"{len(counts) - len(differ)} of {len(counts)} counts agree exactly; {KEPT.name} has all")


def name_of(launcher: str, precision: str) -> str:
    """A launcher as it is kept: by its name alone but in bf16."""
    return f"{launcher} bf16" if precision == "bf16" else launcher


def counts_of_ncu() -> list[dict]:
    """The kernels of kernels/ in the order of their launches, with their counters."""
    if not shutil.which("ncu"):
        raise UserError("ncu is not on the PATH; it comes with NVIDIA's CUDA toolkit or Nsight Compute")
    done = subprocess.run(
        ["ncu", "--clock-control", "none", "--csv", "--print-units", "base",
         "--kernel-name", "regex:_kernel(_[0-9]+)?$", "--metrics", ",".join(COUNTERS.values()),
         sys.executable, __file__, "--launch"],
        capture_output=True, encoding="utf-8", errors="replace",
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        raise UserError(f"ncu failed: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    kernels: dict[str, dict] = {}
    counters = {metric: counter for counter, metric in COUNTERS.items()}
    for row in csv.DictReader(lines):
        name, value = row["Kernel Name"].partition("(")[0], row["Metric Value"].replace(",", "")
        if name in FILES:  # and not a cuBLAS kernel
            kernel = kernels.setdefault(row["ID"], {"launcher": "", "kernel": name, "ours": {}, "ncu": {}})
            kernel["ncu"][counters[row["Metric Name"]]] = int(float(value))
    return list(kernels.values())


def counts_of(watched: Watched) -> dict[str, int]:
    """The same counters of a launch under the microscope."""
    steps = watched.steps[watched.steps["array"] >= 0]
    shared = np.array([array.shared for array in watched.arrays])[steps["array"]]
    # cp.async (copy_four and copy_one of async_copy.cuh) stores to shared memory here, and ldmatrix (load_matrices of
    # mma.cuh) loads from it, but for ncu they are no stores and no loads.
    copies, matrices = (
        shared & np.isin(steps["pc"], [pc for pc, place in watched.places.items() if name in place.innermost()])
        for name in ("copy_", "load_matrices")
    )
    counts = {"copies to shared memory": int(copies.sum())}
    steps, shared = steps[~copies & ~matrices], shared[~copies & ~matrices]
    for name, kind in ("load", LOAD), ("store", STORE):
        mine = steps[~shared & (steps["kind"] == kind)]
        counts[f"global {name} requests"] = len(mine)
        counts[f"global {name} sectors"] = int(distinct(sectors_of(mine)).sum())
        mine = steps[shared & (steps["kind"] == kind)]
        counts[f"shared {name}s"] = len(mine)
        conflicts = 0
        for size in np.unique(mine["size"]):
            passes, least = passes_of(mine[mine["size"] == size], int(size))
            conflicts += int((passes - least).sum())
        counts[f"shared {name} conflicts"] = conflicts
    return counts


if __name__ == "__main__":
    run_program(main)
