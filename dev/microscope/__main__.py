"""Shows what the threads of a kernel touch, on any machine with g++ and without a GPU.

    python dev/microscope layernorm_backward                         # a launcher of kernels/, at a small size
    python dev/microscope layernorm_backward --shape B=2,T=8,C=768
    python dev/microscope layernorm_backward --html layernorm.html   # to look at: a page that needs no network
    python dev/microscope layernorm_backward --precision bf16        # built for bf16, as that precision has it
    python dev/microscope all --races                                # two threads, one address, no barrier?

The CPU device runs the launcher with warps of 32 lanes and kernels in which the compiler has instrumented every access
(device/cpp/microscope.h). For each kernel and each line that touches memory the table has

    warps      how often a warp executed the access
    lanes      of 32, how many took part, on average: fewer where the warp diverges or the array ends
    bytes      what the lanes asked for
    sectors    of device memory: the pieces of 32 bytes that these accesses move, each once for one access of a warp
    used       bytes that the access needs / bytes that it moves
    conflicts  of shared memory: how many passes the access takes for each that it needs, at worst and on average. Each
               of the 32 banks, 4 bytes wide, gives one word per pass; half a warp at a time is served where a lane
               wants 8 bytes, a quarter where it wants 16

and beside it, which barriers and shuffles the warps took. The totals compare what all accesses move with the sectors
that they touch, each once, and with the bytes that dev/profile_step.py counts: a kernel that reads something twice
shows there, though on a GPU a cache may serve the second time.

Kernels are launched as on an H200, among whose 132 multiprocessors some launchers share out the work, and arrays are
taken to begin at a multiple of 128 bytes. Of 693 counts that NVIDIA's profiler, ncu, made there of launches in TF32,
656 are the same (tests/data/microscope.json). Others differ where the compilers do: nvcc joins neighbouring accesses of
four bytes into one of sixteen, keeps in a register what g++ loads again, or the other way round; or in how ncu counts:
instructions whose lanes are all switched off are executed for it, a copy to shared memory (cp.async), which is a load
and a store here, has a counter of its own, and conflicts are also those with other traffic. An access whose lanes
touch two arrays is counted once for each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dev.microscope.launches import LAUNCHES, launches_in, sizes_of
from dev.microscope.report import page_of, race_lines, table, write_page
from dev.microscope.watch import use_microscope, watch
from device.errors import UserError
from llmc.run.arguments import Parser
from llmc.run.program import run_program


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("launcher", help="a launcher of kernels/, such as layernorm_backward, or all")
    parser.add_argument("--shape", default="", metavar="B=2,T=8,...", help="its sizes (small ones)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of the kernels (%(default)s)")
    parser.add_argument("--races", action="store_true", help="only look for races; exit status 1 if there are any")
    parser.add_argument("--html", metavar="FILE", help="write a page in which to step through the accesses")
    args = parser.parse_args()
    if args.launcher == "all" and (args.shape or args.html is not None):
        raise UserError("all: --shape and --html go with a single launcher")
    if args.launcher not in ("all", *LAUNCHES):
        raise UserError(f"{args.launcher}: not a launcher; there are {', '.join(LAUNCHES)}")
    launches = launches_in(args.precision) if args.launcher == "all" else {args.launcher: LAUNCHES[args.launcher]}
    use_microscope(args.precision)
    found = 0
    for name, launch in launches.items():
        sizes = sizes_of(args.shape, launch)
        watched = watch(launch, sizes)
        title = f"{name} {','.join(f'{key}={size}' for key, size in sizes.items())}"
        title += f" {args.precision}" * (args.precision != "fp32")
        if args.races:
            races = [line for one in watched for line in race_lines(one)]
            print(f"{title}: {len(races) or 'no'} race{'' if len(races) == 1 else 's'}", *races, sep="\n  ", flush=True)
            found += len(races)
        else:
            print(title, *(table(one) for one in watched), sep="\n\n")
        if args.html is not None:
            write_page(Path(args.html), title, [page_of(one) for one in watched])
            print(f"\nwritten: {args.html}")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)
