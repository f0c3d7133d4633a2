"""Pythia's sizes and its file."""

import struct

import device
from device.errors import UserError
from llmc.files.model_file import read_model, read_model_header, write_model
from llmc.model.tensors import num_parameters
from llmc.step.memory import Plan, training_sizes
from train_pythia import Pythia, PythiaConfig

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

# (channels, heads, layers) and the parameters that transformers counts
SUITE = {
    "pythia-14m": (128, 4, 6, 8), "pythia-70m": (512, 8, 6, 16), "pythia-160m": (768, 12, 12, 16),
    "pythia-410m": (1024, 16, 24, 16), "pythia-1b": (2048, 8, 16, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", SUITE)
def test_the_suite_has_the_sizes_of_the_originals(name):
    C, NH, L, R = SUITE[name]
    config = PythiaConfig.described(name)
    assert config == PythiaConfig(2048, 50304, L, NH, C) and config.sizes()["R"] == R
    with torch.device("meta"):
        theirs = GPTNeoXForCausalLM(GPTNeoXConfig(
            vocab_size=50304, hidden_size=C, intermediate_size=4 * C, num_attention_heads=NH, num_hidden_layers=L,
        ))  # fmt: skip
    assert num_parameters(config) == sum(parameter.numel() for parameter in theirs.parameters())


def test_pythia_160m_trains_in_4700_mib():
    config = PythiaConfig.described("pythia-160m")
    device.use("cpu")
    own = training_sizes(Pythia, config, Plan(4, 1024, "flash"))
    assert sum(own.values()) <= 4700 << 20


def test_a_description_may_ask_for_every_variant():
    described = PythiaConfig.described("layers=2,heads=3,channels=24,norm=rms,tied_norm=1,rotary=0.5,gelu=erf,maxT=9")
    assert described == PythiaConfig(9, 50304, 2, 3, 24, rotary=0.5, norm="rms", tied_norm=True, gelu="erf")
    described = PythiaConfig.described("layers=2,heads=3,channels=24,parallel=0,theta=500,eps=1e-3", vocab_size=77)
    assert described == PythiaConfig(2048, 77, 2, 3, 24, rope_theta=500.0, norm_eps=1e-3, parallel=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rotary=0.1", "it must be 2, 4, …"), ("rotary=1.5", "rotary 1.5"), ("rotary=0", "rotary is 0.0; it must"),
        ("rotary=0.4", "rotary 0.4 is 3 of a head's 8 channels"),
        ("norm=batch", "norm is batch; it can be layer or rms"),
        ("gelu=relu", "gelu is relu; it can be tanh or erf"), ("tied_norm=1,parallel=0", "tied_norm needs parallel"),
        ("eps=0", "must be a positive number"), ("norm=1", "norm=1 is no part"), ("tied=1", "tied=1 is no part"),
        ("heads=5", "24 channels cannot be split among 5 heads"),
    ],
)  # fmt: skip
def test_what_makes_no_pythia_is_refused_in_one_line(words, message):
    with pytest.raises(UserError, match=message) as caught:
        PythiaConfig.described(f"layers=2,heads=3,channels=24,{words}")
    assert "\n" not in str(caught.value)


# The file


@st.composite
def configs(draw) -> PythiaConfig:
    NH, HS = draw(st.integers(1, 4)), draw(st.integers(2, 9))
    R, parallel = 2 * draw(st.integers(1, HS // 2)), draw(st.booleans())
    return PythiaConfig(
        draw(st.integers(1, 40)), draw(st.integers(1, 300)), draw(st.integers(1, 3)), NH, NH * HS, (R + 0.25) / HS
        if R < HS else 1.0, draw(st.floats(1e-3, 1e7)), draw(st.floats(1e-12, 1.0)),
        draw(st.sampled_from(["layer", "rms"])), parallel and draw(st.booleans()), parallel,
        draw(st.sampled_from(["tanh", "erf"])),
    )  # fmt: skip


@given(config=configs())
def test_a_file_gives_back_the_model_that_was_written(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.bin"
    flat = np.random.default_rng(0).standard_normal(num_parameters(config), np.float32)
    write_model(path, config, flat)
    read, tensors = read_model(path, PythiaConfig)
    assert read == config
    assert np.array_equal(np.concatenate([tensor.ravel() for tensor in tensors.values()]), flat)
    absent = {"ln1b", "ln2b", "lnfb"} if config.norm == "rms" else set()
    absent |= {"ln2w", "ln2b"} if config.tied_norm else set()
    assert not absent & tensors.keys() and len(tensors) == 16 - len(absent)


HEADER = (20230403, 1, 17, 53, 2, 3, 24, 1, 0, 0, 1), (0.5, 500.0, 1e-3)


def write_header(path, ints, floats, body: int) -> None:
    path.write_bytes(struct.pack("<256i128d", *ints, *[0] * (256 - len(ints)), *floats, *[0] * 125) + bytes(4 * body))


def test_the_header_is_the_one_that_is_documented(tmp_path):
    config = PythiaConfig(17, 53, 2, 3, 24, 0.5, 500.0, 1e-3, norm="rms", parallel=False, gelu="erf")
    write_header(tmp_path / "model.bin", *HEADER, num_parameters(config))
    assert read_model_header(tmp_path / "model.bin", PythiaConfig) == config
    write_model(tmp_path / "again.bin", config, np.zeros(num_parameters(config), np.float32))
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "model.bin").read_bytes()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(1, 2, "model version 2; version 1 is needed"), (7, 2, "norm is 2; it can be layer or rms"),
     (10, -1, "gelu is -1; it can be"), (4, 0, "num_layers is 0"), (0, 20240326, "use train_gpt2_fp32.py for it"),
     (8, 1, "tied_norm needs parallel"), (6, 27, "truncated or damaged")],
)  # fmt: skip
def test_a_header_that_makes_no_model_is_refused_in_one_line(at, value, message, tmp_path):
    ints, floats = list(HEADER[0]), HEADER[1]
    ints[at] = value
    write_header(tmp_path / "model.bin", ints, floats, 10)
    with pytest.raises(UserError, match=message) as caught:
        read_model_header(tmp_path / "model.bin", PythiaConfig)
    assert "\n" not in str(caught.value) and "model.bin" in str(caught.value)
