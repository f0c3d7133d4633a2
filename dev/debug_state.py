"""llm.c's debug states: a batch, and what a reference implementation makes of it in one forward and backward pass."""

from pathlib import Path
from typing import NamedTuple

from device.errors import UserError
from llmc.files.files import HEADER_BYTES, file_size, make_header, map_file, read_header, replacing
from llmc.files.magic import DEBUG_STATE
from llmc.model.tensors import Config, num_parameters

import numpy as np

REMEDY = "fetch it with dev/download_starter_pack.sh, or write it with dev/write_reference.py"


class DebugState(NamedTuple):
    x: np.ndarray       # int32 (B, T), inputs
    y: np.ndarray       # int32 (B, T), targets
    logits: np.ndarray  # fp32 (B, T, V), without padding
    loss: float         # mean over the batch
    grads: np.ndarray   # fp32 (num_parameters,), of the mean loss, in the order of the parameters, with padding


def read_debug_state(path: str | Path, config: Config) -> DebugState:
    """The debug state of a model of these sizes. Its arrays are read-only memory maps. Raises UserError if the file is
    missing, damaged, or of another kind or model."""
    version, B, T = (int(n) for n in read_header(path, DEBUG_STATE, REMEDY)[1:4])
    sizes = [B * T, B * T, B * T * config.vocab_size, 1, num_parameters(config)]
    if version != 2 or min(B, T) < 1 or file_size(path, REMEDY) != HEADER_BYTES + 4 * sum(sizes):
        raise UserError(f"{path}: damaged, or no debug state of version 2 of this model; {REMEDY}")
    body = map_file(path, "<i4", HEADER_BYTES)
    x, y, logits, loss, grads = np.split(body, np.cumsum(sizes)[:-1])
    x, y, logits = x.reshape(B, T), y.reshape(B, T), logits.view("<f4").reshape(B, T, -1)
    return DebugState(x, y, logits, float(loss.view("<f4")[0]), grads.view("<f4"))


def write_debug_state(path: str | Path, state: DebugState) -> None:
    """`path` appears whole or not at all."""
    with replacing(path) as file:
        file.write(make_header(DEBUG_STATE, 2, *state.x.shape).tobytes())
        for values, kind in zip(state, ("<i4", "<i4", "<f4", "<f4", "<f4"), strict=True):
            file.write(np.ascontiguousarray(values, kind).data)
