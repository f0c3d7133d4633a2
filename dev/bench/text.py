"""Times a token of generated text, ours beside transformers'.

    python dev/bench text                                           # GPT-2 124M, one text
    python dev/bench text train_llama3 -e llama3.2-1b -b 16 --precision bf16
    python dev/bench text --device cpu -t 256 --first 1 --tokens 200    # an empty prompt

Each program writes -b texts at once, from the same random weights and the same made-up prompts of --first tokens. A
step writes one token of each text and brings it to the host. The milliseconds are the median over the steps after the
prompt.

transformers runs its own class of the model, in the precision of ours. It has no fp8. `compile` uses the cache that its
documentation advises for speed, a static one. torch.compile (reduce-overhead, which records CUDA graphs) compiles the
forward pass of a token together with the choice of the likeliest one. `generate` is its own function, with its default
cache, which grows. It does not return between tokens, so its milliseconds are the mean over the tokens after the first.

The limit is the time to read all that a step must read, at the speed of a copy: the weights of the layers (in fp8 one
byte per number of the large ones) and of the classifier, and the keys and values so far.
"""

import math
import time
from collections.abc import Callable

import device
from dev.bench.ceilings import measure_copy
from dev.bench.workload import SEED, Workload, make_parser, tensors_of, workload_of, zipf_tokens
from dev.hf.common import config_json, named_tensors, transformers_parameters
from device.errors import UserError, first_line
from llmc.model.activations import Cache
from llmc.model.fp8 import quantized_count
from llmc.model.tensors import shape_of
from llmc.model.weights import randomize
from llmc.run.arguments import positive
from llmc.step.generation import Writer
from llmc.step.sampler import samplers_of

import numpy as np

TRAINERS = {
    "ours": "llm.cupy",
    "compile": "transformers, static cache, compile with CUDA graphs",
    "generate": "transformers' generate",
    "limit": "limit: weights, keys and values at the speed of a copy",
}
PEERS = "compile", "generate"
UNTIMED = 5  # steps after the prompt that do not count


def median_step(steps: Callable[[], object], count: int) -> float:
    """The median milliseconds of a call. The first UNTIMED calls do not count."""
    marks = []
    for _ in range(count):
        steps()
        marks.append(time.perf_counter())
    return 1000 * float(np.median(np.diff(marks)[UNTIMED:]))


def cache_for(workload: Workload) -> Cache:
    """Our model with random weights, for inference alone, and its cache."""
    model = workload.kind(workload.config, workload.T, inference=True)
    randomize(model, None, SEED)
    return Cache(model, workload.B, workload.T, "softmax")


def prompts_of(workload: Workload, first: int) -> np.ndarray:
    """Made-up tokens (B, first)."""
    B = workload.B
    return zipf_tokens(B * first, workload.config.vocab_size).reshape(B, first)


def time_ours(cache: Cache, prompts: np.ndarray, count: int) -> float:
    """Milliseconds of a step of our model that continues the prompts (B, first)."""
    writer = Writer(cache, temperature=0.0)
    device.compile_all()
    texts, samplers = prompts.tolist(), samplers_of(SEED, len(prompts))
    written = writer.tokens(texts, samplers, count)
    return median_step(lambda: next(written), count)


def time_transformers(peer: str, tensors, workload: Workload, prompts: np.ndarray, count: int) -> float:
    """The same for transformers' model. tensors: the parameters of our model, from tensors_of."""
    import torch
    import transformers

    where = "cuda" if device.kind == "cuda" else "cpu"
    dtype = torch.bfloat16 if device.floatX == device.BF16 else torch.float32
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


def limit_of(cache: Cache, workload: Workload, positions: int) -> float:
    """The fewest milliseconds in which a step can write a token of each text. positions: tokens in each text so far."""
    config, sizes = workload.config, workload.config.sizes()
    shapes = [symbols for _, symbols in config.parameters() if symbols[0] not in ("Vp", "maxT")] + [("Vp", "C")]
    weights = sum(math.prod(shape_of(symbols, sizes)) for symbols in shapes) * device.floatX.itemsize
    weights -= quantized_count(workload.kind, config)  # a byte in the place of two
    cached = 2 * cache.token[0].keys.nbytes * positions // workload.T
    return 1000 * (weights + cached) / measure_copy()


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("Time a token of generated text beside transformers'.", trains=False)
    parser.set_defaults(batch_size=1)
    add = parser.add_argument
    add("--first", type=positive, default=900, metavar="N", help="tokens of each prompt (%(default)s)")
    add("--tokens", type=positive, default=100, metavar="N", help="tokens to write (%(default)s)")
    add("--peers", metavar="NAMES", help=f"of {','.join(PEERS)}; '' for none (all that can run)")
    args = parser.parse_args(arguments)
    device.use(args.device)
    if args.tokens < UNTIMED + 2:
        raise UserError(f"--tokens {args.tokens}: the first {UNTIMED} steps are not counted, so ask for more")
    known = PEERS[device.kind == "cpu" :] if args.precision != "fp8" else ()  # transformers has none
    peers = known if args.peers is None else [peer for peer in args.peers.split(",") if peer]
    for peer in peers:
        if peer not in known:
            there = " and ".join(known) or "no peer"
            raise UserError(f"--peers {peer}: on {device.kind} in {args.precision} there is {there} ('' for none)")
    workload = workload_of(args, "")
    if args.first + args.tokens > workload.T:
        raise UserError(f"--first {args.first} and --tokens {args.tokens} are more than -t {workload.T}: raise -t")
    prompts, cache = prompts_of(workload, args.first), cache_for(workload)
    print(f"\n{workload}: a token of each text at positions {args.first} to {args.first + args.tokens}")

    def took(trainer: str, ms: float) -> None:
        print(f"{TRAINERS[trainer]:60} {ms:8.3f} ms  {ms / ours:6.2f} x ours", flush=True)

    ours = time_ours(cache, prompts, args.tokens)
    took("ours", ours)
    limit = limit_of(cache, workload, args.first + args.tokens // 2)
    tensors = tensors_of(cache.model, cache.model.params_memory) if peers else None
    del cache
    for peer in peers:
        try:
            took(peer, time_transformers(peer, tensors, workload, prompts, args.tokens))
        except Exception as error:  # out of memory, no compiler, ...: the others can still be timed
            print(f"{TRAINERS[peer]:60} did not run: {type(error).__name__}: {first_line(error)}", flush=True)
    took("limit", limit)
