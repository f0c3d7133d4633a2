"""What a thread loads at one step of k, and how many multiplications that serves, before a rung and in it."""

from doc.draw.rung import Operands, account, rung_figure

SIDE, SCALE = 12, 17
SHAPES = {"shared_kernel": (1, 1), "column_of_8_kernel": (8, 1), "square_of_8_kernel": (8, 8)}


def two_rungs(kernel: str, **says: str) -> str:
    """What a thread makes of c, in the rung before on the left and in this one on the right."""
    shows = f"What a thread of {kernel} loads at one step of k, and of the rung before"
    figure = rung_figure("matmul", kernel, 880, 390, shows)
    names = list(SHAPES)
    for x, name in (16, names[names.index(kernel) - 1]), (306, kernel):
        rows, columns = SHAPES[name]
        figure.text(x, 80, "this rung" if name == kernel else "the rung before", 14, bold=name == kernel)
        operands = Operands(figure, x + 20, 94, SIDE, SIDE, 1, SCALE)
        for operand, height, width in (("a", rows, 1), ("b", 1, columns), ("c", rows, columns)):
            for i in range(height):
                for j in range(width):
                    row, column = (i + 2 if operand != "b" else 0), (j + 2 if operand != "a" else 0)
                    operands.mark(operand, row, column, 1, 1, operand, "ink")
        loads, products = rows + columns, rows * columns
        figure.text(x, 358, f"{loads} loads, {products} multiplication{'s' * (products > 1)}:", 14)
        figure.text(x, 378, f"{loads / products:.3g} loads for each", 14)
    account(figure, 596, 100, 34, **says)
    return figure.svg()


def column() -> str:
    return two_rungs(
        "column_of_8_kernel",
        moves="One number of b and eight of a, from shared memory, for a thread.",
        stays="Eight sums, and the number of b for its eight multiplications.",
        waits="A multiplication waits for little more than one load: 9 for 8.",
    )


def square() -> str:
    return two_rungs(
        "square_of_8_kernel",
        moves="Eight numbers of a and eight of b, by 4 bytes, for 64 multiplications.",
        stays="64 sums, eight numbers of a and eight of b.",
        waits="Lanes' columns are 8 apart, so four lanes meet in each bank: a load of b takes four passes.",
    )


PICTURES = {"matmul_column": column, "matmul_square": square}
