"""What a backward pass gives the device to do beside the rest, a graph's second stream does at an unknown time until it
is joined. So in between nothing else may write what it reads or writes, nor read what it writes."""

import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from test_model import MODELS, name_of

from llmc import device
from llmc.tensors import Config
from models import kind_of

# The parameters of each kernel and product that it writes: pointers that are not const.
WRITTEN = {"sgemm": {"c"}, "sgemm_strided_batched": {"c"}, "fill_zero": {"array"}} | {
    name: {one.split()[-1].lstrip("*") for one in parameters.split(",") if "*" in one and "const" not in one}
    for path in (Path(__file__).resolve().parents[1] / "kernels").glob("*.cu")
    for name, parameters in re.findall(r"__global__[^;{]*?(\w+)\s*\(([^()]*)\)\s*\{", path.read_text())
}


class Watch:
    """Stands for device.beside, device.join and the observer of device.observe; does none of the work."""

    def __init__(self):
        self.blocks = self.overlapped = 0
        self.inside, self.open = False, []  # the accesses of blocks that are not joined yet
        self.conflicts = set()

    @contextmanager
    def beside(self):
        self.blocks, self.inside = self.blocks + 1, True
        yield
        self.inside = False

    def join(self):
        self.open.clear()

    def __call__(self, name, arguments, work):
        for parameter, value in arguments.items():
            if not isinstance(value, np.ndarray):
                continue
            start = value.__array_interface__["data"][0]
            access = start, start + value.nbytes, parameter in WRITTEN[name], f"{name}'s {parameter}"
            if self.inside:
                self.open.append(access)
                continue
            self.overlapped += len(self.open) > 0
            self.conflicts |= {
                (what, access[3]) for first, last, written, what in self.open
                if first < access[1] and start < last and (written or access[2])
            }  # fmt: skip


def watched(config: Config, attention: str, B: int, dropout: float, monkeypatch) -> Watch:
    """A backward pass, of which nothing is computed."""
    device.use("cpu")
    watch, T = Watch(), 32
    model = kind_of(config)(config, B, T, attention)
    model.dropout = dropout
    monkeypatch.setattr(device, "beside", watch.beside)
    monkeypatch.setattr(device, "join", watch.join)
    with device.observe(watch):
        model.backward(B, T)
    return watch


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("B", [1, 32])  # from 1024 rows on, operands are transposed
@pytest.mark.parametrize("config, attention", MODELS, ids=name_of)
def test_what_is_done_beside_backward_is_left_alone_by_it(config, attention, B, dropout, monkeypatch):
    watch = watched(config, attention, B, dropout, monkeypatch)
    assert not watch.conflicts
    assert not watch.open  # all is joined in the end
    assert watch.blocks == 4 * config.num_layers + 1  # every weight's gradient
    assert watch.overlapped > 0


def test_a_join_that_is_missing_is_noticed(monkeypatch):
    monkeypatch.setattr(Watch, "join", lambda self: None)
    config, attention = MODELS[0]
    assert watched(config, attention, 1, 0.0, monkeypatch).conflicts
