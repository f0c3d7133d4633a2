"""Bits per byte: known losses give the known figure, and the same one however a text is divided into tokens."""

from math import log

from dev.data.common import encode_texts, write_vocabulary
from llmc.data.batches import Batches, bits_per_byte, validate
from llmc.data.dataloader import DataLoader
from llmc.data.find_tokenizer import open_tokenizer
from llmc.data.token_file import write_tokens
from llmc.data.tokenizer import Tokenizer, write_tokenizer
from llmc.model.batch import Batch
from support.datasets import byte_level

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

BYTES = [bytes([byte]) for byte in range(256)]
END = b"<|endoftext|>"
MERGES = [b"th", b"the", b" the", b"in", b"ing", b"er", b" a", b"\xc3\xa9", b"other", b" other"]
VOCABULARIES = [Tokenizer([*BYTES, *MERGES[:count], END], 256 + count) for count in (0, 4, 10)]
TEXTS = ["the theatre there, then the other", "", "a café: bathing in 你好 🙂, they're", "nothing"]


def validate_known(dev, folder, tokens, nats, text_bytes, B, T, num_batches=1):
    """What `validate` finds for a model whose loss for each token is nats (V,), on the device."""
    losses, batch = dev.zeros((B, T)), Batch(B, T)
    write_tokens(folder / "data_val.bin", np.array(tokens))

    def forward_loss() -> None:
        dev.copy_in(losses, nats[dev.to_host(batch.targets)].astype(np.float32))

    batches = Batches(batch, losses, DataLoader(folder / "data", "val", B, T, len(nats)))
    return validate(batches, forward_loss, num_batches, text_bytes)


def as_data(tokenizer: Tokenizer) -> list[int]:
    """TEXTS as a dataset holds them, and one more end, which is the last target."""
    return [token for text in TEXTS for token in (tokenizer.eot, *tokenizer.encode(text))] + [tokenizer.eot]


def test_a_model_of_bytes_has_the_same_bits_per_byte_in_every_vocabulary(one_dev, tmp_path, rng):
    """Where a token is as likely as its bytes one after another, as a byte-level model has them."""
    p = rng.dirichlet(np.ones(257))  # of each byte, and of the end
    nats_of_byte, num_bytes = -np.log(p), sum(len(text.encode()) for text in TEXTS)
    want = sum(nats_of_byte[[*text.encode(), 256]].sum() for text in TEXTS) / log(2) / num_bytes
    lengths, losses = set(), set()
    for tokenizer in VOCABULARIES:
        V, tokens = tokenizer.vocab_size, as_data(tokenizer)
        nats = np.array([nats_of_byte[list(token)].sum() for token in tokenizer.tokens])
        nats[tokenizer.eot] = nats_of_byte[256]
        loss, bits = validate_known(one_dev, tmp_path, tokens, nats, tokenizer.text_bytes(V), 1, len(tokens) - 1)
        assert bits == pytest.approx(want, rel=1e-6)
        lengths.add(len(tokens))
        losses.add(round(loss, 3))
    assert len(lengths) == len(losses) == 3  # which the loss per token does not


def test_only_the_batches_that_are_evaluated_count_each_as_often_as_it_is(one_dev, tmp_path, rng):
    B, T, V = 2, 5, 9
    text_bytes, nats = np.array([0, 1, 2, 3, 4, 5, 6, 7, 200]), rng.uniform(1, 3, V)
    tokens = rng.integers(0, V, 4 * B * T)  # three whole batches, then the first again
    targets = np.concatenate([tokens[1 : 3 * B * T + 1], tokens[1 : B * T + 1]])
    for num_batches in (1, 2, 3, 4):
        seen = targets[: num_batches * B * T]
        count = lambda _, y: text_bytes[y].sum()  # noqa: E731
        loss, bits = validate_known(one_dev, tmp_path, tokens, nats, count, B, T, num_batches)
        assert loss == pytest.approx(nats[seen].mean(), rel=1e-6)
        assert bits == pytest.approx(nats[seen].sum() / log(2) / text_bytes[seen].sum(), rel=1e-6)


def test_without_a_tokenizer_or_any_text_there_are_none(one_dev, tmp_path):
    assert validate_known(one_dev, tmp_path, [0, 1, 0], np.ones(2), None, 1, 2) == (1.0, None)
    assert validate_known(one_dev, tmp_path, [0, 1, 0], np.ones(2), lambda *_: 0, 1, 2) == (1.0, None)
    assert bits_per_byte(log(2), 6, 3) == 2.0


def bytes_each(tokenizer: Tokenizer, V: int) -> list[int]:
    """What each token stands for after an ordinary one."""
    return [tokenizer.text_bytes(V)(np.array([0]), np.array([token])) for token in range(V)]


def test_special_tokens_and_padding_stand_for_no_text(tmp_path):
    write_tokenizer(tmp_path / "t.bin", [b"a", "é".encode(), END, b" the"], 2)
    assert bytes_each(open_tokenizer(tmp_path / "t.bin"), 4) == [1, 2, 0, 4]
    library = byte_level()
    library.add_tokens(["<|endoftext|>", "   ", AddedToken("<|pad|>", special=True)])  # 256, 257, 258
    library.save(str(tmp_path / "tokenizer.json"))
    write_vocabulary(tmp_path / "x", open_tokenizer(tmp_path / "tokenizer.json"), tmp_path / "tokenizer.json")
    for name in "x_tokenizer.json", "x_tokenizer.bin":
        assert bytes_each(open_tokenizer(tmp_path / name), 261) == [1] * 256 + [0, 3, 0, 0, 0]


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind, added", [
    (PREPEND, "always"), *((pre_tokenizers.Metaspace("▁", scheme, False), scheme)
                           for scheme in ("always", "first", "never")),
    (pre_tokenizers.ByteLevel(add_prefix_space=True), "always"),
    (pre_tokenizers.ByteLevel(add_prefix_space=False), "never"),
])  # fmt: skip
def test_a_space_that_a_tokenizer_adds_is_no_byte_of_the_text(kind, added, special, tmp_path):
    """By its .json as by its .bin."""
    library = byte_level()
    if not isinstance(kind, pre_tokenizers.ByteLevel):
        names = ["▁", *(f"<0x{byte:02X}>" for byte in range(256))]
        library = Library(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True))
        library.decoder = decoders.ByteFallback()
    setattr(library, "normalizer" if kind is PREPEND else "pre_tokenizer", kind)
    library.add_special_tokens(["<s>", "</s>"])
    begins = [("<s>", library.token_to_id("<s>"))]
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begins)
    library.save(str(tmp_path / "tokenizer.json"))
    texts = ["the theatre", "a café: 你好", "x</s>y</s> z", "</s>"]
    if special and added == "always":  # " z" and "z" may have the same tokens
        texts[2] = "x</s>y</s>z"
    ours = open_tokenizer(tmp_path / "tokenizer.json")
    tokens = np.concatenate(encode_texts(ours, texts, special=special))
    write_vocabulary(tmp_path / "x", ours, tmp_path / "tokenizer.json")
    parts = [ours.tokens[token] for token in encode_texts(ours, ["the", "theatre"], inner=[False, True])[1]]
    assert b"".join(parts) == b"<s>theatre</s>"  # of one text there is a space before it at most
    num_bytes = sum(len((text.replace("</s>", "") if special else text).encode()) for text in texts)
    for name in "x_tokenizer.json", "x_tokenizer.bin":
        found = open_tokenizer(tmp_path / name)
        assert (found.bos, found.eot, found.ends, found.special, found.space) == (
            ours.bos, ours.eot, ours.ends, ours.special, ("never", "first", "always").index(added))  # fmt: skip
        assert found.text_bytes(300)(tokens[:-1], tokens[1:]) == num_bytes
