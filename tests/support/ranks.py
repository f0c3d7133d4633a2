"""Programs of several ranks: processes on the CPU device over gloo, on GPUs with peer access, or over NCCL."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conftest import DEVICES
from models import TINY, described
from support.folders import V, make_folder

import pytest

ROOT, HOST = Path(__file__).resolve().parents[2], socket.gethostname()
B, T = 2, 16
SCRIPTS = {name: (kind.Config.SCRIPT, described(name, V, 64)[0]) for name, (kind, _) in TINY.items()}
SCRIPTS["gpt2"] = "train_gpt2_fp32.py", "layers=3,heads=3,channels=36,maxT=64"  # whose tensors no shard begins with
FLAGS = ["-i", "data", "-b", str(B), "-t", str(T), "-g", "0", "-v", "3", "-m", "7", "-l", "1e-2"]
GPUS = 0
if "cuda" in DEVICES:
    import cupy

    GPUS = cupy.cuda.runtime.getDeviceCount()
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # as between machines


def on(kinds: str, long: str = "") -> pytest.MarkDecorator:
    """Runs a test on these, as far as there are GPUs for them, and on others in make test-all."""
    there = ["cpu", *["cuda", "nccl"] * (GPUS > 1)]
    params = [kind for kind in kinds.split() if kind in there]
    params += [pytest.param(kind, marks=pytest.mark.long) for kind in long.split() if kind in there]
    return pytest.mark.parametrize("folder", params, indirect=True)


@pytest.fixture(params=["cpu"] + ["cuda"] * (GPUS > 1))
def folder(request, tmp_path) -> Path:
    """A directory with data, named after the device on which `start` runs."""
    return make_folder(tmp_path / request.param)


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
    """What the process prints to stdout and stderr. It must end with this code, and say why in at most one line."""
    out, error = process.communicate(timeout=100)
    assert process.returncode == code, (process.returncode, out[-2000:], error)
    assert "Traceback" not in error and (code == 0 or error.count("\n") <= 1), error
    return out, error


def run(folder: Path, *flags: str, code: int = 0, **options) -> tuple[str, str]:
    return finish(start(folder, *flags, **options), code)


def patched(folder: Path, text: str) -> Path:
    """A trainer in which `text` is run first; RANK is this process's rank."""
    path = folder / "patched.py"
    path.write_text(f"""
import os, runpy, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
RANK = os.environ.get("RANK")
{text}
runpy.run_path({str(ROOT / "train_gpt2_fp32.py")!r}, run_name="__main__")
""")
    return path


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def torchrun_env(rank: int, size: int, port: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "LLMC_SECRET": "of the tests"}  # fmt: skip


def until(found: Callable[[], object]):
    """What found() returns, once that is true."""
    for _ in range(200):
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError("it does not come")


def children(process: subprocess.Popen) -> list[int]:
    """The processes of the ranks that one with --gpus has started, in their order."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return until(lambda: len(pids := list(map(int, path.read_text().split()))) > 1 and pids)


def begun(folder: Path, *flags: str, **env: str) -> tuple[subprocess.Popen, list[int]]:
    """A long run of two ranks in its first steps, and the processes of the ranks."""
    process = start(folder, "--gpus", "2", "-x", "100000", *flags, **env)
    pids = children(process)
    while not process.stdout.readline().startswith("step"):
        pass
    return process, pids


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)
