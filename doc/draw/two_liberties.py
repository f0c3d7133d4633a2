"""How flash attention names the columns of a product, so that lanes load wide, or have what they need already."""

from doc.draw.figure import Figure

W, H, LEFT = 60, 34, 132
COLOURS = "abcd"  # of t = lane % 4


def draw() -> str:
    figure = Figure(LEFT + 8 * W + 6, 532, "Two choices of order in flash attention's products")

    def box(x: float, y: float, label: object, t: int, width: float = W - 6, below: str = "") -> None:
        figure.box(x, y, width, H, COLOURS[t], str(label), 14, 22)
        figure.text(x + width / 2, y + H + 14, below, 11, "middle", "faint")

    def side(y: float, words: str, size: int = 14) -> None:
        figure.text(LEFT - 14, y, words, size, "end")

    figure.text(12, 26, "Scores: of 16 channels a lane takes four neighbours, one 16-byte load", 15, bold=True)
    side(64, "channel")
    for channel in range(16):
        box(LEFT + channel * 30, 42, channel, channel // 4, 27)
    for product in range(2):
        y = 106 + product * 62
        side(y + 22, f"product {product + 1}")
        side(y + H + 14, "column", 11)
        for column in range(8):
            t, second = column % 4, column // 4
            box(LEFT + column * W, y, 4 * t + 2 * product + second, t, below="t + 4" if second else "t")

    figure.text(12, 266, "Sums: the scores' result is the next product's operand, as it is", 15, bold=True)
    side(304, "result, row g")
    side(332, "key", 12)
    side(408, "operand B,")
    side(426, "column g")
    side(450, "key", 12)
    for key in range(8):
        t, i = key // 2, key % 2
        row = t + 4 * i
        box(LEFT + key * W, 282, f"c{i}", t)
        figure.text(LEFT + key * W + W / 2 - 3, 332, str(key), 13, "middle")
        figure.line(LEFT + key * W + W / 2 - 3, 338, LEFT + row * W + W / 2 - 3, 386, "faint", 1.5)
        box(LEFT + row * W, 390, f"b{i} = c{i}", t)
        figure.text(LEFT + row * W + W / 2 - 3, 450, str(key), 13, "middle")
        figure.text(LEFT + row * W + W / 2 - 3, 468, f"row {row}", 11, "middle", "faint")
    side(508, "lane 4g + t")
    for t in range(4):
        box(LEFT + t * 90, 486, f"t = {t}", t, 80)
    return figure.svg()
