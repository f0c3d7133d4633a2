"""Which 16 bytes a thread of the vectorised product moves: from device memory to the tiles, and from these."""

from doc.draw.rung import account, cells, rung_figure

SIZE, K = 18, 5  # pixels of a number; the step of k that is shown


def draw() -> str:
    shows = "Vectors of the vectorised product: of a in memory, of the tiles, and of a thread"
    figure = rung_figure("matmul", "vectorised_kernel", 880, 520, shows)
    figure.text(20, 84, "a in device memory", 14)
    cells(figure, 20, 94, 6, 8, SIZE, {(2, k): "e" for k in range(4)})
    figure.text(20, 222, "16 bytes: 4 of a row", 12)
    figure.line(170, 139, 222, 139, arrow=True)
    figure.text(230, 84, "tile of a in shared memory, transposed", 14)
    marks = {(k, 2): "e" for k in range(4)} | {(K, y): "a" for y in range(8, 16)}
    cells(figure, 230, 94, 8, 16, SIZE, marks)
    figure.text(20, 272, "b in device memory", 14)
    cells(figure, 20, 282, 6, 8, SIZE, {(K, x): "e" for x in range(4)})
    figure.text(20, 410, "16 bytes: 4 of a row", 12)
    figure.line(170, 327, 222, 327, arrow=True)
    figure.text(230, 272, "tile of b, as it lies", 14)
    marks = {(K, x): "e" for x in range(4)} | {(K, x): "b" for x in range(8, 16)}
    cells(figure, 230, 282, 8, 16, SIZE, marks)
    for top in (94, 282):  # a thread's two vectors
        for at in (8, 12):
            figure.rect(230 + at * SIZE, top + K * SIZE, 4 * SIZE, SIZE, "ab"[top > 94], "ink")
    figure.text(230, 452, "Red: what one thread copies. Blue, orange:", 13)
    figure.text(230, 471, "what one thread loads for a step of k, four", 13)
    figure.text(230, 490, "loads of 16 bytes for 64 multiplications.", 13)
    account(
        figure, 570, 100, 38,
        "A thread copies four numbers of each tile by one load of 16 bytes. From the tiles it loads by 16 bytes, "
        "too.",
        "64 sums, and the two vectors of a and two of b of one step of k.",
        "A quarter as many loads to wait for. But lanes' columns are 8 apart as before: two lanes meet in a bank.",
    )  # fmt: skip
    return figure.svg()
