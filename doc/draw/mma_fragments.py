"""Which lane of a warp holds which elements of a tensor-core product's operands and result (m16n8k16, in bf16).

A field of A is two neighbouring columns, and a field of B two neighbouring rows: one register."""

from collections.abc import Callable

from doc.draw.figure import Figure

W, H = 38, 28
LEFT, RIGHT, TOP, BOTTOM = 26, 388, 48, 322  # A lies left below, B right above, and their product where both meet
MARKED = 13
COLOURS = "abcd"  # by lane % 4


def of_a(row: int, column: int) -> tuple[int, str]:
    return row % 8 * 4 + column % 4, f"a{row // 8 + column // 4 * 2}"


def of_b(row: int, column: int) -> tuple[int, str]:
    return column * 4 + row % 4, f"b{row // 4}"


def of_result(row: int, column: int) -> tuple[int, str]:
    return row % 8 * 4 + column // 2, f"c{row // 8 * 2 + column % 2}"


def numbered(i: int, pairs: bool) -> str:
    return f"{2 * i},{2 * i + 1}" if pairs else str(i)


def matrix(
    figure: Figure, x0: int, y0: int, rows: int, holder: Callable, title: str, pairs: tuple[bool, bool] = (False, False)
) -> None:
    """A matrix of 8 fields per row; `holder` says which lane holds a field, and in which of its registers. pairs:
    whether a field is two rows, or two columns."""
    figure.text(x0 + 4 * W, y0 - 26, title, 15, "middle", bold=True)
    for column in range(8):
        figure.text(x0 + column * W + W / 2, y0 - 7, numbered(column, pairs[1]), 11, "middle", "faint")
    marked = []
    for row in range(rows):
        figure.text(x0 - 6, y0 + row * H + 18, numbered(row, pairs[0]), 11, "end", "faint")
        for column in range(8):
            lane, register = holder(row, column)
            x, y = x0 + column * W, y0 + row * H
            figure.box(x, y, W, H, COLOURS[lane % 4], str(lane), 13, 13, edge="paper")
            figure.text(x + W / 2, y + 24, register, 10, "middle")
            if lane == MARKED:
                marked.append((x, y))
    for x, y in marked:
        for edge in ((x, y, x + W, y), (x + W, y, x + W, y + H), (x + W, y + H, x, y + H), (x, y + H, x, y)):
            figure.line(*edge, width=2.5)


def draw() -> str:
    figure = Figure(RIGHT + 8 * W + 8, BOTTOM + 16 * H + 8, "The operands of a tensor-core product among the lanes")
    matrix(figure, LEFT, BOTTOM, 16, of_a, "A (16, 16)", (False, True))
    matrix(figure, RIGHT, TOP, 8, of_b, "B (16, 8)", (True, False))
    matrix(figure, RIGHT, BOTTOM, 16, of_result, "A B + C, the result (16, 8)")
    x, y = LEFT, TOP + 14
    figure.text(x, y, "number: the lane", 15)
    figure.text(x, y + 22, "below it: its register; of A and B", 15)
    figure.text(x, y + 44, "it has the two numbers of the field", 15)
    figure.text(x, y + 78, "colour: t = lane % 4", 15)
    for t, colour in enumerate(COLOURS):
        figure.rect(x + 60 * t, y + 88, 24, 20, colour)
        figure.text(x + 60 * t + 32, y + 103, str(t), 15)
    figure.text(x, y + 136, "row of A and of the result,", 15)
    figure.text(x, y + 156, "column of B: g = lane / 4", 15)
    figure.text(x, y + 188, f"outlined: lane {MARKED}, g = {MARKED // 4}, t = {MARKED % 4}", 15)
    return figure.svg()
