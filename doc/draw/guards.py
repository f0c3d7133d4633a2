"""A guarded array of the tests: what lies around it, what is in it at first, and what must be so in the end."""

import re
from pathlib import Path

from doc.draw.figure import Figure

ORACLE = Path(__file__).resolve().parents[2] / "tests" / "oracle.py"
KINDS = (
    ("read", "values", "the same values"),
    ("write", "POISON", "every element written, none NaN"),
    ("update", "values", "none NaN"),
    ("scratch", "POISON", "anything"),
)


def constant(name: str) -> str:
    return re.search(rf"^{name} = (\w+)", ORACLE.read_text("utf-8"), re.M)[1]


def draw() -> str:
    figure = Figure(640, 330, "A guarded array")
    margin = int(constant("MARGIN"))
    figure.text(10, 22, "One buffer of the device, the array in its middle", 16, bold=True)
    figure.rect(10, 40, 170, 48, "e", "paper")
    figure.rect(180, 40, 26, 48, "f", "paper")
    figure.rect(206, 40, 254, 48, "a", "paper")
    figure.rect(460, 40, 170, 48, "e", "paper")
    figure.text(95, 60, f"{margin} x GUARD", 14, "middle")
    figure.text(95, 78, constant("GUARD"), 13, "middle")
    figure.text(545, 60, f"{margin} x GUARD", 14, "middle")
    figure.text(545, 78, constant("GUARD"), 13, "middle")
    figure.text(333, 69, "the array that the kernel gets", 14, "middle")
    figure.line(193, 92, 193, 108, "faint")
    figure.text(10, 122, "shift: 0 to 3 elements, so rows do not begin at a multiple of 16 bytes", 13, colour="faint")
    figure.text(10, 158, "asked for by", 14, colour="faint")
    figure.text(140, 158, "before", 14, colour="faint")
    figure.text(330, 158, "must hold afterwards", 14, colour="faint")
    for i, (name, before, after) in enumerate(KINDS):
        y = 172 + 38 * i
        figure.rect(10, y, 620, 30, "f")
        figure.text(20, y + 20, f"memory.{name}", 14)
        figure.text(140, y + 20, before if before == "values" else f"POISON {constant(before)}", 14)
        figure.text(330, y + 20, after, 14)
    return figure.svg()
