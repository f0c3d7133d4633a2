"""Several processes train one model, on the CPU device over gloo, and on as many GPUs as there are, by copies from GPU
to GPU and over NCCL: they find one another, compute what one would, save whole checkpoints, and end together."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from conftest import refusal
from llmc.data.token_file import write_tokens
from llmc.files.model_file import write_model
from llmc.model.tensors import num_parameters
from llmc.ranks import ranks
from llmc.ranks.environment import find_place, first_host
from llmc.run.arguments import parse_arguments
from llmc.run.logger import read_log
from llmc.run.stop import StopRequest
from models import TINY
from support.evaluations import random_examples, write_evaluation
from support.folders import V, make_folder
from support.ranks import (
    FLAGS,
    GPUS,
    HOST,
    ROOT,
    SCRIPTS,
    B,
    T,
    begun,
    children,
    ended,
    finish,
    folder,
    free_port,
    most,
    on,
    patched,
    run,
    start,
    torchrun_env,
    until,
)
from train_gpt2_fp32 import GPT2Config

import numpy as np
import pytest

__all__ = ["folder"]  # a fixture
BATCHES = 12 if GPUS > 3 else 6  # a step, which 1, 2 and 3 ranks can share, and 4 where there are so many GPUs


def steps(*flags: str, gpus: int = 1, last: int = 6) -> list[str]:
    """Flags of a run whose step is BATCHES batches, whatever the ranks."""
    return ["--gpus", str(gpus), "-d", str(BATCHES * B * T), "-x", str(last), *flags]


def bytes_of(folder: Path, directory: str) -> dict[str, bytes]:
    place = folder / directory
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.bin")}


# Starting


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]"}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1"}  # fmt: skip


@pytest.mark.parametrize("env, expected", [
    ({}, None),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    (TORCHRUN, (3, 8, 1, "node1", 29500)),
    (TORCHRUN | AGENT, (3, 8, 1, "node1", 29501)),
    (TORCHRUN | AGENT | {"LLMC_JOB": "x"}, (3, 8, 1, "node1", 29500)),  # of --gpus, in a process of torchrun's
    (SRUN, (5, 6, 2, "gpu07", None)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_ID": "7"}, None),  # a batch script, outside of srun
    (MPIRUN, (1, 2, 1, "127.0.0.1", None)),
    (MPIRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (1, 2, 1, "127.0.0.1", None)),  # mpirun under Slurm
    ({"OMPI_COMM_WORLD_RANK": "0"}, None),
])  # fmt: skip
def test_a_rank_finds_its_place_in_what_a_launcher_sets(env, expected):
    place = find_place(env)
    if expected is None:
        assert place is None
        return
    assert (place.rank, place.size, place.local_rank, place.address) == expected[:4]
    assert place.port == expected[4] or expected[4] is None and 20000 <= place.port < 30000


@pytest.mark.parametrize("env, message", [
    ({"RANK": "x", "WORLD_SIZE": "2"}, "rank x of 2"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
    (TORCHRUN | {"MASTER_ADDR": "a..b"}, "MASTER_ADDR a..b"),
    (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT 99999"),
    (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun -x MASTER_ADDR"),
])  # fmt: skip
def test_a_place_that_makes_no_sense_is_refused(env, message):
    assert message in refusal(find_place, env)


@pytest.mark.parametrize("nodes, first", [
    ("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu1", "gpu07"), ("gpu[07-09]-ib,b", "gpu07-ib"),
    ("n[1,3]", "n1"), ("rack1-n[003]", "rack1-n003"),
])  # fmt: skip
def test_the_first_machine_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.long
def test_torchrun_itself_starts_ranks(folder):
    script, description = SCRIPTS["gpt2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(),
               str(ROOT / script), "-e", description, "--device", folder.name, *FLAGS, *steps(last=2)[2:]]  # fmt: skip
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    env = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": caches}  # the ranks make their secret in HOME
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, env=env)
    assert (folder / ".llm.cupy.secret").stat().st_mode & 0o777 == 0o600
    assert done.returncode == 0 and done.stdout.count("step    2/2") == 1, done.stderr


# The same training


# A rank on the CPU takes two seconds to import PyTorch for gloo. tests/test_equivalence.py has ranks in one process.
@on("cpu cuda nccl")
@pytest.mark.parametrize("model, precision, others", [
    pytest.param(model, precision, [(2, "1"), (3, "0")], marks=pytest.mark.long)
    for model in SCRIPTS for precision in ("tf32", "bf16")
], ids=str)  # fmt: skip
def test_bitwise_runs_are_the_same_to_the_last_bit_on_any_number_of_ranks(folder, model, precision, others, rng):
    """Losses, validation, answers, samples, checkpoints; with clipping, decay, dropout, moments shared out or not.
    others: (ranks, where 3 stands for as many as there can be, --zero-stage). No run leaves a lock, or anything open
    that Python would report."""
    write_evaluation(folder / "questions.bin", random_examples(rng, 7))
    found = {}
    for gpus, zero in [(1, "0"), *((most(folder) if gpus > 2 else gpus, zero) for gpus, zero in others)]:
        name = f"{gpus}_{zero}"
        flags = steps(
            "--bitwise", "1", "-z", zero, "-o", f"{name}.log", "--checkpoint-dir", name, "-n", "3", "--seed", "3",
            "--grad-clip", "0.5", "-c", "0.1", "-g", "5", "-s", "2", "--best",
            *["--dropout", "0.1"] * TINY[model][0].DROPS, gpus=gpus,
        )  # fmt: skip
        asked = {} if folder.name == "nccl" else {"PYTHONWARNINGS": "error::ResourceWarning"}  # NCCL's is not ours
        flags += ["-b", "4", "-d", str(BATCHES * 4 * T), "--hellaswag", "questions.bin", "--precision", precision]
        out, error = run(folder, *flags, model=model, **asked)
        assert not list(folder.glob(".*")) and (error == "" or not asked)
        losses = re.findall(r"(?:train loss|val loss|accuracy|norm) ([0-9.]+)", out)
        samples = re.findall(r"generating:\n---\n(.*?)\n---", out, re.DOTALL)
        log = re.sub("s:.* sam:.*\n", "", (folder / f"{name}.log").read_text())  # the samples' seconds
        found[name] = losses, samples, log, bytes_of(folder, name)
    one = found["1_0"]
    assert len(one[0]) == 2 * 6 + 2 * 3 and len(one[1]) == 3 and len(one[3]) == 9
    assert all(other == one for other in found.values())


@on("cpu cuda", long="nccl")
def test_without_bitwise_several_ranks_train_as_one_does_but_for_rounding(folder):
    """In TF32 a difference in the last bit may round an operand the other way, by 5e-4 of itself: products are in fp32
    here. Flags change no bit where there are as many ranks."""
    way = {"cpu": "gloo", "cuda": "copies from GPU to GPU", "nccl": "NCCL"}[folder.name]
    for name, gpus, more in (
        ("one", 1, []), ("two", 2, ["-z", "1"]), *[("again", 2, ["-z", "0", "--offload"])] * (folder.name != "cpu"),
    ):  # fmt: skip
        flags = steps("--precision", "fp32", "-o", f"{name}.log", "--checkpoint-dir", name, gpus=gpus, last=4)
        out, _ = run(folder, *flags, *more)
        assert (re.search(rf"\| exchange +\| {way} ", out) is not None) == (gpus > 1)
    one, two = read_log(folder / "one.log"), read_log(folder / "two.log")
    assert one.keys() == two.keys() == {"trl", "tel", "bpb"}
    for name in one:
        assert np.array_equal(one[name][0], two[name][0])
        assert np.abs(one[name][1] - two[name][1]).max() <= 1.01e-4  # the log's last digit
    assert folder.name == "cpu" or bytes_of(folder, "again") == bytes_of(folder, "two") != {}


@on("cpu cuda", long="nccl")
def test_ranks_that_are_killed_go_on_with_other_flags_on_any_number_to_the_bits_of_one(folder):
    flags = steps("--bitwise", "1", "--precision", "bf16", "-n", "2", "--grad-clip", "0.5", "-c", "0.1", last=4)
    run(folder, *flags, "--checkpoint-dir", "one")
    more = ["--gpus", "2", "-x", "100000", "-z", "1", "--offload", "--recompute", "--checkpoint-dir", "two"]
    process = start(folder, *flags, *more)
    while not process.stdout.readline().startswith("saved two/step_00000002"):
        pass
    for pid in children(process):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    for checkpoint in sorted((folder / "two").glob("step_*"))[1:]:
        shutil.rmtree(checkpoint)
    out, _ = run(folder, "-y", "1", "-x", "4", "--offload", "0", "--checkpoint-dir", "two")
    assert f"{BATCHES}: {BATCHES * B * T} tokens" in out  # -d as it was
    assert bytes_of(folder, "two/step_00000004") == bytes_of(folder, "one/step_00000004") != {}


# Ending together


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_takes_the_others_with_it(folder, victim):
    process, pids = begun(folder)
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - started < 30 and ended(pids)
    assert error.startswith(f"error: rank {victim} on {HOST} is gone") and error.count("\n") == 1


@on("", long="cpu cuda")
def test_a_rank_that_cannot_read_its_data_is_named_and_no_other_and_the_run_is_saved(folder):
    """What the others notice of its end says nothing."""
    path = patched(folder, """
from device.errors import UserError
from llmc.data.dataloader import DataLoader
next_batch, calls = DataLoader.next_batch, []
def fails(self, inputs, targets):
    calls.append(0)
    if len(calls) > 12 and RANK == "1":
        raise UserError("a bad token here")
    next_batch(self, inputs, targets)
DataLoader.next_batch = fails
""")  # fmt: skip
    out, error = run(folder, "--gpus", "2", "-x", "100000", "--checkpoint-dir", "run", path=path, code=1)
    saved = max((folder / "run").glob("step_*"))
    line = f"rank 1 on {HOST}: a bad token here; the run goes on from run/{saved.name} with -y 1\n"
    assert error == f"error: {line}" and "step    2/" in out


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_is_said_and_the_ranks_go_on(folder):
    """The disk is full after the parameters, in the midst of the moments, which the ranks hand to rank 0."""
    run(folder, "-x", "1", "--checkpoint-dir", "whole")
    limit = (folder / "whole" / "step_00000001" / "model.bin").stat().st_size + 20_000
    process = start(
        folder, "--gpus", "2", "-z", "1", "-x", "4", "--checkpoint-dir", "run", "-n", "2",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    out, error = finish(process, code=1)
    assert out.count("not saved: ") == 2 and "step    4/4" in out
    assert error.startswith("error: the last checkpoint could not be written") and error.count("\n") == 1


def listening() -> set[str]:
    """The addresses and ports, as in /proc/net, of all that listens on this machine."""
    lines = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A"}


@on("cpu cuda")
@pytest.mark.parametrize("number, to", [
    (signal.SIGTERM, "rank"), pytest.param(signal.SIGINT, "rank", marks=pytest.mark.long),
    *(pytest.param(signal.SIGTERM, to, marks=pytest.mark.long) for to in ("launcher", "launcher rank", "rank launcher"))
])  # fmt: skip
def test_a_signal_to_any_process_stops_all_ranks_at_the_same_step_with_a_checkpoint(folder, number, to):
    """A scheduler may signal the launcher and all ranks at once. Until then they listen on the loopback alone; so do
    gloo and NCCL."""
    before = listening()
    process, pids = begun(folder, "-z", "1", "--checkpoint-dir", "run")
    new = listening() - before
    for one in to.split():
        os.kill(process.pid if one == "launcher" else pids[1], number)
    out, error = finish(process, code=128 + number)
    stopped = re.search(rf"stopped by {number.name} after (\d+) of 100000 steps", out)
    assert error == "" and ended(pids) and (folder / "run" / f"step_{int(stopped[1]):08}").is_dir()
    assert new and all(re.match("0100007F:|0{24}01000000:|0{16}FFFF00000100007F:", place) for place in new), new


@pytest.mark.long
def test_a_launcher_that_is_killed_takes_its_ranks_with_it(folder):
    process, pids = begun(folder)
    process.kill()
    process.communicate(timeout=30)
    until(lambda: ended(pids))


def test_a_signal_that_comes_while_ranks_ask_one_another_is_not_lost(monkeypatch):
    stop = SimpleNamespace(number=None)  # in its place: StopRequest takes over this process's signals

    def all_gather(value):
        stop.number = signal.SIGTERM
        return [value, None]

    monkeypatch.setattr(ranks, "all_gather", all_gather)
    assert [StopRequest.requested_on_any_rank(stop, ""), StopRequest.requested_on_any_rank(stop, "")] == [False, True]


@pytest.mark.long
def test_output_that_nobody_reads_ends_all_ranks_quietly(folder):
    process, pids = begun(folder)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=30) == 0 and ended(pids)


# Refusals

# What the flags of rank 0 and of rank 1 are, and what rank 0 then says.
OTHERS = {
    "wrong flag": (lambda r: ["--no"] * r, f"rank 1 on {HOST}: unrecognized arguments: --no; --help lists the flags"),
    "other flags": (
        lambda r: ["-l", f"1e-{2 + r}"],
        f"rank 1 on {HOST}: --learning-rate is 0.001, and rank 0's is 0.01; start all ranks with the same flags",
    ),
    "data": (lambda r: ["-i", ("plain", "other")[r]], "the fingerprint of the training data (-i) is "),
    "model": (lambda r: ["-i", "plain", "-e", f"{r}.bin"], "the checksum of the model is "),
    "missing data": (lambda r: ["-i", ("plain", "nowhere")[r]], "nowhere_train.bin: no such file"),
    "tokenizer": (lambda r: ["-i", ("data", "plain")[r]], "the fingerprint of the tokenizer is None, and rank 0's is "),
}


@on("cpu", long="cuda")
@pytest.mark.parametrize("what", [
    what if what in ("wrong flag", "other flags", "data") else pytest.param(what, marks=pytest.mark.long)
    for what in OTHERS
])  # fmt: skip
def test_ranks_that_cannot_train_together_end_with_one_line_from_rank_0(folder, what):
    """A wrong flag sets the exit status of its own rank alone."""
    config = GPT2Config.described(SCRIPTS["gpt2"][1], V)
    for r in range(2):
        write_model(folder / f"{r}.bin", config, np.full(num_parameters(config), 0.1 * r, np.float32))
    for split in "train", "val":
        shutil.copy(folder / f"data_{split}.bin", folder / f"plain_{split}.bin")  # which has no tokenizer
        write_tokens(folder / f"other_{split}.bin", np.random.default_rng(9).integers(0, V, 2000))
    (flags_of, said), port = OTHERS[what], free_port()
    processes = [start(folder, "-x", "1", *flags_of(r), **torchrun_env(r, 2, port)) for r in range(2)]
    codes = (1, 2) if what == "wrong flag" else (1, 1)
    errors = [finish(process, code)[1] for process, code in zip(processes, codes, strict=True)]
    assert said in errors[0] and errors[0].startswith("error: ") and errors[1] == ""


@on("cpu")
def test_a_run_of_several_ranks_that_cannot_start_says_so_in_one_line(folder, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    without = {"PYTHONPATH": str(tmp_path)}
    _, error = run(folder, "--gpus", "2", code=1, **without)
    assert "need PyTorch's gloo (no torch here): pip install torch" in error
    _, error = run(folder, "--gpus", "2", "-d", "33", code=1, **without)  # nobody has to wait for an import first
    assert error == f"error: -d 33 is not a multiple of 2 ranks * B*T = {2 * B * T}: change -d, -b or -t\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        _, error = run(folder, code=1, **torchrun_env(0, 2, port))
    assert error.startswith(
        f"error: rank 0 cannot listen at 127.0.0.1, port {port} (address already in use): for all ranks set "
    )  # fmt: skip


def test_a_number_of_ranks_that_makes_no_sense_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(GPT2Config, ["--gpus", "0"])
    assert "--gpus" in capsys.readouterr().err
    monkeypatch.setattr(ranks, "_group", SimpleNamespace(size=2))
    assert refusal(ranks.start, 3) == "--gpus 3: 2 processes have been started already; leave --gpus out"


def test_more_ranks_than_gpus_are_refused(folder):
    if folder.name == "cpu":
        pytest.skip("the CPU takes any number")
    _, error = run(folder, "--gpus", str(GPUS + 1), code=1)
    assert "has the same GPU as rank 0: there are more ranks than GPUs" in error


@pytest.mark.long
def test_a_rank_without_a_checkpoint_directory_need_not_have_one(folder):
    """Only rank 0 reads and writes checkpoints: the others may be on machines that do not see them."""
    run(folder, *steps("--checkpoint-dir", "run", last=2))
    (folder.parent / "elsewhere").mkdir()
    other = make_folder(folder.parent / "elsewhere" / folder.name)
    port = free_port()
    flags = ["-y", "1", "--checkpoint-dir", "run", "-x", "3"]
    processes = [start(place, *flags, **torchrun_env(r, 2, port)) for r, place in enumerate((folder, other))]
    (out, _), _ = map(finish, processes)
    assert "step    3/3" in out and not (other / "run").exists()
    assert json.loads((folder / "run" / "step_00000003" / "state.json").read_text())["step"] == 3
