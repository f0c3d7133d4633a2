"""Online softmax: the largest logit so far, the sum of exponentials, and where it is rescaled."""

from collections.abc import Iterator
from math import exp, inf

from doc.draw.figure import Figure

LOGITS = (1.0, 3.0, 2.0, 0.5, 4.0, 3.5, 4.0, 2.5)  # the first three are the page's example
W, LEFT = 62, 96
LOGIT_AXIS, LOGIT = 206, 34  # where 0 lies, and pixels for 1
SUM_AXIS, SUM = 416, 42


def steps() -> Iterator[tuple[float, float, float, float]]:
    """For each logit: itself, the largest so far, the factor for the sum before it, and the sum."""
    largest, total = -inf, 0.0
    for x in LOGITS:
        top = max(largest, x)
        factor = exp(largest - top)
        largest, total = top, total * factor + exp(x - top)
        yield x, largest, factor, total


def draw() -> str:
    end = LEFT + len(LOGITS) * W
    figure = Figure(end + 10, 466, "Online softmax, one logit after the other")
    figure.text(LEFT, 22, "Line: the largest logit so far, m. Below, green: the new term exp(x - m);", 14)
    figure.text(LEFT, 41, "grey: the terms before it, rescaled where m rises.", 14)
    for y, name in ((LOGIT_AXIS - 70, "logit x"), (SUM_AXIS - 60, "sum of"), (SUM_AXIS - 42, "exp(x - m)")):
        figure.text(LEFT - 14, y, name, 14, "end")
    before = None
    for i, (x, largest, factor, total) in enumerate(steps()):
        left, new, high = LEFT + i * W, exp(x - largest), LOGIT_AXIS - largest * LOGIT
        figure.rect(left + 12, LOGIT_AXIS - x * LOGIT, W - 24, x * LOGIT, "a")
        figure.text(left + W / 2, LOGIT_AXIS + 17, str(x), 13, "middle")
        figure.line(left, high, left + W, high, width=3)
        if before not in (None, high):
            figure.line(left, before, left, high, width=3)
        before = high
        figure.rect(left + 12, SUM_AXIS - total * SUM, W - 24, new * SUM, "c")
        figure.rect(left + 12, SUM_AXIS - (total - new) * SUM, W - 24, (total - new) * SUM, "f")
        figure.text(left + W / 2, SUM_AXIS + 17, f"{total:.3f}", 13, "middle")
        if factor < 1:
            figure.text(left + W / 2, SUM_AXIS + 38, f"× {factor:.3f}", 13, "middle", bold=True)
    figure.text(LEFT - 14, SUM_AXIS + 17, "sum", 13, "end")
    figure.text(LEFT - 14, SUM_AXIS + 38, "rescaled", 13, "end", bold=True)
    for axis in (LOGIT_AXIS, SUM_AXIS):
        figure.line(LEFT - 6, axis, end, axis, "faint")
    return figure.svg()
