"""Multiple-choice evaluation: llm.c's files as batches, and the answers against transformers'."""

import struct

from dev.data.hellaswag import encode_example
from device.errors import UserError
from llmc.data.batches import Batches, evaluate
from llmc.data.evaluation import EvalLoader
from llmc.data.find_tokenizer import open_tokenizer
from llmc.files.model_file import write_model
from llmc.step.training import Training
from models import build_from_file
from oracle import flat_parameters_of, transformers_model
from support.vocabularies import LIBRARIES
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest
import torch
import torch.nn.functional as F

V = 61


def example_bytes(index: int, label: int, context, completions) -> bytes:
    parts = [part for tokens in (context, *completions) for part in (len(tokens), *tokens)]
    return struct.pack(f"<{5 + len(parts)}H", 65535, 2 * (5 + len(parts)), index, label, len(completions), *parts)


def write_evaluation(path, examples) -> None:
    """An evaluation file of (label, context, completions), as llm.c's write_evalfile lays it out."""
    body = [example_bytes(index, *example) for index, example in enumerate(examples)]
    header = struct.pack("<4i", 20240522, 1, len(examples), max(map(len, body)))
    path.write_bytes(header.ljust(1024, b"\0") + b"".join(body))


def random_examples(rng, count: int, longest: int = 16) -> list[tuple]:
    """With at most `longest` tokens in a context and a completion."""
    examples = []
    for _ in range(count):
        context = rng.integers(0, V, rng.integers(1, longest // 2)).tolist()
        lengths = rng.integers(1, longest - len(context) + 1, 4)
        examples.append((int(rng.integers(4)), context, [rng.integers(0, V, n).tolist() for n in lengths]))
    return examples


def batch(B: int, T: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full((B, T), -1, np.int32), np.full((B, T), -1, np.int32)


def count_correct(training: Training, loader: EvalLoader) -> int:
    model, acts, batch = training.model, training.acts, training.batch

    def forward_loss() -> None:
        model.forward(acts, batch)
        model.loss(acts, batch)

    correct, answered = evaluate(Batches(batch, acts.losses, loader), forward_loss)
    assert answered == loader.num_examples
    return correct


def answers(model, examples, normalised: bool = True) -> list[int]:
    """The completion that transformers' model finds likeliest a token (or as a whole), one sequence at a time."""
    chosen = []
    for _, context, completions in examples:
        scores = []
        for completion in completions:
            with torch.no_grad():
                logits = model(torch.tensor([context + completion])).logits[0, len(context) - 1 : -1]
            scores.append(F.cross_entropy(logits, torch.tensor(completion), reduction="mean" if normalised else "sum"))
        chosen.append(int(torch.stack(scores).argmin()))
    return chosen


def test_answers_are_those_of_transformers(one_dev, tmp_path, rng):
    one_dev.use_precision("fp32")  # which may tell two completions that are about as likely apart the other way
    B, T = 10, 19
    config = GPT2Config(24, V, 2, 2, 32)
    theirs = transformers_model(config)
    with torch.no_grad():
        theirs.transformer.wte.weight *= 30  # untrained, it would find all tokens about as likely
    write_model(tmp_path / "model.bin", config, flat_parameters_of(theirs, config).astype(np.float32))
    training = build_from_file(GPT2, tmp_path / "model.bin", B, T, "softmax")
    examples = random_examples(rng, 23)
    chosen = answers(theirs, examples)
    assert chosen != answers(theirs, examples, normalised=False), "these examples do not tell mean from sum"
    for shift, expected in ((0, 23), (1, 0)):
        labels = [(answer + shift) % 4 for answer in chosen]
        write_evaluation(tmp_path / "eval.bin", [(label, *e[1:]) for label, e in zip(labels, examples, strict=True)])
        assert count_correct(training, EvalLoader(tmp_path / "eval.bin", B, T, V)) == expected


@pytest.mark.parametrize("kind", ["llama2_like", "mistral_like", "gpt2_like"])
def test_context_and_ending_are_encoded_as_one_text(kind, tmp_path):
    """A tokenizer that puts a space before a text puts none before an ending."""
    LIBRARIES[kind].save(str(tmp_path / "tokenizer.json"))
    example = {"ctx": "the theatre", "label": "1", "endings": ["there", "bathing", " in", "the weather — naïve"]}
    (tmp_path / "eval.bin").write_bytes(
        struct.pack("<4i", 20240522, 1, 1, 0).ljust(1024, b"\0")
        + np.array(encode_example(0, example, open_tokenizer(tmp_path / "tokenizer.json")), "<u2").tobytes()
    )
    (found,) = EvalLoader(tmp_path / "eval.bin", 4, 64, 1000).examples
    for ending, tokens in zip(example["endings"], found.completions, strict=True):
        whole = LIBRARIES[kind].encode(f"the theatre {ending}", add_special_tokens=False).ids
        assert [*found.context, *tokens] == whole
    assert found.context.tolist() == LIBRARIES[kind].encode("the theatre", add_special_tokens=False).ids


def test_a_row_is_a_context_with_one_of_its_completions(tmp_path):
    examples = [(2, [5, 6], [[7], [8, 9, 10], [11, 12], [13]]), (0, [1], [[2], [3], [4], [5, 6]])]
    write_evaluation(tmp_path / "eval.bin", examples)
    loader = EvalLoader(tmp_path / "eval.bin", 5, 6, V)
    inputs, targets = batch(5, 6)
    assert (loader.num_examples, loader.num_batches) == (2, 2)
    loader.next_batch(inputs, targets)
    assert inputs.tolist() == [
        [5, 6, 7, 0, 0, 0], [5, 6, 8, 9, 10, 0], [5, 6, 11, 12, 0, 0], [5, 6, 13, 0, 0, 0], [0] * 6,
    ]  # fmt: skip
    assert targets.tolist() == [
        [6, 7, 0, 0, 0, 0], [6, 8, 9, 10, 0, 0], [6, 11, 12, 0, 0, 0], [6, 13, 0, 0, 0, 0], [0] * 6,
    ]  # fmt: skip
    losses = np.full((5, 6), -100.0, np.float32)  # what counts for nothing must not count
    losses[0, 1], losses[1, 1:4], losses[2, 1:3], losses[3, 1] = 2.0, (1, 1, 4), (1, 2), 3.0  # means 2, 2, 1.5, 3
    assert loader.count_correct(losses) == (1, 1)
    losses[2, 2] = 4.0
    assert loader.count_correct(losses) == (0, 1)
    for value in np.nan, np.inf, -np.inf:
        losses[1, 2] = value
        assert loader.count_correct(losses) == (0, 0)


def test_after_the_last_batch_and_after_a_reset_comes_the_first(tmp_path, rng):
    write_evaluation(tmp_path / "eval.bin", random_examples(rng, 5))
    loader = EvalLoader(tmp_path / "eval.bin", 8, 16, V)
    assert loader.num_batches == 3

    def rows():
        inputs, targets = batch(8, 16)
        loader.next_batch(inputs, targets)
        return inputs.tolist(), targets.tolist()

    first, second, third = rows(), rows(), rows()
    assert first != second != third
    assert not np.any(third[0][4:]), "rows of the batch before were left in the last, which is half full"
    assert rows() == first
    loader.reset()
    assert rows() == first


def test_rows_without_an_example_are_never_counted(tmp_path, rng):
    write_evaluation(tmp_path / "eval.bin", [(0, [1], [[2], [3], [4], [5]])])
    loader = EvalLoader(tmp_path / "eval.bin", 13, 4, V)
    loader.next_batch(*batch(13, 4))
    assert loader.count_correct(np.zeros((13, 4), np.float32)) == (1, 1)


def test_a_file_is_taken_that_just_fits(tmp_path):
    write_evaluation(tmp_path / "eval.bin", [(3, [0, 1, 2], [[3], [V - 1], [5], [6, 7]])])
    assert EvalLoader(tmp_path / "eval.bin", 4, 5, V).num_batches == 1


@pytest.mark.parametrize(
    ("B", "T", "vocab_size", "message"),
    [(3, 5, 50, "-b must be at least 4"), (4, 4, 50, "-t 5 or more"), (4, 5, 47, "token 47 .* vocabulary of 47")],
)
def test_what_does_not_fit_the_model_is_refused(B, T, vocab_size, message, tmp_path):
    write_evaluation(tmp_path / "eval.bin", [(3, [0, 1, 2], [[3], [47], [5], [6, 7]])])
    with pytest.raises(UserError, match=message):
        EvalLoader(tmp_path / "eval.bin", B, T, vocab_size)


def test_every_kind_of_damage_is_refused_with_the_file_named(tmp_path):
    path = tmp_path / "eval.bin"
    write_evaluation(path, [(3, [0, 1], [[3], [4], [5], [6]]), (1, [2], [[3], [4], [5, 6], [7]])])
    whole = path.read_bytes()

    def word(index: int, value: int) -> bytes:
        at = 1024 + 2 * index
        return whole[:at] + struct.pack("<H", value) + whole[at + 2 :]

    damaged = {
        "missing": None,
        "empty": b"",
        "magic": struct.pack("<i", 20240520) + whole[4:],
        "version": whole[:4] + struct.pack("<i", 2) + whole[8:],
        "no example": whole[:8] + struct.pack("<i", 0) + whole[12:1024],
        "more examples in the header": whole[:8] + struct.pack("<i", 3) + whole[12:],
        "fewer examples in the header": whole[:8] + struct.pack("<i", 1) + whole[12:],
        "start": word(0, 1),
        "length of an example": word(1, 30),
        "odd length of an example": word(1, 33),
        "index": word(2, 1),
        "label": word(3, 4),
        "number of completions": word(4, 3),
        "length of a context": word(5, 9),
        "empty context": word(5, 0),
        "length of a completion": word(8, 2),
        "cut off": whole[:-2],
        "cut off in a token": whole[:-1],
        "one byte too many": whole + b"\0",
    }
    for kind, data in damaged.items():
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UserError, match="eval.bin.*dev/data/hellaswag.py") as caught:
            EvalLoader(path, 4, 16, V)
            pytest.fail(f"{kind}: accepted")
        assert "\n" not in str(caught.value), kind
