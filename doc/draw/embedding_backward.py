"""The embedding's gradient: positions sorted by token, so that each token's rows have one owner."""

from doc.draw.figure import Figure

TOKENS = (7, 2, 7, 5, 7, 2)  # the page's example
COLOURS = {2: "a", 5: "c", 7: "b"}
W, H, LEFT = 74, 30, 84


def draw() -> str:
    figure = Figure(LEFT + len(TOKENS) * W + 4, 346, "The gradient of the embedding, sorted by token")
    order = sorted(range(len(TOKENS)), key=lambda position: TOKENS[position])
    begins = [place == 0 or TOKENS[n] != TOKENS[order[place - 1]] for place, n in enumerate(order)]

    def middle(column: int) -> float:
        return LEFT + column * W + W / 2 - 4

    def cell(column: int, y: float, label: str, token: int, columns: int = 1) -> None:
        figure.box(LEFT + column * W, y, columns * W - 8, H, COLOURS[token], label, 13, 20)

    for y, name in ((54, "dout"), (90, "token"), (180, "order"), (216, "count"), (252, "block"), (326, "dwte")):
        figure.text(LEFT - 12, y, name, 14, "end")
    for n, token in enumerate(TOKENS):
        figure.text(middle(n), 24, f"position {n}", 12, "middle", "faint")
        cell(n, 34, f"row {n}", token)
        figure.text(middle(n), 90, str(token), 14, "middle")
    for place, n in enumerate(order):
        token, count = TOKENS[n], TOKENS.count(TOKENS[n])
        figure.line(middle(n), 100, middle(place), 158, "faint", 1.5)
        cell(place, 160, str(n), token)
        if begins[place]:
            figure.text(middle(place), 216, str(count), 14, "middle")
            figure.text(middle(place), 252, str(place), 14, "middle")
            rows = " + ".join(str(position) for position in order[place : place + count])
            for column in range(place, place + count):
                figure.line(middle(column), 262, LEFT + (place + count / 2) * W - 4, 304, "faint", 1.5)
            cell(place, 306, f"row {token} += {rows}" if count > 1 else f"{token} += {rows}", token, count)
        else:
            figure.text(middle(place), 216, "0", 14, "middle", "faint")
            figure.text(middle(place), 252, f"{place}: returns", 12, "middle", "faint")
    return figure.svg()
