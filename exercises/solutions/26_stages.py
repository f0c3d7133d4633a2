"""Exercise 26: a ring of stages.

A block makes `tiles` tiles of c, one after another, and each needs `steps` pairs of tiles of a and b. One thread, the
producer, asks for the pairs. Two warpgroups, the consumers, multiply them. Between them lies a ring of stages. They
never meet at a barrier for all: a stage has two mbarriers, "full" and "empty".

Both are generators here. They yield instructions, one at a time, and the check runs them in many orders. Pairs have
numbers from 0 on, without a break between the tiles. Phases of an mbarrier count from 0, too, and an instruction names
a phase by its parity, 0 or 1. Phase 0 has not ended yet at first, so the phase before it, of parity 1, has.
"""

from collections.abc import Iterator


def producer(tiles: int, steps: int, stages: int) -> Iterator[tuple]:
    """("wait", "empty", stage, parity)   goes on when this phase has ended: when both consumers have arrived
    ("copy", stage)                    starts to copy the next pair; full[stage] ends its phase when it has come
    """
    for i in range(tiles * steps):
        yield "wait", "empty", i % stages, 1 - i // stages % 2
        yield "copy", i % stages


def consumer(tiles: int, steps: int, stages: int) -> Iterator[tuple]:
    """("wait", "full", stage, parity)    goes on when this phase has ended
    ("start", stage)                   starts to add the product of this pair to the sums, and goes on
    ("finish", pending)                goes on when all products but the last `pending` are done
    ("arrive", stage)                  arrives at empty[stage]: this consumer reads the stage no more
    ("store",)                         stores the sums of a tile, all of whose products are done; the next one begins

    Two products are to be under way at a time, within a tile, so that the tensor cores need not wait.
    """
    for i in range(tiles * steps):
        yield "wait", "full", i % stages, i // stages % 2
        yield "start", i % stages
        if i % steps > 0:
            yield "finish", 1
            yield "arrive", (i - 1) % stages
        if i % steps == steps - 1:
            yield "finish", 0
            yield "arrive", i % stages
            yield ("store",)
