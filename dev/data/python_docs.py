"""The offline dataset: the English text of Python's own documentation, byte by byte.

Every CPython carries the language reference for its help() in pydoc_data.topics, about half a megabyte, so this needs
no network. A token is a byte of UTF-8; before each topic stands the end-of-text token, number 256. The last tenth is
for validation. Writes data/python_docs_{train,val}.bin and their tokenizer, data/python_docs_tokenizer.bin:

    python dev/data/python_docs.py
    python train_gpt2_fp32.py -e layers=4,heads=4,channels=128 -i data/python_docs -b 12 -t 64 -l 1e-3 -x 1500
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import DATA, encode_texts, make_folder, refuse_to_replace, run, write_vocabulary
from device.errors import UserError, counted
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.token_file import open_tokens, write_tokens
from llmc.data.tokenizer import byte_tokenizer
from llmc.run.arguments import Parser, a_path

import numpy as np


def check_ours(path: Path, read: Callable[[Path], Iterable], content: Iterable) -> None:
    """Raises UserError if there is a file with other content."""
    with suppress(UserError):
        if not os.path.lexists(path) or list(read(path)) == list(content):
            return
    refuse_to_replace(path)


def main() -> None:
    parser = Parser(description="Make a byte-level dataset of Python's documentation, offline.")
    parser.add_argument("--out", metavar="PREFIX", type=a_path, default=DATA / "python_docs", help="(%(default)s)")
    args = parser.parse_args()

    tokenizer = byte_tokenizer()
    tokens = np.array(list(chain(*encode_texts(tokenizer, [topics[name] for name in sorted(topics)]))))
    num_train = len(tokens) * 9 // 10
    vocabulary, train, val = (args.out.with_name(f"{args.out.name}_{of}.bin") for of in ("tokenizer", "train", "val"))
    splits = {train: tokens[:num_train], val: tokens[num_train:]}  # that of validation is written last of all
    check_ours(vocabulary, lambda path: open_tokenizer(path).tokens, tokenizer.tokens)
    for path, part in splits.items():
        check_ours(path, lambda path: open_tokens(path)[:], part)
    make_folder(args.out.parent)
    write_vocabulary(args.out, tokenizer)
    for path, part in splits.items():
        write_tokens(path, part, tokenizer.vocab_size)
        print(f"{path}: {counted(len(part), 'token')}")


if __name__ == "__main__":
    run(main)
