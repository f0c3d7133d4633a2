"""Feeds damaged and hostile files to everything that reads one: python dev/fuzz.py tokens -n 200000

A reader may take a file or refuse it with a UserError of one line. Anything else is a fault, and the input is kept: a
traceback, a crash, or memory out of proportion to the file, which has a few kilobytes: a reader gets 1 GiB. Inputs come
from atheris, which goes after the branches that they reach, starting from files that are whole; `pip install atheris`.
tests/test_bad_files.py damages the same files at random.
"""

import json
import resource
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent / "data")]


from device.errors import UserError  # noqa: E402
from llmc.arguments import Parser, natural  # noqa: E402
from llmc.program import run_program  # noqa: E402
from llmc.scripts import ROOT, model_kinds  # noqa: E402
from llmc.tensors import Config  # noqa: E402

import numpy as np  # noqa: E402

MEMORY = 1 << 30  # bytes, on top of what the program has when it begins


def smallest(config: type[Config]) -> Config:
    """A model of a few kilobytes: its first preset with one layer and one head of a few channels."""
    preset = config.described(next(iter(config.PRESETS)))
    sizes = {field.name: 1 for field in fields(config) if field.type is int}
    sizes |= {name: 8 for name in ("channels", "head_size") if name in sizes}
    return replace(preset, **sizes | {"vocab_size": 7, "max_seq_len": 5})


def readers(folder: Path) -> dict[str, tuple[Callable[[Path], object], list[bytes]]]:
    """For each kind of file: what reads one and uses all of it, and the contents of files that are whole. The readers
    put what they need beside the file into `folder`."""
    from dev import import_hf
    from dev.huggingface import config_json
    from llmc.checkpoint import (
        load_checkpoint,
        model_path,
        newest_checkpoint,
        read_debug_state,
        read_model,
        save_checkpoint,
        write_debug_state,
        write_model,
    )
    from llmc.dataloader import DataLoader, open_tokens, write_tokens
    from llmc.evaluation import EvalLoader
    from llmc.logger import read_log
    from llmc.tensors import num_parameters
    from llmc.tokenizer import Tokenizer
    from train_gpt2_fp32 import GPT2Config

    from safetensors.numpy import save_file

    configs, gpt2 = [smallest(kind.Config) for kind in model_kinds()], smallest(GPT2Config)
    rng, file = np.random.default_rng(0), folder / "whole"

    def content(write: Callable, *arguments) -> bytes:
        write(file, *arguments)
        return file.read_bytes()

    def parameters(config) -> np.ndarray:
        return rng.standard_normal(num_parameters(config), np.float32)

    def model_reader(config) -> Callable[[Path], object]:
        return lambda path: [tensor.sum() for tensor in read_model(path, type(config))[1].values()]

    found = {
        f"{config.NAME} model": (model_reader(config), [content(write_model, config, parameters(config))])
        for config in configs
    }

    x = rng.integers(0, 7, (1, 3)).astype(np.int32)
    state = content(write_debug_state, gpt2, x, x, np.zeros((1, 3, 7), np.float32), 1.5, parameters(gpt2))
    found["debug state"] = (lambda path: read_debug_state(path, gpt2).grads.sum(), [state])

    def read_tokens(path: Path) -> None:
        open_tokens(path).sum()
        loader, batch = DataLoader(path, "train", 2, 3, 70_000), np.empty((2, 2, 3), np.int32)
        for _ in range(4):
            loader.next_batch(*batch)

    tokens = rng.integers(0, 100, 40)
    raw = [tokens.astype(dtype).tobytes() for dtype in ("<i4", "<u2")]
    files = [content(write_tokens, tokens), content(write_tokens, tokens, 70_000), *raw]
    found["tokens"] = (read_tokens, files)

    def tokenizer_header(version: int) -> bytes:
        return struct.pack("<256I", 20240328, version, 3, 2, *[0] * 252)

    def read_tokenizer(path: Path) -> None:
        tokenizer = Tokenizer.load(path)
        [tokenizer.decode(token) for token in range(tokenizer.vocab_size)]

    found["tokenizer"] = (read_tokenizer, [tokenizer_header(2) + b"\1a\2bc\3end"])

    run = folder / "run"
    state, tokens = {"run": "a", "flags": {}}, {"model_tokenizer.bin": tokenizer_header(2) + b"\1a\2bc\3end"}
    checkpoint = save_checkpoint(run, 3, gpt2, *[parameters(gpt2) for _ in range(3)], state, tokens)
    whole = {path.name: path.read_bytes() for path in checkpoint.iterdir()}

    def read_checkpoint(path: Path) -> None:
        """The first byte says which of the files the others are, and whether a run goes on from the checkpoint or takes
        its model."""
        data = path.read_bytes()
        names = sorted(whole)
        damaged = names[data[0] % len(names)] if data else names[0]
        for name in names:
            (checkpoint / name).write_bytes(data[1:] if name == damaged else whole[name])
        if data and data[0] // len(names) % 2:
            read_model(model_path(run), GPT2Config)
        else:
            load_checkpoint(newest_checkpoint(run), GPT2Config)

    seeds = [bytes([i]) + whole[name] for i, name in enumerate(2 * sorted(whole))]
    found["checkpoint"] = (read_checkpoint, seeds)

    def example(index: int) -> bytes:
        parts = b"".join(struct.pack(f"<H{n}H", n, *range(n)) for n in (3, 1, 2, 1, 2))
        return struct.pack("<5H", 65535, 10 + len(parts), index, 1, 4) + parts

    questions = struct.pack("<256i", 20240522, 1, 2, 100, *[0] * 252) + example(0) + example(1)

    def read_questions(path: Path) -> None:
        loader, batch = EvalLoader(path, 4, 8, 50), np.empty((2, 4, 8), np.int32)
        for _ in range(min(loader.num_batches, 5)):
            loader.next_batch(*batch)
            loader.count_correct(np.zeros((4, 8), np.float32))

    found["hellaswag"] = (read_questions, [questions])
    found["log"] = (read_log, [b"s:0 tel:3.5212\ns:1 trl:3.6107\ns:20 eval:0.2955\ns:20 bpb:1.1288\n"])

    saved = folder / "saved"
    saved.mkdir()
    save_file({name: np.zeros(shape, np.float32) for name, shape in import_hf.shapes_of(configs[1]).items()},
              saved / "model.safetensors")  # fmt: skip
    known = [kind.Config for kind in model_kinds() if kind.HuggingFace]
    settings = [json.dumps(config_json(config)).encode() for config in configs if type(config) in known]
    import_whole = {"model.safetensors": (saved / "model.safetensors").read_bytes(), "config.json": settings[1]}

    def import_with(name: str) -> Callable[[Path], object]:
        def read(path: Path) -> None:
            for other, data in import_whole.items():
                (saved / other).write_bytes(path.read_bytes() if other == name else data)
            stdout, sys.stdout = sys.stdout, open("/dev/null", "w")
            try:
                import_hf.main([str(saved), "-o", str(folder / "out.bin")])
            finally:
                sys.stdout.close()
                sys.stdout = stdout

        return read

    found["config.json"] = (import_with("config.json"), settings)
    found["safetensors"] = (import_with("model.safetensors"), [import_whole["model.safetensors"]])
    return found


def check(reader: Callable[[Path], object], path: Path, data: bytes) -> bool:
    """Whether the reader takes a file with these contents. Raises what it raises, but for a refusal in one line."""
    path.write_bytes(data)
    try:
        reader(path)
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError(f"a refusal of several lines: {error!r}") from error
        return False
    return True


def main() -> None:
    parser = Parser(description="Feed damaged files to a reader.")
    parser.add_argument("reader", help="what reads: a kind of file, or a part of its name")
    parser.add_argument("-n", type=natural, default=200_000, metavar="N", help="inputs (%(default)s)")
    args = parser.parse_args()
    try:
        import atheris
    except ImportError:
        raise UserError("atheris is missing, which makes the inputs: pip install atheris") from None
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        folder = Path(place)
        models = [path.stem for path in ROOT.glob("train_*.py")]
        with atheris.instrument_imports(include=["device", "llmc", "dev.import_hf", "dev.huggingface", *models]):
            found = readers(folder)
        names = [name for name in found if args.reader in name]
        if len(names) != 1:
            raise UserError(f"{args.reader}: name one of {', '.join(found)}")
        reader, seeds = found[names[0]]
        corpus = folder / "corpus"
        corpus.mkdir()
        for number, data in enumerate(seeds):
            (corpus / f"whole{number}").write_bytes(data)
        if not any(check(reader, folder / "input", data) for data in seeds):
            raise AssertionError(f"{names[0]}: whole files are refused")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        flags = [f"-runs={args.n}", "-max_len=16384", "-rss_limit_mb=0", "-print_final_stats=1", "-verbosity=1"]
        atheris.Setup([sys.argv[0], *flags, str(corpus)], lambda data: check(reader, folder / "input", data) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    run_program(main)
