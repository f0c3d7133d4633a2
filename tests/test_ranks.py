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

from conftest import DEVICES
from device.errors import UserError
from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import write_tokenizer
from llmc.ranks import ranks
from llmc.ranks.environment import find_place, first_host
from llmc.run.logger import read_log
from llmc.run.stop import StopRequest
from models import TINY, described
from support.evaluations import random_examples, write_evaluation

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
V, B, T = 61, 2, 16
SCRIPTS = {name: (kind.Config.SCRIPT, described(name, V, 64)[0]) for name, (kind, _) in TINY.items()}
SCRIPTS["gpt2"] = "train_gpt2_fp32.py", "layers=3,heads=3,channels=36,maxT=64"  # whose tensors no shard begins with
FLAGS = ["-i", "data", "-b", str(B), "-t", str(T), "-g", "0", "-v", "3", "-m", "7", "-l", "1e-2"]
GPUS = 0
if "cuda" in DEVICES:
    import cupy

    GPUS = cupy.cuda.runtime.getDeviceCount()
BATCHES = 12 if GPUS > 3 else 6  # a step, which 1, 2 and 3 ranks can share, and 4 where there are so many GPUs
KINDS = ["cpu"] + ["cuda"] * (GPUS > 1)
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # as between machines


def on(kinds: str, long: str = "") -> pytest.MarkDecorator:
    """Runs a test on these, as far as there are GPUs for them, and on others in make test-all."""
    there = ["cpu", *["cuda", "nccl"] * (GPUS > 1)]
    params = [kind for kind in kinds.split() if kind in there]
    params += [pytest.param(kind, marks=pytest.mark.long) for kind in long.split() if kind in there]
    return pytest.mark.parametrize("folder", params, indirect=True)


@pytest.fixture(params=KINDS)
def folder(request, tmp_path) -> Path:
    """A directory with data, named after the device on which `start` runs."""
    directory = tmp_path / request.param
    directory.mkdir()
    for split, count in (("train", 3000), ("val", 400)):
        write_tokens(directory / f"data_{split}.bin", np.random.default_rng(count).integers(0, V, count))
    write_tokenizer(directory / "data_tokenizer.bin", [bytes([32 + i]) for i in range(V)], eot=V - 1)
    return directory


def most(folder: Path) -> int:
    """Ranks that fit on the device."""
    return 3 if folder.name == "cpu" else min(4, GPUS)


def start(
    folder: Path, *flags: str, model: str = "gpt2", path: Path | None = None, preexec_fn=None, **env: str
) -> subprocess.Popen:
    """path: the script, where it is not the model's own."""
    script, description = SCRIPTS[model]
    kind = "cpu" if folder.name == "cpu" else "cuda"
    command = [sys.executable, "-u", str(path or ROOT / script), "-e", description, "--device", kind, *FLAGS, *flags]
    if folder.name == "nccl":
        env |= SOCKETS
    return subprocess.Popen(
        command, cwd=folder, env=os.environ | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=preexec_fn,
    )  # fmt: skip


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    out, error = process.communicate(timeout=100)
    assert process.returncode == code, (process.returncode, out[-2000:], error)
    assert "Traceback" not in error, error
    return out, error


def run(folder: Path, *flags: str, code: int = 0, **options) -> tuple[str, str]:
    return finish(start(folder, *flags, **options), code)


def steps(*flags: str, gpus: int = 1, last: int = 6) -> list[str]:
    """Flags of a run whose step is BATCHES batches, whatever the ranks."""
    return ["--gpus", str(gpus), "-d", str(BATCHES * B * T), "-x", str(last), *flags]


def bytes_of(folder: Path, directory: str) -> dict[str, bytes]:
    place = folder / directory
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*.bin")}


# Starting


@pytest.mark.parametrize("env, expected", [
    ({}, None),
    ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
     (3, 8, 1, "node1", 29500)),
    ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
      "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x"}, (3, 8, 1, "node1", 29501)),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2", "SLURM_JOB_ID": "7",
      "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]"}, (5, 6, 2, "gpu07", None)),
    ({"OMPI_COMM_WORLD_RANK": "0"}, None),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_JOB_ID": "7"}, None),  # a batch script, outside of srun
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1"}, (1, 2, 1, "127.0.0.1", None)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # mpirun under Slurm
     (1, 2, 1, "127.0.0.1", None)),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "LLMC_JOB": "x",
      "TORCHELASTIC_USE_AGENT_STORE": "True"}, (1, 2, 1, "a", 29500)),  # of --gpus, in a process of torchrun's
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
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a..b"}, "MASTER_ADDR a..b"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT 99999"),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun -x MASTER_ADDR"),
])  # fmt: skip
def test_a_place_that_makes_no_sense_is_refused(env, message):
    with pytest.raises(UserError, match=re.escape(message)):
        find_place(env)


@pytest.mark.parametrize("nodes, first", [
    ("a", "a"), ("a,b", "a"), ("gpu[07-09,12],cpu1", "gpu07"), ("gpu[07-09]-ib,b", "gpu07-ib"),
    ("n[1,3]", "n1"), ("rack1-n[003]", "rack1-n003"),
])  # fmt: skip
def test_the_first_machine_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def torchrun_env(rank: int, size: int, port: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "LLMC_SECRET": "of the tests"}  # fmt: skip


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
@pytest.mark.parametrize("model", ["gpt2", *(pytest.param(m, marks=pytest.mark.long) for m in SCRIPTS if m != "gpt2")])
def test_without_bitwise_several_ranks_train_as_one_does_but_for_rounding(folder, model):
    """In TF32 a difference in the last bit may round an operand the other way, by 5e-4 of itself: products are in fp32
    here. Flags change no bit where there are as many ranks."""
    for name, gpus, more in (
        ("one", 1, []), ("two", 2, ["-z", "1"]), *[("again", 2, ["-z", "0", "--offload"])] * (folder.name != "cpu"),
    ):  # fmt: skip
        flags = steps("--precision", "fp32", "-o", f"{name}.log", "--checkpoint-dir", name, gpus=gpus, last=4)
        out, _ = run(folder, *flags, *more, model=model)
        way = {"cpu": "gloo", "cuda": "copies from GPU to GPU", "nccl": "NCCL"}[folder.name]
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


def children(process: subprocess.Popen) -> list[int]:
    """The processes of the ranks that one with --gpus has started, in their order."""
    for _ in range(200):
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if len(listed) >= 2:
            return [int(pid) for pid in listed]
        time.sleep(0.05)
    raise AssertionError("no processes were started")


def begun(folder: Path, *flags: str, **env: str) -> tuple[subprocess.Popen, list[int]]:
    """A long run of two ranks in its first steps, and the processes of the ranks."""
    process = start(folder, "--gpus", "2", "-x", "100000", *flags, **env)
    pids = children(process)
    while not process.stdout.readline().startswith("step"):
        pass
    return process, pids


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_is_killed_takes_the_others_with_it(folder, victim):
    process, pids = begun(folder)
    os.kill(pids[victim], signal.SIGKILL)
    started = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert process.returncode != 0 and time.monotonic() - started < 30 and ended(pids)
    assert error.startswith(f"error: rank {victim} on {socket.gethostname()} is gone") and error.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_killed_at_random_moments_leave_none_behind(folder, seed):
    """Also while they start, save or validate; what they have saved is whole."""
    if folder.name == "cuda" and seed >= 5:
        pytest.skip("five times on GPUs")
    rng = np.random.default_rng(seed)
    gpus = most(folder)
    kept = ["--checkpoint-dir", "run", "-n", "1", "-nk", "3"]
    process = start(folder, "--gpus", str(gpus), "-x", "100000", "-z", "1", *kept)
    pids = children(process)
    time.sleep(rng.uniform(0, 8 if folder.name == "cpu" else 20))
    victim = int(rng.integers(len(pids)))
    os.kill(pids[victim], signal.SIGKILL)
    out, error = process.communicate(timeout=30)
    assert process.returncode != 0 and ended(pids) and f"rank {victim}" in error and "Traceback" not in error, error
    if any((folder / "run").glob("step_????????")):
        _, error = run(folder, "--gpus", str(gpus), "-y", "1", *kept, "-x", "0", code=1)
        assert "raise -x" in error


@on("", long="cpu cuda")
def test_a_rank_that_cannot_read_its_data_is_named_and_no_other_and_the_run_is_saved(folder):
    """What the others notice of its end says nothing."""
    (folder / "sitecustomize.py").write_text(f"""
import os, sys
if os.environ.get("RANK") == "1":
    sys.path.insert(0, {str(ROOT)!r})
    from llmc.data.dataloader import DataLoader
    from device.errors import UserError
    next_batch, calls = DataLoader.next_batch, []
    def fails(self, inputs, targets):
        calls.append(0)
        if len(calls) > 12:
            raise UserError("a bad token here")
        next_batch(self, inputs, targets)
    DataLoader.next_batch = fails
""")
    flags = "--gpus", "2", "-x", "100000", "--checkpoint-dir", "run"
    out, error = run(folder, *flags, code=1, PYTHONPATH=str(folder))
    saved = max((folder / "run").glob("step_*"))
    line = f"rank 1 on {socket.gethostname()}: a bad token here; the run goes on from run/{saved.name} with -y 1\n"
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
    for _ in range(100):
        if ended(pids):
            break
        time.sleep(0.1)
    assert ended(pids)


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


def refused(folder: Path, flags_of, codes: tuple[int, ...] = (1, 1)) -> str:
    """What is printed on stderr by ranks that are started with flags_of(rank), all of which must end."""
    port = free_port()
    processes = [start(folder, *flags_of(r), **torchrun_env(r, len(codes), port)) for r in range(len(codes))]
    errors = [finish(process, code)[1] for process, code in zip(processes, codes, strict=True)]
    assert errors[1:] == [""] * (len(codes) - 1) and errors[0].count("\n") == 1, errors
    return errors[0]


@on("cpu", long="cuda")
def test_a_wrong_flag_of_any_rank_is_one_line(folder):
    """No other rank sets this one's exit status."""
    said = f"rank 1 on {socket.gethostname()}: unrecognized arguments: --no; --help lists the flags"
    assert refused(folder, lambda r: ["--no"] * r, (1, 2)) == f"error: {said}\n"


@on("cpu", long="cuda")
def test_ranks_with_other_flags_end_with_one_line_from_rank_0(folder):
    error = refused(folder, lambda r: ["-x", "3", "-l", f"1e-{2 + r}"])
    host = socket.gethostname()
    said = "--learning-rate is 0.001, and rank 0's is 0.01; start all ranks with the same flags"
    assert error == f"error: rank 1 on {host}: {said}\n"


@on("cpu", long="cuda")
@pytest.mark.parametrize("what", [
    "data", *(pytest.param(other, marks=pytest.mark.long) for other in ("model", "missing data", "tokenizer"))
])  # fmt: skip
def test_ranks_with_other_data_or_another_model_end_with_one_line_from_rank_0(folder, what):
    for split, count in (("train", 3000), ("val", 400)):
        write_tokens(folder / f"other_{split}.bin", np.random.default_rng(9).integers(0, V, count))
        shutil.copy(folder / f"data_{split}.bin", folder / f"without_{split}.bin")
    if what != "tokenizer":  # which is compared first
        (folder / "data_tokenizer.bin").unlink()
    if what == "model":
        for seed in "12":
            run(folder, "-x", "1", "--seed", seed, "--checkpoint-dir", f"m{seed}")
    flags = {
        "data": lambda r: ["-i", ("data", "other")[r]],
        "model": lambda r: ["-e", f"m{r + 1}/step_00000001/model.bin"],
        "missing data": lambda r: ["-i", ("data", "nowhere")[r]],
        "tokenizer": lambda r: ["-i", ("data", "without")[r]],
    }[what]
    error = refused(folder, lambda r: ["-x", "1", *flags(r)])
    assert {
        "data": "the fingerprint of the training data (-i) is ",
        "model": "the checksum of the model is ",
        "missing data": "nowhere_train.bin: no such file",
        "tokenizer": "the fingerprint of the tokenizer is None, and rank 0's is ",
    }[what] in error and error.startswith("error: rank 1 on ")


@on("cpu", long="cuda")
def test_what_ranks_cannot_share_is_refused_in_one_line(folder):
    _, error = run(folder, "--gpus", "2", "-d", str(3 * B * T), code=1)
    assert error == f"error: -d {3 * B * T} is not a multiple of 2 ranks * B*T = {2 * B * T}: change -d, -b or -t\n"
    _, error = run(folder, "--gpus", "0", code=2)
    assert error.count("\n") == 1 and "--gpus" in error
    error = refused(folder, lambda r: ["--gpus", "3"])
    assert error == "error: --gpus 3: 2 processes have been started already; leave --gpus out\n"


@on("cpu", long="cuda")
def test_a_port_in_use_is_one_line(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        _, error = run(folder, code=1, **torchrun_env(0, 2, port))
    assert error.startswith(
        f"error: rank 0 cannot listen at 127.0.0.1, port {port} (address already in use): for all ranks set "
    )  # fmt: skip


@pytest.mark.parametrize("folder", ["cpu"], indirect=True)
def test_gloo_that_is_missing_is_one_line(folder, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    _, error = run(folder, "--gpus", "2", code=1, PYTHONPATH=str(tmp_path))
    assert error.count("\n") == 1 and "need PyTorch's gloo (no torch here): pip install torch" in error
    _, error = run(folder, "--gpus", "2", "-d", "33", code=1, PYTHONPATH=str(tmp_path))
    assert error.startswith("error: -d 33 is not a multiple of ")  # which nobody has to wait two seconds for


def test_more_ranks_than_gpus_are_refused(folder):
    if folder.name == "cpu":
        pytest.skip("the CPU takes any number")
    _, error = run(folder, "--gpus", str(GPUS + 1), code=1)
    assert "has the same GPU as rank 0: there are more ranks than GPUs" in error and error.count("\n") == 1


@pytest.mark.long
@pytest.mark.parametrize("weight", ["fcprojw", "wte"])
def test_a_gradient_that_overflows_where_one_rank_alone_sees_it_stops_all(folder, weight):
    """With -z that is the owner of the weight: rank 0, or the other one."""
    script, trainer = folder / "overflowing.py", str(ROOT / "train_gpt2_fp32.py")
    script.write_text(f"""
import runpy
import llmc.step.update
real = llmc.step.update.adamw_update
def update(model, adamw, exchange, lr, t):
    if t == 2:
        model.grads.{weight}.reshape(-1)[5] = 1e25
    real(model, adamw, exchange, lr, t)
llmc.step.update.adamw_update = update
runpy.run_path({trainer!r}, run_name="__main__")
""")
    flags = ["--gpus", "2", "--checkpoint-dir", "run", "-n", "1", "-x", "4"]
    _, error = run(folder, *flags, path=script, code=1, PYTHONPATH=str(ROOT))
    assert error.count("\n") == 1 and re.match(r"error: step 2: its loss \(.*\) or gradients are not finite", error)
    assert "and the others have taken the step" in error and error.endswith("came to: run/step_00000002\n")


@pytest.mark.long
def test_a_rank_without_a_checkpoint_directory_need_not_have_one(folder):
    """Only rank 0 reads and writes checkpoints: the others may be on machines that do not see them."""
    run(folder, *steps("--checkpoint-dir", "run", last=2))
    other = folder.parent / "elsewhere" / folder.name
    other.mkdir(parents=True)
    for path in folder.glob("data*"):
        (other / path.name).write_bytes(path.read_bytes())
    port = free_port()
    flags = ["-y", "1", "--checkpoint-dir", "run", "-x", "3"]
    processes = [start(place, *flags, **torchrun_env(r, 2, port)) for r, place in enumerate((folder, other))]
    (out, _), _ = map(finish, processes)
    assert "step    3/3" in out and not (other / "run").exists()
    assert json.loads((folder / "run" / "step_00000003" / "state.json").read_text())["step"] == 3
