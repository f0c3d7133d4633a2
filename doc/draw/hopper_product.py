"""A product by Hopper's own instructions: stages over time, what a cluster copies, and two orders of tiles."""

from doc.draw.figure import Figure

COPY, PRODUCT, TILES = 2.4, 1.0, 9  # a copy's and a product's time; tiles of K
Span = tuple[float, float]


def spans(stages: int) -> list[tuple[Span, Span]]:
    """When each tile's copy runs, and its product. A copy starts when the product before has left its stage."""
    found: list[tuple[Span, Span]] = []
    for i in range(TILES):
        asked = found[i - stages][1][1] if i >= stages else 0.0
        start = max(asked + COPY, found[-1][1][1] if found else 0.0)
        found.append(((asked, asked + COPY), (start, start + PRODUCT)))
    return found


def ring_of_stages() -> str:
    left, scale, row = 150, 38, 26
    figure = Figure(900, 324, "Tiles of K in a ring of two stages and of four")
    y = 22
    for stages in (2, 4):
        at = spans(stages)
        end = at[-1][1][1]
        busy = TILES * PRODUCT / (end - COPY)
        figure.text(8, y, f"{('', '', 'Two', '', 'Four')[stages]} stages", 16, bold=True)
        figure.text(left, y, f"the tensor cores work {busy:.0%} of the time, once they have begun", 14)
        y += 12
        for stage in range(stages):
            figure.text(8, y + 17, f"stage {stage}", 14)
            for i in range(stage, TILES, stages):
                (asked, came), (start, done) = at[i]
                for begin, finish, colour in (asked, came, "a"), (came, start, "f"), (start, done, "c"):
                    if finish > begin:
                        figure.rect(left + scale * begin, y, scale * (finish - begin) - 1, row - 4, colour)
                figure.text(left + scale * (asked + came) / 2, y + 16, f"{i}", 13, "middle")
            y += row
        figure.text(8, y + 17, "tensor cores", 14, bold=True)
        for i, (_, (start, done)) in enumerate(at):
            figure.rect(left + scale * start, y, scale * (done - start) - 1, row - 4, "c", "ink")
            figure.text(left + scale * (start + done) / 2, y + 16, f"{i}", 13, "middle")
        y += row + 34
    for i, (colour, words) in enumerate((("a", "the TMA copies"), ("f", "full, and waits"), ("c", "products read it"))):
        figure.key(left + 200 * i, y - 16, colour, words)
    return figure.svg()


def cluster_of_two() -> str:
    figure = Figure(900, 312, "Two blocks, one above the other, share the columns of b")
    figure.text(20, 24, "Each by itself: 48 KiB per stage from L2", 16, bold=True)
    figure.text(470, 24, "A cluster: 32 KiB per block", 16, bold=True)
    for x, cluster in (20, False), (470, True):
        figure.text(x, 58, "L2", 14, bold=True)
        figure.text(x, 212, "shared", 14, bold=True)
        figure.text(x, 230, "memory", 14, bold=True)
        for block in range(2):
            left = x + 84 + 170 * block
            figure.box(left, 44, 44, 34, "a", f"a{block}", 14, 22, edge="ink")
            figure.box(left + 60, 44, 44, 34, "b", f"b{block}" if cluster else "b", 14, 22, edge="ink")
            figure.rect(left - 6, 190, 150, 70, "f", "ink")
            figure.box(left, 200, 44, 34, "a", f"a{block}", 14, 22, edge="ink")
            for half in range(2):
                figure.box(left + 54 + 42 * half, 200, 42, 34, "b", f"b{half}", 14, 22, edge="ink")
            figure.text(left + 69, 253, f"block {block}", 13, "middle")
        for block in range(2):  # above the boxes
            left = x + 84 + 170 * block
            figure.line(left + 22, 80, left + 22, 196, arrow=True)
            if not cluster:
                figure.line(left + 82, 80, left + 82, 196, arrow=True)
                continue
            for other in range(2):
                to = x + 84 + 170 * other + 75 + 42 * block
                figure.line(left + 82, 80, to, 196, "ink", 1.2, arrow=True)
    figure.text(20, 300, "Both read all 256 columns of b.", 14)
    figure.text(470, 300, "Each asks for half of b. The TMA writes it to both.", 14)
    return figure.svg()


def tile_orders() -> str:
    """The 132 tiles of 128 x 256 that are made at a time, of 64 x 32, in both orders; the first rows of c."""
    shown, across, at_work, side = 18, 32, 132, 12  # rows
    below = shown * side + 92
    figure = Figure(900, 2 * below, "Which tiles of c are made at the same time")
    orders = {
        "Row by row": lambda i: (i // across, i % across),
        "In groups of 16 rows": lambda i: (i // (16 * across) * 16 + i % 16, i % (16 * across) // 16),
    }
    for y, (words, place) in zip((0, below), orders.items(), strict=True):
        tiles = [place(i) for i in range(at_work)]
        rows, columns = ({tile[axis] for tile in tiles} for axis in range(2))
        numbers = len(rows) * 128 + len(columns) * 256
        figure.text(20, y + 24, f"{words}: {numbers:,} numbers of a and b at a time", 16, bold=True)
        figure.rect(60, y + 54, across * side * 2, shown * side, "f")
        for row, column in tiles:
            figure.rect(60 + column * side * 2, y + 54 + row * side, side * 2 - 1, side - 1, "c")
        for row in rows:
            figure.rect(46, y + 54 + row * side, 8, side - 1, "a")
        for column in columns:
            figure.rect(60 + column * side * 2, y + 40, side * 2 - 1, 8, "b")
        figure.text(28, y + 65, "a", 14)
        figure.text(46, y + 48, "b", 14)
        end = y + 54 + shown * side + 20
        figure.text(60, end, f"{len(rows)} x 128 rows of a, {len(columns)} x 256 columns of b", 14)
    return figure.svg()


PICTURES = {"ring_of_stages": ring_of_stages, "cluster_of_two": cluster_of_two, "tile_orders": tile_orders}
