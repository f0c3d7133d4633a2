"""What layernorm's backward pass reads, adds up along rows and down columns, and writes."""

from doc.draw.figure import Figure


def box(figure: Figure, x: float, y: float, w: float, words: str, shape: str, colour: str) -> None:
    figure.rect(x, y, w, 46, colour)
    figure.text(x + w / 2, y + 20, words, 15, "middle", bold=True)
    figure.text(x + w / 2, y + 38, shape, 13, "middle")


def draw() -> str:
    figure = Figure(884, 512, "Layernorm backward: what is read, summed and written")
    figure.text(10, 20, "from memory", 14, colour="faint")
    box(figure, 10, 30, 150, "dout", "(N, C)", "a")
    box(figure, 180, 30, 110, "weight", "(C)", "a")
    box(figure, 330, 30, 150, "x", "(N, C)", "a")
    box(figure, 500, 30, 140, "mean, rstd", "(N)", "a")
    box(figure, 700, 30, 174, "dresidual, so far", "(N, C)", "a")

    figure.text(632, 160, "dout and n of a row", 14, colour="faint")
    figure.text(632, 178, "in shared memory", 14, colour="faint")
    box(figure, 100, 140, 190, "g = dout · weight", "(N, C)", "f")
    box(figure, 400, 140, 220, "n = (x - mean) · rstd", "(N, C)", "f")
    figure.line(85, 78, 160, 136, arrow=True)
    figure.line(235, 78, 215, 136, arrow=True)
    figure.line(405, 78, 470, 136, arrow=True)
    figure.line(570, 78, 545, 136, arrow=True)

    figure.text(556, 280, "along a row: a warp's butterfly", 14, colour="faint")
    box(figure, 100, 252, 150, "mean(g)", "(N)", "b")
    box(figure, 320, 252, 170, "mean(g · n)", "(N)", "b")
    figure.line(180, 188, 175, 248, arrow=True)
    figure.line(250, 188, 370, 248, arrow=True)
    figure.line(480, 188, 430, 248, arrow=True)

    box(figure, 180, 352, 400, "dx = rstd · (g - mean(g) - n · mean(g · n))", "(N, C)", "f")
    figure.line(175, 300, 250, 348, arrow=True)
    figure.line(405, 300, 390, 348, arrow=True)
    figure.line(540, 188, 520, 348, "faint", arrow=True)
    figure.line(120, 188, 30, 240, "faint")
    figure.line(30, 240, 30, 375, "faint")
    figure.line(30, 375, 176, 375, "faint", arrow=True)
    figure.text(38, 368, "g", 13, colour="faint")

    box(figure, 690, 352, 184, "new dresidual = + dx", "(N, C), written", "c")
    figure.line(580, 375, 686, 375, arrow=True)
    figure.line(787, 78, 787, 348, arrow=True)

    figure.text(10, 444, "down the columns:", 14, colour="faint")
    figure.text(10, 462, "partial sums of blocks", 14, colour="faint")
    box(figure, 190, 436, 200, "dweight += Σ dout · n", "(C)", "d")
    box(figure, 410, 436, 170, "dbias += Σ dout", "(C)", "d")
    box(figure, 600, 436, 274, "dbias2 += Σ new dresidual", "(C), of the projection in front", "d")
    figure.line(787, 400, 787, 432, arrow=True)
    figure.text(190, 502, "All three sums take numbers that pass by in any case: they cost no further reading.", 14)
    return figure.svg()
