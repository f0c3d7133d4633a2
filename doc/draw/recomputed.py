"""How much of the activations of six layers lies in memory during a forward and a backward pass: if every layer keeps
its own, and if it keeps only its input. A layer is that of page 16: an input of C numbers per row, and 8 C in it."""

from doc.draw.figure import Figure

LAYERS, INPUT, INSIDE = 6, 1, 8
FORWARD, AGAIN, BACKWARD = 2, 1, 4  # products
LEFT, SCALE, HIGH, TOP = 144, 15, 3, 52
Column = tuple[int, int, int, str]  # products, numbers kept, numbers of the layer at hand, colour of the latter


def columns(recompute: bool) -> list[Column]:
    """What lies in memory from one moment to the next."""
    found, kept = [], 0
    for _ in range(LAYERS):
        kept += INPUT if recompute else INPUT + INSIDE
        found.append((FORWARD, kept, INSIDE if recompute else 0, "a"))
    for _ in range(LAYERS):
        if recompute:
            found.append((AGAIN, kept, INSIDE, "b"))
        found.append((BACKWARD, kept, INSIDE if recompute else 0, "c"))
        kept -= INPUT if recompute else INPUT + INSIDE
    return found


def draw() -> str:
    figure = Figure(880, 372, "Activations in memory, kept and recomputed")
    y = TOP - 48
    for recompute, name in (False, "all kept"), (True, "inputs kept"):
        x, most = LEFT, max(kept + inside for _, kept, inside, _ in columns(recompute))
        y += 48 + most * HIGH
        figure.text(8, y - 24, name, 15, bold=True)
        for numbers in (0, most):
            figure.text(LEFT - 8, y - numbers * HIGH + 5, f"{numbers} C" if numbers else "0", 13, "end", "faint")
            figure.line(LEFT - 5, y - numbers * HIGH, LEFT, y - numbers * HIGH)
        figure.line(LEFT - 1, y - most * HIGH, LEFT - 1, y)
        for products, kept, inside, colour in columns(recompute):
            width = products * SCALE
            figure.rect(x, y - kept * HIGH, width - 1, kept * HIGH, colour if not recompute else "f", "rule")
            if inside:
                figure.rect(x, y - (kept + inside) * HIGH, width - 1, inside * HIGH, colour)
            x += width
        figure.line(LEFT, y, x, y)
        figure.text(x + 8, y - 4, f"{sum(p for p, *_ in columns(recompute))} products", 14)
    y += 40
    figure.text(8, 22, "Numbers in memory for each row of x; six layers; to the right, time in products", 16, bold=True)
    legend = (
        (f"forward: {FORWARD} products", "a"), (f"forward again: {AGAIN}", "b"), (f"backward: {BACKWARD}", "c"),
        ("inputs kept", "f"),
    )  # fmt: skip
    for i, (words, colour) in enumerate(legend):
        figure.key(LEFT + 170 * i, y - 8, colour, words, edge="rule")
    return figure.svg()
