"""What a run measures between its steps: the loss on validation data, and the score on HellaSwag."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import device
from llmc import ranks
from llmc.batches import Batches, evaluate, validate
from llmc.dataloader import DataLoader
from llmc.evaluation import EvalLoader
from llmc.exchange import Exchange
from llmc.model import Model
from llmc.report import print_validation
from llmc.settings import Settings
from llmc.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llmc.watch import Logs


class Validation:
    """batches: the validation data; count: how many batches a validation takes. questions: HellaSwag's, if a flag asks
    for them. text_bytes (V,): how many bytes of text each token stands for, if that is known. lowest: the loss of the
    checkpoint that --best has kept."""

    def __init__(
        self, model: Model, settings: Settings, data: DataLoader, questions: EvalLoader | None,
        tokenizer: Tokenizer | None,
    ):  # fmt: skip
        s = settings

        def forward_loss() -> None:
            model.forward(s.B, s.T)
            model.loss(s.B, s.T)

        self.forward_loss, self.count = device.record(forward_loss), s.val_batches
        self.batches = Batches(model, data)
        self.questions = Batches(model, questions) if questions else None
        self.text_bytes = tokenizer.text_bytes(model.config.vocab_size) if tokenizer else None
        self.lowest = inf

    def measure(self) -> dict[str, object]:
        """Identifies the validation data. Only losses of the same data can be compared."""
        return {"val_batches": self.count, "val_data": self.batches.loader.fingerprint}

    def run(self, step: int, exchange: Exchange, logs: Logs, stopped: Callable[[], bool]) -> float | None:
        """Measures, prints and logs before a step. Returns the loss, the same on all ranks. Returns None if `stopped`
        before the end. Raises UserError if the parameters are not the same on all ranks."""
        if ranks.size() > 1:
            ranks.check_same(
                f"the checksum of the parameters before step {step + 1}", exchange.checksum(),
                "a GPU or its memory may be at fault: go on from an earlier checkpoint without that machine",
            )  # fmt: skip
        found = validate(self.batches, self.forward_loss, self.count, self.text_bytes, stopped)
        if found is None:
            return None
        loss, bits_per_byte = found
        print_validation(loss, bits_per_byte)
        logs.log(step, val_loss=loss, bits_per_byte=bits_per_byte)
        accuracy = evaluate(self.questions, self.forward_loss, stopped) if self.questions else None
        if accuracy is not None:
            print(f"HellaSwag accuracy {accuracy:.4f} of {self.questions.loader.num_examples}", flush=True)
            logs.log(step, accuracy=accuracy)
        return None if self.questions and accuracy is None else loss
