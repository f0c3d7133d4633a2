"""How the programs end: one line for what the user must mend, whatever goes wrong before or beside their work."""

import ast
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from device import errors
from device.cuda import CudaDevice
from llmc.run.program import run_program

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "dev", "dev/data", "doc", "exercises")
    for path in (ROOT / folder).glob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


def run(*command: str | Path, folder: Path = ROOT, **env: str) -> tuple[int, str, str]:
    """A Python's exit code, and what it prints to stdout and to stderr."""
    done = subprocess.run([sys.executable, *command], cwd=folder, env=os.environ | env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_without_the_packages_is_one_line_that_names_what_has_them(program):
    code, out, error = run("-S", ROOT / program, "--help")  # -S: without site-packages
    assert (code, out) == (1, "")
    assert error.startswith("error: ") and " is missing: " in error and error.count("\n") == 1


def without_encoding(source: str) -> list[str]:
    """The calls that read or write text in the encoding of the locale."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name, keywords = ast.unparse(call.func), {word.arg for word in call.keywords}
        positional = {"read_text": 1, "write_text": 2}.get(name.rpartition(".")[2])
        modes = [*call.args[1:2], *(word.value for word in call.keywords if word.arg == "mode")]
        opens = name in ("open", "os.fdopen", "path.open") and not any("b" in ast.unparse(mode) for mode in modes)
        if positional and len(call.args) < positional or opens or keywords & {"text", "universal_newlines"}:
            found += [] if "encoding" in keywords else [ast.unparse(call)]
    return found


def test_no_program_reads_or_writes_text_in_the_encoding_of_the_locale():
    """In zh_CN.GBK, for example, our own files could not be read."""
    bad = "p.read_text(), p.write_text(t), open(p), open(p, 'x'), os.fdopen(1, mode='w'), run(c, text=True)"
    assert len(without_encoding(bad)) == 6
    folders = ("device/**", "kernels/**", "llmc/**", "dev/**", "doc/**", "exercises", ".")
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}/*.py")]
    found = {path.name: calls for path in paths if (calls := without_encoding(path.read_text("utf-8")))}
    assert len(paths) > 100 and not found


@pytest.mark.parametrize("program", [path for path in PROGRAMS if path.startswith(("train_", "generate"))])
def test_programs_find_their_modules_with_a_safe_path_and_print_in_ascii(program, tmp_path):
    env = {"PYTHONSAFEPATH": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, out, error = run(ROOT / program, "--help", folder=tmp_path, **env)
    assert (code, error) == (0, "") and "usage:" in out


COMPILES = """import device
from kernels import {}
from llmc.run.program import run_program
device.use("cpu")
run_program(device.compile_all)"""


def test_ctrl_c_ends_compilers_at_once_and_a_later_run_removes_what_a_killed_one_has_left(tmp_path):
    """The signal goes to Python alone, as from a scheduler."""
    env = {"LLMC_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILES.format("classifier, gelu, matmul")]
    for number, code, said in (signal.SIGINT, 130, b"interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, b""):
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stderr=subprocess.PIPE)
        while not (list(tmp_path.glob("runtime*.so")) and list(tmp_path.glob(".building-*"))):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.5)  # now kernels are compiled
        begun = time.monotonic()
        process.send_signal(number)
        process.wait()
        assert time.monotonic() - begun < 2
        assert (process.returncode, process.stderr.read()) == (code, said)
        assert bool(list(tmp_path.glob(".building-*"))) == (number == signal.SIGKILL)
    for _ in range(60):  # its compilers may still come to their end
        time.sleep(0.2)
        assert run("-c", COMPILES.format("reduce"), **env)[0] == 0
        if not list(tmp_path.glob(".building-*")):
            return
    pytest.fail("there are leftovers")


def test_ctrl_c_is_heard_at_once_while_nvrtc_compiles_even_if_another_thread_gets_the_signal():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    class Device(CudaDevice):
        def __init__(self):
            self.modules, self.floatX = {}, None

        def compiled(self, path: Path) -> bytes:
            time.sleep(0.1)  # until the main thread waits
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            time.sleep(3)  # NVRTC cannot be stopped

    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            Device().compile_all([Path("gelu.cu")])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - begun < 1


CTRL_C = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
AS_IN_NUMPY = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept: raise ImportError('numpy')\n"


@pytest.mark.parametrize("program, package", [*((each, CTRL_C) for each in PROGRAMS), ("generate.py", AS_IN_NUMPY)])
def test_ctrl_c_while_modules_are_imported_is_one_line(program, package, tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text(package)
    assert run(ROOT / program, "--help", PYTHONPATH=str(tmp_path)) == (-signal.SIGINT, "", "interrupted\n")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_python_that_is_too_old_is_one_line(program):
    """Here this Python says that it is 3.9. What that one reads must be in words that it knows."""
    too_old = "sys.version_info, sys.version = (3, 9, 18), '3.9.18 (main)'"
    code = f"import runpy, sys; {too_old}; runpy.run_path({program!r}, run_name='__main__')"
    said = f"error: llm.cupy needs Python 3.10 or later, and {sys.executable} is 3.9.18\n"
    assert run("-c", code) == (1, "", said)
    for path in program, "dev/bench/__main__.py", "device/__init__.py", "device/current.py", "device/errors.py":
        ast.parse((ROOT / path).read_text(), feature_version=(3, 9))


@pytest.mark.parametrize("package, requirements", [("tiktoken", "requirements.txt"), ("torch", "requirements-dev.txt")])
def test_a_missing_packages_remedy_is_the_environment_or_pip(package, requirements, tmp_path, monkeypatch, capsys):
    def said(name: str = package) -> str:
        errors.say_what_is_missing(ModuleNotFoundError, ModuleNotFoundError(f"No module named {name}", name=name), None)
        return capsys.readouterr().err

    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert said() == f"error: {package} is missing: pip install -r {requirements}\n"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    assert said().startswith(f"error: {package} is missing: run this with .venv/bin/python, ")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))  # of that Python itself
    assert said() == f"error: {package} is missing: pip install -r {requirements}\n"
    assert "ModuleNotFoundError: No module named x" in said("x")  # which is no package of ours


@pytest.mark.parametrize("buffering", [1, -1], ids=["each line written at once", "all written in the end"])
@pytest.mark.parametrize("code", [None, 0], ids=["returns", "exits with 0"])
def test_a_full_disk_under_the_output_is_one_line(buffering, code, monkeypatch):
    def main() -> None:
        print("text")
        if code is not None:
            sys.exit(code)

    with open("/dev/full", "w", buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match=r"^error: cannot print \(no space left on device\)$"):
            run_program(main)
        print("what Python writes when it ends", flush=True)  # goes nowhere now


@pytest.mark.parametrize("program, unbuffered", [("generate.py", "1"), ("dev/plot_log.py", "")])
def test_help_that_cannot_be_printed_is_one_line(program, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        command = [sys.executable, ROOT / program, "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: cannot print (no space left on device)\n")


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(monkeypatch):
    def main() -> None:
        with open("/dev/full", "w") as file:
            file.write("data")

    with pytest.raises(SystemExit, match="^error: no space left on device; no file that was there is lost"):
        run_program(main)


def test_an_error_of_the_working_directory_names_it():
    def main() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), ".")

    with pytest.raises(SystemExit) as end:
        run_program(main)
    assert str(end.value).startswith(f"error: {os.getcwd()}: stale file handle; ")
