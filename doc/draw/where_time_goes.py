"""What each part of flash attention's forward pass costs, measured by leaving it out, and what its units could do at
best, from doc/left_out.json."""

from doc.draw.figure import Figure
from doc.left_out import (
    LEFT_OUT,
    PRECISIONS,
    SHAPES,
    kept_measurement,
    least_times,
    name_of,
    of_precision,
    parts,
    percent,
)

WIDTH, LEFT, BAR, GAP = 900, 310, 205, 88  # of the picture, of the names, of the longest bar, and of a number
ROW, HIGH = 24, 16
AT = name_of(*SHAPES[0])
TITLES = {"tf32": "TF32", "bf16": "bf16"}


def draw() -> str:
    kept = kept_measurement()
    bounds = "tensor cores", "issue of instructions", "shared memory", "exponentials"
    others = [part for part in LEFT_OUT if part != "nothing"]
    figure = Figure(WIDTH, 128 + ROW * (1 + len(others) + len(bounds)), "Where the time of flash attention goes")
    figure.text(16, 26, f"Flash attention forward, {AT}, 12 heads of 64: microseconds", 16, bold=True)
    measured = {precision: of_precision(kept, precision) for precision in PRECISIONS if precision in kept}
    most = max((us for one in measured.values() for us in one["times"][AT].values()), default=1.0)

    def row(y: float, name: str, colour: str, us_of: dict[str, float]) -> None:
        """A name, and a bar for each precision; pale, the rest of the whole time."""
        figure.text(LEFT - 10, y + 13, name, 13, "end")
        for precision, us in us_of.items():
            x, whole = LEFT + (BAR + GAP) * PRECISIONS.index(precision), measured[precision]["times"][AT]["nothing"]
            if us < whole:
                figure.rect(x, y, BAR * whole / most, HIGH, "f")
            figure.rect(x, y, BAR * us / most, HIGH, colour)
            share = {"a": percent(us / whole - 1, "+"), "c": percent(us / whole)}.get(colour)
            words = f"{us:.1f} ({share})" if share else f"{us:.1f}"
            figure.text(x + BAR * max(us, whole) / most + 6, y + 13, words, 13)

    y = 62
    for precision in measured:
        figure.text(LEFT + (BAR + GAP) * PRECISIONS.index(precision), y - 10, TITLES[precision], 14, bold=True)
    times = {precision: one["times"][AT] for precision, one in measured.items()}
    row(y, "the kernel as it is", "b", {precision: each["nothing"] for precision, each in times.items()})
    y += ROW + 30
    figure.text(16, y - 8, "With one thing left out", 14, bold=True)
    for part in others:
        row(y, part, "a", {one: each[part] for one, each in times.items() if part in parts(one)})
        y += ROW
    y += 30
    figure.text(16, y - 8, "What a unit takes if it never waits", 14, bold=True)
    least = {precision: least_times(one, AT) for precision, one in measured.items()}
    for bound in bounds:
        row(y, bound, "c", {precision: each[bound][1] for precision, each in least.items()})
        y += ROW
    return figure.svg()
