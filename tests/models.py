"""Tiny models of each kind, for the tests that run for all of them."""

from llmc.model import Model
from llmc.scripts import model_kinds
from llmc.tensors import Config
from train_gpt2_fp32 import GPT2Config
from train_llama3 import Llama3Config
from train_pythia import PythiaConfig

# maxT, V, L, NH, C: nothing here is a multiple of 4 or 32 that need not be.
ODD = GPT2Config(32, 101, 2, 3, 21)
EVEN = GPT2Config(32, 256, 1, 2, 64)
HEADS_OF_64 = GPT2Config(80, 101, 2, 2, 128)
LLAMA_ODD = Llama3Config(32, 101, 2, 6, 2, 36, 41, tied=False)  # heads of 6
PYTHIA_ODD = PythiaConfig(32, 101, 2, 3, 21, rotary=0.6)  # heads of 7, of which 4 channels are rotated
PYTHIA_HEADS_OF_64 = PythiaConfig(80, 101, 2, 2, 128)
GROUPS_OF_64 = Llama3Config(80, 101, 1, 4, 2, 256, 90, tied=False)


def kind_of(config: Config) -> type[Model]:
    return next(kind for kind in model_kinds() if kind.Config is type(config))


MODELS = model_kinds()
