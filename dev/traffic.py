"""What a kernel has to do at least: the bytes that it must move between memory and chip, and its FLOPs."""

import re
from types import SimpleNamespace

import device

import numpy as np

# The arrays among a kernel's arguments that it must move, each as often as it does; what is small beside them is left
# out: weights of one row, sums of rows, partial sums.
MOVED = {
    "layernorm_forward": "inp1 inp2 residual out",
    "layernorm_forward_fp8": "inp1 inp2 residual q",
    "layernorm_quantize": "inp q q_T",
    "layernorm_backward": "dout inp dinp dinp",
    "rmsnorm_forward": "inp1 inp2 residual out",
    "rmsnorm_forward_fp8": "inp1 inp2 residual q",
    "rmsnorm_quantize": "inp q q_T",
    "rmsnorm_backward": "dout inp dinp dinp",
    "norm_transposed": "inp out_T",
    "qk_norm_forward": "inp out",
    "parallel_residual_forward": "inp proj0 proj1 residual out0 out1",
    "parallel_residual_dropout_forward": "inp proj0 proj1 residual out0 out1",
    "parallel_residual_backward": "dout0 dout1 inp dinp dinp",
    "parallel_residual_dropout_backward": "dout0 dout1 inp dinp dinp dproj0 dproj1",
    "gelu_forward": "inp out",
    "gelu_forward_fp8": "inp q",
    "gelu_backward": "dout dout inp out_T",
    "gelu_backward_fp8": "dout inp q q_T out out_T",
    "gelu_erf_forward": "inp out",
    "gelu_erf_forward_fp8": "inp q",
    "gelu_erf_backward": "dout dout inp out_T",
    "gelu_erf_backward_fp8": "dout inp q q_T out out_T",
    "swiglu_forward": "inp out",
    "swiglu_forward_fp8": "inp q",
    "swiglu_backward": "dout inp dinp out_T",
    "swiglu_backward_fp8": "dout inp q q_T out out_T",
    "fused_classifier": "logits logits",
    "transpose": "inp out",
    "column_partials": "inp",
    "squares_partials": "x",
    "checksum": "x",
    "adamw": "params params low low m m v v grads",
    "quantize": "inp q q_T",
    "split": "params values low v v",
    "join": "values params low v",
    "fill_zero": "array",
    # Attention by matrices.
    "permute": "qkv qkvr",
    "permute_backward": "dqkvr dqkv",
    "unpermute": "inp out",
    "unpermute_backward": "dout dinp",
    # Text.
    "add_splits": "parts out",
    "matvec": "weight",
    "matvec_fp8": "q",
    "dequantize": "q out",
    "sample": "logits",
}

BYTES = {  # 4 for each number of the gradients of parameters, which are fp32
    "encoder_forward": lambda a: 2 * a.out.nbytes + positions(a),
    "encoder_dropout_forward": lambda a: 2 * a.out.nbytes + positions(a),
    "wte_backward": lambda a: a.dout.nbytes + 8 * distinct(a.count) * a.C,
    "wpe_backward": lambda a: a.dout.nbytes + 8 * a.T * a.C,
    "add_partials": lambda a: 4 * a.P * a.C * sum(getattr(a, f"out{i}") is not None for i in range(6)),
    "norm": lambda a: 4 * a.P,
    "wte_backward_sparse": lambda a: a.dout.nbytes + 4 * distinct(a.count) * a.C,
    "add_sparse": lambda a: 12 * int((device.to_host(a.indices) >= 0).sum()) * a.C,
    "gather_rows": lambda a: 2 * numbers_of_others(a) * device.floatX.itemsize,
    "sum": lambda a: 4 * (a.num_to + a.num_from) * length_of(a.pieces) // a.shares,
    "rope": lambda a: 2 * a.qkv.nbytes * a.heads // a.all_heads,  # of queries and keys, in place
    "qk_norm_backward": lambda a: 3 * a.inp.nbytes * (a.NH + a.NKV) // (a.NH + 2 * a.NKV),
    "qk_norm_backward_fp8": lambda a: 2 * a.inp.nbytes + a.inp.nbytes * (a.NH + a.NKV) // (a.NH + 2 * a.NKV),
    # Reads each query head's share, writes the sums of each group's.
    "flash_attention_group_sum": lambda a: a.dkv_heads.nbytes + a.dkv_heads.size * a.NKV // a.NH * a.dqkv.itemsize,
    # Of a causal matrix half is read, and all is written, zeros and all.
    "softmax_forward": lambda a: 1.5 * a.att.nbytes,
    "relu_forward": lambda a: 1.5 * a.att.nbytes,
    "softmax_backward": lambda a: 2 * a.att.nbytes,
    "relu_backward": lambda a: 2 * a.att.nbytes,
    "cached_attention": lambda a: a.qkv.nbytes + keys_and_values(a),
    "cached_attention_shared": lambda a: a.qkv.nbytes + keys_and_values(a),
}

FLOPS = {
    "gemm": lambda a: 2 * a.m * a.n * a.k,
    # Of causal attention cuBLAS computes whole matrices, and the CPU the half that is needed.
    "gemm_strided_batched": lambda a: (1 if a.causal and device.kind == "cpu" else 2) * a.m * a.n * a.k * a.count,
    "flash_attention_forward": lambda a: 2 * a.T * a.out.size,
    "flash_attention_backward_query": lambda a: 3 * a.T * a.out.size,
    "flash_attention_backward_key": lambda a: 4 * a.T * a.dout.size,
}


def distinct(count) -> int:
    """How many different tokens a batch has, from `count` of sort_by_token."""
    return int(np.count_nonzero(device.to_host(count)))


def positions(a) -> int:
    """The bytes of the positions' embedding that a batch takes, where there is one."""
    return 0 if a.wpe is None else a.T * a.C * a.wpe.itemsize


def keys_and_values(a) -> int:
    """The bytes of keys and values that texts have in their cache before their new positions."""
    return 2 * int(device.to_host(a.positions).sum()) * a.NKV * a.HS * a.keys.itemsize


def numbers_of_others(a) -> int:
    """How many numbers of a batch's rows gather_rows_kernel finds on other ranks."""
    tokens = np.unique(device.to_host(a.inp)).astype(np.int64)
    places = a.start + a.C * tokens[:, None] + np.arange(a.C)
    return int((places // a.length != a.rank).sum())


def length_of(pieces) -> int:
    """How many floats the pieces of sum_kernel have."""
    pieces = device.to_host(pieces).reshape(-1, 4)
    return int((pieces[:, 2] - pieces[:, 1]).sum())


def kind_of(kernel: str) -> str:
    """A kernel's name in the tables above: without the size that it is compiled for, and the instruction."""
    return re.sub(r"(_wgmma)?_kernel(_\d+)?$", "", kernel)


def bytes_of(kernel: str, arguments: dict) -> float:
    """The bytes that a call of a kernel, given its arguments by name, reads and writes at least. The second pass
    of a kernel that quantizes mostly has nothing to do."""
    if arguments.get("second_pass"):
        return 0
    kind, a = kind_of(kernel), SimpleNamespace(**arguments)
    moved = [getattr(a, name) for name in MOVED.get(kind, "").split()]
    return sum(0 if array is None else array.nbytes for array in moved) + (BYTES[kind](a) if kind in BYTES else 0)


def flops_of(kernel: str, arguments: dict) -> float:
    """The FLOPs of a call, 0 where nobody counts them."""
    kind = kind_of(kernel)
    return FLOPS[kind](SimpleNamespace(**arguments)) if kind in FLOPS else 0
