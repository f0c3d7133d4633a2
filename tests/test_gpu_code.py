"""Kernel files become a GPU's code by NVRTC, and are kept. This needs no GPU."""

from types import SimpleNamespace

import device
from conftest import refusal
from device.cuda import older_capability
from device.errors import UserError
from device.nvrtc import architecture_for, check_cupys_cache, cupys_cache

import pytest

cuda = pytest.importorskip("cupy.cuda", reason="CuPy, which binds NVRTC, is not installed")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A CudaDevice with a compiler but without a GPU: an H100 in bf16. gpu.compiled_with: the options of each file that
    it really compiles."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    check_cupys_cache()
    gpu = object.__new__(device.CudaDevice)
    gpu.cupy, gpu.compiled_with = SimpleNamespace(cuda=cuda), []
    gpu.name, gpu.compute_capability, gpu.floatX = "NVIDIA H100", 90, device.BF16

    def compile_program(program, options, compile_program=cuda.nvrtc.compileProgram) -> None:
        gpu.compiled_with.append(options)
        compile_program(program, options)

    monkeypatch.setattr(cuda.nvrtc, "compileProgram", compile_program)
    return gpu


@pytest.mark.parametrize("line, architecture", [("", "sm_90"), ("#define ARCHITECTURE 90a", "sm_90a")])
def test_a_file_is_compiled_once_for_one_architecture_and_again_if_the_kept_code_is_damaged(
    line, architecture, gpu, tmp_path
):  # fmt: skip
    path = tmp_path / "one.cu"
    path.write_text(f'{line}\nextern "C" __global__ void one(float* x) {{ x[0] = 1; }}\n')
    code = gpu.compiled(path)
    assert code.startswith(b"\x7fELF") and gpu.compiled(path) == code
    (options,) = gpu.compiled_with
    assert [option for option in options if "arch" in option] == [f"-arch={architecture}"]
    check_cupys_cache()  # it is for us alone
    (kept,) = cupys_cache().iterdir()
    for damaged in kept.read_bytes()[:-1], bytes(kept.stat().st_size), b"":
        kept.write_bytes(damaged)
        assert gpu.compiled(path) == code
    assert len(gpu.compiled_with) == 4


def test_a_file_that_does_not_compile_is_shown_with_the_compilers_words(gpu, tmp_path):
    (tmp_path / "wrong.cu").write_text("extern int here")
    with pytest.raises(
        UserError, match=r"^NVRTC .* cannot compile .*wrong.cu; .*reinstall cupy-cuda\d+x\[ctk\]:\n"
    ) as it:
        gpu.compiled(tmp_path / "wrong.cu")
    assert 'error: expected a ";"' in str(it.value)
    assert not list(cupys_cache().iterdir())


# Of NVRTC: its version, and the compute capabilities that it compiles for. Then of a GPU, and what is compiled for it.
KNOWN = {
    (12, 6): (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90),
    (12, 8): (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 101, 120),
    (13, 0): (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121),
}
UPDATE = "pip install -U --upgrade-strategy eager 'cupy-cuda{}x[ctk]'"


def test_an_older_gpu_to_run_as_is_a_compute_capability_that_this_one_knows():
    assert older_capability("75", 90) == 75 and older_capability("90", 90) == 90
    for text in ("7.5", "abc", "-75", "120", "7"):
        said = refusal(older_capability, text, 90)
        assert said == f"LLMC_COMPUTE_CAPABILITY={text} is no number from 50 to 90, such as 75 for 7.5"


@pytest.mark.parametrize("version, capability, answer", [
    ((12, 6), 90, 90), ((12, 8), 120, 120), ((12, 8), 121, 120), ((12, 6), 88, 87), ((13, 0), 75, 75),
    ((12, 6), 120, UPDATE.format(12)), ((12, 6), 100, UPDATE.format(12)), ((13, 0), 70, UPDATE.format(12)),
    ((13, 0), 130, UPDATE.format(13)),
])  # fmt: skip
def test_a_compiler_that_does_not_know_the_gpu_is_named_with_the_remedy(version, capability, answer):
    nvrtc = SimpleNamespace(getVersion=lambda: version, getSupportedArchs=lambda: KNOWN[version])
    if isinstance(answer, int):
        assert architecture_for(nvrtc, capability, "GPU") == answer
        return
    said = refusal(architecture_for, nvrtc, capability, "NVIDIA X")
    version = ".".join(map(str, version))
    assert said == f"NVRTC {version} does not compile for NVIDIA X, of compute capability {capability / 10}: {answer}"
