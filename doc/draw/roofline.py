"""The roofline of an H200 with the kernels of a training step of GPT-2 124M, B 4, T 1024."""

import json
import re
from math import log10
from pathlib import Path

from doc.draw.figure import Figure

DOC = Path(__file__).resolve().parents[1]
N, T, C, Vp, L = 4096, 1024, 768, 50304, 12


def ceilings() -> tuple[float, float, float]:
    """TFLOP/s of a TF32 product and TB/s of a copy, by page 2; TFLOP/s of a product without tensor cores."""
    page = (DOC / "02-what-bounds-a-kernel.md").read_text("utf-8")
    copy, product = re.search(r"^W, P, P_FP32 = (\d+)e9, (\d+)e12,", page, re.M).groups()
    kept = json.loads((DOC / "ladder" / "measured.json").read_text("utf-8"))
    fp32 = 2 * N * 3072 * C / kept["times"]["matmul"]["cuBLAS in fp32"]["microseconds"] / 1e6
    return float(product), float(copy) / 1000, fp32


def product(m: int, n: int, k: int, letters: str, share: float) -> tuple:
    return f"product {m} x {n} x {k} {letters}", 2 * m * n * k, 4 * (m * k + k * n + m * n), share, True


# Name, FLOPs, bytes, the share of its ceiling in the profile of doc/profile.png (dev/profile_step.py), whether that
# ceiling is the product's. FLOPs of the others are those of their inner loops for each element, an exponential or
# division counted as one.
KERNELS = (
    product(50304, C, N, "TT", 0.86),
    product(N, 3072, C, "NT", 0.73),
    product(N, C, 3072, "NT", 0.55),
    product(N, C, C, "NT", 0.41),
    product(C, C, N, "TT", 0.31),
    ("flash_attention_forward", 2 * T * N * C, 4 * 4 * N * C, 0.25, True),
    ("flash_attention_backward_key", 4 * T * N * C, 6 * 4 * N * C, 0.29, True),
    ("gelu_forward", 12, 8, 0.91, False),
    ("layernorm_backward", 16, 16, 0.68, False),
    ("fused_classifier", 7, 8, 0.87, False),
    ("layernorm_forward", 10, 16, 0.69, False),
    ("adamw", 17, 28, 1.01, False),
    ("column_partials", 1, 4, 1.00, False),
    ("add_partials", 1, 4, 0.19, False),
)

BESIDE = {
    2: (-17, 5), 3: (9, 7), 4: (-17, 0), 5: (-17, 2), 6: (-16, 6), 8: (9, 12), 9: (9, 12), 10: (-7, 20), 11: (-1, 20),
    12: (-25, 0),
}  # fmt: skip
X, Y, W, H = 62, 40, 500, 470      # of the plot
LEGEND = Y + 52
LOW_X, HIGH_X, LOW_Y, HIGH_Y = -1.1, 2.85, -1.05, 2.9  # powers of ten


def place(intensity: float, rate: float) -> tuple[float, float]:
    x = X + W * (log10(intensity) - LOW_X) / (HIGH_X - LOW_X)
    return x, Y + H - H * (log10(rate) - LOW_Y) / (HIGH_Y - LOW_Y)


def draw() -> str:
    most, copy, fp32 = ceilings()
    figure = Figure(892, 572, "Roofline of an H200 with the kernels of a training step")
    for power in range(-1, 3):
        x, y = place(10**power, 10**power)
        figure.line(x, Y, x, Y + H, "rule", 0.7)
        figure.line(X, y, X + W, y, "rule", 0.7)
        figure.text(x, Y + H + 19, f"{10**power:g}", 13, "middle", "faint")
        figure.text(X - 7, y + 5, f"{10**power:g}", 13, "end", "faint")
    figure.text(X - 50, Y - 16, "TFLOP/s", 14)
    figure.text(X + W / 2, Y + H + 42, "FLOPs for each byte of device memory", 14, "middle")
    ridge, low = most / copy, 10**LOW_X
    figure.line(*place(low, low * copy), *place(ridge, most), width=2.5)
    figure.line(*place(ridge, most), *place(10**HIGH_X, most), width=2.5)
    figure.line(*place(fp32 / copy, fp32), *place(10**HIGH_X, fp32), width=1.5, dashed=True)
    figure.line(*place(ridge, 10**LOW_Y), *place(ridge, most), "faint", dashed=True)
    figure.text(place(ridge, 1)[0] - 14, place(1, most)[1] + 2, f"TF32 product: {most:.0f}", 14, "end")
    figure.text(place(10**HIGH_X, most)[0], place(1, fp32)[1] + 20, f"without tensor cores: {fp32:.0f}", 14, "end")
    x, y = place(1.6, 1.6 * copy)
    figure.text(x - 8, y - 8, f"copy: {copy:.2f} TB/s", 14, "middle", turned=-45 if W == H else -43)
    figure.text(place(ridge, 1)[0] + 6, Y + H - 8, f"{ridge:.0f}", 14, colour="faint")
    for row, colour, words in ((Y - 18, "a", "% of the TF32 product's FLOP/s"),
                               (Y + 8, "b", "% of the copy's bytes/s")):  # fmt: skip
        figure.rect(X + W + 16, row - 10, 20, 14, colour)
        figure.text(X + W + 42, row + 2, words, 14)
    for number, (name, flops, size, share, multiplies) in enumerate(KERNELS, 1):
        rate = share * (most if multiplies else copy * flops / size)
        x, y = place(flops / size, rate)
        figure.dot(x, y, 5, "a" if multiplies else "b")
        dx, dy = BESIDE.get(number, (9, 5))
        figure.text(x + dx, y + dy, str(number), 13)
        row = LEGEND + 30 * (number - 1)
        figure.dot(X + W + 26, row, 10, "a" if multiplies else "b")
        figure.text(X + W + 26, row + 4, str(number), 11, "middle")
        figure.text(X + W + 42, row + 5, f"{name}: {share:.0%}", 14)
    return figure.svg()
