"""The three products of a linear layer: how each operand lies in memory, and along what is summed."""

from doc.draw.figure import Figure

UNIT = {"N": 108, "C": 78, "OC": 48}  # pixels
TOP, STEP = 206, 200


def matrix(
    figure: Figure, x: float, y: float, name: str, rows: str, columns: str, across: bool, summed: str
) -> float:  # fmt: skip
    """Stripes run along neighbours in memory, across or down. Returns where the matrix ends."""
    w, h = UNIT[columns], UNIT[rows]
    along = (columns if across else rows) == summed
    figure.rect(x, y, w, h, "c" if along else "e" if summed else "f")
    for at in range(8, h if across else w, 12):
        ends = (x + 4, y + at, x + w - 4, y + at) if across else (x + at, y + 4, x + at, y + h - 4)
        figure.line(*ends, "ink", 1.2)
    figure.text(x + w / 2, y - 8, columns, 13, "middle", bold=columns == summed)
    figure.text(x - 5, y + h / 2 + 5, rows, 13, "end", bold=rows == summed)
    figure.text(x + w / 2, y + h + 17, name, 14, "middle")
    return x + w


def equation(figure: Figure, y: float, title: str, summed: str, operands: tuple, result: tuple, x: float) -> None:
    figure.text(x, y - 32, title, 15, bold=True)
    x += 30
    for i, operand in enumerate((*operands, result)):
        end = matrix(figure, x, y, *operand, summed if i < 2 else "")
        if i < 2:
            figure.text(end + 14, y + 40, "×="[i], 24, "middle")
        x = end + 54


def strip(figure: Figure, x: float, y: float, order: list[str]) -> None:
    for i, word in enumerate(order):
        figure.box(x + 34 * i, y, 32, 28, "ab"[int(word[0]) - 1], word, 14, 19)


def draw() -> str:
    figure = Figure(884, TOP + 3 * STEP - 28, "Row- and column-major, and the three products of a linear layer")
    elements = [[f"{r}{c}" for c in (1, 2, 3)] for r in (1, 2)]
    figure.text(10, 22, "A matrix (2, 3)", 15, bold=True)
    for r, words in enumerate(elements):
        strip(figure, 10, 34 + 30 * r, words)
    figure.text(170, 22, "by rows in memory: C, NumPy", 15, bold=True)
    strip(figure, 170, 34, sum(elements, []))
    figure.text(520, 22, "by columns: Fortran, cuBLAS", 15, bold=True)
    strip(figure, 520, 34, [row[c] for c in range(3) for row in elements])
    figure.text(170, 86, "The first strip, read by columns with 3 numbers each, is the transposed matrix.", 14)

    says = "Stripes join neighbours in memory. Bold: the dimension that is summed over. Green: the stripes run along"
    figure.text(10, 128, says, 14)
    figure.text(10, 147, "it; red: across it. Beside the lower two, what a transposition makes of them.", 14)
    dout, inp, weight = ("dout", "N", "OC", True), ("inp", "N", "C", True), ("weight", "OC", "C", True)
    equation(figure, TOP, "out = inp weightᵀ", "C", (inp, ("weight", "C", "OC", False)), ("out", "N", "OC", True), 10)
    dinp = ("dinp", "N", "C", True)
    equation(figure, TOP + STEP, "dinp = dout weight", "OC", (dout, weight), dinp, 10)
    equation(figure, TOP + STEP, "… with weight_T (C, OC)", "OC", (dout, ("weight_T", "OC", "C", False)), dinp, 456)
    dout_T, dweight = ("dout", "OC", "N", False), ("dweight", "OC", "C", True)
    equation(figure, TOP + 2 * STEP, "dweight = doutᵀ inp", "N", (dout_T, inp), dweight, 10)
    equation(figure, TOP + 2 * STEP, "… with inp_T (C, N)", "N", (dout_T, ("inp_T", "N", "C", False)), dweight, 456)
    return figure.svg()
