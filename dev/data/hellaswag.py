"""HellaSwag's validation set as token file: 10,042 contexts with four endings each, of which one is right.

Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?" (2019). Writes data/hellaswag_val.bin, which the
trainer's --hellaswag reads; llmc/data/evaluation.py has the format. Context, a space and ending are encoded as one
text; what follows the tokens that it has in common with the context is the ending.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data import common
from dev.data.common import DATA, Unsuitable, blocks_of, download, encode, load_tokenizer, make_folder, run
from device.errors import UserError, counted
from llmc.data.evaluation import START_EXAMPLE
from llmc.data.find_tokenizer import named_tokenizer
from llmc.data.tokenizer import Tokenizer
from llmc.files.files import make_header, replacing
from llmc.files.magic import EVALUATION
from llmc.run.arguments import Parser, a_path

import numpy as np

COMMIT = "a29ff8e9a04bba4bd6588223785ce105328adc57"
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/{COMMIT}/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def encode_example(number: int, example: dict, tokenizer: Tokenizer) -> list[int]:
    """One example's part of the uint16 stream. Raises ValueError for what the format cannot hold, Unsuitable for what
    the tokenizer cannot spell."""
    context = example["ctx"]
    encoded = encode(tokenizer, [context, *(f"{context} {ending}" for ending in example["endings"])])
    common = len(os.path.commonprefix(encoded))
    if not common:
        raise ValueError("no context")
    context, *endings = encoded[0][:common], *(tokens[common:] for tokens in encoded[1:])
    label = int(example["label"])
    if len(endings) != 4 or not 0 <= label < 4:
        raise ValueError(f"{len(endings)} endings with label {label}; 4 endings are needed, one of them right")
    stream = [START_EXAMPLE, 0, number, label, len(endings)]
    for tokens in (context, *endings):
        stream += [len(tokens), *tokens]
    stream[1] = 2 * len(stream)
    return stream


def main() -> None:
    parser = Parser(description="Make hellaswag_val.bin.")
    parser.add_argument("--tokenizer", metavar="FILE", type=a_path, help="a .bin or a tokenizer.json (GPT-2's)")
    parser.add_argument("--out", metavar="FILE", type=a_path, default=DATA / "hellaswag_val.bin", help="(%(default)s)")
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.tokenizer and named_tokenizer(args.tokenizer))
    if tokenizer.vocab_size > START_EXAMPLE:
        raise UserError(
            f"{args.tokenizer}: {tokenizer.vocab_size} tokens are too many for an evaluation file, whose tokens have "
            f"16 bits: use a tokenizer of at most {START_EXAMPLE}"
        )
    source, examples = args.out.with_suffix(".jsonl"), []
    download(URL, source, SHA256)
    lines = common.lines_of(source, blocks_of(source, "utf-8", translate=False))
    for number, line in enumerate(filter(str.strip, lines)):
        try:
            examples.append(np.array(encode_example(number, json.loads(line), tokenizer), "<u2"))
        except Unsuitable:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{source}, line {number + 1}: not a HellaSwag example ({error!r})") from None
    make_folder(args.out.parent)
    header = make_header(EVALUATION, 1, len(examples), max((e.nbytes for e in examples), default=0))
    content = b"".join(array.tobytes() for array in (header, *examples))
    if args.out.exists() and args.out.read_bytes() != content:
        common.refuse_to_replace(args.out)
    with replacing(args.out) as file:
        file.write(content)
    print(f"{args.out}: {counted(len(examples), 'example')}")


if __name__ == "__main__":
    run(main)
