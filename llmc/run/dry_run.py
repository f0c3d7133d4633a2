"""--dry-run: how much memory training takes, buffer by buffer, and what fits. No data, and no GPU, is needed."""

from __future__ import annotations

from argparse import Namespace

import device
from kernels.flash_attention import HEAD_SIZES
from llmc.files.checkpoint import model_path
from llmc.files.model_file import read_model_header
from llmc.model.activations import choose_attention
from llmc.model.model import Model
from llmc.model.tensors import num_parameters
from llmc.ranks import ranks
from llmc.run.settings import check_flags, check_length, check_model_flags, with_length
from llmc.run.table import print_table
from llmc.step.memory import CHUNK, CONTEXT, RESERVE, Plan, in_chunks, largest_batches, state_sizes, training_sizes


def dry_run(kind: type[Model], args: Namespace) -> None:
    """Prints what training takes with these flags on one GPU, and the largest -b that fits beside what CUDA takes: on a
    GPU whose memory is --memory, or into what this one has free. Raises UserError for flags that a run on one GPU
    would refuse, too."""
    device.use(args.device)
    config = kind.Config.described(args.model)
    if config is None:
        config = read_model_header(model_path(args.model), kind.Config, kind.Config.fetch_or_start())
    args = with_length(args, config)
    check_flags(args)
    check_model_flags(kind, args, recorded={})
    check_length(args, config)
    device.use_precision(args.precision)
    attention = choose_attention(args.attention, config.head_size)
    if args.attention == "auto":  # as on a GPU, whatever this machine has
        attention = "flash" if config.head_size in HEAD_SIZES and args.precision != "fp32" else "softmax"
    plan = Plan(
        args.batch_size, args.sequence_length, attention, args.logit_rows or 0, args.recompute, args.offload,
        args.bitwise,
    )  # fmt: skip
    memory, taken = args.memory, CONTEXT + RESERVE
    if not memory and device.kind == "cuda":
        memory, taken = device.memory()[0], RESERVE
    room = memory and max(memory - taken, 0)
    if args.logit_rows is None and memory and sum(training_sizes(kind, config, plan).values()) > room:
        plan = in_chunks(plan)  # as a run would
    sizes, host = training_sizes(kind, config, plan), state_sizes(config, None) if plan.offload else {}
    logits = f"{plan.logit_rows or 'all'} positions at a time"
    sections = [
        [("model", args.model), ("vocabulary", config.vocab_size), ("parameters", f"{num_parameters(config):,}")],
        [("B, T", f"{plan.B}, {plan.T}"), ("precision", args.precision), ("attention", attention), ("logits", logits)],
        [(name, mebibytes(size)) for name, size in sizes.items()] + [("in all, on the GPU", total(sizes))],
    ]
    if host:
        sections.append([(name, mebibytes(size)) for name, size in host.items()])
        sections[-1].append(("in all, on the host", total(host)))
    if memory:
        whole = largest_batches(kind, config, plan._replace(logit_rows=0), room)
        chunks = largest_batches(kind, config, in_chunks(plan), room)
        names = {flags: flags.replace("--recompute --offload", "with both") or "no flag" for flags in whole}
        sections.append(
            [("fits into", f"{mebibytes(room)}: {mebibytes(memory)} without CUDA's {mebibytes(taken)}")]
            + [(f"-b, {names[flags]}", f"{B or 'none'}; with --logit-rows {CHUNK} {chunks[flags] or 'none'}")
               for flags, B in whole.items()]
        )  # fmt: skip
    print_table(sections)
    if not memory:
        print("--memory 24GiB would say what fits")
    if max(args.gpus or 1, ranks.size()) > 1:
        print("the table is for one GPU: of several, each keeps its shard of AdamW's state (-z), and some buffers")


def mebibytes(size: int) -> str:
    return f"{round(size / 2**20)} MiB"


def total(sizes: dict[str, int]) -> str:
    return f"{mebibytes(sum(sizes.values()))} ({sum(sizes.values()) / 2**30:.2f} GiB)"
