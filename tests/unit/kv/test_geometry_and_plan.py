"""Where blocks lie, which memories fit together, and how neighbours are joined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.kv.geometry import SHARED_FACTS, Geometry, GeometryError
from splitwise.kv.integrity import LayerDigests
from splitwise.kv.plan import PlanError, plan_layer

HERE = Geometry(2, 10, 64, 640, 64, 0, 16, "bfloat16", "LBHNC", "m", "cpu")


@pytest.mark.parametrize("name", SHARED_FACTS)
def test_each_shared_fact_keeps_engines_apart_and_is_named(name: str) -> None:
    value = getattr(HERE, name)
    changed: dict[str, Any] = {name: value + 1 if isinstance(value, int) else "other"}
    there = replace(HERE, **changed)
    assert there.fingerprint() != HERE.fingerprint()
    assert HERE.differences(there) == [f"{name}: {value} here, {getattr(there, name)} there"]


def test_place_and_number_of_blocks_may_differ() -> None:
    there = replace(HERE, num_blocks=99, base_offset=8, layer_stride_bytes=9999, block_stride_bytes=128)
    assert there.fingerprint() == HERE.fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"num_blocks": 11}, "the memory at 1280"),
        ({"block_stride_bytes": 63}, "stride of 63"),
        ({"layer_stride_bytes": 639}, "stride of 639"),
        ({"base_offset": 1}, "ends at byte 1281"),
        ({"tp_rank": 1}, "tp_rank 1"),
    ],
)
def test_a_memory_that_contradicts_itself_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        replace(HERE, **change).check(1280)  # type: ignore[arg-type]


def test_block_ids_are_in_range_and_occur_once() -> None:
    HERE.check_blocks(range(10))
    for ids in ([10], [-1], [1, 2, 1]):
        with pytest.raises(GeometryError, match=f"block id {ids[-1]}"):
            HERE.check_blocks(ids)


@given(st.data())
def test_a_plan_moves_each_block_to_its_place_in_the_fewest_runs(data: st.DataObject) -> None:
    there = replace(HERE, block_stride_bytes=data.draw(st.sampled_from([64, 128])), base_offset=256)
    there = replace(there, layer_stride_bytes=10 * there.block_stride_bytes)
    count = data.draw(st.integers(0, 10))
    some = st.permutations(range(10)).map(lambda ids: ids[:count])
    source, destination = data.draw(some), data.draw(some)
    layer = data.draw(st.integers(0, 1))
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 255, 1280, np.uint8)
    result, wanted = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    plan = plan_layer(HERE, there, layer, source, destination)
    for here, to, size in zip(plan.source_offsets, plan.destination_offsets, plan.sizes, strict=True):
        result[to : to + size] = memory[here : here + size]
    runs = 0
    for index, (one, other) in enumerate(zip(source, destination, strict=True)):
        at, to = HERE.offset(layer, one), there.offset(layer, other)
        wanted[to : to + 64] = memory[at : at + 64]
        joined = index and source[index - 1] == one - 1 and destination[index - 1] == other - 1
        runs += not (joined and there.block_stride_bytes == 64)
    assert (result == wanted).all()
    assert len(plan.sizes) == runs
    assert plan.nbytes == 64 * count


def test_memories_that_differ_have_no_plan() -> None:
    with pytest.raises(PlanError, match="dtype: bfloat16 here, float32 there"):
        plan_layer(HERE, replace(HERE, dtype="float32"), 0, [1], [1])
    with pytest.raises(PlanError, match="2 blocks cannot go to 1"):
        plan_layer(HERE, HERE, 0, [1, 2], [1])


def test_digests_see_flips_swaps_and_layers_but_not_the_order_of_layers_in_time() -> None:
    def value(*blocks: tuple[int, bytes]) -> int:
        digests = LayerDigests(2)
        for layer, block in blocks:
            digests.add(layer, block)
        return digests.value()

    good = value((0, b"aa"), (0, b"bb"), (1, b"cc"))
    assert value((1, b"cc"), (0, b"aa"), (0, b"bb")) == good
    assert value((0, b"aabb"), (1, b"cc")) == good
    others = [
        value((0, b"bb"), (0, b"aa"), (1, b"cc")),
        value((0, b"aa"), (0, b"bc"), (1, b"cc")),
        value((0, b"aa"), (1, b"bb"), (1, b"cc")),
        value((0, b"aa"), (0, b"bb")),
    ]
    assert len({good, *others}) == 5
