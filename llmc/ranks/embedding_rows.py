"""The rows of the embedding that a batch reads and changes.

The embedding, a third of GPT-2 124M's bytes, is read first, and its gradient is complete last. A step would have to
wait for all of it. Instead, ranks with peer access exchange only these rows. llmc/model/batch.py's embedding_forward
and embedding_backward say where.
"""

from __future__ import annotations

from typing import Any

import device
from kernels.encoder import add_sparse, encoder_backward_sparse
from llmc.model.batch import Batch
from llmc.model.model import Model
from llmc.model.ranges import Range, range_in
from llmc.ranks import ranks


class EmbeddingRows:
    """A batch's rows of the embedding, on several ranks.

    transport       brings rows from other ranks (collective_transport.py or peer_transport.py)
    embedding       the range of the embedding in the flat buffers, once a batch has read it
    needs_gather    whether the batch's rows of the embedding must still come from other ranks
    deferred        whether this batch leaves its rows of the embedding's gradient to `add`
    """

    def __init__(self, model: Model, batch: Batch, transport: Any):
        self.model, self.batch, self.transport = model, batch, transport
        self.embedding: list[Range] = []
        self.needs_gather = self.deferred = False

    def gather(self, wte, C: int) -> None:
        """Before forward: if that is needed, copies the rows of wte (Vp,C) that the batch reads from the ranks that
        have updated them."""
        self.embedding = [range_in(wte, self.model.params_memory)]
        if self.needs_gather:
            self.transport.wait_for_ranks()
            self.transport.gather_rows(self.batch, self.embedding[0][0], C)
            device.wait_comm()
            self.transport.share_overflow()

    def keep(self, dwpe, dout, C: int) -> None:
        """encoder_backward, if the rows are `deferred`: it sets this rank's values and indices, and leaves dwte."""
        values, indices = self.transport.sparse_gradients[ranks.rank()]
        batch = self.batch
        encoder_backward_sparse(values, indices, dwpe, dout, *batch.sorted_inputs, batch.B, batch.T, C)

    def add(self) -> None:
        """Adds the rows that all ranks have kept to the gradient of the embedding, in the order of the ranks."""
        ((start, end),), C = self.embedding, self.model.config.channels
        for values, indices in self.transport.sparse_gradients:
            add_sparse(self.model.grads_memory[start:end], values, indices, self.batch.B * self.batch.T, C)
