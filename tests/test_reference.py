"""The NumPy reference against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from beaconkv_gguf import reference as ref
from beaconkv_gguf.reference import Rope

ROPES = {
    "norm": Rope(8),
    "neox": Rope(8, neox=True, base=1e6),
    "partial": Rope(4, neox=True),
    "linear scaling": Rope(8, scale=0.25),
    "factors": Rope(8, factors=(1.0, 2.0, 4.0, 8.0)),
    "yarn": Rope(8, scale=0.25, ext_factor=1.0, n_ctx_orig=256),
    "yarn attn_factor": Rope(
        8, neox=True, scale=0.5, ext_factor=1.0, attn_factor=1.3, n_ctx_orig=64
    ),
    "none": Rope(0),
}


# --- RoPE -----------------------------------------------------------------------------------------


def test_rope_norm_turns_neighbouring_pairs() -> None:
    x = np.array([[[1.0, 0.0, 0.0, 1.0, 7.0]]])
    y = ref.rope(x, [2], Rope(4, base=100.0))  # angles 2 and 2 / sqrt(100)
    expected = [np.cos(2), np.sin(2), -np.sin(0.2), np.cos(0.2), 7.0]
    np.testing.assert_allclose(y[0, 0], expected)


def test_rope_neox_turns_pairs_half_a_rotation_apart() -> None:
    x = np.array([[[1.0, 0.0, 0.0, 1.0, 7.0]]])
    y = ref.rope(x, [2], Rope(4, neox=True, base=100.0))  # pairs (1, 0) and (0, 1)
    expected = [np.cos(2), -np.sin(0.2), np.sin(2), np.cos(0.2), 7.0]
    np.testing.assert_allclose(y[0, 0], expected)


def test_rope_factors_divide_the_angles() -> None:
    theta, mscale = ref.rope_angles([3, 5], Rope(4, base=100.0, factors=(2.0, 4.0)))
    np.testing.assert_allclose(theta, [[1.5, 0.075], [2.5, 0.125]])
    assert mscale == 1.0


def test_rope_yarn_interpolates_slow_dimensions_only() -> None:
    # 62831 / 2 pi is just below 10^4: dimension 4 turns once, dimension 2 a hundred times, so the
    # ramp goes from floor(1.99..) = 1 to ceil(3.99..) = 4: shares 1, 1, 2/3, 1/3 of extrapolation
    r = Rope(8, base=1e4, scale=0.25, ext_factor=1.0, beta_fast=100.0, n_ctx_orig=62831)
    theta, mscale = ref.rope_angles([1], r)
    np.testing.assert_allclose(theta[0], [1.0, 0.1, 0.01 * 0.75, 0.001 * 0.5], rtol=1e-6)
    assert mscale == pytest.approx(1.1386294)


@pytest.mark.parametrize("r", ROPES.values(), ids=ROPES.keys())
def test_unrope_undoes_rope(r: Rope) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 8))
    pos = [0, 1, 17, 900, 30000]
    np.testing.assert_allclose(ref.unrope(ref.rope(x, pos, r), pos, r), x, atol=1e-12)


@pytest.mark.parametrize("r", ROPES.values(), ids=ROPES.keys())
def test_rope_products_depend_on_the_distance_alone(r: Rope) -> None:
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 8))
    near = (ref.rope(q, [40], r) * ref.rope(k, [33], r)).sum()
    far = (ref.rope(q, [1040], r) * ref.rope(k, [1033], r)).sum()
    assert near == pytest.approx(far, rel=1e-9)


def test_hadamard_is_orthogonal_and_its_own_inverse() -> None:
    np.testing.assert_allclose(
        ref.hadamard(4) * 2, [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    )
    np.testing.assert_allclose(ref.hadamard(64) @ ref.hadamard(64), np.eye(64), atol=1e-12)
    with pytest.raises(ValueError, match="power of two"):
        ref.hadamard(96)


def test_hadamard_rotate_works_in_blocks_and_keeps_products() -> None:
    q, k = np.random.default_rng(2).standard_normal((2, 3, 8))
    a, b = ref.hadamard_rotate(q, 4), ref.hadamard_rotate(k, 4)
    np.testing.assert_allclose((a * b).sum(-1), (q * k).sum(-1))
    np.testing.assert_allclose(a[:, 4:], q[:, 4:] @ ref.hadamard(4))
    np.testing.assert_array_equal(ref.hadamard_rotate(q, 0), q)


# --- which queries are stored, how many cells stay ------------------------------------------------


def test_query_stride_spreads_the_probes_over_the_window() -> None:
    assert [ref.query_stride(*p) for p in ((128, 16), (128, 128), (64, 16))] == [8, 2, 4]


def test_track_rows_thin_out_when_they_are_full() -> None:
    # 4 rows, stride 2 at first
    assert ref.track_positions(range(8), 8, 4) == [0, 2, 4, 6]
    assert ref.track_positions(range(9), 8, 4) == [0, 4, 8]
    assert ref.track_positions(range(15), 8, 4) == [0, 4, 8, 12]
    assert ref.track_positions(range(17), 8, 4) == [0, 8, 16]
    assert ref.track_positions(range(6, 15), 8, 4) == [8, 12]


def test_recent_rows_are_the_newest_and_never_tracked_ones() -> None:
    recent = ref.recent_positions(range(1000), 128, 16)
    assert recent == list(range(876, 1000, 8))  # 16 of them, p % 8 == 4
    assert ref.recent_positions(range(5), 128, 16) == [4]
    assert not set(recent) & set(ref.track_positions(range(900, 1000), 128, 16))


def test_n_held_runs_from_a_window_below_the_budget_to_the_budget() -> None:
    held = [ref.n_held(length, 16, 4) for length in range(15, 26)]
    assert held == [15, 16, 13, 14, 15, 16, 13, 14, 15, 16, 13]


@pytest.mark.parametrize("seed", range(5))
def test_held_cells_do_not_depend_on_how_a_prompt_is_cut(seed: int) -> None:
    budget, window, n_prefix, n_recent = 256, 32, 4, 16
    most = ref.max_batch(budget, window, 4, n_recent, 0.0)
    rng = np.random.default_rng(seed)
    length = held = 0
    while length < 3000:
        batch = int(rng.integers(1, most + 1))
        if held + batch > budget:
            keep = ref.n_keep(length, batch, budget, window, n_prefix, n_recent)
            assert n_prefix + n_recent <= keep < held
            held = keep
        held += batch
        length += batch
        assert held == ref.n_held(length, budget, window) <= budget


def test_max_batch_leaves_room_for_all_that_must_stay() -> None:
    assert ref.max_batch(1024, 128, 4, 32, 0.25) == 1024 - 128 - 32 - 256
    assert ref.max_batch(1024, 128, 300, 32, 0.25) == 1024 - 128 - 32 - 300


# --- track ----------------------------------------------------------------------------------------


def test_pool_puts_the_query_heads_of_a_group_together() -> None:
    q = np.arange(8.0).reshape(2, 4, 1)  # 2 rows, 4 heads
    np.testing.assert_array_equal(ref.pool(q, 2)[..., 0], [[0, 1, 4, 5], [2, 3, 6, 7]])


def test_track_init_separates_directions_and_averages_raw_vectors() -> None:
    x = np.array([[2.0, 0], [4, 0], [0, 3], [0, 1]])
    mean, count, norm = ref.track_init(x, 2)
    np.testing.assert_allclose(mean, [[3, 0], [0, 2]])
    np.testing.assert_allclose(count, [2, 2])
    np.testing.assert_allclose(norm, [3, 2])


def test_track_init_starts_at_the_point_least_like_the_average() -> None:
    x = np.array([[1.0, 0], [1, 0.1], [1, -0.1], [0, 2]])
    mean, count, _ = ref.track_init(x, 2)
    np.testing.assert_allclose(mean[0], [0, 2])
    np.testing.assert_allclose(count, [1, 3])


def test_track_init_leaves_spare_centroids_empty() -> None:
    # two directions only: the third start repeats one of them and loses every tie
    x = np.array([[2.0, 0], [4, 0], [0, 3], [0, 1]])
    mean, count, norm = ref.track_init(x, 6)
    np.testing.assert_allclose(mean[:2], [[3, 0], [0, 2]])
    assert count.tolist() == [2, 2, 0, 0, 0, 0]
    assert not mean[2:].any() and not norm[2:].any()


def test_track_init_norm_is_the_mean_length_not_the_length_of_the_mean() -> None:
    mean, _, norm = ref.track_init(np.array([[1.0, 1], [1, -1]]), 1)
    np.testing.assert_allclose(mean, [[1, 0]])
    np.testing.assert_allclose(norm, [2**0.5])


def test_track_update_keeps_running_means() -> None:
    mean, count, norm = np.array([[1.0, 0], [0, 0]]), np.array([1.0, 0]), np.array([1.0, 0])
    # (3, 0) is like the first; (-2, 0) rather like nothing; (0, 5) like neither: the first wins
    x = np.array([[3.0, 0], [-2, 0], [0, 5]])
    mean, count, norm = ref.track_update(mean, count, norm, x)
    np.testing.assert_allclose(mean, [[4 / 3, 5 / 3], [-2, 0]])
    np.testing.assert_allclose(count, [3, 1])
    np.testing.assert_allclose(norm, [3, 2])


def test_track_inits_once_then_updates() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.standard_normal((2, 20, 4, 8))
    empty = np.zeros((2, 3, 8)), np.zeros((2, 3)), np.zeros((2, 3))
    once = ref.track(*empty, first)
    twice = ref.track(*once, second)
    for h in range(2):
        begun = ref.track_init(ref.pool(first, 2)[h], 3)
        np.testing.assert_array_equal(once[0][h], begun[0])
        for a, b in zip(twice, ref.track_update(*begun, ref.pool(second, 2)[h])):
            np.testing.assert_array_equal(a[h], b)
    assert twice[1].sum(1).tolist() == [80, 80]  # 2 x 20 rows x 2 heads of the group


# --- probe ----------------------------------------------------------------------------------------


def test_probe_gives_beacons_their_norm_and_keeps_heads_of_a_group_outermost() -> None:
    mean = np.array([[[3.0, 4.0], [0.0, 0.0]]])
    q_recent = np.array([[[1.0, 1], [2, 2]], [[3, 3], [4, 4]]])  # R = 2, G = 2
    probes = ref.probe(mean, np.array([[10.0, 0]]), q_recent, 0, Rope(0))
    np.testing.assert_allclose(probes[0], [[6, 8], [0, 0], [1, 1], [3, 3], [2, 2], [4, 4]])


def test_probe_rotates_beacons_and_leaves_recent_queries_as_they_are() -> None:
    probes = ref.probe(np.array([[[2.0, 0.0]]]), np.ones((1, 1)), np.ones((1, 1, 2)), 3, Rope(2))
    later = 3 + 64 * np.arange(16)
    np.testing.assert_allclose(probes[0], [[np.cos(later).mean(), np.sin(later).mean()], [1, 1]])


# --- importance -----------------------------------------------------------------------------------


KEYS = np.log([[[9.0], [1], [3], [1]]])  # one head, d = 1, four cells
TABLE = np.arange(4)


def test_importance_mixes_beacons_and_recent_queries_and_leaves_sinks_out() -> None:
    probes = np.array([[[1.0], [0.0]]])  # a beacon; a recent query at position 2, indifferent
    a = ref.importance(KEYS, probes, np.ones((1, 1)), [2], TABLE, 0, 1, 1.0)
    # beacon: 0, 1/5, 3/5, 1/5; recent: 0, 1/2, 1/2, 0
    np.testing.assert_allclose(a, [[0, 0.35, 0.55, 0.1]])
    a = ref.importance(KEYS, probes, np.ones((1, 1)), [2], TABLE, 0, 1, 1.0, beacon_share=0.25)
    np.testing.assert_allclose(a, [[0, 0.425, 0.525, 0.05]])


def test_importance_shows_cells_below_the_boundary_to_every_probe() -> None:
    probes = np.array([[[1.0], [0.0]]])
    a = ref.importance(KEYS, probes, np.ones((1, 1)), [2], TABLE, 4, 1, 1.0, beacon_share=0.0)
    np.testing.assert_allclose(a, [[0, 1 / 3, 1 / 3, 1 / 3]])


def test_importance_ignores_empty_beacons_and_does_without_either_kind() -> None:
    probes = np.array([[[1.0], [5.0], [0.0]]])
    one = ref.importance(KEYS, probes, np.array([[7.0, 0.0]]), [3], TABLE, 0, 1, 1.0)
    np.testing.assert_allclose(one, [[0, 4 / 15, 7 / 15, 4 / 15]])  # the count is no weight
    none = ref.importance(KEYS, probes, np.zeros((1, 2)), [3], TABLE, 0, 1, 1.0)
    np.testing.assert_allclose(none, [[0, 1 / 3, 1 / 3, 1 / 3]])
    alone = ref.importance(KEYS, probes[:, :2], np.array([[7.0, 0.0]]), [], TABLE, 0, 1, 1.0)
    np.testing.assert_allclose(alone, [[0, 0.2, 0.6, 0.2]])


def test_importance_applies_scale_and_soft_cap_to_the_logits() -> None:
    probes = np.array([[[2.0]]])
    count = np.ones((1, 1))
    a = ref.importance(KEYS, probes, count, [], TABLE, 0, 1, 0.5)
    np.testing.assert_allclose(a, [[0, 0.2, 0.6, 0.2]])
    a = ref.importance(KEYS, probes, count, [], TABLE, 0, 1, 0.5, soft_cap=0.1)
    top = np.exp(0.1 * np.tanh(np.log(3) / 0.1))
    np.testing.assert_allclose(a, np.array([[0, 1, top, 1]]) / (2 + top))


# --- restated -------------------------------------------------------------------------------------


E = np.eye(4)
HALF = 0.5**0.5  # cosine of E[2] and E[2] + E[3]
ALIKE = np.array([[E[0], E[1], 2 * E[2], E[3], E[0], E[1], E[2] + E[3]]])
NOTHING = np.zeros((1, 0)), np.zeros((1, 0), int)  # known before the first compaction


def test_newer_keys_are_the_new_ones_and_old_ones_that_take_turns() -> None:
    # window 8: the newest eight and two of the twelve older ones, six apart
    turns = [ref.newer_keys(20, 8, i).tolist() for i in (0, 1, 5, 6)]
    new = list(range(12, 20))
    assert turns == [[0, 6, *new], [1, 7, *new], [5, 11, *new], [0, 6, *new]]
    # five older ones, three apart: the last turn has one
    turns = [ref.newer_keys(13, 8, i)[:-8].tolist() for i in range(4)]
    assert turns == [[0, 3], [1, 4], [2], [0, 3]]
    # the defaults: each of 896 older ones once in 28 turns
    turns = [ref.newer_keys(1024, 128, i) for i in range(28)]
    assert sorted(j for newer in turns for j in newer[newer < 896]) == list(range(896))
    assert turns[0][32:].tolist() == list(range(896, 1024))


def test_newer_keys_of_small_and_odd_windows() -> None:
    assert ref.newer_keys(30, 11, 3).tolist() == [3, 13, *range(19, 30)]  # older ones, ten apart
    assert ref.newer_keys(5, 3, 1).tolist() == [1, 2, 3, 4]
    assert ref.newer_keys(4, 1, 5).tolist() == [2, 3]  # the third turn of three
    assert ref.newer_keys(11, 11, 7).tolist() == list(range(11))  # none is older
    assert ref.newer_keys(5, 8, 7).tolist() == list(range(5))


def test_restated_is_the_highest_cosine_to_a_newer_key_and_names_it() -> None:
    similarity, twin = ref.restated(ALIKE, ALIKE, np.array([4, 6]), NOTHING)
    np.testing.assert_allclose(similarity, [[1, 0, HALF, HALF, 0, 0, 0]])
    assert twin.tolist() == [[4, -1, 6, 6, -1, -1, -1]]
    similarity, twin = ref.restated(
        ALIKE, ALIKE, np.array([0, 2, 5]), NOTHING
    )  # 0 and 2 were first
    np.testing.assert_allclose(similarity, [[0, 1, 0, 0, 0, 0, 0]])
    assert twin.tolist() == [[-1, 5, -1, -1, -1, -1, -1]]


def test_restated_only_grows_and_new_cells_begin_at_zero() -> None:
    before = np.array([[0.9, 0.9, 0.5, 0.0]]), np.array([[1, 2, 3, -1]])
    similarity, twin = ref.restated(ALIKE, ALIKE, np.array([4, 6]), before)
    np.testing.assert_allclose(similarity, [[1, 0.9, HALF, HALF, 0, 0, 0]])
    assert twin.tolist() == [[4, 2, 6, 6, -1, -1, -1]]
    again = ref.restated(ALIKE, ALIKE, np.array([4, 6]), (similarity, twin))
    np.testing.assert_array_equal(again, (similarity, twin))


def test_restated_keeps_the_first_of_two_equal_twins() -> None:
    k = np.array([[E[0], E[0], E[0]]])
    _, twin = ref.restated(k, k, np.array([2]), (np.array([[1.0]]), np.array([[1]])))
    assert twin.tolist() == [[1, 2, -1]]


def test_restated_is_from_zero_to_one() -> None:
    k = np.array([[[1.0], [-1.0], [0.0], [1.0]]])  # the like, the opposite and nothing at all
    similarity, twin = ref.restated(k, k, np.array([3]), NOTHING)
    assert (similarity.tolist(), twin.tolist()) == ([[1, 0, 0, 0]], [[3, -1, -1, -1]])
    k = np.tile(np.random.default_rng(5).standard_normal((50, 1, 7)), (1, 2, 1))
    nothing = np.zeros((50, 0)), np.zeros((50, 0), int)
    similarity, _ = ref.restated(k, k, np.array([1]), nothing)
    np.testing.assert_allclose(similarity[:, 0], 1)
    assert similarity.max() <= 1  # in spite of rounding


def test_restated_wants_the_key_and_the_value_alike() -> None:
    k, v = np.array([[E[0], E[0], E[0]]]), np.array([[E[1], E[0], E[1]]])
    similarity, twin = ref.restated(k, v, np.array([1, 2]), NOTHING)
    assert similarity.tolist() == [[1, 0.5, 0]]  # the key alone is half
    assert twin.tolist() == [[2, 2, -1]]


def test_keys_at_different_positions_are_alike_before_rope() -> None:
    r, rng = Rope(8), np.random.default_rng(3)
    k_pre, pos = rng.standard_normal((2, 5, 8)), np.array([[0, 3, 40, 700, 901]] * 2)
    k = np.stack([ref.rope(head[:, None], p, r)[:, 0] for head, p in zip(k_pre, pos)])
    np.testing.assert_allclose(ref.unrope_keys(k, pos, r), k_pre, atol=1e-9)
    turned = ref.hadamard_rotate(k, 8)
    np.testing.assert_allclose(ref.unrope_keys(turned, pos, r, 8), k_pre, atol=1e-9)


def test_restated_looks_at_each_head_by_itself() -> None:
    k = np.array([[E[0], E[1], E[0]], [E[0], E[1], E[1]]])
    nothing = np.zeros((2, 0)), np.zeros((2, 0), int)
    similarity, twin = ref.restated(k, k, np.array([0, 2]), nothing)
    assert similarity.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert twin.tolist() == [[2, -1, -1], [-1, 2, -1]]


def test_carry_renumbers_twins_and_forgets_with_those_evicted() -> None:
    similarity = np.tile([0.9, 0.8, 0.7, 0.6, 0, 0], (2, 1))
    twin = np.tile([2, 3, 5, 4, -1, -1], (2, 1))
    keep = np.array([[0, 2, 3, 5], [1, 3, 4, 5]])  # the first head loses cell 3's twin, 4
    similarity, twin = ref.carry(similarity, twin, keep)
    assert similarity.tolist() == [[0.9, 0.7, 0, 0], [0.8, 0.6, 0, 0]]
    assert twin.tolist() == [[1, 3, -1, -1], [1, 2, -1, -1]]


# --- score, select, move --------------------------------------------------------------------------


def beacon_kept(score: np.ndarray, similar: np.ndarray, keep: int, **settings: float) -> list:
    """Cells kept under the policy "beacon" with one cell at each end."""
    value = ref.score_beacon(score, similar, keep - 2, n_prefix=1, n_recent=1, **settings)
    return ref.select(value, keep, n_prefix=1, n_recent=1).tolist()


def test_beacon_keeps_ends_then_importance_then_the_least_restated() -> None:
    score = np.array([[0.0, 5, 4, 3, 2, 1, 9, 9]])
    similar = np.array([[0.0, 0.9, 0, 0.2, 0.1, 0.3, 0, 0]])
    # middle 1..6, three of it: two by value 0.5, 4, 2.4, 1.8, 0.7, 9; one by the lowest similarity
    assert beacon_kept(score, similar, 5, quota=1 / 3) == [[0, 2, 4, 6, 7]]
    assert beacon_kept(score, similar, 5, quota=0.0) == [[0, 2, 3, 6, 7]]
    assert beacon_kept(score, similar, 5, weight=0.0, quota=0.0) == [[0, 1, 2, 6, 7]]


def test_beacon_rounds_the_quota_half_up_and_lets_the_newer_cell_win_ties() -> None:
    flat = np.zeros((1, 8))
    assert beacon_kept(flat, flat, 5, quota=0.5) == [[0, 4, 5, 6, 7]]
    similar = np.array([[0.0, 0, 0, 0, 0, 1, 1, 0]])
    score = np.array([[0.0, 0, 0, 0, 0, 3e4, 1e4, 0]])  # worth 3 and 1 after the discount
    # one by value, 1.5 rounded to two by novelty
    assert beacon_kept(score, similar, 5, quota=0.5) == [[0, 3, 4, 5, 7]]


def test_select_keeps_the_highest_scores_and_the_newer_of_equals() -> None:
    score = np.array([[9.0, 1, 3, 3, 2, 3, 0, 0]])
    assert ref.select(score, 5, n_prefix=1, n_recent=2).tolist() == [[0, 3, 5, 6, 7]]


def test_select_chooses_for_each_head_by_itself() -> None:
    score = np.array([[0.0, 1, 0, 0], [0, 0, 1, 0]])
    assert ref.select(score, 3, n_prefix=1, n_recent=1).tolist() == [[0, 1, 3], [0, 2, 3]]


def test_redundancy_spares_the_newest_of_copies() -> None:
    k = np.array([[[1.0, 0], [0, 1], [1, 0], [1, 0]]])  # 0, 2 and 3 are copies
    # rows 0 and 2 leave out 3, row 3 leaves out 2, row 1 has no copy and leaves out 0: what is
    # left of the ones is (0, 2), (2, 0) and (3, 0)
    np.testing.assert_allclose(ref.redundancy(k), [[2 / 4, 0, 1 / 4, 0]])


def test_redundancy_policy_prefers_what_is_not_said_elsewhere() -> None:
    attention = np.full((1, 4), 0.25)
    score = ref.score_redundancy(attention, np.array([[0.5, 0.0, 0.25, 0.0]]), pool=1)
    weights = np.exp([0.5, 0, 0.25, 0])
    np.testing.assert_allclose(score, [0.025 - 0.9 * weights / weights.sum()])


def test_redundancy_policy_pools_attention_over_neighbours() -> None:
    attention = np.array([[0.0, 0, 0, 1, 0, 0, 0, 0]])
    score = ref.score_redundancy(attention, np.zeros((1, 8)), share=1.0, pool=3)
    np.testing.assert_allclose(score, [[0, 0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0]])


def test_expected_attention_is_that_of_the_one_query_without_variance() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 4)), rng.standard_normal((1, 5, 4))  # a group of two heads
    moment = np.einsum("hi,hj->hij", q, q)
    score = ref.score_expected(
        k, np.full((1, 5, 1), 2.0), q, moment, np.arange(5), 5, Rope(0), n_sink=1, kq_scale=0.5
    )
    weights = np.exp(0.5 * k[0] @ q.T)
    weights[0] = 0
    np.testing.assert_allclose(score, [2 * (weights / weights.sum(0)).mean(1)])


def test_expected_attention_grows_with_the_variance_along_a_key() -> None:
    k = np.array([[[1.0, 0], [0, 1]]])
    moment = np.diag([8.0, 0])[None]  # mean 0: the covariance
    score = ref.score_expected(
        k, np.ones((1, 2, 1)), np.zeros((1, 2)), moment, [5, 6], 7, Rope(0), n_sink=0, kq_scale=0.5
    )
    odds = np.exp(0.5**2 / 2 * 8)  # E[exp(x)] of x ~ N(0, s^2) is exp(s^2 / 2)
    np.testing.assert_allclose(score, [[odds / (1 + odds), 1 / (1 + odds)]])


def test_accumulated_attention_adds_up_and_starts_at_zero_for_new_cells() -> None:
    total = ref.accumulate(np.array([[1.0, 2]]), np.array([[0.5, 0, 3]]))
    assert total.tolist() == [[1.5, 2, 3]]


def test_streaming_keeps_the_newest() -> None:
    assert ref.select(ref.score_streaming(1, 8), 5, 1, 1).tolist() == [[0, 4, 5, 6, 7]]


def test_move_in_place_never_overwrites_a_row_that_is_still_needed() -> None:
    rows = np.arange(20, dtype=np.uint8).reshape(10, 2)
    keep = np.array([0, 3, 4, 8, 9])
    in_place = rows.copy()
    for i, j in enumerate(keep):
        in_place[i] = in_place[j]
    np.testing.assert_array_equal(ref.move(rows, keep), in_place[:5])


def test_table_positions_stay_true_at_both_ends_and_ascend_between() -> None:
    table, boundary = ref.table_positions(np.arange(10), 6, 2, 2)
    assert table.tolist() == [0, 1, 6, 7, 8, 9] and boundary == 8
    grown = np.concatenate([table, np.arange(10, 14)])
    table, boundary = ref.table_positions(grown, 6, 2, 2)
    assert table.tolist() == [0, 1, 10, 11, 12, 13] and boundary == 12


def test_prefix_is_the_sinks_or_the_pinned_cells() -> None:
    assert [ref.prefix(*a) for a in ((100, 4, 0), (2, 4, 0), (100, 4, 30))] == [4, 2, 30]


# --- all together ---------------------------------------------------------------------------------


def test_a_beacon_saves_a_cell_that_only_old_queries_looked_at() -> None:
    d, n, old = 8, 40, 7
    e = 8.0 * np.eye(d)
    rng = np.random.default_rng(4)
    k = 0.1 * rng.standard_normal((1, n, d))
    k[0, old] = e[0]
    k[0, 20:30] = e[1]
    empty = np.zeros((1, 2, d)), np.zeros((1, 2)), np.zeros((1, 2))

    def survives(q_track: np.ndarray, beacons: tuple, share: float) -> bool:
        kept, _, carried = ref.compact(
            k,
            k,
            np.arange(k.shape[1])[None],
            beacons,
            NOTHING,
            q_track,
            np.arange(len(q_track)),
            np.tile(e[1], (4, 1, 1)),
            np.arange(36, 40),
            np.arange(n),
            0,
            n,
            20,
            Rope(0),
            n_sink=2,
            n_prefix=2,
            n_recent=4,
            window=8,
            n_compact=0,
            kq_scale=d**-0.5,
            beacon_share=share,
            restated_weight=0.0,
            quota=0.0,
        )
        assert kept.shape == carried[0].shape == carried[1].shape == (1, 20)
        assert (np.diff(kept) > 0).all()
        assert kept[0, :2].tolist() == [0, 1] and kept[0, -4:].tolist() == [36, 37, 38, 39]
        return old in kept

    k[0, 10:20] = 0.2 * e[1]  # enough cells that recent queries like a little
    beacons = ref.track(*empty, np.tile(e[0], (6, 1, 1)))  # long ago
    now = np.tile(e[1], (6, 1, 1))
    assert survives(now, beacons, share=0.5)
    assert not survives(now, beacons, share=0.0)
    assert not survives(now, empty, share=0.5)


@pytest.mark.parametrize(("remembered", "evicted"), [(True, 2), (False, 0)])
def test_a_cell_found_restated_gives_way_at_a_later_compaction(
    remembered: bool, evicted: int
) -> None:
    d = 24
    keys = np.eye(d)[None].copy()
    keys[0, [2, 3]] = keys[0, 15]  # cells 2 and 3 are said again in 15

    def compact(k: np.ndarray, before: tuple, n_compact: int) -> tuple:
        n = k.shape[1]
        return ref.compact(
            k,
            k,
            np.arange(k.shape[1])[None],
            (np.zeros((1, 1, d)), np.zeros((1, 1)), np.zeros((1, 1))),
            before,
            np.ones((1, 1, d)),
            [n - 2],
            np.ones((1, 1, d)),
            [n - 1],
            np.arange(n),
            0,
            n,
            n - 1,
            Rope(0),
            n_sink=0,
            n_prefix=0,
            n_recent=1,
            window=8,
            n_compact=n_compact,
            kq_scale=1.0,
            quota=1.0,
        )

    kept, _, carried = compact(keys[:, :16], NOTHING, 0)
    assert kept.tolist() == [[i for i in range(16) if i != 2]]  # the older of the two
    assert [i for i in range(15) if carried[1][0, i] >= 0] == [2]  # the other one
    assert carried[1][0, 2] == 14
    grown = np.concatenate([keys[:, kept[0]], keys[:, 16:]], axis=1)
    assert 14 not in ref.newer_keys(23, 8, 1)  # its twin has no turn
    kept, _, _ = compact(grown, carried if remembered else NOTHING, 1)
    assert set(range(23)) - set(kept[0].tolist()) == {evicted}
