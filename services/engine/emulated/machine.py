"""The emulated machine without clock or event loop: admission, KV blocks, iterations, notices.

`EmulatedEngine` drives it: `submit` and `abort` from work, `take_notice` from the KV
daemon, and in turn `begin`, `write_layer` per layer and `finish` for each iteration.

Blocks of a transfer that the daemon may touch are never given back before its notice
(`Received`, `Failed`, `Released`): `_release` asks it to stop and waits.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.engine.emulated.blocks import BlockAllocator, BlockError
from services.engine.emulated.content import KvContent, TokenChoice, model_salt
from services.engine.emulated.memory import KvStore
from services.engine.emulated.sampling import output_of, seed_of
from services.engine.emulated.sequence import Sequence, Stage
from services.engine.interface import EngineError, TransferFailedError
from services.kvd.client import Failed, KvdClient, Received, Released, push_entry
from splitwise.kv.identity import TransferKey, transfer_key
from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.machine import Batch, MachineLimits, MachineScheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.engine.emulated.settings import EmulatedSettings
    from services.engine.interface import PromptWork, TokenWork
    from services.kvd.client import Notice


@dataclass(slots=True)
class Iteration:
    """A batch in progress, with the places that its KV goes to."""

    batch: Batch[Sequence]
    pushes: bool  # a push plan was sent: layers are counted
    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    prefixes: NDArray[np.uint64]


class EmulatedMachine:
    """State of one emulated machine. Not thread safe; never blocks.

    The machine scheduler decides who runs and how many blocks everyone holds; this is its
    `Memory`, which says which blocks.
    """

    def __init__(self, settings: EmulatedSettings, client: KvdClient) -> None:
        self.settings = settings
        self.preemptions = 0
        self._client = client
        self.content = KvContent(model_salt(settings.model), settings.layers, settings.words)
        self.choice = TokenChoice(settings.vocab_size, settings.eos_probability)
        self.store = KvStore(settings, self.content)
        self.allocator = BlockAllocator(settings.kv_blocks)
        self._sources: dict[Sequence, TokenWork] = {}
        self._seeds: dict[Sequence, int | None] = {}
        # By whether it is the token side: one machine may run both phases of a request.
        self._sequences: dict[tuple[TransferKey, bool], Sequence] = {}
        self.scheduler: MachineScheduler[Sequence] = MachineScheduler(
            MachineLimits(
                settings.block_tokens,
                settings.max_batch_tokens,
                settings.max_running,
                settings.max_preemptions,
                headroom=min(self._blocks_for(settings.max_model_len), settings.kv_blocks // 4),
            ),
            self,
        )
        self._in_batch: set[Sequence] = set()
        self._batch_tokens = 0

    @property
    def batch_size(self) -> tuple[int, int]:
        """Requests and tokens of the iteration in progress."""
        return len(self._in_batch), self._batch_tokens

    # ---- work in and out

    def submit_prompt(self, work: PromptWork) -> Sequence:
        """Queue a prompt; its transfer is announced to the daemon at once."""
        sequence = self._new(work, token_side=False)
        if work.transfer is not None:
            self._sequences[transfer_key(work.transfer), False] = sequence
            sequence.transfer_open = True
            self._client.expect(work.transfer, len(work.token_ids), work.mode, work.lease_ms)
        self.scheduler.add_prompt(sequence, len(sequence.tokens))
        return sequence

    def submit_token(self, work: TokenWork) -> Sequence:
        """Queue a token phase; blocks are reserved at once, or as soon as there are enough."""
        sequence = self._new(work, token_side=True)
        self._sources[sequence] = work
        self._sequences[transfer_key(work.transfer), True] = sequence
        output = work.sampling.max_tokens or self._longest
        self.scheduler.add_token(
            sequence, len(sequence.tokens), min(len(sequence.tokens) + output, self._longest)
        )
        self._reserve_blocks()
        return sequence

    def _new(self, work: PromptWork | TokenWork, *, token_side: bool) -> Sequence:
        sequence = Sequence(
            key=work.key,
            tokens=list(work.token_ids),
            prompt_length=len(work.token_ids),
            sampling=work.sampling,
            transfer=work.transfer,
            token_side=token_side,
        )
        self._seeds[sequence] = seed_of(work.sampling, secrets.randbits(63))
        return sequence

    def abort(self, sequence: Sequence, error: Exception | None = None) -> None:
        """Give the work up; it is `Stage.OVER` once nothing of it is held any more."""
        if sequence.stage is Stage.OVER or sequence.aborted:
            return
        sequence.aborted = True
        sequence.error = sequence.error or error
        if sequence.transfer_open and sequence.transfer is not None:
            self._client.cancel(sequence.transfer, "the work was aborted")
        self._release(sequence)

    def take_notice(self, notice: Notice) -> None:
        """Act on what the daemon says about a transfer."""
        sequence = self._sequences.pop((notice.key, not isinstance(notice, Released)), None)
        if sequence is None:
            return
        sequence.transfer_open = False
        if isinstance(notice, Received) and not sequence.aborted:
            sequence.computed = sequence.prompt_length
            self._publish(sequence)
            sequence.append(notice.first_token)
            sequence.stage = Stage.RUNNING
            self.scheduler.ready(sequence)
        elif isinstance(notice, Failed) and not sequence.aborted:
            error = TransferFailedError(
                notice.message or "the KV cache did not arrive", corrupt=notice.corrupt
            )
            self.abort(sequence, error)
        elif sequence.aborted or sequence.stage is Stage.HANDED_OVER:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take the sequence out and free its blocks, as soon as neither daemon nor batch uses them."""
        if sequence.stage is Stage.OVER or sequence.transfer_open or sequence in self._in_batch:
            return
        self.scheduler.remove(sequence)
        self.allocator.give_back(sequence.forget())
        sequence.stage = Stage.OVER
        self._sources.pop(sequence, None)
        self._seeds.pop(sequence, None)
        sequence.outputs.put_nowait(None)
        sequence.freed.set()

    def fail_all(self, message: str) -> None:
        """End all work with `EngineError`; the memory must not be used any more."""
        for sequence in list(self._seeds):
            sequence.error = sequence.error or EngineError(message)
            sequence.aborted = True
            sequence.stage = Stage.OVER
            sequence.outputs.put_nowait(None)
            sequence.freed.set()
        self._seeds.clear()

    # ---- admission and memory

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_tokens)

    @property
    def _longest(self) -> int:
        """Tokens of the longest request that fits model and memory."""
        return min(self.settings.max_model_len, self.settings.kv_blocks * self.settings.block_tokens)

    def _reserve_blocks(self) -> None:
        """Let token phases have memory to which their KV may be sent."""
        for sequence in self.scheduler.reserve():
            self._reserve(sequence, self._sources[sequence])

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return self.allocator.free

    def take(self, sequence: Sequence, blocks: int, leave: int) -> int:
        """Take blocks, cached ones where they are there; returns the tokens computed in them, or NONE."""
        shared = self._shared(sequence)
        missing = blocks - len(shared)
        taken = self.allocator.take(missing) if missing + leave <= self.allocator.free else None
        if taken is None:
            self.allocator.give_back(shared)
            return NONE
        sequence.blocks = shared + taken
        sequence.published = len(shared)
        sequence.computed = len(shared) * self.settings.block_tokens
        if sequence.made == 0:
            sequence.cached = sequence.computed
        return sequence.computed

    def grow(self, sequence: Sequence, blocks: int) -> None:
        """Take more blocks for a token phase."""
        taken = self.allocator.take(blocks)
        if taken is None:
            raise BlockError(f"{blocks} more blocks were to be taken, {self.allocator.free} are free")
        sequence.blocks.extend(taken)

    def take_back(self, sequence: Sequence) -> None:
        """Take the blocks of an evicted token phase; it recomputes its KV here later."""
        self.allocator.give_back(sequence.forget())
        sequence.stage = Stage.WAITING

    def _reserve(self, sequence: Sequence, source: TokenWork) -> None:
        """Let the daemon grant the blocks that are not cached here to the source."""
        sequence.stage = Stage.ARRIVING
        sequence.transfer_open = True
        self._client.reserve(
            source.transfer,
            sequence.published,
            sequence.blocks[sequence.published :],
            source_kvd_address=source.source_kvd_address,
            source_engine_id=source.source_engine_id,
            lease_ms=source.lease_ms,
            traceparent=source.traceparent,
        )

    def _shared(self, sequence: Sequence) -> list[int]:
        """Take the cached blocks that the sequence begins with; its last token is always computed."""
        if not self.settings.prefix_caching:
            return []
        size = self.settings.block_tokens
        return self.allocator.share(sequence.block_keys(0, (len(sequence.tokens) - 1) // size, size))

    def _publish(self, sequence: Sequence) -> None:
        """Offer the blocks that were filled to the prefix cache."""
        full = sequence.computed // self.settings.block_tokens
        if not self.settings.prefix_caching or full <= sequence.published:
            return
        keys = sequence.block_keys(sequence.published, full, self.settings.block_tokens)
        for block, key in zip(sequence.blocks[sequence.published : full], keys, strict=True):
            self.allocator.publish(block, key)
        sequence.published = full

    # ---- iterations

    def begin(self) -> Iteration | None:
        """Form the next batch and announce its pushes; None when there is nothing to compute."""
        self.preemptions += len(self.scheduler.make_room())
        for sequence in self.scheduler.admit():
            sequence.stage = Stage.RUNNING
        self._reserve_blocks()
        batch = self.scheduler.next_batch()
        self.preemptions += len(batch.sat_out)
        if not batch.parts:
            return None
        self._in_batch = {sequence for sequence, _ in batch.parts}
        self._batch_tokens = batch.prompt_tokens + batch.sequences
        blocks, offsets, prefixes = [], [], []
        for sequence, count in batch.parts:
            positions = np.arange(sequence.computed, sequence.computed + count)
            blocks.append(sequence.block_array()[positions // self.settings.block_tokens])
            offsets.append(positions % self.settings.block_tokens)
            prefixes.append(sequence.prefixes(sequence.computed, sequence.computed + count))
        return Iteration(
            batch,
            self._announce(batch),
            np.concatenate(blocks),
            np.concatenate(offsets),
            np.concatenate(prefixes),
        )

    def _announce(self, batch: Batch[Sequence]) -> bool:
        """Send the push plan of the blocks that this pass completes."""
        entries = []
        for sequence, count in batch.parts:
            if sequence.transfer is None or sequence.token_side or not sequence.transfer_open:
                continue
            end = sequence.computed + count
            final = end == sequence.prompt_length
            complete = self._blocks_for(end) if final else end // self.settings.block_tokens
            if complete > sequence.pushed or final:
                entries.append(
                    push_entry(
                        sequence.transfer,
                        sequence.pushed,
                        sequence.blocks[sequence.pushed : complete],
                        final=final,
                    )
                )
                sequence.pushed = complete
        if entries:
            self._client.push_plan(entries)
        return bool(entries)

    def write_layer(self, iteration: Iteration, layer: int) -> None:
        """Write one layer's KV of the batch and tell the daemon."""
        self.store.write_layer(layer, iteration.blocks, iteration.offsets, iteration.prefixes)
        if iteration.pushes:
            self._client.layer_done()

    def finish(self, iteration: Iteration) -> None:
        """Sample where a sequence's KV is complete; free what ended or was aborted meanwhile."""
        self._in_batch, self._batch_tokens = set(), 0
        self.scheduler.complete(iteration.batch)
        for sequence, count in iteration.batch.parts:
            sequence.computed += count
            self._publish(sequence)
            if sequence.aborted:
                self._release(sequence)
            elif sequence.pending == 0:
                self._sample(sequence)

    def _sample(self, sequence: Sequence) -> None:
        digest = self.store.digest(sequence.block_array(), sequence.computed)
        output = output_of(
            self.choice,
            digest,
            self._seeds[sequence],
            sequence.sampling,
            made=sequence.made,
            cached=sequence.cached if sequence.made == 0 else 0,
            room=self._longest - len(sequence.tokens),
        )
        sequence.append(output.token_ids[0])
        sequence.outputs.put_nowait(output)
        if sequence.token_side:
            if output.finish is not None:
                self._release(sequence)
            return
        self._hand_over(sequence, output.token_ids[0], finished=output.finish is not None)

    def _hand_over(self, sequence: Sequence, token: int, *, finished: bool) -> None:
        """End the prompt phase; the blocks stay until the daemon has delivered them."""
        sequence.stage = Stage.HANDED_OVER
        if sequence.transfer is not None and sequence.transfer_open:
            if finished:
                self._client.cancel(sequence.transfer, "the first token ended the request")
            else:
                self._client.first_token(sequence.transfer, token)
        self._release(sequence)
