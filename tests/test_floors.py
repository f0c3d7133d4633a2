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
SCRIPTS, TOP = FLOORS.index("train_*"), len(FLOORS) - 1
ANYTHING = "whatever is named when it runs"  # may be a script: import_module of what is no literal


def floor_of(name: str) -> int | None:
    """The floor of a module or file, by the first part of its name; None for a package that is not ours."""
    if name == ANYTHING:
        return SCRIPTS
    first = re.split(r"[./]", name)[0]
    for floor, names in enumerate(FLOORS):
        if first in names.split():
            return floor
    if first.startswith("train_"):
        return SCRIPTS
    # The modules of tests/ are imported without its name.
    ours = any((ROOT / place).exists() for place in (first, f"{first}.py", f"tests/{first}.py"))
    return TOP if ours else None


def is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").exists()


def imports(path: str, source: str) -> list[str]:
    """All modules that a file imports: also inside functions, under TYPE_CHECKING, and by import_module."""
    package, found = list(Path(path).parent.parts), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *[node.module] * bool(node.module)])
            for alias in node.names:  # `from device import cpu` takes the module device.cpu
                inner = f"{module}.{alias.name}"
                found.append(inner if is_module(inner) else module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            name = node.args[0]
            words = name.values if isinstance(name, ast.JoinedStr) else [name]  # of f"dev.hf.{name}" the first part
            literal = isinstance(words[0], ast.Constant)
            found.append(str(words[0].value).rstrip(".") if literal else ANYTHING)
    return list(dict.fromkeys(found))


def wrong_imports(path: str, source: str) -> list[str]:
    """What a file, by its path in the repository, imports that it must not."""
    own = floor_of(path)
    there = [(module, floor_of(module)) for module in imports(path, source)]
    return [module for module, floor in there if floor is not None and (floor > own or own == floor == SCRIPTS)]


@cache
def graph() -> dict[str, set[str]]:
    """What each module below the tests imports of them."""
    paths = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
             for floor in range(TOP) for path in files_on(floor)}  # fmt: skip
    sources = {module: (ROOT / path).read_text() for module, path in paths.items()}

    def modules_of(name: str) -> set[str]:
        """The module of this name; if it is named only when the program runs, all that it may be."""
        if name == ANYTHING:
            return {one for one in paths if one.startswith("train_")}
        inside = {one for one in paths if one.startswith(f"{name}.") and "__main__" not in sources[one]}  # no programs
        return {name} & paths.keys() or inside

    return {
        module: {one for name in imports(path, sources[module]) for one in modules_of(name)} - {module}
        for module, path in paths.items()
    }


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
    paths = [str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)]
    return sorted(path for path in paths if floor_of(path) == floor)


def circle(of: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, if there are some."""
    try:
        TopologicalSorter(of).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def package_of(module: str) -> str:
    """device, kernels, or a folder of llmc/."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if first == "llmc" and rest else first


def packages(of: dict[str, set[str]]) -> dict[str, set[str]]:
    """What the modules of each package import of other packages."""
    found = {}
    for module, imported in of.items():
        if module.split(".")[0] in ("device", "kernels", "llmc"):
            own = package_of(module)
            found.setdefault(own, set()).update({package_of(one) for one in imported} - {own, "llmc"})
    return found


def test_no_import_points_up():
    paths = [path for floor in range(len(FLOORS)) for path in files_on(floor)]
    found = {path: wrong_imports(path, (ROOT / path).read_text()) for path in paths}
    assert {"generate.py", "kernels/gelu.py", "doc/book.py", "tests/test_floors.py"} <= found.keys()
    assert not any(found.values()), {path: modules for path, modules in found.items() if modules}


@pytest.mark.parametrize("path, source", [
    ("device/cpp/compiler.py", "from llmc.files.files import replacing"),
    ("device/cuda.py", "def f():\n    import kernels.adamw"),
    ("kernels/gelu.py", "import device\nfrom llmc import ranks"),
    ("llmc/model/model.py", "if TYPE_CHECKING:\n    from train_gpt2_fp32 import GPT2"),
    ("llmc/run/run.py", "from oracle import assert_close"), ("train_llama3.py", "from train_qwen3 import Qwen3"),
    ("train_qwen3.py", "from dev.hf.family import Family"), ("generate.py", "import os, doc.book"),
    ("train_gpt2_fp32.py", "import train_gpt2"),
    ("llmc/files/files.py", "kinds = [import_module(path.stem) for path in paths]"),
    ("llmc/run/run.py", "importlib.import_module('dev.scripts')"),
])  # fmt: skip
def test_an_import_that_points_up_is_found(path, source):
    assert len(wrong_imports(path, source)) == 1


def test_neither_modules_nor_packages_import_one_another_in_a_circle():
    """Two folders may import each other without a circle of modules. But then neither can be read first."""
    assert {"device.cuda", "kernels.gelu", "llmc.model.model", "train_gpt2_fp32", "dev.scripts"} <= graph().keys()
    assert "dev.hf.llama3" in graph()["dev.hf.common"] and "train_llama3" in graph()["dev.scripts"]  # by import_module
    assert circle(graph()) == circle(packages(graph())) == []
    assert circle(graph() | {"kernels.gelu": {"train_gpt2_fp32"}})
    assert set(circle(packages(graph() | {"llmc.model.loss": {"llmc.files.files"}}))) == {"llmc.files", "llmc.model"}


def test_launchers_know_no_model_no_rank_and_no_setting():
    found = {path.name: knows_too_much(path.read_text()) for path in (ROOT / "kernels").glob("*.py")}
    assert "gelu.py" in found and not any(found.values()), {name: words for name, words in found.items() if words}
    assert knows_too_much('def f(model, rank): """As settings say: config."""') == ["model", "rank", "settings"]
    assert knows_too_much("x = Model(ranks.size()) if args.tf32 else None") == ["Model", "args.tf32", "ranks"]


def test_no_line_of_cuda_or_cpp_is_longer_than_120_columns():
    folders = "kernels", "kernels/fp8", "device/cpp", "exercises", "exercises/solutions", "tests", "tests/cu"
    sources = [path for folder in folders for path in (ROOT / folder).iterdir()]
    paths = [path for path in sources if path.suffix in (".cu", ".cuh", ".h", ".cpp")]
    assert {"common.cuh", "runtime.cpp", "runtime.h", "warps.cu"} <= {path.name for path in paths}
    assert not [path for path in paths if max(map(len, path.read_text().splitlines())) > 120]


def test_a_module_of_the_floors_below_the_scripts_has_at_most_400_lines():
    sizes = {path: len((ROOT / path).read_text().splitlines()) for floor in range(3) for path in files_on(floor)}
    assert {"device/cuda.py", "kernels/gelu.py", "llmc/ranks/exchange.py"} <= sizes.keys()
    assert max(sizes.values()) <= 400, {path: lines for path, lines in sizes.items() if lines > 400}


def test_a_training_script_names_nothing_of_hugging_face():
    """But for the remedy where there is no model file: the program that imports one."""
    for path in files_on(FLOORS.index("train_*")):
        lines = [line for line in (ROOT / path).read_text().splitlines() if re.search(r"(?i)hugging|\bhf\b", line)]
        assert all(line.startswith("    FETCH = ") for line in lines), (path, lines)


def test_no_launcher_takes_more_than_eight_arrays_by_position():
    """Which of nine is which, nobody sees: biases, scratch and what is optional are named. Arrays have no type."""
    counts = {
        node.name: sum(argument.annotation is None for argument in node.args.args)
        for path in (ROOT / "kernels").glob("*.py") for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }  # fmt: skip
    assert counts["layernorm_backward"] == 6
    assert max(counts.values()) <= 8, {name: count for name, count in counts.items() if count > 8}
