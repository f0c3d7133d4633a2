"""llmc/step/generation.py: a token costs one position, and is the same as if the whole text were computed."""

import device
import oracle
from llmc.data.tokenizer import Tokenizer
from llmc.model.activations import Activations, Cache
from llmc.model.batch import Batch
from llmc.model.weights import put
from llmc.step.generation import Writer, print_sample
from llmc.step.memory import inference_sizes
from llmc.step.sampler import Sampler, samplers_of
from models import ONE_OF_EACH, SOME, VARIANTS, build, flat_parameters, kind_of, name_of
from oracle import assert_close
from support.texts import forward_from, random_texts, recomputed
from train_llama3 import Llama3, Llama3Config

import numpy as np
import pytest
from lazy import EagerDevice, LazyDevice

some_models = pytest.mark.parametrize("config, attention", SOME, ids=name_of)
one_of_each = pytest.mark.parametrize("config, attention", ONE_OF_EACH, ids=name_of)


def writing(config, attention: str, B: int, T: int, flat: np.ndarray | None = None) -> Cache:
    """The cache of a model for inference, with NaN wherever forward does not write first."""
    cache = Cache(kind_of(config)(config, T, inference=True), B, T, attention)
    cache.memory.fill(255)
    put(cache.model, None, 0, device.asarray(flat_parameters(config) if flat is None else flat))
    return cache


def written(cache: Cache, text: list[int], count: int, sampler: Sampler, **how) -> list[int]:
    """The tokens that follow a text."""
    return [token for (token,) in Writer(cache, **how).tokens([text], [sampler], count)]


@some_models
def test_logits_from_every_position_on_are_those_of_the_definition(each_product, config, attention):
    """Of prompts of several lengths, and then of a token or three of each at a time."""
    B, T = 3, min(config.max_seq_len, 21 if config.head_size < 64 else 67)
    texts, flat = random_texts(config, B, T), flat_parameters(config)
    want, _ = oracle.forward(config, oracle.table_of(config, flat), texts, texts, attention)
    # In fp32, 1e-5: where keys and values are kept, nothing may be rounded that a whole text does not round.
    allowed = 1e-5 if device.precision == "fp32" else oracle.model_tolerance(device)
    allowed = 0.05 if device.floatX == device.BF16 else allowed
    writer, seen = Writer(writing(config, attention, B, T)), np.array([1, 5, T // 2])
    found = forward_from(writer, texts, [0] * B, seen)
    while True:
        assert_close("logits", found, want[np.arange(B), seen - 1], allowed)
        if seen.max() == T:
            break
        rows = 3 if seen.max() + 3 <= T and seen.max() % 4 == 0 else 1
        found = forward_from(writer, texts, seen, [rows] * B)
        seen += rows


@one_of_each
@pytest.mark.parametrize("T, inference, kind", [
    (32, False, device.CpuDevice), (32, True, LazyDevice), (32, True, EagerDevice),
    *((T, True, device.CpuDevice) for T in (1, 7)),
])  # fmt: skip
def test_a_seed_gives_the_text_that_it_gives_without_a_cache(config, attention, T, inference, kind):
    """Also after a text longer than the model sees."""
    device.use("cpu")
    device.use_precision("fp32")
    whole = build(device, config, 1, T, "relu" if attention == "relu" else "softmax", flat_parameters(config))

    def logits_after(text: list[int]) -> np.ndarray:
        acts, batch = whole.activations.views(1, len(text)), Batch(1, len(text))
        device.copy_in(batch.inputs, np.array([text], np.int32))
        whole.model.forward(acts, batch)
        whole.model.loss(acts, batch)
        device.synchronize()
        return device.to_floats(acts.logits)[-1, : config.vocab_size]

    prompts = [([config.vocab_size - 1], {}), ([config.vocab_size - 1, 3, 5][:T], {"temperature": 2.0, "top_k": 3})]
    prompts += [(random_texts(config, 1, T)[0].tolist(), {"top_k": 20, "top_p": 0.8})] * (T < 32)
    want = [recomputed(logits_after, prompt, 30, Sampler(7), T, **how) for prompt, how in prompts]
    device.current.device = kind()
    if inference:
        cache = writing(config, attention, 1, T)
    else:
        training = build(device, config, 2, T, attention, flat_parameters(config))
        cache = Cache(training.model, 1, T, attention, training.activations.memory)
    found = [written(cache, prompt, 30, Sampler(7), **how) for prompt, how in prompts]
    device.use("cpu")
    assert found == want


@one_of_each
def test_texts_written_together_are_those_written_alone(one_dev, config, attention):
    T, count = 12, 20  # each begins anew twice, at other times
    texts = [text[: 1 + 3 * b].tolist() for b, text in enumerate(random_texts(config, 4, T))]
    together = Writer(writing(config, attention, 4, T))
    finished, found, samplers = [False] * 4, [[] for _ in texts], samplers_of(5, 4)
    for drawn in together.tokens(texts, samplers, count, finished):
        for b, token in enumerate(drawn):
            if not finished[b]:
                found[b].append(token)
        finished[1] = len(found[1]) == 7
    alone = writing(config, attention, 1, T)
    for b, (text, sampler) in enumerate(zip(texts, samplers_of(5, 4), strict=True)):
        assert found[b] == written(alone, text, 7 if b == 1 else count, sampler)
        assert b == 1 or sampler.state == samplers[b].state
    assert len(list(together.tokens(texts, samplers, count, [True] * 4))) == 1


@one_of_each
def test_a_step_launches_the_same_whatever_the_position(config, attention):
    device.use("cpu")
    writer, seen = Writer(writing(config, attention, 2, 30)), []

    def note(name, arguments, launch) -> None:
        values = [device.address(value) if isinstance(value, np.ndarray) else value for value in arguments.values()]
        seen[-1].append((name, values))
        launch()

    step = writer.next_token.work
    writer.next_token = lambda: (seen.append([]), step())
    with device.observe(note):
        seen.append([])
        for _ in writer.tokens([[1], [2, 3]], samplers_of(1, 2), 25):
            pass
    assert len(seen) == 25 and all(one == seen[1] for one in seen[2:])
    firsts = {next(name for name, _ in launches if name.endswith("_kernel")) for launches in seen}
    assert firsts == {"encoder_forward_kernel"}  # as early_position of dependent_launch.cuh needs it
    names = [name for name, _ in seen[1]]
    assert names[-1] == "sample_kernel" and not {"softmax_forward_kernel", "relu_forward_kernel"} & set(names)


def test_a_sample_ends_before_a_token_that_ends_a_text(one_dev, capsys):
    config, attention = ONE_OF_EACH[0]
    cache = writing(config, attention, 1, 11, flat_parameters(config))
    tokenizer = Tokenizer([b"%d " % token for token in range(config.vocab_size)], eot=0)
    tokenizer.ends = set()
    whole = print_sample(Writer(cache), tokenizer, Sampler(1), 15)
    tokens = [int(token) for token in whole.split()]
    tokenizer.ends = {tokens[7]}
    assert len(tokens) == 15
    assert print_sample(Writer(cache), tokenizer, Sampler(1), 15).split() == whole.split()[: tokens.index(tokens[7])]


def test_a_sample_of_a_diverged_model_ends_with_a_line(one_dev, capsys):
    config, attention = ONE_OF_EACH[0]
    cache = writing(config, attention, 1, 11, np.full_like(flat_parameters(config), np.nan))
    assert print_sample(Writer(cache), None, Sampler(1), 15) == ""
    assert capsys.readouterr().out == "generating:\n---\n\nthe model's logits are not finite\n---\n"


def test_a_model_for_inference_keeps_of_each_layer_keys_and_values_alone():
    device.use("cpu")
    device.use_precision("fp32")
    config = Llama3Config.described("llama3.2-1b")
    activations = inference_sizes(Llama3, config, 16, 1024)["activations"]
    cache = 2 * 16 * 16 * 8 * 1024 * 64 * 4  # for keys and values: L, B, NKV, T, HS, fp32
    assert cache == 1 << 30 and cache < activations < 7 << 30
    twice = Llama3Config.described("layers=32,heads=32,kv_heads=8,channels=2048,hidden=8192")
    assert inference_sizes(Llama3, twice, 16, 1024)["activations"] - activations == cache


@pytest.mark.parametrize("config, attention", VARIANTS, ids=name_of)
def test_a_model_that_trains_has_room_for_a_text(config, attention):
    device.use("cpu")
    for B, T, rows in (1, 1, 0), (1, config.max_seq_len, 1), (3, 7, 2):
        model = kind_of(config)(config, T, inference=True)
        memory = Activations(model, B, T, attention, rows).memory
        cache = Cache(model, 1, T, attention, memory)
        for t in 1, T:
            acts, _ = cache.views(t)
            assert acts.logits.shape[0] == 1 and len(acts.layer) == config.num_layers
            arrays = [x for x in vars(acts).values() if isinstance(x, np.ndarray)]
            assert max(device.address(x) + x.nbytes for x in arrays) <= device.address(memory) + memory.nbytes
