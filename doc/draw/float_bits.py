"""The bits of 0.1 in fp32, TF32 and bf16."""

import struct

from doc.draw.figure import Figure

VALUE = 0.1
FORMATS = (("fp32", 23), ("TF32", 10), ("bf16", 7))  # bits of the mantissa
EXPONENT, BITS, CELL, LEFT = 8, 32, 23, 76


def rounded(mantissa: int) -> int:
    """The bits of VALUE in fp32, rounded to so many bits of mantissa."""
    bits, dropped = struct.unpack("<I", struct.pack("<f", VALUE))[0], 23 - mantissa
    return bits if dropped == 0 else (bits + (1 << (dropped - 1))) >> dropped << dropped


def draw() -> str:
    figure = Figure(LEFT + BITS * CELL + 66, 352, f"{VALUE} in fp32, TF32 and bf16")
    for x, width, words in (
        (0, 1, "sign"), (1, EXPONENT, f"exponent, {EXPONENT} bits: range"), (9, 23, "mantissa: precision")
    ):
        figure.text(LEFT + (x + width / 2) * CELL, 22, words, 14, "middle")
    for i, (name, mantissa) in enumerate(FORMATS):
        y, bits = 36 + 106 * i, rounded(mantissa)
        figure.text(LEFT - 12, y + 23, name, 17, "end", bold=True)
        for place in range(BITS):
            x, kept = LEFT + place * CELL, place < 1 + EXPONENT + mantissa
            colour = "e" if place == 0 else "b" if place <= EXPONENT else "a"
            if kept:
                figure.box(x, y, CELL - 2, 34, colour, str(bits >> (31 - place) & 1), 15, 23)
            else:
                figure.rect(x, y, CELL - 2, 34, "f")
        value = struct.unpack("<f", struct.pack("<I", bits))[0]
        relative = abs(value / VALUE - 1)
        figure.text(LEFT, y + 56, f"1 + {EXPONENT} + {mantissa} = {1 + EXPONENT + mantissa} bits; "
                    f"{VALUE} becomes {value:.10f}, off by {relative:.1e} of itself", 15)  # fmt: skip
        figure.text(LEFT, y + 75, f"neighbours of 1 are 2^-{mantissa} apart; rounding is off by 2^-{mantissa + 1} = "
                    f"{2.0 ** -(mantissa + 1):.1e} at most", 15, colour="faint")  # fmt: skip
    return figure.svg()
