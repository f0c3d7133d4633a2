"""--recompute: backward runs the forward pass of each layer again, and ends with the same bits."""

import device
from llmc.data.batches import Batches
from llmc.model import offload
from llmc.model.activations import training_bytes
from llmc.step.training import Training
from models import ODD, ONE_OF_EACH, SOME, GivenBatches, build, flat_parameters, kind_of, make_batches, name_of
from train_gpt2_fp32 import training_step

import numpy as np
import pytest
from lazy import LazyDevice, Threads
from test_peers import T as RANKS_T
from test_peers import train as train_rank
from test_train import checkpoint_bytes, here, make_folder, run_here, steps_of  # noqa: F401

B, T, DROPOUT = 2, 11, (0.1, 3)


def build_twice(config, attention: str, **options) -> list[Training]:
    """What trains a model without recomputation, and with it."""
    dropout = DROPOUT if kind_of(config).DROPS else None
    flat = flat_parameters(config)
    return [
        build(device, config, B, T, attention, flat, dropout=dropout, recompute=recompute, **options)
        for recompute in (False, True)
    ]


def trained(training: Training) -> dict[str, np.ndarray]:
    """All that three steps of two batches leave behind, with a validation before the last one."""
    model, acts, batch, found = training.model, training.acts, training.batch, {}
    given = make_batches(model.config, 7, B, T)
    batches = Batches(batch, acts.losses, GivenBatches([*given[:4], given[6], *given[4:6]]), 2)
    step_of = training_step(training, batches)
    for step in range(3):
        if step == 2:
            found["validation"] = batches.run(lambda: (model.forward(acts, batch), model.loss(acts, batch))).copy()
        step_of(step, 1e-2)
        device.synchronize()
        found[f"loss {step}"] = np.array(batches.mean_loss(step))
    of, adamw = training.model, training.adamw
    memories = {"parameters": of.params_memory, "gradients": of.grads_memory, "m": adamw.m, "v": adamw.v}
    return found | {name: device.to_host(memory).copy() for name, memory in memories.items()}


@pytest.mark.parametrize("config, attention", SOME, ids=name_of)
def test_it_changes_no_bit(each_model_dev, config, attention):
    if attention == "flash" and each_model_dev.precision == "fp32" and each_model_dev.kind == "cuda":
        pytest.skip("flash attention is in TF32 or bf16")
    without, recomputed = (trained(training) for training in build_twice(config, attention))
    assert all(np.array_equal(recomputed[name], values) for name, values in without.items())
    assert np.isfinite(without["parameters"].astype(np.float32)).all()


@pytest.mark.parametrize("config, attention", ONE_OF_EACH[::2], ids=name_of)
def test_a_device_that_lags_behind_ends_with_the_same_bits(config, attention):
    found = []
    for kind in device.CpuDevice, LazyDevice:
        device.current.device = kind()
        found.append(trained(build_twice(config, attention)[1]))
    device.use("cpu")
    assert all(np.array_equal(found[1][name], values) for name, values in found[0].items())


@pytest.mark.parametrize("precision, flags", [
    ("fp32", {"sharded": True}), ("bf16", {}), ("bf16", {"sharded": True, "offload": True}),
], ids=str)  # fmt: skip
def test_several_ranks_end_with_the_same_bits(precision, flags, monkeypatch, rng):
    device.use("cpu")
    monkeypatch.setattr(offload, "PIECE", 4800)
    batches, found = rng.integers(0, ODD.vocab_size, (3, 4, 2, B, RANKS_T), dtype=np.int32), []
    for changes in ({}, {"recompute": True} | flags):
        changes |= {"precision": precision, "sharded": flags.get("sharded", False)}
        work = lambda rank, changes=changes: train_rank(ODD, B, batches, 0.1, **changes)  # noqa: E731
        found += Threads(2, monkeypatch).run(work, LazyDevice)
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)
def test_all_layers_take_the_memory_of_one_but_for_their_inputs(config, attention):
    """Their inputs, and the statistics of the norms of these."""
    device.use("cpu")
    kind, L = kind_of(config), config.num_layers
    deep = type(config)(**{**vars(config), "num_layers": L + 5})
    shallow, deep = (training_bytes(kind, each, 8, 64, attention, recompute=True)[0] for each in (config, deep))
    rows = 8 * 64
    assert deep - shallow <= 5 * rows * 4 * (config.channels + 2)


@pytest.mark.parametrize("config, attention", ONE_OF_EACH[::2], ids=name_of)
def test_no_product_runs_again_whose_output_nobody_needs(config, attention, monkeypatch):
    """Those of the projections back into the residual stream that only the next layer's input needs: the MLP's, and
    where attention and MLP are in parallel the attention's."""
    device.use("cpu")
    counts, gemm = [], device.current.device.gemm

    def counted(*args, **keywords):
        counts[-1] += 1
        return gemm(*args, **keywords)

    monkeypatch.setattr(device.current.device, "gemm", counted, raising=False)
    for training in build_twice(config, attention):
        counts.append(0)
        training.model.forward(training.acts, training.batch)
        counts.append(0)
        training.model.backward(training.acts, training.batch)
    forward, backward, _, recomputing = counts
    of_a_layer = forward // config.num_layers
    not_again = 2 if getattr(config, "parallel", False) else 1
    assert recomputing - backward == config.num_layers * (of_a_layer - not_again)


def test_a_run_goes_on_with_or_without_it(tmp_path, run_here):  # noqa: F811
    folder = make_folder(tmp_path / "cpu.gpt2")
    flags = "-g", "4", "-n", "2", "-x", "4", "--checkpoint-dir", "run"
    plain = run_here(folder, *flags)
    want = checkpoint_bytes(folder, 4)
    (folder / "run").rename(folder / "plain")
    recomputed = run_here(folder, *flags, "--recompute")
    assert "recomputed, but for each layer's input" in recomputed and "recomputed" not in plain
    assert steps_of(recomputed) == steps_of(plain) and checkpoint_bytes(folder, 4) == want
    (folder / "run" / "step_00000004").rename(folder / "step_00000004")
    resumed = run_here(folder, *flags, "-y", "1", "--recompute", "0")
    assert "--recompute was True and is now False" in resumed and checkpoint_bytes(folder, 4) == want
