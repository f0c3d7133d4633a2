"""From (B, T, 3, NH, HS), as the product before attention writes it, to (B, NH, T, HS), a matrix for each head."""

from doc.draw.figure import Figure

B, T, NH = 2, 3, 2
W, H, LEFT, TOP = 76, 30, 96, 62
COLOURS = "abcd"  # of the B * NH matrices of queries
SMALL = 40


def draw() -> str:
    bottom = TOP + B * T * H + 96
    gap = 12
    width = LEFT + B * NH * (T * SMALL + gap) + 8
    figure = Figure(width, bottom + H + 92, "The heads' queries before and after the permutation")
    figure.text(12, 24, "qkv (B, T, 3, NH, HS): a row for each position; a box is HS numbers", 15, bold=True)
    names = [f"{name}, head {h}" for name in "qkv" for h in range(NH)]
    for i, name in enumerate(names):
        figure.text(LEFT + (i + 0.5) * W - 2, TOP - 12, name, 13, "middle", "faint")
    figure.text(12, bottom - 52, "q (B, NH, T, HS): in memory each head's matrix is contiguous", 15, bold=True)

    def strip(b: int, h: int, t: int) -> float:
        """Where in the strip position t of a head begins."""
        return LEFT + (b * NH + h) * (T * SMALL + gap) + t * SMALL

    for b in range(B):
        for t in range(T):
            y = TOP + (b * T + t) * H
            figure.text(LEFT - 12, y + 19, f"b {b}, t {t}", 13, "end")
            for i in range(3 * NH):
                figure.rect(LEFT + i * W, y, W - 4, H - 4, COLOURS[b * NH + i] if i < NH else "f")
                if i < NH:
                    figure.text(LEFT + i * W + W / 2 - 2, y + 18, f"t = {t}", 13, "middle")
        for h in range(NH):
            for t in range(T):
                figure.box(strip(b, h, t), bottom, SMALL - 2, H - 4, COLOURS[b * NH + h], str(t), 13, 18)
            middle = strip(b, h, 0) + T * SMALL / 2
            figure.text(middle, bottom - 12, f"b {b}, head {h}", 13, "middle", "faint")
    figure.text(LEFT - 12, bottom + 18, "t", 13, "end")
    figure.lines(12, bottom + H + 26, 20, (
        "In qkv one head's rows lie 3C numbers apart. From matrix to matrix there are two strides:",
        "HS from head to head, and T · 3C from sequence to sequence. In q there is one, T · HS.",
        "Keys and values are arrays of the same kind, k and v.",
    ), 13)  # fmt: skip
    return figure.svg()
