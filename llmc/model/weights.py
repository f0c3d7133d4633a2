"""What a model's parameters are at first: a file's tensors, or random numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import device
from kernels.adamw import split
from kernels.fp8 import Coded, encode
from llmc.files.model_file import conversion, read_model
from llmc.model.adamw import AdamW
from llmc.model.model import Model
from llmc.model.tensors import layout, num_parameters, shape_of, without

import numpy as np

STAGED = 1 << 20  # floats of a tensor that go to the device at a time; these stay in the host's caches


def on_device(values: np.ndarray | None, n: int) -> Iterator[tuple[int, object]]:
    """The pieces of a flat fp32 array (n,) of the host, one after another on the device, each with the place of its
    first number. None: the pieces are uninitialised."""
    staged = device.empty((min(STAGED, n),))
    for at in range(0, n, STAGED):
        piece = staged[: min(STAGED, n - at)]
        if values is not None:
            device.copy_in(piece, values[at : at + piece.size])
        yield at, piece
        device.synchronize()  # from now on the caller may change the values


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
    """The same for a parameter's numbers from the at-th on. If a model has only codes of a matrix, its parts must come
    in order: the last part of a layer's matrix encodes it."""
    in_codes = {} if model.grads else model.coded()
    if name not in in_codes:
        places, _ = layout(without(model.config.parameters(), in_codes), model.config.sizes(), align=1)
        put(model, adamw, places[name][0] + at, values)
        return
    OC, C = in_codes[name]
    while values.size:
        l, first = divmod(at, OC * C)
        part, whole = values[: OC * C - first], device.scratch("decoded weight", (OC * C,), device.floatX)
        split(whole[first : first + part.size], part, part.size)
        if first + part.size == OC * C:
            weight = getattr(model.params.layer[l], name)
            encode(Coded(weight.codes, None, weight.scale), whole, OC, C)
        at, values = at + part.size, values[part.size :]


def zero(model: Model, adamw: AdamW | None) -> None:
    """Sets all parameters to 0. In bf16 AdamW's v must have no signs yet."""
    device.fill_zero(model.params_memory)
    if adamw and adamw.low is not None:
        device.fill_zero(adamw.low)


def load_weights(
    model: Model, adamw: AdamW | None, tensors: Mapping[str, np.ndarray] | None, pieces: Callable = on_device
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
    random, staged = np.random.default_rng(seed), np.empty(min(STAGED, total), np.float32)
    sizes = config.sizes()
    for name, symbols in config.parameters():
        shape = shape_of(symbols, sizes)
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
            kept = piece[: max(0, used - start)]
            for _, values in on_device(kept, kept.size):
                put_part(model, adamw, name, start, values)
            done += piece.size
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                print(f"random weights: {100 * done // total}% of {total:,}", flush=True)


def model_for_inference(kind: type[Model], path: str | Path, T: int) -> Model:
    """The model in a `.bin`, without gradients, for texts of up to T tokens. Raises UserError as `read_model` does. If
    its weights are converted, stderr says so."""
    config, tensors = read_model(path, kind.Config)
    model = kind(config, T, inference=True)
    coded = f"{path}: large weights of the layers become e4m3, the others bf16" if model.codes.size else ""
    if converted := coded or conversion(path, kind.Config):
        print(converted, file=sys.stderr, flush=True)
    load_weights(model, None, tensors)
    return model
