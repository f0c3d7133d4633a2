"""The trainers' command line: llm.c's one-letter flags, each with a long name, and a few of our own."""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from device.errors import UserError, escaped, shortened
from llmc.data.token_file import RAW_TOKENS
from llmc.files.record import MAX_COUNT
from llmc.model.tensors import Config
from llmc.ranks import ranks
from llmc.run.schedule import SCHEDULES

# The types of flags. Each raises argparse.ArgumentTypeError, which says what the value must be.

MAX_NAME, MAX_PATH = 230, 3000  # file systems allow 255 and 4095 bytes; our suffixes are added
MIN_FP32, MAX_FP32 = 1.2e-38, 3.4e38


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


def limited(kind: Callable[[str], float], *limits: tuple[Callable[[float], bool], str]) -> Callable[[str], float]:
    """A type of flag: a number of this kind that passes each of the limits. A limit is a test, and what it asks for."""

    def check(text: str) -> float:
        value = kind(text)
        for keeps, must in limits:
            if not keeps(value):
                raise argparse.ArgumentTypeError(f"{text} must {must}")
        return value

    return check


NOT_NEGATIVE = (lambda n: n >= 0), "be 0 or more"
COUNTABLE = (lambda n: n <= MAX_COUNT), f"be at most {MAX_COUNT}"
seed = limited(whole_number, NOT_NEGATIVE)  # as large as one likes
natural = limited(whole_number, NOT_NEGATIVE, COUNTABLE)
positive = limited(whole_number, ((lambda n: n >= 1), "be at least 1"), COUNTABLE)
non_negative = limited(
    number, ((lambda x: 0 <= x < math.inf), "be a finite number, 0 or more"),
    ((lambda x: x <= MAX_FP32), f"be at most {MAX_FP32:g}"),
)  # fmt: skip
fraction = limited(number, ((lambda x: 0 <= x <= 1), "lie between 0 and 1"))
above_zero = limited(
    number, ((lambda x: x >= MIN_FP32), f"be at least {MIN_FP32:g}"),
    ((lambda x: x <= MAX_FP32), f"be at most {MAX_FP32:g}"),
)  # fmt: skip
rate = limited(number, ((lambda x: 0 <= x < 1), "be 0 or more, and below 1"))


def memory_size(text: str) -> int:
    """An amount of memory, such as 24GiB, in bytes."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(MiB|GiB|MB|GB)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} must be an amount of memory, such as 24GiB")
    return int(float(found[1]) * {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}[found[2]])


def on_off(text: str) -> bool:
    """0 or 1."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text} must be 0 or 1")
    return text == "1"


MUST_RESUME = 2  # of -y


def how_to_resume(text: str) -> int:
    """0, 1 or MUST_RESUME."""
    if text not in ("0", "1", str(MUST_RESUME)):
        raise argparse.ArgumentTypeError(f"{text} must be 0, 1 or {MUST_RESUME}")
    return int(text)


def llmc_precision(text: str) -> str:
    """llm.c's 0 or 1, as a value of --precision."""
    return "tf32" if on_off(text) else "fp32"


def a_name(text: str) -> str:
    """The name of a file, a directory or a model, which may not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty: name something, or leave the flag out")
    longest = max(len(part.encode(errors="surrogatepass")) for part in text.split("/"))
    if "\0" in text or longest > MAX_NAME or len(text) > MAX_PATH:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is too long or has a zero byte: nothing has such a name")
    return text


def a_path(text: str) -> Path:
    """The same as a path: Path("") would be the current directory."""
    return Path(a_name(text))


class Once(argparse.Action):
    """Stores the value of a flag. Refuses a second one, or notes it if in this parser the last counts."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        if option_string and self.dest in parser.given:
            if not parser.last_counts:
                several = ", with all its values behind it" if self.nargs == "+" else ""
                raise argparse.ArgumentError(self, f"its value is given twice: give it once{several}")
            parser.repeated.append(option_string)
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser that refuses a wrong flag in one line.

    given: the names of the values that the arguments set. last_counts: whether a flag may be given again. repeated: the
    flags that were."""

    last_counts = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("action", None, Once)

    def parse_known_args(self, args=None, namespace=None):
        self.given: set[str] = set()
        self.repeated: list[str] = []
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """One line, instead of argparse's many."""
        first = message.removeprefix("unrecognized arguments: ").split(" ")[0]
        if first != message.split(" ")[0] and os.path.exists(first):
            message += ": if the shell made several names of a pattern, put it in quotes"
        message = f"{shortened(escaped(message), 460)}; --help lists the flags"
        ranks.fail(message, 2)
        self.exit(2, f"error: {message}\n")


ATTENTIONS = ("auto", "flash", "softmax", "relu")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


def add_device_arguments(parser, precision: str = "tf32") -> None:
    """The flags that say how a model computes, for every program that runs one. precision: the default."""
    add = parser.add_argument
    add("-a", "--attention", choices=ATTENTIONS, default="auto", help="auto: flash on CUDA, else softmax")
    add("--precision", choices=PRECISIONS, default=precision,
        help="fp32; tf32: products in TF32 where the GPU can; fp16: products of operands rounded to fp16; bf16: "
        "products, weights and activations; fp8: bf16, but large products of layers take e4m3, in generate.py for the "
        "weight alone (%(default)s)")
    add("-f", dest="precision", type=llmc_precision, default=argparse.SUPPRESS, metavar="0|1",
        help="llm.c's flag: 0 is fp32, 1 is tf32")  # fmt: skip
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA where it works, else the CPU")


def make_parser(
    config: type[Config], script: str = "", precision: str = "tf32", beta2: float = 0.999
) -> argparse.ArgumentParser:
    """The flags of the program that trains models of these sizes, in groups. The program is the model's own script, or
    another one with other defaults."""
    script = script or config.SCRIPT
    preset, description = next(iter(config.PRESETS.items()))
    names = ", ".join(config.PRESETS)
    recipe = "-b 4 -t 1024 -d 65536 -x 2000 -k cosine -u 100 --grad-clip 1"
    parser = Parser(
        description=f"Train {config.NAME} (llm.c's trainer in Python).",
        epilog=f"""examples:
  python {script} -i data/tiny_shakespeare -b 4 -t 1024
  python {script} -e {preset} -i data/python_docs {recipe}

A step's line has the model FLOPs utilisation (MFU) of a GPU whose peak is known: 6 N + 12 L NH HS T operations a
token (N parameters, L layers, NH heads of size HS), as a share of what its tensor cores can do in the precision that
the line names: TF32, bf16, fp16 or fp8. No run in fp8 can reach its whole peak, which is twice the peak in bf16,
because attention, the classifier and small products are in bf16 there.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    parser.last_counts = True  # flags behind a shell's $FLAGS replace those in it; a line at the start says so

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
            if kind in (on_off, how_to_resume):
                options |= {"nargs": "?", "const": True}  # the flag alone means yes
            section.add_argument(*names, **options)

    group(
        "data and model",
        ("-i --data", a_name, "data/tiny_shakespeare", "PREFIX", "prefix, file or glob of token files (%(default)s)"),
        ("-j --val-data", a_name, None, "PREFIX", "the same for validation (the prefix of -i)"),
        ("--raw-tokens", RAW_TOKENS, None, None, "the type of tokens in files without a header"),
        ("-e --model", a_name, config.DEFAULT_MODEL, "MODEL", f"a .bin, or random weights: {names}, or {description}"),
        ("-o --log", a_name, None, "FILE", "log file"),
    )
    group(
        "batches",
        ("-b --batch-size", positive, 4, "B", "sequences a batch (%(default)s)"),
        ("-t --sequence-length", positive, None, "T", "tokens a sequence (as many as the model takes, at most 1024)"),
        ("-d --total-batch-size", positive, None, "TOKENS", "tokens an update, by accumulating gradients (GPUs*B*T)"),
        ("--recompute", on_off, False, "0|1", "keep only each layer's input, and run the layer again in backward (0)"),
        ("--logit-rows", natural, None, "N", "positions with logits at a time (all; 1024 if those do not fit)"),
        ("--offload", on_off, False, "0|1", "keep AdamW's state in the host's memory (0)"),
        ("-x --max-steps", natural, None, "N", "steps (one epoch)"),
        ("--seed", seed, None, "N", "seed of initial weights, sampling and dropout; also shuffles the data"),
    )
    group(
        "optimisation",
        ("-l --learning-rate", non_negative, 3e-4, "RATE", "learning rate (3e-4)"),
        ("-k --schedule", SCHEDULES, "constant", None, "learning rate schedule (%(default)s)"),
        ("-u --warmup", natural, 0, "N", "warm-up steps (0)"),
        ("-q --final-fraction", fraction, 0.0, "F", "learning rate at the end, as a fraction of -l (0)"),
        ("-c --weight-decay", non_negative, 0.0, "W", "weight decay, of weight matrices alone (0)"),
        ("--beta1", rate, 0.9, "B", "what AdamW's m keeps of itself in a step (%(default)s)"),
        ("--beta2", rate, beta2, "B", "what AdamW's v keeps of itself in a step (%(default)s)"),
        ("--eps", above_zero, 1e-8, "E", "what AdamW adds to the root of v (%(default)s)"),
        ("--grad-clip", non_negative, 0.0, "NORM", "largest norm of the gradients; 0: not clipped (0)"),
        ("--dropout", rate, 0.0, "P", "share of the activations dropped in training, of Pythia alone (0)"),
        ("--skip-nonfinite", on_off, False, "0|1", "skip steps whose loss or gradients are not finite"),
    )
    group(
        "several GPUs",
        ("--gpus", positive, None, "N", "processes to start on this machine, one a GPU (1; see doc/gpus.md)"),
        ("-z --zero-stage", on_off, True, "0|1", "shard AdamW's moments over the GPUs: ZeRO stage 1 (1)"),
        ("--bitwise", on_off, False, "0|1", "the same bits on any number of GPUs, at the price of time and memory (0)"),
    )
    group(
        "watching",
        ("-v --val-every", natural, 20, "N", "steps between validations; 0: none (%(default)s)"),
        ("-m --val-max-batches", positive, 20, "N", "validation batches at most (%(default)s)"),
        ("-s --sample-every", natural, 20, "N", "steps between samples; 0: none (%(default)s)"),
        ("--log-every", positive, 1, "N", "steps between those that are printed and logged (%(default)s)"),
        ("-g --sample-tokens", natural, 64, "N", "tokens to sample (%(default)s)"),
        ("--tensorboard", a_name, None, "DIR", "write losses, rate, norm, speed and samples for TensorBoard"),
        ("--hellaswag", a_name, None, "FILE", "score this HellaSwag file at each validation"),
    )
    group(
        "checkpoints",
        ("-n --checkpoint-every", natural, 0, "N", "steps between checkpoints; 0: only at the end (0)"),
        ("--checkpoint-dir", a_name, None, "DIR", "where checkpoints go; none are written without it"),
        ("-y --resume", how_to_resume, 0, "0|1|2",
         "resume from the newest checkpoint; without one, 1 starts a run and 2 refuses (0)"),
        ("-nk --keep", natural, 0, "N", "newest checkpoints to keep; 0: all (0)"),
        ("--best", on_off, False, "0|1", "keep the checkpoint of the lowest validation loss, too, as DIR/best (0)"),
    )
    group(
        "what fits",
        ("--dry-run", on_off, False, "0|1", "print what memory training takes and what fits, then exit"),
        ("--memory", memory_size, None, "SIZE", "with --dry-run: the GPU's memory, as 24GiB (what this one has free)"),
    )
    add_device_arguments(parser.add_argument_group("how it computes"), precision)
    return parser


def parse_arguments(
    config: type[Config], arguments: list[str] | None = None, script: str = "", precision: str = "tf32",
    beta2: float = 0.999,
) -> argparse.Namespace:
    """The flags of the program that trains models of these sizes (`make_parser`). `given` has the names of those that
    the user gave, `repeated` the flags whose earlier values do not count. Opens nothing and changes nothing. Exits with
    code 2 for a wrong flag. Raises UserError for a wrong description of a model, and for a flag about checkpoints
    without a place for them. (settings.py checks what depends on more than the flags.)"""
    parser = make_parser(config, script, precision, beta2)
    args = parser.parse_args(arguments)
    args.given, args.repeated = frozenset(parser.given), parser.repeated
    config.described(args.model)  # refuses a wrong description before anything takes time
    if (args.resume or args.checkpoint_every or args.keep or args.best) and not args.checkpoint_dir:
        raise UserError("-y, -n and --best need to know where checkpoints are, and so does -nk: add --checkpoint-dir")
    if args.resume and args.dry_run:
        raise UserError("--dry-run does not read a checkpoint's flags: leave -y out, and name the checkpoint with -e")
    if args.memory and not args.dry_run:
        raise UserError("--memory is the amount for which --dry-run computes what fits: add --dry-run")
    if not args.val_every and (args.best or args.hellaswag):
        raise UserError("-v 0 switches validation off, and --best and --hellaswag need it: leave them out")
    return args
