"""With `--offload`, most of AdamW's updates run beside the next step's forward pass, as hooks (device/recording.py):
while forward computes, AdamW's state passes through the GPU (llmc/model/offload.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from device import Hook, Launch
from llmc.model.adamw import AdamW
from llmc.model.model import Model
from llmc.model.offload import Piece
from llmc.model.ranges import Range
from llmc.ranks.collective_transport import CollectiveTransport
from llmc.ranks.peer_transport import PeerTransport
from llmc.ranks.plan import Bucket, first_touches


def update_hooks(model: Model, adamw: AdamW, launches: list[Launch]) -> list[Hook]:
    """The updates of all parameters. Each comes before the first launch that reads one of its parameters, or that reads
    or writes one of their gradients."""
    order = first_touches(model, launches)
    pieces = adamw.pieces(model, [one for one, _ in order])

    def before(piece: Piece) -> int | None:
        """The first launch that needs a piece: it needs the first part, because the ranges are in that order."""
        launch = next(launch for (start, end), launch in order if start <= piece[0].start < end)
        return launch if launch < len(launches) else None

    return [
        Hook(lambda _, i=i, piece=piece: adamw.pass_piece(model, piece, i, len(pieces)), before=before(piece))
        for i, piece in enumerate(pieces)
    ]


def update_and_gather_hooks(
    model: Model, adamw: AdamW, transport: CollectiveTransport | PeerTransport, buckets: list[Bucket],
    embedding: list[Range],
) -> list[Hook]:  # fmt: skip
    """With -z: for each bucket of parameters, the update of this rank's part, and then the rest, which comes from the
    ranks that have updated it. The embedding is up to date, because the step begins with rows of it from all ranks."""
    pieces = [adamw.pieces(model, [one for one in bucket.ranges if one not in embedding]) for bucket in buckets]
    numbers, total = count(), sum(map(len, pieces))

    def work_on(bucket: Bucket, own: list[tuple[int, Piece]]) -> Callable[[int], None]:
        def work(_) -> None:
            for number, piece in own:
                adamw.pass_piece(model, piece, number, total)
            transport.meet()
            transport.gather("params", bucket.ranges)

        return work

    numbered = [[(next(numbers), piece) for piece in own] for own in pieces]
    return [
        Hook(work_on(bucket, own), bucket.after, bucket.before) for bucket, own in zip(buckets, numbered, strict=True)
    ]
