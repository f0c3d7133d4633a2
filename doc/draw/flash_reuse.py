"""How many products of the tensor core one ldmatrix of keys serves: with 16 queries per warp, and with 32."""

from doc.draw.figure import Figure

TOP = 30


def draw() -> str:
    figure = Figure(880, 330, "Loads and products: 16 queries per warp, and 32")
    for x, title, groups, says in (
        (20, "16 queries per warp", 1, "one ldmatrix, four passes, for two products"),
        (460, "32 queries per warp", 2, "one ldmatrix, four passes, for four products"),
    ):
        figure.text(x, TOP, title, 15, bold=True)
        figure.text(x, TOP + 30, "16 keys, 16 channels: four matrices of 8 x 8", 13, colour="faint")
        for i in range(4):
            figure.rect(x + 62 * i, TOP + 40, 58, 40, "ab"[i // 2], "ink")
        figure.text(x + 262, TOP + 65, "one ldmatrix", 13)
        for product in range(2):
            for group in range(groups):
                left, top = x + 62 + 124 * product - 46, TOP + 126 + 62 * group
                if group:  # past the first group's box, also from the ldmatrix
                    figure.line(left + 100, TOP + 84, left + 100, top + 22, "faint")
                    figure.line(left + 100, top + 22, left + 93, top + 22, "faint", arrow=True)
                else:
                    figure.line(left + 46, top - 42, left + 46, top - 4, "faint", arrow=True)
                figure.box(left, top, 92, 44, "c", f"mma {1 + product + 2 * group}", 14, 27, edge="ink")
        for group in range(groups):
            figure.text(x + 262, TOP + 153 + 62 * group, f"queries {16 * group} to {16 * group + 15}", 13)
        figure.text(x, TOP + 282, says, 14)
    return figure.svg()
