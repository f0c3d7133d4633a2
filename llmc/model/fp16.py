"""The scratch of products that round their operands to fp16 (kernels/fp16/)."""

import device
from kernels.fp16.products import scratch_bytes
from llmc.model.tensors import Config, shape_of

Sizes = tuple[int, int, int]  # numbers in operands a and b, and in b if a is there again


def training_scratch(config: Config, B: int, T: int, attention: str, logit_rows: int) -> dict[str, int]:
    """The scratch of a training step: purpose, bytes. Empty in another precision than fp16."""
    found = sizes_of_linear_layers(config, B * T, logit_rows or B * T)
    if attention != "flash":
        rows, HS = B * T * config.num_heads, config.head_size
        found.append((rows * max(T, HS), rows * HS, rows * HS))
    return largest(found)


def cache_scratch(config: Config, B: int, context: int) -> dict[str, int]:
    """The same for B texts of up to `context` tokens, without backward."""
    return largest([(a, b, 0) for a, b, _ in sizes_of_linear_layers(config, B * context, B, backward=False)])


def sizes_of_linear_layers(config: Config, N: int, logit_rows: int, backward: bool = True) -> list[Sizes]:
    """For each weight the largest operands of its products, of N rows; in the classifier of at most logit_rows."""
    sizes, table = config.sizes(), dict(config.parameters())
    weights = [(N, shape_of(table[name][1:], sizes)) for name in config.products if table[name][0] == "L"]
    weights.append((min(N, logit_rows), shape_of(table[config.head], sizes)))
    return [(rows * max(C, OC * backward), OC * C, rows * C) for rows, (OC, C) in weights]


def largest(found: list[Sizes]) -> dict[str, int]:
    return scratch_bytes(*map(max, *found)) if device.precision == "fp16" else {}
