"""The floors of the house: what may import what, what launchers may not know, and how much a part of a run may have."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

from llmc.run import Run
from llmc.saver import Saver
from llmc.validation import Validation
from llmc.watch import Guard, Logs, Watch

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the bottom up. A file may import its own floor, but a model script no other one, and floors below.
FLOORS = ("device", "kernels", "llmc", "train_*", "generate", "dev doc exercises tests")
TOP = len(FLOORS) - 1


def floor_of(name: str) -> int | None:
    """The floor of a module or file, by the first part of its name; None for a package that is not ours."""
    first = re.split(r"[./]", name)[0]
    if first.startswith("train_"):
        return FLOORS.index("train_*")
    if first in FLOORS:
        return FLOORS.index(first)
    # The modules of tests/ are imported without its name.
    ours = any((ROOT / place).exists() for place in (first, f"{first}.py", f"tests/{first}.py"))
    return TOP if ours else None


def imports(source: str) -> list[str]:
    """All modules that a source imports, inside functions too. `from device import cpp` may mean device.cpp."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:  # else: of the same package
            found.append(node.module)
    return found


def wrong_imports(path: str, source: str) -> list[str]:
    """What a file, by its path in the repository, imports that it must not."""
    own = floor_of(path)
    there = [(module, floor_of(module)) for module in imports(source)]
    script = FLOORS[own] == "train_*" and path != "train_gpt2.py"  # which is GPT-2's with another precision
    return [module for module, floor in there if floor is not None and (floor > own or script and floor == own)]


def knows_too_much(source: str) -> list[str]:
    """What a launcher's source names that is not an array, a size or a place on the device."""
    words = re.findall(r"\b(?:Model|[Rr]anks?|[Ss]ettings?|args\.\w+)\b", source)
    tree = list(ast.walk(ast.parse(source)))
    names = {node.arg for node in tree if isinstance(node, ast.arg)}
    names |= {node.id for node in tree if isinstance(node, ast.Name)}
    return sorted({*words, *(names & {"model", "config"})})


def files_on(floor: int) -> list[str]:
    """By their paths in the repository."""
    patterns = [pattern for name in FLOORS[floor].split() for pattern in (f"{name}.py", f"{name}/**/*.py")]
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


@pytest.mark.parametrize("floor", range(len(FLOORS)), ids=FLOORS)
def test_no_import_points_up(floor):
    wrong = {path: wrong_imports(path, (ROOT / path).read_text()) for path in files_on(floor)}
    assert wrong and {floor_of(path) for path in wrong} == {floor}
    assert not any(wrong.values()), {path: modules for path, modules in wrong.items() if modules}


def test_launchers_know_no_model_no_rank_and_no_setting():
    launchers = sorted((ROOT / "kernels").glob("*.py"))
    found = {path.name: knows_too_much(path.read_text()) for path in launchers}
    assert len(found) > 10 and not any(found.values()), {name: words for name, words in found.items() if words}


def positional_arrays(source: str) -> dict[str, int]:
    """How many arrays, which have no type, each function of a launcher's source takes by position."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: sum(argument.annotation is None for argument in node.args.args) for node in functions}


def test_no_launcher_takes_more_than_eight_arrays_by_position():
    """Which of nine is which, nobody sees: biases, scratch and what is optional are named."""
    found = {}
    for path in (ROOT / "kernels").glob("*.py"):
        found |= positional_arrays(path.read_text())
    assert found["layernorm_backward"] == 8
    assert max(found.values()) == 8, {name: count for name, count in found.items() if count > 8}


@pytest.mark.parametrize(
    "path, source",
    [
        ("device/cpp/compiler.py", "from llmc.files import replacing"),
        ("device/cuda.py", "def f():\n    import kernels.adamw"),
        ("kernels/gelu.py", "import device\nfrom llmc import ranks"),
        ("llmc/model.py", "if TYPE_CHECKING:\n    from train_gpt2_fp32 import GPT2"),
        ("llmc/model.py", "try:\n    import generate\nfinally:\n    pass"),
        ("llmc/run.py", "from dev.bench.workload import Ours"), ("llmc/run.py", "from oracle import assert_close"),
        ("train_llama3.py", "from train_gpt2_fp32 import GPT2"), ("train_pythia.py", "from generate import MODELS"),
        ("generate.py", "import os, dev.pictures"),
    ],
)  # fmt: skip
def test_an_import_that_points_up_is_found(path, source):
    assert len(wrong_imports(path, source)) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("kernels/gelu.py", "import device\nfrom kernels.reduce import add_partials\nimport numpy as np"),
        ("device/cuda.py", "from . import cublas\nimport kernels_of_another_package"),
        ("train_llama3.py", "from llmc.model import Model"), ("generate.py", "from train_llama3 import Llama3"),
        ("dev/bench/workload.py", "from generate import MODELS"),
        ("tests/test_model.py", "import oracle, exercises.check"),
    ],
)  # fmt: skip
def test_an_import_that_points_down_or_out_is_right(path, source):
    assert wrong_imports(path, source) == []


@pytest.mark.parametrize("source, word", [
    ("def f(out, model, B: int): ...", "model"), ("from llmc.model import Model", "Model"),
    ("def f(rank: int): ...", "rank"), ("x = ranks.size()", "ranks"), ("if args.tf32: pass", "args.tf32"),
    ('"""As the settings say."""', "settings"),
])  # fmt: skip
def test_a_launcher_that_knows_too_much_is_found(source, word):
    assert word in knows_too_much(source)


@pytest.mark.parametrize("part", [Run, Saver, Validation, Watch, Logs, Guard])
def test_a_part_of_a_run_has_few_attributes_and_a_short_constructor(part):
    source = inspect.getsource(part.__init__)
    targets = {ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(source)))
               if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}  # fmt: skip
    assert len([target for target in targets if target.startswith("self.") and target.count(".") == 1]) <= 8
    assert len(source.splitlines()) <= 31
