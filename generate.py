"""Writes text with a model that was trained, token by token as it comes.

    python generate.py -e gpt2_124M.bin --prompt "The meaning of life is" -g 100
    python generate.py -e checkpoints/step_00002000 --temperature 0.8 --top-k 50

The text begins with the prompt, which stands at the beginning of a document: the model sees before it the token that
begins a text, or where there is none the one that ends a text. Of what has been written, it sees the last -t tokens.
"""

import argparse
import sys
import time
from pathlib import Path

from llmc import device  # first: it sets what NumPy must find in the environment

from llmc.arguments import Parser, a_path, add_device_arguments, natural, non_negative, positive  # isort: skip
from llmc.checkpoint import model_path, read_model_header, training_flags
from llmc.errors import UserError
from llmc.files import first_word
from llmc.generation import continuation
from llmc.model import Model, build_from_file
from llmc.program import run_program
from llmc.sampler import Sampler, sample
from llmc.tokenizer import StreamDecoder, load_model_tokenizer
from train_gpt2_fp32 import GPT2
from train_llama3_fp32 import Llama3
from train_pythia_fp32 import Pythia

MODELS: tuple[type[Model], ...] = (GPT2, Llama3, Pythia)


def kind_of(path: Path) -> type[Model]:
    """The kind of the model in a file: GPT-2, for one to refuse it, where it is no model at all."""
    magic = first_word(path)
    return next((kind for kind in MODELS if kind.Config.MAGIC == magic), GPT2)


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
    add("--seed", type=natural, default=1337, metavar="N", help="another seed, another text (%(default)s)")
    add("-t", "--context", type=positive, metavar="T", help="tokens the model sees at most (as many as it can)")
    add("--tokenizer", type=a_path, metavar="FILE", help="the model's tokenizer (found by itself, as a rule)")
    add_device_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    device.use(args.device)
    device.use_tf32(args.tf32)

    path = model_path(args.model)
    kind = kind_of(path)
    config = read_model_header(path, kind.Config)
    if args.context and args.context > config.max_seq_len:
        raise UserError(f"-t {args.context} is above the model's longest sequence, {config.max_seq_len}: lower -t")
    trained = training_flags(path)
    tokenizer = load_model_tokenizer(path, config.vocab_size, args.tokenizer, trained, bool(args.prompt))
    tokens = [tokenizer.bos, *tokenizer.encode(args.prompt)]
    T = min(args.context or config.max_seq_len, len(tokens) + args.tokens)
    if len(tokens) > T:
        print(f"the prompt has {len(tokens)} tokens, of which the model sees only the last {T}", file=sys.stderr)
    attention = trained_attention(path, trained.get("attention"), args.attention)
    attention = kind.choose_attention(attention, config.channels, config.num_heads)
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
    print(f"{args.tokens} tokens in {seconds:.1f} s on {device.name()}", file=sys.stderr)


if __name__ == "__main__":
    run_program(main, out_of_memory="lower -t", interrupted="")
