"""Writes text with a model that was trained, token by token as it comes.

    python generate.py -e gpt2_124M.bin --prompt "The meaning of life is" -g 100
    python generate.py -e checkpoints/step_00002000 --temperature 0.8 --top-k 50

The text begins with the prompt, which stands at the beginning of a document: the model sees an end-of-text token before
it. Of what has been written, the model sees the last -t tokens.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from llmc import device  # first: it sets what NumPy must find in the environment

import numpy as np  # isort: skip

from llmc.arguments import Parser, natural, non_negative, on_off, positive
from llmc.checkpoint import read_model_header
from llmc.errors import UserError
from llmc.sampler import Sampler, sample
from llmc.tokenizer import StreamDecoder, Tokenizer, byte_encoding, gpt2_encoding, token_bytes
from train_gpt2_fp32 import choose_attention, gpt2_build_from_checkpoint, next_logits


def load_tokenizer(model: Path, vocab_size: int, file: Path | None = None) -> Tokenizer:
    """The tokenizer of a model: the file that is named, else `<model>_tokenizer.bin` beside the model, else
    gpt2_tokenizer.bin in the current directory if it has as many tokens as the model, else what the number of tokens
    suggests: bytes or GPT-2's.

    Raises UserError where there is none, or a file that is not for this model.
    """
    beside = model.with_name(f"{model.stem}_tokenizer.bin")
    if file or beside.is_file():
        tokenizer = Tokenizer.load(file or beside)
        if tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"{file or beside} has {tokenizer.vocab_size} tokens and {model} {vocab_size}: "
                "name the model's own tokenizer with --tokenizer"
            )
        return tokenizer
    if Path("gpt2_tokenizer.bin").is_file():
        tokenizer = Tokenizer.load("gpt2_tokenizer.bin")
        if tokenizer.vocab_size == vocab_size:
            return tokenizer
    encodings = {257: byte_encoding, 50257: gpt2_encoding}
    if vocab_size not in encodings:
        raise UserError(f"{model}: no tokenizer known for {vocab_size} tokens; name its file with --tokenizer")
    encoding = encodings[vocab_size]()
    return Tokenizer(token_bytes(encoding), encoding.eot_token)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Write text with a trained GPT-2.", allow_abbrev=False)
    add = parser.add_argument
    add("-e", "--model", type=Path, default="gpt2_124M.bin", help="a .bin or a checkpoint directory (%(default)s)")
    add("--prompt", default="", metavar="TEXT", help="how the text begins (nothing)")
    add("-g", "--tokens", type=natural, default=200, metavar="N", help="tokens to write (%(default)s)")
    add("--temperature", type=non_negative, default=1.0, metavar="X", help="0: always the likeliest token (1)")
    add("--top-k", type=natural, default=0, metavar="K", help="draw from the K likeliest tokens; 0: from all (0)")
    add("--seed", type=natural, default=1337, metavar="N", help="another seed, another text (%(default)s)")
    add("-t", "--context", type=positive, metavar="T", help="tokens the model sees at most (as many as it can)")
    add("--tokenizer", type=Path, metavar="FILE", help="the model's tokenizer .bin (found by itself, as a rule)")
    add("-a", "--attention", choices=("auto", "flash", "softmax", "relu"), default="auto", help="as in training (auto)")
    add("-f", "--tf32", type=on_off, default=True, metavar="0|1", help="matrix products in TF32 (1)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(%(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = make_parser().parse_args(arguments)
    device.use(args.device)
    device.use_tf32(args.tf32)

    path = args.model / "model.bin" if args.model.is_dir() else args.model
    config = read_model_header(path)
    if args.context and args.context > config.max_seq_len:
        raise UserError(f"-t {args.context} is above the model's longest sequence, {config.max_seq_len}: lower -t")
    tokenizer = load_tokenizer(path, config.vocab_size, args.tokenizer)
    tokens = [tokenizer.eot, *tokenizer.encode(args.prompt)]
    T = min(args.context or config.max_seq_len, len(tokens) + args.tokens)
    if len(tokens) > T:
        print(f"the prompt has {len(tokens)} tokens, of which the model sees only the last {T}", file=sys.stderr)
    model = gpt2_build_from_checkpoint(str(path), 1, T, choose_attention(args.attention, config), inference=True)

    decoder, sampler = StreamDecoder(tokenizer), Sampler(args.seed)
    print("".join(decoder.push(token) for token in tokens[1:]), end="", flush=True)
    started = time.perf_counter()
    for _ in range(args.tokens):
        logits = next_logits(model, np.array(tokens[-T:], np.int32))
        tokens.append(sample(logits, sampler.random_f32(), args.temperature, args.top_k or None))
        print(decoder.push(tokens[-1]), end="", flush=True)
    print(decoder.flush())
    seconds = time.perf_counter() - started
    print(f"{args.tokens} tokens in {seconds:.1f} s on {device.name()}", file=sys.stderr)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # for terminals that lack a character
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except MemoryError as error:
        sys.exit(f"error: out of memory ({error}): lower -t")
    except KeyboardInterrupt:
        print()
        sys.exit(130)
    except BrokenPipeError:  # whoever reads the text has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
