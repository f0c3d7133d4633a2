"""What layernorm's backward pass reads, adds up along rows and down columns, and writes."""

from doc.draw.figure import Figure


def box(figure: Figure, x: float, y: float, w: float, words: str, shape: str, colour: str) -> None:
    figure.box(x, y, w, 46, colour, words, 15, 20, bold=True)
    figure.text(x + w / 2, y + 38, shape, 13, "middle")


def draw() -> str:
    figure = Figure(884, 556, "Layernorm backward: what is read, summed and written")
    figure.text(10, 20, "from memory", 14, colour="faint")
    box(figure, 10, 30, 150, "dout", "(N, C)", "a")
    box(figure, 180, 30, 110, "weight", "(C)", "a")
    box(figure, 330, 30, 150, "x", "(N, C)", "a")
    box(figure, 500, 30, 140, "mean, rstd", "(N)", "a")
    box(figure, 690, 30, 184, "dresidual", "(N, C)", "a")

    figure.text(630, 118, "first each", 14, bold=True)
    figure.text(630, 136, "warp takes a row", 14, bold=True)
    box(figure, 60, 130, 190, "g = dout · weight", "of a row (C)", "f")
    box(figure, 390, 130, 220, "n = (x - mean) · rstd", "of a row (C)", "f")
    box(figure, 60, 206, 150, "mean(g)", "one number", "b")
    box(figure, 300, 206, 170, "mean(g · n)", "one number", "b")
    figure.text(484, 226, "each by", 14, colour="faint")
    figure.text(484, 244, "a butterfly", 14, colour="faint")
    for x1, y1, x2, y2 in (
        (85, 78, 120, 126), (235, 78, 200, 126), (405, 78, 460, 126), (570, 78, 545, 126),
        (130, 178, 130, 202), (220, 178, 330, 202), (470, 178, 420, 202),
    ):  # fmt: skip
        figure.line(x1, y1, x2, y2, arrow=True)

    figure.box(10, 278, 640, 34, "e", "shared memory: dout, n, rstd and the two means of the block's rows", 14, 22)
    for x, y in (135, 254), (385, 254), (600, 178):
        figure.line(x, y, x, 274, arrow=True)
    figure.text(30, 268, "dout", 13, colour="faint")
    figure.line(20, 78, 20, 274, arrow=True)

    figure.text(10, 340, "then, after a barrier, each thread walks down columns of these rows", 14, bold=True)
    box(figure, 10, 362, 590, "dx = rstd · (dout · weight - mean(g) - n · mean(g · n))", "(N, C)", "f")
    box(figure, 690, 362, 184, "dresidual += dx", "(N, C), to memory", "c")
    figure.line(600, 385, 686, 385, arrow=True)
    figure.line(782, 78, 782, 358, arrow=True)
    figure.line(585, 314, 585, 358, arrow=True)
    box(figure, 10, 446, 270, "Σ dout · n", "down the columns, for dweight (C)", "d")
    box(figure, 300, 446, 270, "Σ dout", "down the columns, for dbias (C)", "d")
    box(figure, 590, 446, 284, "Σ dresidual", "of the projection in front, for dbias2 (C)", "d")
    figure.line(782, 410, 782, 442, arrow=True)
    figure.text(10, 524, "Each block writes its three sums as partial sums. A second kernel adds them up.", 14)
    figure.text(10, 544, "All three sums take numbers that pass by in any case: they cost no further reading.", 14)
    return figure.svg()
