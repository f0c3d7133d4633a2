"""TinyStories: two million short stories in the words of a small child.

Eldan and Li, "TinyStories: How Small Can Language Models Be and Still Speak Coherent English?" (2023); on Hugging Face
roneneldan/TinyStories. Writes data/tinystories_{train,val}_<number>.bin and their tokenizer; run it again to go on
after an interruption. Needs `pip install datasets`.

    python dev/data/tinystories.py
    python train_gpt2_fp32.py -e d12 -i data/tinystories
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, wherever this is run from

from dev.data.common import DATA, run
from dev.data.shards import load_texts, make_parser, write_shards


def main() -> None:
    parser = make_parser("Make the tokens of TinyStories.", out=DATA / "tinystories")
    for split in ("train", "val"):
        what = f"take the {split} split from these .parquet or .jsonl files instead of the hub"
        parser.add_argument(f"--{split}-files", metavar="FILE", nargs="+", help=what)
    args = parser.parse_args()

    name = "roneneldan/TinyStories"
    write_shards(load_texts(name, "validation", files=args.val_files), args, split="val")
    write_shards(load_texts(name, "train", files=args.train_files), args, split="train")


if __name__ == "__main__":
    run(main)
