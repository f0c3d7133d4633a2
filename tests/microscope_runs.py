"""What tests/test_microscope.py looks at in one precision, as JSON on stdout. A process of its own, since the CPU
device's runtime is loaded once in a process, and the microscope's is another one.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import device  # noqa: E402
from dev.microscope.compare_ncu import counts_of, name_of  # noqa: E402
from dev.microscope.launches import launches_in  # noqa: E402
from dev.microscope.report import lines_of, race_lines  # noqa: E402
from dev.microscope.watch import FILES, KINDS, Watched, use_microscope, watch, watch_kernel  # noqa: E402
from dev.traffic import FLOPS, MOVED, SMALL, kind_of  # noqa: E402
from device import cpp  # noqa: E402

import numpy as np  # noqa: E402

# Kernels of tests/cu, by their file, the threads of a block and the blocks.
BROKEN = {
    ("missing_barriers.cu", 128, 1): "reverse reads_too_early overwrites_too_early",
    ("failures.cu", 64, 1): "with_barrier missing_barrier", ("failures.cu", 32, 4): "blocks_in_order",
    ("divergence.cu", 32, 1): "return_in_loop return_in_branch loop_in_loop atomic_then_store bytes outside",
    ("divergence.cu", 32, 4): "atomic_then_load", ("divergence.cu", 64, 1): "shared_of_the_file",
}  # fmt: skip


def main(precision: str) -> None:
    use_microscope(precision)
    found = {"races": {}, "broken": {}, "counts": [], "unplaced": [], "lines": {}, "outside": {}, "bytes": []}
    found["flash"] = []  # each line of flash attention that accesses shared memory: function, passes of those needed
    needed = {path for path in FILES.values() if precision == "bf16" or not device.architecture_of(path)}
    device.current.device.compile_all(sorted(needed))  # on all cores
    races, launches = found["races"], launches_in(precision)
    for name, launch in launches.items():
        for one in watch(launch, launch.sizes):
            races.setdefault(one.kernel, []).extend(race_lines(one))
            found["counts"].append([name_of(name, precision), one.kernel, counts_of(one)])
            found["unplaced"] += [one.kernel for pc in np.unique(one.steps["pc"]) if not one.places[int(pc)].frames]
            if name.startswith("flash_attention"):
                found["flash"] += [[x.place.innermost(), x.worst] for x in lines_of(one) if one.arrays[x.array].shared]
            found["bytes"].append([f"{one.kernel} {precision}", one.least_bytes, *bytes_of_arrays(one)])
    device.current.device.multiprocessors = 1  # so each block takes several turns, in the same shared memory
    # In bf16 flash attention has other barriers than in fp32; the other kernels have the same.
    for name, launch in launches.items():
        if launch.hard and (precision == (launch.precision or "fp32") or name.startswith("flash")):
            for one in watch(launch, launch.hard):
                races[one.kernel].extend(race_lines(one))
    for (file, threads, blocks), kernels in BROKEN.items() if precision == "fp32" else ():
        for kernel in kernels.split():
            one = watch_broken(ROOT / "tests" / "cu" / file, f"{kernel}_kernel", (threads,), (blocks,))
            found["broken"][kernel], found["outside"][kernel] = race_lines(one), sum(one.outside.values())
            found["lines"][kernel] = [[KINDS[x.kind], x.place.line, x.warps, x.lanes] for x in lines_of(one)]
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


if __name__ == "__main__":
    main(*sys.argv[1:])
