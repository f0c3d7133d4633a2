"""What the microscope tells of a launch that it has watched: the table of a kernel, its races, and the page."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dev.microscope.watch import (
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
)
from llmc.files.files import replacing

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MOST_STEPS = 20_000  # of a launch on the page


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
    for pcs, kind, array, size in groups_of(watched, steps, "kind", "array", "size"):
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


def groups_of(watched: Watched, steps: np.ndarray, *fields: str) -> list[tuple]:
    """For each line and each combination of these fields in the steps: (its addresses, *fields). In the order of the
    source."""
    groups: dict[tuple, list[int]] = {}
    for pc, *values in np.unique(steps[["pc", *fields]]).tolist():
        place = watched.places[pc]
        groups.setdefault((place.file != watched.file.name, place.file, place.line, *values), []).append(pc)
    return [(pcs, *values) for (_, _, _, *values), pcs in sorted(groups.items())]


def table(watched: Watched) -> str:
    """A kernel's figures as text."""
    threads = int(np.prod(watched.block))
    warps = -(-threads // LANES)
    out = [f"{watched.kernel}: grid {watched.grid}, block {watched.block}, {warps} warp{'s' * (warps > 1)} per block"]
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
    for pcs, what in groups_of(watched, steps, "what"):
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
    """Writes page.html with the launches of `page_of` in it, one file that needs no network."""
    template = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    data = json.dumps({"title": title, "kernels": kernels}, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no "</script>" or "<!--" of a source may end or hide the script that holds it
    with replacing(path) as file:
        file.write(template.replace("/*DATA*/null", data, 1).encode())


def page_of(watched: Watched) -> dict:
    """A launch as what page.html draws: sources, figures by line, and the steps of each warp, in time.

    A step ends with the bytes where its lanes' accesses begin: [first, stride] where that is first + i * stride for
    lane i, else one for each lane that takes part. There are MOST_STEPS at most, of the first blocks.
    """
    lines, waits = list(lines_of(watched)), list(waits_of(watched))
    names = {place.file for place in watched.places.values()} - {watched.file.name}
    folders = watched.file.parent, ROOT / "kernels", ROOT / "doc" / "ladder"  # the latter for exercises
    files = [watched.file, *(next(f / name for f in folders if (f / name).exists()) for name in sorted(names))]
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
