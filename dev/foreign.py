"""Tries a tokenizer that somebody else made in a process of its own, with a limit on memory and time. A normalizer can
make a terabyte of one letter, and a regular expression may never end.

    python dev/foreign.py BYTES SECONDS tokenizer.json   # this process
    python dev/foreign.py BYTES SECONDS DIR FILE         # for the files before tokenizer.json: writes one
"""

import importlib.util
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

if not __package__:  # run as a program
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from device.errors import UserError, first_line
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.hf_tokenizer import JSON_REMEDY
from llmc.run.program import run_program

MEMORY, SECONDS = 4 << 30, 60  # Gemma 3, with 262,144 tokens, takes 0.7 GB and 5 s
TRIAL = ["".join(map(chr, range(1, 0x250))), *(letter * 300 + "!" for letter in "aZ0 \n.é你")]


def try_tokenizer(path: Path, out: Path | None = None) -> None:
    """Loads a tokenizer.json in a process with limits, and encodes some texts there. If `path` is a directory, writes
    its tokenizer to `out` as a tokenizer.json. Other files are not tried, and nothing is if the library is missing.

    Raises UserError if that takes more than MEMORY or SECONDS, and for what the process refuses.
    """
    if not out and not (path.suffix == ".json" and path.is_file() and importlib.util.find_spec("tokenizers")):
        return
    command = [sys.executable, __file__, str(MEMORY), str(SECONDS), path, *([out] if out else [])]
    quiet = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        command, env=os.environ | quiet, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
        errors="replace",
    )
    if done.returncode == 0:
        return
    last = (done.stderr.strip() or "error: ").splitlines()[-1]
    if done.returncode == 1 and last.startswith("error: ") and "out of memory" not in last:
        raise UserError(last.removeprefix("error: "))
    raise UserError(
        f"{path}: it takes more than {MEMORY >> 30} GiB of memory or {SECONDS} s to load it and to encode a few "
        f"letters, so it is not used; {JSON_REMEDY}"
    )


def limit(memory: int, seconds: int) -> None:
    """From here on this process may take `memory` bytes and `seconds` more, and then ends."""
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux; elsewhere what the process has already counts, too
        memory += int(statm.read_text("utf-8").split()[0]) * resource.getpagesize()
    seconds += int(time.process_time())
    for what, most in (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0):
        before = resource.getrlimit(what)[1]  # nobody may raise that
        most = most if before == resource.RLIM_INFINITY else min(most, before)
        resource.setrlimit(what, (most, most))


def convert(folder: Path, out: Path, memory: int, seconds: int) -> None:
    """Writes a directory's tokenizer as a tokenizer.json. transformers knows how each kind splits text."""
    try:
        from transformers import AutoTokenizer  # before the limit, for PyTorch maps gigabytes
    except ImportError:
        raise UserError(f"{folder}: no tokenizer.json there; to make one: pip install transformers") from None
    limit(memory, seconds)
    try:
        out.write_text(AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer.to_str(), "utf-8")
    except Exception as error:  # of many kinds
        why = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise UserError(f"{folder}: transformers makes no tokenizer.json for it ({why})") from None


def main() -> None:
    memory, seconds, path, *out = sys.argv[1:]
    if out:
        convert(Path(path), Path(*out), int(memory), int(seconds))
        return
    limit(int(memory), int(seconds))
    tokenizer = open_tokenizer(path)
    for text in TRIAL:
        tokenizer.encode(text)
    tokenizer.encode_ordinary_batch(TRIAL)


if __name__ == "__main__":
    run_program(main)
