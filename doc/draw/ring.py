"""Three ranks add up their gradients: the pieces of each rank before and after each pass, in a ring, and by shares."""

from doc.draw.figure import Figure

N = 3
ROW, LEFT = 92, 100
COLOURS = "abc"

Holds = list[list[frozenset]]  # rank, piece: whose numbers are in it
Sends = list[tuple[int, int, int]]  # a rank, the piece that it sends, and the rank that gets it


def passes() -> list[tuple[str, Holds, Sends]]:
    """What each pass has done, the pieces of each rank after it, and what is sent next."""
    holds = [[frozenset({r}) for _ in range(N)] for r in range(N)]
    found, done = [], ""
    for step in range(2 * (N - 1)):
        scatter = step < N - 1
        sending = [(r - step) % N if scatter else (r + 1 - (step - N + 1)) % N for r in range(N)]
        found.append((done, holds, [(r, sending[r], (r + 1) % N) for r in range(N)]))
        after = [list(rank) for rank in holds]
        for r in range(N):
            to, piece = (r + 1) % N, sending[r]
            after[to][piece] = holds[r][piece] | (holds[to][piece] if scatter else frozenset())
        holds, done = after, "adding" if scatter else "copying"
    return [*found, (done, holds, [])]


def drawn_passes(states: list[tuple[str, Holds, Sends]], title: str) -> str:
    figure = Figure(640, 50 + ROW * len(states), title)
    for r in range(N):
        figure.text(LEFT + r * 180 + 80, 24, f"rank {r}", 16, "middle", bold=True)
    for i, (done, holds, sends) in enumerate(states):
        y = 44 + i * ROW
        figure.text(8, y + 20, f"pass {i}" if i else "at first", 15)
        if done:
            figure.text(8, y + 37, done, 13, colour="faint")
        for r in range(N):
            for piece in range(N):
                x, whose = LEFT + r * 180 + piece * 54, sorted(holds[r][piece])
                whole = len(whose) == N
                figure.rect(x, y, 50, 38, COLOURS[piece] if whole else "f", "ink" if whole else "rule")
                figure.text(x + 25, y + 24, "+".join(map(str, whose)), 14, "middle", bold=whole)
        for r, piece, to in sends:
            x1, x2 = (LEFT + rank * 180 + piece * 54 + 25 for rank in (r, to))
            figure.line(x1, y + 40, x2 + (8 if x2 < x1 else -8), y + ROW - 3, "ink", 1.5, arrow=True)
    return figure.svg()


def ring() -> str:
    return drawn_passes(passes(), "All-reduce in a ring of three ranks")


def shares() -> str:
    """With peer access two passes are enough: each rank adds its own share."""
    one = [[frozenset({r})] * N for r in range(N)]
    to_owner: Sends = [(r, share, share) for r in range(N) for share in range(N) if r != share]
    own: Holds = [[frozenset(range(N)) if share == r else one[r][share] for share in range(N)] for r in range(N)]
    to_all: Sends = [(share, share, r) for share in range(N) for r in range(N) if r != share]
    whole: Holds = [[frozenset(range(N))] * N] * N
    states = [("", one, to_owner), ("adding", own, to_all), ("copying", whole, [])]
    return drawn_passes(states, "All-reduce by shares, of three ranks with peer access")


PICTURES = {"ring": ring, "shares": shares}
