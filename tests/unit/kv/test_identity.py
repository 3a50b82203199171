"""Parts of a transfer have names of their own, derived from the whole's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitwise.kv.identity import TransferKey, part_engine_id, part_key, transfer_key

KEYS = st.builds(TransferKey, st.binary(min_size=16, max_size=16), st.integers(1, 2**32 - 1))


@given(KEYS, KEYS, st.integers(0, 71), st.integers(0, 71))
def test_parts_of_all_transfers_and_ranks_have_names_of_their_own(
    one: TransferKey, other: TransferKey, rank: int, another: int
) -> None:
    first, second = part_key(one, rank), part_key(other, another)
    assert (first == second) == ((one, rank) == (other, another))
    assert transfer_key(first) == first  # a valid name


@given(KEYS)
def test_rank_0_has_the_names_of_the_whole(key: TransferKey) -> None:
    assert part_key(key, 0) == key
    assert part_engine_id("left", 0) == "left"
    assert len({part_engine_id("left", rank) for rank in range(8)}) == 8
