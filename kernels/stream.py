"""The norms along a residual stream, of layers that are parallel or sequential, LayerNorm or RMSNorm: the kernels of
parallel_residual.py where a model's tables have their tensors.

A model's config says num_layers, channels, norm_eps and whether it is `parallel`. Its tensors are named as in the model
scripts: encoded, residual2 and residual3, ln1, ln2 and lnf with w, b, _mean and _rstd, attproj and fcproj with b. Those
that a model does not have are not in its tables: shifts and means for RMSNorm; ln2w and ln2b where a parallel layer's
branches share one norm; residual2 where layers are parallel.
"""

from types import SimpleNamespace

from kernels.layernorm import layernorm_transposed
from kernels.parallel_residual import parallel_residual_backward, parallel_residual_forward
from kernels.rmsnorm import rmsnorm_transposed
from llmc.model import Model
from llmc.tensors import Config


def part(tensors, l: int | None):
    """What layer l has of a namespace; with None the namespace itself."""
    return tensors if l is None else tensors.layer[l]


def pick(tensors, names) -> tuple:
    """The tensors of up to four names, and None for each that does not exist, and to make up four."""
    return (*(getattr(tensors, name, None) for name in names), None, None, None, None)[:4]


def norm_at(config: Config, acts, n: int) -> SimpleNamespace:
    """Norm n of the residual stream: one in front of each layer, one more in the middle of each that is sequential, and
    the last behind all. In front of a parallel layer a second norm may read the same stream.

    before, stream    (B,T,C): the stream before and after what is added here
    mean, rstd        (B,T) of its rows; a mean for LayerNorm alone
    of, weights       the layer of the norms (None for the last), and the names of their weights and shifts
    of_added, added   the layer of the projections that are added (None: this is the embedding), and their names
    """
    L, parallel = config.num_layers, config.parallel
    states = [acts.encoded, *(x for a in acts.layer for x in ([] if parallel else [a.residual2]) + [a.residual3])]
    of, of_added = (n, n - 1) if parallel else (n // 2, (n - 1) // 2)
    norms = ("ln1", "ln2") if parallel else ("ln2",) if n % 2 else ("ln1",)
    added = ("attproj", "fcproj") if parallel else ("attproj",) if n % 2 else ("fcproj",)
    if n == 0:
        of_added, added = None, ("encoded",)
    if of == L:
        of, norms = None, ("lnf",)
    mean, rstd, *_ = pick(part(acts, of), (f"{norms[0]}_mean", f"{norms[0]}_rstd"))
    weights = [name + kind for name in norms for kind in "wb"]
    return SimpleNamespace(
        before=states[max(0, n - 1)], stream=states[n], mean=mean, rstd=rstd, of=of, weights=weights,
        of_added=of_added, added=added,
    )  # fmt: skip


def norm_forward(model: Model, acts, n: int, drop, B: int, T: int) -> None:
    """Adds to the stream, and sets ln1 or ln2, or both where two norms read it."""
    at, params, branches, drops = norm_at(model.config, acts, n), model.params, [], [None, None]
    if n > 0:
        p, d = part(params, at.of_added), part(drop, at.of_added)
        branches = [x for name in at.added for x in (getattr(acts, name), getattr(p, f"{name}b"))]
        drops = pick(d, at.added)[:2]
    weight0, shift0, weight1, shift1 = pick(part(params, at.of), at.weights)
    parallel_residual_forward(
        at.stream if n > 0 else None, acts.ln2 if at.weights[0] == "ln2w" else acts.ln1,
        None if weight1 is None else acts.ln2, at.mean, at.rstd, at.before, *(branches + 4 * [None])[:4],
        weight0, shift0, weight1, shift1, model.config.norm_eps, B, T, model.config.channels, *drops,
    )  # fmt: skip


def norm_backward(model: Model, acts, n: int, drop, dout0, dout1, B: int, T: int) -> None:
    """Adds to dresidual, and where there is dropout sets the gradients of what was added."""
    at, grads, gacts = norm_at(model.config, acts, n), model.grads, model.grads_acts
    dprojs = pick(acts, [f"d{name}" for name in at.added])[:2]
    dbiases = pick(part(grads, at.of_added), [f"{name}b" for name in at.added])[:2]
    weight0, _, weight1, _ = pick(part(model.params, at.of), at.weights)
    parallel_residual_backward(
        gacts.dresidual, *dprojs, *pick(part(grads, at.of), at.weights), *dbiases, gacts.partials, dout0, dout1,
        at.stream, weight0, weight1, at.mean, at.rstd, B, T, model.config.channels,
        *pick(part(drop, at.of_added), at.added)[:2],
    )  # fmt: skip


def norm_transposed(model: Model, acts, n: int, second: bool, B: int, T: int) -> None:
    """Sets ln_T to the output of norm n, or of the second one that reads the same, transposed."""
    at, C = norm_at(model.config, acts, n), model.config.channels
    weights = pick(part(model.params, at.of), at.weights)
    weight, shift = weights[2:] if second else weights[:2]
    if at.mean is None:
        rmsnorm_transposed(acts.ln_T, at.stream, weight, at.rstd, B, T, C)
    else:
        layernorm_transposed(acts.ln_T, at.stream, weight, shift, at.mean, at.rstd, B, T, C)
