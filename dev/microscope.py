"""Shows what the threads of a kernel touch, on any machine with g++ and without a GPU.

    python dev/microscope.py layernorm_backward                         # a launcher of kernels/, at a small size
    python dev/microscope.py layernorm_backward --shape B=2,T=8,C=768
    python dev/microscope.py layernorm_backward --html layernorm.html   # to look at: a page that needs no network
    python dev/microscope.py layernorm_backward --precision bf16        # built for bf16, as that precision has it
    python dev/microscope.py all --races                                # two threads, one address, no barrier?

The CPU device runs the launcher with warps of 32 lanes and kernels in which the compiler has instrumented every access
(device/cpp/microscope.h). For each kernel and each line that touches memory the table has

    warps      how often a warp executed the access
    lanes      of 32, how many took part, on average: fewer where the warp diverges or the array ends
    bytes      what the lanes asked for
    sectors    of device memory: the pieces of 32 bytes that these accesses move, each once for one access of a warp
    used       bytes that the access needs / bytes that it moves
    conflicts  of shared memory: how many passes the access takes for each that it needs, at worst and on average. Each
               of the 32 banks, 4 bytes wide, gives one word a pass; half a warp at a time is served where a lane wants
               8 bytes, a quarter where it wants 16

and beside it, which barriers and shuffles the warps took. The totals compare what all accesses move with the sectors
that they touch, each once, and with the bytes that dev/profile_step.py counts: a kernel that reads something twice
shows there, though on a GPU a cache may serve the second time.

Kernels are launched as on an H200, among whose 132 multiprocessors some launchers share out the work, and arrays are
taken to begin at a multiple of 128 bytes. Of 693 counts that NVIDIA's profiler, ncu, made there of launches in TF32,
665 are the same (tests/data/microscope.json). Others differ where the compilers do: nvcc joins neighbouring accesses of
four bytes into one of sixteen, keeps in a register what g++ loads again, or the other way round; or in how ncu counts:
instructions whose lanes are all switched off are executed for it, a copy to shared memory (cp.async), which is a load
and a store here, has a counter of its own, and conflicts are also those with other traffic. An access whose lanes
touch two arrays is counted once for each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import json
from collections.abc import Iterator
from dataclasses import dataclass

from dev.launches import launch_named, launches_in, sizes_of
from dev.watch import (
    ATOMIC,
    KINDS,
    LANES,
    LOAD,
    SECTOR,
    STORE,
    Place,
    Watched,
    distinct,
    lanes_of,
    passes_of,
    sectors_of,
    use_microscope,
    watch,
)
from device.errors import UserError
from llmc.arguments import Parser
from llmc.files import replacing
from llmc.program import run_program

import numpy as np

MOST_STEPS = 20_000  # of a launch on the page


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
    if args.html is not None and not Path(args.html).absolute().parent.is_dir():
        raise UserError(f"--html {args.html}: there is no folder {Path(args.html).parent}")
    one = {} if args.launcher == "all" else {args.launcher: launch_named(args.launcher)}
    launches = one or launches_in(args.precision)
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


@dataclass
class Line:
    """The accesses of one line to one array."""

    place: Place
    kind: int
    array: int
    size: int
    warps: int
    lanes: float
    bytes: int
    sectors: int = 0
    used: int = 0
    passes: int = 0
    least_passes: int = 0
    worst: float = 0.0


def lines_of(watched: Watched) -> Iterator[Line]:
    """The accesses to memory, by line, kind, array and size, in the order of the source."""
    steps = watched.steps[watched.steps["array"] >= 0]
    by_pc = {pc: (place.file != watched.file.name, place.file, place.line) for pc, place in watched.places.items()}
    groups: dict[tuple, list[int]] = {}
    keys = np.unique(steps[["pc", "kind", "array", "size"]])
    for key in keys:
        pc, kind, array, size = (int(x) for x in key)
        groups.setdefault((*by_pc[pc], kind, array, size), []).append(pc)
    for (*_, kind, array, size), pcs in sorted(groups.items()):
        of_line = (steps["kind"] == kind) & (steps["array"] == array) & (steps["size"] == size)
        mine = steps[of_line & np.isin(steps["pc"], pcs)]
        active = lanes_of(mine)
        line = Line(
            watched.places[pcs[0]], kind, array, size, len(mine), active.sum() / len(mine), int(active.sum()) * size
        )
        if watched.arrays[array].shared:
            passes, least = passes_of(mine, size)
            line.passes, line.least_passes, line.worst = int(passes.sum()), int(least.sum()), (passes / least).max()
        else:
            line.sectors = int(distinct(sectors_of(mine)).sum())
            line.used = int(distinct(np.where(active, mine["offset"], -1)).sum()) * size
        yield line


def table(watched: Watched) -> str:
    """A kernel's figures as text."""
    threads = int(np.prod(watched.block))
    warps = -(-threads // LANES)
    out = [f"{watched.kernel}: grid {watched.grid}, block {watched.block}, {warps} warp{'s' * (warps > 1)} a block"]
    rows = [("line", "access", "array", "warps", "lanes", "bytes", "sectors", "used", "conflicts")]
    for line in lines_of(watched):
        array = watched.arrays[line.array]
        if array.shared:
            conflicts = f"{line.worst:.1f} / {line.passes / line.least_passes:.2f}"
            figures = "", "", conflicts if line.kind != ATOMIC else ""
        else:
            figures = f"{line.sectors:,}", f"{100 * line.used / (SECTOR * line.sectors):.3g}%", ""
        rows.append((
            str(line.place), f"{KINDS[line.kind]} {line.size}", array.name, f"{line.warps:,}", f"{line.lanes:.1f}",
            f"{line.bytes:,}", *figures,
        ))  # fmt: skip
    out += columns(rows, left=3)
    rows = [("line", "waiting", "warps", "lanes")]
    for place, what, count, lanes in waits_of(watched):
        rows.append((str(place), what, f"{count:,}", f"{lanes:.1f}"))
    if len(rows) > 1:
        out += ["", *columns(rows, left=2)]
    strays = [f"{count} accesses outside all arrays: {place}" for place, count in sorted(watched.outside.items())]
    return "\n".join([*out, "", *totals(watched), *strays])


def waits_of(watched: Watched) -> Iterator[tuple[Place, str, int, float]]:
    """Barriers and what lanes exchange, by line: how often a warp came there, and with how many lanes."""
    steps = watched.steps[watched.steps["array"] < 0]
    groups: dict[tuple, list[int]] = {}
    for pc, what in np.unique(steps[["pc", "what"]]):
        place = watched.places[int(pc)]
        groups.setdefault((place.file != watched.file.name, place.file, place.line, int(what)), []).append(int(pc))
    for (*_, what), pcs in sorted(groups.items()):
        mine = steps[(steps["what"] == what) & np.isin(steps["pc"], pcs)]
        yield watched.places[pcs[0]], watched.names[what], len(mine), lanes_of(mine).sum() / len(mine)


def totals(watched: Watched) -> list[str]:
    """What the kernel moves between device memory and the chip, by array."""
    rows = [("array", "read", "of different", "written", "of different")]
    moved = touched = 0
    for i, array in enumerate(watched.arrays):
        mine = watched.steps[watched.steps["array"] == i]
        if array.shared or not mine.size:
            continue
        figures = []
        for kinds in (LOAD, ATOMIC), (STORE, ATOMIC):
            sectors = sectors_of(mine[np.isin(mine["kind"], kinds)])
            count, different = int(distinct(sectors).sum()), len(np.unique(sectors[sectors >= 0]))
            figures += [f"{SECTOR * count:,}", f"{SECTOR * different:,}"]
            moved, touched = moved + SECTOR * count, touched + SECTOR * different
        rows.append((array.name, *figures))
    share = f"; the profile counts {int(watched.least_bytes):,}" if watched.least_bytes else ""
    return [*columns(rows, left=1), f"bytes moved: {moved:,}; each sector once: {touched:,}{share}"]


def columns(rows: list[tuple], left: int) -> list[str]:
    """Rows of text as lines, the first `left` columns aligned left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = "".join(f"  {{:{'<' if i < left else '>'}{width}}}" for i, width in enumerate(widths))
    return [aligned.format(*row).rstrip() for row in rows]


def race_lines(watched: Watched) -> list[str]:
    """Each pair of lines that race, in words."""
    lines = []
    for race in watched.races:
        array = watched.arrays[race["array"]]
        item = int(race["offset"]) // np.dtype(array.dtype).itemsize
        one, other = (
            f"{watched.places[int(access['pc'])]} ({KINDS[access['kind']]} by {thread_of(watched, access)})"
            for access in (race["one"], race["other"])
        )
        lines.append(f"{watched.kernel}: {array.name}[{item}]: {one} and {other}, {race['count']} times")
    return lines


def thread_of(watched: Watched, access: np.void) -> str:
    def index(number: int, size: tuple[int, ...]) -> str:
        return f"({number % size[0]}, {number // size[0] % size[1]}, {number // size[0] // size[1]})"

    return f"thread {index(access['thread'], watched.block)} of block {index(access['block'], watched.grid)}"


# ---- for the page


def write_page(path: Path, title: str, kernels: list[dict]) -> None:
    """Writes dev/microscope.html with the launches of `page_of` in it, one file that needs no network."""
    template = (Path(__file__).parent / "microscope.html").read_text(encoding="utf-8")
    data = json.dumps({"title": title, "kernels": kernels}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no "</script>" or "<!--" of a source may end or hide the script that holds it
    with replacing(path) as file:
        file.write(template.replace("/*DATA*/null", data, 1).encode())


def page_of(watched: Watched) -> dict:
    """A launch as what dev/microscope.html draws: sources, figures by line, and the steps of each warp, in time.

    A step ends with the bytes where its lanes' accesses begin: [first, stride] where that is first + i * stride for
    lane i, else one for each lane that takes part. There are MOST_STEPS at most, of the first blocks.
    """
    lines, waits = list(lines_of(watched)), list(waits_of(watched))
    files = [watched.file, *sorted({watched.file.parent / p.file for p in watched.places.values()} - {watched.file})]
    number = {file.name: i for i, file in enumerate(files)}
    of_access = {(x.place.file, x.place.line, x.kind, x.array, x.size): i for i, x in enumerate(lines)}
    of_wait = {(place.file, place.line, what): i for i, (place, what, _, _) in enumerate(waits)}
    used = sorted({line.array for line in lines})
    steps = watched.steps
    shown = max(1, sum(np.searchsorted(steps["block"], np.unique(steps["block"]), "right") <= MOST_STEPS))
    steps = steps[steps["block"] < shown]
    order = np.lexsort((np.arange(len(steps)), steps["warp"], steps["epoch"], steps["block"]))
    rows = []
    for step in steps[order]:
        place = watched.places[int(step["pc"])]
        if step["array"] >= 0:
            kind = of_access[place.file, place.line, int(step["kind"]), int(step["array"]), int(step["size"])]
        else:
            kind = -1 - of_wait[place.file, place.line, watched.names[int(step["what"])]]
        lanes = np.flatnonzero(lanes_of(step[None])[0])
        rows.append([kind, *(int(step[name]) for name in ("block", "warp", "epoch", "mask")), at_of(step, lanes)])
    return {
        "kernel": watched.kernel, "grid": watched.grid, "block": watched.block,
        "sources": [{"name": file.name, "text": file.read_text(encoding="utf-8")} for file in files],
        "arrays": [
            {"name": a.name, "shared": a.shared, "bytes": a.bytes, "shape": a.shape}
            for a in (watched.arrays[i] for i in used)
        ],
        "lines": [
            {
                "source": number[line.place.file], "line": line.place.line, "kind": KINDS[line.kind], "size": line.size,
                "array": used.index(line.array), "warps": line.warps, "lanes": round(line.lanes, 1),
                "bytes": line.bytes,
                "through": [f"{function} {file}:{n}" for function, file, n in line.place.frames],
            } | (
                {"worst": round(line.worst, 2), "mean": round(line.passes / line.least_passes, 4)}
                if watched.arrays[line.array].shared else
                {"sectors": line.sectors, "used": round(line.used / (SECTOR * line.sectors), 4)}
            )
            for line in lines
        ],
        "waits": [
            {"source": number[place.file], "line": place.line, "what": what, "warps": warps, "lanes": round(lanes, 1)}
            for place, what, warps, lanes in waits
        ],
        "totals": totals(watched),
        "blocks": int(np.prod(watched.grid)), "blocks_shown": int(shown), "steps": rows,
    }  # fmt: skip


def at_of(step: np.void, lanes: np.ndarray) -> list[int]:
    """The last entry of a step of `page_of`. Two numbers are always first and stride."""
    if step["array"] < 0:
        return []
    offsets = step["offset"][lanes].tolist()
    stride = (offsets[-1] - offsets[0]) // max(1, int(lanes[-1] - lanes[0]))
    first = offsets[0] - int(lanes[0]) * stride
    affine = all(offset == first + int(lane) * stride for lane, offset in zip(lanes, offsets, strict=True))
    return [first, stride] if affine and len(lanes) != 2 else offsets


if __name__ == "__main__":
    run_program(main)
