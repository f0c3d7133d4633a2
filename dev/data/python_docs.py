"""The offline dataset: the English text of Python's own documentation, byte by byte.

Every CPython carries the language reference for its help() in pydoc_data.topics, about half a megabyte, so this needs
no network. A token is a byte of UTF-8; before each topic stands the end-of-text token, number 256. The last tenth is
for validation. Writes data/python_docs_{train,val}.bin and their tokenizer, data/python_docs_tokenizer.bin:

    python dev/data/python_docs.py
    python train_gpt2_fp32.py -e layers=4,heads=4,channels=128 -i data/python_docs -b 12 -t 64 -l 1e-3 -x 1500
"""

import sys
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import DATA, encode_texts, make_folder, run, write_vocabulary
from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import byte_tokenizer
from llmc.run.arguments import Parser, a_path

import numpy as np


def main() -> None:
    parser = Parser(description="Make a byte-level dataset of Python's documentation, offline.")
    parser.add_argument("--out", metavar="PREFIX", type=a_path, default=DATA / "python_docs", help="(%(default)s)")
    args = parser.parse_args()

    tokenizer = byte_tokenizer()
    tokens = np.array(list(chain(*encode_texts(tokenizer, [topics[name] for name in sorted(topics)]))))
    num_train = len(tokens) * 9 // 10
    make_folder(args.out.parent)
    write_vocabulary(args.out, tokenizer)
    for split, part in ("train", tokens[:num_train]), ("val", tokens[num_train:]):  # that of validation last of all
        path = args.out.with_name(f"{args.out.name}_{split}.bin")
        write_tokens(path, part, tokenizer.vocab_size)
        print(f"{path}: {len(part):,} tokens")


if __name__ == "__main__":
    run(main)
