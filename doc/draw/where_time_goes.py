"""What each part of flash attention's forward pass costs, measured by leaving it out, and what its units could do at
best, from doc/left_out.json."""

import json
from pathlib import Path

from doc.draw.figure import Figure

KEPT = json.loads((Path(__file__).resolve().parents[1] / "left_out.json").read_text("utf-8"))
WIDTH, LEFT, BAR, GAP = 900, 310, 205, 88  # of the picture, of the names, of the longest bar, and of a number
ROW, HIGH = 24, 16
B, T, NH = 4, 1024, 12
AT = f"B {B}, T {T}"
TITLES = {"tf32": "TF32", "bf16": "bf16"}  # of the precisions, in their order


def least_times(precision: str) -> dict[str, float]:
    """The microseconds that each unit would take if it never waited. A round is 32 queries and 32 keys of a warp, or 64
    keys in bf16."""
    kept, width = KEPT[precision], 2 if precision == "bf16" else 1
    counted, rounds = kept["instructions"]["nothing"], B * NH * (T // 32) * (T // 32 + 1) / 2 / width
    flops = rounds * counted["products"] * 2 * 16 * 8 * 8 * width
    clocks = {
        "issue of instructions": sum(counted.values()) / 4,  # by four schedulers
        "shared memory": 128 + 32,  # passes: the tile is read whole, and a quarter of the next one is written
        "exponentials": 2 * counted["exponentials"],  # instructions for 32 lanes, 16 of them in a clock
    }
    of_clocks = rounds / KEPT["multiprocessors"] / kept["MHz"][AT]
    return {"tensor cores": flops / kept["products"] / 1e6, **{unit: of_clocks * n for unit, n in clocks.items()}}


def percent(share: float, sign: str = "") -> str:
    """With the sign "+" gains have one, too. What rounds to 0 has none."""
    text = f"{share:{sign}.0%}"
    return "0%" if text in ("-0%", "+0%") else text


def draw() -> str:
    times = {precision: KEPT[precision]["times"][AT] for precision in TITLES}
    least = {precision: least_times(precision) for precision in TITLES}
    others, bounds = [part for part in times["tf32"] if part != "nothing"], least["tf32"]
    figure = Figure(WIDTH, 128 + ROW * (1 + len(others) + len(bounds)), "Where the time of flash attention goes")
    figure.text(16, 26, f"Flash attention forward, {AT}, 12 heads of 64: microseconds", 16, bold=True)
    most = max(us for each in times.values() for us in each.values())

    def row(y: float, name: str, colour: str, us_of: dict[str, float]) -> None:
        """A name, and a bar for each precision; pale, the rest of the whole time."""
        figure.text(LEFT - 10, y + 13, name, 13, "end")
        for precision, us in us_of.items():
            x, whole = LEFT + (BAR + GAP) * list(TITLES).index(precision), times[precision]["nothing"]
            if us < whole:
                figure.rect(x, y, BAR * whole / most, HIGH, "f")
            figure.rect(x, y, BAR * us / most, HIGH, colour)
            share = {"a": percent(us / whole - 1, "+"), "c": percent(us / whole)}.get(colour)
            words = f"{us:.1f} ({share})" if share else f"{us:.1f}"
            figure.text(x + BAR * max(us, whole) / most + 6, y + 13, words, 13)

    y = 62
    for i, title in enumerate(TITLES.values()):
        figure.text(LEFT + (BAR + GAP) * i, y - 10, title, 14, bold=True)
    row(y, "the kernel as it is", "b", {precision: each["nothing"] for precision, each in times.items()})
    y += ROW + 30
    figure.text(16, y - 8, "With one thing left out", 14, bold=True)
    for part in others:
        row(y, part, "a", {one: each[part] for one, each in times.items() if part in each})
        y += ROW
    y += 30
    figure.text(16, y - 8, "What a unit takes if it never waits", 14, bold=True)
    for bound in bounds:
        row(y, bound, "c", {precision: each[bound] for precision, each in least.items()})
        y += ROW
    return figure.svg()
