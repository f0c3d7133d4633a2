"""Flash attention forward on Hopper in time: the producer, two of the warpgroups that compute, and the tensor cores."""

from doc.draw.figure import Figure

X, HEIGHT = 132, 34
SCORES, SOFTMAX, SUM = 56, 96, 76  # how long each takes, in pixels
STEP = SCORES + SOFTMAX
LATER = STEP // 2  # the first warpgroup runs this far behind the second


def draw() -> str:
    figure = Figure(890, 352, "Roles and times of warpgroups in flash attention on Hopper")
    rows = {"producer": 34, "tensor cores": 84, "warpgroup 0": 134, "warpgroup 1": 184}
    for words, y in rows.items():
        figure.text(12, y + 22, words, 14)

    def piece(x: float, row: str, width: float, colour: str, words: str, down: float = 0, high: float = HEIGHT) -> None:
        figure.rect(x, rows[row] + down, width - 2, high, colour, "paper")
        figure.text(x + width / 2 - 1, rows[row] + down + high / 2 + 4, words, 11, "middle")

    for i in range(5):
        piece(X + 130 * i, "producer", 64, "a", f"k of {4 - i}")
        piece(X + 130 * i + 65, "producer", 64, "b", f"v of {4 - i}")
    for group, first, begin, turns in (0, 3, X + 66 + LATER, 3), (1, 4, X + 66, 4):
        down = 17 * group
        for i in range(turns):
            x, tile = begin + STEP * i, first - i
            piece(x, "tensor cores", SCORES, "d", f"qk {tile}", down, 16)
            if i:
                piece(x + SCORES, "tensor cores", SUM, "c", f"pv {tile + 1}", down, 16)
            piece(x, f"warpgroup {group}", SCORES, "f", "waits")
            piece(x + SCORES, f"warpgroup {group}", SOFTMAX, "e", f"exponentials {tile}")
        figure.text(begin + STEP * turns + 10, rows[f"warpgroup {group}"] + 22, "…", 14)
        figure.text(begin + STEP * turns + 10, rows["tensor cores"] + down + 12, "…", 14)
    piece(X + 66, "warpgroup 0", LATER, "f", "skips 4")
    says = "time: the tile on the diagonal first, 4 for warpgroup 1 and 3 for warpgroup 0"
    figure.text(X, 22, says, 13, colour="faint")
    figure.lines(12, 252, 22, (
        "qk: scores of a tile. pv: p times the values of the tile before, which begins right after the scores.",
        "A warpgroup waits for its scores alone. While it computes exponentials, the tensor cores work on its pv,",
        "and on the products of the other warpgroup, whose tiles are at another place of the ring.",
        "The producer asks for a tile as soon as all warpgroups have read the tile that lies there.",
    ))  # fmt: skip
    return figure.svg()
