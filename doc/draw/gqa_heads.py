"""Grouped-query attention: which query heads share keys and values, how they lie in memory, and as one product."""

from doc.draw.figure import Figure

NH, NKV = 8, 2
G = NH // NKV
W, H, LEFT = 58, 34, 92
COLOURS = "ab"  # of the groups


def draw() -> str:
    figure = Figure(LEFT + NH * W + 76, 536, "Grouped-query attention")

    def head(x: float, y: float, label: str, group: int, width: float = W - 8) -> None:
        figure.box(x, y, width, H, COLOURS[group], label, 14, 22)

    figure.text(LEFT, 24, f"NH = {NH} query heads, NKV = {NKV} heads of keys and values: G = {G}", 15)
    for y, name in ((62, "queries"), (162, "keys"), (206, "values")):
        figure.text(LEFT - 12, y, name, 15, "end")
    for h in range(NH):
        group = h // G
        figure.line(LEFT + h * W + W / 2 - 4, 40 + H, LEFT + (group + 0.5) * G * W - 4, 140, "faint", 1.5)
        head(LEFT + h * W, 40, f"q{h}", group)
    for j in range(NKV):
        for y, name in ((140, "k"), (184, "v")):
            head(LEFT + (j + 0.5) * G * W - W / 2, y, f"{name}{j}", j)

    figure.text(LEFT, 262, "A position's row of qkv:", 15)
    row = [(f"q{h}", h // G) for h in range(NH)] + [(f"{name}{j}", j) for name in "kv" for j in range(NKV)]
    for i, (name, group) in enumerate(row):
        head(LEFT + i * NH * W / len(row), 276, name, group, NH * W / len(row) - 2)

    figure.text(LEFT, 350, "A product takes a group's queries for one head:", 15)
    for j in range(NKV):
        x = LEFT + j * 244
        for h in range(G):
            head(x, 366 + h * (H + 2), f"q{j * G + h}", j, 70)
        figure.text(x + 78, 444, "×", 18)
        figure.box(x + 98, 412, 118, 50, COLOURS[j], f"k{j} transposed", 13, 30)
        figure.text(x + 35, 526, "(G T, HS)", 13, "middle", "faint")
        figure.text(x + 157, 482, "(HS, T)", 13, "middle", "faint")
    return figure.svg()
