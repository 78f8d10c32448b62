"""Decode steps of a few shapes, on buffers that never move, so that a GPU can replay them as CUDA graphs.

Each version's rows are padded to a bucket. Tokens are drawn on the device and are the next step's
inputs there, so that step can begin before the host knows them; what the host does then costs no time.
On a CPU steps are called instead of replayed, and all else is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dora.engine.device_sampler import DeviceRules, draw, rules_for
from dora.engine.runner import Runner
from dora.engine.sampler import RULE, Drawn, Int64s, Rules
from dora.engine.workspace import MAX_PADDING, Batch, Workspace


def bucket_for(num_rows: int) -> int:
    """Rows that a version's part of a batch is padded to: 1, 2, 4, 8, 16, 32, 64, 96, ..."""
    if num_rows > MAX_PADDING:
        return -(-num_rows // (MAX_PADDING + 1)) * (MAX_PADDING + 1)
    return 1 << (num_rows - 1).bit_length()


class _Flight:
    """A step begun by a batch; its results, tokens and log-probs [4, step rows] fp64, come to `host`."""

    def __init__(self, batch: Batch, host: Tensor, results: Tensor, positions: Int64s, num_rows: int) -> None:
        """`positions` are those of the batch, `num_rows` is how many rows there can be."""
        self.batch = batch
        self._host, self._places = host, np.zeros(num_rows, np.int64)
        self._positions = np.full(num_rows, -1, np.int64)  # of rows whose results still count
        self._places[batch.rows], self._positions[batch.rows] = np.arange(len(batch)), positions
        host.copy_(results, non_blocking=True)
        self._done = torch.cuda.Event() if results.is_cuda else None
        if self._done:
            self._done.record()

    def keep(self, rows: Int64s) -> None:
        """The results of other rows do not count any more."""
        positions = np.full_like(self._positions, -1)
        positions[rows] = self._positions[rows]
        self._positions = positions

    def covers(self, rows: Int64s, positions: Int64s) -> bool:
        """Whether this is the step of these rows at these positions, perhaps among others."""
        return bool((self._positions[rows] == positions).all())

    def read(self, rows: Int64s) -> Drawn:
        """Wait for the results of these rows."""
        if self._done:
            self._done.synchronize()
        tokens, *logprobs = self._host.numpy()[:, self._places[rows]]
        return Drawn(tokens.astype(np.int64), *(row.astype(np.float32) for row in logprobs))


class GraphRunner(Runner):
    """A Runner whose steps are recorded, one for each shape, and replayed; its workspace is padded.

    A shape is the slots of the batch, the bucket of each, and what its rules ask for. What its first step
    calls is compiled then, so the second one is recorded. Mixtures of experts are never: they ask the
    device how many tokens each expert has.
    """

    num_ahead = 1

    def __init__(self, workspace: Workspace, kernels: str) -> None:
        num_rows, device = len(workspace.x), workspace.device
        self._padding_row, self._is_gpu = len(workspace.tables) - 1, device.type == "cuda"
        nobody = rules_for(np.zeros(0, RULE), np.zeros(0, np.int64), num_rows, workspace.config.vocab_size)
        self._rules = DeviceRules(*(values.to(device) for values in nobody))
        self._sent_rules: Rules | None = None
        self._results = torch.zeros(4, num_rows, dtype=torch.float64, device=device)
        self._hosts = [torch.zeros_like(self._results, device="cpu", pin_memory=self._is_gpu) for _ in "ab"]
        self._steps: dict[tuple[object, ...], Callable[[], object]] = {}
        self._graphs = torch.cuda.graph_pool_handle() if self._is_gpu else None
        self._flight: _Flight | None = None
        super().__init__(workspace, kernels)

    def arrange(self, rows: Int64s, slots: Int64s) -> None:
        """See Runner; `batch` is the padded one."""
        segments = Batch(rows, slots).segments()
        buckets = np.array([bucket_for(stop - start) for _, start, stop in segments], np.int64)
        padded_rows = np.full(buckets.sum(), self._padding_row)
        for (_, start, stop), at in zip(segments, buckets.cumsum() - buckets, strict=True):
            padded_rows[at : at + stop - start] = rows[start:stop]
        own_slots = np.array([slot for slot, _, _ in segments], np.int64)
        super().arrange(padded_rows, np.repeat(own_slots, buckets))
        self._own_rows, self._places = rows, np.flatnonzero(padded_rows != self._padding_row)
        self._shape = tuple(self.batch.segments())
        self._sent_rules = None
        if self._flight:
            self._flight.keep(rows)

    def draw(self, tokens: Int64s, positions: Int64s, rules: Rules, has_next: Callable[[], bool]) -> Drawn:
        """See Runner; the next step is begun if it can be."""
        flight = self._flight
        if flight is None or not flight.covers(self._own_rows, positions):
            self._send(tokens, positions, rules)
            flight = self._begin(positions, rules)
        goes_on = flight.batch is self.batch and has_next()
        self._flight = self._begin(positions + 1, rules) if goes_on else None
        return flight.read(self._own_rows)

    def _send(self, tokens: Int64s, positions: Int64s, rules: Rules) -> None:
        """Inputs to the device, through pinned memory, which torch uses again only once it is copied."""
        work, num_rows = self._work, len(self.batch)
        inputs = np.zeros(work.inputs.shape, np.int64)
        inputs[0, self._places], inputs[1, self._places] = tokens, positions
        inputs[2, :num_rows], inputs[3, :num_rows] = self.batch.rows, self.batch.slots
        sent = [(work.inputs, torch.from_numpy(inputs))]
        if rules is not self._sent_rules:
            own = rules_for(rules, self._places, len(work.x), work.config.vocab_size)
            sent += zip(self._rules, own, strict=True)
            self._sent_rules = rules
        for target, values in sent:
            target.copy_(values.pin_memory() if self._is_gpu else values, non_blocking=True)

    def _begin(self, positions: Int64s, rules: Rules) -> _Flight:
        """Begin the step whose inputs are on the device."""
        is_changed, has_filters = bool(rules["is_changed"].any()), bool(rules["is_filtered"].any())
        key = (self._shape, is_changed, has_filters)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = partial(self._step, is_changed, has_filters)
        elif isinstance(step, partial) and self._is_gpu and not self._mixtures:
            step = self._steps[key] = self._recorded(step)
        step()
        self._hosts.reverse()
        padded = np.full(len(self.batch), -1, np.int64)
        padded[self._places] = positions
        return _Flight(self.batch, self._hosts[0], self._results, padded, self._padding_row + 1)

    def _recorded(self, step: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs, capture_error_mode="thread_local"):
            step()
        return graph.replay

    def _step(self, is_changed: bool, has_filters: bool) -> None:
        """From inputs to results, and to the inputs of the next step; padding stays where it is."""
        work, num_rows = self._work, len(self.batch)
        tokens, positions, rows = (x[:num_rows] for x in (work.tokens, work.positions, work.rows))
        recorder = self._pass(tokens, np.zeros(0, np.int64) if self._is_gpu else positions.numpy())
        if self._mixtures:
            self._keep_routes(recorder, rows, positions)
        for s in self._segments:
            s.own.head(s.hidden, out=s.logits)
        rules = DeviceRules(*(values[:, :num_rows] for values in self._rules))
        drawn = draw(
            work.logits[:num_rows], positions + 1, rules, is_changed=is_changed, has_filters=has_filters
        )
        self._results[0, :num_rows] = drawn.tokens
        self._results[1:, :num_rows] = drawn.logprobs
        tokens.copy_(drawn.tokens)
        positions += rows != self._padding_row
