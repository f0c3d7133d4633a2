"""Small tokenizers of the tokenizers library, one of each kind that models have, learned from a line of text."""

import json

from llmc.data.hf_tokenizer import byte_letters
from llmc.data.tokenizer import Tokenizer

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

CORPUS = "the theatre there, then the other: they're bathing in the 1990s' weather — naïve café 你好 🙂🙂\n\n  end  "
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPELLINGS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # bytes as letters, and nothing else
GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False)
BEGIN, END = "<|begin_of_text|>", "<|endoftext|>"


def train(pre_tokenizer, first=(), last=(), **model) -> Library:
    """A byte-level BPE: special tokens `first`, 256 bytes, 90 merges, added tokens `last`."""
    library = Library(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(first) + 346, special_tokens=list(first), initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator([CORPUS * 3], trainer)
    content = json.loads(library.to_str())
    content["model"] |= model
    if model.get("ignore_merges"):
        content["model"]["vocab"]["Ġtheatres"] = len(content["model"]["vocab"])  # a token that no merge leads to
    library = Library.from_str(json.dumps(content))
    library.add_tokens([name if name.isspace() else AddedToken(name, special=True) for name in last])
    return library


def beginning(library: Library, name: str = BEGIN) -> processors.TemplateProcessing:
    """What puts the token of this name before a text."""
    return processors.TemplateProcessing(f"{name} $A", special_tokens=[(name, library.token_to_id(name))])


def falling_back(prepend: bool) -> Library:
    """As Llama 2 and the first Mistrals: ▁ for a space, and <0x0A> for a byte of a character without a token."""
    library = Library(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if prepend:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    library.train_from_iterator(CORPUS[:-30].split(" "), trainer)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = beginning(library, "<s>")
    content = json.loads(library.to_str())
    library = Library.from_str(json.dumps(content | {"added_tokens": content["added_tokens"][:3]}))
    library.add_tokens([AddedToken("▁▁", normalized=False)])  # as Gemma's
    return library


BYTE_LEVEL = {
    "gpt2_like": train(GPT2_SPLIT, last=[END]),
    "llama3_like": train(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), SPELLINGS]),
        last=[BEGIN, "<|end_of_text|>", "<|eot_id|>"], ignore_merges=True,
    ),
    "smollm2_like": train(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2_SPLIT]),
        first=[END, "<|im_start|>", "<|im_end|>"],
    ),
    "pythia_like": train(GPT2_SPLIT, first=[END, "<|padding|>"], last=[" " * n for n in range(24, 1, -1)]),
}  # fmt: skip
BYTE_LEVEL["llama3_like"].post_processor = processors.Sequence(
    [processors.ByteLevel(trim_offsets=False), beginning(BYTE_LEVEL["llama3_like"])]
)
BYTE_LEVEL["pythia_like"].normalizer = normalizers.NFC()
LIBRARIES = BYTE_LEVEL | {"llama2_like": falling_back(prepend=True), "mistral_like": falling_back(prepend=False)}
SPELLED = sorted(BYTE_LEVEL["gpt2_like"].get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
LEARNED = Tokenizer([*(bytes(map(byte_letters().index, name)) for name, _ in SPELLED), END.encode()], len(SPELLED))
