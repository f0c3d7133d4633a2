"""The six buffers of GPT-2 124M at B 4, T 1024, and scratch, to scale, with their largest tensors."""

import math

import device
from doc.draw.figure import Figure
from llmc.model.activations import batch_sizes, training_scratch, training_tables
from llmc.model.tensors import ALIGNMENT, FP32, layout
from llmc.step.memory import Plan, training_sizes
from train_gpt2_fp32 import GPT2, GPT2Config

B, T, ATTENTION = 4, 1024, "flash"
WIDTH, LEFT, BAR, STEP = 640, 10, 34, 72
COLOURS = "abcde"


def parts(table, sizes, align: int, absent) -> list[tuple[str, float]]:
    """The tensors that have a place of their own, in the order of the buffer, with their MiB."""
    starts, _ = layout(table, sizes, align, absent)
    own = [row[0] for row in table if row[0] in starts and set(row[2:]) <= {FP32}]
    return [(name, 4 * math.prod(starts[name][1]) / 2**20) for name in own]


def draw() -> str:
    device.use("cpu")
    config = GPT2Config.described("d12")
    sizes = batch_sizes(config, B, T, 0)
    sizes_of = training_sizes(GPT2, config, Plan(B, T, ATTENTION))
    activations, gradients = training_tables(GPT2, ATTENTION)
    parameters = parts(config.parameters(), sizes, 1, config.absent)
    tables = {
        "activations": parts(activations, sizes, ALIGNMENT, config.absent),
        "activation gradients": parts(gradients, sizes, ALIGNMENT, config.absent),
        "scratch": [(name, n / 2**20) for name, n in training_scratch(config, B, T, ATTENTION).items()],
    }
    figure = Figure(WIDTH, 40 + STEP * len(sizes_of), "The six buffers of GPT-2 124M, and scratch, to scale")
    scale = (WIDTH - 2 * LEFT) / max(n / 2**20 for n in sizes_of.values())
    total = sum(n / 2**20 for n in sizes_of.values())
    figure.text(LEFT, 22, f"GPT-2 124M, B {B}, T {T}, flash attention: {total:.0f} MiB", 16, bold=True)
    for i, (name, size_in_bytes) in enumerate(sizes_of.items()):
        y = 62 + i * STEP
        figure.text(LEFT, y - 7, f"{name}: {size_in_bytes / 2**20:.0f} MiB", 15)
        x = LEFT
        for k, (tensor, size) in enumerate(tables.get(name, parameters)):
            w = size * scale
            figure.rect(x, y, w, BAR, COLOURS[k % len(COLOURS)] if w > 1 else "f", "paper" if w > 3 else "")
            if w > 8 * len(tensor):
                figure.text(x + w / 2, y + 22, tensor, 13, "middle")
            elif w > 16 and name in tables:
                figure.text(x + w / 2 + 4, y + BAR + 11, tensor, 10, "middle", "faint")
            x += w
    return figure.svg()
