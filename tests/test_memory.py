"""What training takes, what fits, and --dry-run."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import device
from conftest import refusal
from dev.scripts import model_kinds
from llmc.data.batches import Batches
from llmc.files.model_file import write_model
from llmc.model import fp8
from llmc.model.activations import Activations, Cache, training_bytes
from llmc.model.tensors import num_parameters
from llmc.model.weights import randomize
from llmc.ranks import ranks
from llmc.run.arguments import parse_arguments
from llmc.run.dry_run import dry_run
from llmc.step import memory
from llmc.step.memory import Plan, inference_sizes, largest_batches, training_sizes
from llmc.step.training import make_training
from models import ONE_OF_EACH, GivenBatches, kind_of, name_of
from train_gpt2_fp32 import GPT2, GPT2Config, training_step
from train_llama3 import Llama3, Llama3Config
from train_pythia import PythiaConfig
from train_qwen3 import Qwen3, Qwen3Config

import numpy as np
import pytest

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
QUANTIZED = [Llama3Config(64, 101, 2, 4, 2, 64, 80, tied=False), GPT2Config(64, 101, 2, 4, 64),
         PythiaConfig(64, 101, 2, 4, 64), Qwen3Config(64, 101, 2, 4, 2, 64, 80, head_size=128)]  # fmt: skip


@pytest.fixture
def bf16():
    device.use("cpu")
    device.use_precision("bf16")
    yield
    device.use_precision("fp32")


def count_allocations(monkeypatch) -> list:
    """The arrays that the device allocates from now on."""
    allocated, empty = [], device.current.device.empty
    monkeypatch.setattr(device.current.device, "empty", lambda *of: allocated.append(empty(*of)) or allocated[-1])
    return allocated


@pytest.mark.parametrize("flags", [{}, {"recompute": True}, {"offload": True}, {"logit_rows": 7}], ids=str)
@pytest.mark.parametrize("precision, config, attention", [
    *(("fp32", *each) for each in ONE_OF_EACH[::2]), *(("fp16", *each) for each in ONE_OF_EACH[:4]),
    *(("fp8", each, "softmax") for each in QUANTIZED),
], ids=name_of)  # fmt: skip
def test_training_allocates_what_the_table_says(one_dev, precision, config, attention, flags, monkeypatch):
    """Up to some arrays that are smaller than a batch. The passes then allocate nothing more."""
    dev = one_dev
    if precision == "fp8" and dev.kind == "cuda" and dev.compute_capability < 89:
        pytest.skip("this GPU has no fp8")
    dev.use_precision(precision)
    monkeypatch.setattr(fp8, "MIN_GAIN", 0)
    allocated = count_allocations(monkeypatch)
    said = sum(training_sizes(kind_of(config), config, Plan(4, 32, attention, **flags)).values())
    training = make_training(kind_of(config), config, 4, 32, attention, **{"logit_rows": 0} | flags)
    found = sum(array.nbytes for array in allocated)
    assert abs(found - said) <= 0.02 * said

    made, model, batch = len(allocated), training.model, training.batch
    for memory_of in (model.params_memory, batch.memory):
        dev.fill_zero(memory_of)
    for accumulate in False, True:
        if not accumulate:
            model.zero_grad()
        model.forward(training.acts, batch)
        model.loss(training.acts, batch, 1.0, accumulate)
        model.backward(training.acts, batch, accumulate)
    assert len(allocated) == made


def test_a_text_in_fp8_takes_a_byte_for_each_number_of_the_layers_matrices_and_room_for_one_in_bf16(bf16, monkeypatch):
    device.use_precision("fp8")
    monkeypatch.setattr(fp8, "MIN_GAIN", 0)
    allocated = count_allocations(monkeypatch)
    config = replace(QUANTIZED[0], num_layers=12)
    said = inference_sizes(kind_of(config), config, 2, 16)
    model = kind_of(config)(config, 16, inference=True)
    assert sum(array.nbytes for array in (model.params_memory, model.fp8.memory)) == said["parameters"]
    Cache(model, 2, 16, "softmax")
    assert sum(array.nbytes for array in allocated) == pytest.approx(sum(said.values()), rel=0.02)


@pytest.mark.parametrize("kind, model, card, most", [
    (Llama3, "llama3.1-8b", 49140, 2),
    (Qwen3, "qwen3-4b", 32607, 19),
    (Llama3, "llama3.2-3b", 24564, 12),
    (Qwen3, "qwen3-1.7b", 12282, 2),
])  # fmt: skip
def test_large_models_fit_on_small_gpus_as_the_readme_says(bf16, kind, model, card, most):
    config, room = kind.Config.described(model), (card << 20) - memory.CONTEXT - memory.RESERVE
    plan = Plan(1, 1024, "flash", logit_rows=memory.CHUNK)
    assert largest_batches(kind, config, plan, room)["--recompute --offload"] == most


@pytest.mark.parametrize("precision, kind, model, T, logit_rows, step", [
    ("bf16", GPT2, "d12", 1024, 0, 1),
    *(("fp8", Llama3, "llama3.2-1b", T, 1024, step) for T, step in ((1024, 1), (1000, 2), (999, 16))),
])  # fmt: skip
def test_the_largest_batches_fit_and_larger_ones_that_a_run_takes_do_not(
    bf16, precision, kind, model, T, logit_rows, step
):
    """step: in fp8 a run takes multiples of it alone."""
    device.use_precision(precision)
    config, plan, room = kind.Config.described(model), Plan(step, T, "flash", logit_rows=logit_rows), 60 * GIB
    for flags, B in largest_batches(kind, config, plan, room).items():
        changed = plan._replace(**memory.SAVING[flags])
        fits = [sum(training_sizes(kind, config, changed._replace(B=b)).values()) <= room for b in (B, B + step)]
        assert fits == [True, False] and B % step == 0 and B > 0
    assert set(largest_batches(kind, config, plan, 1 << 20).values()) == {0}


def test_flags_that_save_memory_make_room_for_larger_batches(bf16):
    found = largest_batches(GPT2, GPT2.Config.described("d12"), Plan(1, 1024, "flash"), 8 * GIB)
    assert found["--recompute"] == 2 * found[""] > 0 and found["--recompute --offload"] > found["--offload"] > found[""]


def test_a_model_that_does_not_fit_is_told_which_flags_would_make_it_fit(one_dev, monkeypatch):
    config, attention = ONE_OF_EACH[0]
    sizes = {flags: sum(training_sizes(GPT2, config, Plan(8, 32, attention, **changes)).values())
             for flags, changes in memory.SAVING.items()}  # fmt: skip
    monkeypatch.setattr(memory, "RESERVE", 0)
    for name in "empty", "asarray":
        monkeypatch.setattr(device.current.device, name, lambda *_: pytest.fail("allocated"))
    monkeypatch.setattr(device.current.device, "memory", lambda: (sizes["--recompute"], 64 * GIB))
    train = partial(make_training, GPT2, config, 8, 32, attention, logit_rows=0)
    said = refusal(train)
    assert "or -b 8 --recompute" in said and re.search(r"at most -b [1-7] or ", said)
    assert "--offload" not in said  # its buffers alone take more
    monkeypatch.setattr(device.current.device, "memory", lambda: (1 << 16, 64 * GIB))
    assert "no flag makes -b 1 fit, so lower -t" in refusal(train)


def test_on_a_gpu_what_would_fit_leaves_room_for_kernels_and_goes_with_what_the_host_has(monkeypatch):
    device.use("cpu")
    config, attention = ONE_OF_EACH[0]
    state = sum(memory.state_sizes(config, None).values())
    fitting = sum(training_sizes(GPT2, config, Plan(2, 32, attention, offload=True)).values())
    monkeypatch.setattr(device.current.device, "memory", lambda: (fitting + memory.RESERVE, 64 * GIB), raising=False)
    monkeypatch.setattr(device.current.device, "kind", "cuda", raising=False)
    for free, named in (state, True), (state - 1, False):
        monkeypatch.setattr(memory, "free_memory", lambda free=free: free)
        said = refusal(make_training, GPT2, config, 1 << 20, 32, attention, logit_rows=0)
        assert ("-b 2 --offload" in said) == ("--offload" in said) == named


def run(capsys, *flags: str) -> str:
    dry_run(GPT2, parse_arguments(GPT2.Config, ["--dry-run", "--device", "cpu", *flags]))
    return capsys.readouterr().out


def test_a_dry_run_says_what_is_taken_where_and_what_fits(capsys):
    out = run(capsys, "-e", "d48", "-b", "8", "--precision", "bf16", "--offload", "--memory", "24GiB")
    device.use_precision("fp32")
    row = r"^\| {} +\| (.*?) +\|$"
    number = {name: re.search(row.format(re.escape(name)), out, re.M)[1] for name in (
        "attention", "AdamW's pieces", "AdamW m", "in all, on the GPU", "in all, on the host", "-b, no flag",
        "-b, --offload", "-b, with both",
    )}  # fmt: skip
    assert number["attention"] == "flash" and number["AdamW's pieces"] == "96 MiB"
    assert number["AdamW m"] == "5942 MiB" and number["in all, on the host"].startswith("14855 MiB")
    assert number["-b, no flag"].startswith("none") and not number["-b, --offload"].startswith("none")


def test_a_dry_run_takes_all_flags_and_models_that_a_run_takes(capsys, tmp_path):
    plain, bitwise = (run(capsys, "-e", "d12", *flags) for flags in ([], ["--bitwise"]))
    assert "| sums of batches       | 475 MiB " in bitwise and "sums of batches" not in plain
    assert "on the host" not in plain and "for one GPU" not in plain
    assert "the table is for one GPU: of several" in run(capsys, "-e", "d12", "--gpus", "2")
    config = GPT2.Config.described("layers=1,heads=1,channels=16", vocab_size=300)
    folder = tmp_path / "run" / "step_00000002"
    folder.mkdir(parents=True)
    write_model(folder / "model.bin", config, np.zeros(num_parameters(config), np.float32))
    for model in folder / "model.bin", folder:
        assert "| vocabulary            | 300 " in run(capsys, "-e", str(model), "-t", "64")


@pytest.mark.parametrize("flags, said", [
    ("-e d12 -t 2048", "-t 2048 is above the model's longest sequence, 1024: lower -t"),
    ("-e tiny -a flash", "-a flash takes heads of 64 or 128 channels, this model's have 32: use -a softmax"),
    ("-e d12 -a flash --precision fp32", "-a flash computes in TF32 or bf16: leave"),
    ("-e d12 --dropout 0.1", "--dropout 0.1: GPT-2 trains without dropout"),
    ("-e d12 -d 5000", "-d 5000 is not a multiple of B*T = 4096"),
    ("--checkpoint-dir run -y 1", "--dry-run does not read a checkpoint's flags: leave -y out"),
])  # fmt: skip
def test_a_dry_run_refuses_what_a_run_refuses_and_to_resume(capsys, flags, said):
    assert refusal(run, capsys, *flags.split()).startswith(said)


def test_without_a_gpu_and_without_memory_given_it_says_what_would_tell_more(capsys):
    out = run(capsys, "-e", "d12")
    assert out.endswith("--memory 24GiB would say what fits\n") and "fits into" not in out


@pytest.mark.parametrize("size", ["24", "GiB", "0GiB", "24TiB", "-1GiB"])
def test_memory_is_an_amount_with_a_unit_and_of_a_dry_run_alone(size, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(GPT2.Config, ["--dry-run", "--memory", size])
    assert f"{size} must be an amount of memory" in capsys.readouterr().err or size.startswith("-")
    said = refusal(parse_arguments, GPT2.Config, ["--memory", "24GiB"])
    assert said.startswith("--memory is the amount for which --dry-run computes")


@pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)
def test_recomputed_layers_take_the_memory_of_one_but_for_their_inputs(config, attention):
    """Their inputs, and the statistics of the norms of these."""
    device.use("cpu")
    kind, L = kind_of(config), config.num_layers
    deep = type(config)(**{**vars(config), "num_layers": L + 5})
    shallow, deep = (training_bytes(kind, each, 8, 64, attention, recompute=True)[0] for each in (config, deep))
    assert deep - shallow <= 5 * 8 * 64 * 4 * (config.channels + 2)


# The logits of some positions at a time


@pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)
def test_chunks_take_the_memory_of_one(config, attention):
    device.use("cpu")
    kind, config = kind_of(config), replace(config, vocab_size=5000)
    sizes = [training_sizes(kind, config, Plan(8, 32, attention, rows))["activations"] for rows in (256, 0, 128, 16)]
    assert sizes[0] == sizes[1] == sizes[2] + 4 * 128 * 5120
    assert sizes[2] > sizes[3]  # in a Pythia other tensors lie there, too
    activations = Activations(kind(config, 32), 8, 32, attention, 16)
    assert activations.memory.nbytes == sizes[3] and activations.views().logits.shape == (16, 5120)


@pytest.mark.parametrize("others", [False, True])
def test_where_the_whole_does_not_fit_on_every_rank_all_take_chunks(monkeypatch, others):
    device.use("cpu")
    config, attention = ONE_OF_EACH[0]
    needed, asked = sum(training_sizes(GPT2, config, Plan(2, 11, attention)).values()), []
    monkeypatch.setattr(memory, "CHUNK", 5)
    monkeypatch.setattr(ranks, "all_gather", lambda crowded: [*asked, asked.append(crowded) or crowded, others])
    for free, rows in (needed, 5 if others else 22), (needed - 1, 5):
        monkeypatch.setattr(device.current.device, "memory", lambda free=free: (free, 64 * GIB))
        training = make_training(GPT2, config, 2, 11, attention)
        assert (asked.pop(), training.activations.logit_rows) == (free < needed, rows)
        training = make_training(GPT2, config, 2, 11, attention, logit_rows=7)
        assert not asked and training.activations.logit_rows == 7


@pytest.mark.long
def test_a_gpu_has_less_memory_by_what_the_table_says(dev):
    """After CUDA's context, kernels and cuBLAS's workspaces, which a small model has brought there. No other process
    may use the GPU meanwhile."""
    if dev.kind != "cuda":
        pytest.skip("no GPU")
    tiny, config = GPT2.Config.described("tiny"), GPT2.Config.described("d6")

    def trained(config, B: int, T: int):
        training = make_training(GPT2, config, B, T, "softmax", logit_rows=0)
        randomize(training.model, training.adamw, 1)
        dev.fill_zero(training.batch.memory)
        step = training_step(training, Batches(training.batch, training.acts.losses, GivenBatches(zeros(B, T)), 1))
        step(0, 1e-3)
        step(1, 1e-3)  # recorded
        dev.synchronize()
        return training

    def zeros(B: int, T: int):
        return [(np.zeros((B, T), np.int32),) * 2] * 2

    small = trained(tiny, 2, 64)
    free = dev.memory()[0]
    training = trained(config, 4, 1024)
    used, said = free - dev.memory()[0], sum(training_sizes(GPT2, config, Plan(4, 1024, "softmax")).values())
    assert abs(used - said) <= max(0.02 * said, 200 << 20), (used >> 20, said >> 20)
    assert small.model is not training.model


def test_the_tables_of_the_pages_are_what_a_dry_run_computes(capsys):
    """What training takes in README.md, and in doc/what-fits.md the largest -b of a card."""
    kinds = {preset: kind for kind in model_kinds() for preset in kind.Config.PRESETS}

    def computed(preset: str, row: str, *flags: str) -> str:
        flags = ("--dry-run", "--device", "cpu", "-e", preset, "-t", "1024", *flags)
        dry_run(kinds[preset], parse_arguments(kinds[preset].Config, flags))
        return re.search(rf"^\| {row} +\| (.*?) +\|$", capsys.readouterr().out, re.M)[1]

    table = dict(re.findall(r"^\| .*: `([\w.-]+)` \| (.*) \|$", (ROOT / "README.md").read_text(), re.M))
    assert {kinds[preset] for preset in table} == set(kinds.values())
    columns = [[precision] for precision in ("fp32", "tf32", "fp16", "bf16", "fp8")]
    columns.append(["bf16", "--recompute", "1", "--offload", "1"])
    for preset in table:
        sizes = [computed(preset, "in all, on the GPU", "-b", "1", "--precision", *flags) for flags in columns]
        assert table[preset] == " | ".join(f"{int(size.split()[0]) / 1024:.1f}" for size in sizes), preset

    presets = {
        "GPT-2 124M": "d12", "GPT-2 1.6B": "d48", "Llama 3.2 1B": "llama3.2-1b", "Llama 3.2 3B": "llama3.2-3b",
        "Llama 3.1 8B": "llama3.1-8b", "Qwen3-1.7B": "qwen3-1.7b", "Qwen3-4B": "qwen3-4b", "Qwen3-8B": "qwen3-8b",
    }  # fmt: skip
    text = (ROOT / "doc" / "what-fits.md").read_text()
    for card, plain, both in re.findall(r"^\| \d+ GiB: ([\d,]+) MiB \| (.*) \| (.*) \|$", text, re.M):
        for row, cell in ("-b, no flag", plain), ("-b, with both", both):
            for name, largest in re.findall(r"([A-Z][^:,]+): (\d+)", cell):
                memory_flag = f"--memory={card.replace(',', '')}MiB"
                said = computed(presets[name], row, "--precision", "bf16", memory_flag)
                assert said.endswith(f"with --logit-rows 1024 {largest}"), (card, name, row)
    device.use_precision("fp32")
