"""How the user, or a scheduler, stops a run: with a signal."""

import os
import signal
import time

from llmc.ranks import ranks


class StopRequest:
    """Ctrl-C, SIGTERM and SIGHUP ask a run to stop. It stops after the present step, batch or token. A second request
    stops it at once. But a terminal that is closed may send SIGHUP twice, and this is one request. Under nohup SIGHUP
    is no request. A scheduler and the process that started the ranks may both send a signal to a rank: signals within a
    second are one request, too.

    number: the signal's number, once there is a request. failure: why data could not be read, which stops a run, too.
    stopped_before: the step before which the run has stopped.
    """

    def __init__(self, several: bool = False):
        self.number, self.several, self.received = None, several, None
        self.stopped_before: int | None = None
        self.failure = ""
        asking = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asking.append(signal.SIGHUP)
        self.before = {number: signal.signal(number, self.receive) for number in asking}

    def release(self) -> None:
        """Gives the signals back to those that handled them before the run."""
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def name(self) -> str:
        """What stopped the run."""
        return "data that cannot be read" if self.failure else signal.Signals(self.number).name

    def requested(self) -> bool:
        """Whether this rank has received a signal."""
        return self.number is not None

    def requested_on_any_rank(self, failure: str) -> bool:
        """Whether any rank has received a signal, or could not read its data. All ranks must call it alike. failure:
        why this rank could not read its data; empty if it could."""
        reasons = ranks.all_gather(failure or self.number)
        r, reason = next(((r, reason) for r, reason in enumerate(reasons) if reason), (0, None))
        if reason is None:  # a signal that comes now counts next time
            return False
        if isinstance(reason, str):
            self.failure = f"rank {r} on {ranks.hosts()[r]}: {reason}" if ranks.size() > 1 else reason
        else:
            self.number = reason
        return True

    def receive(self, number, frame) -> None:
        """Handles a signal."""
        if self.received is not None:  # only with several ranks
            if time.monotonic() - self.received > 1 and number != signal.SIGHUP:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.number, self.received = number, time.monotonic()
        for each in self.before if not self.several else []:
            again = each == number == signal.SIGHUP
            signal.signal(each, signal.SIG_IGN if again else signal.SIG_DFL)
