"""Times a token of generated text, ours beside transformers'.

    python dev/bench_text.py                                        # GPT-2 124M, one text
    python dev/bench_text.py train_llama3 -e llama3.2-1b -b 16 --precision bf16
    python dev/bench_text.py --device cpu -t 256 --first 1 --tokens 200    # an empty prompt
    python dev/bench_text.py --suite --keep                         # all that doc/speed.md shows

Each program writes -b texts at once, from the same random weights and the same made-up prompts of --first tokens. A
step writes one token of each text and brings it to the host. The milliseconds are the median over the steps after the
prompt.

transformers runs its own class of the model, in the precision of ours. `compile` uses the cache that its documentation
advises for speed, a static one. torch.compile (reduce-overhead, which records CUDA graphs) compiles the forward pass of
a token together with the choice of the likeliest one. `generate` is its own function, with its default cache, which
grows. It does not return between tokens, so its milliseconds are the mean over the tokens after the first.

The limit is the time to read all that a step must read, at the speed of a copy: the weights of the layers and of the
classifier, and the keys and values so far.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import math
import time
from collections.abc import Callable

import device
from dev.ceilings import measure_copy
from dev.hf.common import config_json, named_tensors, transformers_parameters
from dev.kept import TRAINERS, commit_at_hand, keep, make_row, published, update_tables
from dev.workload import SEED, Workload, make_parser, workload_of, zipf_tokens
from device.errors import UserError
from llmc.arguments import positive
from llmc.attention import choose_attention
from llmc.generation import Writer
from llmc.model import Model
from llmc.program import run_program
from llmc.sampler import samplers_of
from llmc.tensors import name_tensors, shape_of

import numpy as np

PEERS = "compile", "generate"
UNTIMED = 5  # steps after the prompt that do not count


def median_step(steps: Callable[[], object], count: int) -> float:
    """The median milliseconds of a call. The first UNTIMED calls do not count."""
    marks = []
    for _ in range(count):
        steps()
        marks.append(time.perf_counter())
    return 1000 * float(np.median(np.diff(marks)[UNTIMED:]))


def prompts_of(workload: Workload, first: int) -> np.ndarray:
    """Made-up tokens (B, first)."""
    B = workload.B
    return zipf_tokens(B * first, workload.config.vocab_size).reshape(B, first)


def build_model(workload: Workload) -> Model:
    """Our model, for inference alone, with random weights."""
    config = workload.config
    model = workload.kind(config, workload.B, workload.T, choose_attention("auto", config.head_size), inference=True)
    model.randomize(SEED)
    return model


def tensors_of(model: Model):
    """The parameters by name, fp32 on the host."""
    parameters, config = device.to_floats(model.params_memory), model.config
    return name_tensors(parameters, config.PARAMETERS, config.sizes(), align=1, absent=config.absent)


def time_ours(model: Model, prompts: np.ndarray, count: int) -> float:
    """Milliseconds of a step of our model that continues the prompts (B, first)."""
    writer = Writer(model, len(prompts), temperature=0.0)
    device.compile_all()
    texts, samplers = prompts.tolist(), samplers_of(SEED, len(prompts))
    written = writer.tokens(texts, samplers, count)
    return median_step(lambda: next(written), count)


def time_transformers(peer: str, tensors, workload: Workload, prompts: np.ndarray, count: int) -> float:
    """The same for transformers' model. tensors: the parameters of our model, from tensors_of."""
    import torch
    import transformers

    where = "cuda" if device.kind == "cuda" else "cpu"
    dtype = torch.bfloat16 if device.precision == "bf16" else torch.float32
    torch.set_float32_matmul_precision("high" if device.tf32 else "highest")
    with torch.no_grad(), torch.device(where):
        config = transformers.AutoConfig.for_model(**config_json(workload.config))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        own = transformers_parameters(model)
        for name, tensor, shape in named_tensors(workload.config, tensors):
            own[name].copy_(torch.tensor(np.ascontiguousarray(tensor.reshape(shape))))
        tokens = torch.tensor(prompts)
        if peer == "generate":
            settings = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(tokens)}

            def seconds(new: int) -> float:
                started = time.perf_counter()
                model.generate(tokens, min_new_tokens=new, max_new_tokens=new, **settings).cpu()
                return time.perf_counter() - started

            seconds(2)
            return 1000 * (seconds(count) - seconds(1)) / (count - 1)

        cache = transformers.StaticCache(config=config, max_cache_len=workload.T)

        def forward(tokens, positions):
            logits = model(tokens, position_ids=positions[None], cache_position=positions, past_key_values=cache).logits
            return logits[:, -1:].argmax(-1)

        compiled = torch.compile(forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
        next_tokens = forward(tokens, torch.arange(tokens.shape[1]))
        position = torch.tensor([tokens.shape[1]])

        def step() -> None:
            nonlocal next_tokens
            torch.compiler.cudagraph_mark_step_begin()
            next_tokens = compiled(next_tokens.clone(), position).clone()
            position.add_(1)
            next_tokens.cpu()

        return median_step(step, count)


def limit_of(model: Model, workload: Workload, positions: int) -> float:
    """The fewest milliseconds in which a step can write a token of each text. positions: tokens in each text so far."""
    config, sizes = model.config, model.config.sizes()
    shapes = [symbols for _, symbols in config.parameters() if symbols[0] not in ("Vp", "maxT")] + [("Vp", "C")]
    weights = sum(math.prod(shape_of(symbols, sizes)) for symbols in shapes) * model.floatX.itemsize
    cached = 2 * model.acts(workload.B, 1).keys.nbytes * positions // workload.T
    return 1000 * (weights + cached) / measure_copy()


def bench(workload: Workload, args: argparse.Namespace) -> list[dict]:
    """Prints the milliseconds of a workload. Returns its rows for dev/measurements/."""
    if args.first + args.tokens > workload.T:
        raise UserError(f"--first {args.first} and --tokens {args.tokens} are more than -t {workload.T}: raise -t")
    prompts = prompts_of(workload, args.first)
    model = build_model(workload)
    print(f"\n{workload}: a token of each text at positions {args.first} to {args.first + args.tokens}")
    found = [("text", time_ours(model, prompts, args.tokens))]
    limit = limit_of(model, workload, args.first + args.tokens // 2)
    tensors = tensors_of(model)
    del model
    print_row(*found[0], found[0][1])
    for peer in [name for name in args.peers.split(",") if name]:
        try:
            found.append((f"text-{peer}", time_transformers(peer, tensors, workload, prompts, args.tokens)))
        except Exception as error:  # out of memory, no compiler, ...: the others can still be timed
            first_line = str(error).strip().partition("\n")[0]
            print(f"{TRAINERS[f'text-{peer}']:60} did not run: {type(error).__name__}: {first_line}", flush=True)
            continue
        print_row(*found[-1], found[0][1])
    found.append(("text-limit", limit))
    print_row(*found[-1], found[0][1])
    return [make_row(str(workload), trainer, ms, None, workload.B, args.commit) for trainer, ms in found]


def print_row(trainer: str, ms: float, ours: float) -> None:
    print(f"{TRAINERS[trainer]:60} {ms:8.3f} ms  {ms / ours:6.2f} x ours", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time a token of generated text beside transformers'.", trains=False)
    parser.set_defaults(batch_size=1)
    add = parser.add_argument
    add("--first", type=positive, default=900, metavar="N", help="tokens of each prompt (%(default)s)")
    add("--tokens", type=positive, default=100, metavar="N", help="tokens to write (%(default)s)")
    add("--peers", metavar="NAMES", help=f"of {','.join(PEERS)}; '' for none (all that run on the device)")
    add("--suite", action="store_true", help="time all that doc/speed.md shows for this kind of device")
    add("--keep", action="store_true", help="keep the measurements in dev/measurements/")
    add("--commit", help="the commit to record (by default git's)")
    add("--tables", action="store_true", help="only write the tables of doc/speed.md again, from the kept measurements")
    args = parser.parse_args(arguments)
    if args.tables:
        update_tables()
        return
    args.commit = args.commit or (commit_at_hand() if args.keep else "")
    device.use(args.device)
    if args.tokens < UNTIMED + 2:
        raise UserError(f"--tokens {args.tokens}: the first {UNTIMED} steps are not counted, so ask for more")
    for peer in (args.peers or "").split(","):
        if peer and peer not in PEERS[device.kind == "cpu" :]:
            raise UserError(f"--peers {peer}: choose from {', '.join(PEERS)}, on the CPU generate alone ('' for none)")
    runs = [args]
    if args.suite:
        runs = [
            parser.parse_args(flags.split(), argparse.Namespace(**(
                vars(args) | {"peers": peers if args.peers is None else args.peers}
            )))
            for flags, peers in published(device.kind, "bench_text.py")
        ]  # fmt: skip
    for asked in runs:
        if asked.peers is None:
            asked.peers = ",".join(PEERS[device.kind == "cpu" :])
        rows = bench(workload_of(asked, ""), asked)
        if args.keep:
            keep(device.name, rows)


if __name__ == "__main__":
    run_program(main)
