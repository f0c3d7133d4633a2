"""What a run starts from: a checkpoint or a model, its data and their tokenizer. They are found, checked and opened."""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

from device.errors import UserError
from llmc.data.dataloader import DataLoader
from llmc.data.evaluation import EvalLoader
from llmc.data.find_data import check_both_splits, find_token_files
from llmc.data.find_tokenizer import check_tokenizer, find_tokenizer, open_tokenizer, own_tokenizer
from llmc.data.hf_tokenizer import named_ends
from llmc.data.tokenizer import Tokenizer
from llmc.files.checkpoint import load_checkpoint, model_path
from llmc.files.checkpoint_dir import checkpoints, newest_checkpoint, read_record
from llmc.files.files import read_file
from llmc.files.model_file import conversion, read_model, read_model_header
from llmc.model.activations import choose_attention
from llmc.model.adamw import Recipe
from llmc.model.model import Model
from llmc.model.tensors import Config
from llmc.model.weights import load_weights, randomize
from llmc.ranks import ranks
from llmc.run.arguments import MUST_RESUME
from llmc.run.settings import (
    FIRST_SEED,
    check_flags,
    check_length,
    check_model_flags,
    choose_precision,
    recorded_flags,
    resumed_flags,
    with_length,
)
from llmc.step.training import Training, make_training


@dataclass(frozen=True)
class Origin:
    """Where a run's first parameters come from: a checkpoint, the file of a model, or random numbers.

    checkpoint, recorded: the checkpoint, if there is one, and the flags that it recorded. source: the file of the
    model, which may be the checkpoint's; None for random numbers.
    """

    checkpoint: Path | None
    recorded: dict
    source: Path | None


@dataclass(frozen=True)
class Text:
    """The tokenizer of the data, if there is one, and its file."""

    path: Path | None
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Data:
    """The training data; the validation data, unless the run never validates; and HellaSwag's questions, if a flag asks
    for them."""

    train: DataLoader
    val: DataLoader | None
    questions: EvalLoader | None

    @property
    def raw(self) -> bool:
        """Whether a file has no header."""
        return not all(tokens.offset for loader in (self.train, self.val) if loader for tokens in loader.shards)


# A checkpoint or a model


def find_origin(kind: type[Model], args: Namespace) -> tuple[Origin, Namespace]:
    """What the run starts from, and the flags that follow: a checkpoint has recorded flags, and the device may lack a
    precision. Raises UserError for flags that contradict the checkpoint or one another."""
    checkpoint, recorded = ranks.of_rank_0(lambda: find_checkpoint(kind, args))
    checkpoint, flags = checkpoint and Path(checkpoint), args
    if checkpoint is not None:
        flags = resumed_flags(args, recorded)
    elif args.resume == MUST_RESUME:
        raise UserError(
            f"-y {MUST_RESUME}: there is no checkpoint in {args.checkpoint_dir}; -y 1 would start from the beginning"
        )
    elif args.resume:
        print(f"no checkpoint in {args.checkpoint_dir} yet: starting from the beginning")
    described = kind.Config.described(flags.model) if checkpoint is None else None
    source = None if described else model_path(checkpoint or flags.model)
    if flags.sequence_length is None:
        flags = with_length(flags, described or read_model_header(source, kind.Config, kind.Config.fetch_or_start()))
    check_flags(flags)
    check_model_flags(kind, flags, recorded)
    flags = choose_precision(flags, recorded.get("precision"))
    if ranks.rank() > 0:
        flags = Namespace(**vars(flags) | {"log": None, "tensorboard": None})
    return Origin(checkpoint, recorded, source), flags


def find_checkpoint(kind: type[Model], args: Namespace) -> tuple[str | None, dict]:
    """The checkpoint from which the run continues, if any, and the flags that it recorded. Raises UserError if it is
    damaged or holds no run, or if a new run would write its checkpoints beside another run's."""
    if not args.checkpoint_dir:
        return None, {}
    if args.resume:
        newest = newest_checkpoint(args.checkpoint_dir)
        if newest is None:
            return None, {}
        recorded = read_record(newest)["state"].get("flags", {})
        return str(newest), recorded_flags(kind.Config, recorded, newest)
    there = checkpoints(args.checkpoint_dir)
    if there:
        raise UserError(
            f"{args.checkpoint_dir} has checkpoints of another run, the newest {there[0].name}: go on from it with "
            "-y 1, or choose another --checkpoint-dir"
        )
    return None, {}


def build_training(
    kind: type[Model], flags: Namespace, text: Text, origin: Origin
) -> tuple[Training, Namespace, dict]:
    """What trains the model that the flags ask for, with its first parameters; the flags, with the attention and the
    chunks of logits that it has; and the state of the checkpoint, which is empty for a new run. Raises UserError if the
    model cannot be read, is another one than the checkpoint's or the tokenizer's, or does not fit into memory."""
    config, tensors, moments, state = read_origin(kind, flags, text.tokenizer, origin)
    if text.tokenizer and origin.source:
        check_tokenizer(text.path, text.tokenizer, origin.source, config.vocab_size)
    check_length(flags, config)
    attention = choose_attention(flags.attention, config.head_size)
    B, T, seed = flags.batch_size, flags.sequence_length, FIRST_SEED if flags.seed is None else flags.seed
    training = make_training(
        kind, config, B, T, attention, sharded=flags.zero_stage, bitwise=flags.bitwise, logit_rows=flags.logit_rows,
        recompute=flags.recompute, offload=flags.offload,
        dropout=(flags.dropout, seed) if flags.dropout else None,
        **{name: getattr(flags, name) for name in Recipe._fields},
    )  # fmt: skip
    rows = training.activations.logit_rows
    flags = Namespace(**vars(flags) | {"attention": attention, "logit_rows": rows if rows < B * T else 0})
    if origin.checkpoint is not None:
        training.exchange.load_checkpoint(training.adamw, tensors, moments)
    elif tensors is not None:
        load_weights(training.model, training.adamw, tensors)
    else:
        randomize(training.model, training.adamw, seed)
    if ranks.size() > 1:
        ranks.check_same("the checksum of the model", training.exchange.checksum(), "use the same -e on all machines")
    return training, flags, state


def read_origin(kind: type[Model], flags: Namespace, tokenizer: Tokenizer | None, origin: Origin) -> tuple:
    """Reads what the run starts from: (config, tensors, moments, state). tensors and moments are `load_checkpoint`'s,
    None if there are none. state is the checkpoint's, empty if there is none. Only rank 0 reads a checkpoint, because
    the other ranks need not have it on their machines: they get config and state alone."""
    described = kind.Config.described(flags.model, tokenizer.vocab_size if tokenizer else None)
    if origin.checkpoint is not None:
        config = tensors = moments = state = None
        if ranks.rank() == 0:
            config, tensors, *moments, state = load_checkpoint(origin.checkpoint, kind.Config)
            check_goes_on(origin.checkpoint, state)
        sizes, state = ranks.of_rank_0(lambda: (asdict(config), state))
        config = kind.Config(**sizes)
        if "model" in flags.given and ranks.rank() == 0:
            check_same_model(flags.model, described, config, origin.checkpoint, origin.recorded.get("model"))
        return config, tensors, moments, state
    if described is not None:
        return described, None, None, {}
    config, tensors = read_model(origin.source, kind.Config, kind.Config.fetch_or_start())
    converted = conversion(origin.source, kind.Config)
    if converted:
        print(converted, flush=True)
    return config, tensors, None, {}


def check_goes_on(checkpoint: Path, state: dict) -> None:
    """Raises UserError if a checkpoint's state does not say where a run goes on."""
    if not {"loader", "sampler"} <= state.keys():
        raise UserError(f"{checkpoint}: it does not say where a run goes on: start a new one with -e")


def check_same_model(
    given: str, described: Config | None, config: Config, checkpoint: Path, before: str | None
) -> None:
    """Raises UserError if -e names another model than the checkpoint's: one of other sizes, or another file than at the
    start of the run. But -e may name the checkpoint itself.

    given: what -e names. described: the model that it describes; None if it names a file. config: the checkpoint's
    sizes. before: what -e named at the start of the run.
    """
    if described is not None:
        same = described == config
    else:
        same = given == before or is_same_file(given, before or "")
        same = same or is_same_file(model_path(given), checkpoint / "model.bin")
    if not same:
        was = f", whose run was started with -e {before}" if before else ""
        raise UserError(f"cannot resume: -e {given} is another model than {checkpoint}{was}: leave -e out")


def is_same_file(one: str | Path, other: str | Path) -> bool:
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


# The tokenizer


def find_text(kind: type[Model], flags: Namespace, source: Path | None) -> Text:
    """The tokenizer of the data. source: the model's file, if there is one. Raises UserError if the validation data or
    another rank has another tokenizer."""
    path = find_tokenizer(flags.data, source, kind.Config.DEFAULT_TOKENIZER)
    tokenizer = open_tokenizer(path) if path else None
    if tokenizer and source:  # a model's texts end as its own files say
        tokenizer.ends.update(named_ends(source.with_name(f"{source.stem}_tokenizer.json"), tokenizer.tokens))
    seen = path and hashlib.sha256(read_file(path)).hexdigest()[:16]
    ranks.check_same("the fingerprint of the tokenizer", seen, "have the data's tokenizer on all machines")
    check_val_tokenizer(flags, path, tokenizer)
    return Text(path, tokenizer)


def check_val_tokenizer(args: Namespace, path: Path | None, tokenizer: Tokenizer | None) -> None:
    """Raises UserError if the tokenizer beside the validation data is not the training data's, `path`. With two
    tokenizers the loss would say nothing about the text, and bits per byte would count the wrong bytes."""
    own = own_tokenizer(args.val_data) if args.val_data not in (None, args.data) else None
    if own and tokenizer and open_tokenizer(own).tokens != tokenizer.tokens:
        raise UserError(
            f"-j {args.val_data} was made with the tokenizer {own}, and -i {args.data} with {path}: use "
            "validation data that was made with the same tokenizer"
        )


# The data


def open_data(flags: Namespace, V: int, checkpoint: Path | None, state: dict) -> Data:
    """Opens the data, for a vocabulary of V. A resumed run, from this checkpoint with this state, goes on where it was.
    Raises UserError if the data is missing, or is not the data that the run had before, or that another rank has."""
    B, T, remedy = flags.batch_size, flags.sequence_length, "use the same data on all machines"
    if checkpoint is not None:
        check_recorded_data(flags, checkpoint)
    if flags.val_every and flags.val_data is None:
        check_both_splits(flags.data, flags.raw_tokens)
    train = DataLoader(flags.data, "train", B, T, V, flags.seed, flags.raw_tokens)
    val = None
    if flags.val_every:
        val = DataLoader(flags.val_data or flags.data, "val", B, T, V, raw_tokens=flags.raw_tokens)
    ranks.check_same("the fingerprint of the training data (-i)", train.fingerprint, remedy)
    ranks.check_same("the fingerprint of the validation data (-j)", val and val.fingerprint, remedy)
    questions = EvalLoader(flags.hellaswag, B, T, V) if flags.hellaswag else None
    count = questions.num_examples if questions else 0
    ranks.check_same("the number of --hellaswag's questions", count, remedy)
    if state:
        train.load_state(state["loader"])
    return Data(train, val, questions)


def check_recorded_data(flags: Namespace, checkpoint: Path) -> None:
    """Raises UserError if the data that a checkpoint has recorded is not there. The message says what was recorded, and
    which flag names another place."""
    for flag, name, split in ("-i", "data", "train"), ("-j", "val_data", "val"):
        recorded = getattr(flags, name)
        if name in flags.given or recorded is None or split == "val" and not flags.val_every:
            continue
        try:
            find_token_files(recorded, split)
        except UserError:
            where = "" if os.path.isabs(recorded) else f" below {os.getcwd()}"
            raise UserError(
                f"{checkpoint} was trained with {flag} {recorded}, and there is no such data{where}: {flag} may name "
                "where it is now"
            ) from None
