"""What a warp asks for and the 32-byte sectors that move: neighbours, fours, every second, one element to the right, a
column."""

from doc.draw.figure import Figure

SECTOR, WORD, LANES = 32, 4, 32  # bytes, bytes, lanes
SHOWN, CELL, LEFT, STEP = 16, 50, 36, 106  # sectors of a strip, pixels of a sector
C = 768  # columns of the matrix whose column is read

CASES = (
    ("Neighbours: lane i reads float i", 1, 1, 0),
    ("Neighbours, 4 floats each: lane i reads floats 4i to 4i + 3", 4, 4, 0),
    ("Every second: lane i reads float 2i", 1, 2, 0),
    ("Neighbours from the second float on: lane i reads float i + 1", 1, 1, 1),
    (f"A column of an (N, {C}) matrix: lane i reads float {C} i", 1, C, 0),
)


def words_of(lane: int, width: int, stride: int, first: int) -> range:
    return range(first + stride * lane, first + stride * lane + width)


def draw() -> str:
    figure = Figure(2 * LEFT + SHOWN * CELL, 26 + STEP * len(CASES), "A warp's access to device memory, by sectors")
    small = CELL / (SECTOR // WORD)
    for i, (title, width, stride, first) in enumerate(CASES):
        y = 22 + STEP * i
        words = {word: lane for lane in range(LANES) for word in words_of(lane, width, stride, first)}
        sectors = sorted({word * WORD // SECTOR for word in words})
        asked, moved = WORD * len(words), SECTOR * len(sectors)
        figure.text(LEFT, y, title, 15, bold=True)
        used = "all of it" if asked == moved else f"{asked / moved:.1%}"
        says = f"asks for {asked} bytes, moves {len(sectors)} sectors of {SECTOR} bytes: {used} is used"
        figure.text(LEFT, y + 20, says, 14)
        strip = range(SHOWN) if sectors[-1] < SHOWN else sectors[:SHOWN]
        for place, sector in enumerate(strip):
            x = LEFT + place * CELL
            figure.rect(x, y + 30, CELL - 2, 30, "a" if sector in sectors else "f")
            for k in range(SECTOR // WORD):
                if sector * (SECTOR // WORD) + k in words:
                    figure.rect(x + k * small, y + 35, small - 1.6, 20, "ink")
            if sectors[-1] >= SHOWN or place in (0, SHOWN - 1):
                figure.text(x + CELL / 2 - 1, y + 74, str(sector), 11, "middle", "faint")
        if sectors[-1] >= SHOWN:
            figure.text(LEFT + SHOWN * CELL + 2, y + 50, "…", 15)
    return figure.svg()
