"""Model scripts: found by being there, and each says of itself what the programs need to know."""

import ast
import re
import subprocess
import sys

from dev import scripts
from dev.scripts import ROOT, kind_of_magic, model_kinds, script_configs, small_model
from llmc.files import magic
from llmc.model.tensors import num_parameters
from train_gpt2_fp32 import GPT2Config

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Scripts elsewhere, that are the only ones."""
    monkeypatch.setattr(scripts, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_a_script_is_found_by_being_there_and_one_that_takes_its_model_from_another_adds_none(folder):
    (folder / "train_made_up.py").write_text("class Toy:\n    Config = object\n\ndef main(): pass\n")
    (folder / "train_made_up_2.py").write_text("from train_made_up import Toy, main\n")
    (folder / "other.py").write_text("raise SystemExit('no model script')")
    assert [kind.__name__ for kind in model_kinds.__wrapped__()] == ["Toy"]


def test_every_script_names_its_model_a_number_of_its_own_and_what_make_train_trains_on_a_gpu_and_on_a_cpu():
    paths = sorted(path.name for path in ROOT.glob("train_*.py") if "(Model):" in path.read_text())
    configs = [kind.Config for kind in model_kinds()]
    assert [config.SCRIPT for config in configs] == paths
    assert [kind_of_magic(config.MAGIC).Config for config in configs] == configs
    # llmc must not import the scripts. It reads in them what their classes say.
    assert magic.known_models() == {config.MAGIC: (config.NAME, config.SCRIPT) for config in configs}
    for config in configs:
        small, large = (num_parameters(config.described(name, 257)) for name in ("tiny", next(iter(config.PRESETS))))
        assert small < 2**20 < large
    # A script that takes its model from another one has its sizes.
    assert script_configs() == {config.SCRIPT: config for config in configs} | {"train_gpt2.py": GPT2Config}


@pytest.mark.parametrize("body", [
    'NAME, SCRIPT, MAGIC = "Toy", "train_toy.py", 7', 'NAME = "Toy"; MAGIC = 7', 'MAGIC: int = 0x7\n    NAME = "Toy"',
    'HEADER_BYTES, MAGIC, BF16_VERSION = 1024, 7, 5\n    NAME, TABLE = "Toy", (1, 2)', 'MAGIC, (NAME) = (7, "Toy")',
])  # fmt: skip
def test_a_models_number_and_name_may_be_written_in_any_way(tmp_path, monkeypatch, body):
    """A number that stands elsewhere in a script is no model's."""
    monkeypatch.setattr(magic, "ROOT", tmp_path)
    (tmp_path / "train_toy.py").write_text(f"SEED = MAGIC = 8\n\nclass ToyConfig(Config):\n    SIZE = 5\n    {body}\n")
    (tmp_path / "train_unfinished.py").write_text("class Config:\n    NAME, MAGIC = ")
    (tmp_path / "train_latin1.py").write_bytes(b'NAME = "\xe9"')
    assert magic.known_models.__wrapped__() == {7: ("Toy", "train_toy.py")}


def test_llmc_names_no_model():
    """Neither to ask which one it is, nor to find its files."""
    names, found = {kind.Config.NAME for kind in model_kinds()}, []
    for path in (ROOT / "llmc").rglob("*.py"):
        words = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found += [(path.name, word) for word in words if word in names]
    assert found == []


def test_the_sanitizer_runs_the_small_model_of_every_script():
    text = re.search(r'^SANITIZED = \$\$\(\$\(PY\) -c "(.*?)"\)$', (ROOT / "Makefile").read_text(), re.M | re.S)[1]
    command = [sys.executable, "-c", text.replace("\\\n\t", "")]
    words = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert words == [f"{kind.Config.SCRIPT}:{small_model(kind.Config)}" for kind in model_kinds()]


def test_gpt2_as_the_mainline_trains_it_is_in_bf16_unless_told_otherwise():
    run = subprocess.run([sys.executable, "train_gpt2.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert "weight alone (bf16)" in " ".join(run.stdout.split()) and "train_gpt2.py -i data/" in run.stdout
