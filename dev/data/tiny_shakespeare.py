"""Tiny Shakespeare: 40,000 lines of his plays, about 338,000 GPT-2 tokens.

Writes data/tiny_shakespeare_{train,val}.bin and their tokenizer, cut as llm.c cuts them: every speech is a text of its
own, the first 32,768 tokens (a tenth, where the text is shorter) are for validation.

    python dev/data/tiny_shakespeare.py                  # downloads the text
    python dev/data/tiny_shakespeare.py --text FILE      # or takes any other, speeches set apart by empty lines
"""

import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import DATA, download, encode_texts, load_tokenizer, read_text, run, write_dataset
from llmc.run.arguments import Parser, a_path

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def main() -> None:
    parser = Parser(description="Make the tokens of tiny Shakespeare.")
    parser.add_argument("--text", metavar="FILE", type=a_path, help="use this text instead of downloading it")
    parser.add_argument("--tokenizer", metavar="FILE", type=a_path, help="a .bin or a tokenizer.json (GPT-2's)")
    parser.add_argument("--out", metavar="PREFIX", type=a_path, default=DATA / "tiny_shakespeare", help="(%(default)s)")
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.tokenizer)
    if args.text is None:
        args.text = args.out.with_suffix(".txt")
        download(URL, args.text)
    *speeches, last = read_text(args.text).split("\n\n")
    tokens = list(chain(*encode_texts(tokenizer, [f"{speech}\n\n" for speech in speeches] + [last])))
    num_val = min(32768, len(tokens) // 10)
    write_dataset(args.out, tokenizer, train=tokens[num_val:], val=tokens[:num_val], source=args.tokenizer)


if __name__ == "__main__":
    run(main)
