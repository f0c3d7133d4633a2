"""dev/profile_step.py on models so small that their times do not matter, and device.observe, on which it stands."""

from pathlib import Path

import dev.microscope.launches  # noqa: F401  registers all descriptions
import device
from dev import profile_step, traffic
from dev.scripts import model_kinds, small_model
from device import ceil_div
from device.sources import kernel_accesses

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
# Flash attention takes heads of 64 channels; from 1024 rows on there are transpositions.
MODELS = {k.Config.SCRIPT[:-3]: small_model(k.Config).replace("layers=2", "layers=1") for k in model_kinds()}
MODELS["train_pythia"] += ",gelu=erf"
BATCH = ["-b", "16", "-t", "64", "--vocab-size", "300", "--device", "cpu"]


# In make test GPT-2 with flash attention, the others with the one that takes the least time.
@pytest.mark.parametrize("script, attention", [
    pytest.param(script, attention, marks=[pytest.mark.long] * (attention != ordinary))
    for script in MODELS for ordinary in ["flash" if script == "train_gpt2_fp32" else "softmax"]
    for attention in ("softmax", "relu", "flash")
])  # fmt: skip
def test_profile_counts_every_kernel_of_a_step(script, attention, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(profile_step, "measure_ceilings", lambda: profile_step.Ceilings(1e12, 1e9, "ceilings"))
    begun = []  # stretches of work that let the host get ahead
    monkeypatch.setattr(profile_step, "GROUP", 10)
    monkeypatch.setattr(profile_step, "keep_busy", lambda seconds: lambda: begun.append(seconds))
    out = ["--steps", "1", "--out", str(tmp_path / "step.png")]
    profile_step.main([script, "-e", MODELS[script], *BATCH, "-a", attention, *out])
    table = capsys.readouterr().out.partition("us per call")[2].splitlines()[1:]
    rows = {line[:48].strip(): line[48:].split() for line in table}
    assert not [name for name, words in rows.items() if words[-2:] == ["not", "counted"]]
    calls = {"encoder_forward": 1, "fused_classifier": 1, "adamw": 1}
    if script == "train_gpt2_fp32":
        calls |= {"layernorm_backward": 3, "gelu_backward": 1, "gemm 1024 x 384 x 128 NT": 2}
    if attention == "flash":
        calls |= {"flash_attention_forward": 1, "flash_attention_backward_key": 1}
    else:  # of heads that share keys, the queries follow one another
        product = "128 x 64 x 64 NT x16" if "kv_heads" in MODELS[script] else "64 x 64 x 64 NT x32"
        calls |= {f"{attention}_forward": 1, f"gemm {product}": 2}
    assert {name: int(rows[name][0]) for name in calls} == calls
    assert rows["gemm 1024 x 384 x 128 NT"][4:6] == [f"{2 * 1024 * 384 * 128 / 1e9:.4g}", "GFLOP"]
    assert len(begun) == ceil_div(sum(int(row[0]) for row in rows.values() if len(row) > 3 and row[0].isdigit()), 10)
    times = [float(row[2]) for row in rows.values() if len(row) > 3 and row[0].isdigit()]
    assert times == sorted(times, reverse=True)
    assert float(rows["sum"][0]) == pytest.approx(sum(times), abs=0.0005 * len(times) + 0.001)
    assert float(rows["a training step, with the batch and the losses"][0]) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["step.png"]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_every_description_of_a_kernel_is_of_one_that_there_is_and_fits_its_parameters():
    kernels = {traffic.kind_of(kernel): set(parameters) for path in (ROOT / "kernels").rglob("*.cu")
               for kernel, parameters in kernel_accesses(path).items()}  # fmt: skip
    assert traffic.MOVED.keys() | traffic.TWICE.keys() <= kernels.keys()
    assert traffic.FLOPS.keys() <= kernels.keys() | traffic.PRODUCTS.keys()
    assert all(set(arrays.split()) <= kernels[kind] for kind, arrays in traffic.TWICE.items())


def test_compiled_variants_of_a_kernel_have_its_counts():
    two = np.zeros(6, np.uint16)
    heads = {"dkv_heads": np.zeros((4, 3), np.float32), "dqkv": two, "NH": 4, "NKV": 2}
    assert traffic.bytes_of("flash_attention_group_sum_kernel", heads) == 12 * 4 + 6 * 2
    for name in "flash_attention_forward_kernel_64", "flash_attention_forward_wgmma_kernel_128":
        assert traffic.flops_of(name, {"T": 3, "out": two}) == 2 * 3 * 6
    assert traffic.flops_of("flash_attention_backward_key_wgmma_kernel_64", {"T": 3, "dout": two}) == 4 * 3 * 6


def test_a_kernel_without_large_arrays_is_shown_as_not_counted():
    row = profile_step.Row("new", seconds=[0.001])
    row.count("new_kernel", {"scale": np.zeros(4, np.float32), "n": 4})
    device.use("cpu")
    (line,) = profile_step.lines_of([row], profile_step.Ceilings(1e12, 1e9, ""))
    assert (line.calls, line.of_ceiling, line.note) == (1, None, "not counted")
