"""The buffers of one layer, and from which launch until which each holds what somebody still reads.

A step of a small GPT-2 is gone through without computing anything, on a device that only notes which launch was given
which arrays. Of each array the tensor is found by its address, and the launches of the layer in the middle are drawn.
"""

from pathlib import Path

import device
from doc.draw.figure import Figure
from llmc.model.activations import Activations
from llmc.model.batch import Batch
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np

LAYERS, LAYER, B, T = 3, 1, 1, 1024
WIDTH, LEFT, TOP, ROW = 660, 100, 122, 24
# Rows from top to bottom; of a place that several tensors share, the name that it has first.
KEPT = ("residual", "qkv", "lse", "atty", "residual2", "fch", "next residual")
SCRATCH = ("ln", "gelu", "dresidual", "dln", "dgelu", "weight_T", "input_T")
LETTERS = {
    "layernorm_forward_kernel": "N", "gemm": "P", "flash_attention_forward_kernel": "A",
    "gelu_forward": "G", "gelu_backward": "G", "layernorm_backward": "N", "norm_transposed": "R",
    "flash_attention_backward": "A", "transpose_kernel": "T", "column_partials": "S",
}  # fmt: skip
MEANING = (
    "blue: kept from forward to backward; orange: scratch, the same for all layers",
    "filled: written, or added to; hollow: read",
    "launches: N layernorm, P product, A attention, G GELU, T transpose, S sum for a bias's gradient,",
    "R layernorm once more, for a weight's gradient",
)
WRITTEN = {"gemm": {"c"}, "fill_zero": {"array"}} | {
    name: {one.split()[-1].lstrip("*") for one in parameters if "*" in one and "const" not in one}
    for path in (Path(__file__).resolve().parents[2] / "kernels").glob("*.cu")
    for name, parameters in device.kernel_declarations(path).items()
}


class Idle(device.CpuDevice):
    """A device that compiles nothing and computes nothing."""

    def kernel(self, path, name):
        return lambda *launch, **options: None

    def warp_size(self, path) -> int:
        return 32


def launches() -> list[tuple[str, dict[str, bool]]]:
    """Each launch of forward, loss and backward that has a tensor of the layer: what it is called, and the rows that it
    reads (False) or writes (True)."""
    before = device.current.device
    device.current.device = Idle()
    try:
        model = GPT2(GPT2Config(T, 256, LAYERS, 1, 64), T)
        acts, batch = Activations(model, B, T, "flash").views(), Batch(B, T)
        rows = {"residual": acts.residual[LAYER], "next residual": acts.residual[LAYER + 1]}
        rows |= {name: getattr(acts.layer[LAYER], name) for name in KEPT[1:-1]}
        rows |= {name: getattr(acts.layer[LAYER], name) for name in SCRATCH if hasattr(acts, name)}
        rows |= {name: device.regions[name][-1] for name in SCRATCH if not hasattr(acts, name)}
        spans = {name: (x.__array_interface__["data"][0], x.nbytes) for name, x in rows.items()}
        found = []

        def note(name, arguments, work):
            touched = {}
            for parameter, value in arguments.items():
                if not isinstance(value, np.ndarray) or not value.size:
                    continue
                address = value.__array_interface__["data"][0]
                for row, (start, length) in spans.items():
                    if start <= address < start + length:
                        touched[row] = touched.get(row, False) or parameter in WRITTEN[name]
            found.append((name, touched))

        with device.observe(note):
            model.forward(acts, batch)
            ends = len(found)
            model.loss(acts, batch, dloss=1.0)
            model.backward(acts, batch)
    finally:
        device.current.device = before
    return [("forward" if i < ends else "backward", *launch) for i, launch in enumerate(found)]


def draw() -> str:
    all_launches = launches()
    own = set(KEPT)
    near = [i for i, (_, _, touched) in enumerate(all_launches) if own & touched.keys()]
    half = next(k for k, i in enumerate(near) if all_launches[i][0] == "backward")
    chosen = [*range(near[0], near[half - 1] + 1), None, *range(near[half], near[-1] + 1)]
    step = (WIDTH - LEFT - 40) / len(chosen)
    figure = Figure(WIDTH, TOP + ROW * (len(KEPT) + len(SCRATCH)) + 44, "The residual stream through a layer")
    x_of = {i: LEFT + (k + 0.5) * step for k, i in enumerate(chosen)}
    for i in chosen:
        if i is not None:
            name = all_launches[i][1]
            letter = next((letter for start, letter in LETTERS.items() if name.startswith(start)), "")
            figure.text(x_of[i], TOP - 12, letter, 13, "middle")
    split = x_of[None]
    figure.line(split, TOP - 4, split, TOP + ROW * (len(KEPT) + len(SCRATCH)), "rule", 1, dashed=True)
    for r, row in enumerate((*KEPT, *SCRATCH)):
        y = TOP + ROW * r + (12 if row in SCRATCH else 0)
        figure.text(6, y + 13, row, 12 if len(row) > 11 else 13)
        figure.line(LEFT, y + 9, WIDTH - 8, y + 9, "rule", 0.5)
        uses = [(i, all_launches[i][2][row]) for i in chosen if i is not None and row in all_launches[i][2]]
        if row in KEPT:
            figure.rect(x_of[uses[0][0]] - 3, y + 3, x_of[uses[-1][0]] - x_of[uses[0][0]] + 6, 12, "a")
        else:
            groups: list[list[int]] = []
            for i, written in uses:
                if written and row != "dresidual" or not groups:
                    groups.append([])
                groups[-1].append(i)
            for group in groups:
                figure.rect(x_of[group[0]] - 3, y + 3, x_of[group[-1]] - x_of[group[0]] + 6, 12, "b")
        for i, written in uses:
            figure.rect(x_of[i] - 2.5, y + 5.5, 5, 7, "ink" if written else "paper", "ink")
    bottom = TOP + ROW * (len(KEPT) + len(SCRATCH)) + 32
    figure.text((LEFT + split) / 2, bottom - 8, "forward", 13, "middle", bold=True)
    figure.text((split + WIDTH) / 2, bottom - 8, "backward", 13, "middle", bold=True)
    figure.lines(6, 20, 18, MEANING, 13)
    return figure.svg()
