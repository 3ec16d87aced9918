"""
Source code of the GPU kernels in Triton's language, for warps of 32 and of 64 threads.

The kernels compute in float32 and round once, whatever the format of their tensors. Rows are counted in 64 bits.
Elements outside a tensor are masked. The kernels ask nothing of one maker alone: no assembly, no descriptors, no
more than two stages. Python never runs these functions: model/kernels/triton.py hands them to Triton. An argument
in …_at is the address of a tensor.
"""

from bloomery.hw import require_torch as require_torch

import triton
import triton.language as tl


@triton.jit
def norm(x_at, weight_at, y_at, inverse_at, width, eps, weighted: tl.constexpr, block: tl.constexpr):
    """A row of y = x / √(mean(x²) + ε) · weight, and 1 / √(…), which the way back needs."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    inside = offsets < width
    x = tl.load(x_at + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    y = x * inverse
    if weighted:
        y *= tl.load(weight_at + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(inverse_at + row, inverse)
    tl.store(y_at + row * width + offsets, y.to(y_at.dtype.element_ty), mask=inside)


@triton.jit
def norm_grads(
    x_at,
    weight_at,
    inverse_at,
    dy_at,
    dx_at,
    dweight_at,
    rows,
    share_rows,
    width,
    weighted: tl.constexpr,
    block: tl.constexpr,
):
    """Gradients of some rows of x, and the part of these rows in the gradients of the weights, summed in row order."""
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    inside = offsets < width
    weight = tl.full([block], 1.0, tl.float32)
    if weighted:
        weight = tl.load(weight_at + offsets, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([block], tl.float32)
    for row in range(program * share_rows, tl.minimum((program + 1) * share_rows, rows)):
        x = tl.load(x_at + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_at + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_at + row)
        normed = x * inverse
        grad = dy * weight
        along = tl.sum(grad * normed, axis=0) / width
        dx = (grad - normed * along) * inverse
        tl.store(dx_at + row * width + offsets, dx.to(dx_at.dtype.element_ty), mask=inside)
        total += dy * normed
    if weighted:
        tl.store(dweight_at + program * width + offsets, total, mask=inside)


@triton.jit
def halves(start, half, inside):
    """The numbers from an address on, and those as far behind them as half a head is wide."""
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(start + half, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def keep(start, half, inside, first, second):
    tl.store(start, first.to(start.dtype.element_ty), mask=inside)
    tl.store(start + half, second.to(start.dtype.element_ty), mask=inside)


@triton.jit
def inverse_root(first, second, half, eps):
    """1 / √(mean(x²) + ε) of each row."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    return tl.rsqrt(squares / (2 * half) + eps)[:, None]


@triton.jit
def rotate(
    x_at,
    y_at,
    weight_at,
    cosine_at,
    sine_at,
    heads,
    tokens,
    half,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    angle_batch,
    angle_token,
    eps,
    sign,
    normed: tl.constexpr,
    weighted: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    """Some heads of a token, with optional norm, and each pair (e, e + half) rotated by sign times its angle."""
    token = tl.program_id(0).to(tl.int64)
    batch, token = token // tokens, token % tokens
    head = tl.program_id(1).to(tl.int64) * block_heads + tl.arange(0, block_heads)[:, None]
    offsets = tl.arange(0, block_half)
    inside = (head < heads) & (offsets < half)[None, :]
    start = x_at + batch * x_batch + token * x_token + head * x_head + offsets[None, :]
    first, second = halves(start, half, inside)
    if normed:
        inverse = inverse_root(first, second, half, eps)
        first, second = first * inverse, second * inverse
    if weighted:
        near, far = halves(weight_at + offsets, half, offsets < half)
        first, second = first * near[None, :], second * far[None, :]
    angle = batch * angle_batch + token * angle_token + offsets
    cosine = tl.load(cosine_at + angle, mask=offsets < half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sine_at + angle, mask=offsets < half, other=0.0).to(tl.float32)[None, :] * sign
    end = y_at + batch * y_batch + token * y_token + head * y_head + offsets[None, :]
    keep(end, half, inside, first * cosine - second * sine, second * cosine + first * sine)


@triton.jit
def rotate_grads(
    x_at,
    dy_at,
    dx_at,
    weight_at,
    dweight_at,
    cosine_at,
    sine_at,
    rows,
    share_rows,
    heads,
    tokens,
    half,
    x_batch,
    x_head,
    x_token,
    dy_batch,
    dy_head,
    dy_token,
    dx_batch,
    dx_head,
    dx_token,
    angle_batch,
    angle_token,
    eps,
    weighted: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    """Gradients of some heads of some tokens before norm and RoPE, and their part in the gradients of the weights."""
    program = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * block_heads + tl.arange(0, block_heads)[:, None]
    offsets = tl.arange(0, block_half)
    there = offsets < half
    inside = (head < heads) & there[None, :]
    near, far = tl.full([block_half], 1.0, tl.float32), tl.full([block_half], 1.0, tl.float32)
    if weighted:
        near, far = halves(weight_at + offsets, half, there)
    near_total, far_total = tl.zeros([block_half], tl.float32), tl.zeros([block_half], tl.float32)
    for row in range(program * share_rows, tl.minimum((program + 1) * share_rows, rows)):
        batch, token = row // tokens, row % tokens
        x = x_at + batch * x_batch + token * x_token + head * x_head + offsets[None, :]
        first, second = halves(x, half, inside)
        inverse = inverse_root(first, second, half, eps)
        first, second = first * inverse, second * inverse
        angle = batch * angle_batch + token * angle_token + offsets
        cosine = tl.load(cosine_at + angle, mask=there, other=0.0).to(tl.float32)[None, :]
        sine = tl.load(sine_at + angle, mask=there, other=0.0).to(tl.float32)[None, :]
        dy = dy_at + batch * dy_batch + token * dy_token + head * dy_head + offsets[None, :]
        above, below = halves(dy, half, inside)
        above, below = above * cosine + below * sine, below * cosine - above * sine
        near_total += tl.sum(above * first, axis=0)
        far_total += tl.sum(below * second, axis=0)
        above, below = above * near[None, :], below * far[None, :]
        along = ((tl.sum(above * first, axis=1) + tl.sum(below * second, axis=1)) / (2 * half))[:, None]
        dx = dx_at + batch * dx_batch + token * dx_token + head * dx_head + offsets[None, :]
        keep(dx, half, inside, (above - first * along) * inverse, (below - second * along) * inverse)
    if weighted:
        base = (program * tl.num_programs(1) + tl.program_id(1)) * 2 * half
        keep(dweight_at + base + offsets, half, there, near_total, far_total)


@triton.jit
def entropy(
    logits_at,
    targets_at,
    grads_at,
    z_at,
    reached_at,
    width,
    z_loss,
    share,
    with_grads: tl.constexpr,
    block: tl.constexpr,
):
    """
    z = log Σ exp(s) of a row s of logits, and `reached`, the logit of its target. Both are 0 where the target is
    negative: the row does not count. With `with_grads`, that of share · (z − reached + z_loss · z²) is written to
    `grads_at`, which may be where s is.

    Each thread writes only numbers that it has read itself, so no number is read after it was overwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_at + row)
    counts = target >= 0
    offsets = tl.arange(0, block)
    largest, total, reached = float("-inf"), 0.0, 0.0
    for start in range(0, width, block):
        here = start + offsets
        logits = tl.load(logits_at + row * width + here, mask=here < width, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(logits, axis=0))
        level = tl.where(above == float("-inf"), 0.0, above)  # −∞ − −∞ is none of the numbers
        total = total * tl.exp(largest - level) + tl.sum(tl.exp(logits - level), axis=0)
        reached += tl.sum(tl.where(here == target, logits, 0.0), axis=0)
        largest = above
    z = tl.where(largest == float("-inf"), 0.0, largest) + tl.log(total)
    tl.store(z_at + row, tl.where(counts, z, 0.0))
    tl.store(reached_at + row, tl.where(counts, reached, 0.0))
    if with_grads:
        grown = 1.0 + 2.0 * z_loss * z
        for start in range(0, width, block):
            here = start + offsets
            logits = tl.load(logits_at + row * width + here, mask=here < width, other=float("-inf")).to(tl.float32)
            grad = tl.exp(logits - z) * grown - tl.where(here == target, 1.0, 0.0)
            grad = tl.where(counts, share * grad, 0.0).to(grads_at.dtype.element_ty)
            tl.store(grads_at + row * width + here, grad, mask=here < width)


@triton.jit
def gemv(
    x_at,
    codes_at,
    scales_at,
    coarse_at,
    numbers_at,
    bias_at,
    y_at,
    rows,
    outputs,
    inputs,
    code_bytes,
    groups,
    share_groups,
    coarse_last,
    bits: tl.constexpr,
    normal: tl.constexpr,
    double: tl.constexpr,
    biased: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_groups: tl.constexpr,
    group_bytes: tl.constexpr,
):
    """
    Some outputs of y = x Wᵀ + bias, for few rows of x and a W in codes: the sum over a share of the groups of W's rows.

    A thread reads bytes that lie side by side, and decodes them in registers. With one row it multiplies and adds them
    itself, in float32. More rows go through matrix units, as a block of 16. A byte of int4 and NF4 has two codes:
    `normal` says NF4. coarse_last is where the mean of all scales lies.
    """
    first_out, share = tl.program_id(0) * block_out, tl.program_id(1)
    out = tl.arange(0, block_out)[:, None, None]
    group = tl.arange(0, block_groups)[None, :, None]
    byte = tl.arange(0, group_bytes)[None, None, :]
    there = out < outputs - first_out
    line = first_out.to(tl.int64)
    codes_at += line * tl.cast(code_bytes, tl.int64)  # a whole 1 has no .to
    first_scale = line * tl.cast(groups, tl.int64)
    row = tl.arange(0, block_rows)[:, None]
    flat = tl.arange(0, block_groups * group_bytes)[None, :]
    if block_rows == 1:
        total = tl.zeros([block_out, block_groups, group_bytes], tl.float32)
    else:
        total = tl.zeros([block_rows, block_out], tl.float32)
    begin = share * share_groups
    for start in range(begin, tl.minimum(begin + share_groups, groups), block_groups):
        index = (start + group) * group_bytes + byte
        known = there & (group < groups - start)
        inside = known
        if bits == 8:
            inside = known & (index < inputs)
        code = tl.load(codes_at + out * code_bytes + index, mask=inside, other=0).to(tl.int32)
        scale_index = first_scale + out * groups + start + group
        low, high = decoded(
            code, scales_at, scale_index, known, coarse_at, coarse_last, numbers_at, bits, normal, double
        )
        if block_rows == 1:
            near, far = columns(index, bits, normal)
            total += low * tl.load(x_at + near, mask=near < inputs, other=0.0).to(tl.float32)
            if bits == 4:
                total += high * tl.load(x_at + far, mask=far < inputs, other=0.0).to(tl.float32)
        else:
            near, far = columns(start * group_bytes + flat, bits, normal)
            x = tl.load(x_at + row * inputs + near, mask=(row < rows) & (near < inputs), other=0.0)
            weight = tl.reshape(low.to(x.dtype), [block_out, block_groups * group_bytes])
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
            if bits == 4:
                x = tl.load(x_at + row * inputs + far, mask=(row < rows) & (far < inputs), other=0.0)
                weight = tl.reshape(high.to(x.dtype), [block_out, block_groups * group_bytes])
                total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if block_rows == 1:
        total = tl.sum(tl.sum(total, axis=2), axis=1)[None, :]
    out = first_out + tl.arange(0, block_out)[None, :]
    if bits == 8:
        total *= tl.load(scales_at + out, mask=out < outputs, other=0.0).to(tl.float32)
    if biased:
        total += tl.load(bias_at + out, mask=out < outputs, other=0.0).to(tl.float32)
    at = y_at + (share * rows + row) * outputs + out
    tl.store(at, total.to(y_at.dtype.element_ty), mask=(row < rows) & (out < outputs))


@triton.jit
def decoded(
    code,
    scales_at,
    index,
    known,
    coarse_at,
    coarse_last,
    numbers_at,
    bits: tl.constexpr,
    normal: tl.constexpr,
    double: tl.constexpr,
):
    """The first and the second weight of each byte, but for the scale of the row of int8."""
    if bits == 8:
        return code.to(tl.float32), code.to(tl.float32)
    elif normal:
        scale = tl.load(scales_at + index, mask=known, other=0.0).to(tl.float32)
        if double:
            coarse = tl.load(coarse_at + index // 256, mask=known, other=0.0)
            scale = scale * coarse + tl.load(coarse_at + coarse_last)
        return tl.load(numbers_at + (code >> 4)) * scale, tl.load(numbers_at + (code & 15)) * scale
    else:
        factor = tl.load(scales_at + 2 * index, mask=known, other=0.0).to(tl.float32)
        offset = tl.load(scales_at + 2 * index + 1, mask=known, other=0.0).to(tl.float32)
        return (code & 15).to(tl.float32) * factor + offset, (code >> 4).to(tl.float32) * factor + offset


@triton.jit
def columns(index, bits: tl.constexpr, normal: tl.constexpr):
    """Of the first and the second weight of a byte."""
    if bits == 8:
        return index, index
    elif not normal:
        near = index // 16 * 32 + index % 16
        return near, near + 16
    else:
        return 2 * index, 2 * index + 1
