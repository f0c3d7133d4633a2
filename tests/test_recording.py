"""device/recording.py: a step that follows the plan made of its launches gives what program order gives, on a device
that does everything as late as it may, or as early; and who is placed where."""

import inspect

import device
from dev.microscope.launches import launches_in
from device import recording
from device.cublas import Cublas
from llmc.step.training import make_training
from models import VARIANTS, kind_of, name_of

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lazy import EagerDevice, LazyDevice

BLOCKS, SIDE = 12, 4  # matrices (4, 4) in the memory of a random program; the last three are gradients
PLACES = st.integers(0, 2 * BLOCKS - 2)  # where a matrix begins, in halves of them
OPERATIONS = st.tuples(st.sampled_from(["gemm", "gemm +=", "copy", "zero"]), PLACES, PLACES, PLACES)
PROGRAMS = st.lists(OPERATIONS, min_size=2, max_size=14)


def run(program: list[tuple], memory) -> None:
    """Gives a program to the device: products, copies and memsets of matrices that overlap in memory."""
    flat = memory.reshape(-1)
    for what, c, a, b in program:
        c, a, b = (flat[8 * place : 8 * place + 16] for place in (c, a, b))
        if what == "copy":
            device.copy(c, a)
        elif what == "zero":
            device.fill_zero(c)
        else:
            device.gemm(c, a, b, SIDE, SIDE, SIDE, add=c if what == "gemm +=" else None)


def apart(program: list[tuple]) -> list[tuple]:
    """The operations whose result does not overlap with what they read."""
    return [one for one in program if all(abs(one[1] - other) > 1 for other in one[2:])]


def results(program: list[tuple], kind: type[device.CpuDevice]) -> list[bytes]:
    """The memory after each of four rounds of a program that is recorded."""
    device.current.device = kind()
    memory = np.random.default_rng(1).uniform(-0.4, 0.4, (BLOCKS, SIDE, SIDE)).astype(np.float32)
    recorded, found = device.record(lambda: run(program, memory), [memory[-3:]]), []
    for _ in range(4):
        recorded()
        device.synchronize()
        found.append(memory.tobytes())
    return found


# A product of the side stream (into the gradient at 18) that conflicts with what follows it, or needs what comes before
# it. What is copied from 0 keeps the product before it off the side stream.
@pytest.mark.parametrize("kind", [LazyDevice, EagerDevice])
@given(PROGRAMS.map(apart))
@example([("gemm +=", 18, 0, 8), ("copy", 4, 18, 18)])  # reads what the side stream writes
@example([("gemm", 18, 0, 8), ("gemm +=", 0, 4, 6), ("copy", 10, 0, 0)])  # writes what it reads
@example([("gemm", 18, 0, 6), ("copy", 18, 4, 4)])  # writes what it writes
@example([("gemm +=", 0, 4, 6), ("gemm", 18, 0, 8), ("copy", 10, 0, 0)])  # is read by the side stream
@settings(max_examples=40)
def test_random_programs_give_what_program_order_gives(kind, program):
    expected = results(program, device.CpuDevice)
    found = results(program, kind)
    device.use("cpu")
    assert found == expected


def test_a_launch_that_was_not_there_before_is_an_error():
    device.current.device = LazyDevice()
    x, count = np.zeros(4, np.float32), [1]
    recorded = device.record(lambda: [device.fill_zero(x) for _ in range(count[0])])
    recorded()
    count[0] = 2
    with pytest.raises(RuntimeError, match="a recorded step has launched fill_zero where it had not before"):
        recorded()
    device.use("cpu")


def with_scratch(of_side: tuple[str, int], of_main: tuple[str, int]):
    """Calls of a recorded work in which each stream puts a matrix into scratch, of a purpose and so many floats, and
    multiplies it. Between the two the main stream overwrites what the side stream has put there. Returns the bytes of
    both products after each of four calls on the current device, and the plan."""
    rng = np.random.default_rng(2)
    a, b, weight, gradient, out = rng.uniform(-1, 1, (5, SIDE, SIDE)).astype(np.float32)

    def product(c, of: tuple[str, int], inp) -> None:
        matrix = device.scratch(of[0], (of[1],), np.float32)[: SIDE * SIDE].reshape(SIDE, SIDE)
        device.copy(matrix, inp)
        device.gemm(c, matrix, weight, SIDE, SIDE, SIDE)

    def work() -> None:
        product(gradient, of_side, a)
        device.copy(a, b)
        product(out, of_main, b)

    recorded, found = device.record(work, [gradient]), []
    for _ in range(4):
        recorded()
        device.synchronize()
        found.append(gradient.tobytes() + out.tobytes())
        device.copy(a, out)
    return found, recorded.plans[()]


@pytest.mark.parametrize("sizes", [(16, 16), (32, 16), (16, 32)], ids=str)
def test_streams_that_share_a_purpose_of_scratch_wait_for_one_another(sizes):
    """Also if the purpose's memory grows while the launches are noted: each is replayed on the memory that it had."""
    results, waits = {}, {}
    for kind in device.CpuDevice, LazyDevice, EagerDevice:
        for purposes in ("one", "one"), ("one", "other"):
            device.current.device = kind()
            found, plan = with_scratch(*zip(purposes, sizes, strict=True))
            assert plan.side == [True, True, False, False, False]
            results[kind, purposes], waits[purposes] = found, plan.waits
    device.use("cpu")
    assert len(set(map(tuple, results.values()))) == 1
    assert waits["one", "other"] == [None, None, 0, None, None]
    assert waits["one", "one"] == [None, None, 0, 1 if sizes[0] >= sizes[1] else None, None]


def test_scratch_on_a_stream_that_no_plan_orders_is_an_error():
    device.current.device = gpu = LazyDevice()
    with gpu.on(gpu.update_stream), pytest.raises(RuntimeError, match="scratch 'one' on a stream that is not recorded"):
        device.scratch("one", (4,), np.float32)
    with gpu.on(gpu.side_stream):
        device.scratch("one", (4,), np.float32)
    device.use("cpu")


def plan_of(config, attention: str, B: int, rate: float) -> recording.Plan:
    """The plan of a training step's forward and backward pass."""
    device.use("cpu")
    training = make_training(kind_of(config), config, B, 32, attention, dropout=(rate, 1) if rate else None)
    model, acts, batch = training.model, training.acts, training.batch

    def work() -> None:
        model.zero_grad()
        model.forward(acts, batch)
        model.loss(acts, batch, dloss=1e-3)
        model.backward(acts, batch)

    recorded = device.record(work, [model.grads_memory])
    with device.observe(lambda name, arguments, launch: None):  # nothing is computed
        recorded()
    return recorded.plans[()]


@pytest.mark.parametrize("B", [1, 32])  # from 1024 rows on, operands are transposed
@pytest.mark.parametrize("config, attention, rate", [
    (*one, rate) for one in VARIANTS for rate in (0.0, *[0.1] * kind_of(one[0]).DROPS)
], ids=name_of)  # fmt: skip
def test_every_weights_gradient_is_computed_beside_the_rest_of_backward(config, attention, rate, B):
    """With it what makes its input: a norm's output, recomputed, and from 1024 rows on attention's and the
    classifier's input, transposed. And the second stages of all sums but the last, with the first ones of a product's
    bias. The streams wait for each other no more often than a person would let them: the side stream once per product
    or sum, the main stream before a buffer that the side stream reads is written anew, up to four times per layer.
    Without dropout it never waits for a sum alone, because norms and other launchers have partial sums of their own."""
    plan, L = plan_of(config, attention, B, rate), config.num_layers
    names = [launch.name for launch in plan.launches]
    sums = names.count("add_partials_kernel") - 1
    products = 4 * L + 1
    recomputed = 2 * L + (L + 1) * (B == 32)
    assert sum(plan.side) == products + recomputed + sums + names.count("column_partials_kernel")
    found = [(one, wait) for one, wait in zip(plan.side, plan.waits, strict=True) if wait is not None]
    assert sum(side for side, _ in found) <= products + sums
    waits_of_main = [names[wait] for side, wait in found if not side]
    assert len(waits_of_main) <= 4 * L + 1
    assert rate or "add_partials_kernel" not in waits_of_main


def test_the_devices_have_the_same_operations():
    """By name and arguments: what is tested on one must not fail on the other."""

    def operations(kind) -> dict[str, list[str]]:
        found = {name: getattr(kind, name) for name in vars(kind) if not name.startswith("_")}
        return {name: list(inspect.signature(one).parameters) for name, one in found.items() if inspect.isfunction(one)}

    cuda, cpu = operations(device.CudaDevice), operations(device.CpuDevice)
    cuda |= {name: parameters for name, parameters in operations(Cublas).items() if name.startswith("gemm")}
    assert {name: cpu[name] for name in cuda if name in cpu} == {name: cuda[name] for name in cuda if name in cpu}
    assert cpu.keys() - cuda.keys() == {"multiply", "multiply_e4m3"}
    assert cuda.keys() - cpu.keys() == {"compiled", "load", "switch"}


def test_what_a_declaration_says_is_set_is_not_read_before():
    """Every kernel with SETS in its declaration is run by its launcher on outputs of two kinds of garbage."""
    device.use("cpu")
    seen = set()

    def observer(name, arguments, work) -> None:
        sets = [key for key, access in device.accesses(name, arguments).items() if access == "sets"]
        if not sets or name in device.observing.OPERATIONS:
            work()
            return
        seen.add(name)
        kept = {key: np.copy(value) for key, value in arguments.items() if isinstance(value, np.ndarray)}
        results = []
        for poison in (np.nan, -7e30):
            poisons = {device.BF16: device.to_bf16(np.array(poison)), device.fp8.E4M3: 127 if poison < 0 else 126}
            for key, value in kept.items():
                arguments[key][...] = poisons.get(value.dtype, poison) if key in sets else value
            work()
            results.append([arguments[key].tobytes() for key in kept])
        assert results[0] == results[1], name

    for precision in "fp32", "bf16":
        device.use_precision(precision)
        for launch in launches_in(precision).values():
            call = launch.prepare(launch.sizes)
            with device.observe(observer):
                call()
    declared = {
        name for source in device.sources.imported
        for name, parameters in device.sources.kernel_accesses(source.path).items() if "sets" in parameters.values()
    }  # fmt: skip
    assert seen >= {name for name in declared if "erf" not in name}
