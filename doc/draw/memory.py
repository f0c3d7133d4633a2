"""The six buffers of GPT-2 124M at B 4, T 1024, and scratch, to scale, with their largest tensors."""

import math

import device
from doc.draw.figure import Figure
from llmc.model.activations import batch_sizes, training_scratch, training_tables
from llmc.model.tensors import ALIGNMENT, layout, owners
from llmc.step.memory import Plan, training_sizes
from train_gpt2_fp32 import GPT2, GPT2Config

B, T, ATTENTION = 4, 1024, "flash"
WIDTH, LEFT, BAR, STEP = 640, 10, 30, 84
SMALLEST = 4  # MiB of a tensor that is named
COLOURS = "abcde"


def parts(table, sizes, align: int, absent) -> list[tuple[str, float]]:
    """The tensors that have a place of their own, in the order of the buffer, with their MiB."""
    starts, _ = layout(table, sizes, align, absent)
    own = [row[0] for row in table if row[0] in starts and not owners(row)]
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
        "scratch": [(name, n / 2**20) for name, n in training_scratch(GPT2, config, B, T, ATTENTION).items()],
    }
    equal = [name for name, size in sizes_of.items() if name != "parameters" and size == sizes_of["parameters"]]
    drawn = {name: size / 2**20 for name, size in sizes_of.items() if name not in equal}
    figure = Figure(WIDTH, 40 + STEP * len(drawn), "The six buffers of GPT-2 124M, and scratch, to scale")
    scale = (WIDTH - 2 * LEFT) / max(drawn.values())
    total = sum(n / 2**20 for n in sizes_of.values())
    figure.text(LEFT, 22, f"GPT-2 124M, B {B}, T {T}, flash attention: {total:.0f} MiB", 16, bold=True)
    for i, (name, size_of_all) in enumerate(drawn.items()):
        y = 62 + i * STEP
        more = f" each: {', '.join((name, *equal))}" if name == "parameters" else f": {name}"
        figure.text(LEFT, y - 7, f"{size_of_all:.0f} MiB{more}", 15)
        x, label = LEFT, LEFT
        colours = iter(COLOURS)
        for tensor, size in tables.get(name, parameters):
            width = size * scale
            inside = width > 5.8 * len(tensor)
            colour = "f" if inside or size < SMALLEST else next(colours)
            figure.rect(x, y, width, BAR, colour, "paper" if width > 3 else "")
            if inside:
                figure.text(x + width / 2, y + 13, tensor, 10.5, "middle")
                figure.text(x + width / 2, y + 25, f"{size:.0f}", 10.5, "middle")
            elif size >= SMALLEST:
                words = f"{tensor} {size:.0f}"
                figure.rect(label, y + BAR + 6, 10, 10, colour)
                figure.text(label + 13, y + BAR + 15, words, 10.5)
                label += 22 + 5.4 * len(words)
            x += width
    return figure.svg()
