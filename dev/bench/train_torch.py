"""Trains the model of train_gpt2_fp32.py, or of another script, in PyTorch: same flags, data, initial weights, batches,
schedule and AdamW, and the same log file, so that dev/plot_log.py can draw the two runs over each other.

    python dev/bench torch -e d12 -i data/python_docs -b 4 -t 256 -x 2000 -k cosine -u 100 --grad-clip 1 -o torch.log
    python dev/bench torch --script train_llama3 -e smollm2-135m -i data/stories -b 4 -t 256 -o torch.log

With --precision bf16 its weights are fp32, as our master copy, and it computes under autocast. It neither samples nor
writes checkpoints or TensorBoard's events; flags for that are ignored.
"""

import time

import device
from dev.bench.torch_models import build_torch_model
from dev.bench.workload import SCRIPTS
from device.errors import UserError
from llmc.data.batches import bits_per_byte
from llmc.data.dataloader import DataLoader
from llmc.data.find_tokenizer import find_tokenizer, open_tokenizer
from llmc.files.checkpoint import model_path
from llmc.files.model_file import read_model
from llmc.model.model import Model
from llmc.model.tensors import Config
from llmc.model.weights import randomize
from llmc.run.arguments import Parser, parse_arguments
from llmc.run.logger import Logger
from llmc.run.report import print_validation
from llmc.run.settings import FIRST_SEED, check_flags, make_settings, with_length

import numpy as np
import torch


def first_weights(kind: type[Model], config: Config, seed: int) -> dict[str, np.ndarray]:
    """The parameters, by name, with which our script would start."""
    device.use("cpu")
    model = kind(config, T=1, inference=True)
    randomize(model, None, seed)
    return {name: getattr(model.params, name) for name, _ in config.parameters()}


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(add_help=False, allow_abbrev=False)  # --help is the script's
    parser.add_argument("--script", choices=SCRIPTS, default="train_gpt2_fp32")
    chosen, flags = parser.parse_known_args(arguments)
    kind = SCRIPTS[chosen.script]
    args = parse_arguments(kind.Config, flags)
    if args.attention == "relu":
        raise UserError("-a relu: PyTorch has no such attention")
    if args.precision == "fp8":
        raise UserError("--precision fp8: PyTorch itself has none: compare with --precision bf16")
    where = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high" if args.precision == "tf32" else "highest")
    tokenizer_path = find_tokenizer(args.data, default=kind.Config.DEFAULT_TOKENIZER)
    tokenizer = open_tokenizer(tokenizer_path) if tokenizer_path else None
    described = kind.Config.described(args.model, tokenizer.vocab_size if tokenizer else None)
    config, tensors = described, None
    if config is None:
        config, tensors = read_model(model_path(args.model), kind.Config, kind.Config.fetch_or_start())
    args = with_length(args, config)
    check_flags(args)
    model = build_torch_model(config, "sdpa")
    model.load(first_weights(kind, config, FIRST_SEED if args.seed is None else args.seed) if described else tensors)
    model.to(where)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=args.learning_rate, betas=(args.beta1, args.beta2), eps=args.eps, fused=where == "cuda",
    )  # fmt: skip

    B, T = args.batch_size, args.sequence_length
    train_loader = DataLoader(args.data, "train", B, T, config.vocab_size, args.seed, args.raw_tokens)
    val_loader = DataLoader(args.val_data or args.data, "val", B, T, config.vocab_size, raw_tokens=args.raw_tokens)
    if train_loader.marked or val_loader.marked:
        raise UserError(f"-i {args.data}: some tokens are marked, and PyTorch would learn them, too: use other data")
    settings = make_settings(args, 0, train_loader.num_batches, val_loader.num_batches)
    steps, count = settings.steps, settings.val_batches
    text_bytes = tokenizer.text_bytes(config.vocab_size) if tokenizer else lambda inputs, targets: 0
    logger = Logger(args.log)
    inputs, targets = np.empty((B, T), np.int32), np.empty((B, T), np.int32)

    def next_loss(loader: DataLoader) -> torch.Tensor:
        loader.next_batch(inputs, targets)
        with torch.autocast(where, torch.bfloat16, enabled=args.precision == "bf16"):
            return model.loss(*(torch.from_numpy(x).to(where, torch.int64) for x in (inputs, targets)))

    for step in range(steps + 1):
        if settings.validates(step):
            val_loader.reset()
            loss, num_bytes = 0.0, 0
            with torch.no_grad():
                for _ in range(count):
                    loss += next_loss(val_loader).item() / count
                    num_bytes += text_bytes(inputs, targets)
            bits = bits_per_byte(loss, count * B * T, num_bytes)
            print_validation(loss, bits)
            logger.log(step, val_loss=loss, bits_per_byte=bits)
        if step == steps:
            break
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(settings.batches):
            loss = next_loss(train_loader) / settings.batches
            loss.backward()
            total += loss.detach()
        if args.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        optimizer.step()
        total = float(total)
        ms = 1000 * (time.perf_counter() - started)
        print(f"step {step + 1:4}/{steps}: train loss {total:.6f} ({ms:.2f} ms)", flush=True)
        logger.log(step, train_loss=total)
    logger.close()

