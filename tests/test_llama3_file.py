"""Llama 3's model file: llm.c's version 3, made here byte by byte, and our 103 and 104 for what that cannot say."""

import struct
from dataclasses import replace

import conftest
from llmc.files.model_file import read_model, read_model_header, write_model
from llmc.model.tensors import Config, name_tensors, num_parameters
from models import build_from_file
from oracle import MODEL_FP32, assert_close, forward, table_of
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3, Llama3Config

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

TINY = Llama3Config(9, 11, 2, num_heads=6, num_kv_heads=2, channels=24, hidden=20)
UNTIED = replace(TINY, tied=False)


def llm_c_file(
    maxT=16, V=37, L=2, NH=4, NKV=2, C=64, multiple_of=16, scaled=1, multiplier=1.3, eps=1e-5, theta=5e5, H=224, seed=0
) -> tuple[bytes, dict[str, np.ndarray]]:
    """A model as llm.c's train_llama3.py writes it, and its tensors. multiple_of and the multiplier make 3.5 C hidden
    channels, as in Llama 3.1 8B: 16 * ceil(int(1.3 * int(8 * 64 / 3)) / 16) = 16 * ceil(221 / 16) = 224."""
    header = struct.pack("<12i", 20240803, 3, maxT, V, L, NH, NKV, C, multiple_of, scaled, 3, 1) + bytes(4 * 244)
    header += struct.pack("<3f", multiplier, eps, theta) + b"\xab" * (4 * 253)  # what follows is undefined
    HS = C // NH
    QKV = (NH + 2 * NKV) * HS
    shapes = {
        "wte": (V, C), "lm_head": (V, C), "ln1w": (L, C), "ln1b": (L, C), "qkvw": (L, QKV, C), "qkvb": (L, QKV),
        "attprojw": (L, C, C), "attprojb": (L, C), "ln2w": (L, C), "ln2b": (L, C), "fcw": (L, 2 * H, C),
        "fcb": (L, 2 * H), "fcprojw": (L, C, H), "fcprojb": (L, C), "lnfw": (C,), "lnfb": (C,),
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.zeros(shape, "<f4") if name.endswith("b") else 0.3 * rng.standard_normal(shape, "<f4")
        for name, shape in shapes.items()
    }
    return header + b"".join(tensor.tobytes() for tensor in tensors.values()), tensors


@pytest.fixture
def llm_c(tmp_path):
    data, _ = llm_c_file()
    (tmp_path / "model.bin").write_bytes(data)
    return tmp_path / "model.bin"


def random_parameters(config: Config, rng) -> np.ndarray:
    return rng.standard_normal(num_parameters(config), np.float32)


def refusal(path, kind=Llama3Config) -> str:
    message = conftest.refusal(read_model, path, kind)
    assert str(path) in message
    return message


@pytest.mark.parametrize("scaled", [0, 1])
def test_a_model_of_llm_c_is_read(scaled, tmp_path):
    data, tensors = llm_c_file(scaled=scaled)
    (tmp_path / "model.bin").write_bytes(data)
    config, read = read_model(tmp_path / "model.bin", Llama3Config)
    assert config == Llama3Config(16, 37, 2, 4, 2, 64, 224, 5e5, 8.0 * scaled, 1e-5, tied=False)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor, name)


@pytest.mark.parametrize("scaled", [0, 1])
@pytest.mark.parametrize(("NH", "NKV"), [(4, 1), (4, 2), (4, 4)])
def test_a_model_of_llm_c_computes_what_the_definition_says(NH, NKV, scaled, dev, tmp_path, rng):
    maxT, V, B = 24, 37, 2
    data, _ = llm_c_file(maxT=maxT, NH=NH, NKV=NKV, scaled=scaled)
    (tmp_path / "model.bin").write_bytes(data)
    training = build_from_file(Llama3, tmp_path / "model.bin", B, maxT, "softmax")
    model, acts, batch = training.model, training.acts, training.batch
    tokens = rng.integers(0, V, (B, maxT), dtype=np.int32)
    dev.copy_in(batch.inputs, tokens)
    model.forward(acts, batch)
    model.loss(acts, batch)
    logits = dev.to_host(acts.logits).reshape(B, maxT, -1)
    wanted, _ = forward(model.config, table_of(model.config, dev.to_host(model.params_memory)), tokens, tokens)
    assert_close("logits", logits[..., :V], wanted, MODEL_FP32)
    assert not logits[..., V:].any()


def test_a_model_of_llm_c_is_written_again_as_one_that_means_the_same(llm_c, tmp_path):
    config, tensors = read_model(llm_c, Llama3Config)
    params = np.zeros(num_parameters(config), np.float32)
    ours = vars(name_tensors(params, config.parameters(), config.sizes(), align=1))
    for name, _ in config.parameters():
        ours[name][: len(tensors[name])] = tensors[name]
    write_model(tmp_path / "again.bin", config, params)
    assert read_model_header(tmp_path / "again.bin", Llama3Config) == config
    again, first = (path.read_bytes() for path in (tmp_path / "again.bin", llm_c))
    assert again[2048:] == first[2048:]


def hidden_by_llm_c(header: bytes) -> int:
    """How llm.c's train_llama3.cu finds the hidden channels, in ints and a float."""
    C, multiple_of = struct.unpack("<2i", header[28:36])
    (multiplier,) = np.frombuffer(header, "<f4", 1, offset=1024)
    hidden = int(multiplier * np.float32(2 * (4 * C) // 3))
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


@given(st.integers(1, 2048), st.integers(1, 1 << 16), st.sampled_from([0.0, 8.0]))
def test_what_llm_c_can_express_is_written_so_that_it_computes_the_same(half_channels, hidden, scaling):
    config = replace(
        UNTIED, num_heads=1, num_kv_heads=1, channels=2 * half_channels, hidden=hidden, rope_scaling=scaling
    )
    header = config.header().tobytes()
    assert len(header) == 2048
    magic, version, *sizes, multiple_of, scaled, major, minor = struct.unpack("<12i", header[:48])
    assert (magic, version, sizes) == (20240803, 3, [9, 11, 2, 1, 1, 2 * half_channels])
    assert (scaled, major, minor) == (scaling == 8, 3, 1)
    assert struct.unpack("<2f", header[1028:1036]) == (np.float32(1e-5), 5e5)
    assert hidden_by_llm_c(header) == hidden
    assert Llama3Config.from_header(np.frombuffer(header, "<i4"), "file") == config


@pytest.mark.parametrize("version, other", [
    (103, {"tied": True}), (103, {"rope_scaling": 32.0}), (103, {"norm_eps": 1e-6}), (104, {"original_length": 512}),
    (104, {"original_length": 512, "rope_scaling": 8.0}),
], ids=str)  # fmt: skip
def test_what_llm_c_cannot_express_gets_a_version_that_it_refuses(version, other):
    """Another length of the first training has its own: 103 would read as 8192."""
    assert replace(UNTIED, **other).header()[:2].tolist() == [20240803, version]


@pytest.mark.parametrize(("version", "config"), [(3, replace(UNTIED, rope_scaling=8.0)), (103, TINY)])
def test_files_from_before_the_length_was_written_have_8192_whatever_follows(version, config):
    header = config.header()
    assert header[1] == version and not header[14:256].any()
    header[14] = 77  # of llm.c's file, this is undefined
    assert Llama3Config.from_header(header, "file") == config
    assert config.original_length == 8192


fp32 = st.floats(2**-20, 2**24, width=32).map(lambda x: float(str(np.float32(x))))  # as it is written in decimals


@st.composite
def configs(draw) -> Llama3Config:
    number = st.integers(1, 4)
    NKV, HS = draw(number), 2 * draw(number)
    NH = NKV * draw(number)
    return Llama3Config(
        draw(st.integers(1, 1 << 20)), draw(st.integers(1, 200)), draw(number), NH, NKV, NH * HS,
        draw(st.integers(1, 99)), draw(fp32), draw(st.sampled_from([0.0, 8.0]) | fp32.filter(lambda x: x >= 1)),
        draw(st.just(1e-5) | fp32), draw(st.booleans()), draw(st.just(8192) | st.integers(1, 2**31 - 1)),
    )  # fmt: skip


@given(config=configs())
def test_a_model_is_read_back_exactly(config, tmp_path, rng):
    params = random_parameters(config, rng)
    write_model(tmp_path / "model.bin", config, params)
    read, tensors = read_model(tmp_path / "model.bin", Llama3Config)
    assert read == config
    wanted = vars(name_tensors(params, config.parameters(), config.sizes(), align=1))
    for name, tensor in tensors.items():
        if name in dict(config.parameters()):
            np.testing.assert_array_equal(tensor, wanted[name][: len(tensor)], name)
        else:
            assert not tensor.any(), f"{name} is a bias, which Llama does not have"


def bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


LLM_C, OURS = llm_c_file()[0], replace(TINY, original_length=512)


@pytest.mark.parametrize("ours, field, value, words", [
    (False, 1, 4, "version 4 (unknown); version 3, 103 or 104 (fp32), or 5 (bf16), is needed"),
    (False, 3, -1, "vocab_size is -1"), (False, 4, 2**31 - 1, "truncated or damaged"),
    (False, 5, 6, "64 channels cannot be split among 6 heads"), (False, 5, 64, "heads of 64 / 64 channels are odd"),
    (False, 6, 3, "4 heads cannot share 3 key/value heads evenly"), (False, 8, 0, "multiple_of 0"),
    (False, 256, bits(float("nan")), "ffn_dim_multiplier nan"),
    (False, 256, bits(1e30), "it must be at most 2147483647"), (False, 257, 0, "norm_eps is 0"),
    (False, 258, bits(-5e5), "rope_theta is -500000"), (True, 13, 0, "hidden is 0"),
    (False, 258, bits(float("inf")), "rope_theta is inf"),
    (True, 259, bits(-1.0), "rope_scaling is -1"), (True, 14, -512, "original_length is -512"),
])  # fmt: skip
def test_a_header_that_makes_no_model_is_refused(ours, field, value, words, tmp_path, rng):
    if ours:
        write_model(tmp_path / "model.bin", OURS, random_parameters(OURS, rng))
    else:
        (tmp_path / "model.bin").write_bytes(LLM_C)
    with open(tmp_path / "model.bin", "r+b") as file:
        file.seek(4 * field)
        file.write(struct.pack("<i", value))
    assert words in refusal(tmp_path / "model.bin")


def test_a_bias_that_is_not_0_is_refused_instead_of_left_out(llm_c):
    data = llm_c.read_bytes()
    llm_c.write_bytes(data[:-4] + struct.pack("<f", 1e-3))
    assert "lnfb is not 0, and a Llama 3 has none" in refusal(llm_c)


def test_the_two_kinds_of_models_name_each_others_script(tmp_path, rng):
    gpt2 = GPT2Config(4, 300, 1, 1, 4)
    for name, config in (("gpt2.bin", gpt2), ("llama3.bin", TINY)):
        write_model(tmp_path / name, config, random_parameters(config, rng))
    message = refusal(tmp_path / "gpt2.bin", Llama3Config)
    assert all(part in message for part in ("not a Llama 3 model", "found a GPT-2 model", "train_gpt2_fp32.py"))
    message = refusal(tmp_path / "llama3.bin", GPT2Config)
    assert all(part in message for part in ("not a GPT-2 model", "found a Llama 3 model", "train_llama3.py"))
