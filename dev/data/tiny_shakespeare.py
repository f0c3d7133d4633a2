"""Tiny Shakespeare: 40,000 lines of his plays, about 338,000 GPT-2 tokens.

Writes data/tiny_shakespeare_{train,val}.bin and their tokenizer, cut as llm.c cuts them: every speech is a text of its
own, the first 32,768 tokens (a tenth, where the text is shorter) are for validation.

    python dev/data/tiny_shakespeare.py                  # downloads the text
    python dev/data/tiny_shakespeare.py --text FILE      # or takes any other, speeches set apart by empty lines
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from common import DATA, download, encoding_of, read_text, run, write_dataset

from llmc.arguments import Parser
from llmc.tokenizer import END_OF_TEXT

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def main() -> None:
    parser = Parser(description="Make the tokens of tiny Shakespeare.")
    parser.add_argument("--text", metavar="FILE", type=Path, help="use this text instead of downloading it")
    parser.add_argument("--tokenizer", metavar="FILE", type=Path, help="a tokenizer .bin (default: GPT-2's)")
    parser.add_argument("--out", metavar="PREFIX", type=Path, default=DATA / "tiny_shakespeare", help="(%(default)s)")
    args = parser.parse_args()

    encoding = encoding_of(args.tokenizer)
    if args.text is None:
        args.text = args.out.with_suffix(".txt")
        download(URL, args.text)
    text = END_OF_TEXT + read_text(args.text).replace("\n\n", f"\n\n{END_OF_TEXT}")
    tokens = encoding.encode(text, allowed_special={END_OF_TEXT})
    num_val = min(32768, len(tokens) // 10)
    write_dataset(args.out, encoding, train=tokens[num_val:], val=tokens[:num_val])


if __name__ == "__main__":
    run(main)
