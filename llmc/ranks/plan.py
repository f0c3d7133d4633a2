"""What ranks exchange together, and beside which launches of a step.

A recorded step's launches (device/recording.py) say which memory they read and write. So a plan knows no tensor by its
name: a gradient is complete after the last launch that writes it, and a parameter must have arrived before the first
launch that reads it.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import device
from device import Launch
from llmc.model.model import Model
from llmc.model.ranges import Range, length, parameter_ranges, parts_in, without

MIN_BUCKET = 1 << 22  # numbers: fewer are not worth an exchange of their own


class Bucket(NamedTuple):
    """Ranges of the flat buffers that are exchanged together: after the launches `after`, and before the launch
    `before`, if one needs them."""

    ranges: list[Range]
    after: tuple[int, ...]
    before: int | None = None


class StepPlan:
    """What an Exchange learns from a step's launches.

    first_params     the parameters that forward reads first, and all short ones: ranks get them at the end of the
                     update. ("Head" would be the classifier.)
    gather_buckets   the other parameters, in the order in which forward reads them
    sum_buckets      the gradients, in the order in which they are complete
    tail_grads       the gradients that are complete only at backward's end
    """

    def __init__(self):
        self.first_params: list[Range] = []
        self.gather_buckets: list[Bucket] = []
        self.sum_buckets: list[Bucket] = []
        self.tail_grads: list[Range] = []

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(vars(self)).encode()).hexdigest()[:16]

    def learn_gathers(self, model: Model, launches: list[Launch], embedding: list[Range], sparse: bool) -> None:
        """Learns which parameters a step's launches read first. sparse: the rows of the embedding that the encoder
        needs are gathered before it, so the next reader is the first that needs the whole embedding."""
        vectors = without(model.added_to, embedding)
        reads = [parts_in(model.params_memory, launch.reads) for launch in launches]
        readers = {one: [i for i, parts in enumerate(reads) if device.touch([one], parts)]
                   for one in parameter_ranges(model.config)}  # fmt: skip
        encoder = next(readers[one][0] for one in embedding)
        if sparse:
            readers |= {one: readers[one][1:] for one in embedding}
        first, self.gather_buckets, begun = [], [], 0
        for one in sorted(readers, key=lambda one: (readers[one] or [len(launches)], one)):
            matrices = without([one], vectors)
            if not matrices:
                continue
            if begun < MIN_BUCKET and not (sparse and one in embedding):
                first += matrices
                begun += 0 if one in embedding else one[1] - one[0]
            elif self.gather_buckets and length(self.gather_buckets[-1].ranges) < MIN_BUCKET and readers[one]:
                self.gather_buckets[-1].ranges.extend(matrices)
            else:
                self.gather_buckets.append(Bucket(matrices, (encoder,), next(iter(readers[one]), None)))
        self.first_params = first + vectors

    def learn_sums(self, model: Model, launches: list[Launch], sparse_embedding: list[Range]) -> None:
        """Learns when gradients are complete. sparse_embedding: the embedding, if ranks exchange its rows of the last
        batch by themselves, at the end; else nothing."""
        vectors = without(model.added_to, sparse_embedding)
        writes = [parts_in(model.grads_memory, launch.writes) for launch in launches]
        # After the last product for an activation's gradient, no backward is left that a sum could run beside.
        end = max((i for i, launch in enumerate(launches) if launch.is_product and not writes[i]), default=-1)
        complete = []
        for one in parameter_ranges(model.config):
            writers = [i for i, parts in enumerate(writes) if device.touch([one], parts)]
            matrices = without([one], vectors)
            is_zero = bool(writers) and all(launches[i].is_memset for i in writers)
            if matrices and not is_zero:
                complete.append((max(writers, default=-1), matrices))
        self.sum_buckets, ranges, after = [], [], []
        for writer, matrices in sorted(complete):
            needs = [writer] if writer >= 0 else []
            if matrices == sparse_embedding:  # a bucket of its own, of any length
                self.sum_buckets.append(Bucket(matrices, tuple(needs)))
                continue
            ranges += matrices
            after += needs
            if writer < end and length(ranges) >= MIN_BUCKET:
                self.sum_buckets.append(Bucket(ranges, tuple(after)))
                ranges, after = [], []
        self.tail_grads = ranges + without(vectors, ranges) + without(sparse_embedding, ranges)


def first_touches(model: Model, launches: list[Launch]) -> list[tuple[Range, int]]:
    """Each parameter with the first launch that reads it, or that reads or writes its gradient, in the order of these
    launches. len(launches): there is none."""
    params, grads = model.params_memory, model.grads_memory
    touched = [parts_in(params, one.reads) + parts_in(grads, one.reads + one.writes) for one in launches]
    first = {one: next((i for i, parts in enumerate(touched) if device.touch([one], parts)), len(launches))
             for one in parameter_ranges(model.config)}  # fmt: skip
    return sorted(first.items(), key=lambda item: (item[1], item[0]))
