"""FineWeb, a sample of about ten billion tokens of web pages in English, in shards of 100 million.

Penedo et al., "The FineWeb Datasets" (2024); on Hugging Face HuggingFaceFW/fineweb, sample-10BT. Writes
data/fineweb10B/fineweb_{train,val}_<number>.bin, named and cut as llm.c does (number 0 is for validation), and their
tokenizer; run it again to go on after an interruption. Needs `pip install datasets`.

    python dev/data/fineweb.py
    python train_gpt2_fp32.py -e d12 -i data/fineweb10B/fineweb
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import DATA, run
from dev.data.shards import load_texts, make_parser, write_shards


def main() -> None:
    parser = make_parser("Make the tokens of FineWeb's sample-10BT.", out=DATA / "fineweb10B" / "fineweb")
    what = "take the texts from these .parquet or .jsonl files instead of the hub"
    parser.add_argument("--files", metavar="FILE", nargs="+", help=what)
    args = parser.parse_args()

    texts = load_texts("HuggingFaceFW/fineweb", "train", config="sample-10BT", files=args.files)
    write_shards(texts, args, split="train", first_split="val")


if __name__ == "__main__":
    run(main)
