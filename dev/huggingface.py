"""GPT-2 as Hugging Face's transformers names and lays out its tensors.

The two differ in three things. Theirs are one tensor a layer, ours one with a part for each layer. Their Conv1D keeps a
weight as (in, out), the transpose of ours. And they do not pad the vocabulary.
"""

from collections.abc import Iterator

from llmc.checkpoint import GPT2Config
from train_gpt2_fp32 import PARAMETERS, name_tensors, tensor_sizes

LAYER_NAMES = {
    "ln1w": "ln_1.weight",
    "ln1b": "ln_1.bias",
    "qkvw": "attn.c_attn.weight",
    "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight",
    "attprojb": "attn.c_proj.bias",
    "ln2w": "ln_2.weight",
    "ln2b": "ln_2.bias",
    "fcw": "mlp.c_fc.weight",
    "fcb": "mlp.c_fc.bias",
    "fcprojw": "mlp.c_proj.weight",
    "fcprojb": "mlp.c_proj.bias",
}


def named_tensors(config: GPT2Config, buffer) -> Iterator[tuple[str, object]]:
    """The parameters, or their gradients, in a flat buffer (num_parameters,) as transformers sees them: each name, as
    GPT2Model has it, and a view into the buffer in their shape."""
    tensors = name_tensors(buffer, PARAMETERS, tensor_sizes(config, 1, 1), align=1)
    yield "wte.weight", tensors.wte[: config.vocab_size]
    yield "wpe.weight", tensors.wpe
    for number, layer in enumerate(tensors.layer):
        for ours, theirs in LAYER_NAMES.items():
            yield f"h.{number}.{theirs}", getattr(layer, ours).T  # its matrices are all Conv1D weights
    yield "ln_f.weight", tensors.lnfw
    yield "ln_f.bias", tensors.lnfb
