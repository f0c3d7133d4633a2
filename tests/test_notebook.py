"""The notebook, from top to bottom on the CPU, as a reader runs it in a clone. It needs no network then."""

import re
import shutil
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "llm.cupy.ipynb"


def text_of(cell) -> str:
    """What a cell has printed."""
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_trains_writes_and_races_a_kernel(tmp_path, monkeypatch):
    """In a copy of the repository. IPython goes on after a command that fails; here each must succeed."""
    pytest.importorskip("ipykernel")
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "*.part")
    for folder in "dev", "device", "doc", "kernels", "llmc", "notebooks":
        shutil.copytree(ROOT / folder, clone / folder, ignore=ignored)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, clone)
    kernels = (clone / "doc" / "ladder" / "layernorm_forward.cu").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in "IPYTHONDIR", "JUPYTER_RUNTIME_DIR":
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    checked = r"\g<0>\n\g<1>assert _exit_code == 0, _exit_code"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None
            cell.source = re.sub(r"^( *)(?:\w+ = )?!.*", checked, cell.source, flags=re.M)
    resources = {"metadata": {"path": str(clone / "notebooks")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    start, training, plot, sample, before, after, race = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert text_of(start) == "training on the CPU\n"
    losses = [float(loss) for loss in re.findall(r"^val loss ([\d.]+)", text_of(training), re.M)]
    assert len(losses) == 5 and losses[-1] < losses[0] - 2
    assert "\nThe for statement" in text_of(sample).replace("\r", "")
    assert all("image/png" in str(cell.outputs) for cell in (plot, race))
    first = r"One thread per row\].* ([\d.]+)$"  # its bytes
    assert float(re.search(first, text_of(after), re.M)[1]) < 0.8 * float(re.search(first, text_of(before), re.M)[1])
    assert (clone / "doc" / "ladder" / "layernorm_forward.cu").read_text() == kernels
