# SPDX-License-Identifier: Apache-2.0
"""SplitLoRA: split fine-tuning in which only low-rank adapters train, on either side of the cut.

Lin, Hu, Zhang, Chen, Fang, Chen, Li, Vepakomma, Gao, "SplitLoRA: A Split Parameter-Efficient Fine-Tuning
Framework for Large Language Models", arXiv 2407.00952, and its reference script. The frozen backbone is
cut; clients train the adapters below, the server those above. In each step the clients are served in turn,
always in the same order, by one server model that takes a step after each of them. Every I steps the
clients' adapters are averaged.

Symbols: R_c the client's adapters, R_s the server's, s ``z`` (smashed data), ds ``feedback``, I ``steps``,
d_c = d_zo the trainables of R_c.

Deviations: the server's optimizer persists, as the reference's; the clients' are new in each round, where
the reference keeps them (its three clients take part in every round; ours come and go, and what a client
forgets must not change the run). No schedule, dropout or label smoothing. A client runs its bottom again
for the backward pass, one forward more, so that no graph waits for a message. A lost client is left out of
the average; steps the server took on its batches stay, unless the round is void. The matrices A and B are
averaged apart, as in the reference, and the mean of the products B A is not the product of the means: an
error of aggregation which all methods here share that average adapters. The model decides what is trained:
give it adapters (the layout's trainables), since this file is the same for any others.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from hofl.algorithms.splitfed import ACTIONS, exchange
from hofl.core.layout import Layout
from hofl.core.record import Record
from hofl.protocol import aggregate, learner
from hofl.protocol.aggregate import Training
from hofl.protocol.base import SERVER, Algorithm, Call, Entry, Outcome, RoundVoid
from hofl.protocol.learner import Learner
from hofl.protocol.split import Split


def splitlora(layout: Layout, boundaries: Sequence[int], training: Training, split: Split) -> Algorithm:
    """SplitLoRA over the adapters of ``layout``; ``boundaries`` are all the same cut."""

    def play(state: Record, cohort: Sequence[int], call: Call) -> Outcome:
        """I steps and one aggregation, the server's half."""
        failures: dict[int, str] = {}
        cut, d_c = boundaries[0], layout.bottom_size(boundaries[0])
        plans = {i: learner.plan(state, i, training, layout, cut, split.wire) for i in cohort}
        # 1. R_c to all; the server goes on with R_s and its moments
        top = learner.restored(state, split.top(cut, training.batch), training.optimizer, d_c)

        def turns(e: int, clients: Sequence[int]) -> Iterable[tuple[int, Learner]]:
            """The same order in every step."""
            return [(i, top) for i in sorted(clients)]

        # 2. in each of I steps: clients run forward to s; the server, for one after another, runs forward and
        #    backward and steps R_s; ds down; clients run backward and step R_c.  3. R_c comes back
        entries = exchange(call, plans, state.arrays["weights/vector"][:d_c], turns, failures)
        if len(entries) < training.quorum:
            raise RoundVoid(failures)
        # 4. R_c becomes the mean, A and B apart
        book = [learner.server_entry(top), *entries]
        row = learner.row(aggregate.loss_row(entries), cut, cohort)
        return Outcome(rebuild(state, book), tuple(book), row, failures)

    def rebuild(state: Record, entries: Sequence[Entry]) -> Record:
        """The round again from its entries."""
        clients = [e for e in entries if e.client != SERVER]
        d_c = layout.bottom_size(clients[0].plan.values["boundary"])
        bottom = learner.averaged(state.arrays["weights/vector"][:d_c], clients)
        return learner.advance(state, entries, bottom)

    return Algorithm(partial(learner.begin, training, layout, boundaries), play, rebuild, ACTIONS)
