"""dev/test_aarch64.sh, which runs tests on an emulated aarch64: what it says where it cannot."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "dev" / "test_aarch64.sh"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_where_the_emulator_is_missing_one_line_says_what_to_install(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([tmp_path / "bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == (
        "error: qemu-aarch64-static is missing: on Debian or Ubuntu, "
        "apt-get install debootstrap debian-archive-keyring qemu-user-static\n"
    )
    assert not (tmp_path / ".cache").exists()
