"""Three ranks with peer access add up their gradients in two passes: each rank adds its own share."""

from doc.draw.ring import Holds, N, Sends, drawn_passes


def draw() -> str:
    one = [[frozenset({r})] * N for r in range(N)]
    to_owner: Sends = [(r, share, share) for r in range(N) for share in range(N) if r != share]
    own: Holds = [[frozenset(range(N)) if share == r else one[r][share] for share in range(N)] for r in range(N)]
    to_all: Sends = [(share, share, r) for share in range(N) for r in range(N) if r != share]
    whole: Holds = [[frozenset(range(N))] * N] * N
    states = [("", one, to_owner), ("adding", own, to_all), ("copying", whole, [])]
    return drawn_passes(states, "All-reduce by shares, of three ranks with peer access")
