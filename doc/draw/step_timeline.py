"""A training step on a GPU, from the profile that doc/step.py keeps: the host, and the kernels on two lanes, the second
for those that overlap others."""

import json
from pathlib import Path

from doc.draw.figure import Figure

KEPT = Path(__file__).resolve().parents[1] / "step.json"
WIDTH, LEFT, RIGHT = 640, 66, 8
KINDS = {"matrix products": "a", "flash attention": "b", "AdamW": "d", "other kernels": "c"}
SHORT = {
    "flash_attention_backward_query": "dq", "flash_attention_backward_key": "dk, dv", "layernorm_backward": "ln",
    "gelu_backward": "GELU", "sm90": "product",
}  # fmt: skip


def kind_of(name: str) -> str:
    if "gemm" in name or "cutlass" in name:
        return "matrix products"
    return "flash attention" if name.startswith("flash") else "AdamW" if name.startswith("adamw") else "other kernels"


def lanes(events: list) -> list[tuple[str, int, float, float]]:
    """The kernels with a lane for each: the first that is free. What runs beside something else is on the second."""
    free, found = [0.0, 0.0, 0.0], []
    for name, _, begin, duration in events:
        lane = next(i for i, until in enumerate(free) if until <= begin + 0.3 or i == len(free) - 1)
        free[lane] = begin + duration
        found.append((name, lane, begin, duration))
    return found


def draw() -> str:
    kept = json.loads(KEPT.read_text("utf-8"))
    events = lanes(kept["timeline"])
    end = max(begin + duration for _, _, begin, duration in events)
    host_ms = kept["times"]["B 4, T 1024"]["recorded, two streams"][1]
    figure = Figure(WIDTH, 408, "A training step on an H200")
    title = f"One step of GPT-2 124M, B 4, T 1024: {len(events)} kernels and copies, {end / 1000:.1f} ms"
    figure.text(8, 20, title, 15, bold=True)

    def axis(y: float, begin: float, stop: float, tick: float):
        scale = (WIDTH - LEFT - RIGHT) / (stop - begin)
        t = -(-begin // tick) * tick
        while t <= stop:
            x = LEFT + (t - begin) * scale
            figure.line(x, y, x, y + 5, "faint")
            last = t + tick > stop
            figure.text(x, y + 18, f"{t / 1000:g}{' ms' * last}", 12, "end" if last else "middle", "faint")
            t += tick
        return lambda t: LEFT + (t - begin) * scale

    x_of = axis(166, 0, end, 2000)
    figure.text(8, 52, "host", 14)
    figure.rect(LEFT, 36, x_of(1000 * host_ms) - LEFT, 24, "e")
    figure.text(x_of(1000 * host_ms) + 6, 53, f"launches a step in {host_ms:.2f} ms, then waits", 13)
    figure.text(8, 101, "kernels", 14)
    figure.text(8, 137, "overlap", 14)
    for name, lane, begin, duration in events:
        if begin + duration > 0 and lane < 2:
            figure.rect(x_of(begin), 84 + 36 * lane, max(0.4, duration * (x_of(1) - x_of(0))), 26, KINDS[kind_of(name)])
    loss = next(begin for name, _, begin, _ in events if name.startswith("fused_classifier"))
    for t, words, anchor in ((0, "forward", "start"), (loss, "| loss, backward", "start"), (end, "AdamW", "end")):
        figure.text(x_of(t), 78, words, 12, anchor, "faint")
    gelu = [begin for name, _, begin, _ in events if name.startswith("gelu_backward")]
    middle = len(gelu) // 2
    first, last = gelu[middle], gelu[middle + 1]
    before = 20
    figure.text(8, 236, "A layer's backward pass, from one GELU to the next", 15, bold=True)
    for x1, x2 in ((x_of(first), LEFT), (x_of(last), WIDTH - RIGHT)):
        figure.line(x1, 148, x1, 166, "faint")
        figure.line(x1, 190, x2, 218, "rule", dashed=True)
    x_of = axis(330, first - before, last, 100)
    figure.text(8, 269, "kernels", 14)
    figure.text(8, 309, "overlap", 14)
    for name, lane, begin, duration in events:
        if first - before <= begin < last and lane < 2:
            x, w = x_of(begin), min(x_of(begin + duration), WIDTH - RIGHT) - x_of(begin)
            figure.rect(x, 248 + 40 * lane, w, 32, KINDS[kind_of(name)], "paper" if w > 4 else "")
            word = next((short for start, short in SHORT.items() if name.startswith(start)), "")
            if w > 6.6 * len(word):
                figure.text(x + w / 2, 268 + 40 * lane, word, 12, "middle")
    x = 8
    for kind, colour in KINDS.items():
        figure.rect(x, 360, 13, 13, colour)
        figure.text(x + 18, 371, kind, 13)
        x += 46 + 7.2 * len(kind)
    meaning = "overlap: kernels that run at the same time as those above. dq, dk, dv: flash attention. ln: layernorm"
    figure.text(8, 396, meaning, 11.5, colour="faint")
    return figure.svg()
