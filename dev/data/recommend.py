"""Which model a dataset and a machine suit, and for how many steps.

The rule: the largest of the MODELS that sees 20 tokens a parameter (Hoffmann et al., "Training Compute-Optimal Large
Language Models", 2022) in at most 16 epochs, after which repeated text teaches little (Muennighoff et al., "Scaling
Data-Constrained Language Models", 2023), within one night, and fits in the memory. Where not even the smallest does, it
sees as many tokens as 16 epochs and the night allow.
"""

import shlex
from pathlib import Path

import device
from dev.bench.ceilings import product_seconds
from llmc.model.tensors import flops_per_token, num_parameters
from llmc.run.report import duration
from llmc.step.training import training_sizes
from train_gpt2_fp32 import GPT2

MODELS = (  # -e, learning rate; from d12 on, the rates are those of GPT-3's models of these sizes (Brown et al., 2020)
    ("layers=4,heads=4,channels=128", 3e-3),
    ("layers=6,heads=4,channels=256", 2e-3),
    ("d6", 1e-3),
    ("layers=8,heads=8,channels=512", 1e-3),
    ("d12", 6e-4),
    ("d24", 3e-4),
    ("d36", 2.5e-4),
    ("d48", 2e-4),
)
TOKENS_A_PARAMETER, EPOCHS, NIGHT = 20, 16, 8 * 3600
UTILISATION = 0.4         # of the speed of a large matrix product, which a training step reaches at least, about
UPDATES, MOST_TOKENS = 2000, 1 << 19  # an update is of so many tokens that there are so many updates, up to a limit
SHORTEST, MOST_ROWS = 64, 16          # tokens in a sequence; sequences in a batch
LEAST_TOKENS = SHORTEST + 1           # that a split needs for one batch


def recommend(prefix: Path, vocab_size: int, train: int, val: int) -> list[str]:
    """Lines that say which model to train, why, and by which commands.

    prefix: the dataset. train, val: tokens in its splits, each LEAST_TOKENS or more. Measures the machine, in a second.
    """
    device.use("auto")
    device.use_precision("tf32")
    n = 4096 if device.kind == "cuda" else 2048
    speed = UTILISATION * 2 * n**3 / product_seconds(n, n, n)
    attention, longest = ("flash", 1024) if device.kind == "cuda" else ("softmax", 256)
    T = longest
    while T > SHORTEST and 4 * T >= min(train, val):  # four sequences, where there is so much
        T //= 2

    def tokens_of(config) -> int:
        """What a model would see."""
        by_night = NIGHT * speed / flops_per_token(config, T)
        return int(min(TOKENS_A_PARAMETER * num_parameters(config), EPOCHS * train, by_night))

    def fits(config, B: int) -> bool:
        return sum(training_sizes(GPT2, config, B, T, attention, None, 0).values()) < 0.9 * device.memory()[0]

    for model, learning_rate in reversed(MODELS):  # noqa: B007, used below
        config = GPT2.Config.described(model, vocab_size)
        enough = TOKENS_A_PARAMETER * num_parameters(config)
        if tokens_of(config) == enough and fits(config, 1):
            break
    tokens = tokens_of(config)
    update = T
    while update < MOST_TOKENS and 2 * update * UPDATES <= tokens:
        update *= 2
    B = MOST_ROWS
    while B > 1 and not (B * T <= update and B * T < min(train, val) and fits(config, B)):
        B //= 2
    steps = max(1, tokens // update)
    seconds = steps * update * flops_per_token(config, T) / speed
    every = max(1, steps // 20)
    data, checkpoints = shlex.quote(str(prefix)), shlex.quote(f"{prefix}_run")
    flags = [
        f"-i {data} -e {model} -b {B} -t {T}", *([f"-d {update}"] if update > B * T else []), f"-x {steps}",
        f"-l {learning_rate:g} -k cosine -u {max(1, steps // 20)} -q 0.1 -c 0.1 --grad-clip 1 --seed 1",
        f"-v {every} -m {max(1, min(val // (B * T), 200))} -s {5 * every} -g 200",
        f"--checkpoint-dir {checkpoints} -n {5 * every} -nk 2",
    ]  # fmt: skip
    parameters = num_parameters(config)
    short = "" if tokens == enough else f", which is what {EPOCHS} epochs and {NIGHT // 3600} hours allow the smallest"
    return [
        f"A model for it: {parameters / 1e6:.1f} million parameters that see {steps * update:,} tokens, "
        f"{steps * update / parameters:.1f} a parameter{short}.",
        f"That is {steps * update / train:.1f} epochs, and about {duration(seconds)} here ({device.name}).",
        f"The rule: the largest model that sees {TOKENS_A_PARAMETER} tokens a parameter (Hoffmann et al., 2022) in at "
        f"most {EPOCHS} epochs (Muennighoff et al., 2023) and {NIGHT // 3600} hours.",
        "",
        f"    python train_gpt2_fp32.py {' '.join(flags)}",
        f'    python generate.py -e {checkpoints}/step_{steps:08d} --prompt "Once" -g 200',
    ]
