"""GELU, its derivative, and how far its two forms lie apart."""

from collections.abc import Callable
from math import erf, exp, pi, sqrt

from doc.draw.figure import Figure

K = 2 * sqrt(2 / pi)
LEFT, BASE, UNIT = 310, 262, 68  # where (0, 0) lies, and pixels for 1
HIGHEST = 3.2


def share(x: float) -> float:
    return 1 / (1 + exp(-K * (x + 0.044715 * x**3)))


def gelu(x: float) -> float:
    return x * share(x)


def derivative(x: float) -> float:
    s = share(x)
    return s + x * s * (1 - s) * K * (1 + 3 * 0.044715 * x**2)


def difference(x: float) -> float:
    return 1000 * (gelu(x) - x / 2 * (1 + erf(x / sqrt(2))))


def draw() -> str:
    figure = Figure(620, 320, "GELU and its derivative")

    def curve(function: Callable, colour: str) -> None:
        points = [(x / 50, function(x / 50)) for x in range(-200, 201)]
        shown = [(LEFT + UNIT * x, BASE - UNIT * y) for x, y in points if y <= HIGHEST]
        figure.path(shown, colour, 3)

    for y in (1, 2, 3):
        figure.line(LEFT - 4.2 * UNIT, BASE - y * UNIT, LEFT + 4.2 * UNIT, BASE - y * UNIT, "rule", dashed=True)
        figure.text(LEFT - 8, BASE - y * UNIT - 4, str(y), 12, "end", "faint")
    for x in (-4, -3, -2, -1, 1, 2, 3, 4):
        figure.text(LEFT + x * UNIT, BASE + 32, str(x), 12, "middle", "faint")
    figure.line(LEFT - 4.2 * UNIT, BASE, LEFT + 4.2 * UNIT, BASE, "faint")
    figure.line(LEFT, BASE + 40, LEFT, BASE - HIGHEST * UNIT, "faint")
    curve(difference, "c")
    curve(derivative, "b")
    curve(gelu, "ink")
    figure.text(LEFT + 1.95 * UNIT, BASE - 2.6 * UNIT, "gelu(x)", 15, "end")
    figure.text(LEFT + 2.3 * UNIT, BASE - 1.2 * UNIT, "gelu'(x)", 15)
    figure.text(LEFT - 4.1 * UNIT, BASE - 0.6 * UNIT, "1000 × (tanh form - erf form)", 15)
    return figure.svg()
