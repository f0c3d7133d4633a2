"""What tests share: the device they run on, seeded random numbers, a browser, and more."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

# Read when numpy loads, so before any import that brings it in: idle worker threads would steal the tests' own cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # there is one for each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts `make test &` lets it ignore Ctrl-C. The programs that tests stop by Ctrl-C would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["LLMC_QUIET"] = "1"  # programs that compile say nothing of it, however slow this machine is
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made from configs; nothing is fetched

import device
from device import cpu
from device.errors import UserError
from llmc.model.model import Model
from llmc.ranks.launcher import SIGNALS
from llmc.run import program
from llmc.run.trainer import run_trainer
from train_gpt2_fp32 import train

import hypothesis
import numpy as np
import pytest

# Each test has new CPU devices, which would find and check every kernel's library anew: where the environment asks for
# the same ones, they share them.
MODULES: dict[tuple, dict] = {}


def make_cpu_device(self, make=cpu.CpuDevice.__init__) -> None:
    make(self)
    asked = tuple(sorted(pair for pair in os.environ.items() if pair[0].startswith(("LLMC_CPU_", "CXX"))))
    self.modules = MODULES.setdefault(asked, {})


compile_all = cpu.CpuDevice.compile_all


def compile_missing(self, paths: list[Path]) -> None:
    missing = [path for path in paths if (path, self.floatX) not in self.modules]
    if missing:
        compile_all(self, missing)


cpu.CpuDevice.__init__, cpu.CpuDevice.compile_all = make_cpu_device, compile_missing

DEVICES = ["cpu", "cpu-warp32"]
try:
    device.use("cuda")
    DEVICES.append("cuda")
    NO_CUDA = ""
except UserError as error:
    NO_CUDA = f" (no cuda: {error})"


# The same few shapes on every run. All of a test's shapes run on one device, so they may share its fixture.
hypothesis.settings.register_profile(
    "llm.cupy", max_examples=15, deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("llm.cupy")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected mostly stays: Python's garbage collector never looks at it, neither now nor again
    in each of its later rounds."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_report_header() -> str:
    return f"devices: {', '.join(DEVICES)}{NO_CUDA}"


def pytest_addoption(parser) -> None:
    parser.addoption("--errors", action="store_true", help="list the largest relative error of every tensor compared")


def pytest_terminal_summary(terminalreporter, config) -> None:
    if not config.getoption("--errors"):
        return
    import oracle

    terminalreporter.section("largest relative errors")
    for (file, on, name), (error, tolerance) in sorted(oracle.largest_errors.items()):
        terminalreporter.write_line(f"{file:24} {on:12} {name:24} {error:9.2e}  allowed {tolerance:.0e}")


def switch_device(name: str, monkeypatch) -> None:
    """Uses a device of DEVICES or TYPES. Skips the test if the GPU lacks the precision."""
    kind, *variants = name.split("-")
    if kind == "cpu":
        monkeypatch.setenv("LLMC_CPU_WARP", "32" if "warp32" in variants else "1")
    device.use(kind)
    precision = next((each for each in ("tf32", "fp16", "bf16") if each in variants), "fp32")
    if kind == "cuda" and precision not in ("fp32", "fp16") and device.current.device.compute_capability < 80:
        pytest.skip(f"this GPU has no {precision}")
    device.use_precision(precision)


def switched(request, monkeypatch) -> Iterator[ModuleType]:
    """What a fixture does, if its parameters are devices."""
    switch_device(request.param, monkeypatch)
    yield device
    device.synchronize()


def refusal(function: Callable, *args, **kwargs) -> str:
    """The one line that a function raises as a UserError, because it refuses its arguments."""
    try:
        function(*args, **kwargs)
    except UserError as error:  # pytest.raises would keep the function's frames, and the locks that they hold
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("not refused")


def on(devices: list):
    """A fixture that switches to each of these devices in turn."""
    return pytest.fixture(params=devices)(switched)


LONG_WARPS = pytest.param("cpu-warp32", marks=pytest.mark.long)
TYPES = [*DEVICES, "cpu-bf16", pytest.param("cpu-warp32-bf16", marks=pytest.mark.long)]
TYPES += ["cuda-bf16"] * ("cuda" in DEVICES)
TF32 = ["cuda-tf32"] * ("cuda" in DEVICES)
FP16 = ["cpu-fp16"] + ["cuda-fp16"] * ("cuda" in DEVICES)

# "cpu" runs the kernels with warps of one thread, as training on the CPU does; "cpu-warp32" runs them with the warps of
# 32 that a GPU has, so that every shuffle takes part; "cuda" is the GPU, left out where there is none. Matrix products
# are in plain fp32.
dev = on(DEVICES)
# For kernels that are built for each type: also with bf16 for parameters, activations and their gradients. What
# tests/oracle.py makes and compares follows the type.
each_type = on(TYPES)
# For what multiplies matrices: also with TF32 products, where there is a GPU that can, or with operands of fp16.
product_dev = on([*DEVICES, *TF32])
each_product = on([*TYPES, *TF32, *FP16])
# For what bears on kernels no more than other tests do, and for whole models: with warps of 32 on a CPU in make
# test-all alone.
one_dev = on(["cpu", LONG_WARPS, *DEVICES[2:]])
model_dev = on(["cpu", LONG_WARPS, *DEVICES[2:], *TF32])
each_model_dev = on(["cpu", LONG_WARPS, *TYPES[2:], *TF32])


@pytest.fixture(autouse=True)
def nothing_stays_in_the_module(request):
    """What a test patches of a device must be patched on device.current.device: monkeypatch would leave the old one's
    method behind in the module."""
    before = set(vars(device))
    yield
    assert set(vars(device)) == before


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that are the same on every run, and differ from test to test."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def columns_that_fit(monkeypatch):
    """columns_that_fit(rows, beside, few) returns how many columns a matrix of `rows` rows of floats may have, to fit
    into shared memory with `beside` bytes left over. This is a multiple of 16. On the CPU it is `few`, and the test
    sees a `device.shared_memory` of just that size. So a launcher does there for few columns what it does on a GPU for
    many."""

    def columns_that_fit(rows: int, beside: int, few: int) -> int:
        if device.kind == "cuda":
            return (device.shared_memory - beside) // (4 * rows) // 16 * 16
        monkeypatch.setattr(device.current.device, "shared_memory", 4 * rows * few + beside)
        return few

    return columns_that_fit


@pytest.fixture
def launches() -> Iterator[dict[str, dict]]:
    """The arguments of each kernel's last launch in the test."""
    found = {}

    def observer(name: str, arguments: dict, work) -> None:
        found[name] = arguments
        work()

    with device.observe(observer):
        yield found


@pytest.fixture
def trainer_here(monkeypatch, capsys):
    """trainer_here(kind, folder, flags, code) does what the script of this kind of model does with the flags in the
    folder, in this process, which need not import everything anew. It must end with this code. Returns what it wrote
    to stdout and to stderr."""

    def trainer_here(kind: type[Model], folder: Path, flags: list[str], code: int = 0) -> tuple[str, str]:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [kind.Config.SCRIPT, *flags])
        monkeypatch.setattr(program, "last_checkpoint", None)
        capsys.readouterr()
        ended = 0
        try:
            run_trainer(train, kind)
        except SystemExit as end:  # pytest.raises would keep the run's frames, and the lock that they hold
            ended = end.code
        out, error = capsys.readouterr()
        if isinstance(ended, str):  # Python prints it as it ends, and exits with 1
            ended, error = 1, f"{error}{ended}\n"
        assert ended == code, (ended, out[-2000:], error)
        return out, error

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield trainer_here
    for number, handler in handlers.items():  # a run that has begun takes them
        signal.signal(number, handler)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("there is no Chromium or Chrome")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=QUIET)
        yield browser
        browser.close()
