"""Writes text with a model that was trained, token by token as it comes.

    python generate.py -e gpt2_124M.bin --prompt "The meaning of life is" -g 100
    python generate.py -e checkpoints/step_00002000 --temperature 0.8 --top-k 50

The text begins with the prompt, which stands at the beginning of a document: the model sees before it the token that
begins a text, or where there is none the one that ends a text. Of what has been written, it sees the last -t tokens: by
default as many as the model was trained at, where a checkpoint says how many. A model with learned positions has
learned nothing for those behind, and one with rotary positions has not seen such distances either.
"""

import argparse
import sys
import time
from pathlib import Path

import device
from device.errors import UserError
from llmc.arguments import Parser, a_path, add_device_arguments, natural, non_negative, positive, seed
from llmc.attention import choose_attention
from llmc.checkpoint import model_path, read_model_header, training_flags
from llmc.files import first_word
from llmc.generation import continuation
from llmc.model import Model, build_from_file
from llmc.program import run_program
from llmc.sampler import Sampler, sample
from llmc.scripts import kind_of_magic, model_kinds
from llmc.tokenizer import StreamDecoder, load_model_tokenizer
from train_gpt2_fp32 import GPT2

NEEDED = "a trained model is needed: a .bin, or the directory of a checkpoint"


def kind_of(path: Path) -> type[Model]:
    """The kind of the model in a file: GPT-2, for one to refuse it, where it is no model at all."""
    return kind_of_magic(first_word(path)) or GPT2


def find_model(name: Path) -> Path:
    """The file of the model that is named by itself or by the directory of its checkpoint. Raises UserError for what
    describes a model that is yet to be trained, and as model_path does."""
    for kind in model_kinds():
        word = str(name).partition("=")[0]
        if not name.exists() and (word in kind.Config.PRESETS or word in kind.Config.DESCRIPTION):
            raise UserError(f"{name}: yet to be trained, by {kind.Config.SCRIPT} -e {name}; {NEEDED}")
    return model_path(name)


def context_of(trained: object, asked: int | None, longest: int) -> int:
    """How many tokens the model sees: as many as were asked for, else as it was trained at, else as it can. trained:
    what a checkpoint says. Raises UserError for more than it can; says where they are more than it was trained at."""
    if asked and asked > longest:
        raise UserError(f"-t {asked} is above the model's longest sequence, {longest}: lower -t")
    if not isinstance(trained, int) or not 0 < trained <= longest:
        return asked or longest
    if asked and asked > trained:
        print(f"-t {asked} goes beyond the {trained} tokens at which the model was trained", file=sys.stderr)
    return asked or trained


def trained_attention(path: Path, trained: str | None, asked: str) -> str:
    """The attention to use: ReLU where the model was trained with it, else what was asked for. trained: what a
    checkpoint says. Raises UserError where what was asked for computes something else than what was trained."""
    if trained and asked != "auto" and (asked == "relu") != (trained == "relu"):
        raise UserError(f"-a {asked}: {path.parent} was trained with {trained} attention: leave -a out")
    return "relu" if trained == "relu" else asked


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Write text with a trained model.", allow_abbrev=False)
    add = parser.add_argument
    add("-e", "--model", type=a_path, default="gpt2_124M.bin", help="a .bin or a checkpoint directory (%(default)s)")
    add("--prompt", default="", metavar="TEXT", help="how the text begins (nothing)")
    add("-g", "--tokens", type=natural, default=200, metavar="N", help="tokens to write (%(default)s)")
    add("--temperature", type=non_negative, default=1.0, metavar="X", help="0: always the likeliest token (1)")
    add("--top-k", type=natural, default=0, metavar="K", help="draw from the K likeliest tokens; 0: from all (0)")
    add("--seed", type=seed, default=1337, metavar="N", help="another seed, another text (%(default)s)")
    add("-t", "--context", type=positive, metavar="T",
        help="tokens the model sees at most (as many as it was trained at, by its checkpoint, with learned and with "
        "rotary positions; of a .bin by itself all that it has positions for)")  # fmt: skip
    add("--tokenizer", type=a_path, metavar="FILE", help="the model's tokenizer (found by itself, as a rule)")
    add_device_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    device.use(args.device)
    device.use_precision(args.precision)

    path = find_model(args.model)
    kind = kind_of(path)
    config = read_model_header(path, kind.Config, f"{NEEDED}; dev/download_starter_pack.sh fetches gpt2_124M.bin")
    trained = training_flags(path)
    context = context_of(trained.get("sequence_length"), args.context, config.max_seq_len)
    tokenizer = load_model_tokenizer(path, config.vocab_size, args.tokenizer, trained, bool(args.prompt))
    tokens = [tokenizer.bos, *(tokenizer.encode(args.prompt) if args.prompt else [])]
    T = min(context, len(tokens) + args.tokens)
    if len(tokens) > T:
        print(f"the prompt has {len(tokens)} tokens, of which the model sees only the last {T}", file=sys.stderr)
    attention = trained_attention(path, trained.get("attention"), args.attention)
    attention = choose_attention(attention, config.head_size)
    model = build_from_file(kind, path, 1, T, attention, inference=True)

    decoder, sampler = StreamDecoder(tokenizer), Sampler(args.seed)
    print("".join(decoder.push(token) for token in tokens[1:]), end="", flush=True)
    started = time.perf_counter()

    def draw(logits) -> int:
        return sample(logits, sampler.random_f32(), args.temperature, args.top_k or None)

    for token in continuation(model, tokens, args.tokens, draw):
        print(decoder.push(token), end="", flush=True)
    print(decoder.flush())
    seconds = time.perf_counter() - started
    print(f"{args.tokens} tokens in {seconds:.1f} s on {device.name}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main, out_of_memory="lower -t", interrupted="")
