"""Which banks the 32 lanes of an access meet: a column of a square tile, the same with rows of 33, the tile of
tile.cuh."""

import re
from pathlib import Path

from doc.draw.figure import Figure

SOURCE = Path(__file__).resolve().parents[2] / "kernels" / "tile.cuh"
BANKS, LANES, CELL, LEFT, MOST = 32, 32, 25, 70, 4


def constants() -> tuple[int, int, int]:
    """Rows and columns of the Tile, and threads of a row of its block."""
    text = SOURCE.read_text("utf-8")
    tile = int(re.search(r"constexpr int TILE = (\d+),", text)[1])
    more = int(re.search(r"float at\[TILE\]\[TILE_COLUMNS \+ (\d+)\];", text)[1])
    return tile, tile + more, int(re.search(r"TILE_THREADS = WARP_SIZE > 1 \? (\d+)", text)[1])


def draw() -> str:
    tile, row, side = constants()
    cases = (
        ("A column of a tile with rows of 32: lane i wants tile[i][0], word 32 i", lambda i: 32 * i),
        ("The same with rows of 33: word 33 i", lambda i: 33 * i),
        (f"Tile of tile.cuh, {tile} x {row}: lane (x, y) puts the first of four floats into tile[y][4 x]",
         lambda i: row * (i // side) + 4 * (i % side)),
        ("Its transposed store: lane (x, y) takes tile[4 x][y]", lambda i: row * 4 * (i % side) + i // side),
    )  # fmt: skip
    figure = Figure(LEFT + BANKS * CELL + 12, 0, "Lanes by banks, for four accesses")
    y = 26
    for title, word in cases:
        by_bank = [[] for _ in range(BANKS)]
        for lane in range(LANES):
            by_bank[word(lane) % BANKS].append(lane)
        passes = max(map(len, by_bank))
        figure.text(LEFT, y, title, 15, bold=True)
        figure.text(LEFT - 8, y + 26, "bank", 12, "end", "faint")
        figure.text(LEFT - 8, y + 50, "lanes", 12, "end", "faint")
        for bank, lanes in enumerate(by_bank):
            x = LEFT + bank * CELL
            figure.text(x + CELL / 2, y + 26, str(bank), 11, "middle", "faint")
            figure.rect(x, y + 34, CELL - 2, 22, "f")
            for k, lane in enumerate(lanes[:MOST]):
                figure.box(x, y + 34 + 24 * k, CELL - 2, 22, "abce"[k], str(lane), 12, 16)
        bottom = y + 54 + 24 * min(passes, MOST)
        if passes > MOST:
            figure.text(LEFT + CELL + 6, bottom - 28, f"… and {passes - MOST} more lanes of bank 0", 14)
        says = "1 pass: no two lanes meet" if passes == 1 else f"{passes} passes"
        figure.text(LEFT + BANKS * CELL - 2, bottom, says, 15, "end", bold=True)
        y = bottom + 34
    figure.height = y - 26
    return figure.svg()
