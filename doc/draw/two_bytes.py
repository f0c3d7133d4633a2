"""Four formats beside each other, and the numbers that bf16 has near 1, with an update that is too small for it."""

from doc.draw.figure import Figure

FORMATS = (("fp32", 8, 23), ("TF32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10))  # bits of exponent and mantissa
BITS, CELL, LEFT = 32, 17, 60
LINE, FIRST, LAST = 356, 0.9905, 1.0095  # the number line: its height, and what it shows
NUMBERS = (1 - 2 / 256, 1 - 1 / 256, 1.0, 1 + 1 / 128)
RATE, STEPS = 3e-4, 14


def formats(figure: Figure) -> None:
    for place, words in (1, "exponent: range"), (9, "mantissa: precision"):
        figure.text(LEFT + place * CELL, 20, words, 14)
    for i, (name, exponent, mantissa) in enumerate(FORMATS):
        y, used = 32 + 48 * i, 1 + exponent + mantissa
        figure.text(LEFT - 10, y + 19, name, 15, "end", bold=True)
        for place in range(32 if name in ("fp32", "TF32") else 16):
            colour = "e" if place == 0 else "b" if place <= exponent else "a" if place < used else "f"
            figure.rect(LEFT + place * CELL, y, CELL - 2, 26, colour)
        dropped = ", 13 unused" if name == "TF32" else ""
        x = LEFT + (32 if name in ("fp32", "TF32") else 16) * CELL + 12
        figure.text(x, y + 18, f"1 + {exponent} + {mantissa} bits{dropped}", 14)


def x_of(number: float) -> float:
    return LEFT - 30 + (number - FIRST) / (LAST - FIRST) * (BITS * CELL + 214)


def numbers(figure: Figure) -> None:
    figure.text(LEFT - 50, 256, "All that bf16 has near 1, and what is rounded to each:", 15, bold=True)
    limits = [FIRST, *((a + b) / 2 for a, b in zip(NUMBERS, NUMBERS[1:], strict=False)), LAST]
    for number, low, high, colour in zip(NUMBERS, limits, limits[1:], "afaf", strict=False):
        figure.rect(x_of(low), LINE - 30, x_of(high) - x_of(low), 60, colour)
        figure.line(x_of(number), LINE - 38, x_of(number), LINE + 38, width=2.5)
        figure.text(x_of(number), LINE - 46, f"{number:.8g}", 14, "middle")
    for step in range(STEPS):
        figure.dot(x_of(1 - step * RATE), LINE, 4, "b" if step < 7 else "e")
    figure.text(x_of(1 - 6.5 * RATE), LINE + 62, "an fp32 master after 0, 1, 2 … 13 updates of -0.0003", 14, "middle")
    figure.text(x_of(1 - 6.5 * RATE), LINE + 82, "orange: its bf16 copy is 1; red, from the seventh on: 0.99609375", 14,
                "middle")  # fmt: skip


def draw() -> str:
    figure = Figure(LEFT + BITS * CELL + 214, LINE + 98, "bf16 beside other formats, and a small update near 1")
    formats(figure)
    numbers(figure)
    return figure.svg()
