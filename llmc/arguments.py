"""The command line of train_gpt2_fp32.py: llm.c's one-letter flags with their meanings and defaults, each with a long
name, and a few of our own."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from llmc.checkpoint import GPT2Config
from llmc.errors import UserError
from llmc.schedule import SCHEDULES

CHANNELS_OF_DEPTH = {6: 384, 12: 768, 24: 1024, 36: 1280, 48: 1600}  # GPT-2's sizes; heads of 64 channels

EXAMPLE = """example:
  python train_gpt2_fp32.py -i data/tiny_shakespeare -b 4 -t 1024
  python train_gpt2_fp32.py -e d12 -i data/python_docs -b 4 -t 1024 -d 65536 -x 2000 -k cosine -u 100 --grad-clip 1"""


@dataclass(frozen=True)
class RandomModel:
    """A model of random weights: its shape without the vocabulary, which the data decides."""

    num_layers: int
    num_heads: int
    channels: int
    max_seq_len: int = 1024

    def config(self, vocab_size: int) -> GPT2Config:
        padded = -(-vocab_size // 128) * 128
        config = GPT2Config(self.max_seq_len, vocab_size, padded, self.num_layers, self.num_heads, self.channels)
        config.check("-e")
        return config


def parse_model_descriptor(text: str) -> RandomModel | None:
    """`d12` or `layers=4,heads=4,channels=128[,maxT=1024]`; None if the text is neither (a file, then).

    Raises UserError for a descriptor with an unknown depth or a missing or unknown part.
    """
    depth = re.fullmatch(r"d(\d+)", text)
    if depth:
        channels = CHANNELS_OF_DEPTH.get(int(depth[1]))
        if channels is None:
            raise UserError(f"-e {text}: the depths are {', '.join(f'd{d}' for d in CHANNELS_OF_DEPTH)}")
        return RandomModel(int(depth[1]), channels // 64, channels)
    if "=" not in text:
        return None
    parts = dict(re.findall(r"(layers|heads|channels|maxT)=(\d+)(?:,|$)", text))
    if len(parts) != text.count("=") or not {"layers", "heads", "channels"} <= parts.keys():
        raise UserError(f"-e {text}: a model is described as layers=4,heads=4,channels=128 (and maxT=1024)")
    model = RandomModel(*(int(parts.get(name, 1024)) for name in ("layers", "heads", "channels", "maxT")))
    model.config(257)
    return model


# The types of flags. Each raises argparse.ArgumentTypeError, which says what the value must be.


def whole_number(text: str) -> int:
    """Any whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None


def number(text: str) -> float:
    """Any number, also inf and nan."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None


def positive(text: str) -> int:
    """A whole number from 1 on."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def natural(text: str) -> int:
    """A whole number from 0 on."""
    value = whole_number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
    return value


def non_negative(text: str) -> float:
    """A finite number from 0 on."""
    value = number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a finite number, 0 or more")
    return value


def fraction(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must lie between 0 and 1")
    return value


def on_off(text: str) -> bool:
    """0 or 1."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or 1")
    return text == "1"


class Parser(argparse.ArgumentParser):
    """A parser that refuses a wrong flag in one line."""

    def error(self, message: str) -> NoReturn:
        """One line, instead of argparse's many."""
        self.exit(2, f"error: {message}; --help lists the flags\n")


def make_parser() -> argparse.ArgumentParser:
    """The trainer's flags, in groups."""
    parser = Parser(
        description="Train GPT-2 in fp32 (llm.c's trainer in Python).",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def group(title: str, *rows: tuple) -> None:
        section = parser.add_argument_group(title)
        for flags, kind, default, metavar, text in rows:
            names = flags.split()
            destination = names[-1].lstrip("-").replace("-", "_") if names[-1].startswith("--") else None
            options = {"dest": destination, "default": default, "help": text}
            if isinstance(kind, tuple):
                options["choices"] = kind
            else:
                options |= {"type": kind, "metavar": metavar}
            section.add_argument(*names, **options)

    group(
        "data and model",
        ("-i --data", str, "data/tiny_shakespeare", "PREFIX", "prefix, file or glob of token files (%(default)s)"),
        ("-j --val-data", str, None, "PREFIX", "the same for validation (the prefix of -i)"),
        ("-e --model", str, "gpt2_124M.bin", "MODEL", "a .bin, or random weights: d12, layers=4,heads=4,channels=128"),
        ("-o --log", str, None, "FILE", "log file"),
    )
    group(
        "batches",
        ("-b --batch-size", positive, 4, "B", "sequences a batch (%(default)s)"),
        ("-t --sequence-length", positive, 1024, "T", "tokens a sequence (%(default)s)"),
        ("-d --total-batch-size", positive, None, "TOKENS", "tokens an update, by accumulating gradients (B*T)"),
        ("-x --max-steps", natural, None, "N", "steps (one epoch)"),
        ("--seed", natural, None, "N", "seed: initial weights, sampling, and shuffles the training data"),
    )
    group(
        "optimisation",
        ("-l --learning-rate", non_negative, 3e-4, "RATE", "learning rate (3e-4)"),
        ("-k --schedule", SCHEDULES, "constant", None, "learning rate schedule (%(default)s)"),
        ("-u --warmup", natural, 0, "N", "warm-up steps (0)"),
        ("-q --final-fraction", fraction, 0.0, "F", "of the rate, at the end of the schedule (0)"),
        ("-c --weight-decay", non_negative, 0.0, "W", "of the weight matrices (0)"),
        ("--grad-clip", non_negative, 0.0, "NORM", "largest norm of the gradients; 0: not clipped (0)"),
    )
    group(
        "watching",
        ("-v --val-every", positive, 20, "N", "steps between validations (%(default)s)"),
        ("-m --val-max-batches", positive, 20, "N", "validation batches at most (%(default)s)"),
        ("-s --sample-every", natural, 20, "N", "steps between samples; 0: none (%(default)s)"),
        ("-g --sample-tokens", natural, 64, "N", "tokens to sample (%(default)s)"),
        ("--hellaswag", str, None, "FILE", "score this HellaSwag file whenever validating"),
    )
    group(
        "checkpoints",
        ("-n --checkpoint-every", natural, 0, "N", "steps between checkpoints; 0: only at the end (0)"),
        ("--checkpoint-dir", str, None, "DIR", "where checkpoints go; none are written without it"),
        ("-y --resume", on_off, False, "0|1", "resume from the newest checkpoint (0)"),
        ("-nk --keep", natural, 0, "N", "newest checkpoints to keep; 0: all (0)"),
    )
    group(
        "how it computes",
        ("-a --attention", ("auto", "flash", "softmax", "relu"), "auto", None, "auto: flash on CUDA, else softmax"),
        ("-f --tf32", on_off, True, "0|1", "matrix products in TF32 where the GPU can (1)"),
        ("--device", ("auto", "cuda", "cpu"), "auto", None, "auto: CUDA where it works, else the CPU"),
    )
    return parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags, checked one by one and against each other. Exits with code 2 for a wrong flag; raises UserError for
    values that do not fit together."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    args.B, args.T = args.batch_size, args.sequence_length
    if args.val_data is None and (Path(args.data).is_file() or any(c in args.data for c in "*?[")):
        raise UserError(f"-i {args.data} names files of training data: name those for validation with -j")
    args.val_data = args.val_data or args.data
    args.shuffle_seed = args.seed
    args.seed = 1337 if args.seed is None else args.seed
    args.random_model = parse_model_descriptor(args.model)
    if args.total_batch_size and args.total_batch_size % (args.B * args.T):
        raise UserError(f"-d {args.total_batch_size} is not a multiple of B*T = {args.B * args.T}: change -d, -b or -t")
    if (args.resume or args.checkpoint_every) and not args.checkpoint_dir:
        raise UserError("-y and -n need to know where checkpoints are: add --checkpoint-dir")
    if args.attention == "flash" and not args.tf32:
        raise UserError("-a flash computes in TF32: leave -f 0 out, or use -a softmax")
    return args
