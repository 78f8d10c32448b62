"""Decode steps of a few shapes on static buffers, which a GPU replays as CUDA graphs.

The rows of each version are padded to a bucket. Tokens are sampled on the device and become the inputs of the
next step there, so that step can start before they are on the host. On a CPU steps are called instead of
replayed, and all else is the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dora.engine.kernels.device_sampler import DeviceSamplingMetadata, device_metadata, sample_on_device
from dora.engine.kernels.sampler import SAMPLING_DTYPE, Int64s, SamplerOutput, SamplingMetadata
from dora.engine.kernels.workspace import MAX_PADDING, ForwardBatch, Workspace
from dora.engine.runner import ModelRunner

_BUCKET = (MAX_PADDING + 1) // 2  # rows of the only version; smaller batches have powers of two
MAX_GRAPHS = 32  # kept; each holds some megabytes of the device


def padded_rows(counts: Int64s, max_rows: int) -> Int64s:
    """The buckets [V] of the rows [V] of each version of a batch.

    One version: 1, 2, 4, 8, 16, 32, 64, 96, ... rows. Several: multiples of 64 where `max_rows` is over 64,
    else of 32, but at most `max_rows`, rounded up to a power of two. Their numbers of rows change all the
    time, and such a batch takes hardly longer than a smaller one, because a step reads all weights of each
    version.
    """
    bucket = _BUCKET if len(counts) == 1 or max_rows <= 2 * _BUCKET else 2 * _BUCKET
    largest = counts[0] if len(counts) == 1 else max_rows
    bucket = min(bucket, 1 << (int(largest) - 1).bit_length())
    return -(-counts // bucket) * bucket


class CUDAGraphRunner(ModelRunner):
    """A ModelRunner whose steps are captured, one per shape, and replayed; its workspace is padded.

    A shape is the slots of the batch in ascending order, their buckets, and which parts of the sampler it
    needs. The first step of a shape is called, since it may compile kernels; the second is captured. The
    shapes that were not used for longest are forgotten. Steps of MoE models are never captured, because the
    host reads the number of tokens of each expert from the device.
    """

    num_steps_ahead = 1

    def __init__(self, workspace: Workspace, kernels: str) -> None:
        num_rows, device = len(workspace.x), workspace.device
        self._padding_row, self._is_gpu = len(workspace.block_tables) - 1, device.type == "cuda"
        no_rows = np.zeros(0, SAMPLING_DTYPE), np.zeros(0, np.int64)
        on_host = device_metadata(*no_rows, num_rows, workspace.config.vocab_size)
        self._metadata = DeviceSamplingMetadata(*(values.to(device) for values in on_host))
        self._sent_metadata: SamplingMetadata | None = None
        self._results = torch.zeros(4, num_rows, dtype=torch.float64, device=device)
        self._hosts = [torch.zeros_like(self._results, device="cpu", pin_memory=self._is_gpu) for _ in "ab"]
        self._graphs: dict[tuple[object, ...], Callable[[], object]] = {}  # the last one was used last
        self.num_captured = 0  # graphs
        self.num_started = 0  # steps, with those that were discarded
        self._graph_pool = torch.cuda.graph_pool_handle() if self._is_gpu else None
        self._in_flight: _StepInFlight | None = None
        super().__init__(workspace, kernels)

    def set_batch(self, rows: Int64s, slots: Int64s) -> None:
        """See ModelRunner; `batch` is the padded one."""
        segments = sorted(ForwardBatch(rows, slots).segments())
        counts = np.array([stop - start for _, start, stop in segments], np.int64)
        buckets = padded_rows(counts, self._padding_row)
        padded, indices = np.full(buckets.sum(), self._padding_row), np.zeros(len(rows), np.int64)
        for (_, start, stop), at in zip(segments, buckets.cumsum() - buckets, strict=True):
            indices[start:stop] = np.arange(at, at + stop - start)
        padded[indices] = rows
        segment_slots = np.array([slot for slot, _, _ in segments], np.int64)
        super().set_batch(padded, np.repeat(segment_slots, buckets))
        self._real_rows, self._real_indices = rows, indices
        self._shape = tuple(self.batch.segments())
        self._sent_metadata = None

    def decode_and_sample(
        self, tokens: Int64s, positions: Int64s, metadata: SamplingMetadata, can_continue: Callable[[], bool]
    ) -> SamplerOutput:
        """See ModelRunner; starts the next step if it can."""
        if self._in_flight is None:
            self.start_ahead(tokens, positions, metadata)
        step = self._in_flight
        assert step is not None
        assert step.covers(self._real_rows, positions), "rows joined the batch while a step was in flight"
        starts_next = step.batch is self.batch and can_continue()
        self._in_flight = self._start(positions + 1, metadata) if starts_next else None
        return step.read(self._real_rows)

    @property
    def has_step_in_flight(self) -> bool:
        """See ModelRunner."""
        return self._in_flight is not None

    def start_ahead(self, tokens: Int64s, positions: Int64s, metadata: SamplingMetadata) -> None:
        """See ModelRunner."""
        self._send_inputs(tokens, positions, metadata)
        self._in_flight = self._start(positions, metadata)

    def discard_step(self) -> None:
        """See ModelRunner."""
        self._in_flight = None

    def _send_inputs(self, tokens: Int64s, positions: Int64s, metadata: SamplingMetadata) -> None:
        """Copy inputs to the device through pinned memory, which torch reuses only after the copy."""
        work, num_rows = self._workspace, len(self.batch)
        inputs = np.zeros(work.inputs.shape, np.int64)
        inputs[0, self._real_indices], inputs[1, self._real_indices] = tokens, positions
        inputs[2, :num_rows], inputs[3, :num_rows] = self.batch.rows, self.batch.slots
        sent = [(work.inputs, torch.from_numpy(inputs))]
        if metadata is not self._sent_metadata:
            on_host = device_metadata(metadata, self._real_indices, len(work.x), work.config.vocab_size)
            sent += zip(self._metadata, on_host, strict=True)
            self._sent_metadata = metadata
        for target, values in sent:
            target.copy_(values.pin_memory() if self._is_gpu else values, non_blocking=True)

    def _start(self, positions: Int64s, metadata: SamplingMetadata) -> _StepInFlight:
        """Start the step whose inputs are on the device."""
        is_modified, has_filters = bool(metadata["is_modified"].any()), bool(metadata["is_filtered"].any())
        key = (self._shape, is_modified, has_filters)
        step = self._graphs.pop(key, None)
        if step is None:
            self._forget_graph()
            step = partial(self._step, is_modified, has_filters)
        elif isinstance(step, partial) and not self._moe_layers:
            step = self._capture(step)
            self.num_captured += 1
        self._graphs[key] = step
        step()
        self.num_started += 1
        self._hosts.reverse()
        padded = np.full(len(self.batch), -1, np.int64)
        padded[self._real_indices] = positions
        return _StepInFlight(self.batch, self._hosts[0], self._results, padded)

    def _forget_graph(self) -> None:
        """Make room for another shape."""
        if len(self._graphs) < MAX_GRAPHS:
            return
        if self._is_gpu:
            torch.cuda.current_stream().synchronize()  # the graph may be running
        del self._graphs[next(iter(self._graphs))]

    def _capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """The step as a graph. On a CPU it is called."""
        if not self._is_gpu:
            return lambda: step()
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"),
        ):
            step()
        return graph.replay

    def _step(self, is_modified: bool, has_filters: bool) -> None:
        """Compute the results and the inputs of the next step; padding rows keep their position."""
        work, num_rows = self._workspace, len(self.batch)
        tokens, positions, rows = (x[:num_rows] for x in (work.tokens, work.positions, work.rows))
        router = self._forward(tokens, np.zeros(0, np.int64) if self._is_gpu else positions.numpy())
        if self._moe_layers:
            self._store_routes(router, rows, positions)
        for s in self._segments:
            s.weights.lm_head(s.hidden, out=s.logits)
        metadata = DeviceSamplingMetadata(*(values[:, :num_rows] for values in self._metadata))
        sampled = sample_on_device(
            work.logits[:num_rows], positions + 1, metadata, is_modified=is_modified, has_filters=has_filters
        )
        self._results[0, :num_rows] = sampled.tokens
        self._results[1:, :num_rows] = sampled.logprobs
        tokens.copy_(sampled.tokens)
        positions += rows != self._padding_row


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage in the block: a graph that is freed during a capture invalidates the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _StepInFlight:
    """A started step; its results, tokens and log-probs [4, step rows] fp64, are copied to `host`."""

    def __init__(self, batch: ForwardBatch, host: Tensor, results: Tensor, positions: Int64s) -> None:
        """`positions` are those of the batch."""
        self.batch, self._host = batch, host
        num_rows = batch.rows.max() + 1
        self._indices, self._positions = np.zeros(num_rows, np.int64), np.full(num_rows, -1, np.int64)
        self._indices[batch.rows], self._positions[batch.rows] = np.arange(len(batch)), positions
        host.copy_(results, non_blocking=True)
        self._done = torch.cuda.Event() if results.is_cuda else None
        if self._done:
            self._done.record()

    def covers(self, rows: Int64s, positions: Int64s) -> bool:
        """Whether this step computes these rows at these positions."""
        is_known = (rows < len(self._positions)).all()
        return bool(is_known and (self._positions[rows] == positions).all())

    def read(self, rows: Int64s) -> SamplerOutput:
        """Wait for the results of these rows."""
        if self._done:
            self._done.synchronize()
        tokens, *logprobs = self._host.numpy()[:, self._indices[rows]]
        return SamplerOutput(tokens.astype(np.int64), *(row.astype(np.float32) for row in logprobs))
