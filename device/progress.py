"""How far this process is with compiling kernels, or with something else. If that takes long, a line on stderr says so,
and more follow. LLMC_QUIET=1 leaves them out."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE, INTERVAL = 5, 10  # seconds until the first line, and from one line to the next


def quiet() -> bool:
    return os.environ.get("LLMC_QUIET", "0") not in ("", "0")


@contextmanager
def telling(how_far: Callable[[], str]) -> Iterator[None]:
    """Within it work runs that may take long. how_far: the text of a line, without the seconds."""
    over, begun = threading.Event(), time.monotonic()

    def tell() -> None:
        patience = PATIENCE
        while not over.wait(patience):
            print(f"{how_far()} after {time.monotonic() - begun:.0f} s", file=sys.stderr)
            patience = INTERVAL

    if not quiet():
        threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Progress:
    def __init__(self):
        self.lock = threading.Lock()
        self.ready, self.running, self.expected = 0, 0, 0  # files; it is not always known how many to expect
        self.spent, self.next = 0.0, PATIENCE  # seconds of compilation before this one, and at the next line

    def expect(self, count: int) -> None:
        """So many files will be compiled."""
        with self.lock:
            self.expected = self.ready + count

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Within it a file is compiled, or found in a cache. Several threads may do this at the same time."""
        with self.lock:
            self.running += 1
            if self.running == 1:
                self.begun, self.over = time.monotonic() - self.spent, threading.Event()
                if not quiet():
                    threading.Thread(target=self._tell, args=(self.over, self.begun), daemon=True).start()
        try:
            yield
        finally:
            with self.lock:
                self.ready += 1
                self.running -= 1
                if not self.running:
                    self.over.set()
                    self.spent = time.monotonic() - self.begun

    def _tell(self, over: threading.Event, begun: float) -> None:
        while not over.wait(max(0.0, begun + self.next - time.monotonic())):
            seconds = time.monotonic() - begun
            of = f" of {self.expected}" if self.expected > self.ready else ""
            print(f"compiling kernels: {self.ready}{of} files are ready after {seconds:.0f} s", file=sys.stderr)
            self.next = seconds + INTERVAL


progress = Progress()
