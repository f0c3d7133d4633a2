"""The numbers of bf16, e4m3 and e5m2 from 1 to 4, and what a scale does to a tensor, without and with an outlier."""

import math

from doc.draw.figure import Figure

LEFT, RIGHT = 150, 850
FORMATS = (("bf16", 7, "f"), ("e4m3", 3, "a"), ("e5m2", 2, "b"))    # bits of mantissa, colour
FIRST, LAST = -30, 20                                               # powers of two on the lower axis
# name, where its smallest number, its smallest normal one and its largest lie, as powers of two, and its colour
RANGES = (("e4m3", -9, -6, math.log2(448), "a"), ("e5m2", -16, -14, math.log2(57344), "b"))
TYPICAL, OUTLIER = math.log2(1e-7), math.log2(1e-7 * 1e5)
HIGHEST = TYPICAL + math.log2(4.6)                                  # the largest of a quarter of a million
TENSORS = (("a tensor's gradients, near 1e-7", HIGHEST), ("with an outlier, 100,000 times as large", OUTLIER))


def spacing(figure: Figure) -> None:
    figure.text(LEFT, 22, "All numbers from 1 to 4", 15, bold=True)
    for i, (name, mantissa, colour) in enumerate(FORMATS):
        y = 36 + 44 * i
        figure.text(LEFT - 12, y + 21, name, 15, "end", bold=True)
        figure.rect(LEFT, y, RIGHT - LEFT, 30, colour)
        for step in range(2 * 2**mantissa + 1):
            exponent, part = divmod(step, 2**mantissa)
            x = LEFT + ((1 + part / 2**mantissa) * 2**exponent - 1) / 3 * (RIGHT - LEFT)
            figure.line(x, y, x, y + 30, width=0.6 if name == "bf16" else 2)
    for number in 1, 2, 3, 4:
        figure.text(LEFT + (number - 1) / 3 * (RIGHT - LEFT), 182, str(number), 14, "middle")


def power_of_two(power: int) -> str:
    return "2" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def x_of(power: float) -> float:
    return LEFT + (power - FIRST) / (LAST - FIRST) * (RIGHT - LEFT)


def bell(figure: Figure, y: float, centre: float, colour: str) -> None:
    """How the sizes of normally distributed numbers are spread over powers of two."""
    for half in range(-14, 6):
        power = half / 2
        size = 2.0**power
        height = 62 * size * math.exp(-(size**2) / 2)
        if height > 1:
            figure.rect(x_of(centre + power - 0.25), y - height, x_of(0.5) - x_of(0) - 1, height, colour)


def scaling(figure: Figure) -> None:
    figure.text(LEFT, 226, "What a scale does: sizes, as powers of two", 15, bold=True)
    for i, (name, smallest, normal, largest, colour) in enumerate(RANGES):
        y = 240 + 30 * i
        figure.text(LEFT - 12, y + 17, name, 15, "end", bold=True)
        figure.rect(x_of(smallest), y, x_of(normal) - x_of(smallest), 22, "f")
        figure.rect(x_of(normal), y, x_of(largest) - x_of(normal), 22, colour)
    figure.text(x_of(-9) - 8, 257, "grey: fewer bits", 13, "end", "faint")
    for i, (words, highest) in enumerate(TENSORS):
        base, scale = 400 + 112 * i, math.ceil(highest - math.log2(448))
        for edge in -9, -6, math.log2(448):
            figure.line(x_of(edge), base - 78, x_of(edge), base, "rule", dashed=True)
        figure.line(LEFT, base, RIGHT, base, "rule")
        bell(figure, base, TYPICAL, "e")
        bell(figure, base, TYPICAL - scale, "c")
        figure.line(x_of(TYPICAL + 3), base - 30, x_of(TYPICAL - scale - (7 if i else 8)), base - 30, arrow=True)
        middle = x_of(TYPICAL - 2 - scale / 2)
        figure.text(middle, base - 38, f"divided by {power_of_two(scale)}", 13, "middle")
        if highest == OUTLIER:
            for power, colour in (OUTLIER, "e"), (OUTLIER - scale, "c"):
                figure.dot(x_of(power), base - 6, 5, colour)
                figure.text(x_of(power) + 9, base - 6, "the outlier", 13)
        figure.text(LEFT, base + 20, words, 14)
    for power in range(FIRST, LAST + 1, 10):
        figure.text(x_of(power), 552, power_of_two(power), 14, "middle")


def draw() -> str:
    figure = Figure(RIGHT + 30, 566, "One byte: the numbers of e4m3 and e5m2 beside bf16's, and what a scale does")
    spacing(figure)
    scaling(figure)
    return figure.svg()
