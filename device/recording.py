"""Reads from a step's launches which of them may run at the same time, and which must wait for others.

`record(work)` notes at the first call which bytes each launch of `work` reads and writes. Two rules follow from that.

1. A launch that writes nothing but parameters' gradients runs on the side stream: a matrix product, or the second stage
   of a sum. So does a launch whose output only the side stream reads. The next layer's backward pass needs neither. The
   main stream runs the rest. At backward's end it also keeps what is no product, because it has nothing else to do. And
   it keeps memsets: a hook that updates a parameter comes before its gradient's memset, and the main stream must have
   waited for the hook when it reads the parameter.
2. Two launches conflict if one writes what the other reads or writes. Before a launch, the main stream waits for the
   last launch of the side stream that conflicts with it. The side stream waits for all that the main stream has been
   given so far, also without a conflict. When it waited for conflicts alone, an H200 took 2% less for GPT-2 124M, but
   3% more for SmolLM2. A wait that an earlier one implies is left out.

From the second call on, a device replays the launches in that order. A GPU replays them as a CUDA graph, with one call
of the host. A hook is work that another part of the program wants done beside a step, such as the exchange of
gradients. It says after which launches it may begin, and before which launch it must be done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from device import current
from device.observing import READS, SETS, UPDATES, accesses, observe

Range = tuple[int, int]  # addresses of bytes: start, end


@dataclass
class Launch:
    """A kernel launch, product, memset or copy. reads: the bytes that it reads. sets: those that it overwrites without
    reading them. updates: those that it may read and write. name: the kernel's, or one of the device's own operations
    (observing.py: OPERATIONS)."""

    name: str
    reads: list[Range] = field(default_factory=list)
    sets: list[Range] = field(default_factory=list)
    updates: list[Range] = field(default_factory=list)

    @property
    def is_product(self) -> bool:
        return self.name == "gemm"

    @property
    def is_memset(self) -> bool:
        return self.name == "fill_zero"

    @property
    def needs(self) -> list[Range]:
        return self.reads + self.updates

    @property
    def writes(self) -> list[Range]:
        return self.sets + self.updates

    def conflicts(self, other: Launch) -> bool:
        """Whether one of the two writes what the other reads or writes."""
        return touch(self.writes, other.writes + other.reads) or touch(self.reads, other.writes)


@dataclass(frozen=True)
class Hook:
    """Work for `on_comm_stream` that is done beside a recorded step, in the order in which hooks are listed.

    It begins after the launches `after`, given by their numbers; if there are none, at the beginning. If `before` is
    given, this launch waits for it. If it is urgent, its kernels come before the step's."""

    work: Callable[[int], None]
    after: tuple[int, ...] = ()
    before: int | None = None
    urgent: bool = True


def touch(some: Iterable[Range], others: list[Range]) -> bool:
    """Whether two lists of ranges have a byte in common."""
    return any(a < d and c < b for a, b in some for c, d in others)


def range_of(array: Any) -> Range:
    """The addresses of a device array's bytes."""
    start = current.device.address(array)
    return start, start + array.nbytes


def noted(name: str, arguments: dict[str, Any]) -> Launch:
    """The Launch for the name and arguments that an observer sees."""
    ranges: dict[str, list[Range]] = {READS: [], SETS: [], UPDATES: []}
    for parameter, access in accesses(name, arguments).items():
        ranges[access].append(range_of(arguments[parameter]))
    return Launch(name, ranges[READS], ranges[SETS], ranges[UPDATES])


def choose_streams(launches: list[Launch], gradients: list[Range]) -> list[bool]:
    """Rule 1: for each launch, whether it runs on the side stream. gradients: addresses of parameters' gradients."""
    side, is_end = [False] * len(launches), True  # is_end: from here on only gradients are computed
    for i in reversed(range(len(launches))):
        writes = launches[i].writes
        if all(touch([one], gradients) for one in writes):
            side[i] = launches[i].is_product or not (is_end or launches[i].is_memset)
        else:
            side[i] = all(only_side_reads(one, i, launches, side, gradients) for one in writes)
            is_end = is_end and side[i]
    return side


def only_side_reads(one: Range, i: int, launches: list[Launch], side: list[bool], gradients: list[Range]) -> bool:
    """Whether every launch that reads what launch i writes to a range, before the range is overwritten, runs on the
    side stream, and there is one. False for a gradient: AdamW's update, which is not recorded, reads it later."""
    if touch([one], gradients):
        return False
    found = False
    for j in range(i + 1, len(launches)):
        if touch([one], launches[j].needs):
            if not side[j]:
                return False
            found = True
        elif any(start <= one[0] and one[1] <= end for start, end in launches[j].sets):
            break
    return found


def waits(launches: list[Launch], side: list[bool]) -> list[int | None]:
    """Rule 2: for each launch, the launch of the other stream for which its stream waits first; None: it does not
    wait."""
    found: list[int | None] = []
    reached = {False: -1, True: -1}  # by stream: the last launch of the other one that it has waited for
    for i, launch in enumerate(launches):
        others = (j for j in range(i - 1, reached[side[i]], -1) if side[j] != side[i])
        wanted = next((j for j in others if side[i] or launch.conflicts(launches[j])), None)
        if wanted is not None:
            reached[side[i]] = wanted
        found.append(wanted)
    return found


class Plan:
    """Decides how a noted step is given to the device's streams."""

    def __init__(self, launches: list[Launch], gradients: list[Range], hooks: list[Hook]):
        self.launches = launches
        self.side = choose_streams(launches, gradients)
        self.waits = waits(launches, self.side)
        self.hooks = hooks
        self.marked = {j for j in self.waits if j is not None} | {j for one in hooks for j in one.after}
        # Hooks keep their order. Each begins after the latest launch that it, or a hook before it, needs.
        self.begins, self.needed, latest = defaultdict(list), defaultdict(list), -1
        for number, one in enumerate(hooks):
            latest = max((latest, *one.after))
            self.begins[latest].append(number)
            if one.before is not None:
                self.needed[one.before].append(number)

    def follow(self, device: Any, work: Callable[[], None]) -> None:
        """Does `work`, and gives its launches, the same as the plan's, to the streams that the plan names."""
        marks: dict[int, Any] = {}
        done: dict[int, Any] = {}
        count = 0

        def begin(launch: int) -> None:
            for number in self.begins[launch]:
                one = self.hooks[number]
                device.on_comm_stream(one.work, one.urgent, after=[marks[j] for j in one.after])
                done[number] = device.mark_comm()

        def give(name: str, arguments: dict, launch: Callable[[], None]) -> None:
            nonlocal count
            if device.in_comm_work:  # a hook launches it
                launch()
                return
            i, count = count, count + 1
            if i >= len(self.launches) or name != self.launches[i].name:
                raise RuntimeError(f"a recorded step has launched {name} where it had not before")
            stream = device.side_stream if self.side[i] else device.main_stream
            for number in self.needed[i]:
                device.wait(stream, done[number])
            if self.waits[i] is not None:
                device.wait(stream, marks[self.waits[i]])
            with device.on(stream):
                launch()
            if i in self.marked:
                marks[i] = device.mark(stream)
            begin(i)

        begin(-1)
        with observe(give):
            work()


class Recording:
    """What `record` returns. Call it like `work`."""

    def __init__(
        self, device: Any, work: Callable[..., None], gradients: list[Any],
        hooks: Callable[[tuple, list[Launch]], list[Hook]],
    ):  # fmt: skip
        self.device, self.work, self.gradients, self.hooks = device, work, gradients, hooks
        self.replays = device.recording
        self.plans: dict[tuple, Plan] = {}
        self.graphs: dict[tuple, Any] = {}

    def follows_plan(self, *arguments: object) -> bool:
        """Whether the next call with these arguments does the hooks' work, too. The first call does not, because it
        notes the launches. If recording was turned off when this was made, none does."""
        return self.replays and arguments in self.plans

    def __call__(self, *arguments: object) -> None:
        if arguments not in self.plans:
            self.plans[arguments] = self.note(arguments)
        elif not self.replays or not self.device.has_streams and not self.plans[arguments].hooks:
            self.work(*arguments)
        else:
            if arguments not in self.graphs:
                plan = self.plans[arguments]
                self.graphs[arguments] = self.device.capture(
                    lambda: plan.follow(self.device, lambda: self.work(*arguments))
                )
            self.graphs[arguments].launch(self.device.main_stream)

    def note(self, arguments: tuple) -> Plan:
        """Does the work in program order, and makes a plan from its launches."""
        launches: list[Launch] = []

        def observer(name: str, given: dict, launch: Callable[[], None]) -> None:
            if not self.device.in_comm_work:
                launches.append(noted(name, given))
            launch()

        with observe(observer):
            self.work(*arguments)
        ranges = [range_of(array) for array in self.gradients]
        return Plan(launches, ranges, self.hooks(arguments, launches))
