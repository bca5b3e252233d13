"""The causal scan: layout, states, and the gradient around the chunks."""

from keras import ops

from keras_performer.ops import chunks
from keras_performer.ops.padding import gather
from keras_performer.ops.scan import Previous
from keras_performer.ops.scan import chunk_scan


def scan_attention(
    kernel, feature_map, projection, weights, xs, carry, steps, unroll=1
):
    """Runs a kernel of `chunks.py` over its chunks, with its gradient.

    Args:
        kernel: `chunks.FeatureChunks` or `chunks.LocalBlocks`.
        feature_map: The feature map.
        projection: Tensor or `None`; it gets no gradient.
        weights: Dict of the map's weights; they get gradients.
        xs: Tuple of the kernel's inputs, each with a leading axis of chunks;
            of those that lag, what the first chunk sees.
        carry: `(sums, shift)`.
        steps: Number of chunks.
        unroll: Chunks for each trip of the loop; divides `steps`.

    Returns:
        Outputs `[n, B, H, C, E]` and the carry after all chunks. Gradients
        pass through the sums; the shift has none, as it cancels.
    """
    names = list(weights)
    count, first_weight = len(xs), len(xs) + 2
    first_rest = first_weight + len(names)

    @ops.custom_gradient
    def attend(*arguments):
        xs, carry = arguments[:count], arguments[count:first_weight]
        step = kernel(
            feature_map,
            (arguments[first_rest:] or (None,))[0],
            dict(zip(names, arguments[first_weight:first_rest])),
        )
        xs = _inputs(step, xs)
        *size, _ = ops.shape(xs[0])[1:]  # B, H, C
        width = xs[2].shape[-1] - 1
        (sums, shift), ys = chunk_scan(
            step.forward,
            carry,
            xs,
            steps,
            ((*size, width), (*size, 1), (*size, 1), ops.shape(carry[1])),
            after=xs[0],
            unroll=unroll,
        )
        output, normalizer, scale, shifts = ys

        def gradient(*grads):
            # JAX hands the gradients of the outputs over as one tuple. The
            # shift's is not used: it cancels.
            grads = grads[0] if len(grads) == 1 else grads
            grad_output, grad_sums, _ = grads
            grad = chunks.normalize_gradient(
                grad_output, output, normalizer, step.log_space
            )
            gradients, grad_sums, grad_weights = _two_passes(
                step,
                xs,
                carry,
                (grad, scale, shifts),
                grad_sums,
                steps,
                unroll,
            )
            return (
                *gradients,
                grad_sums,
                _no_gradient(carry[1]),
                *grad_weights,
                *(_no_gradient(x) for x in arguments[first_rest:]),
            )

        return (output, sums, shift), gradient

    arguments = (*xs, *carry, *weights.values())
    arguments += () if projection is None else (projection,)
    output, sums, shift = attend(*arguments)
    return output, (sums, shift)


def _inputs(step, xs):
    """The kernel's inputs, those that lag as `Previous`."""
    lags = step.lags
    return tuple(
        Previous(xs[lags[slot]], x) if slot in lags else x
        for slot, x in enumerate(xs)
    )


def _two_passes(step, xs, carry, saved, grad_sums, steps, unroll):
    """Gradients by computing anew.

    Args:
        step: A kernel of `chunks.py`.
        xs: Its inputs, as `_inputs` gives them.
        carry: The first `(sums, shift)`.
        saved: Gradient of the output before its normalisation, the scale of
            its rows, and the shift before each chunk.
        grad_sums: Gradient of the last sums.
        steps: Number of chunks.
        unroll: Chunks for each trip of the loop.

    Returns:
        Lists of the gradients of `xs`, of the first sums, and of the feature
        map's weights.
    """
    count = len(xs)
    grad, scale, shifts = saved
    no_weights = tuple(
        _no_gradient(x) for x in step.bound.weights.values()
    )

    def forward(carry, x):
        slots = len(step.forward_slots)
        state, gradients = step.forward_gradient(
            carry[:2], x[:count], *x[count:]
        )
        weights = zip(carry[2:], gradients[slots:])
        return (*state, *(a + b for a, b in weights)), gradients[:slots]

    def backward(carry, x):
        slots = len(step.backward_slots)
        grad_sums, gradients = step.backward_gradient(
            carry[0], x[:count], *x[count:]
        )
        weights = zip(carry[1:], gradients[slots:])
        return (grad_sums, *(a + b for a, b in weights)), gradients[:slots]

    def shapes(slots):
        slots = (step.lags.get(slot, slot) for slot in slots)
        return tuple(ops.shape(xs[slot])[1:] for slot in slots)

    (_, _, *early_weights), early = chunk_scan(
        forward,
        (*carry, *no_weights),
        (*xs, grad, scale),
        steps,
        shapes(step.forward_slots),
        after=grad,
        unroll=unroll,
    )
    (grad_sums, *late_weights), late = chunk_scan(
        backward,
        (grad_sums, *no_weights),
        (*xs, grad, scale, shifts),
        steps,
        shapes(step.backward_slots),
        after=grad,
        reverse=True,
        unroll=unroll,
    )
    total = dict(zip(step.forward_slots, early))
    for slot, gradient in zip(step.backward_slots, late):
        both = slot in step.forward_slots
        total[slot] = total[slot] + gradient if both else gradient
    for slot, source in step.lags.items():
        gradient = total[slot]  # element i is of element i - 1
        total[slot] = gradient[0]
        total[source] = total[source] + _pad_axis(gradient[1:], 0, 0, 1)
    masks = set(range(count)) - set(total)
    total.update({n: _no_gradient(xs[n]) for n in masks})
    weights = [a + b for a, b in zip(early_weights, late_weights)]
    return [total[n] for n in range(count)], grad_sums, weights


def _no_gradient(x):
    # Zeros of a known size are one node or three, as the size may be.
    return x * 0.0


def chunked_attention(
    query,
    key,
    values,
    feature_map,
    projection,
    weights,
    chunk_size,
    state,
    lengths,
):
    """Causal attention with every key seen through its features.

    Args:
        query: `[B, L, H, D]`.
        key: `[B, L, H, D]`.
        values: `[B, L, H, F]`, with the column of ones; 0 where a key is
            masked.
        feature_map: The feature map.
        projection: Tensor or `None`.
        weights: Dict of the map's weights.
        chunk_size: Tokens per chunk.
        state: State of the tokens before these, or `None`.
        lengths: Numbers of tokens that are no padding, `[B]` or one for all
            rows: what is added to the position.

    Returns:
        Output `[B, L, H, E]` and the state after these tokens.
    """
    length = ops.shape(query)[1]
    if isinstance(length, int):
        chunk_size = max(1, min(chunk_size, length))
    steps = at_least_one(-(-length // chunk_size))
    xs = token_chunks((query, key, values), steps, chunk_size)
    if state is None:
        bound = chunks.BoundMap(feature_map, weights)
        state = empty_state(query, values, bound, projection)
    output, carry = scan_attention(
        chunks.FeatureChunks,
        feature_map,
        projection,
        weights,
        xs,
        carry_of(state, query.dtype),
        steps,
    )
    output = from_chunks(output)[:, :length]
    return output, _state(carry, state["position"] + lengths)


def local_attention(
    query,
    key,
    values,
    feature_map,
    projection,
    weights,
    window,
    blocks_per_step,
    state,
    return_state,
    lengths,
):
    """Causal attention with the own and the previous block seen exactly.

    Arguments and result are those of `chunked_attention`, with:

    Args:
        window: W, the length of a block.
        blocks_per_step: Blocks for each trip of the loop.
        return_state: Whether the state is wanted; it is `None` if not.
        lengths: With a state, tokens beyond the length of their row are not
            there: they take no place on the grid.
    """
    length = ops.shape(query)[1]
    bound = chunks.BoundMap(feature_map, weights)
    tokens = (query, key, values)
    stateful = state is not None or return_state
    if not stateful:
        if isinstance(length, int):
            window = max(1, min(window, length))
        steps = at_least_one(-(-length // window))
        if isinstance(steps, int):
            blocks_per_step = min(blocks_per_step, steps)
        steps = -(-steps // blocks_per_step) * blocks_per_step
        blocks = token_chunks(tokens, steps, window)
        # Before the first block there is none: keys without values.
        keys, values = blocks[1:]
        first = ops.stop_gradient(keys[0]), ops.zeros_like(values[0])
        added = ()
        state = empty_state(query, values, bound, projection)
    else:
        if state is None:
            state = empty_state(query, values, bound, projection, window)
        if isinstance(length, int) and length == 1:
            return local_step(tokens, bound, projection, window, state)
        offset = state["position"] % window  # [B], tokens in the last block
        lengths = offset * 0 + lengths  # [B]
        # One block for what is left of the last one, one to end in.
        steps = (length + window - 1) // window + 1
        steps = -(-steps // blocks_per_step) * blocks_per_step
        held = _held(state, query.dtype)
        aligned = _align(tokens, held, offset, lengths, window, steps)
        blocks = tuple(to_chunks(x, steps, window) for x in aligned)
        first = tuple(ops.swapaxes(x[:, :window], 1, 2) for x in held)
        # A row that has ended adds nothing more to its sums.
        end = (offset + lengths) // window  # [B], the block it ends in
        going = ops.arange(steps, dtype="int32")[:, None] < end[None, :]
        going = ops.cast(going, query.dtype)[:, :, None]
        valid = blocks[2][:, :, 0, :, -1]  # [n, B, W]
        before = ops.concatenate([first[1][None, :, 0, :, -1], valid[:-1]])
        added = (before * going,)
    output, carry = scan_attention(
        chunks.LocalBlocks,
        feature_map,
        projection,
        weights,
        (*blocks, *first, *added),
        carry_of(state, query.dtype),
        steps,
        blocks_per_step,
    )
    output = from_chunks(output)
    if not stateful:
        return output[:, :length], None
    index = offset[:, None] + ops.arange(length, dtype="int32")[None, :]
    state = _state(carry, state["position"] + lengths)
    state.update(_last_blocks(held, aligned[1:], end, window))
    return gather(output, index), state


def local_step(tokens, feature_map, projection, window, state):
    """One token after a state; as `local_attention`, by itself.

    A block that is complete moves on, and only then are the features of the
    one before it computed.

    Args:
        tokens: Query, key `[B, 1, H, D]` and values `[B, 1, H, F]`; a row
            whose column of ones is 0 keeps its state.
        feature_map: `chunks.BoundMap`.
        projection: Tensor or `None`.
        window: W, the length of a block.
        state: State of the tokens before.

    Returns:
        Output `[B, 1, H, E]` and the state after this token.
    """
    query, key, values = tokens
    kernel = chunks.LocalBlocks(
        feature_map.feature_map, projection, feature_map.weights
    )
    carry = carry_of(state, query.dtype)
    valid = values[:, 0, 0, -1] > 0  # [B]
    offset = state["position"] % window  # [B]
    slot = ops.arange(2 * window, dtype="int32")[None, :]
    own = ops.logical_and(slot == window + offset[:, None], valid[:, None])
    own = own[:, :, None, None]
    keys, all_values = (
        ops.where(own, new, old)
        for new, old in zip((key, values), _held(state, query.dtype))
    )  # [B, 2 W, H, D or F]
    output = kernel.read_one(carry, query, keys, all_values)
    complete = ops.logical_and(valid, offset == window - 1)  # [B]

    def advance():
        first, x = ops.cast(complete, query.dtype)[:, None], all_values
        moved = kernel.advance_one(carry, keys, x, first)
        there = complete[:, None, None, None]
        return *moved, *(
            ops.where(there, _moved(x, window), x) for x in (keys, x)
        )

    sums, shift, keys, all_values = ops.cond(
        ops.any(complete), advance, lambda: (*carry, keys, all_values)
    )
    state = _state(
        (sums, shift), state["position"] + ops.cast(valid, "int32")
    )
    state.update(_blocks_of(keys, all_values))
    return output, state


def _moved(x, window):
    """The second block of two as the first; the second is then empty."""
    return _pad_axis(x[:, window:], 1, 0, window)


def _blocks_of(keys, values):
    """The part of a state that holds two blocks."""
    return {
        "keys": keys,
        "values": values[..., :-1],
        "valid": values[:, :, 0, -1] > 0,
    }


def _last_blocks(held, aligned, end, window):
    """The part of a state that holds the block of the end and the one before.

    Args:
        held: Keys and values of the last two blocks before.
        aligned: Keys and values of all slots since.
        end: `[B]`, the block in which each row ends.
        window: W.
    """
    index = ops.arange(2 * window, dtype="int32")[None, :]
    index = index + (end * window)[:, None]  # [B, 2 W]
    keys, values = (
        gather(ops.concatenate([old[:, :window], new], axis=1), index)
        for old, new in zip(held, aligned)
    )
    return _blocks_of(keys, values)


def empty_state(query, values, feature_map, projection, window=0):
    """The state of no tokens; see `causal_kernel_attention` for its parts.

    Args:
        query: Queries `[B, L, H, D]`, for their sizes and dtype.
        values: Values `[B, L, H, F]`, for their sizes.
        feature_map: The feature map.
        projection: Tensor or `None`.
        window: W, or 0.

    Returns:
        A flat dict of tensors.
    """
    batch, dtype = ops.shape(query)[0], query.dtype
    heads, dim = query.shape[2:]
    width = values.shape[-1] - 1
    # The width of the features is whatever the map makes of a vector.
    one = ops.zeros((1, heads, 1, dim), dtype=dtype)
    num_features = feature_map(one, projection, is_query=False).shape[-1]
    state = {
        "sums": ops.zeros((batch, heads, num_features, width), dtype=dtype),
        "normalizer": ops.zeros((batch, heads, num_features), dtype=dtype),
        "shift": ops.full(
            (batch, heads, num_features), chunks.LOG_ZERO, dtype=dtype
        ),
        "position": ops.zeros((batch,), dtype="int32"),
    }
    if window:
        size = (batch, 2 * window, heads)
        state["keys"] = ops.zeros((*size, dim), dtype=dtype)
        state["values"] = ops.zeros((*size, width), dtype=dtype)
        state["valid"] = ops.zeros(size[:2], dtype="bool")
    return state


def token_chunks(tokens, steps, size):
    """Query, key and values in chunks; values are filled up with zeros.

    Queries and keys are filled up with the last token, not with zeros: a map
    may be undefined there, and what is not a number would pass through
    products with the zeros of its gradient.
    """
    query, key, values = tokens
    return (
        to_chunks(repeat_last(query, steps * size), steps, size),
        to_chunks(repeat_last(key, steps * size), steps, size),
        to_chunks(values, steps, size),
    )


def repeat_last(x, size):
    """`[B, L, H, D]` filled up to `[B, size, H, D]` with its last token."""
    length = ops.shape(x)[1]
    # A sum, as there is none where L is 0.
    last = ops.sum(ops.stop_gradient(x[:, -1:]), axis=1, keepdims=True)
    inside = ops.arange(size)[None, :, None, None] < length
    return ops.where(inside, _pad_axis(x, 1, 0, size - length), last)


def to_chunks(x, steps, size):
    """`[B, L, H, width]`, filled up with zeros, in chunks.

    They are `[steps, B, H, size, width]`.
    """
    shape = ops.shape(x)
    x = _pad_axis(x, 1, 0, steps * size - shape[1])
    x = ops.reshape(x, (shape[0], steps, size, *shape[2:]))
    return ops.transpose(x, (1, 0, 3, 2, 4))


def _pad_axis(x, axis, before, after):
    """Zeros before and after along an axis.

    One operation whatever the number, unlike a concatenation with zeros,
    which TensorFlow writes as a constant where they are few.
    """
    paddings = [(0, 0)] * len(x.shape)
    paddings[axis] = (before, after)
    return ops.pad(x, paddings)


def from_chunks(x):
    """`[steps, B, H, size, width]` as `[B, steps * size, H, width]`."""
    steps, batch, heads, size, width = ops.shape(x)
    x = ops.transpose(x, (1, 0, 3, 2, 4))
    return ops.reshape(x, (batch, steps * size, heads, width))


def at_least_one(steps):
    return max(1, steps) if isinstance(steps, int) else ops.maximum(1, steps)


def carry_of(state, dtype):
    """Sums `[B, H, F, M]` and shift `[B, H, 1, M]` of a state."""
    sums = ops.swapaxes(ops.cast(state["sums"], dtype), -1, -2)
    normalizer = ops.cast(state["normalizer"], dtype)[:, :, None, :]
    shift = ops.stop_gradient(ops.cast(state["shift"], dtype))
    sums = ops.concatenate([sums, normalizer], axis=2)
    return sums, shift[:, :, None, :]


def _state(carry, position):
    sums, shift = carry
    return {
        "sums": ops.swapaxes(sums[:, :, :-1], -1, -2),
        "normalizer": sums[:, :, -1],
        "shift": ops.stop_gradient(shift[:, :, 0]),
        "position": position,
    }


def _held(state, dtype):
    """Keys, and values with ones where valid, of the last two blocks."""
    keep = ops.cast(state["valid"], dtype)[:, :, None, None]  # [B, 2 W, 1, 1]
    values = chunks.add_ones(ops.cast(state["values"], dtype)) * keep
    return ops.cast(state["keys"], dtype), values


def _align(tokens, held, offset, lengths, window, steps):
    """Tokens on the grid of the absolute position, `[B, steps * W, ...]`.

    Slot s of a row is token s of its last block as long as that has tokens,
    and a new token after that. Query, key and values; there are no queries
    for the tokens held.
    """
    length = ops.shape(tokens[0])[1]
    slot = ops.arange(steps * window, dtype="int32")[None, :]
    token = slot - offset[:, None]  # [B, n], index among the new tokens
    index = ops.where(token < 0, slot, window + token)
    index = ops.minimum(index, window + length - 1)
    inside = ops.cast(token < lengths[:, None], tokens[0].dtype)
    query = ops.zeros_like(held[0][:, window:])
    query, key, values = (
        gather(ops.concatenate([old, new], axis=1), index)
        for old, new in zip(
            (query, *(x[:, window:] for x in held)), tokens
        )
    )
    # Zero beyond the end of a row, where the index above repeats a token.
    column = inside[:, :, None, None]
    return query, key * column, values * column
