"""Models' descriptions and files: llm.c's Llama 3 file, made here byte by byte, our versions of it, and Pythia's."""

import struct
from dataclasses import replace

import device
from conftest import refusal
from dev.bench.ceilings import Ceilings, limits
from llmc.files.model_file import read_model, read_model_header, write_model
from llmc.model.tensors import Config, num_parameters
from llmc.step.memory import Plan, training_sizes
from models import name_parameters, names_of
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import Pythia, PythiaConfig
from train_qwen3 import Qwen3, Qwen3Config

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

TINY = Llama3Config(9, 11, 2, num_heads=6, num_kv_heads=2, channels=24, hidden=20)
UNTIED = replace(TINY, tied=False)
PYTHIA = PythiaConfig(17, 53, 2, 3, 24, 0.5, 500.0, 1e-3, norm="rms", parallel=False, gelu="erf")


# Descriptions


@pytest.mark.parametrize("kind, presets", [
    (GPT2Config, {"d12": (124_439_808 + 47 * 768, 64), "d48": (1_557_611_200 + 47 * 1600, 64)}),  # 47 rows of padding
    (Llama3Config, {"smollm2-135m": (134_515_008, 64), "llama3.2-1b": (1_235_814_400, 64)}),
    (PythiaConfig, {"pythia-14m": (14_067_712, 8), "pythia-70m": (70_426_624, 16), "pythia-160m": (162_322_944, 16),
                    "pythia-410m": (405_334_016, 16), "pythia-1b": (1_011_781_632, 64)}),
    (Qwen3Config, {"qwen3-0.6b": (596_049_920, 128), "qwen3-1.7b": (1_720_574_976, 128),
                   "qwen3-4b": (4_022_468_096, 128)}),
])  # fmt: skip
def test_the_presets_have_the_originals_sizes(kind, presets):
    """The parameters as their pages at Hugging Face count them, and the channels of a head, or those that turn."""
    for name, (parameters, channels) in presets.items():
        config = kind.described(name)
        assert num_parameters(config) == parameters, name
        assert config.sizes().get("R", config.head_size) == channels, name


def test_a_description_may_ask_for_every_variant():
    described = PythiaConfig.described("layers=2,heads=3,channels=24,norm=rms,tied_norm=1,rotary=0.5,gelu=erf,maxT=9")
    assert described == PythiaConfig(9, 50304, 2, 3, 24, rotary=0.5, norm="rms", tied_norm=True, gelu="erf")
    described = PythiaConfig.described("layers=2,heads=3,channels=24,parallel=0,theta=500,eps=1e-3", vocab_size=77)
    assert described == PythiaConfig(2048, 77, 2, 3, 24, rope_theta=500.0, norm_eps=1e-3, parallel=False)


@pytest.mark.parametrize("words, message", [
    ("rotary=0.1", "it must be 2, 4, …"), ("rotary=1.5", "rotary 1.5"), ("rotary=0", "rotary is 0.0; it must"),
    ("rotary=0.4", "rotary 0.4 is 3 of a head's 8 channels"), ("norm=batch", "norm is batch; it can be layer or rms"),
    ("gelu=relu", "gelu is relu; it can be tanh or erf"), ("tied_norm=1,parallel=0", "tied_norm needs parallel"),
    ("eps=0", "must be a positive number"), ("norm=1", "norm=1 is no part"), ("tied=1", "tied=1 is no part"),
    ("heads=5", "24 channels cannot be split among 5 heads"),
    ("heads=4,kv_heads=3,hidden=8", "4 heads cannot share 3 key/value heads evenly"),
    ("heads=4,kv_heads=2,hidden=8,head_size=7", "heads of 7 channels are odd"),
])  # fmt: skip
def test_a_description_that_makes_no_model_is_refused(words, message):
    kind = Qwen3Config if "kv_heads" in words else PythiaConfig
    assert message in refusal(kind.described, f"layers=2,heads=3,channels=24,{words}")


def test_pythia_160m_trains_in_4700_mib():
    device.use("cpu")
    own = training_sizes(Pythia, PythiaConfig.described("pythia-160m"), Plan(4, 1024, "flash"))
    assert sum(own.values()) <= 4700 << 20


def test_the_limit_of_a_step_counts_attention_by_the_size_of_its_heads(one_dev):
    B, T, config = 2, 8, Qwen3Config(16, 101, 2, 6, 2, 48, 67, head_size=16, tied=False)
    parts = limits(Qwen3, config, B, T, Ceilings(product=1e3, copy=1e9, description=""))
    assert parts["causal attention at the ceiling"] == 7 * 2 * B * T * T * 6 * 16


# llm.c's Llama 3


def llm_c_file(scaled: int) -> tuple[bytes, dict[str, np.ndarray]]:
    """A model as llm.c's train_llama3.py writes it, and its tensors. multiple_of 16 and the multiplier 1.3 make 3.5 C
    hidden channels, as in Llama 3.1 8B: 16 * ceil(int(1.3 * int(8 * 64 / 3)) / 16) = 16 * ceil(221 / 16) = 224."""
    V, L, NH, NKV, C, H = 37, 2, 4, 2, 64, 224
    header = struct.pack("<12i", 20240803, 3, 16, V, L, NH, NKV, C, 16, scaled, 3, 1) + bytes(4 * 244)
    header += struct.pack("<3f", 1.3, 1e-5, 5e5) + b"\xab" * (4 * 253)  # what follows is undefined
    QKV = (NH + 2 * NKV) * C // NH
    shapes = {
        "wte": (V, C), "lm_head": (V, C), "ln1w": (L, C), "ln1b": (L, C), "qkvw": (L, QKV, C), "qkvb": (L, QKV),
        "attprojw": (L, C, C), "attprojb": (L, C), "ln2w": (L, C), "ln2b": (L, C), "fcw": (L, 2 * H, C),
        "fcb": (L, 2 * H), "fcprojw": (L, C, H), "fcprojb": (L, C), "lnfw": (C,), "lnfb": (C,),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    tensors = {
        name: np.zeros(shape, "<f4") if name.endswith("b") else rng.standard_normal(shape, "<f4")
        for name, shape in shapes.items()
    }
    return header + b"".join(tensor.tobytes() for tensor in tensors.values()), tensors


@pytest.mark.parametrize("scaled", [0, 1])
def test_a_model_of_llm_c_is_read_and_written_again_as_one_that_means_the_same(scaled, tmp_path):
    data, tensors = llm_c_file(scaled)
    (tmp_path / "model.bin").write_bytes(data)
    config, read = read_model(tmp_path / "model.bin", Llama3Config)
    assert config == Llama3Config(16, 37, 2, 4, 2, 64, 224, 5e5, 8.0 * scaled, 1e-5, tied=False)
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor, name)
    write_model(tmp_path / "again.bin", config, read)
    assert read_model_header(tmp_path / "again.bin", Llama3Config) == config
    assert (tmp_path / "again.bin").read_bytes()[2048:] == data[2048:]


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


# Both files


fp32 = st.floats(2**-20, 2**24, width=32).map(lambda x: float(str(np.float32(x))))  # as it is written in decimals


@st.composite
def configs(draw) -> Config:
    maxT, V, L, NH, HS = (draw(st.integers(1, most)) for most in (1 << 20, 200, 3, 4, 8))
    if draw(st.booleans()):
        NKV, NH, HS = NH, NH * draw(st.integers(1, 4)), 2 * HS
        return Llama3Config(
            maxT, V, L, NH, NKV, NH * HS, draw(st.integers(1, 99)), draw(fp32),
            draw(st.sampled_from([0.0, 8.0]) | fp32.filter(lambda x: x >= 1)), draw(st.just(1e-5) | fp32),
            draw(st.booleans()), draw(st.just(8192) | st.integers(1, 2**31 - 1)),
        )  # fmt: skip
    HS, parallel = HS + 1, draw(st.booleans())
    R = 2 * draw(st.integers(1, HS // 2))
    return PythiaConfig(
        maxT, V, L, NH, NH * HS, (R + 0.25) / HS if R < HS else 1.0, draw(st.floats(1e-3, 1e7)),
        draw(st.floats(1e-12, 1.0)), draw(st.sampled_from(["layer", "rms"])), parallel and draw(st.booleans()),
        parallel, draw(st.sampled_from(["tanh", "erf"])),
    )  # fmt: skip


@given(config=configs())
@settings(max_examples=30)
def test_a_model_is_read_back_exactly(config, tmp_path, rng):
    params = rng.standard_normal(num_parameters(config), np.float32)
    write_model(tmp_path / "model.bin", config, params)
    read, tensors = read_model(tmp_path / "model.bin", type(config))
    assert read == config
    wanted = name_parameters(params, config)
    for name in names_of(config):
        np.testing.assert_array_equal(tensors[name], getattr(wanted, name)[: len(tensors[name])], name)
    biases = tensors.keys() - set(names_of(config))  # which no Llama has
    assert bool(biases) == isinstance(config, Llama3Config) and not any(tensors[name].any() for name in biases)


PYTHIAS_HEADER = struct.pack(
    "<256i128d", 20230403, 1, 17, 53, 2, 3, 24, 1, 0, 0, 1, *[0] * 245, 0.5, 500.0, 1e-3, *[0] * 125
)


def test_pythias_header_is_the_one_that_is_documented(tmp_path):
    body = bytes(4 * num_parameters(PYTHIA))
    (tmp_path / "model.bin").write_bytes(PYTHIAS_HEADER + body)
    assert read_model_header(tmp_path / "model.bin", PythiaConfig) == PYTHIA
    write_model(tmp_path / "again.bin", PYTHIA, np.zeros(num_parameters(PYTHIA), np.float32))
    assert (tmp_path / "again.bin").read_bytes() == PYTHIAS_HEADER + body


def bits(x: float) -> int:
    return struct.unpack("<i", struct.pack("<f", x))[0]


FILES = {
    "llm.c": UNTIED, "104": replace(TINY, original_length=512), "Pythia": PYTHIA, "GPT-2": GPT2Config(4, 9, 1, 1, 4)
}  # fmt: skip


@pytest.mark.parametrize("file, word, value, words", [
    ("llm.c", 0, 20240326, "found a GPT-2 model"),
    ("llm.c", 1, 4, "version 4 (unknown); version 3, 103 or 104 (fp32), or 5 (bf16), is needed"),
    ("llm.c", 3, -1, "vocab_size is -1"), ("llm.c", 4, 2**31 - 1, "truncated or damaged"),
    ("llm.c", 5, 6, "64 channels cannot be split among 6 heads"),
    ("llm.c", 5, 64, "heads of 64 / 64 channels are odd"),
    ("llm.c", 6, 3, "4 heads cannot share 3 key/value heads evenly"), ("llm.c", 8, 0, "multiple_of 0"),
    ("llm.c", 256, 0, "ffn_dim_multiplier 0"), ("llm.c", 256, bits(float("nan")), "ffn_dim_multiplier nan"),
    ("llm.c", 256, bits(1e30), "it must be at most 2147483647"), ("llm.c", 257, 0, "norm_eps is 0"),
    ("llm.c", 258, bits(-5e5), "rope_theta is -500000"), ("llm.c", 258, bits(float("inf")), "rope_theta is inf"),
    ("llm.c", -1, bits(1e-3), "lnfb is not 0, and a Llama 3 has none"), ("104", 13, 0, "hidden is 0"),
    ("104", 259, bits(-1.0), "rope_scaling is -1"), ("104", 259, bits(0.5), "rope_scaling is 0.5"),
    ("104", 14, -512, "original_length is -512"),
    ("Pythia", 1, 2, "model version 2; version 1 is needed"), ("Pythia", 7, 2, "norm is 2; it can be layer or rms"),
    ("Pythia", 10, -1, "gelu is -1; it can be"), ("Pythia", 4, 0, "num_layers is 0"),
    ("Pythia", 0, 20240326, "use train_gpt2_fp32.py for it"), ("Pythia", 8, 1, "tied_norm needs parallel"),
    ("Pythia", 6, 27, "truncated or damaged"),
    ("GPT-2", 0, 20240803, "found a Llama 3 model, expected magic number 20240326); use train_llama3.py"),
])  # fmt: skip
def test_a_file_that_makes_no_model_is_refused(file, word, value, words, tmp_path):
    path, config = tmp_path / "model.bin", FILES[file]
    write_model(path, config, np.zeros(num_parameters(config), np.float32))
    data = np.frombuffer(llm_c_file(1)[0] if file == "llm.c" else path.read_bytes(), "<i4").copy()
    data[word] = value
    path.write_bytes(data.tobytes())
    message = refusal(read_model, path, type(config))
    assert str(path) in message and words in message
