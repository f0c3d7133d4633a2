"""The causal mask: the scores of a few positions, and the weights that softmax makes of them, row by row."""

from doc.draw.figure import Figure

import numpy as np

T, HS = 6, 4
W, H = 54, 34
TOP, LEFT = 84, 76


def scores_and_weights() -> tuple[np.ndarray, np.ndarray]:
    q, k = np.random.default_rng(8).standard_normal((2, T, HS))
    scores = q @ k.T / np.sqrt(HS)
    scores[np.triu_indices(T, 1)] = -np.inf
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores, e / e.sum(axis=1, keepdims=True)


def draw() -> str:
    right = LEFT + T * W + 48
    figure = Figure(right + T * W + 64, TOP + T * H + 86, "The causal mask, before softmax and after it")
    scores, weights = scores_and_weights()
    for x0, title, matrix, masked in (
        (LEFT, "scores, masked", scores, "-∞"), (right, "weights: softmax of each row", weights, "0")
    ):  # fmt: skip
        figure.text(x0, 24, title, 15, bold=True)
        figure.text(x0 + T * W / 2, 50, "key j", 13, "middle", "faint")
        for j in range(T):
            figure.text(x0 + (j + 0.5) * W, TOP - 10, str(j), 13, "middle", "faint")
        for t in range(T):
            for j in range(T):
                x, y = x0 + j * W, TOP + t * H
                figure.rect(x, y, W - 3, H - 3, "f" if j > t else "b" if j == t else "a")
                words = masked if j > t else f"{matrix[t, j]:.2f}"
                figure.text(x + (W - 3) / 2, y + 21, words, 13, "middle", "faint" if j > t else "ink")
    for t in range(T):
        figure.text(LEFT - 12, TOP + t * H + 21, f"query {t}" if t == 0 else str(t), 13, "end", "faint")
        figure.text(right + T * W + 4, TOP + t * H + 21, "sum 1", 13, colour="faint")
    y = TOP + T * H + 26
    figure.key(LEFT, y - 12, "b", "a position's own key: the last one that it sees", 14, 14)
    says = "later positions. exp(-∞) is 0, so they count neither in a row's sum nor in its output,"
    figure.key(LEFT, y + 12, "f", says, 14, 14)
    figure.text(LEFT + 22, y + 44, "and no gradient goes to them.", 14)
    return figure.svg()
