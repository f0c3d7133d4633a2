"""The table that a run prints at its start: every setting, the data that it found, and the memory that it takes."""

from collections import Counter
from pathlib import Path

import device
from device.errors import counted, escaped
from llmc.data.dataloader import DataLoader
from llmc.model.tensors import num_parameters, padded
from llmc.ranks import collectives, ranks
from llmc.run.settings import Settings
from llmc.run.start import Data
from llmc.step.training import Training

Sections = list[list[tuple[str, object]]]  # each a list of (parameter, value)

PRODUCTS = {
    "fp32": "fp32", "tf32": "TF32", "bf16": "bf16, sums in fp32", "fp16": "fp16, scaled; sums in fp32",
    "fp8": "large ones of layers in e4m3, others in bf16", "no fp8": "bf16: no matrix is large enough for e4m3",
}  # fmt: skip


def print_table(sections: Sections) -> None:
    """Prints sections as llm.c's start-up table."""
    rule = "+-----------------------+----------------------------------------------------+"
    row = "| {:<21} | {:<50} |"
    print(rule)
    print(row.format("Parameter", "Value"))
    print(rule)
    for section in sections:
        for parameter, value in section:
            print(row.format(parameter, escaped(value)))
        print(rule, flush=True)


def run_table(
    s: Settings, training: Training, data: Data, tokenizer: Path | None, checkpoint: Path | None
) -> Sections:
    """The sections of a run's table. checkpoint: of a resumed run."""
    args, config = s.flags, training.model.config
    offload, no_fp8 = training.adamw.offload, device.precision == "fp8" and not training.model.fp8
    return [
        [
            ("device", device.name),
            *([("why not CUDA", device.why_not_cuda)] if device.why_not_cuda else []),
            ("matrix products", PRODUCTS["no fp8" if no_fp8 else device.precision]),
            *([("activations, weights", "bf16; AdamW, losses and statistics in fp32")]
              if device.floatX == device.BF16 else []),
            ("attention", args.attention),
            *([("activations", "recomputed, but for each layer's input")] if args.recompute else []),
            *([("logits", f"of {args.logit_rows} positions at a time")] if args.logit_rows else []),
            *([("ranks", ranks_and_hosts()), ("exchange", collectives.way())] if ranks.size() > 1 else []),
            *([("AdamW's moments", f"shared out among {ranks.size()} ranks")] if training.exchange.sharded else []),
            *([("gradients", "summed batch by batch: bitwise")] if training.exchange.bitwise else []),
        ],
        [
            ("train data", args.data),
            ("val data", s.val_data if data.val else "none: no validation"),
            ("tokenizer", tokenizer or "none: samples are printed as numbers"),
            ("HellaSwag", args.hellaswag or "none"),
            ("log file", args.log or "none"),
            *([("TensorBoard", args.tensorboard)] if args.tensorboard else []),
            ("order", "as in the file" if s.shuffle_seed is None else f"shuffled by seed {s.shuffle_seed}"),
        ],
        [
            ("batch size B", s.B),
            ("sequence length T", s.T),
            ("batches per step", f"{s.batches * ranks.size()}: {counted(s.step_tokens, 'token')}"),
            ("learning rate", f"{args.learning_rate:g}, {args.schedule}, {counted(args.warmup, 'warm-up step')}"),
            ("final fraction", args.final_fraction),
            ("weight decay", args.weight_decay),
            ("beta1, beta2, eps", f"{args.beta1:g}, {args.beta2:g}, {args.eps:g}"),
            ("gradient norm", f"at most {args.grad_clip}" if args.grad_clip else "not clipped"),
            *([("dropout", args.dropout)] if args.dropout else []),
            *([("val every, batches", f"{counted(args.val_every, 'step')}, {s.val_batches}")] if data.val else []),
            ("sample every, tokens", f"{counted(args.sample_every or 'no', 'step')}, {args.sample_tokens}"),
            ("checkpoints", f"{args.checkpoint_dir}, every {counted(args.checkpoint_every, 'step')}, "
             f"keep {args.keep or 'all'}"
             + (" and the best" if args.best else "") if args.checkpoint_dir else "none"),
            ("seed", s.seed),
        ],
        [
            ("model", args.model if checkpoint is None else f"checkpoint of step {s.first_step}"),
            ("max sequence length", config.max_seq_len),
            ("vocabulary", f"{config.vocab_size}, padded to {padded(config.vocab_size)}"),
            *config.rows(),
            ("parameters", num_parameters(config)),
        ],
        [
            *token_rows("train", data.train),
            *(token_rows("val", data.val) if data.val else []),
            ("steps", f"{s.steps}" if s.first_step == 0 else f"{s.first_step} to {s.steps}"),
        ],
        [(name, f"{megabytes} MiB") for name, megabytes in training.megabytes.items()]
        + [("in all", f"{sum(training.megabytes.values())} MiB")]
        + ([("AdamW's state", f"{offload.bytes >> 20} MiB of the host's memory")] if offload else []),
    ]  # fmt: skip


def token_rows(split: str, loader: DataLoader) -> list[tuple[str, object]]:
    """How many tokens and batches there are, and which tokens are in no batch: the rest of a file, and short files."""
    files = f" in {len(loader.files)} files" if len(loader.files) > 1 else ""
    batches = counted(loader.num_batches, "batch")
    rows: list[tuple[str, object]] = [(f"{split} tokens", f"{loader.num_tokens}{files} ({batches})")]
    short = sum(loader.short)
    if left_out := loader.unused + short:
        files = f", {short} of them in {counted(len(loader.short), 'file')} shorter than a batch" if short else ""
        rows.append((f"{split} left out", counted(left_out, "token") + files))
    return rows


def ranks_and_hosts() -> str:
    """How many ranks there are, and on which machines."""
    counts = Counter(ranks.hosts())
    return f"{ranks.size()}: " + ", ".join(f"{count} on {host}" for host, count in counts.items())
