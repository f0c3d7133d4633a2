"""Multiple-choice evaluation: in each question the model chooses the ending of a text that it finds likeliest.

An evaluation file is llm.c's, little-endian. HellaSwag (Zellers et al., 2019) comes in this form from
dev/data/hellaswag.py.

    int32[256]      20240522, 1, number of examples, bytes of the longest example
    uint16 stream   for each example:
                      65535, which marks its start
                      its length in bytes, with all of these fields
                      its number, from 0
                      label: which completion is the right one, from 0
                      number of completions, 4
                      length of the context, then its tokens
                      for each completion: its length, then its tokens
"""

from dataclasses import dataclass
from pathlib import Path

from device.errors import UserError
from llmc.files.files import HEADER_BYTES, file_size, read_file, read_header
from llmc.files.magic import EVALUATION

import numpy as np

START_EXAMPLE = 65535
NUM_COMPLETIONS = 4
REMEDY = "make it with dev/data/hellaswag.py"


@dataclass(frozen=True)
class Example:
    """A question: which of the completions follows the context?"""

    context: np.ndarray            # uint16, at least one token
    completions: list[np.ndarray]  # uint16 each, at least one token
    label: int                     # the right completion


class EvalLoader:
    """Serves the examples of an evaluation file in batches of B rows of T tokens, one row a completion.

    num_examples: in the file. num_batches: how many `next_batch` takes for all of them, B // 4 examples each.

    Raises UserError for B below 4, and if the file is missing, damaged or of another kind, has a token that is not
    below vocab_size, or has a context that with a completion is longer than T.
    """

    def __init__(self, path: str | Path, B: int, T: int, vocab_size: int) -> None:
        if B < NUM_COMPLETIONS:
            raise UserError(f"-b must be at least {NUM_COMPLETIONS} for HellaSwag: each ending of a text is a row")
        self.T = T
        self.examples = read_examples(path)
        longest = max(len(e.context) + max(len(c) for c in e.completions) for e in self.examples)
        if longest > T:
            raise UserError(f"{path}: an example is {longest} tokens long and -t only {T}: use -t {longest} or more")
        token = max(int(max(e.context.max(), *(c.max() for c in e.completions))) for e in self.examples)
        if token >= vocab_size:
            raise UserError(
                f"{path}: token {token} is outside the model's vocabulary of {vocab_size}; "
                "use an evaluation file and a model (-e) that were made with the same tokenizer"
            )
        self.num_examples = len(self.examples)
        self.batch_examples = B // NUM_COMPLETIONS
        self.num_batches = -(-self.num_examples // self.batch_examples)
        self.reset()

    def reset(self) -> None:
        """Back to the first batch."""
        self._next = 0
        self._served: list[Example] = []

    def next_batch(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Fills inputs and targets, int32 (B, T) each, with the next batch; after the last it starts over.

        A row holds a context and one of its completions. A target is the next token. The rest of a row or a batch is 0.
        """
        self.skip()
        inputs.fill(0)
        targets.fill(0)
        row = 0
        for example in self._served:
            for completion in example.completions:
                tokens = np.concatenate([example.context, completion])
                inputs[row, : len(tokens)] = tokens
                targets[row, : len(tokens) - 1] = tokens[1:]
                row += 1

    def skip(self) -> None:
        """Passes over the next batch."""
        if self._next == self.num_examples:
            self.reset()
        self._served = self.examples[self._next : self._next + self.batch_examples]
        self._next += len(self._served)

    def count_correct(self, losses: np.ndarray) -> tuple[int, int]:
        """How many examples of the last batch the model answers right, and how many it answers, given its losses, fp32
        (B, T).

        The model's answer is the completion with the lowest mean loss over its own tokens. Its first token is predicted
        at the context's last position. If losses are equal, the first completion counts. If one of the four means is
        not finite, there is no answer.
        """
        correct = answered = row = 0
        for example in self._served:
            start = len(example.context) - 1
            means = []
            for completion in example.completions:
                means.append(losses[row, start : start + len(completion)].mean(dtype=np.float64))
                row += 1
            if np.isfinite(means).all():
                answered += 1
                correct += int(np.argmin(means)) == example.label
        return correct, answered


def read_examples(path: str | Path) -> list[Example]:
    """The examples of an evaluation file. Raises UserError if it is missing, damaged or something else."""
    header = read_header(path, EVALUATION, REMEDY)
    version, num_examples = int(header[1]), int(header[2])
    if version != 1:
        raise UserError(f"{path}: evaluation file version {version}; version 1 is needed: {REMEDY}")
    body = read_file(path)[HEADER_BYTES:]
    stream = np.frombuffer(body[: len(body) // 2 * 2], "<u2")
    examples, at = [], 0
    for index in range(num_examples):
        example = parse_example(stream[at:], index)
        if example is None:
            raise UserError(f"{path}: example {index} of {num_examples} is damaged or cut off; {REMEDY} again")
        examples.append(example)
        at += int(stream[at + 1]) // 2
    if not examples or HEADER_BYTES + 2 * at != file_size(path, REMEDY):
        raise UserError(f"{path}: {num_examples} examples in the header do not fit the file's size; {REMEDY} again")
    return examples


def parse_example(stream: np.ndarray, index: int) -> Example | None:
    """The example at the beginning of a stream, uint16; None unless it is example `index`, undamaged."""
    if stream.size < 6:
        return None
    start, size, found_index, label, num_completions = (int(n) for n in stream[:5])
    if (start, found_index, num_completions) != (START_EXAMPLE, index, NUM_COMPLETIONS) or label >= NUM_COMPLETIONS:
        return None
    if size % 2 or size // 2 > stream.size:
        return None
    parts, at, end = [], 5, size // 2
    for _ in range(1 + NUM_COMPLETIONS):  # the context, then the completions, each after its length
        length = int(stream[at]) if at < end else 0
        parts.append(stream[at + 1 : at + 1 + length])
        at += 1 + length
        if length == 0 or at > end:
            return None
    return Example(parts[0], parts[1:], label) if at == end else None
