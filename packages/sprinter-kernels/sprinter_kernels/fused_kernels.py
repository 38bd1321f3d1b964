"""Kernels of a decoder layer over few tokens, in Triton's language.

A forward pass over few tokens reads each weight once and computes little: its time is that of reading, and of starting
kernels. So a layer is nine kernels. Each element of a result is summed in an order that depends neither on the number
of tokens nor on what they are: a token of a chain has the same law, to the bit, in every short forward pass.

Products over many columns are split among more programs than a matrix has blocks of rows. What reads the result adds
the parts, ``[splits, tokens, channels]`` in float32, in their order.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102, SIM108
# (Triton's language is no Python that mypy knows; conditions on constants choose what is compiled.)

import triton
import triton.language as tl

__all__ = ["add_norm", "attend", "feed", "merge", "multiply", "place"]

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == SILU:
        return x * tl.sigmoid(x)
    if KIND == GELU_TANH:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _sum_block(
    x, w, scale, rows, seen, tokens, M, K, begin, end, row_step, column_step,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Rows of a matrix times all tokens, over its columns from ``begin`` to ``end``: ``[BLOCK_N, TOKENS]``."""
    columns = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for k in range(begin, end, BLOCK_K):
        at = k + columns
        inside = at < K
        weights = tl.load(
            w + rows[:, None] * row_step + at[None, :] * column_step,
            mask=seen[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first",
        )  # fmt: skip
        states = tl.load(
            x + tokens[None, :] * K + at[:, None], mask=(tokens < M)[None, :] & inside[:, None], other=0.0
        )
        if EXACT:
            total = tl.dot(weights.to(states.dtype), states, total, input_precision="ieee")
        else:
            total = tl.dot(weights.to(states.dtype), states, total)
    if SCALED:
        total *= tl.load(scale + rows, mask=seen, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["M"])
def multiply(
    x, w, scale, out, M, K, n0, n1, n2, w1, w2, s1, s2, row_step, column_step, each,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Up to three matrices times ``x [M, K]``: ``out [splits, M, n0 + n1 + n2]``, a part of the columns each.

    Matrices two and three begin ``w1`` and ``w2`` elements behind the first, their scales ``s1`` and ``s2``.
    ``each``: columns of a part.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    tiles0 = tl.cdiv(n0, BLOCK_N)
    tiles1 = tiles0 + tl.cdiv(n1, BLOCK_N)
    second, third = tile >= tiles0, tile >= tiles1
    size = tl.where(third, n2, tl.where(second, n1, n0))
    first = tl.where(third, n0 + n1, tl.where(second, n0, 0))
    local = tile - tl.where(third, tiles1, tl.where(second, tiles0, 0))
    rows = local * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.arange(0, TOKENS)
    base = w + tl.where(third, w2, tl.where(second, w1, 0))
    scales = scale + tl.where(third, s2, tl.where(second, s1, 0))
    begin = split * each
    total = _sum_block(
        x, base, scales, rows.to(tl.int64), rows < size, tokens, M, K, begin, tl.minimum(begin + each, K),
        row_step, column_step, BLOCK_N, BLOCK_K, TOKENS, SCALED, EXACT,
    )  # fmt: skip
    channels = n0 + n1 + n2
    at = out + (split * M + tokens)[None, :].to(tl.int64) * channels + (first + rows)[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < size)[:, None] & (tokens < M)[None, :])


@triton.jit(do_not_specialize=["M"])
def feed(
    x, w, scale, bias, out, M, K, N, gate, gate_scale, gate_bias, row_step, column_step,
    KIND: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The first half of the feed-forward part, ``out [M, N]``: activation(gate x) * (up x), or activation(up x).

    Gate, its scales and its bias begin ``gate``, ``gate_scale`` and ``gate_bias`` elements behind up's.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens, seen, far = tl.arange(0, TOKENS), rows < N, rows.to(tl.int64)
    made = _sum_block(
        x, w, scale, far, seen, tokens, M, K, 0, K, row_step, column_step,
        BLOCK_N, BLOCK_K, TOKENS, SCALED, EXACT,
    )  # fmt: skip
    if BIASED:
        made += tl.load(bias + rows, mask=seen, other=0.0).to(tl.float32)[:, None]
    if GATED:
        opened = _sum_block(
            x, w + gate, scale + gate_scale, far, seen, tokens, M, K, 0, K, row_step, column_step,
            BLOCK_N, BLOCK_K, TOKENS, SCALED, EXACT,
        )  # fmt: skip
        if BIASED:
            opened += tl.load(bias + gate_bias + rows, mask=seen, other=0.0).to(tl.float32)[:, None]
        made *= _activated(opened, KIND)
    else:
        made = _activated(made, KIND)
    at = out + tokens[None, :] * N + rows[:, None]
    tl.store(at, made.to(out.dtype.element_ty), mask=seen[:, None] & (tokens < M)[None, :])


@triton.jit
def _head(
    parts, bias, token, column, inside, M, channels, bias_at, SPLITS: tl.constexpr, BIASED: tl.constexpr
):
    """Numbers of a head: the sum of their parts, and their bias."""
    value = tl.zeros([column.shape[0]], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (split * M + token).to(tl.int64) * channels + column
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        value += tl.load(bias + bias_at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["M", "n"])
def place(
    parts, bias, norm, cosine, sine, rows, slots, query, keys, values, M, n, heads, kv, bias1, bias2, norm1,
    key_row, key_head, key_slot, value_row, value_head, value_slot, eps, offset,
    D: tl.constexpr, TURNED: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Queries ``[M, heads, D]``, normed and turned; keys, so too, and values at their places in the cache.

    ``parts [splits, M, (heads + 2 kv) D]``: of queries, keys and values. Biases of keys and values begin ``bias1`` and
    ``bias2`` elements behind that of queries, the weight of the keys' norm ``norm1`` behind that of the queries'.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside, channels = d < D, (heads + 2 * kv) * D
    is_key, is_value = head >= heads, head >= heads + kv
    own = head - tl.where(is_value, heads + kv, tl.where(is_key, heads, 0))
    bias_at = own * D + tl.where(is_value, bias2, tl.where(is_key, bias1, 0))
    value = _head(parts, bias, token, head * D + d, inside, M, channels, bias_at + d, SPLITS, BIASED)
    if TURNED > 0:
        half: tl.constexpr = TURNED // 2
        other = tl.where(d < half, d + half, tl.where(d < TURNED, d - half, d))
        partner = _head(
            parts, bias, token, head * D + other, inside, M, channels, bias_at + other, SPLITS, BIASED
        )
    if NORMED:
        if not is_value:
            shrink = tl.rsqrt(tl.sum(value * value) / D + eps)
            weights = norm + tl.where(is_key, norm1, 0)
            value *= shrink * (tl.load(weights + d, mask=inside, other=0.0).to(tl.float32) + offset)
            if TURNED > 0:
                partner *= shrink * (tl.load(weights + other, mask=inside, other=0.0).to(tl.float32) + offset)
    if TURNED > 0:
        if not is_value:
            turns = d < TURNED
            c = tl.load(cosine + token * TURNED + d, mask=turns, other=1.0).to(tl.float32)
            s = tl.load(sine + token * TURNED + d, mask=turns, other=0.0).to(tl.float32)
            value = value * c + tl.where(d < half, -partner, partner) * s
    if is_key:
        row, slot = tl.load(rows + token // n).to(tl.int64), tl.load(slots + token).to(tl.int64)
        if keys.dtype.element_ty == tl.float8e4nv:
            value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        elif keys.dtype.element_ty == tl.float16:
            value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        if is_value:
            at = values + row * value_row + own * value_head + slot * value_slot
            tl.store(at + d, value.to(values.dtype.element_ty), mask=inside)
        else:
            at = keys + row * key_row + own * key_head + slot * key_slot
            tl.store(at + d, value.to(keys.dtype.element_ty), mask=inside)
    else:
        tl.store(query + (token * heads + head) * D + d, value.to(query.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n", "seen"])
def attend(
    query, keys, values, rows, mask, out, sums, n, heads, kv, seen, scale,
    key_row, key_head, key_slot, value_row, value_head, value_slot, mask_row, mask_token,
    D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Attention over one chunk of the keys: unfinished results ``out [splits, M, heads, D]`` in float32.

    Keys and values may be of fewer bits than queries, and are widened when they are read.

    ``sums [splits, M, heads, 2]``: the highest score of the chunk and the sum of its weights. ``mask``: of whole
    numbers, 0 for a key that a query must not see.
    """
    number, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = number // kv, number % kv
    group = heads // kv
    r = block * QUERIES + tl.arange(0, QUERIES)
    token, own = r // group, head * group + r % group
    real = token < n
    d, j = tl.arange(0, BLOCK_D), split * CHUNK + tl.arange(0, CHUNK)
    inside, there = d < D, j < seen
    row = tl.load(rows + batch).to(tl.int64)
    place = (batch * n + token) * heads + own
    q = tl.load(query + place[:, None] * D + d[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    k = tl.load(
        keys + row * key_row + head * key_head + j[None, :].to(tl.int64) * key_slot + d[:, None],
        mask=there[None, :] & inside[:, None], other=0.0,
    )  # fmt: skip
    # All is on its way before anything is waited for.
    v = tl.load(
        values + row * value_row + head * value_head + j[:, None].to(tl.int64) * value_slot + d[None, :],
        mask=there[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    visible = tl.load(
        mask + batch * mask_row + token[:, None] * mask_token + j[None, :],
        mask=real[:, None] & there[None, :], other=0,
    )  # fmt: skip
    k, v = k.to(q.dtype), v.to(q.dtype)
    if EXACT:
        scores = tl.dot(q, k, input_precision="ieee") * scale
    else:
        scores = tl.dot(q, k) * scale
    scores = tl.where(visible != 0, scores, float("-inf"))
    highest = tl.max(scores, 1)
    weights = tl.exp(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    total = tl.sum(weights, 1)
    if EXACT:
        made = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    else:
        made = tl.dot(weights.to(v.dtype), v)
    M = (tl.num_programs(0) // kv) * n
    at = split.to(tl.int64) * M * heads + place
    tl.store(out + at[:, None] * D + d[None, :], made, mask=real[:, None] & inside[None, :])
    tl.store(sums + 2 * at, highest, mask=real)
    tl.store(sums + 2 * at + 1, total, mask=real)


@triton.jit(do_not_specialize=["count", "splits"])
def merge(parts, sums, out, count, splits, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The chunks' results become one, ``out [M, heads, D]``; ``count``: M times heads."""
    place, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    highest = float("-inf")
    for split in range(splits):
        highest = tl.maximum(highest, tl.load(sums + 2 * (split * count + place)))
    total, made = 0.0, tl.zeros([BLOCK_D], tl.float32)
    for split in range(splits):
        at = split * count + place
        share = tl.exp(tl.load(sums + 2 * at) - highest)
        total += share * tl.load(sums + 2 * at + 1)
        made += share * tl.load(parts + at * D + d, mask=d < D, other=0.0)
    tl.store(out + place * D + d, (made / total).to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _normed(x, weight, bias, d, inside, width, eps, offset, CENTRED: tl.constexpr, BIASED: tl.constexpr):
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x) / width, 0.0)
    x *= tl.rsqrt(tl.sum(x * x) / width + eps)
    x *= tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) + offset
    if BIASED:
        x += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["M"])
def add_norm(
    x, parts, bias, after, weight, norm_bias, states, normed, M, width, eps, offset,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, AFTER: tl.constexpr, NORMED: tl.constexpr,
    CENTRED: tl.constexpr, NORM_BIASED: tl.constexpr,
):  # fmt: skip
    """``states [M, width]`` = x + the sum of the parts, itself normed where ``AFTER``; and ``normed``, their norm."""
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = d < width
    value = tl.load(x + token * width + d, mask=inside, other=0.0).to(tl.float32)
    if SPLITS > 0:
        more = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            more += tl.load(parts + (split * M + token) * width + d, mask=inside, other=0.0).to(tl.float32)
        if BIASED:
            more += tl.load(bias + d, mask=inside, other=0.0).to(tl.float32)
        if AFTER:
            more = _normed(more, after, after, d, inside, width, eps, offset, CENTRED, False)
        rounded = (value + more).to(states.dtype.element_ty)
        tl.store(states + token * width + d, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if NORMED:
        made = _normed(value, weight, norm_bias, d, inside, width, eps, offset, CENTRED, NORM_BIASED)
        tl.store(normed + token * width + d, made.to(normed.dtype.element_ty), mask=inside)
