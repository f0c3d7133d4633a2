"""A column sum in two stages: chunks of rows to partial sums, partial sums to the result."""

from doc.draw.figure import Figure
from doc.draw.launches import launched
from kernels.reduce import column_sum, rows_per_chunk

N, C = 4096, 2304  # of the qkv bias at B 4, T 1024
SHOWN = 6


def draw() -> str:
    figure = Figure(880, 420, "A column sum in two stages")
    launches, rows = launched(column_sum, None, None, N, C), rows_per_chunk(N, multiple=8)
    (_, chunks), _ = launches["column_partials"]
    (blocks, _), (across, down) = launches["add_partials"]
    figure.text(20, 24, f"dout ({N}, {C})", 16, bold=True)
    figure.text(400, 24, f"partials ({chunks}, {C})", 16, bold=True)
    figure.text(700, 24, f"dbias ({C})", 16, bold=True)
    for p in range(SHOWN):
        y, colour = 40 + 48 * p, "abcdef"[p]
        figure.rect(20, y, 300, 44, colour)
        if p < SHOWN - 1:
            figure.text(30, y + 27, f"rows {p * rows} to {p * rows + rows - 1}", 14)
        else:
            figure.text(30, y + 27, f"…  chunk {chunks - 1}", 14)
        figure.rect(400, y + 15, 200, 14, colour)
        figure.line(324, y + 22, 394, y + 22, arrow=True)
        figure.line(604, y + 22, 694, 40 + 24 * SHOWN, "faint", arrow=True)
    figure.rect(700, 40 + 24 * SHOWN - 7, 160, 14, "f", "ink")
    y = 40 + 48 * SHOWN
    figure.text(20, y + 22, "First stage: a thread walks down four columns", 14)
    figure.text(20, y + 41, f"of its chunk, {rows} rows, from above to below.", 14)
    figure.text(400, y + 22, f"Second: {blocks} blocks of {across} columns and {down} lanes over", 14)
    figure.text(400, y + 41, f"p. Lane y takes p = y, y + {down}, … in order; then", 14)
    lanes = 32 // across  # of a warp, that have the same column
    figure.text(400, y + 60, f"shuffles add up a warp's {lanes} lanes of a column, and", 14)
    figure.text(400, y + 79, f"one thread per column adds the {down // lanes} warps' sums.", 14)
    return figure.svg()
