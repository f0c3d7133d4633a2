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
from contextlib import suppress
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
LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0}  # by step; the run is resumed behind step 2
FAILURES = {  # the error, and whether all later calls fail, too
    "killed": (0, False), "EIO": (errno.EIO, False), "ENOSPC": (errno.ENOSPC, False),
    "full disk": (errno.ENOSPC, True), "quota": (errno.EDQUOT, True), "mounted read-only": (errno.EROFS, True),
}  # fmt: skip
FEW = 3  # cases of each kind in `make test`
ERRORS = [f"{error} in a program" for error in ("EIO", "EINTR", "ENOMEM", "ESTALE", "EDQUOT")]
FEW_CALLS = 6  # of each program that are tried in `make test`
NAMED = re.compile("^error: .*(new|run|data|texts|mine|exported|imported|config|model|in_here)")


def measure() -> dict:
    return {"val_batches": 1, "val_data": "data"}


def best_loss(folder: str = "run") -> float:
    for name in "best", "best.replaced.part":  # the latter while another takes its place
        with suppress(UserError):
            return load_checkpoint(f"{folder}/{name}", GPT2Config)[4]["best"]["val_loss"]
    return math.inf


def run(steps: list[int], mark, unwatched) -> None:
    """Trains steps, as a run with --best, -nk 1 and a log does. mark(text): this was said. The parameters are the
    step's number. Raises UserError where a run would end."""
    lock = lock_checkpoints("run")
    newest = newest_checkpoint("run")
    first = load_checkpoint(newest, GPT2Config)[4]["step"] if newest else 0
    logger, step, n = Logger("run.log", first), first, num_parameters(CONFIG)
    exchange = SimpleNamespace(whole_state=lambda adamw: [np.full(n, step, np.float32)] * 3, sharded=False)
    training = SimpleNamespace(exchange=exchange, adamw=None, model=SimpleNamespace(config=CONFIG))
    flags = SimpleNamespace(checkpoint_dir="run", keep=1, best=True)
    saver = Saver(training, SimpleNamespace(flags=flags, first_step=first), {}, "a run", None, lock)
    lowest = saver.lowest_loss(measure)
    for step in steps:
        if step <= first:
            continue
        lost, loss = logger.lost, LOSSES[step]
        logger.log(step - 1, train_loss=loss)
        if logger.lost == lost:
            mark(f"logged {step - 1}")
        before = unwatched(best_loss)
        if loss < lowest:
            lowest = saver.save_best(step, {}, NonfiniteGuard(False, 0), loss, measure)
            if "best" not in saver.unsaved:
                mark(f"best {loss}")
        saver.save(step, {}, NonfiniteGuard(False, 0))
        if saver.saved_step == step:
            mark(f"saved {step}")
        assert unwatched(best_loss) <= before, "a worse model has replaced the best one"
    logger.close()
    saver.release()


def both_runs(mark, unwatched) -> None:
    run([1, 2], mark, unwatched)
    run([1, 2, 3, 4], mark, unwatched)


def check(said: list[str], power_cut: bool) -> None:
    """What must be true in the working directory when a run begins there. said: the marks of the runs before."""
    saved = max([int(text.split()[1]) for text in said if text.startswith("saved")], default=0)
    best = min([float(text.split()[1]) for text in said if text.startswith("best")], default=math.inf)
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
        logged = {int(text.split()[1]) for text in said if text.startswith("logged")}
        assert not logged or logged <= {*read_log("run.log")["trl"][0].tolist()}, logged
    run([1, 2, 3, 4], lambda text: None, lambda call: call())  # nothing is in the way
    assert load_checkpoint(newest_checkpoint("run"), GPT2Config)[4]["step"] == 4
    assert best_loss() == 2.0 or newest is not None and newest.name == "step_00000004"  # its best was not saved
    assert sorted(os.listdir("run"))[0] == "best" and len(os.listdir("run")) >= 2


# In the process with file_calls.cpp


def case(calls, number: int, error: int, for_good: bool) -> tuple[int, int, list[str]]:
    """Both runs in the working directory, in a process of their own. Its status; calls seen; and all that is
    recorded."""
    with tempfile.TemporaryFile() as record, tempfile.TemporaryFile() as count:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

                def mark(text: str) -> None:
                    calls.calls_mark(text.encode())

                def unwatched(call):
                    calls.calls_pause(1)
                    result = call()
                    calls.calls_pause(0)
                    return result

                calls.calls_watch(os.getcwd().encode(), number, error, for_good, record.fileno())
                try:
                    both_runs(mark, unwatched)
                    status = 0
                except (UserError, OSError) as failure:  # run_program makes a line of either
                    status = 1 if "\n" not in str(failure) else 70
                os.write(count.fileno(), str(calls.calls_pause(1)).encode())
            except BaseException:
                calls.calls_pause(1)
                traceback.print_exc()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        count.seek(0)
        record.seek(0)
        return os.waitstatus_to_exitcode(status), int(count.read() or 0), record.read().decode().splitlines()


def marks(lines: list[str]) -> list[str]:
    return [line.split("\t")[1] for line in lines if line.startswith("mark")]


def in_new_folder(work) -> None:
    with tempfile.TemporaryDirectory(prefix="in_here", dir=os.environ["FOLDER"]) as folder:
        os.chdir(folder)
        work()
        os.chdir("/")


def try_all(calls, kind: str, few: bool) -> int:
    """Each call is the last or fails, in turn. Returns the number of calls."""
    error, for_good = FAILURES[kind]
    total = []
    in_new_folder(lambda: total.append(case(calls, 0, 0, False)[1]))
    numbers = range(1, total[0] + 1)
    for number in numbers[:: max(1, len(numbers) // FEW)] if few else numbers:

        def one(number: int = number) -> None:
            status, _, lines = case(calls, number, error, for_good)
            assert status in ((-signal.SIGKILL,) if kind == "killed" else (0, 1)), (number, status)
            try:
                check(marks(lines), power_cut=False)
            except BaseException:
                print(f"{kind} at call {number}: " + "\n".join(line[:100] for line in lines[-9:]), file=sys.stderr)
                raise

        in_new_folder(one)
    return len(numbers)


def operations(lines: list[str], root: str) -> list[tuple]:
    """What was recorded, with inodes in the place of paths: (what, inode that has to be synced, ...)."""
    tree, paths, found = {0: {}}, {root: 0}, []

    def inode_of(path: str) -> int | None:
        at = 0
        for name in Path(path).relative_to(root).parts:
            at = tree.get(at, {}).get(name)
        return at

    for line in lines:
        what, path, *rest = line.split("\t")
        if what == "mark":
            found.append(("mark", None, path))
            continue
        folder, name, inode = inode_of(os.path.dirname(path)) if path != root else None, Path(path).name, inode_of(path)
        if what in ("create", "mkdir", "truncate") and inode is None:
            inode = len(paths)
            paths[f"{path} {inode}"] = inode
            tree[inode] = {}
            tree[folder][name] = inode
            found.append(("link", folder, name, inode, what == "mkdir"))
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


def disk(done: list[tuple], missing: tuple = (), torn: bool = False) -> dict:
    """What is on the disk after these operations, but for those that are missing. torn: half of a missing write is
    there. A folder is a dict of what has each name, a file is its bytes."""
    folders, files = {0: {}}, {}
    for number, (what, *rest) in enumerate(done):
        if what == "link" and rest[3]:
            folders.setdefault(rest[2], {})
        elif what == "link":
            files.setdefault(rest[2], bytearray())
        if number in missing and not (torn and what == "write"):
            continue
        if what == "link":
            folders[rest[0]][rest[1]] = rest[2]
        elif what == "unlink":
            folders[rest[0]].pop(rest[1], None)
        elif what == "rename":
            folders[rest[0]].pop(rest[1], None)
            folders[rest[0]][rest[2]] = rest[3]
        elif what == "truncate":
            del files[rest[0]][rest[1] :]
        elif what == "write":
            content, start, data = files[rest[0]], rest[1], rest[2]
            data = data[: len(data) // 2] if number in missing else data
            content.extend(bytes(max(0, start + len(data) - len(content))))
            content[start : start + len(data)] = data

    def below(folder: int) -> dict:
        return {name: below(at) if at in folders else bytes(files[at]) for name, at in folders[folder].items()}

    return below(0)


def frozen(tree: dict) -> tuple:
    return tuple((name, frozen(each) if isinstance(each, dict) else each) for name, each in sorted(tree.items()))


def write_out(tree: dict, folder: str) -> None:
    for name, each in tree.items():
        path = os.path.join(folder, name)
        if isinstance(each, dict):
            os.mkdir(path)
            write_out(each, path)
        else:
            Path(path).write_bytes(each)


def cut_power(calls, few: bool) -> tuple[int, int]:
    """After each prefix of the operations: all are on the disk; none that was not synced; each that was not synced is
    missing, or torn, by itself. Returns how many such disks, and how many different ones."""
    recorded = []
    in_new_folder(lambda: recorded.extend(operations(case(calls, 0, 0, False)[2], os.getcwd())))
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
        for tree in disks:
            tried += 1
            key = hash((frozen(tree), tuple(said)))
            if key in seen:
                continue
            seen.add(key)

            def one(tree: dict = tree, said: list[str] = said, end: int = end, last: tuple = done[-3:]) -> None:
                write_out(tree, ".")
                try:
                    check(said, power_cut=True)
                except BaseException:
                    print(f"power cut after {end} operations, {said[-1:]}: {last!s:.600}", file=sys.stderr)
                    raise

            in_new_folder(one)
    return tried, len(seen)


# Whole programs


def programs() -> dict:
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
        run_program(main)

    return {
        "train": lambda: train(*saves, "-x", "2", "--checkpoint-dir", "new"),
        "resume": lambda: train(*saves, "-x", "3"),
        "generate": lambda: other(generate.main, "-e", "run", "-g", "2", "--device", "cpu", "--prompt", "a"),
        "export": lambda: other(export_hf.main, "run", "-o", "exported"),
        "import": lambda: other(import_hf.main, "exported_before", "-o", "imported.bin"),
        "text": lambda: other(text.main, "texts", "-o", "mine", "--tokenizer", "bytes", "--workers", "1"),
    }


def prepare(programs: dict) -> None:
    """Makes in the working directory what the programs read."""
    for split in "train", "val":
        write_tokens(f"data_{split}.bin", np.arange(100) % 257)
    write_tokenizer("data_tokenizer.bin", [*(bytes([i]) for i in range(256)), b"end"], 256)
    os.mkdir("texts")
    for n in range(20):
        Path(f"texts/{n}.txt").write_text(f"text number {n} " * 60)
    for name in "train", "export":
        assert outcome(programs[name], 0)[0] == 0, outcome(programs[name], 0)
        os.path.exists("new") and os.rename("new", "run")
    os.rename("exported", "exported_before")


def outcome(program, number: int, error: int = 0) -> tuple[int, int, str, str]:
    """Runs a program in a process of its own, in which the call of this number fails. Its status; calls seen; what it
    printed; and the call that failed."""
    calls = ctypes.CDLL(os.environ["LD_PRELOAD"])
    calls.calls_failed.restype = ctypes.c_char_p
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as seen:
        child = os.fork()
        if child == 0:
            for stream in 1, 2:
                os.dup2(printed.fileno(), stream)
            sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
            calls.calls_watch(os.getcwd().encode(), number, error, 0, -1)
            try:
                program()
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else 1
                print(end.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
                status = 70
            os.write(seen.fileno(), f"{calls.calls_pause(1)} ".encode() + calls.calls_failed())
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        seen.seek(0)
        count, failed = seen.read().decode().split(" ", 1)
        return status, int(count), printed.read().decode(), failed


def try_programs(kind: str, few: bool) -> int:
    """Lets each call of each program fail in turn. Returns the number of cases."""
    found, tried, before = programs(), 0, os.path.join(os.environ["FOLDER"], "before")
    os.mkdir(before)
    os.chdir(before)
    prepare(found)
    for name in ("train", "generate", "import") if few else found:

        def one(number: int, program=found[name], name: str = name) -> int:
            shutil.copytree(before, ".", dirs_exist_ok=True)
            status, count, printed, failed = outcome(program, number, getattr(errno, kind))
            kept = {path: Path(path).exists() for path in ("run/step_00000002", "data_train.bin", "texts/0.txt")}
            lines = [line for line in printed.splitlines() if line.startswith("error: ")]
            try:
                assert status in (0, 1) and "Traceback" not in printed and "ignored" not in printed, status
                assert len(lines) == status and all(map(NAMED.search, lines)) and all(kept.values()), kept
                libraries = failed.endswith((".safetensors", ".arrow"))  # PyTorch's and Arrow's calls are not ours
                assert status == 0 or kind != "EINTR" or libraries
            except AssertionError:
                print(f"{name}, {kind} at call {number}, {failed}: {printed[-2000:]}", file=sys.stderr)
                raise
            return count

        total = []
        in_new_folder(lambda one=one, total=total: total.append(one(0)))
        for number in range(1, total[0] + 1, max(1, total[0] // FEW_CALLS) if few else 1):
            in_new_folder(lambda one=one, number=number: one(number))
            tried += 1
    return tried


def main(kind: str, few: str) -> None:
    """Prints how many cases have passed."""
    if kind in ERRORS:
        print(try_programs(kind.split()[0], few == "few"))
        return
    calls = ctypes.CDLL(os.environ["LD_PRELOAD"])
    sys.stdout, out = sys.stderr, sys.stdout
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        found = cut_power(calls, few == "few") if kind == "power cut" else try_all(calls, kind, few == "few")
    print(found, file=out)


# The tests


# make test tries a few cases of these, make test-all every case of each kind
ORDINARY = "killed", "EIO", "power cut", *ERRORS[:2]


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("preloaded") / "file_calls.so"
    command, _ = compiler.installed_compiler()
    source = Path(__file__).with_name("file_calls.cpp")
    subprocess.run([*command, "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return library


def cases(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind, how_many", [
        pytest.param(kind, how_many, marks=[pytest.mark.long] * (how_many == "all" or kind not in ORDINARY))
        for kind in kinds for how_many in ("few", "all")
    ])  # fmt: skip


def run_cases(preloaded: Path, folder: Path, kind: str, how_many: str) -> None:
    environment = os.environ | {"LD_PRELOAD": str(preloaded), "FOLDER": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, __file__, kind, how_many], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    print(f"{kind}: {done.stdout.strip()}")
    assert "(0" not in done.stdout and done.stdout.strip() != "0"


@cases(*FAILURES, "power cut")
def test_whatever_call_is_the_last_or_fails_or_is_lost_no_checkpoint_is(preloaded, tmp_path, kind, how_many):
    run_cases(preloaded, tmp_path, kind, how_many)


@cases(*ERRORS)
def test_a_program_goes_on_or_names_the_file_whatever_call_fails(preloaded, tmp_path, kind, how_many):
    run_cases(preloaded, tmp_path, kind, how_many)


if __name__ == "__main__":
    main(*sys.argv[1:])
