"""What a model's parameters are at first: a file's tensors, or random numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path

import device
from llmc.files.checkpoint import conversion, read_model
from llmc.model.adamw import AdamW
from llmc.model.model import Model
from llmc.model.tensors import layout

import numpy as np

STAGED = 1 << 20  # floats that the host has of a tensor at a time; these stay in its caches


def put(model: Model, adamw: AdamW | None, start: int, values: np.ndarray) -> None:
    """Sets consecutive parameters, from the start-th on, to fp32 values on the host; in bf16 also those of AdamW's
    master copy. adamw: None for inference."""
    if not values.size:
        return
    device.copy_in(model.params_memory[start:], device.to_bf16(values) if model.has_copy else values)
    if adamw and adamw.master is not None:
        begin, end = max(start, adamw.first), min(start + values.size, adamw.first + adamw.master.size)
        if begin < end:
            device.copy_in(adamw.master[begin - adamw.first :], values[begin - start : end - start])
    device.synchronize()  # from now on the caller may change the values


def zero(model: Model, adamw: AdamW | None) -> None:
    device.fill_zero(model.params_memory)
    if adamw and adamw.master is not None:
        device.fill_zero(adamw.master)


def load_weights(model: Model, adamw: AdamW | None, tensors: Mapping[str, np.ndarray]) -> None:
    """Sets the parameters to those of a file, which `read_model` gives. Rows that the file lacks become 0."""
    starts, _ = layout(model.config.parameters(), model.config.sizes(), align=1)
    zero(model, adamw)
    for name, _ in model.config.parameters():
        values = tensors[name].reshape(-1)
        for at in range(0, values.size, STAGED):
            put(model, adamw, starts[name][0] + at, values[at : at + STAGED])


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
    done, total, shown = 0, model.params_memory.size, time.monotonic()
    random, staged = np.random.default_rng(seed), np.empty(min(STAGED, total), np.float32)
    sizes = config.sizes()
    starts, _ = layout(config.parameters(), sizes, align=1)
    for name, symbols in config.parameters():
        first, shape = starts[name]
        used = prod(shape) // sizes["Vp"] * sizes["V"] if symbols[0] == "Vp" else prod(shape)  # the rest stays 0
        for start in range(0, prod(shape), STAGED):
            piece = staged[: min(STAGED, prod(shape) - start)]
            if name in deviations:
                random.standard_normal(out=piece, dtype=np.float32)
                piece *= np.float32(deviations[name])
            elif name in constants:
                piece.fill(constants[name])
            else:
                break
            put(model, adamw, first + start, piece[: max(0, used - start)])
            done += piece.size
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"random weights: {100 * done // total}% of {total:,}", flush=True)


def model_for_inference(kind: type[Model], path: str | Path, T: int) -> Model:
    """The model in a `.bin`, without gradients, for texts of up to T tokens. Raises UserError as `read_model` does. If
    its weights are converted, stderr says so."""
    config, tensors = read_model(path, kind.Config)
    converted = conversion(path, kind.Config)
    if converted:
        print(converted, file=sys.stderr, flush=True)
    model = kind(config, T, inference=True)
    load_weights(model, None, tensors)
    return model
