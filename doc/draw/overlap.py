"""Eight layers' gradients are summed while backward goes on, in 1, 4, 8 and 32 buckets: page 15's tiny example."""

from doc.draw.figure import Figure

LAYERS, MB, RATE, LATENCY = 8, 24, 40, 0.2  # MB of each layer; MB a millisecond; milliseconds
LEFT, SCALE, ROW = 120, 52, 44


def sums(count: int) -> list[tuple[float, float]]:
    """When the sum of each of `count` buckets begins and ends, in milliseconds. A layer's backward takes one."""
    found, free = [], 0.0
    for i in range(count):
        start = max(free, (i + 1) * LAYERS / count)
        free = start + LATENCY + LAYERS * MB / count / RATE
        found.append((start, free))
    return found


def draw() -> str:
    figure = Figure(880, 320, "Sums of gradients beside backward, in buckets of four sizes")
    figure.text(8, 45, "backward", 15, bold=True)
    for i in range(LAYERS):
        figure.rect(LEFT + i * SCALE, 26, SCALE - 2, 30, "b")
        figure.text(LEFT + (i + 0.5) * SCALE, 46, f"layer {LAYERS - 1 - i}", 13, "middle")
    for row, count in enumerate((1, 4, 8, 32), 1):
        y, found = 34 + row * ROW, sums(count)
        figure.text(8, y + 20, f"{count} bucket{'s' * (count > 1)}", 15, bold=True)
        for start, end in found:
            x, width = LEFT + start * SCALE, (end - start) * SCALE
            figure.rect(x, y, LATENCY * SCALE, 30, "f", "rule")
            figure.rect(x + LATENCY * SCALE, y, width - LATENCY * SCALE - 1, 30, "a")
        figure.text(LEFT + found[-1][1] * SCALE + 8, y + 20, f"{found[-1][1]:.4g} ms", 15)
    bottom = 26 + 5 * ROW + 14
    figure.line(LEFT + LAYERS * SCALE - 1, 18, LEFT + LAYERS * SCALE - 1, bottom, "ink", 1.5, dashed=True)
    for ms in range(0, 14, 2):
        figure.line(LEFT + ms * SCALE, bottom, LEFT + ms * SCALE, bottom + 6, "ink")
        figure.text(LEFT + ms * SCALE, bottom + 22, f"{ms}", 13, "middle", "faint")
    figure.line(LEFT, bottom, LEFT + 13 * SCALE, bottom)
    for x, words, colour in ((120, "latency", "f"), (250, "numbers on the link", "a"), (470, "backward", "b")):
        figure.key(x, bottom + 34, colour, words, edge="rule")
    return figure.svg()
