"""Turns an llm.c model into a directory that Hugging Face's transformers loads.

    python dev/export_hf.py model.bin -o my_gpt2
    python -c "from transformers import GPT2LMHeadModel; GPT2LMHeadModel.from_pretrained('my_gpt2')"

Writes config.json, model.safetensors and, given the tokenizer, tokenizer.json. The logits are the same, to rounding,
for a model that was trained with softmax or flash attention; transformers has no ReLU attention.
"""

import json
import os
import shutil
import sys
from pathlib import Path

if not __package__:  # run as a program: look in the repository, not in dev/, whose modules could hide Python's own
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

try:
    from safetensors.numpy import save_file
except ImportError as error:
    sys.exit(f"error: {error.name} is missing: pip install -r requirements-dev.txt")

from dev.huggingface import named_tensors
from llmc.arguments import Parser
from llmc.checkpoint import GPT2Config, read_model
from llmc.errors import UserError
from llmc.tokenizer import END_OF_TEXT, GPT2_PATTERN, Tokenizer


def config_json(config: GPT2Config, eot: int | None) -> dict:
    """The model's sizes in transformers' terms. eot: the end-of-text token, where it is known."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.channels,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": None,  # 4C
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": "float32",
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The tokenizer as the tokenizers library keeps it."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HFTokenizer

    letters = byte_letters()
    spell = lambda token: "".join(letters[byte] for byte in token)  # noqa: E731
    ranks = {token: rank for rank, token in enumerate(tokenizer.tokens) if rank != tokenizer.eot}
    merges = [tuple(spell(part) for part in merged_from(token, ranks)) for token in ranks if len(token) > 1]
    vocab = {spell(token): rank for token, rank in ranks.items()} | {END_OF_TEXT: tokenizer.eot}
    theirs = HFTokenizer(models.BPE(vocab, merges))
    theirs.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GPT2_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return theirs.to_str()


def byte_letters() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary: itself where it is printable Latin-1, else the next
    one free from 256 on (Radford et al., 2019, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens whose merge a token is: what is left when its bytes are merged by all earlier tokens."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks) + 1) for i in range(len(parts) - 1)]
        i = int(np.argmin(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def export(path: Path, out: Path, tokenizer: Tokenizer | None) -> None:
    """Writes the directory `out`, which appears whole or not at all. Raises UserError where the model cannot be read,
    the tokenizer is another model's, or `out` cannot be written or holds something already."""
    config, params = read_model(path)
    if tokenizer and tokenizer.vocab_size != config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and {path} {config.vocab_size}: use the model's own"
        )
    eot = tokenizer.eot if tokenizer else {50257: 50256, 257: 256}.get(config.vocab_size)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already: remove it, or name another directory with -o")
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    print(f"exporting {path}: {params.size:,} parameters", flush=True)
    try:
        part.mkdir(parents=True)
        try:
            tensors = {
                f"transformer.{name}": np.ascontiguousarray(tensor, np.float32)
                for name, tensor in named_tensors(config, params)
            }
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            if tokenizer:
                (part / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")
                special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
                special |= {"bos_token": END_OF_TEXT, "model_max_length": config.max_seq_len}
                (part / "tokenizer_config.json").write_text(json.dumps(special, indent=2))
            (part / "config.json").write_text(json.dumps(config_json(config, eot), indent=2))
            (part / "model.safetensors").chmod((part / "config.json").stat().st_mode)  # which safetensors makes private
            os.replace(part, out)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({(error.strerror or str(error)).lower()})") from error
    print(f"wrote {out}")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Turn an llm.c model .bin into a directory for transformers.")
    parser.add_argument("model", type=Path, help="a .bin of version 3, or a checkpoint directory")
    parser.add_argument("-o", "--out", type=Path, metavar="DIR", help="where to (beside the model, without .bin)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE", help="the model's tokenizer .bin, to take along")
    args = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else None
    model = args.model / "model.bin" if args.model.is_dir() else args.model
    export(model, args.out or model.with_suffix(""), tokenizer)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
