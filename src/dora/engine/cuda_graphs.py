"""Steps of a few shapes on static buffers, which a GPU replays as CUDA graphs.

The rows of each version are padded to a bucket. Tokens are sampled on the device and become the inputs of the
next step there, so that step can start before they are on the host. Short prompts are prefilled as rows of a
step without logits, because to launch the kernels of a prefill one by one takes longer than to run them. On a
CPU steps are called instead of replayed, and all else is the same.
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
from dora.engine.kernels.workspace import (
    MAX_PADDING,
    MAX_PREFILL_READS,
    MAX_PREFILL_ROWS,
    MAX_PREFILL_TABLES,
    ForwardBatch,
    Workspace,
)
from dora.engine.request import PrefillInput
from dora.engine.runner import ModelRunner, prefill_inputs

_BUCKET = (MAX_PADDING + 1) // 2  # rows of the only version; smaller batches have powers of two
MAX_GRAPHS = 48  # kept; each holds some megabytes of the device


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
        num_rows, device = len(workspace.logits), workspace.device
        self._padding_row = len(workspace.block_tables) - 1 - MAX_PREFILL_TABLES
        self._is_gpu = device.type == "cuda"
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
        self._has_inputs = False  # those of the step after the one in flight are on the device
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
        starts_next = step.batch is self.batch and self._has_inputs and can_continue()
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

    def _prefill_packed(self, slot: int, prompts: list[PrefillInput]) -> None:
        """See ModelRunner; the tokens are rows of a step, unless they are too many or the model is an MoE."""
        num_new = [prompt.num_new for prompt in prompts]
        num_tokens, num_reads = sum(num_new), sum(prompt.num_reads for prompt in prompts)
        is_short = num_tokens <= MAX_PREFILL_ROWS and num_reads <= MAX_PREFILL_READS
        if self._moe_layers or not is_short or len(prompts) > MAX_PREFILL_TABLES:
            super()._prefill_packed(slot, prompts)
            return
        work, size = self._workspace, max(_BUCKET, 1 << (num_tokens - 1).bit_length())
        width, unused = max(len(p.block_table) for p in prompts), len(work.kv) - 1
        tables = np.full((len(prompts), width), unused, np.int64)
        for table, prompt in zip(tables, prompts, strict=True):
            table[: len(prompt.block_table)] = prompt.block_table
        first = self._padding_row + 1
        inputs = np.zeros((4, size), np.int64)
        inputs[:2, :num_tokens] = prefill_inputs(prompts)[:2]
        inputs[2], inputs[3] = self._padding_row, slot
        inputs[2, :num_tokens] = np.repeat(np.arange(first, first + len(prompts)), num_new)
        self._copy(work.block_tables[first : first + len(prompts), :width], tables)
        self._copy(work.inputs[:, :size], inputs)
        self._has_inputs = False
        batch, segments = self.batch, self._segments
        super().set_batch(inputs[2], inputs[3])
        try:
            self._run(("prefill", slot, size), partial(self._prefill_step, size))
        finally:
            self.batch, self._segments = batch, segments

    def _prefill_step(self, size: int) -> None:
        work = self._workspace
        self._forward(work.tokens[:size], self._host_positions(work.positions[:size]))

    def _host_positions(self, positions: Tensor) -> Int64s:
        """The argument of kernels on the CPU; those of a GPU read the device's."""
        return np.zeros(0, np.int64) if self._is_gpu else positions.numpy()

    def _copy(self, target: Tensor, values: Int64s | Tensor) -> None:
        """Copy to the device through pinned memory, which torch reuses only after the copy."""
        source = torch.as_tensor(values)
        target.copy_(source.pin_memory() if self._is_gpu else source, non_blocking=True)

    def _send_inputs(self, tokens: Int64s, positions: Int64s, metadata: SamplingMetadata) -> None:
        """Copy the inputs of a decode step to the device."""
        work, num_rows = self._workspace, len(self.batch)
        inputs = np.zeros((4, len(work.logits)), np.int64)
        inputs[0, self._real_indices], inputs[1, self._real_indices] = tokens, positions
        inputs[2, :num_rows], inputs[3, :num_rows] = self.batch.rows, self.batch.slots
        self._copy(work.inputs[:, : inputs.shape[1]], inputs)
        self._has_inputs = True
        if metadata is not self._sent_metadata:
            on_host = device_metadata(metadata, self._real_indices, inputs.shape[1], work.config.vocab_size)
            for target, values in zip(self._metadata, on_host, strict=True):
                self._copy(target, values)
            self._sent_metadata = metadata

    def _start(self, positions: Int64s, metadata: SamplingMetadata) -> _StepInFlight:
        """Start the step whose inputs are on the device."""
        is_modified, has_filters = bool(metadata["is_modified"].any()), bool(metadata["is_filtered"].any())
        step = partial(self._step, is_modified, has_filters)
        self._run((self._shape, is_modified, has_filters), step)
        self.num_started += 1
        self._hosts.reverse()
        padded = np.full(len(self.batch), -1, np.int64)
        padded[self._real_indices] = positions
        return _StepInFlight(self.batch, self._hosts[0], self._results, padded)

    def _run(self, key: tuple[object, ...], called: partial[None]) -> None:
        """Run the step of a shape: by calling it, the second time while it is captured, then as a graph."""
        step = self._graphs.pop(key, None)
        if step is None:
            self._forget_graph()
            step = called
        elif isinstance(step, partial) and not self._moe_layers:
            step = self._capture(called)
            self.num_captured += 1
        self._graphs[key] = step
        step()

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
        router = self._forward(tokens, self._host_positions(positions))
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
