"""What tests/test_exercises.py asks of the checks that need the microscope: JSON from stdin, [[number, file], ...], and
the fault and the remark of each to stdout. A process of its own, since the microscope's runtime is another one."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from exercises.checks import run_check  # noqa: E402
from exercises.cut import EXERCISES  # noqa: E402


def main() -> None:
    runs = json.load(sys.stdin)
    json.dump([run_check(EXERCISES[number - 1], Path(file)) for number, file in runs], sys.stdout)


if __name__ == "__main__":
    main()
