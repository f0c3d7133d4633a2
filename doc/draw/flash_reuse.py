"""How many products of the tensor core one load of keys serves: with 16 queries a warp, and with 32 and wide loads."""

from doc.draw.figure import Figure
from doc.draw.rung import heading

TOP = 86


def draw() -> str:
    figure = Figure(880, 410, "Loads and products: 16 queries a warp, and 32 with wide loads")
    heading(figure, "flash_attention", "flash_attention_forward")
    for x, title, groups, loads, says in (
        (20, "16 queries a warp, loads of 4 bytes", 1, 4, "4 loads for 2 products"),
        (460, "32 queries a warp, loads of 16 bytes", 2, 1, "1 load for 4 products"),
    ):
        figure.text(x, TOP, title, 14, bold=True)
        figure.text(x, TOP + 30, "a lane's part of 8 keys, 16 channels", 13, colour="faint")
        for i in range(4):
            figure.rect(x + 62 * i, TOP + 40, 58 if loads == 4 else 62, 40, "a", "ink")
        figure.text(x + 262, TOP + 65, f"four numbers, {loads} load{'s' * (loads > 1)}", 13)
        for product in range(2):
            for group in range(groups):
                left, top = x + 62 + 124 * product - 46, TOP + 126 + 62 * group
                figure.line(left + 46, top - 42 if group == 0 else top - 16, left + 46, top - 4, "faint", arrow=True)
                figure.rect(left, top, 92, 44, "c", "ink")
                figure.text(left + 46, top + 27, f"mma {1 + product + 2 * group}", 14, "middle")
        for group in range(groups):
            figure.text(x + 262, TOP + 153 + 62 * group, f"queries {16 * group} to {16 * group + 15}", 13)
        figure.text(x, TOP + 282, says, 14)
    figure.text(20, TOP + 308, "q, p and the sums of 32 queries stay in registers: 247 of 255 are used.", 14)
    return figure.svg()
