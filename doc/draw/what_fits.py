"""What training Llama 3.2 3B takes on a GPU in bf16, with four sequences of 1024 tokens per batch, without and with the
flags that save memory. `python train_llama3.py -e llama3.2-3b -b 4 --precision bf16 --dry-run` prints the sizes."""

from doc.draw.figure import Figure

PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, OTHER = "abcde"
NAMES = {
    PARAMETERS: "parameters", GRADIENTS: "gradients", STATE: "AdamW's state", ACTIVATIONS: "activations",
    OTHER: "the rest",
}  # fmt: skip
WEIGHTS = {PARAMETERS: 6128, GRADIENTS: 12256}  # MiB
WAYS = {
    "no flag": WEIGHTS | {STATE: 6128 + 2 * 12256, ACTIVATIONS: 7845, OTHER: 412},
    "--recompute": WEIGHTS | {STATE: 6128 + 2 * 12256, ACTIVATIONS: 2003, OTHER: 412},
    "--offload": WEIGHTS | {STATE: 96, ACTIVATIONS: 7845, OTHER: 412},
    "both": WEIGHTS | {STATE: 96, ACTIVATIONS: 2003, OTHER: 412},
}
CUDA = 1466  # MiB that the driver, CUDA's context, kernels and graphs take
CARDS = {(24564 - CUDA) / 1024: "a card of 24 GiB, less CUDA's 1.4", (81559 - CUDA) / 1024: "80 GiB, less 1.4"}
LEFT, SCALE, ROW, HIGH = 118, 8.8, 46, 30  # of the names; of a GiB; of a bar


def draw() -> str:
    bottom = 56 + ROW * len(WAYS)
    figure = Figure(890, bottom + 66, "What Llama 3.2 3B takes on a GPU")
    figure.text(8, 22, "Llama 3.2 3B in bf16, B 4, T 1024: GiB on the GPU", 16, bold=True)
    for row, (flags, sizes) in enumerate(WAYS.items()):
        x, y = LEFT, 50 + ROW * row
        figure.text(LEFT - 10, y + 20, flags, 14, "end")
        for colour, size in sizes.items():
            width = size / 1024 * SCALE
            figure.rect(x, y, width, HIGH, colour)
            x += width
        lines = [LEFT + card * SCALE for card in CARDS]
        x = next((line for line in lines if 0 < line - x < 44), x)  # no number on a card's line
        figure.text(x + 10, y + 20, f"{sum(sizes.values()) / 1024:.1f}", 14, bold=True)
    for card, name in CARDS.items():
        x = LEFT + card * SCALE
        figure.line(x, 36, x, bottom, "ink", 1.5, dashed=True)
        figure.text(x - 6, bottom + 16, name, 13, "middle")
    x = LEFT
    for colour, name in NAMES.items():
        figure.rect(x, bottom + 38, 18, 14, colour)
        figure.text(x + 25, bottom + 50, name, 13)
        x += 70 + 7 * len(name)
    return figure.svg()
