"""Every stage of the native compaction against the NumPy reference, through the trace arrays.

Each stage is computed by the reference from what the native one was given, so an error is found in
the stage that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tiny_models
from numpy.typing import NDArray

from beaconkv_gguf import _native
from beaconkv_gguf import reference as ref
from native import Context, Model, QueryCapture, budget, prose, random_tokens

Arrays = dict[str, Any]
Memory = tuple[NDArray[Any], NDArray[Any]]  # similarity and twin of the kept cells

BUDGET = {"window": 32, "n_sink": 4, "n_recent": 16, "n_beacon": 8, "n_probe": 8, "pin_share": 0.0}
CELLS = 256
N_COMPACT = 4
TOLERANCE = {"f16": 1e-3, "bf16": 1e-2, "q8_0": 2e-2, "q4_0": 2e-2}
CASES = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name in tiny_models.BOUNDED
    for kind in TOLERANCE
]


@dataclass
class Compaction:
    """One compaction of one layer."""

    il: int
    n_wait: int  # tokens of the batch that did not fit
    meta: dict[str, int]
    arrays: Arrays

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]


@dataclass
class Run:
    """A model decoded past its budget: its compactions in order, by layer."""

    spec: tiny_models.TinyModel
    kind: str
    compactions: dict[int, list[Compaction]]
    q_before: dict[tuple[int, int], NDArray[np.float32]]  # (il, position): queries before RoPE

    def __iter__(self) -> Iterator[Compaction]:
        return (c for layer in self.compactions.values() for c in layer)


def read_trace(ctx: Context, il: int, n_wait: int, policy: str = "beacon") -> Compaction:
    names = set(_native._TRACE) - {"meta", "similar", "expected", "k_pre"}
    names |= {"beacon": {"k_pre"}, "redundancy": {"similar"}, "expected": {"expected"}}.get(
        policy, set()
    )
    arrays = {name: _native.trace(ctx.ptr, il, name) for name in names}
    return Compaction(il, n_wait, _native.trace_meta(ctx.ptr, il), arrays)


def trace_run(model: Model, spec: tiny_models.TinyModel, kind: str) -> Run:
    """Decode in chunks, then token by token, until there were N_COMPACT compactions."""
    capture = QueryCapture() if kind == "f16" else None
    run = Run(spec, kind, {}, {})
    tokens = random_tokens(1000)
    with Context(
        model,
        budget(CELLS, **BUDGET),
        n_ctx=1024,
        n_batch=50,
        type_k=kind,
        type_v=kind,
        cb_eval=capture.callback if capture else None,
    ) as ctx:
        _native.set_trace(ctx.ptr, True)
        layers = _native.layers(ctx.ptr).tolist()
        done = 0
        while done < N_COMPACT:
            begin, size = ctx.length[0], 50 if ctx.length[0] < 300 else 1
            ctx.decode(tokens[begin : begin + size])
            if capture:
                for il in layers:
                    for i, q in enumerate(capture.before[il]):
                        run.q_before[il, begin + i] = q
            if ctx.stats()["n_compact"] > done:
                done = ctx.stats()["n_compact"]
                for il in layers:
                    run.compactions.setdefault(il, []).append(read_trace(ctx, il, size))
    return run


@pytest.fixture(scope="module", params=["composed", "fused"], autouse=True)
def operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compactions by ggml's own operators, then by ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEACONKV_FUSED", {"composed": "0", "fused": "require"}[request.param])
        yield


@pytest.fixture(scope="module")
def run(tiny: Callable[[str], Model], operators: None) -> Callable[[str, str], Run]:
    """The run of a model with a cache type, made once."""
    runs: dict[tuple[str, str], Run] = {}

    def get(name: str, kind: str) -> Run:
        if (name, kind) not in runs:
            runs[name, kind] = trace_run(tiny(name), tiny_models.ALL[name](), kind)
        return runs[name, kind]

    return get


def relative_error(a: NDArray[Any], b: NDArray[Any]) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def n_hadamard(spec: tiny_models.TinyModel, kind: str) -> int:
    """Size of the rotation of quantised keys: the largest power of two that divides the head."""
    if kind not in ("q8_0", "q4_0") or spec.head_dim % 64 != 0:
        return 0
    return spec.head_dim & -spec.head_dim


def kept_by_reference(
    attention: NDArray[Any],
    similarity: NDArray[Any],
    keep: int,
    n_prefix: int,
    n_recent: int,
    weight: float = 1.0,
    quota: float = 0.5,
) -> NDArray[Any]:
    """Cells that the reference keeps under the policy "beacon", [H, keep]."""
    n_mid = keep - n_prefix - n_recent
    score = ref.score_beacon(attention, similarity, n_mid, n_prefix, n_recent, weight, quota)
    return ref.select(score, keep, n_prefix, n_recent)


def assert_kept_alike(
    kept: NDArray[Any],
    score: NDArray[Any],
    similarity: NDArray[Any],
    n_prefix: int,
    n_recent: int,
    tie: float,
    quota: float = 0.5,
) -> None:
    """The reference would keep the same cells of each head, but for ties within `tie`."""
    keep = kept.shape[1]
    expected = kept_by_reference(score, similarity, keep, n_prefix, n_recent, quota=quota)
    n = score.shape[1]
    middle = np.arange(n_prefix, n - n_recent)
    n_mid = keep - n_prefix - n_recent
    n_value = n_mid - int(n_mid * quota + 0.5)
    for mine, theirs, importance, similar in zip(kept, expected, score, similarity):
        assert (np.diff(mine) > 0).all()
        differ = np.setxor1d(mine, theirs)
        if differ.size == 0:
            continue
        value = importance * np.maximum(1 - similar, ref.MIN_NOVELTY)
        by_value = middle[np.argsort(-value[middle])]
        edge = value[by_value[n_value - 1]]
        tied = np.abs(value[by_value] - edge) <= tie * edge
        by_novelty = np.sort(similar[by_value[n_value:]])
        rank, swaps = n_mid - n_value - 1, int(tied.sum())
        low = by_novelty[max(rank - swaps, 0)] - tie
        high = by_novelty[min(rank + swaps, len(by_novelty) - 1)] + tie
        near = np.abs(value[differ] - edge) <= tie * edge
        near |= (similar[differ] >= low) & (similar[differ] <= high)
        assert near.all(), (differ[~near], value[differ], edge, similar[differ], low, high)


def nothing(n_head_kv: int) -> Memory:
    """What is known before the first compaction."""
    return np.zeros((n_head_kv, 0)), np.zeros((n_head_kv, 0), int)


def with_memory(layer: list[Compaction]) -> Iterator[tuple[Compaction, Memory]]:
    """The compactions of a layer, and what those before it found restated among the kept cells."""
    before = nothing(layer[0].meta["H"])
    for c in layer:
        yield c, before
        before = ref.carry(c["carried"], c["twin"], c["keep"])


def assert_memory_alike(c: Compaction, before: Memory) -> None:
    """The compaction began with what the ones before it left, and with 0 for newer cells."""
    n_kept = before[0].shape[1]
    np.testing.assert_array_equal(c["carried_before"][:, :n_kept], before[0])
    assert not c["carried_before"][:, n_kept:].any()


def assert_restated_alike(c: Compaction, before: Memory, tie: float = 3e-5) -> None:
    """Similarity and twins are the reference's; of twins that tie it may be another one.

    Native takes the newest twin within 2e-5 of the highest cosine.
    """
    known = np.full(c["twin"].shape, -1)
    known[:, : before[1].shape[1]] = before[1]
    similarity, twin = ref.restated(
        c["k_pre"], c["v_f32"], c["newer"], (c["carried_before"], known)
    )
    assert relative_error(c["carried"], similarity) < 1e-3
    assert c["carried"].min() >= 0 and c["carried"].max() <= 1
    for head, i in np.argwhere(c["twin"] != twin):
        j = c["twin"][head, i]
        if j == known[head, i]:
            found = c["carried_before"][head, i]
        else:
            assert j > i and j in c["newer"], (head, i, j)
            pairs = [c[name][head, [i, j]].astype(np.float64) for name in ("k_pre", "v_f32")]
            found = sum(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs) / 2
        assert abs(found - similarity[head, i]) <= tie, (head, i, j, twin[head, i])


# --- stage by stage -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_models.BOUNDED)
def test_unrotated_queries_are_those_the_model_made(name: str, run: Callable[..., Run]) -> None:
    r = run(name, "f16")
    assert {c.il for c in r} == set(r.spec.layers)
    for c in r:
        true = np.stack([r.q_before[c.il, p] for p in c["q_track_pos"].tolist()])
        assert relative_error(c["q_pre"], true * r.spec.q_scale) < 1e-3


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rotation_is_undone(name: str, kind: str, run: Callable[..., Run]) -> None:
    for c in (r := run(name, kind)):
        expected = ref.unrope(c["q_track"], c["q_track_pos"], r.spec.rope)
        assert relative_error(c["q_pre"], expected) < 1e-3


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_query_rows_are_the_sample_and_the_newest(
    name: str, kind: str, run: Callable[..., Run]
) -> None:
    for layer in run(name, kind).compactions.values():
        begin = 0
        for c in layer:
            now = c.meta["next_pos"]
            track = ref.track_positions(range(begin, now), BUDGET["window"], BUDGET["n_probe"])
            recent = ref.recent_positions(range(now), BUDGET["window"], BUDGET["n_probe"])
            assert c["q_track_pos"].tolist() == track
            assert c["q_recent_pos"].tolist() == recent
            begin = now


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_centroids(name: str, kind: str, run: Callable[..., Run]) -> None:
    for layer in run(name, kind).compactions.values():
        assert not layer[0]["counts_before"].any()
        for c in layer:
            before = c["centroids_before"], c["counts_before"], c["norms_before"]
            mean, count, norm = ref.track(*before, c["q_pre"])
            np.testing.assert_array_equal(c["counts"], count)
            assert relative_error(c["centroids"], mean) < 1e-3
            assert relative_error(c["norms"], norm) < 1e-3
        for c, following in zip(layer, layer[1:]):
            for part in ("centroids", "counts", "norms"):
                np.testing.assert_array_equal(c[part], following[f"{part}_before"])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_probes(name: str, kind: str, run: Callable[..., Run]) -> None:
    for c in (r := run(name, kind)):
        expected = ref.probe(
            c["centroids"],
            c["norms"],
            c["q_recent"],
            c.meta["next_pos"],
            r.spec.rope,
            n_hadamard(r.spec, kind),
        )
        assert relative_error(c["probes"], expected) < 1e-3


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_importance(name: str, kind: str, run: Callable[..., Run]) -> None:
    for c in (r := run(name, kind)):
        expected = ref.importance(
            c["k_f32"],
            c["probes"],
            c["counts"],
            c["q_recent_pos"],
            c["table_pos"],
            c.meta["boundary"],
            BUDGET["n_sink"],
            r.spec.kq_scale,
            soft_cap=r.spec.soft_cap,
        )
        assert (c["importance"][:, c["table_pos"] < BUDGET["n_sink"]] == 0).all()
        np.testing.assert_allclose(c["importance"].sum(1), 1, rtol=1e-3)
        assert relative_error(c["importance"], expected) < TOLERANCE[kind]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rotation_of_keys_is_undone_at_their_own_positions(
    name: str, kind: str, run: Callable[..., Run]
) -> None:
    for c in (r := run(name, kind)):
        expected = ref.unrope_keys(c["k_f32"], c["pos"], r.spec.rope, n_hadamard(r.spec, kind))
        assert relative_error(c["k_pre"], expected) < 1e-3


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_newer_keys(name: str, kind: str, run: Callable[..., Run]) -> None:
    for layer in run(name, kind).compactions.values():
        for i, c in enumerate(layer):
            newer = ref.newer_keys(c.meta["n"], BUDGET["window"], i)
            np.testing.assert_array_equal(c["newer"], newer)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_restated(name: str, kind: str, run: Callable[..., Run]) -> None:
    for layer in run(name, kind).compactions.values():
        for c, before in with_memory(layer):
            assert_restated_alike(c, before)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_restated_is_carried_to_the_next_compaction(
    name: str, kind: str, run: Callable[..., Run]
) -> None:
    forgotten = 0
    for layer in run(name, kind).compactions.values():
        for i, (c, before) in enumerate(with_memory(layer)):
            assert_memory_alike(c, before)
            if i > 0:
                assert (c["carried_before"] > 0).any()
                forgotten += int((before[1] < 0).sum())
    assert forgotten > 0  # with twins that were evicted


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_selection(name: str, kind: str, run: Callable[..., Run]) -> None:
    for layer in run(name, kind).compactions.values():
        for c in layer:
            assert c.meta["n_prefix"] == BUDGET["n_sink"]
            assert c.meta["n_keep"] == ref.n_keep(
                c.meta["next_pos"],
                c.n_wait,
                CELLS,
                BUDGET["window"],
                c.meta["n_prefix"],
                BUDGET["n_recent"],
            )
            assert_kept_alike(
                c["keep"],
                c["importance"],
                c["carried"],
                c.meta["n_prefix"],
                BUDGET["n_recent"],
                tie=1e-6,
            )


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rows_move_unchanged(name: str, kind: str, run: Callable[..., Run]) -> None:
    for layer in run(name, kind).compactions.values():
        for c in layer:
            for cache in ("k", "v"):
                heads = np.split(c[cache], c.meta["H"], axis=1)
                moved = np.split(c[f"{cache}_after"], c.meta["H"], axis=1)
                for before, after, keep in zip(heads, moved, c["keep"]):
                    np.testing.assert_array_equal(after, ref.move(before, keep))
        for c, following in zip(layer, layer[1:]):  # and stay where they are until the next
            for cache in ("k", "v"):
                n = c.meta["n_keep"]
                np.testing.assert_array_equal(c[f"{cache}_after"], following[cache][:n])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_positions_follow_the_rows(name: str, kind: str, run: Callable[..., Run]) -> None:
    for layer in run(name, kind).compactions.values():
        held = np.empty((layer[0].meta["H"], 0), np.int32)
        table = np.empty(0, np.int32)
        boundary = begin = 0
        for c in layer:
            new = np.arange(begin, c.meta["next_pos"], dtype=np.int32)
            held = np.hstack([held, np.tile(new, (len(held), 1))])
            table = np.concatenate([table, new])
            np.testing.assert_array_equal(c["pos"], held)
            np.testing.assert_array_equal(c["table_pos"], table)
            assert c.meta["boundary"] == boundary
            held = np.take_along_axis(held, c["keep"], axis=1)
            table, boundary = ref.table_positions(
                table, c.meta["n_keep"], c.meta["n_prefix"], BUDGET["n_recent"]
            )
            begin = c.meta["next_pos"]


# --- other settings -------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "odd window": {"window": 33, "n_probe": 7, "n_beacon": 5},
    "no sinks, one recent": {"n_sink": 0, "n_recent": 1},
    "beacons alone": {"beacon_share": 1.0, "n_beacon": 1},
    "recent queries alone": {"beacon_share": 0.0, "quota": 0.0},
    "restated discounted by half": {"restated": 0.5, "quota": 0.3, "beacon_share": 0.3},
    "least restated alone": {"quota": 1.0},
    "pinned prompt": {"pin_share": 0.25},
    "few beacons for many queries": {"window": 64, "n_probe": 32, "n_beacon": 4},
    "more beacons than queries": {"n_beacon": 64, "n_probe": 4},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings_mean_the_same(settings: dict[str, Any], tiny: Callable[[str], Model]) -> None:
    p = {"beacon_share": 0.5, "restated": 1.0, "quota": 0.5, **BUDGET, **settings}
    spec = tiny_models.llama()
    tokens = random_tokens(700)
    with Context(tiny("llama"), budget(CELLS, **p), n_ctx=1024, n_batch=40) as ctx:
        _native.set_trace(ctx.ptr, True)
        ctx.decode(tokens[:30])
        ctx.step(tokens[30:32])  # the prompt ends here
        pinned = 30 if p["pin_share"] else 0
        done = 0
        memory: dict[int, Memory] = {}
        while done < N_COMPACT:
            begin = ctx.length[0]
            ctx.decode(tokens[begin : begin + 40])
            if ctx.stats()["n_compact"] == done:
                continue
            done = ctx.stats()["n_compact"]
            for il in spec.layers:
                c = read_trace(ctx, il, 40)
                now, n = c.meta["next_pos"], c.meta["n"]
                n_prefix = ref.prefix(n, p["n_sink"], pinned)
                assert c.meta["n_prefix"] == n_prefix
                keep = ref.n_keep(now, 40, CELLS, p["window"], n_prefix, p["n_recent"])
                assert c.meta["n_keep"] == keep
                recent = ref.recent_positions(range(now), p["window"], p["n_probe"])
                assert c["q_recent_pos"].tolist() == recent
                mean, count, norm = ref.track(
                    c["centroids_before"], c["counts_before"], c["norms_before"], c["q_pre"]
                )
                np.testing.assert_array_equal(c["counts"], count)
                probes = ref.probe(mean, norm, c["q_recent"], now, spec.rope)
                assert relative_error(c["probes"], probes) < 1e-3
                score = ref.importance(
                    c["k_f32"],
                    probes,
                    count,
                    recent,
                    c["table_pos"],
                    c.meta["boundary"],
                    p["n_sink"],
                    spec.kq_scale,
                    p["beacon_share"],
                )
                assert relative_error(c["importance"], score) < 1e-3
                newer = ref.newer_keys(n, p["window"], done - 1)
                np.testing.assert_array_equal(c["newer"], newer)
                before = memory.get(il, nothing(c.meta["H"]))
                assert_memory_alike(c, before)
                assert_restated_alike(c, before)
                memory[il] = ref.carry(c["carried"], c["twin"], c["keep"])
                expected = kept_by_reference(
                    c["importance"],
                    c["carried"],
                    keep,
                    n_prefix,
                    p["n_recent"],
                    p["restated"],
                    p["quota"],
                )
                agree = (c["keep"] == expected).mean()
                assert agree > 0.99, agree


def test_removed_tokens_are_no_longer_twins(tiny: Callable[[str], Model]) -> None:
    spec, tokens, others = tiny_models.llama(), random_tokens(400), random_tokens(400, seed=1)
    with Context(tiny("llama"), budget(CELLS, **BUDGET), n_ctx=1024, n_batch=40) as ctx:
        _native.set_trace(ctx.ptr, True)
        while ctx.stats()["n_compact"] < 2:
            ctx.decode(tokens[ctx.length[0] : ctx.length[0] + 40])
        left = {}
        end = _native.boundary(ctx.ptr, 0) + 5  # eleven recent tokens go that were compared
        for il in spec.layers:
            c = read_trace(ctx, il, 40)
            before = ref.carry(c["carried"], c["twin"], c["keep"])
            stay = np.tile(np.arange(c.meta["n_keep"] - 11), (c.meta["H"], 1))
            left[il] = ref.carry(*before, stay)
            assert (left[il][1] != before[1][:, : stay.shape[1]]).any()  # some had a twin there
        assert end == c.meta["next_pos"] - 11
        assert ctx.seq_rm(end)
        while ctx.stats()["n_compact"] < 3:
            ctx.decode(others[:40])
        for il in spec.layers:
            assert_memory_alike(c := read_trace(ctx, il, 40), left[il])
            assert_restated_alike(c, left[il])


def test_rotation_is_undone_far_out(tiny: Callable[[str], Model]) -> None:
    spec, capture, tokens = tiny_models.llama(), QueryCapture(), random_tokens(8192)
    true: dict[tuple[int, int], NDArray[np.float32]] = {}
    with Context(
        tiny("llama"), budget(CELLS, **BUDGET), n_ctx=8192, cb_eval=capture.callback
    ) as ctx:
        _native.set_trace(ctx.ptr, True)
        while ctx.length[0] < 8192:
            begin = ctx.length[0]
            ctx.decode(tokens[begin : begin + ctx.n_batch])
            for il in spec.layers:
                true.update({(il, begin + i): q for i, q in enumerate(capture.before[il])})
        for il in spec.layers:
            c = read_trace(ctx, il, 0)
            assert c["q_track_pos"].min() > 7500
            expected = np.stack([true[il, p] for p in c["q_track_pos"].tolist()])
            assert relative_error(c["q_pre"], expected) < 1e-3


# --- the other policies ---------------------------------------------------------------------------

OTHERS = ("recent", "redundancy", "expected", "accumulated", "streaming")
MODELS = ("llama", "gemma2", "gemma3", "stablelm")  # soft cap, q_scale, partial RoPE


class Moments:
    """Mean and second moment of the queries of each head, over all that were tracked."""

    def __init__(self) -> None:
        self.queries: list[NDArray[np.float64]] = []

    def add(self, q_pre: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        self.queries.append(np.asarray(q_pre, np.float64))
        q = np.concatenate(self.queries)  # [N, n_head, d]
        return q.mean(0), np.einsum("nhi,nhj->hij", q, q) / len(q)


def policy_score(
    policy: str,
    c: Compaction,
    spec: tiny_models.TinyModel,
    kind: str,
    before: NDArray[Any],
    moments: Moments,
) -> NDArray[Any]:
    """What the reference makes of a compaction's inputs, [H, n]."""
    h, n = c.meta["H"], c.meta["n"]
    if policy == "streaming":
        return ref.score_streaming(h, n)
    if policy == "expected":
        return ref.score_expected(
            c["k_f32"],
            c["v_f32"],
            *moments.add(c["q_pre"]),
            c["table_pos"],
            c.meta["next_pos"],
            spec.rope,
            BUDGET["n_sink"],
            spec.kq_scale,
            n_hadamard(spec, kind),
        )
    no_beacons = np.zeros((h, 0, spec.head_dim)), np.zeros((h, 0))
    probes = ref.probe(*no_beacons, c["q_recent"], 0, spec.rope, n_hadamard(spec, kind))
    assert relative_error(c["probes"], probes) < 1e-3
    attention = ref.importance(
        c["k_f32"],
        probes,
        no_beacons[1],
        c["q_recent_pos"],
        c["table_pos"],
        c.meta["boundary"],
        BUDGET["n_sink"],
        spec.kq_scale,
        soft_cap=spec.soft_cap,
    )
    if policy == "accumulated":
        n_probes = probes.shape[1]  # each of them gives away 1
        return ref.accumulate(before, attention * n_probes)
    if policy == "recent":
        return ref.score_recent(attention)
    similar = ref.redundancy(c["k_f32"])
    assert relative_error(c["similar"], similar) < 1e-3
    return ref.score_redundancy(attention, similar)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", OTHERS)
def test_policies_score_and_keep_as_the_reference(
    policy: str, name: str, kind: str, tiny: Callable[[str], Model]
) -> None:
    spec, tokens = tiny_models.ALL[name](), random_tokens(700)
    params = budget(CELLS, policy=_native.policies().index(policy), **BUDGET)
    done = 0
    carried = {il: np.zeros((spec.n_head_kv, 0)) for il in spec.layers}
    moments = {il: Moments() for il in spec.layers}
    with Context(tiny(name), params, n_ctx=1024, n_batch=50, type_k=kind, type_v=kind) as ctx:
        _native.set_trace(ctx.ptr, True)
        while done < N_COMPACT:
            begin = ctx.length[0]
            ctx.decode(tokens[begin : begin + 50])
            if ctx.stats()["n_compact"] == done:
                continue
            done = ctx.stats()["n_compact"]
            for il in spec.layers:
                c = read_trace(ctx, il, 50, policy)
                score = policy_score(policy, c, spec, kind, carried[il], moments[il])
                assert relative_error(c["score"], score) < TOLERANCE[kind]
                carried[il] = np.take_along_axis(c["score"], c["keep"], axis=1)
                kept = ref.select(
                    c["score"], c.meta["n_keep"], c.meta["n_prefix"], BUDGET["n_recent"]
                )
                np.testing.assert_array_equal(c["keep"], kept)
                for cache in ("k", "v"):
                    heads = np.split(c[cache], c.meta["H"], axis=1)
                    moved = np.split(c[f"{cache}_after"], c.meta["H"], axis=1)
                    for rows, after, keep in zip(heads, moved, c["keep"]):
                        np.testing.assert_array_equal(after, ref.move(rows, keep))


# --- the whole on a real model --------------------------------------------------------------------

SMOLLM2 = tiny_models.TinyModel(
    "llama",
    {},
    {},
    ref.Rope(64, base=100000.0),
    n_head=9,
    n_head_kv=3,
    head_dim=64,
    layers=tuple(range(30)),
)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_kept_cells_of_a_real_model_over_ten_compactions(smollm2: Model, kind: str) -> None:
    window, n_sink, n_recent, n_beacon, n_probe = 32, 4, 32, 16, 16
    params = budget(
        256,
        window=window,
        n_sink=n_sink,
        n_recent=n_recent,
        n_beacon=n_beacon,
        n_probe=n_probe,
        pin_share=0.0,
    )
    tokens = smollm2.tokenize(prose(40))
    memory: dict[int, Memory] = {}
    differ = total = done = 0
    with Context(smollm2, params, n_ctx=1024, n_batch=window, type_k=kind, type_v=kind) as ctx:
        _native.set_trace(ctx.ptr, True)
        while done < 10:
            begin = ctx.length[0]
            ctx.decode(tokens[begin : begin + window])
            if ctx.stats()["n_compact"] == done:
                continue
            done = ctx.stats()["n_compact"]
            for il in SMOLLM2.layers:
                c = read_trace(ctx, il, window)
                mean, count, norm = ref.track(
                    c["centroids_before"],
                    c["counts_before"],
                    c["norms_before"],
                    ref.unrope(c["q_track"], c["q_track_pos"], SMOLLM2.rope),
                )
                probes = ref.probe(
                    mean,
                    norm,
                    c["q_recent"],
                    c.meta["next_pos"],
                    SMOLLM2.rope,
                    n_hadamard(SMOLLM2, kind),
                )
                score = ref.importance(
                    c["k_f32"],
                    probes,
                    count,
                    c["q_recent_pos"],
                    c["table_pos"],
                    c.meta["boundary"],
                    n_sink,
                    SMOLLM2.kq_scale,
                )
                before = memory.get(il, nothing(c.meta["H"]))
                assert_memory_alike(c, before)
                assert_restated_alike(c, before)
                newer = ref.newer_keys(c.meta["n"], window, done - 1)
                k_pre = ref.unrope_keys(
                    c["k_f32"], c["pos"], SMOLLM2.rope, n_hadamard(SMOLLM2, kind)
                )
                similar, _ = ref.restated(k_pre, c["v_f32"], newer, before)
                memory[il] = ref.carry(c["carried"], c["twin"], c["keep"])
                assert_kept_alike(c["keep"], score, similar, n_sink, n_recent, tie=1e-4)
                expected = kept_by_reference(score, similar, c.meta["n_keep"], n_sink, n_recent)
                for a, b in zip(c["keep"], expected):
                    differ += np.setdiff1d(a, b).size
                    total += b.size
    assert differ <= 3e-3 * total  # copies of a token are alike up to rounding
