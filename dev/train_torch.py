"""Trains the model of train_gpt2_fp32.py in PyTorch: same flags, data, initial weights, batches, schedule and AdamW,
and the same log file, so that dev/plot_log.py can draw the two runs over each other.

    python dev/train_torch.py -e d12 -i data/python_docs -b 4 -t 256 -x 2000 -k cosine -u 100 --grad-clip 1 -o torch.log

It neither samples nor writes checkpoints; flags for that are ignored.
"""

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the repository, and not dev/, whose profile.py hides Python's

import numpy as np  # noqa: E402
import torch  # noqa: E402

from dev.torch_gpt2 import GPT2  # noqa: E402
from llmc.arguments import parse_arguments  # noqa: E402
from llmc.checkpoint import read_model  # noqa: E402
from llmc.dataloader import DataLoader  # noqa: E402
from llmc.errors import UserError  # noqa: E402
from llmc.logger import Logger  # noqa: E402
from llmc.schedule import LearningRateSchedule  # noqa: E402
from llmc.tokenizer import Tokenizer, find_tokenizer  # noqa: E402
from train_gpt2_fp32 import random_parameters  # noqa: E402


def main() -> None:
    args = parse_arguments()
    where = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    tokenizer_path = find_tokenizer(args.data)
    vocab_size = Tokenizer.load(tokenizer_path).vocab_size if tokenizer_path else 50257
    if args.random_model is not None:
        config = args.random_model.config(vocab_size)
        params = random_parameters(config, args.seed)
    else:
        config, params = read_model(args.model)
    model = GPT2(config, "relu" if args.attention == "relu" else "sdpa")
    model.load(params)
    model.to(where)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.learning_rate, betas=(0.9, 0.999), eps=1e-8, fused=where == "cuda",
    )  # fmt: skip

    B, T = args.B, args.T
    train_loader = DataLoader(args.data, "train", B, T, config.vocab_size, args.shuffle_seed)
    val_loader = DataLoader(args.val_data, "val", B, T, config.vocab_size)
    accumulation = (args.total_batch_size or B * T) // (B * T)
    steps = args.max_steps if args.max_steps is not None else train_loader.num_tokens // (accumulation * B * T)
    schedule = LearningRateSchedule(args.schedule, args.learning_rate, args.warmup, steps, args.final_fraction)
    logger = Logger(args.log)
    inputs, targets = np.empty((B, T), np.int32), np.empty((B, T), np.int32)

    def next_loss(loader: DataLoader) -> torch.Tensor:
        loader.next_batch(inputs, targets)
        return model.loss(*(torch.from_numpy(x).to(where, torch.int64) for x in (inputs, targets)))

    for step in range(steps + 1):
        if step % args.val_every == 0 or step == steps:
            val_loader.reset()
            count = min(val_loader.num_batches, args.val_max_batches)
            with torch.no_grad():
                loss = sum(next_loss(val_loader).item() for _ in range(count)) / count
            print(f"val loss {loss:.6f}", flush=True)
            logger.log_val(step, loss)
        if step == steps:
            break
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(accumulation):
            loss = next_loss(train_loader) / accumulation
            loss.backward()
            total += loss.detach()
        if args.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = schedule.get_learning_rate(step)
        optimizer.step()
        total = float(total)
        ms = 1000 * (time.perf_counter() - started)
        print(f"step {step + 1:4}/{steps}: train loss {total:.6f} ({ms:.2f} ms)", flush=True)
        logger.log_train(step, total)
    logger.close()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
