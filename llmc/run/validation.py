"""What a run measures between its steps: the loss on validation data, and the score on HellaSwag."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import device
from llmc.data.batches import Batches, evaluate, validate
from llmc.data.dataloader import DataLoader
from llmc.data.evaluation import EvalLoader
from llmc.data.tokenizer import Tokenizer
from llmc.model.batch import Batch
from llmc.ranks import ranks
from llmc.ranks.exchange import Exchange
from llmc.run.logger import Logs
from llmc.run.report import print_validation
from llmc.run.settings import Settings
from llmc.step.training import Training


class Validation:
    """Measures the loss on validation data, and if a flag asks for it the score on HellaSwag.

    batches: the validation data; its loader is None if the run never validates. count: how many batches a validation
    takes. questions: HellaSwag's, if a flag asks for them. text_bytes: counts the bytes of text in a batch, if
    the tokenizer is known. lowest: the loss of the checkpoint that --best has kept.
    """

    def __init__(
        self, training: Training, settings: Settings, data: DataLoader | None, questions: EvalLoader | None,
        tokenizer: Tokenizer | None,
    ):  # fmt: skip
        model, acts, batch = training.model, training.acts, Batch(settings.B, settings.T)

        def forward_loss() -> None:
            model.mark_stale()
            model.forward(acts, batch)
            model.loss(acts, batch)

        self.forward_loss, self.count = device.record(forward_loss), settings.val_batches
        self.batches = Batches(batch, acts.losses, data)
        self.questions = Batches(batch, acts.losses, questions) if questions else None
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
        answers = evaluate(self.questions, self.forward_loss, stopped) if self.questions else None
        if answers is not None:
            correct, answered = answers
            if missing := self.questions.loader.num_examples - answered:
                print(f"HellaSwag: {missing} questions have losses that are not finite, and are not counted")
            if answered:
                print(f"HellaSwag accuracy {correct / answered:.4f} of {answered}", flush=True)
                logs.log(step, accuracy=correct / answered)
        return None if self.questions and answers is None else loss
