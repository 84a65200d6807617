"""The algorithm in plain NumPy: slow, obvious, and what the native graphs are checked against.

One compaction of one attention layer of one sequence is

    track -> probe -> importance -> restated -> score -> select -> move, carry

and each of these is one function below; :func:`compact` chains them. The other policies that the
cache knows, to compare with, differ in their score. Shapes use

    H   KV heads                     n   cells before the compaction, in the order of positions
    G   query heads per KV head      m   beacons (centroids) per KV head
    d   head size of K               N   tracked query rows, R recent query rows

A *cell* is an index into the cache, a *position* a token's place in its sequence; ``table_pos``
are the positions in the cell table, which the mask sees. Inputs may be float32, sums are float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.floating]
IntArray = NDArray[np.integer]

K_MEANS_ROUNDS = 6
MIN_NOVELTY = 1e-4  # floor of 1 - restated: a cell restated word for word can still be kept


# --------------------------------------------------------------------------------------------------
# RoPE
# --------------------------------------------------------------------------------------------------


class Rope(NamedTuple):
    """What rotates the queries and keys of one layer. ``n_rot = 0``: a layer without RoPE."""

    n_rot: int  # the first n_rot dimensions of a head are rotated, the others stay
    neox: bool = False  # pairs (i, i + n_rot/2) as in GPT-NeoX; else (2i, 2i + 1)
    base: float = 10000.0
    scale: float = 1.0  # frequency scale: 1 / context extension factor
    factors: tuple[float, ...] | None = None  # [n_rot/2] divisors of the angles (Llama 3, Phi 3)
    ext_factor: float = 0.0  # YaRN: share of extrapolation, 0 switches YaRN off
    attn_factor: float = 1.0  # YaRN: the rotated vector is multiplied by this
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0  # YaRN: context the model was trained with


def rope_angles(pos: ArrayLike, r: Rope) -> tuple[Array, float]:
    """Angle of each pair of dimensions at each position, and the factor on the vector's length.

    Parameters
    ----------
    pos : [N] positions

    Returns
    -------
    theta : [N, n_rot/2] radians
    mscale : float
    """
    i = np.arange(r.n_rot // 2)
    theta = np.asarray(pos, np.float64)[:, None] * float(r.base) ** (-2.0 * i / r.n_rot)
    if r.factors is not None:
        theta = theta / np.asarray(r.factors, np.float64)
    if r.ext_factor == 0.0:
        return theta * r.scale, r.attn_factor

    def correction_dim(n_turns: float) -> float:  # dimension that turns n_turns times in n_ctx_orig
        return r.n_rot * np.log(r.n_ctx_orig / (n_turns * 2 * np.pi)) / (2 * np.log(r.base))

    low = max(0.0, np.floor(correction_dim(r.beta_fast)))
    high = min(r.n_rot - 1.0, np.ceil(correction_dim(r.beta_slow)))
    ramp = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)
    mix = ramp * r.ext_factor  # 1: fast dimension, extrapolated; 0: slow one, interpolated
    theta = theta * r.scale * (1 - mix) + theta * mix
    return theta, r.attn_factor * (1 + 0.1 * np.log(1 / r.scale))


def _rotate(x: Array, theta: Array, r: Rope) -> Array:
    half = r.n_rot // 2
    a, b = (
        (slice(0, half), slice(half, r.n_rot))
        if r.neox
        else (slice(0, r.n_rot, 2), slice(1, r.n_rot, 2))
    )
    cos, sin = np.cos(theta)[:, None, :], np.sin(theta)[:, None, :]
    out = np.array(x, np.float64)
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def rope(x: Array, pos: ArrayLike, r: Rope) -> Array:
    """Rotate ``x`` [N, heads, d] to the positions ``pos`` [N]."""
    x = np.asarray(x, np.float64)
    if r.n_rot == 0:
        return x
    theta, mscale = rope_angles(pos, r)
    out = _rotate(x, theta, r)
    out[..., : r.n_rot] *= mscale
    return out


def unrope(x: Array, pos: ArrayLike, r: Rope) -> Array:
    """Undo :func:`rope`: ``unrope(rope(x, pos, r), pos, r) == x``."""
    x = np.asarray(x, np.float64)
    if r.n_rot == 0:
        return x
    theta, mscale = rope_angles(pos, r)
    out = _rotate(x, -theta, r)
    out[..., : r.n_rot] /= mscale
    return out


def rope_future(x: Array, next_pos: int, step: int, r: Rope) -> Array:
    """Rotate ``x`` [..., d] to 16 positions to come, ``step`` apart from ``next_pos`` on: the mean.

    Where a query like it comes next is not known: what turns fast cancels out.
    """
    flat = np.asarray(x, np.float64).reshape(1, -1, x.shape[-1])
    later = next_pos + step * np.arange(16)
    return np.mean([rope(flat, [p], r)[0] for p in later], axis=0).reshape(x.shape)


def hadamard(n: int) -> Array:
    """The orthogonal, symmetric [n, n] Hadamard matrix that quantised caches are rotated by."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"n must be a power of two, got {n}")
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


def hadamard_rotate(x: Array, n: int) -> Array:
    """Multiply each run of ``n`` dimensions of ``x`` [..., d] by :func:`hadamard`; n = 0: as is."""
    x = np.asarray(x, np.float64)
    return x if n == 0 else (x.reshape(-1, n) @ hadamard(n)).reshape(x.shape)


# --------------------------------------------------------------------------------------------------
# Which queries are stored while decoding, how many cells stay
# --------------------------------------------------------------------------------------------------


def query_stride(window: int, n_probe: int) -> int:
    """Distance in tokens of two stored queries of a kind."""
    return max(2, window // n_probe)


def track_positions(positions: Iterable[int], window: int, n_probe: int) -> list[int]:
    """Positions whose queries wait for the next *track*, given those decoded since the last one.

    At most ``n_probe`` rows, evenly spread: when they are full, every other one is given up.
    """
    stride = query_stride(window, n_probe)
    rows: list[int] = []
    for p in positions:
        if p % stride != 0:
            continue
        if len(rows) == n_probe:
            stride *= 2
            rows = [q for q in rows if q % stride == 0]
        if p % stride == 0:
            rows.append(p)
    return rows


def recent_positions(positions: Iterable[int], window: int, n_probe: int) -> list[int]:
    """Positions whose queries are in the ring of recent probes, ascending; offset from the others.

    Position ``p`` is in row ``p // stride % n_probe``, so it replaces the oldest.
    """
    stride = query_stride(window, n_probe)
    ring = {p // stride % n_probe: p for p in positions if p % stride == stride // 2}
    return sorted(ring.values())


def n_held(length: int, budget: int, window: int) -> int:
    """Cells in use after ``length`` tokens: up to ``budget``, ``window`` less after a compaction.

    Depends on the length alone, so that a prompt in many chunks ends at the same size as in one.
    """
    if length <= budget:
        return length
    return budget - window + (length - budget - 1) % window + 1


def n_keep(length: int, n_wait: int, budget: int, window: int, n_prefix: int, n_recent: int) -> int:
    """Cells to keep of a sequence of ``length`` tokens when a batch of ``n_wait`` waits."""
    return max(n_held(length + n_wait, budget, window) - n_wait, n_prefix + n_recent)


def max_batch(budget: int, window: int, n_sink: int, n_recent: int, pin_share: float) -> int:
    """Most tokens that one decode may bring per sequence; below 1 the parameters are invalid."""
    pinned = int(np.float32(budget) * np.float32(max(pin_share, 0.0)))
    return budget - window - n_recent - max(n_sink, pinned)


# --------------------------------------------------------------------------------------------------
# track
# --------------------------------------------------------------------------------------------------


def _unit(x: Array) -> Array:
    """``x`` with each row of length 1; zero rows stay zero."""
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.divide(x, length, out=np.zeros_like(x, dtype=np.float64), where=length > 0)


def pool(q: Array, n_head_kv: int) -> Array:
    """Queries of the heads that share a KV head, together: [N, H*G, d] -> [H, N*G, d]."""
    n, n_head, d = q.shape
    g = n_head // n_head_kv
    return q.reshape(n, n_head_kv, g, d).transpose(1, 0, 2, 3).reshape(n_head_kv, n * g, d)


def _sums(x: Array, cluster: IntArray, m: int) -> tuple[Array, Array, Array]:
    """Count [m], sum of vectors [m, d] and sum of lengths [m] of the points in each cluster."""
    member = (cluster[None, :] == np.arange(m)[:, None]).astype(np.float64)  # [m, points]
    return member.sum(1), member @ x, member @ np.linalg.norm(x, axis=-1)


def track_init(x: Array, m: int) -> tuple[Array, Array, Array]:
    """First clusters of one KV head: cosine k-means from a farthest-point start.

    Parameters
    ----------
    x : [points, d] queries before RoPE

    Returns
    -------
    mean : [m, d] mean of the raw vectors of each cluster
    count : [m]
    norm : [m] mean length of its vectors (longer than the mean vector)
    """
    x = np.asarray(x, np.float64)
    points, d = x.shape
    xn = _unit(x)

    # start: the point least like the average, then always the one least like those picked
    similarity = xn @ _unit(xn.mean(0)) if points else np.zeros(0)
    picked: list[int] = []
    for _ in range(min(m, points)):
        picked.append(int(similarity.argmin()))
        to_new = xn @ xn[picked[-1]]
        similarity = to_new if len(picked) == 1 else np.maximum(similarity, to_new)
    centre = xn[picked]

    mean, count, norm = np.zeros((m, d)), np.zeros(m), np.zeros(m)
    if not picked:
        return mean, count, norm
    for _ in range(K_MEANS_ROUNDS):
        n, total, _length = _sums(xn, (xn @ centre.T).argmax(1), len(picked))
        centre = np.where(n[:, None] > 0, _unit(total), centre)
    n, total, length = _sums(x, (xn @ centre.T).argmax(1), len(picked))
    some = np.maximum(n, 1)
    mean[: len(n)], count[: len(n)], norm[: len(n)] = total / some[:, None], n, length / some
    return mean, count, norm


def track_update(mean: Array, count: Array, norm: Array, x: Array) -> tuple[Array, Array, Array]:
    """Fold new queries into the clusters of one KV head: nearest by cosine, running means.

    Parameters
    ----------
    mean : [m, d], count : [m], norm : [m]
    x : [points, d] queries before RoPE

    Returns
    -------
    mean, count, norm : as before, updated
    """
    x, mean = np.asarray(x, np.float64), np.asarray(mean, np.float64)
    nearest = (_unit(x) @ _unit(mean).T).argmax(1)
    n, total, length = _sums(x, nearest, len(mean))
    some = np.maximum(count + n, 1)
    mean = (mean * count[:, None] + total) / some[:, None]
    return mean, count + n, (norm * count + length) / some


def track(mean: Array, count: Array, norm: Array, q_pre: Array) -> tuple[Array, Array, Array]:
    """Fold the queries stored since the last compaction into the clusters of every KV head.

    Parameters
    ----------
    mean : [H, m, d], count : [H, m], norm : [H, m]; counts of 0 throughout: no clusters yet
    q_pre : [N, H*G, d] queries before RoPE

    Returns
    -------
    mean, count, norm : as before, updated
    """
    h, m, _ = mean.shape
    x = pool(q_pre, h)
    if not np.any(count):
        heads = [track_init(x[i], m) for i in range(h)]
    else:
        heads = [track_update(mean[i], count[i], norm[i], x[i]) for i in range(h)]
    mean, count, norm = (np.stack(part) for part in zip(*heads))
    return mean, count, norm


# --------------------------------------------------------------------------------------------------
# probe, importance, restated
# --------------------------------------------------------------------------------------------------


def probe(
    mean: Array, norm: Array, q_recent: Array, next_pos: int, r: Rope, n_hadamard: int = 0
) -> Array:
    """What is multiplied with the keys: beacons, rotated to positions to come, and recent queries.

    Parameters
    ----------
    mean : [H, m, d], norm : [H, m]
    q_recent : [R, H*G, d] after RoPE
    next_pos : position of the next token; the beacons are rotated to the 1,024 from there on
    n_hadamard : size of the Hadamard rotation of the cached keys, 0 if they have none

    Returns
    -------
    [H, m + G*R, d] beacons first; of the recent queries the head of the group is outermost
    """
    h, _, d = mean.shape
    beacon = rope_future(_unit(mean) * norm[..., None], next_pos, 64, r)
    grouped = np.asarray(q_recent, np.float64).reshape(len(q_recent), h, -1, d)
    recent = grouped.transpose(1, 2, 0, 3).reshape(h, -1, d)  # [R, H, G, d] -> [H, G*R, d]
    return hadamard_rotate(np.concatenate([beacon, recent], axis=1), n_hadamard)


def importance(
    k: Array,
    probes: Array,
    count: Array,
    recent_pos: ArrayLike,
    table_pos: ArrayLike,
    boundary: int,
    n_sink: int,
    kq_scale: float,
    beacon_share: float = 0.5,
    soft_cap: float = 0.0,
) -> Array:
    """How much the probes attend to each cell, sinks left out.

    Parameters
    ----------
    k : [H, n, d] cached keys
    probes : [H, P, d] from :func:`probe`
    count : [H, m] of the beacons; those of an empty cluster have no say
    recent_pos : [R] positions of the recent queries; they see nothing newer than themselves
    table_pos : [n]
    boundary : cells below it are older than any probe, whatever the table says of their positions

    Returns
    -------
    [H, n], each head's sum is 1
    """
    k, probes = np.asarray(k, np.float64), np.asarray(probes, np.float64)
    table_pos, recent_pos = np.asarray(table_pos), np.asarray(recent_pos)
    h, m = count.shape
    g = (probes.shape[1] - m) // max(len(recent_pos), 1)

    hidden = np.zeros((probes.shape[1], k.shape[1]), bool)  # [P, n]
    hidden[:, table_pos < n_sink] = True
    newer = table_pos[None, :] > np.tile(recent_pos, g)[:, None]  # [G*R, n]
    hidden[m:] |= newer & (table_pos >= boundary)[None, :]

    logits = kq_scale * probes @ k.transpose(0, 2, 1)
    if soft_cap > 0:
        logits = soft_cap * np.tanh(logits / soft_cap)
    logits = np.where(hidden[None], -np.inf, logits)
    top = logits.max(-1, keepdims=True)
    weight = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = weight.sum(-1, keepdims=True)
    attention = weight / np.where(total > 0, total, 1.0)  # a probe that sees nothing says nothing

    def share(a: Array) -> Array:  # [H, probes, n] -> [H, n]
        a = a.sum(1)
        total = a.sum(-1, keepdims=True)
        return a / np.where(total > 0, total, 1.0)

    beacons = share(attention[:, :m] * (count > 0)[..., None])
    recent = share(attention[:, m:])
    use = np.full((h, 1), float(beacon_share))
    use[count.sum(1) == 0] = 0.0  # no beacons yet
    if len(recent_pos) == 0:
        use[:] = 1.0
    return use * beacons + (1 - use) * recent


def newer_keys(n: int, window: int, n_compact: int) -> IntArray:
    """Cells that the others are compared with: the new ones, and some of the old.

    The ``window`` newest, and about ``window // 4`` of the older ones, which take turns from
    compaction to compaction: what was like a cell that is evicted may be like another one.

    Parameters
    ----------
    n_compact : compactions of this sequence so far

    Returns
    -------
    [J] indices into n, ascending
    """
    n_new = min(n, window)  # since the last compaction
    n_old = n - n_new
    stride = max(1, -(-n_old // max(1, window // 4)))  # rounded up
    old = np.arange(n_compact % stride, n_old, stride)
    return np.concatenate([old, np.arange(n_old, n)])


def unrope_keys(k: Array, pos: IntArray, r: Rope, n_hadamard: int = 0) -> Array:
    """Cached keys as they were before RoPE: [H, n, d] at the positions [H, n] -> [H, n, d]."""
    k = hadamard_rotate(k, n_hadamard)  # its own inverse
    return np.stack([unrope(head[:, None], p, r)[:, 0] for head, p in zip(k, pos)])


def restated(
    k_pre: Array, v: Array, newer: IntArray, before: tuple[Array, IntArray]
) -> tuple[Array, IntArray]:
    """How alike each cell is to a newer one: 1 if it is said again, 0 if nothing is like it.

    The highest similarity so far, and its *twin*: the newer cell that it was found with. What is
    said again has the same key and the same value, wherever it stood: the similarity is the mean
    of the cosines of the two.

    Parameters
    ----------
    k_pre : [H, n, d] keys from :func:`unrope_keys`
    v : [H, n, d'] cached values
    newer : [J] from :func:`newer_keys`; a cell looks at those above its own index
    before : similarity [H, n'] and twin [H, n'] of the first n' cells, from :func:`carry`; the
        other cells are new since the last compaction

    Returns
    -------
    similarity : [H, n] from 0 to 1
    twin : [H, n] index into n, -1 if no similarity was above 0
    """
    h, n, _ = k_pre.shape
    similarity, twin = np.zeros((h, n)), np.full((h, n), -1)
    n_seen = before[0].shape[1]
    similarity[:, :n_seen], twin[:, :n_seen] = before

    units = [_unit(np.asarray(x, np.float64)) for x in (k_pre, v)]
    cosine = sum(x @ x[:, newer].transpose(0, 2, 1) for x in units) / 2  # [H, n, J]
    cosine = np.where(newer[None, :] > np.arange(n)[:, None], cosine, -1.0)
    highest = np.minimum(cosine.max(-1), 1.0)
    found = highest > similarity
    return np.where(found, highest, similarity), np.where(found, newer[cosine.argmax(-1)], twin)


# --------------------------------------------------------------------------------------------------
# score: one function for each policy, -> [H, n]; the highest stay
# --------------------------------------------------------------------------------------------------


def score_beacon(
    attention: Array,
    similarity: Array,
    n_mid: int,
    n_prefix: int,
    n_recent: int,
    weight: float = 1.0,
    quota: float = 0.5,
) -> Array:
    """Part by importance, restated cells discounted; then a `quota` to the least restated.

    The quota is for facts that no query has asked for yet.

    Parameters
    ----------
    attention : [H, n] from :func:`importance`
    similarity : [H, n] from :func:`restated`
    n_mid : cells to choose between the first `n_prefix` and the last `n_recent`
    """
    n_quota = int(np.float32(n_mid) * np.float32(quota) + np.float32(0.5))  # rounded half up
    value = attention * np.maximum(1 - weight * similarity, MIN_NOVELTY)
    best = select(value, n_prefix + n_mid - n_quota + n_recent, n_prefix, n_recent)
    score = -np.array(similarity, np.float64)
    np.put_along_axis(score, best[:, n_prefix : best.shape[1] - n_recent], 1.0, axis=1)
    return score


def score_recent(attention: Array) -> Array:
    """Attention of the last queries (SnapKV, arXiv 2404.14469; without its pooling).

    Parameters
    ----------
    attention : [H, n] from :func:`importance` with a beacon share of 0
    """
    return attention


def redundancy(k: Array, alike: float = 0.5) -> Array:
    """Mean cosine of each key to the others, [H, n, d] -> [H, n] (R-KV, arXiv 2505.24133).

    Every key leaves out the newest of those that are alike to it, so that of many copies the last
    is not redundant; one that has none leaves out the first cell.
    """
    kn = _unit(np.asarray(k, np.float64))
    n = kn.shape[1]
    cosine = kn @ kn.transpose(0, 2, 1)
    cosine[:, np.arange(n), np.arange(n)] = 0.0
    last = np.where(cosine > alike, np.arange(n), 0).max(-1)  # [H, n]
    np.put_along_axis(cosine, last[..., None], 0.0, axis=2)
    return cosine.mean(1)


def score_redundancy(attention: Array, similar: Array, share: float = 0.1, pool: int = 7) -> Array:
    """Attention of the last queries, less how redundant the keys are (R-KV, arXiv 2505.24133).

    Parameters
    ----------
    attention : [H, n] as for :func:`score_recent`; the highest of `pool` neighbours counts
    similar : [H, n] from :func:`redundancy`
    share : of the attention
    """
    n = attention.shape[1]
    padded = np.pad(attention, ((0, 0), (pool // 2, pool // 2)))
    pooled = np.max([padded[:, i : i + n] for i in range(pool)], axis=0)
    softmax = np.exp(similar) / np.exp(similar).sum(-1, keepdims=True)
    total = pooled.sum(-1, keepdims=True)
    return share * pooled / np.where(total > 0, total, 1.0) - (1 - share) * softmax


def score_expected(
    k: Array,
    v: Array,
    mean: Array,
    moment: Array,
    table_pos: ArrayLike,
    next_pos: int,
    r: Rope,
    n_sink: int,
    kq_scale: float,
    n_hadamard: int = 0,
) -> Array:
    """Attention of normally distributed queries to come (Expected Attention, arXiv 2510.00636).

    ``log E[exp(q k)]`` of ``q ~ N(mean, covariance)``, rotated to the next 512 positions on
    average; softmax over the cells without sinks, times the length of the value, mean over the
    group.

    Parameters
    ----------
    k : [H, n, d], v : [H, n, d']
    mean : [H*G, d] of the queries before RoPE, moment : [H*G, d, d] mean of ``q q^T``
    """
    h, n, d = k.shape
    g = len(mean) // h
    turn = hadamard_rotate(rope_future(np.eye(d), next_pos, 32, r), n_hadamard)  # of basis vectors
    cov = moment - mean[:, :, None] * mean[:, None, :]
    mean, cov = mean @ turn, turn.T @ cov @ turn

    keys = np.repeat(np.asarray(k, np.float64), g, axis=0)  # [H*G, n, d]
    logits = kq_scale * (keys @ mean[..., None])[..., 0]
    logits += kq_scale**2 / 2 * ((keys @ cov) * keys).sum(-1)
    logits[:, np.asarray(table_pos) < n_sink] = -np.inf
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    return weight.reshape(h, g, n).mean(1) * np.linalg.norm(v, axis=-1)


def accumulate(before: Array, attention: Array) -> Array:
    """Attention that each cell got so far (H2O, arXiv 2306.14048): [H, n'], [H, n] -> [H, n].

    The score of the policy "accumulated". Of :func:`importance` it takes the sums over the recent
    queries, not the shares.
    """
    total = np.array(attention, np.float64)
    total[:, : before.shape[1]] += before
    return total


def score_streaming(n_head_kv: int, n: int) -> Array:
    """The newest (StreamingLLM, arXiv 2309.17453)."""
    return np.tile(np.arange(n, dtype=np.float64), (n_head_kv, 1))


# --------------------------------------------------------------------------------------------------
# select, move
# --------------------------------------------------------------------------------------------------


def prefix(n: int, n_sink: int, n_pinned: int) -> int:
    """Cells at the front that no compaction moves."""
    return max(min(n_sink, n), n_pinned)


def select(score: Array, keep: int, n_prefix: int, n_recent: int) -> IntArray:
    """Choose the cells that each KV head keeps.

    The first ``n_prefix`` and the last ``n_recent`` stay, and of the others those with the highest
    score; the newer cell wins a tie.

    Parameters
    ----------
    score : [H, n] of a policy
    keep : cells to keep in each head

    Returns
    -------
    [H, keep] indices into n, ascending
    """
    h, n = score.shape
    middle = np.arange(n_prefix, n - n_recent)
    ends = np.concatenate([np.arange(n_prefix), np.arange(n - n_recent, n)])
    kept = np.empty((h, keep), np.int32)
    for i in range(h):
        order = middle[np.lexsort((-middle, -score[i, middle]))]
        kept[i] = np.sort(np.concatenate([ends, order[: keep - len(ends)]]))
    return kept


def move(rows: NDArray, keep: IntArray) -> NDArray:
    """Kept rows of one KV head to the front: [n, ...] and [keep] -> [keep, ...], bytes as they are.

    Ascending, so that done in place a row never overwrites one that is still to be read.
    """
    return rows[keep]


def carry(similarity: Array, twin: IntArray, keep: IntArray) -> tuple[Array, IntArray]:
    """What :func:`restated` knew of the kept cells, for the next compaction.

    A cell whose twin was evicted is no longer restated: it starts anew, from 0.

    Parameters
    ----------
    similarity : [H, n], twin : [H, n] from :func:`restated`
    keep : [H, keep] from :func:`select`

    Returns
    -------
    similarity : [H, keep]
    twin : [H, keep] indices into the kept cells, or -1
    """
    moved = np.full(twin.shape, -1)  # where each cell goes
    np.put_along_axis(moved, keep, np.arange(keep.shape[1])[None], axis=1)
    twin = np.take_along_axis(twin, keep, axis=1)
    twin = np.where(twin < 0, -1, np.take_along_axis(moved, twin, axis=1))
    return np.where(twin < 0, 0.0, np.take_along_axis(similarity, keep, axis=1)), twin


def table_positions(
    table_pos: IntArray, keep: int, n_prefix: int, n_recent: int
) -> tuple[IntArray, int]:
    """The cell table after a compaction, one for all heads: [n] -> [keep], and the boundary.

    Prefix and recent cells hold true positions; those between get unique ones below the boundary.
    """
    n = len(table_pos)
    recent = table_pos[n - n_recent :]
    boundary = int(recent[0]) if n_recent else int(table_pos[-1]) + 1
    n_mid = keep - n_prefix - n_recent
    mid = np.arange(boundary - n_mid, boundary, dtype=table_pos.dtype)
    return np.concatenate([table_pos[:n_prefix], mid, recent]), boundary


def compact(
    k: Array,
    v: Array,
    pos: IntArray,
    beacons: tuple[Array, Array, Array],
    before: tuple[Array, IntArray],
    q_track: Array,
    q_track_pos: ArrayLike,
    q_recent: Array,
    q_recent_pos: ArrayLike,
    table_pos: IntArray,
    boundary: int,
    next_pos: int,
    keep: int,
    r: Rope,
    *,
    n_sink: int,
    n_prefix: int,
    n_recent: int,
    window: int,
    n_compact: int,
    kq_scale: float,
    beacon_share: float = 0.5,
    restated_weight: float = 1.0,
    quota: float = 0.5,
    soft_cap: float = 0.0,
    n_hadamard: int = 0,
) -> tuple[IntArray, tuple[Array, Array, Array], tuple[Array, IntArray]]:
    """One compaction of one layer up to the choice; :func:`move` carries it out.

    Parameters
    ----------
    k, v : [H, n, d] cached keys and values, as stored
    pos : [H, n] true positions of the cells
    beacons : mean [H, m, d], count [H, m], norm [H, m]
    before : similarity [H, n'] and twin [H, n'] of the cells that the last compaction kept
    q_track : [N, H*G, d] and q_recent : [R, H*G, d] queries after RoPE

    Returns
    -------
    keep : [H, keep]
    beacons : as before, updated
    carried : ``before`` of the next compaction
    """
    mean, count, norm = track(*beacons, unrope(q_track, q_track_pos, r))
    probes = probe(mean, norm, q_recent, next_pos, r, n_hadamard)
    share = importance(
        k,
        probes,
        count,
        q_recent_pos,
        table_pos,
        boundary,
        n_sink,
        kq_scale,
        beacon_share,
        soft_cap,
    )
    newer = newer_keys(k.shape[1], window, n_compact)
    similarity, twin = restated(unrope_keys(k, pos, r, n_hadamard), v, newer, before)
    n_mid = keep - n_prefix - n_recent
    score = score_beacon(share, similarity, n_mid, n_prefix, n_recent, restated_weight, quota)
    kept = select(score, keep, n_prefix, n_recent)
    return kept, (mean, count, norm), carry(similarity, twin, kept)
