"""What `make train` runs: a trainer, whose checkpoints go to a directory of the run's own, first runs/gpt2_fp32_1.

    python dev/make_train.py train_gpt2_fp32.py -e d12 -i data/python_docs -b 4 -t 256 -x 2000
    python dev/make_train.py --first-run cpu train_gpt2_fp32.py -x 2000    # the flags are the script's, and then these

The data of a first run are fetched or made here.

A run that has not come to its end goes on when it is asked for again: with the same flags, on the same data, from a
checkpoint that is whole, and in no other process. Anything else starts in the next directory. In the end it prints the
command that samples from the model. With a --checkpoint-dir of your own it only does that.
"""

import atexit
import fcntl
import json
import re
import runpy
import shlex
import subprocess
import sys
from argparse import REMAINDER
from contextlib import suppress
from pathlib import Path
from typing import TextIO

if not __package__:  # run as a program: look in the repository, not in dev/, whose modules could hide Python's own
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dev.scripts import script_configs
from device.errors import UserError
from llmc.data.dataloader import DataLoader
from llmc.files.checkpoint import load_checkpoint
from llmc.files.checkpoint_dir import checkpoints, newest_checkpoint
from llmc.model.tensors import Config, num_parameters
from llmc.run.arguments import Parser, make_parser
from llmc.run.program import run_program
from llmc.run.start import check_goes_on

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")
PYTHON_DOCS = "data/python_docs"
STARTER_PACK = "gpt2_124M.bin"  # the model in llm.c's starter pack, and the flags with which its training begins
STARTER_FLAGS = {"cuda": "-b 4 -t 1024", "cpu": "-b 4 -t 64 -n 100 -nk 1"}
SMALL_RUN = "-b 12 -t 64 -l 3e-3 -k cosine -u 100 -q 0.1 -g 300 -n 250 -nk 1 -x 3000 -v 500 -s 1000"
LARGE = 5 * 10**8  # parameters; a GPU of 24 GiB then has room for two sequences
UNFINISHED = "unfinished.json"  # in a run's directory until it has come to its end: its flags; locked while it runs


def first_run(config: type[Config], where: str, model: str | None) -> list[str]:
    """The flags of a script's first run on a device: of the model that is named, or its own. Fetches llm.c's starter
    pack where the run can begin with it, but not for a model of random weights. Raises UserError where a model is in
    there that cannot be fetched."""
    on_device = "--device cuda" if where == "cuda" else ""
    random = model is not None and config.described(model) is not None
    has_pack = config.DEFAULT_MODEL == STARTER_PACK and not random
    if has_pack and (where == "cuda" or model):
        if subprocess.run(["bash", ROOT / "dev" / "download_starter_pack.sh"]).returncode == 0:
            named = f"-e {model}" if model else ""
            return f"{on_device} {named} -i data/tiny_shakespeare {STARTER_FLAGS[where]}".split()
        if model:
            raise UserError(
                f"MODEL={model} needs the starter pack, which could not be fetched; plain 'make train' does without"
            )
        print("The starter pack could not be fetched: training from random weights on Python's own documentation.")
    elif has_pack:
        print("No NVIDIA GPU with a driver for CUDA 12 or later: training a small byte-level model on the CPU.")
        print(
            "GPT-2 124M takes seconds per step here; to fetch and train it all the same: "
            f"make train MODEL={config.DEFAULT_MODEL}", flush=True,
        )  # fmt: skip
    if where == "cpu":
        return f"-e {model or 'tiny'} -i {PYTHON_DOCS} {SMALL_RUN}".split()
    own = next(iter(config.PRESETS))
    B = 4 if num_parameters(config.described(model if random else own)) < LARGE else 2
    return f"{on_device} -e {model or own} -i {PYTHON_DOCS} -b {B}".split()


def in_place_of(defaults: list[str], flags: list[str], config: type[Config]) -> list[str]:
    """The defaults (flag, value, flag, value, …) without those that the flags replace, and then the flags."""
    parser = make_parser(config)
    parser.parse_args(flags)
    replaced, kept = parser.given, []
    for default in zip(defaults[::2], defaults[1::2], strict=True):
        parser.parse_args(default)
        kept += [] if parser.given <= replaced else default
    return kept + flags


def make_data(flags: list[str]) -> None:
    """Makes the data that flags name, where that is Python's documentation and it is not there. Ends the program where
    they cannot be made: who makes them has said why."""
    if PYTHON_DOCS in flags and not Path(f"{PYTHON_DOCS}_val.bin").exists():
        code = subprocess.run([sys.executable, ROOT / "dev" / "data" / "python_docs.py"]).returncode
        if code:
            sys.exit(code)


def directory_for(name: str, flags: list[str], config: type[Config]) -> tuple[Path, TextIO]:
    """The directory of the run, and its UNFINISHED, locked for as long as it is open. Raises UserError where there can
    be none."""
    try:
        if RUNS.is_symlink():
            raise UserError(f"{RUNS}: a link; `make train` writes to no link by itself: name a directory with "
                            "ARGS=\"--checkpoint-dir DIR\", or remove the link")  # fmt: skip
        RUNS.mkdir(exist_ok=True)
        names = (re.fullmatch(rf"{re.escape(name)}_(\d+)", path.name) for path in RUNS.iterdir())
        found = {int(run[1]): RUNS / run[0] for run in names if run}
        for number in sorted((n for n, run in found.items() if not run.is_symlink()), reverse=True):
            with suppress(FileNotFoundError):
                file = open(found[number] / UNFINISHED, "r+", encoding="utf-8")
                if lock(file) and file.read() == json.dumps(flags) and can_go_on(found[number], flags, config):
                    return found[number], file
                file.close()
        number = max(found, default=0) + 1
        while True:
            directory = RUNS / f"{name}_{number}"
            with suppress(FileExistsError):
                directory.mkdir()
                file = open(directory / UNFINISHED, "x", encoding="utf-8")
                lock(file)
                print(json.dumps(flags), end="", file=file, flush=True)
                return directory, file
            number += 1
    except OSError as error:
        raise UserError(f"{RUNS}: cannot be written ({(error.strerror or str(error)).lower()})") from None


def lock(file: TextIO) -> bool:
    """Whether no other process has this file locked; then this one has, until it closes the file or ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def can_go_on(directory: Path, flags: list[str], config: type[Config]) -> bool:
    """Whether the trainer would go on from what is there with these flags. Says why not."""
    args = make_parser(config).parse_args(flags)
    try:
        newest = newest_checkpoint(directory)
        if newest:
            sizes, *_, state = load_checkpoint(newest, config)
            check_goes_on(newest, state)
            shape = args.batch_size, state["loader"]["T"], sizes.vocab_size
            loader = DataLoader(args.data, "train", *shape, args.seed, args.raw_tokens)
            loader.load_state(state["loader"])
            loader.identify()
    except UserError as error:
        print(f"{directory} is left as it is: {error}")
        return False
    return True


def remove_empty(directory: Path) -> None:
    """Removes the directory of a run that has come to no checkpoint."""
    if directory.is_dir() and not checkpoints(directory):
        (directory / UNFINISHED).unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()


def main() -> None:
    configs = script_configs()
    parser = Parser(description="Train in a directory of the run's own, and name the command that samples from it.")
    parser.add_argument("--first-run", choices=("cuda", "cpu"), help="begin with the script's own flags on this device")
    parser.add_argument("--model", help="of the first run (the script's)")
    parser.add_argument("script", choices=configs, help="the trainer")
    parser.add_argument("flags", nargs=REMAINDER, help="the trainer's")
    args = parser.parse_args()
    script, flags, config = args.script, args.flags, configs[args.script]
    if args.first_run:
        flags = in_place_of(first_run(config, args.first_run, args.model), flags, config)
        make_data(flags)
    directory, unfinished = make_parser(config).parse_args(flags).checkpoint_dir, None
    if directory is None:
        directory, unfinished = directory_for(script.removeprefix("train_").removesuffix(".py"), flags, config)
        flags += ["--checkpoint-dir", str(directory), *(["-y", "1"] if checkpoints(directory) else [])]
    if unfinished:
        atexit.register(remove_empty, directory)  # which is done after the trainer has given up its lock
    python = sys.orig_argv[0]
    sys.argv = [str(ROOT / script), *flags]
    sys.orig_argv = [python, *sys.argv]  # which --gpus runs again, once for each rank
    try:
        print(shlex.join([python, script, *flags]), flush=True)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        if unfinished and checkpoints(directory):
            print(f"{directory} is not complete; the same `make train` goes on with it")
        raise
    else:
        if unfinished:
            (directory / UNFINISHED).unlink()
        for newest in checkpoints(directory)[:1]:
            print(f"to sample from it:\n\n    {shlex.join([python, 'generate.py', '-e', str(newest)])}\n")


if __name__ == "__main__":
    run_program(main)
