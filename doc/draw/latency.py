"""What an H200's memories take to answer, and a copy's speed by the warps that ask, from doc/latency.json."""

import json
from pathlib import Path

from doc.draw.figure import Figure

KEPT = Path(__file__).resolve().parents[1] / "latency.json"
BAR, LEFT = 300, 132      # pixels of the longest bar; where bars begin
X, Y, W, H = 540, 60, 300, 200  # of the plot
MOST = 4500               # GB/s at its top


def draw() -> str:
    kept = json.loads(KEPT.read_text("utf-8"))
    figure = Figure(868, 330, "Latencies, and a copy by the number of warps")
    figure.text(16, 26, f"One load, {kept['device']}", 16, bold=True)
    longest = max(kept["ns"].values())
    for i, (name, ns) in enumerate(kept["ns"].items()):
        y = 60 + 52 * i
        figure.text(LEFT - 10, y + 21, name, 15, "end")
        figure.rect(LEFT, y, BAR * ns / longest, 32, "abcd"[i])
        beside = ns < longest / 2
        figure.text(LEFT + BAR * ns / longest + (8 if beside else -8), y + 21, f"{ns:.0f} ns", 15,
                    "start" if beside else "end")  # fmt: skip
    figure.text(X - 40, 26, "A copy, 16 bytes per thread", 16, bold=True)
    for speed in range(0, MOST, 1000):
        y = Y + H - H * speed / MOST
        figure.line(X, y, X + W, y, "rule")
        figure.text(X - 8, y + 5, str(speed), 13, "end", "faint")
    figure.text(X - 44, Y - 12, "GB/s", 13, colour="faint")
    before = None
    for warps, speed in kept["GB/s"].items():
        x, y = X + W * int(warps) / 64, Y + H - H * speed / MOST
        if before:
            figure.line(*before, x, y, width=2)
        before = x, y
    for warps, speed in kept["GB/s"].items():
        x, y = X + W * int(warps) / 64, Y + H - H * speed / MOST
        figure.dot(x, y, 5, "a")
        if warps not in ("1", "2"):
            figure.text(x, Y + H + 20, warps, 13, "middle")
    figure.text(X + W / 2, Y + H + 42, "warps on each multiprocessor (of 64 at most)", 14, "middle")
    return figure.svg()
