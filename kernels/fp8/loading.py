"""Which launchers of this folder a run imports."""

import sys
from importlib import import_module
from pathlib import Path


def load_layers() -> None:
    """Imports the launchers for quantized matrices of all layers that have been imported. So a run compiles no
    others."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if f"kernels.{path.stem}" in sys.modules:
            import_module(f"kernels.fp8.{path.stem}")
