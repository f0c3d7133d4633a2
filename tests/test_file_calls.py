"""Whatever file operation of a run is its last, or fails, or is lost in a power cut: no checkpoint that was said to be
saved is lost, no older one comes back, and a worse model never replaces the best one. Whatever call fails in a program,
it ends with one line that names the file, or goes on.

A process saves checkpoints, prunes them, keeps the best, logs and resumes, with file_calls.cpp preloaded; or it runs
whole programs. It forks for each case, so a case takes milliseconds."""

import ctypes
import errno
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from device.cpp import compiler  # noqa: E402
from device.errors import UserError  # noqa: E402
from llmc.data.token_file import write_tokens  # noqa: E402
from llmc.data.tokenizer import write_tokenizer  # noqa: E402
from llmc.files.checkpoint import load_checkpoint  # noqa: E402
from llmc.files.checkpoint_dir import lock_checkpoints, newest_checkpoint  # noqa: E402
from llmc.model.tensors import num_parameters  # noqa: E402
from llmc.run.logger import Logger, read_log  # noqa: E402
from llmc.run.program import run_program  # noqa: E402
from llmc.run.saver import NonfiniteGuard, Saver  # noqa: E402
from llmc.run.trainer import run_trainer  # noqa: E402
from train_gpt2_fp32 import GPT2, GPT2Config  # noqa: E402
from train_gpt2_fp32 import train as train_gpt2  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402

CONFIG = GPT2Config(4, 11, 1, 1, 4)
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0}  # by step; the run is resumed after step 2
FAILURES = {  # the error, and whether all later calls fail, too
    "killed": (0, False), "EIO": (errno.EIO, False), "ENOSPC": (errno.ENOSPC, False),
    "full disk": (errno.ENOSPC, True), "quota": (errno.EDQUOT, True), "mounted read-only": (errno.EROFS, True),
}  # fmt: skip
IN_A_PROGRAM = " in a program"
ERRORS = [f"{error}{IN_A_PROGRAM}" for error in ("EIO", "EINTR", "ENOMEM", "ESTALE", "EDQUOT")]
KINDS = [*FAILURES, "power cut", *ERRORS]
ORDINARY = "killed", "EIO", "power cut", *ERRORS[:2]  # in `make test`, a few cases of each
FEW = 4
NAMED = re.compile("^error: .*(new|run|data|texts|mine|exported|imported|config|model|tokenizer|in_here)")


@cache
def calls() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.calls_failed.restype = ctypes.c_char_p
    return library


def mark(text: str) -> None:
    """This was said."""
    calls().calls_mark(text.encode())


def forked(work: Callable, number: int = 0, error: int = 0, for_good: bool = False) -> SimpleNamespace:
    """Runs a program in a process of its own, in which the call of this number fails; 0: none. Its status; the number
    of calls seen; the call that failed; what it printed; and its calls that changed something."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as seen, tempfile.TemporaryFile() as record:
        child = os.fork()
        if child == 0:
            for stream in 1, 2:
                os.dup2(printed.fileno(), stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
            calls().calls_watch(os.getcwd().encode(), number, error, for_good, record.fileno())
            try:
                run_program(work)
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
                print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
                status = 70
            os.write(seen.fileno(), f"{calls().calls_pause(1)} ".encode() + calls().calls_failed())
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in printed, seen, record:
            file.seek(0)
        count, _, failed = seen.read().decode().partition(" ")
        return SimpleNamespace(
            status=status, seen=int(count or 0), failed=failed, printed=printed.read().decode(),
            record=record.read().decode().splitlines(),
        )  # fmt: skip


@contextmanager
def new_folder(template: str | None = None) -> Iterator[None]:
    """The working directory in the block: an empty one, or a copy."""
    with tempfile.TemporaryDirectory(prefix="in_here", dir=os.environ["FOLDER"]) as folder:
        if template:
            shutil.copytree(template, folder, dirs_exist_ok=True)
        os.chdir(folder)
        yield
        os.chdir("/")


def try_all(
    kind: str, work: Callable, failure: tuple[int, bool], judge: Callable, few: bool, template: str | None = None
) -> int:
    """Each call is the last or fails, in turn. Returns the number of cases."""
    with new_folder(template):
        total = forked(work).seen
    numbers = range(1, total + 1, max(1, total // FEW) if few else 1)
    for number in numbers:
        with new_folder(template):
            ended = forked(work, number, *failure)
            lines = [line for line in ended.printed.splitlines() if line.startswith("error: ")]
            try:
                if kind == "killed":
                    assert ended.status == -signal.SIGKILL
                else:
                    assert ended.status in (0, 1) and len(lines) == ended.status and all(map(NAMED.search, lines))
                    assert "Traceback" not in ended.printed and "Exception ignored" not in ended.printed
                judge(ended)
            except BaseException:
                last = "\n".join(line[:100] for line in ended.record[-9:])
                print(f"{kind} at call {number}, {ended.failed}: {ended.printed[-2000:]}\n{last}", file=sys.stderr)
                raise
    return len(numbers)


# A run


def measure() -> dict:
    return {"val_batches": 1, "val_data": "data"}


def best_loss(folder: str = "run") -> float:
    for name in "best", "best.replaced.part":  # the latter while another takes its place
        with suppress(UserError):
            return load_checkpoint(f"{folder}/{name}", GPT2Config)[4]["best"]["val_loss"]
    return math.inf


def unwatched_best_loss() -> float:
    calls().calls_pause(1)
    loss = best_loss()
    calls().calls_pause(0)
    return loss


def run(steps: list[int]) -> None:
    """Trains steps, as a run with --best, -nk 1 and a log does. The parameters are the step's number. Raises UserError
    where a run would end."""
    lock = lock_checkpoints("run")
    newest = newest_checkpoint("run")
    first = load_checkpoint(newest, GPT2Config)[4]["step"] if newest else 0
    logger, step, n = Logger("run.log", first), first, num_parameters(CONFIG)
    exchange = SimpleNamespace(whole_state=lambda adamw: [np.full(n, step, np.float32)] * 3, sharded=False)
    training = SimpleNamespace(exchange=exchange, adamw=None, model=SimpleNamespace(config=CONFIG))
    flags = SimpleNamespace(checkpoint_dir="run", keep=1, best=True)
    saver = Saver(training, SimpleNamespace(flags=flags, first_step=first), {}, "a run", None, lock)
    lowest = saver.lowest_loss(measure)
    for step in (step for step in steps if step > first):
        lost, loss = logger.lost, LOSSES[step]
        logger.log(step - 1, train_loss=loss)
        if logger.lost == lost:
            mark(f"logged {step - 1}")
        before = unwatched_best_loss()
        if loss < lowest:
            lowest = saver.save_best(step, {}, NonfiniteGuard(False, 0), loss, measure)
            if "best" not in saver.unsaved:
                mark(f"best {loss}")
        saver.save(step, {}, NonfiniteGuard(False, 0))
        if saver.saved_step == step:
            mark(f"saved {step}")
        assert unwatched_best_loss() <= before, "a worse model has replaced the best one"
    logger.close()
    saver.release()


def both_runs() -> None:
    run([1, 2])
    run([1, 2, 3, 4])


def check(record: list[str], power_cut: bool = False) -> None:
    """What must be true in the working directory when a run begins there. record: has the marks of the runs before."""
    said = [line.split("\t")[1].split() for line in record if line.startswith("mark")]
    saved = max([int(step) for what, step in said if what == "saved"], default=0)
    best = min([float(loss) for what, loss in said if what == "best"], default=math.inf)
    lock_checkpoints("run").release()
    there = os.listdir("run") if os.path.isdir("run") else []
    assert not [name for name in there if name.endswith(".part") or name.startswith(".")], there
    newest = newest_checkpoint("run")
    for path in filter(None, (newest, "best" in there and Path("run/best"))):
        _, tensors, m, v, state = load_checkpoint(path, GPT2Config)
        assert all((values == state["step"]).all() for values in (*tensors.values(), m, v))
    assert not saved or newest is not None and load_checkpoint(newest, GPT2Config)[4]["step"] >= saved, (saved, there)
    assert best_loss() <= best, (best, there)
    if not power_cut:  # a log's lines are not synced
        logged = {int(step) for what, step in said if what == "logged"}
        assert not logged or logged <= {*read_log("run.log")["trl"][0].tolist()}, logged
    run([1, 2, 3, 4])  # nothing is in the way
    assert load_checkpoint(newest_checkpoint("run"), GPT2Config)[4]["step"] == 4
    assert best_loss() == 2.0 or newest is not None and newest.name == "step_00000004"  # its best was not saved
    assert sorted(os.listdir("run"))[0] == "best" and len(os.listdir("run")) >= 2


# A power cut


def operations(lines: list[str], root: str) -> list[tuple]:
    """What was recorded, with inodes in the place of paths: (what, inode that has to be synced, ...)."""
    tree, found, inodes = {0: {}}, [], 1

    def inode_of(path: str) -> int | None:
        at = 0
        for name in Path(path).relative_to(root).parts:
            at = tree.get(at, {}).get(name)
        return at

    for line in lines:
        what, path, *rest = line.split("\t")
        if what == "mark":
            found.append(("mark", None, line))
            continue
        folder, name, inode = inode_of(os.path.dirname(path)) if path != root else None, Path(path).name, inode_of(path)
        if what in ("create", "mkdir", "truncate") and inode is None:
            tree[folder][name], tree[inodes] = inodes, {}
            found.append(("link", folder, name, inodes, what == "mkdir"))
            inodes += 1
        elif what == "truncate":
            found.append(("truncate", inode, int(rest[0])))
        elif what == "write" and inode is not None:
            found.append(("write", inode, int(rest[0]), bytes.fromhex(rest[1])))
        elif what == "sync":
            found.append(("sync", inode))
        elif what == "unlink":
            del tree[folder][name]
            found.append(("unlink", folder, name))
        elif what == "rename":
            new = Path(rest[0]).name
            tree[folder][new] = tree[folder].pop(name)
            found.append(("rename", folder, name, new, inode))
    return found


def disk(done: list[tuple], missing: tuple = (), torn: bool = False) -> dict[str, bytes | None]:
    """What is on the disk after these operations, but for those that are missing: the bytes of each file by its path,
    and None for each folder. torn: half of a missing write is there."""
    folders, files = {0: {}}, {}
    for number, (what, at, *rest) in enumerate(done):
        if what == "link":
            (folders if rest[2] else files)[rest[1]] = {} if rest[2] else bytearray()
        if number in missing and not (torn and what == "write"):
            continue
        if what == "link":
            folders[at][rest[0]] = rest[1]
        elif what == "unlink":
            folders[at].pop(rest[0], None)
        elif what == "rename":
            folders[at].pop(rest[0], None)
            folders[at][rest[1]] = rest[2]
        elif what == "truncate":
            del files[at][rest[0] :]
        elif what == "write":
            start, data = rest
            data = data[: len(data) // 2] if number in missing else data
            files[at].extend(bytes(max(0, start + len(data) - len(files[at]))))
            files[at][start : start + len(data)] = data

    def below(folder: int, path: str) -> Iterator[tuple[str, bytes | None]]:
        for name, at in folders[folder].items():
            yield path + name, None if at in folders else bytes(files[at])
            yield from below(at, f"{path}{name}/") if at in folders else ()

    return dict(below(0, ""))


def cut_power(few: bool) -> tuple[int, int]:
    """After each prefix of the operations: all are on the disk; none that was not synced; each that was not synced is
    missing, or torn, by itself. Returns how many such disks, and how many different ones."""
    with new_folder():
        recorded = operations(forked(both_runs).record, os.getcwd())
    seen, tried = set(), 0
    for end in range(0, len(recorded) + 1, max(1, len(recorded) // FEW) if few else 1):
        done = recorded[:end]
        last_sync = {op[1]: number for number, op in enumerate(done) if op[0] == "sync"}
        loose = [
            number for number, op in enumerate(done)
            if op[0] not in ("sync", "mark") and last_sync.get(op[1], -1) < number
        ]  # fmt: skip
        said = [op[2] for op in done if op[0] == "mark"]
        disks = [disk(done), disk(done, tuple(loose))]
        disks += [disk(done, (number,)) for number in loose]
        disks += [disk(done, (number,), torn=True) for number in loose if done[number][0] == "write"]
        for contents in disks:
            tried += 1
            key = hash((frozenset(contents.items()), tuple(said)))
            if key in seen:
                continue
            seen.add(key)
            with new_folder():
                for path, content in contents.items():  # a folder comes before what is in it
                    os.mkdir(path) if content is None else Path(path).write_bytes(content)
                try:
                    check(said, power_cut=True)
                except BaseException:
                    print(f"power cut after {end} operations, {said[-1:]}: {done[-3:]!s:.600}", file=sys.stderr)
                    raise
    return tried, len(seen)


# Whole programs


def programs() -> dict[str, Callable[[], None]]:
    """Whole programs by name. They run in a copy of the folder that `prepare` makes."""
    import generate  # here, because with what it imports this takes seconds
    from dev.data import text
    from dev.hf import export_hf, import_hf

    saves = ["--checkpoint-dir", "run", "-n", "1", "-nk", "2", "--best", "-o", "run.log", "-y", "1"]

    def train(*flags: str) -> None:
        usual = ["-i", "data", "-b", "1", "-t", "8", "--device", "cpu", "-g", "1", "-m", "1", "-v", "1"]
        sys.argv = ["train_gpt2_fp32.py", "-e", "layers=1,heads=1,channels=8,maxT=8", *usual, *flags]
        run_trainer(train_gpt2, GPT2)

    def other(main, *flags: str) -> None:
        sys.argv = [main.__module__, *flags]
        main()

    return {
        "train": lambda: train(*saves, "-x", "2", "--checkpoint-dir", "new"),
        "resume": lambda: train(*saves, "-x", "3"),
        "generate": lambda: other(generate.main, "-e", "run", "-g", "2", "--device", "cpu", "--prompt", "a"),
        "export": lambda: other(export_hf.main, "run", "-o", "exported"),
        "import": lambda: other(import_hf.main, "exported_before", "-o", "imported.bin"),
        "text": lambda: other(text.main, "texts", "-o", "mine", "--tokenizer", "bytes", "--workers", "1"),
    }


def prepare(programs: dict[str, Callable[[], None]]) -> None:
    """Makes in the working directory what the programs read."""
    for split in "train", "val":
        write_tokens(f"data_{split}.bin", np.arange(100) % 257)
    write_tokenizer("data_tokenizer.bin", [*(bytes([i]) for i in range(256)), b"end"], 256)
    os.mkdir("texts")
    for n in range(20):
        Path(f"texts/{n}.txt").write_text(f"text number {n} " * 60)
    for name, made, new in ("train", "new", "run"), ("export", "exported", "exported_before"):
        ended = forked(programs[name])
        assert ended.status == 0, ended
        os.rename(made, new)


def try_programs(kind: str, few: bool) -> int:
    """Lets each call of each program fail in turn. Returns the number of cases."""
    found, before = programs(), os.path.join(os.environ["FOLDER"], "before")
    if not os.path.exists(before):
        os.mkdir(before)
        os.chdir(before)
        prepare(found)

    def judge(ended: SimpleNamespace) -> None:
        assert all(map(os.path.exists, ("run/step_00000002", "data_train.bin", "texts/0.txt")))
        # Calls of safetensors, of datasets, which keeps its files in a folder "generator", and of its filelock, whose
        # temporary files have no name, are not ours.
        libraries = ended.failed.endswith((".safetensors", "(deleted)")) or "/generator/" in ended.failed
        assert ended.status == 0 or not kind.startswith("EINTR") or libraries

    error = getattr(errno, kind.removesuffix(IN_A_PROGRAM)), False
    names = ("train", "generate", "import") if few else found
    return sum(try_all(f"{name}, {kind}", found[name], error, judge, few, before) for name in names)


def main(how_many: str, *kinds: str) -> None:
    """Prints how many cases have passed."""
    few = how_many == "few"
    for kind in kinds:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            if kind in ERRORS:
                found = try_programs(kind, few)
            elif kind == "power cut":
                found = cut_power(few)
            else:
                found = try_all(kind, both_runs, FAILURES[kind], lambda ended: check(ended.record), few)
        print(f"{kind}: {found} cases")


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("preloaded") / "file_calls.so"
    command, _ = compiler.installed_compiler()
    source = Path(__file__).with_name("file_calls.cpp")
    subprocess.run([*command, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("how_many, kinds", [
    ("few", ORDINARY), *(pytest.param("all", [kind], marks=pytest.mark.long, id=kind) for kind in KINDS)
])  # fmt: skip
def test_whatever_call_is_the_last_or_fails_or_is_lost_no_checkpoint_is_and_a_line_names_the_file(
    preloaded, tmp_path, how_many, kinds
):
    environment = os.environ | {"LD_PRELOAD": str(preloaded), "FOLDER": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, how_many, *kinds]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    passed = re.findall(r"^(.*): \(?[1-9].* cases$", done.stdout, re.M)
    assert passed == [*kinds]


if __name__ == "__main__":
    main(*sys.argv[1:])
