"""Seven formats: which sizes each has, as powers of two, and how many significant bits at each size."""

from doc.draw.figure import Figure
from doc.draw.one_byte import power_of_two

# name, bits of exponent and of mantissa, whether the largest exponent holds numbers, colour
FORMATS = (
    ("fp32", 8, 23, False, "f"), ("TF32", 8, 10, False, "c"), ("bf16", 8, 7, False, "d"), ("fp16", 5, 10, False, "c"),
    ("e4m3", 4, 3, True, "a"), ("e5m2", 5, 2, False, "b"), ("e2m1", 2, 1, True, "e"),
)  # fmt: skip
LEFT, RIGHT, FIRST, LAST = 70, 880, -152, 132
BIT = 4                      # how high a significant bit is


def x_of(power: float) -> float:
    return LEFT + (power - FIRST) / (LAST - FIRST) * (RIGHT - LEFT)


def outline(figure: Figure, y: float, exponent: int, mantissa: int, whole: bool, colour: str, moved: int = 0) -> None:
    """A format's numbers above the line y: as high as a number has significant bits, moved by a scale of 2^moved."""
    least = 2 - 2 ** (exponent - 1)
    last = 2 ** (exponent - 1) - 1 + whole
    for lost in range(1, mantissa + 1):
        figure.rect(x_of(least - lost + moved), y - BIT * (mantissa + 1 - lost), x_of(1) - x_of(0),
                    BIT * (mantissa + 1 - lost), "" if moved else colour, "rule" if moved else "")  # fmt: skip
    width = x_of(last + 1) - x_of(least)
    figure.rect(x_of(least + moved), y - BIT * (mantissa + 1), width, BIT * (mantissa + 1),
                "" if moved else colour, "faint" if moved else "")  # fmt: skip


def draw() -> str:
    figure = Figure(RIGHT + 20, 436, "Seven formats: the sizes that each has, and its significant bits at each size")
    figure.text(LEFT, 20, "Width: range. Height: significant bits. Slope: small numbers with fewer bits", 15, bold=True)
    y = 36
    for name, exponent, mantissa, whole, colour in FORMATS:
        y += max(BIT * (mantissa + 1), 16) + 14
        figure.line(LEFT, y, RIGHT, y, "rule")
        figure.text(LEFT - 10, y - 1, name, 15, "end", bold=True)
        outline(figure, y, exponent, mantissa, whole, colour)
        if name == "e4m3":
            outline(figure, y, exponent, mantissa, whole, colour, moved=-60)
            figure.line(x_of(-11), y - 8, x_of(-49), y - 8, arrow=True)
        middle = x_of(2 ** (exponent - 1) + whole) + 10 if exponent < 8 else x_of(-90)
        inside = exponent == 8 and BIT * (mantissa + 1) > 30
        words = f"{mantissa + 1} bits" + "; a scale moves the range, and changes nothing else" * (name == "e4m3")
        figure.text(middle, y - (BIT * (mantissa + 1) / 2 - 5 if inside else 6), words, 13)
    for power in range(-150, 131, 50):
        figure.text(x_of(power), y + 22, power_of_two(power) if power else "1", 14, "middle")
        figure.line(x_of(power), y, x_of(power), y + 6, "faint")
    return figure.svg()
