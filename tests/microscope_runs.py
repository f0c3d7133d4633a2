"""What tests/test_microscope.py looks at in one precision, as JSON on stdout. A process of its own, since the CPU
device's runtime is loaded once in a process, and the microscope's is another one. The arguments are the precision and a
folder for kernels that lack a barrier.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import device  # noqa: E402
from dev.microscope.compare_ncu import counts_of, name_of  # noqa: E402
from dev.microscope.launches import LAUNCHES, launches_in  # noqa: E402
from dev.microscope.report import lines_of, race_lines  # noqa: E402
from dev.microscope.watch import FILES, KINDS, Watched, use_microscope, watch, watch_kernel  # noqa: E402
from dev.traffic import FLOPS, MOVED, SMALL, kind_of  # noqa: E402
from device import cpp  # noqa: E402

import numpy as np  # noqa: E402

# A barrier that is left out: the file, which of its __syncthreads, and a launcher that needs it.
MUTANTS = [
    ("common.cuh", 0, "fused_classifier"), ("common.cuh", 1, "parallel_residual_forward"),
    ("tile.cuh", 0, "swiglu_backward"), ("encoder.cu", 1, "encoder_backward"), ("gelu.cu", 1, "gelu_backward"),
    ("layernorm.cu", 0, "layernorm_backward"), ("layernorm.cu", 1, "layernorm_backward"),
    ("matmul.cu", 0, "transpose"), ("reduce.cu", 0, "add_partials"),
    ("rmsnorm.cu", 1, "rmsnorm_backward"), ("cached_attention.cu", 2, "cached_attention_forward"),
    ("sampling.cu", 0, "sample:top_p"), ("fp8/quantize.cuh", 0, "quantize"),
    ("fp8/quantize.cuh", 1, "quantize"), ("fp8/swiglu.cu", 0, "swiglu_backward:fp8"),
    ("fp8/swiglu.cu", 1, "swiglu_backward:fp8"), ("fp8/gelu.cu", 0, "gelu_backward:fp8"),
    ("fp8/gelu.cu", 1, "gelu_backward:fp8"), ("qk_norm.cuh", 0, "qk_norm_backward"),
    ("fp8/qk_norm.cu", 0, "qk_norm_backward:fp8"), ("fp8/qk_norm.cu", 1, "qk_norm_backward:fp8"),
]  # fmt: skip

KERNEL = re.compile(r'^extern "C" __global__ [^{]*?(\w+)\([^()]*\) \{.*?^\}$', re.DOTALL | re.MULTILINE)

# Kernels of tests/cu: their file, name, block and grid; the first argument is written to.
BROKEN = [
    ("missing_barriers.cu", "reverse_kernel", (128,), (1,)),
    ("missing_barriers.cu", "reads_too_early_kernel", (128,), (1,)),
    ("missing_barriers.cu", "overwrites_too_early_kernel", (128,), (1,)),
    ("failures.cu", "with_barrier_kernel", (64,), (1,)),
    ("failures.cu", "missing_barrier_kernel", (64,), (1,)),
    ("failures.cu", "blocks_in_order_kernel", (32,), (4,)),
    ("divergence.cu", "return_in_loop_kernel", (32,), (1,)),
    ("divergence.cu", "return_in_branch_kernel", (32,), (1,)),
    ("divergence.cu", "loop_in_loop_kernel", (32,), (1,)),
    ("divergence.cu", "atomic_then_load_kernel", (32,), (4,)),
    ("divergence.cu", "atomic_then_store_kernel", (32,), (1,)),
    ("divergence.cu", "shared_of_the_file_kernel", (64,), (1,)),
    ("divergence.cu", "bytes_kernel", (32,), (1,)),
    ("divergence.cu", "outside_kernel", (32,), (1,)),
]  # fmt: skip


def main(precision: str, folder: str) -> None:
    use_microscope(precision)
    found = {"races": {}, "mutants": [], "broken": {}, "counts": [], "unplaced": [], "lines": {}, "outside": {}}
    found["bytes"] = []
    launches = launches_in(precision)
    needed = {path for path in FILES.values() if precision == "bf16" or not device.architecture_of(path)}
    device.current.device.compile_all(sorted(needed))  # on all cores
    races, launched = found["races"], {}
    for name, launch in launches.items():
        for one in watch(launch, launch.sizes):
            launched.setdefault(name, set()).add(one.kernel)
            races.setdefault(one.kernel, []).extend(race_lines(one))
            found["counts"].append([name_of(name, precision), one.kernel, counts_of(one)])
            found["unplaced"] += [one.kernel for pc in np.unique(one.steps["pc"]) if not one.places[int(pc)].frames]
            found["bytes"].append([f"{one.kernel} {precision}", one.least_bytes, *bytes_of_arrays(one)])
    device.current.device.multiprocessors = 1  # so each block takes several turns, in the same shared memory
    # In bf16 flash attention has other barriers than in fp32; the other kernels have the same.
    for name, launch in launches.items():
        if launch.hard and (precision == (launch.precision or "fp32") or name.startswith("flash")):
            for one in watch(launch, launch.hard):
                launched[name].add(one.kernel)
                races[one.kernel].extend(race_lines(one))
    if precision == "fp32":
        for file, kernel, block, grid in BROKEN:
            one = watch_broken(ROOT / "tests" / "cu" / file, kernel, block, grid)
            found["broken"][kernel] = race_lines(one)
            lines = [[one.arrays[x.array].name, KINDS[x.kind], x.place.line, x.warps, x.lanes] for x in lines_of(one)]
            found["lines"][kernel], found["outside"][kernel] = lines, sum(one.outside.values())
    mutants = [mutant for mutant in MUTANTS if precision == (LAUNCHES[mutant[2]].precision or "fp32")]
    copies = [mutated(Path(folder) / f"{file}_{which}", file, which, launched[name])
              for file, which, name in mutants]
    device.current.device.compile_all(copy for files in copies for copy in files.values())
    for (file, which, name), files in zip(mutants, copies, strict=True):
        with taken_from(files):
            watched = watch(LAUNCHES[name], LAUNCHES[name].hard)
        lines = [line for one in watched for line in race_lines(one)]
        found["mutants"].append({"file": file, "which": which, "launcher": name, "races": lines})
    json.dump(found, sys.stdout)


def bytes_of_arrays(one: Watched) -> tuple[int, int | None]:
    """The bytes of the arrays that a launch touched, twice where it both read and wrote one; and the same without the
    small ones, if this is what the profile must count."""
    times = [len(np.unique(one.steps["kind"][one.steps["array"] == i])) for i in range(len(one.arrays))]
    touched = [(array.name, times[i] * array.bytes) for i, array in enumerate(one.arrays) if not array.shared]
    large = sum(count for name, count in touched if name not in SMALL)
    by_rule = kind_of(one.kernel) not in MOVED.keys() | FLOPS.keys() and one.least_bytes
    return sum(count for _, count in touched), large if by_rule else None


def watch_broken(file: Path, name: str, block: tuple, grid: tuple):
    """A kernel of tests/cu under the microscope, on zeros of any size that it may want."""
    kernel = cpp.compile_source(file).kernel(name)
    types = {"float*": np.float32, "int*": np.int32, "unsigned char*": np.uint8}
    arguments = {}
    for parameter in kernel.parameters:
        kind = parameter.type.removeprefix("const ")
        arguments[parameter.name] = np.zeros(640, types[kind]) if kind in types else {"R": 5, "N": 128}[parameter.name]
    return watch_kernel(name, arguments, lambda: kernel(grid, block, tuple(arguments.values())), file)


def mutated(folder: Path, file: str, which: int, kernels: set[str]) -> dict[Path, Path]:
    """Copies in a folder of the files of these kernels that have or include a file's barrier number `which`, by the
    original. The barrier and all other kernels are left out."""
    root = ROOT / "kernels"
    of_kernels = {FILES[kernel] for kernel in kernels}
    files = {path for path in of_kernels if path == root / file} or of_kernels
    copies = {path: folder / path.relative_to(root) for path in [*files, *root.rglob("*.cuh")]}
    for path, copy in copies.items():
        parts = path.read_text().split("__syncthreads();")
        if path == root / file:
            parts[which : which + 2] = [parts[which] + ";" + parts[which + 1]]
        text = "__syncthreads();".join(parts)
        text = KERNEL.sub(lambda found: found[0] if found[1] in kernels else "\n" * found[0].count("\n"), text)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    return {path: copies[path] for path in files}


@contextlib.contextmanager
def taken_from(files: dict[Path, Path]) -> Iterator[None]:
    """Within it the launchers take these files in place of their own."""
    sources, own = device.sources.imported, dict(FILES)
    paths = [source.path for source in sources]
    for source in sources:
        source.path = files.get(source.path, source.path)
    FILES.update({name: files.get(path, path) for name, path in own.items()})
    yield
    for source, path in zip(sources, paths, strict=True):
        source.path = path
    FILES.update(own)


if __name__ == "__main__":
    main(*sys.argv[1:])
