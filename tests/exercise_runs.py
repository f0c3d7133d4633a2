"""What tests/test_exercises.py asks of the checks: JSON from stdin, [[number, file], ...], and the fault and the remark
of each to stdout. A process of its own: a faulty kernel may write anywhere in its process, and the microscope's runtime
is another one."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from device import cpp  # noqa: E402
from exercises.checks import prepare, run_check  # noqa: E402
from exercises.cut import EXERCISES  # noqa: E402


def main() -> None:
    runs = [(EXERCISES[number - 1], Path(file)) for number, file in json.load(sys.stdin)]
    prepare(runs[0][0])  # with the microscope, or without, as all of them
    cpp.compile_all([file for _, file in runs if file.suffix == ".cu"])  # on all cores
    json.dump([run_check(exercise, file) for exercise, file in runs], sys.stdout)


if __name__ == "__main__":
    main()
