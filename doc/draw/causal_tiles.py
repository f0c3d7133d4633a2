"""Flash attention's triangle of tiles for one head: which block does which, and in which order the blocks start."""

from device.sources import constants_of
from doc.draw.figure import Figure
from kernels import flash_attention

T, HS = 1024, 64
CONSTANTS = constants_of(flash_attention.cu.path)
WARPS, ROWS = CONSTANTS["WARPS"], CONSTANTS["TILE_FLOATS"] // HS
TILES, BLOCKS = T // ROWS, T // ROWS // WARPS
CELL = 9
SIDE = TILES * CELL


def triangle(figure: Figure, x0: int, y0: int, by_query: bool) -> None:
    """Queries go down, keys to the right. Neighbouring blocks have different shades."""
    for query in range(TILES):
        for key in range(query + 1):
            block = (query if by_query else key) // WARPS
            fill = "b" if query == key else "a" if block % 2 else "c"
            figure.rect(x0 + key * CELL, y0 + query * CELL, CELL, CELL, fill, "paper")
    for block in range(BLOCKS + 1):
        at = block * WARPS * CELL
        across, down = (x0, y0 + at, x0 + SIDE, y0 + at), (x0 + at, y0, x0 + at, y0 + SIDE)
        figure.line(*(across if by_query else down), "faint")
        if block in (0, BLOCKS):
            figure.line(*(down if by_query else across), "faint")


def draw() -> str:
    left, right, top = 82, 436, 92
    figure = Figure(right + SIDE + 14, top + SIDE + 126, "The triangle of causal tiles, and the order of its blocks")
    figure.text(left, 26, f"forward and dq: {WARPS * ROWS} queries per block", 15, bold=True)
    figure.text(right, 26, f"dk and dv: {WARPS * ROWS} keys per block", 15, bold=True)
    figure.text(left + SIDE / 2, top - 10, f"keys 0 … {T - 1}", 13, "middle", "faint")
    figure.text(right + SIDE / 2, top - 30, f"keys 0 … {T - 1}", 13, "middle", "faint")
    triangle(figure, left, top, True)
    triangle(figure, right, top, False)
    for block in range(BLOCKS):
        middle, tiles = (block + 0.5) * WARPS * CELL, WARPS * (block + 1)
        figure.text(left - 8, top + middle + 5, f"y = {BLOCKS - 1 - block}", 13, "end")
        figure.text(left + SIDE + 5, top + middle + 5, str(tiles), 13, colour="faint")
        figure.text(right + middle, top - 9, f"y={block}", 12, "middle")
        figure.text(right + middle, top + SIDE + 16, str(WARPS * BLOCKS - tiles + WARPS), 13, "middle", "faint")
    y = top + SIDE + 46
    figure.lines(left, y, 20, (
        "y: blockIdx.y. Blocks start in this order, those with the most tiles first; how many",
        f"tiles a block streams stands at its end. In TF32 a square is a tile, {ROWS} queries by",
        f"{ROWS} keys: one warp's work between two barriers. In bf16 a tile has {2 * ROWS} keys: two squares.",
    ))  # fmt: skip
    says = "on the diagonal: the only tiles in which queries and keys are compared"
    figure.key(left, y + 56, "b", says, 14, 14)
    return figure.svg()
