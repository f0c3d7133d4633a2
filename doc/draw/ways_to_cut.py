"""Six ways to divide a step among three ranks: which part of the tokens and of the weights each of them has."""

from doc.draw.figure import Figure

RANKS = "abc"
WIDTH, HIGH = 300, 222  # of a panel
TOKENS, WEIGHTS = 16, 112  # where they begin in a panel
LAYERS, C, H = 3, 38, 80  # of a panel; the sides of its matrices
TOP = 56


def draw() -> str:
    figure = Figure(3 * WIDTH, 2 * HIGH + 34, "Six ways to divide a step among three ranks")
    panels = (
        ("ZeRO 1 and 2", "all weights; strips: AdamW's state", "rows", "state"),
        ("ZeRO 3", "weights come and go, layer by layer", "rows", "stored"),
        ("Tensor", "each a part of every matrix", "whole", "parts"),
        ("Pipeline", "each some layers", "whole", "layers"),
        ("Context", "each its positions of every sequence", "columns", "whole"),
        ("Expert", "tokens go to their experts", "rows", "experts"),
    )
    for i, (name, words, tokens, weights) in enumerate(panels):
        x, y = i % 3 * WIDTH, i // 3 * HIGH
        figure.text(x + TOKENS, y + 24, name, 16, bold=True)
        figure.text(x + TOKENS, y + 44, words, 14, colour="faint")
        draw_tokens(figure, x + TOKENS, y + TOP, tokens)
        for layer in range(LAYERS):
            draw_layer(figure, x + WEIGHTS, y + TOP + layer * (C + 10), weights, layer)
    y = 2 * HIGH + 10
    for r, colour in enumerate(RANKS):
        figure.key(TOKENS + 110 * r, y, colour, f"rank {r}", 14)
    figure.key(TOKENS + 330, y, "f", "every rank", 14, edge="rule")
    figure.text(TOKENS + 460, y + 12, "left: six sequences; right: the matrices of three layers", 14, colour="faint")
    return figure.svg()


def draw_tokens(figure: Figure, x: float, y: float, how: str) -> None:
    """Six sequences of a batch, one below the other."""
    for row in range(6):
        for column in range(6):
            colour = {"rows": RANKS[row // 2], "columns": RANKS[column // 2]}.get(how, "f")
            figure.rect(x + 12 * column, y + 23 * row, 11, 19, colour, "rule")


def draw_layer(figure: Figure, x: float, y: float, how: str, layer: int) -> None:
    """The two matrices of a layer: wide for (C, H), and narrow for (H, C)."""
    for matrix, (left, top, width, height) in enumerate(((x, y + 6, H, C - 12), (x + H + 20, y, C, C))):
        if how in ("whole", "state", "layers"):
            figure.rect(left, top, width, height, RANKS[layer] if how == "layers" else "f", "rule")
        for r, colour in enumerate(RANKS):
            if how == "state":
                figure.rect(left + r * width / 3, top + height + 1, width / 3, 5, colour, "rule")
            elif how == "experts":
                figure.rect(left, top + r * height / 3, width, height / 3 - 3, colour, "rule")
            elif how == "parts" and matrix == 0:
                figure.rect(left + r * width / 3, top, width / 3 - 1, height, colour, "rule")
            elif how == "parts":
                figure.rect(left, top + r * height / 3, width, height / 3 - 1, colour, "rule")
            elif how == "stored":
                figure.rect(left, top + r * height / 3, width, height / 3, colour, "rule")
