"""What a model's parameters are at first: a file's tensors, or random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import prod

import device
from kernels.adamw import split
from llmc.model.adamw import AdamW
from llmc.model.fp8 import put_quantized, quantized_matrices
from llmc.model.model import Model
from llmc.model.tensors import layout, num_parameters, shape_of, without

import numpy as np


def put(model: Model, adamw: AdamW | None, start: int, values) -> None:
    """Sets consecutive parameters, from the start-th on, to fp32 values on the device; in bf16 also those of AdamW's
    master copy. adamw: None for inference."""
    params = model.params_memory[start : start + values.size]
    if not model.has_copy:
        device.copy(params, values)
        return
    split(params, values, values.size)
    if adamw:
        adamw.set_master(model, start, values)


def put_part(model: Model, adamw: AdamW | None, name: str, at: int, values) -> None:
    """The same for a parameter's numbers from the at-th on. The parts of a parameter must come in order."""
    quantized = {} if model.grads else quantized_matrices(type(model), model.config)
    if name in quantized:
        put_quantized(model, name, at, values)
    else:
        places, _ = layout(without(model.config.parameters(), quantized), model.config.sizes(), align=1)
        put(model, adamw, places[name][0] + at, values)


def zero(model: Model, adamw: AdamW | None) -> None:
    """Sets all parameters to 0. In bf16 AdamW's v must have no signs yet."""
    device.fill_zero(model.params_memory)
    if adamw and adamw.low is not None:
        device.fill_zero(adamw.low)


def load_weights(
    model: Model, adamw: AdamW | None, tensors: Mapping[str, np.ndarray] | None, pieces: Callable = device.staged
) -> None:  # fmt: skip
    """Sets the parameters to those of a file, which `read_model` gives. Rows that the file lacks become 0. In bf16
    AdamW's v may hold something already, without signs. pieces: what brings the numbers to the device."""
    in_file, _ = layout(model.config.file_tensors(), model.config.sizes(), align=1)
    zero(model, adamw)
    for name, _ in model.config.parameters():
        for at, piece in pieces(tensors and tensors[name].reshape(-1), prod(in_file[name][1])):
            put_part(model, adamw, name, at, piece)


def randomize(model: Model, adamw: AdamW | None, seed: int) -> None:
    """Sets the weights with which training begins, from a seed. The matrices get normal random numbers, with the
    deviations that the kind's first_weights gives. The padding of the vocabulary gets 0. For the rest first_weights
    says what.

    The host makes them a piece at a time.
    """
    config = model.config
    deviations, constants = model.first_weights(config)
    unknown = {*deviations, *constants} - {name for name, *_ in config.PARAMETERS}
    if unknown:
        raise ValueError(f"{type(model).__name__}: first_weights names {min(unknown)}, which is none of PARAMETERS")
    zero(model, adamw)
    done, total, shown = 0, num_parameters(config), time.monotonic()
    random, staged = np.random.default_rng(seed), np.empty(min(device.STAGED, total), np.float32)
    sizes = config.sizes()
    for name, symbols in config.parameters():
        shape = shape_of(symbols, sizes)
        used = prod(shape) // sizes["Vp"] * sizes["V"] if symbols[0] == "Vp" else prod(shape)  # the rest stays 0
        for start in range(0, prod(shape), device.STAGED):
            piece = staged[: min(device.STAGED, prod(shape) - start)]
            if name in deviations:
                random.standard_normal(out=piece, dtype=np.float32)
                piece *= np.float32(deviations[name])
            elif name in constants:
                piece.fill(constants[name])
            else:
                break
            kept = piece[: max(0, used - start)]
            for _, values in device.staged(kept, kept.size):
                put_part(model, adamw, name, start, values)
            done += piece.size
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"random weights: {100 * done // total}% of {total:,}", flush=True)
