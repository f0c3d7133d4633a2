"""Multiple-choice evaluation: llm.c's files as batches, and the answers against transformers'."""

import struct

from conftest import refusal
from dev.data.hellaswag import encode_example
from llmc.data.batches import Batches, evaluate
from llmc.data.evaluation import EvalLoader, parse_example
from llmc.data.find_tokenizer import open_tokenizer
from llmc.files.model_file import write_model
from llmc.step.training import Training
from models import build_from_file
from oracle import flat_parameters_of, transformers_model
from support.evaluations import V, random_examples, write_evaluation
from support.vocabularies import LIBRARIES
from train_gpt2_fp32 import GPT2, GPT2Config

import numpy as np
import pytest
import torch
import torch.nn.functional as F


def next_batch(loader: EvalLoader, B: int, T: int) -> tuple[list, list]:
    """The loader's next inputs and targets, from arrays that held something else."""
    inputs, targets = np.full((2, B, T), -1, np.int32)
    loader.next_batch(inputs, targets)
    return inputs.tolist(), targets.tolist()


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
    stream = encode_example(0, example, open_tokenizer(tmp_path / "tokenizer.json"))
    found = parse_example(np.array(stream, np.uint16), 0)
    for ending, tokens in zip(example["endings"], found.completions, strict=True):
        whole = LIBRARIES[kind].encode(f"the theatre {ending}", add_special_tokens=False).ids
        assert [*found.context, *tokens] == whole
    assert found.context.tolist() == LIBRARIES[kind].encode("the theatre", add_special_tokens=False).ids


def test_a_row_is_a_context_with_one_of_its_completions(tmp_path):
    examples = [(2, [5, 6], [[7], [8, 9, 10], [11, 12], [13]]), (0, [1], [[2], [3], [4], [5, 6]])]
    write_evaluation(tmp_path / "eval.bin", examples)
    loader = EvalLoader(tmp_path / "eval.bin", 5, 6, V)
    assert (loader.num_examples, loader.num_batches) == (2, 2)
    assert next_batch(loader, 5, 6) == (
        [[5, 6, 7, 0, 0, 0], [5, 6, 8, 9, 10, 0], [5, 6, 11, 12, 0, 0], [5, 6, 13, 0, 0, 0], [0] * 6],
        [[6, 7, 0, 0, 0, 0], [6, 8, 9, 10, 0, 0], [6, 11, 12, 0, 0, 0], [6, 13, 0, 0, 0, 0], [0] * 6],
    )
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
    first, second, third = (next_batch(loader, 8, 16) for _ in range(loader.num_batches))
    assert first != second != third
    assert not np.any(third[0][4:]), "rows of the batch before were left in the last, which is half full"
    assert loader.count_correct(np.zeros((8, 16), np.float32))[1] == 1
    assert next_batch(loader, 8, 16) == first
    loader.reset()
    assert next_batch(loader, 8, 16) == first


@pytest.mark.parametrize("B, T, vocab_size, said", [
    (4, 5, 48, None), (3, 5, 48, "-b must be at least 4"), (4, 4, 48, "use -t 5 or more"),
    (4, 5, 47, "token 47 is outside the model's vocabulary of 47"),
])  # fmt: skip
def test_a_file_is_taken_that_just_fits(B, T, vocab_size, said, tmp_path):
    write_evaluation(tmp_path / "eval.bin", [(3, [0, 1, 2], [[3], [47], [5], [6, 7]])])
    if said:
        assert said in refusal(EvalLoader, tmp_path / "eval.bin", B, T, vocab_size)
    else:
        assert EvalLoader(tmp_path / "eval.bin", B, T, vocab_size).num_batches == 1


def test_every_kind_of_damage_is_refused_with_the_file_named(tmp_path):
    path = tmp_path / "eval.bin"
    write_evaluation(path, [(3, [0, 1], [[3], [4], [5], [6]]), (1, [2], [[3], [4], [5, 6], [7]])])
    whole = path.read_bytes()
    damaged = {
        "missing": None, "empty": b"", "no example": whole[:8] + struct.pack("<i", 0) + whole[12:1024],
        "cut off": whole[:-2], "cut off in a token": whole[:-1], "one byte too many": whole + b"\0",
    }  # fmt: skip
    for kind, index, value in (
        ("magic", 0, 20240520), ("version", 1, 2), ("more examples in the header", 2, 3),
        ("fewer examples in the header", 2, 1),
    ):  # fmt: skip
        damaged[kind] = whole[: 4 * index] + struct.pack("<i", value) + whole[4 * index + 4 :]
    for kind, index, value in (
        ("start", 0, 1), ("length of an example", 1, 30), ("odd length of an example", 1, 33), ("index", 2, 1),
        ("label", 3, 4), ("number of completions", 4, 3), ("length of a context", 5, 9), ("empty context", 5, 0),
        ("length of a completion", 8, 2),
    ):  # fmt: skip
        at = 1024 + 2 * index
        damaged[kind] = whole[:at] + struct.pack("<H", value) + whole[at + 2 :]
    for kind, data in damaged.items():
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        said = refusal(EvalLoader, path, 4, 16, V)
        assert "eval.bin" in said and said.count("dev/data/hellaswag.py") == 1, kind
