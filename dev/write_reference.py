"""Writes a model and what transformers makes of it, in llm.c's files, to check an implementation against.

    python dev/write_reference.py                                   # gpt2_124M.bin and gpt2_124M_debug_state.bin
    python dev/write_reference.py -e layers=2,heads=2,channels=64 --vocab-size 300 -o tiny -b 2 -t 16

The model is Hugging Face's GPT2LMHeadModel with eager attention and random weights. One forward and backward pass over
a random batch gives the debug state: inputs, targets, logits, the mean loss, and the gradient of every parameter,
computed in float64 and stored as fp32.

Random weights are as transformers initialises them, except that noise of deviation 0.1 is added to biases and
layernorm weights: at 0 and 1, where they would start, a bias that is left out or put in another's place goes unseen.
"""

import sys
import time
from pathlib import Path

if not __package__:  # run as a program: look in the repository, not in dev/, whose modules could hide Python's own
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dev.debug_state import DebugState, write_debug_state
from dev.hf.common import config_json, flat_parameters_of
from device.errors import UserError
from llmc.files.model_file import write_model
from llmc.model.tensors import Config, num_parameters
from llmc.run.arguments import Parser, positive
from llmc.run.program import run_program
from train_gpt2_fp32 import GPT2Config

import numpy as np
import torch
import transformers

SEED = 1337  # of weights and batch


def random_model(config: Config, seed: int):
    """transformers' model of these sizes with random weights, fp32, with eager attention and no dropout."""
    described = transformers.AutoConfig.for_model(**config_json(config, 0, 0))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(described, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    return model


def forward_backward(model, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """The logits (B, T, V) of inputs x and the mean loss of targets y, int32 (B, T); sets the parameters' gradients."""
    inputs, targets = (torch.from_numpy(tokens).long().to(model.device) for tokens in (x, y))
    logits = model(inputs, use_cache=False).logits
    # Not the model's own loss, which is computed in fp32 whatever its parameters are.
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    model.zero_grad(set_to_none=False)
    loss.backward()
    return logits.detach().cpu().numpy(), loss.item()


def write_reference(model, config: GPT2Config, prefix: str, B: int, T: int, seed: int) -> None:
    """Writes `<prefix>.bin` and `<prefix>_debug_state.bin` for a random batch (B, T), computing in the model's own
    precision."""
    if config.max_seq_len < T:
        raise UserError(f"-t {T} is above the model's longest sequence, {config.max_seq_len}: lower -t")
    tokens = np.random.default_rng(seed).integers(0, config.vocab_size, (2, B, T), dtype=np.int32)
    x, y = tokens
    write_model(f"{prefix}.bin", config, flat_parameters_of(model, config).astype(np.float32))
    print(f"wrote {prefix}.bin: {num_parameters(config):,} parameters", flush=True)
    started = time.perf_counter()
    logits, loss = forward_backward(model, x, y)
    grads = flat_parameters_of(model, config, gradients=True).astype(np.float32)
    write_debug_state(f"{prefix}_debug_state.bin", DebugState(x, y, logits, loss, grads))
    seconds = time.perf_counter() - started
    print(f"wrote {prefix}_debug_state.bin: B {B}, T {T}, loss {loss:.6f} ({seconds:.1f} s)")


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description="Write a model .bin and its debug state, computed by transformers.")
    parser.add_argument("-e", "--model", default="d12", help="d12, layers=2,heads=2,channels=64, ... (d12)")
    parser.add_argument("-o", "--out", metavar="PREFIX", help="of both files (gpt2_124M for d12, else gpt2_MODEL)")
    parser.add_argument("-b", "--batch-size", type=positive, default=4, metavar="B", help="(%(default)s)")
    parser.add_argument("-t", "--sequence-length", type=positive, default=64, metavar="T", help="(%(default)s)")
    parser.add_argument("--vocab-size", type=positive, default=50257, metavar="V", help="(%(default)s)")
    args = parser.parse_args(arguments)
    config = GPT2Config.described(args.model, args.vocab_size)
    if config is None:
        raise UserError(f"-e {args.model}: name d12 or a description such as layers=2,heads=2,channels=64")
    prefix = args.out or ("gpt2_124M" if args.model == "d12" else f"gpt2_{args.model}")
    for path in (f"{prefix}.bin", f"{prefix}_debug_state.bin"):
        if Path(path).exists():
            raise UserError(f"{path} exists already: name another prefix with -o, or remove it")
    write_reference(random_model(config, SEED).double(), config, prefix, args.batch_size, args.sequence_length, SEED)


if __name__ == "__main__":
    run_program(main)
