"""A product c = a b with its three matrices: a stands left of c and b above it, so that rows and columns line up."""

from doc.draw.figure import Figure

GAP = 10


class Operands:
    """a (m, k), b (k, n) and c (m, n), with so many pixels an element; the upper left corner of all is at (x, y)."""

    def __init__(self, figure: Figure, x: float, y: float, m: int, n: int, k: int, scale: float):
        self.figure, self.scale = figure, scale
        right, below = x + k * scale + GAP, y + k * scale + GAP
        self.corners = {"a": (x, below), "b": (right, y), "c": (right, below)}
        self.width, self.height = (k + n) * scale + GAP, (k + m) * scale + GAP
        for name, rows, columns in (("a", m, k), ("b", k, n), ("c", m, n)):
            self.mark(name, 0, 0, rows, columns, "f")
        figure.text(x - 14, below + 14, "a", 16, bold=True)
        figure.text(right - 16, y + 14, "b", 16, bold=True)

    def mark(self, name: str, row: float, column: float, rows: float, columns: float, fill: str, edge: str = ""):
        x, y = self.corners[name]
        s = self.scale
        self.figure.rect(x + column * s, y + row * s, columns * s, rows * s, fill, edge)

    def place(self, name: str, row: float, column: float) -> tuple[float, float]:
        x, y = self.corners[name]
        return x + column * self.scale, y + row * self.scale
