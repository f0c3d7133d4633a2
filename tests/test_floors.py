"""The floors of the house: what may import what, and what launchers may not know."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the bottom up. A file may import its own floor, but a model script no other one, and floors below.
FLOORS = ("device", "kernels", "llmc", "train_gpt2_fp32", "train_*", "dev generate", "doc exercises tests")
SCRIPTS = FLOORS.index("train_*")
PLACES = [place for floor in FLOORS for place in floor.split()]
PATHS = {path for place in PLACES for pattern in (f"{place}.py", f"{place}/**/*.py") for path in ROOT.glob(pattern)}
# Each module by its name. Those of tests/ are imported without this one.
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("tests.").removesuffix(".__init__"): path
    for path in PATHS
}
SCRIPT_NAMES = [module for module in MODULES if module.startswith("train_")]


def floor_of(module: str) -> int:
    first = module.split(".")[0]
    floors = [floor for floor, names in enumerate(FLOORS) if first in names.split()]
    return floors[0] if floors else SCRIPTS if first.startswith("train_") else len(FLOORS) - 1


def called(node: ast.Call) -> str | None:
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def imports(module: str, source: str) -> set[str]:
    """All our modules that a module imports: also inside functions, under TYPE_CHECKING, and by import_module. If one
    is named only when it runs, it may be any script, or any module of the folder that is named but for programs."""
    is_package = module in MODULES and MODULES[module].name == "__init__.py"
    package, names = module.split(".")[: None if is_package else -1], []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *[node.module] * bool(node.module)])
            inner = [f"{base}.{alias.name}" for alias in node.names]  # `from device import cpu` takes device.cpu
            names += [name if name in MODULES else base for name in inner]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            name = node.args[0]
            word = name.values[0] if isinstance(name, ast.JoinedStr) else name  # of f"dev.hf.{name}" the first part
            names += [word.value.rstrip(".")] if isinstance(word, ast.Constant) else SCRIPT_NAMES
    found = {name for name in names if name in MODULES}
    for name in {*names} - found:
        inside = [each for each in MODULES if each.startswith(f"{name}.")]
        found |= {each for each in inside if "__main__" not in MODULES[each].read_text()}
    return found - {module}


@cache
def graph() -> dict[str, set[str]]:
    """What each module imports."""
    return {module: imports(module, path.read_text()) for module, path in MODULES.items()}


def point_up(module: str, imported: set[str]) -> set[str]:
    """What a module imports that it must not."""
    own = floor_of(module)
    return {each for each in imported if floor_of(each) > own or own == floor_of(each) == SCRIPTS}


def circle(of: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, if there are some."""
    try:
        TopologicalSorter(of).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def packages(of: dict[str, set[str]]) -> dict[str, set[str]]:
    """What device, kernels and the folders of llmc/ import of one another."""
    found = {}
    for module, imported in of.items():
        own, *others = (re.match(r"llmc\.\w+|\w+", name)[0] for name in (module, *imported))
        found.setdefault(own, set()).update({*others} - {own, "llmc"})
    return {package: imported for package, imported in found.items() if floor_of(package) < SCRIPTS - 1}


def test_no_import_points_up():
    assert {"device.cuda", "generate", "kernels.gelu", "doc.book", "test_floors", "support.runs"} <= graph().keys()
    assert "dev.hf.llama3" in graph()["dev.hf.common"] and "train_llama3" in graph()["dev.scripts"]  # by import_module
    wrong = {module: point_up(module, imported) for module, imported in graph().items()}
    assert not any(wrong.values()), {module: up for module, up in wrong.items() if up}


@pytest.mark.parametrize("module, source", [
    ("device.cpp.compiler", "from llmc.files.files import replacing"),
    ("device.cuda", "def f():\n    import kernels.adamw"), ("kernels.gelu", "import device\nfrom llmc import ranks"),
    ("llmc.model.model", "if TYPE_CHECKING:\n    from train_gpt2_fp32 import GPT2"),
    ("llmc.run.run", "from oracle import assert_close"), ("train_llama3", "from train_qwen3 import Qwen3"),
    ("train_qwen3", "from dev.hf.family import Family"), ("generate", "import os, doc.book"),
    ("train_gpt2_fp32", "import train_gpt2"), ("device.cuda", "from ..kernels import adamw"),
    ("llmc.files.files", "kinds = [import_module(path.stem) for path in paths]"),
    ("llmc.run.run", "importlib.import_module('dev.scripts')"),
])  # fmt: skip
def test_an_import_that_points_up_is_found(module, source):
    assert point_up(module, imports(module, source))


def test_neither_modules_nor_packages_import_one_another_in_a_circle():
    """Two folders may import each other without a circle of modules. But then neither can be read first."""
    assert circle(graph()) == circle(packages(graph())) == []
    assert circle(graph() | {"kernels.gelu": {"train_gpt2_fp32"}})
    assert {"llmc.files", "llmc.model"} <= {*circle(packages(graph() | {"llmc.model.loss": {"llmc.files.files"}}))}


def test_a_module_of_the_floors_below_the_scripts_has_at_most_400_lines():
    sizes = {module: len(path.read_text().splitlines()) for module, path in MODULES.items() if floor_of(module) < 3}
    assert {"device.cuda", "kernels.gelu", "llmc.ranks.exchange"} <= sizes.keys()
    assert max(sizes.values()) <= 400, {module: lines for module, lines in sizes.items() if lines > 400}


def test_no_line_of_cuda_or_cpp_is_longer_than_120_columns():
    folders = "kernels", "kernels/fp8", "device/cpp", "exercises", "exercises/solutions", "tests", "tests/cu"
    sources = [path for folder in folders for path in (ROOT / folder).iterdir()]
    paths = [path for path in sources if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    assert {"common.cuh", "runtime.cpp", "runtime.h", "warps.cu"} <= {path.name for path in paths}
    assert not [path for path in paths if max(map(len, path.read_text().splitlines())) > 120]


def test_a_training_script_names_nothing_of_hugging_face():
    """But for the remedy where there is no model file: the program that imports one."""
    for path in ROOT.glob("train_*.py"):
        lines = [line for line in path.read_text().splitlines() if re.search(r"(?i)hugging|\bhf\b", line)]
        assert all(line.startswith("    FETCH = ") for line in lines), (path, lines)


def knows_too_much(source: str) -> list[str]:
    """What a launcher's source names that is not an array, a size or a place on the device."""
    words = re.findall(r"\b(?:Model|[Rr]anks?|[Ss]ettings?|args\.\w+)\b", source)
    tree = list(ast.walk(ast.parse(source)))
    names = {node.arg for node in tree if isinstance(node, ast.arg)}
    names |= {node.id for node in tree if isinstance(node, ast.Name)}
    return sorted({*words, *(names & {"model", "config"})})


def test_launchers_know_no_model_no_rank_and_no_setting_and_take_at_most_eight_arrays_by_position():
    """Which of nine is which, nobody sees: biases, scratch and what is optional are named. Arrays have no type."""
    sources = {path.name: path.read_text() for path in (ROOT / "kernels").glob("*.py")}
    found = {name: knows_too_much(source) for name, source in sources.items()}
    assert not any(found.values()), {name: words for name, words in found.items() if words}
    assert knows_too_much('def f(model, rank): """As settings say: config."""') == ["model", "rank", "settings"]
    assert knows_too_much("x = Model(ranks.size()) if args.tf32 else None") == ["Model", "args.tf32", "ranks"]
    functions = [node for source in sources.values() for node in ast.parse(source).body if hasattr(node, "args")]
    counts = {node.name: sum(argument.annotation is None for argument in node.args.args) for node in functions}
    assert counts["layernorm_backward"] == 6
    assert max(counts.values()) <= 8, {name: count for name, count in counts.items() if count > 8}
