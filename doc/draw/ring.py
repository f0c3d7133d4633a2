"""A ring of three ranks adds up its gradients: the pieces of each rank before and after each of the four passes."""

from doc.draw.figure import Figure

N = 3
CELL, ROW = 104, 92
LEFT = 100
COLOURS = "abc"


def passes() -> list[tuple[list[list[frozenset]], list[int]]]:
    """Before each pass, and after the last: whose numbers each rank's pieces hold, and which piece each rank sends."""
    holds = [[frozenset({r}) for _ in range(N)] for r in range(N)]
    found = []
    for step in range(2 * (N - 1)):
        scatter = step < N - 1
        sending = [(r - step) % N if scatter else (r + 1 - (step - N + 1)) % N for r in range(N)]
        found.append((holds, sending))
        after = [list(rank) for rank in holds]
        for r in range(N):
            to, piece = (r + 1) % N, sending[r]
            after[to][piece] = holds[r][piece] | (holds[to][piece] if scatter else frozenset())
        holds = after
    return [*found, (holds, [])]


def draw() -> str:
    states = passes()
    figure = Figure(640, 50 + ROW * len(states), "All-reduce in a ring of three ranks")
    for r in range(N):
        figure.text(LEFT + r * 180 + 80, 24, f"rank {r}", 16, "middle", bold=True)
    for i, (holds, sending) in enumerate(states):
        y = 44 + i * ROW
        name = "at first" if i == 0 else f"pass {i}"
        figure.text(8, y + 20, name, 15)
        if i:
            figure.text(8, y + 37, "adding" if i < N else "copying", 13, colour="faint")
        for r in range(N):
            for piece in range(N):
                x, whose = LEFT + r * 180 + piece * 54, sorted(holds[r][piece])
                whole = len(whose) == N
                figure.rect(x, y, 50, 38, COLOURS[piece] if whole else "f", "ink" if whole else "rule")
                figure.text(x + 25, y + 24, "+".join(map(str, whose)), 14, "middle", bold=whole)
            if sending:
                to, piece = (r + 1) % N, sending[r]
                x1, x2 = (LEFT + rank * 180 + piece * 54 + 25 for rank in (r, to))
                figure.line(x1, y + 40, x2 + (8 if x2 < x1 else -8), y + ROW - 3, "ink", 1.5, arrow=True)
    return figure.svg()
