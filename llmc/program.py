"""How a program of this repository ends: with one line where something is wrong, never with a traceback."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from llmc import ranks
from llmc.errors import UserError, first_line

last_checkpoint = None  # of the run that this program is, set by who saves it


def run_program(
    main: Callable[[], None],
    out_of_memory: str = "lower -b or -t",
    interrupted: str = "interrupted",
    interrupted_code: int = 130,
) -> None:
    """Runs `main`, and turns what the user must mend into one line on stderr and exit status 1.

    out_of_memory: the remedy to name; interrupted: what to say after Ctrl-C, and the exit status then. A reader of the
    output who leaves (`| head`) is no error. A GPU that fails is said in one line too, with the last checkpoint.
    """
    if sys.stdout is None:  # closed by who started the program
        sys.stdout = open(os.devnull, "w")
    sys.stdout.reconfigure(errors="replace")  # texts may have characters that the terminal lacks
    try:
        main()
    except UserError as error:
        fail(str(error))
    except MemoryError as error:
        fail(f"out of memory ({first_line(error)}): {out_of_memory}{resume_advice()}")
    except KeyboardInterrupt:
        ranks.fail(interrupted, interrupted_code)
        print(interrupted, file=sys.stderr)
        sys.exit(interrupted_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ranks.fail("", 0)
    except Exception as error:
        ranks.give_way()
        if not type(error).__module__.startswith(("cupy.", "cupy_backends.")):
            if ranks.size() > 1:
                traceback.print_exc()
                ranks.fail(f"a fault of this program ({type(error).__name__})")
            raise
        if type(error).__name__ in ("CompileException", "NVRTCError"):
            remedy = "CuPy and its CUDA do not fit together; reinstall cupy-cuda12x[ctk] or cupy-cuda13x[ctk]"
        else:
            remedy = "dmesg may name an Xid; nvidia-smi says whether the GPU still answers"
        fail(f"the GPU failed ({first_line(error)}): {remedy}{resume_advice()}")


def fail(text: str) -> NoReturn:
    """Ends this program, and where it is one of several ranks the others too, with one line."""
    ranks.fail(text)
    sys.exit(f"error: {text}")


def resume_advice() -> str:
    return f"; the run goes on from {last_checkpoint} with -y 1" if last_checkpoint else ""
