"""What the pictures of a ladder's rungs are made of: what was measured, levels of memory, matrices and their parts."""

import textwrap

from doc.draw.figure import Figure
from doc.ladder import kept_measurement, three_digits, title_and_idea
from doc.rungs import TOPICS

DEVICE, SHARED, REGISTERS = range(3)  # levels
NAMES = "device memory", "shared memory", "registers"
HIGH, APART = 92, 116  # pixels of a level, and from one level to the next
SIDE, SCALE = 16, 6    # parts of a matrix's side, which stand for 32 numbers; pixels of each


def measured(topic: str, kernel: str, since: str = "") -> str:
    """What a rung takes, and how fast that is beside the rung `since`, the one before it unless told otherwise."""
    times = {name: timed["microseconds"] for name, timed in kept_measurement()["times"][topic].items()}
    names = list(times)
    i = next(i for i, name in enumerate(names) if name.startswith(kernel))
    takes = f"{three_digits(times[names[i]])} µs"
    if i == 0:
        return takes
    gain = times[since or names[i - 1]] / times[names[i]]
    how = "as" if 0.95 < gain < 1.05 else f"{gain:.2g} times as" if gain > 1 else ""
    before = f"“{title(topic, since)}”" if since else "the rung before"
    return f"{takes}, {how} fast as {before}" if how else f"{takes}, {1 / gain:.2g} times as long as {before}"


def title(topic: str, kernel: str) -> str:
    """As the ladder's table has it."""
    rung = next(rung for rung in TOPICS[topic].rungs if rung.kernel.startswith(kernel))
    return title_and_idea(topic, rung)[0]


def rung_figure(topic: str, kernel: str, width: float, height: float, shows: str) -> Figure:
    """A rung's picture: its title and what was measured are in the first 50 pixels."""
    figure = Figure(width, height, shows)
    figure.text(20, 24, title(topic, kernel), 16, bold=True)
    figure.text(20, 46, measured(topic, kernel), 14)
    return figure


def account(
    figure: Figure, x: float, y: float, letters: int, moves: str, stays: str, waits: str,
    across: tuple[float, float] | None = None,
) -> None:  # fmt: skip
    """What moves where, what stays in registers and what waits, in lines of so many letters: below each other, or
    beside each other, with the second and the third at `across`."""
    columns = iter(across or (x, x))
    for label, words in ("moves", moves), ("stays in registers", stays), ("waits", waits):
        figure.text(x, y, label, 14, bold=True)
        lines = textwrap.wrap(words, letters)
        for i, line in enumerate(lines, 1):
            figure.text(x, y + 19 * i, line, 13)
        x, y = next(columns, x), y if across else y + 28 + 19 * len(lines)


def boxed(figure: Figure, x: float, y: float, words: str, colour: str, width: float, high: float = 34) -> None:
    """A box with its words in the middle, in one line or several."""
    lines = words.splitlines()
    figure.rect(x, y, width, high, colour, "ink")
    for i, line in enumerate(lines):
        figure.text(x + width / 2, y + high / 2 + 5 + 17 * (i - (len(lines) - 1) / 2), line, 13, "middle")


class Levels:
    """Device memory, shared memory and registers, one below the other, with boxes in them and arrows between them."""

    def __init__(self, figure: Figure, x: float, y: float, width: float, names: tuple[str, ...] = NAMES):
        self.figure, self.x, self.y = figure, x, y
        for level, name in enumerate(names):
            figure.rect(x, y + APART * level, width, HIGH, "f")
            figure.text(x + width - 6, y + APART * level + 15, name, 12, "end", "faint")

    def box(self, level: int, at: float, words: str, colour: str, width: float = 44) -> None:
        """A box `at` pixels from the left."""
        boxed(self.figure, self.x + at, self.y + APART * level + 40, words, colour, width, 40)

    def move(self, at: float, start: int, end: int, words: str = "") -> None:
        """An arrow from a box of the level `start` to one of the level `end`, with words on its right."""
        down = start < end
        y1, y2 = (self.y + APART * level + 40 for level in (start, end))
        y1, y2 = (y1 + 42, y2 - 3) if down else (y1 - 3, y2 + 43)
        self.figure.line(self.x + at, y1, self.x + at, y2, arrow=True)
        if words:
            self.figure.text(self.x + at + 6, self.y + APART * max(start, end) - 8, words, 12)


def matrix(figure: Figure, x: float, y: float, name: str, row: int | None = None) -> None:
    """A matrix, and the 32 numbers of a warp in one of its rows."""
    figure.text(x, y - 8, name, 14)
    figure.rect(x, y, SIDE * SCALE, SIDE * SCALE, "f")
    if row is not None:
        figure.rect(x, y + row * SCALE, SIDE * SCALE, SCALE, "e")


def column_of_tile(figure: Figure, x: float, y: float, name: str, column: int) -> None:
    """A tile in shared memory. A warp reads one of its columns."""
    matrix(figure, x, y, name)
    figure.rect(x + column * SCALE, y, SCALE, SIDE * SCALE, "e")


def cells(
    figure: Figure, x: float, y: float, rows: int, columns: int, size: float, marks: dict[tuple[int, int], str],
    words: dict[tuple[int, int], str] | None = None,
) -> None:  # fmt: skip
    """A grid of cells; those in `marks` have that colour, and those in `words` that text."""
    for row in range(rows):
        for column in range(columns):
            figure.rect(x + column * size, y + row * size, size, size, marks.get((row, column), "f"), "paper")
    for (row, column), text in (words or {}).items():
        figure.text(x + (column + 0.5) * size, y + (row + 0.5) * size + 5, text, 12, "middle")


def legend(figure: Figure, x: float, y: float, *entries: tuple[str, str]) -> None:
    """Colours and what they mean, in a line."""
    for colour, words in entries:
        figure.rect(x, y - 12, 14, 14, colour)
        figure.text(x + 20, y, words, 13)
        x += 44 + 7.5 * len(words)


class Operands:
    """c (m, n) = a (m, k) b (k, n): a stands left of c and b above it, so that rows and columns line up. An element has
    so many pixels; the upper left corner of all is at (x, y)."""

    def __init__(self, figure: Figure, x: float, y: float, m: int, n: int, k: int, scale: float):
        self.figure, self.scale, gap = figure, scale, 10
        right, below = x + k * scale + gap, y + k * scale + gap
        self.corners = {"a": (x, below), "b": (right, y), "c": (right, below)}
        self.width = (k + n) * scale + gap
        for name, rows, columns in (("a", m, k), ("b", k, n), ("c", m, n)):
            self.mark(name, 0, 0, rows, columns, "f")
        figure.text(x - 14, below + 14, "a", 16, bold=True)
        figure.text(right - 16, y + 14, "b", 16, bold=True)

    def mark(self, name: str, row: float, column: float, rows: float, columns: float, fill: str, edge: str = ""):
        x, y = self.place(name, row, column)
        self.figure.rect(x, y, columns * self.scale, rows * self.scale, fill, edge)

    def place(self, name: str, row: float, column: float) -> tuple[float, float]:
        x, y = self.corners[name]
        return x + column * self.scale, y + row * self.scale
