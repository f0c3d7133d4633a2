"""How a program of this repository ends: with one line where something is wrong, never with a traceback."""

import os
import sys
from collections.abc import Callable

from llmc.errors import UserError


def run_program(
    main: Callable[[], None],
    out_of_memory: str = "lower -b or -t",
    interrupted: str = "interrupted",
    interrupted_code: int = 130,
) -> None:
    """Runs `main`, and turns what the user must mend into one line on stderr and exit status 1.

    out_of_memory: the remedy to name; interrupted: what to say after Ctrl-C, and the exit status then. A reader of the
    output who leaves (`| head`) is no error.
    """
    sys.stdout.reconfigure(errors="replace")  # texts may have characters that the terminal lacks
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except MemoryError as error:
        sys.exit(f"error: out of memory ({error}): {out_of_memory}")
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(interrupted_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
