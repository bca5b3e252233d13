"""Continuing sequences: prefill by segments, then one compiled loop."""

import functools
import math
import numbers
import random

import keras
import numpy as np
from keras import ops

from keras_performer import arguments
from keras_performer import feature_maps
from keras_performer.models.sampling import sample

# The longest part of a prompt that is taken in at once, and the sizes to which
# shorter ones and the loop's output are rounded up: each new size is compiled.
SEGMENT = 1024
ROUND = 64


class Generation:
    """Mixin of `PerformerLM`: `generate`, and the endpoint for export."""

    def generate(
        self,
        prompt_ids,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        end_id=None,
        seed=None,
        mask=None,
        far_half_life=None,
    ):
        """Continues prompts.

        A prompt is taken in by the chunked scan, in segments; then each
        token costs the same, however long the sequence is. The loop is
        compiled once for each batch size, each 64 of `max_new_tokens`, and
        each `top_k`. A seed gives other draws in an exported model, which is
        not compiled by XLA.

        With `feature_map="exact"`, whose state would grow, and where learned
        positions run out, the model runs on the whole sequence again for
        each token: slow. Learned positions then keep the last
        `sequence_length` tokens.

        Args:
            prompt_ids: Integer tokens of shape `(B, L)`, or a list of B
                lists of any lengths. Each result is the one that a prompt
                gets alone; where tokens are drawn, the draws differ by row.
            max_new_tokens: Number of tokens to add.
            temperature: Number of at least 0 by which logits are divided; 0
                takes the likeliest token.
            top_k: Integer; only so many of the likeliest are drawn from.
            top_p: Number in (0, 1]; only the likeliest are drawn from whose
                probabilities sum up to it.
            end_id: The token that ends a sequence: the rest is filled with
                it, and generation stops when all rows have ended.
            seed: Integer; the same gives the same tokens. `None` draws one.
            mask: Mask of shape `(B, L)`, true for tokens of the prompts, on
                either side of the padding.
            far_half_life: Number of tokens, of at least 1e-3, after which
                what lies beyond the local window weighs half as much (see
                `fade`; a prompt is then read in segments of at most so many
                tokens, and at least one); `None` keeps it as it is. Half the
                training length, or less, where a text grows beyond that.

        Returns:
            The new tokens, an int32 NumPy array `(B, max_new_tokens)`.

        Raises:
            ValueError: If the model is not causal, a prompt is empty or has
                tokens outside of the vocabulary, or an argument has a wrong
                value; if `far_half_life` is given where there is no state.
            TypeError: If tokens are not integers.
        """
        if not self.causal:
            raise ValueError(
                f"{self.name} cannot generate: it is not causal. Received: "
                "causal=False"
            )
        max_new_tokens, top_k, end_id, seed = (
            int(x) if isinstance(x, np.integer) else x
            for x in (max_new_tokens, top_k, end_id, seed)
        )
        arguments.check_integer("max_new_tokens", max_new_tokens)
        arguments.check_integer("top_k", top_k, optional=True)
        options = draw_options(
            temperature, top_p, end_id, seed, far_half_life
        )
        prompts = _prompts(prompt_ids, mask, self.mask_zero)
        self._check_tokens("prompt_ids", np.concatenate(prompts))
        if end_id is not None:
            self._check_tokens("end_id", np.array([end_id]))
        longest = max(map(len, prompts))
        # The last token is not read again.
        streams = self._streams(longest + max_new_tokens - 1)
        if far_half_life is not None and not streams:
            raise arguments.invalid(
                "far_half_life",
                "None where the model runs on the whole sequence again",
                far_half_life,
            )
        run = self._stream if streams else self._repeat
        tokens = run(
            prompts,
            max_new_tokens,
            _round_up(max_new_tokens, ROUND),
            top_k,
            options,
        )
        return np.asarray(tokens)[:, :max_new_tokens]

    def _streams(self, total):
        """Whether a state serves for so many tokens."""
        if isinstance(self.feature_map, feature_maps.Exact):
            return False
        return self.position != "learned" or total <= self.sequence_length

    def _check_tokens(self, name, ids):
        wrong = ids[(ids < 0) | (ids >= self.vocabulary_size)]
        if wrong.size:
            raise arguments.invalid(
                name,
                f"tokens from 0 to {self.vocabulary_size - 1}, as of "
                f"vocabulary_size={self.vocabulary_size}",
                int(wrong[0]),
            )

    def _stream(self, prompts, count, size, top_k, options):
        """New tokens `[B, size]` by carrying a state."""
        last, state = self._take_in(prompts, options["far_half_life"])
        return self._compiled("continue_state")(
            last, state, np.int32(count), size, top_k, options
        )

    def _take_in(self, prompts, half_life=None):
        """The last block's output for the last tokens, and the state."""
        longest = max(map(len, prompts))
        ids, mask = _padded(prompts, _round_up(longest, ROUND))
        if self.position == "learned":
            ids, mask = (x[:, : self.sequence_length] for x in (ids, mask))
        state = self.get_initial_state(len(prompts))
        last = np.zeros(
            (len(prompts), 1, self.hidden_dim), _precise(self.compute_dtype)
        )
        size = SEGMENT
        if half_life is not None:
            size = fading_segment(half_life, size)
        for start in range(0, ids.shape[1], size):
            part = slice(start, start + size)
            last, state = self._compiled("prefill")(
                ids[:, part], mask[:, part], last, state, half_life
            )
        return last, state

    def _repeat(self, prompts, count, size, top_k, options):
        """New tokens `[B, size]` by running on the whole sequence again."""
        room = _round_up(max(map(len, prompts)) + count, ROUND)
        if self.position == "learned":
            room = min(room, self.sequence_length)
            prompts = [prompt[-room:] for prompt in prompts]
        ids, _ = _padded(prompts, room)
        lengths = np.array([len(prompt) for prompt in prompts], "int32")
        return self._compiled("continue_ids")(
            ids, lengths, np.int32(count), size, top_k, options
        )

    def _compiled(self, name):
        """A function of this module, compiled for this model."""
        functions = self.__dict__.setdefault("_generate_functions", {})
        # Quantization and LoRA replace variables.
        version = tuple(id(variable) for variable in self.variables)
        if functions.get("version") != version:
            functions.clear()
            functions["version"] = version
        if name not in functions:
            # Prompts come in many sizes: XLA would take longer for each than
            # it saves.
            loop = name != "prefill"
            functions[name] = _compile(self, globals()[name], loop)
        return functions[name]

    def _serving_endpoints(self):
        """What `saving.export_saved_model` writes beside the predictions.

        Returns:
            Dict of a name to a function and its signature, a list of
            `keras.InputSpec`: of a causal model, `generate(ids, num_tokens,
            temperature, seed)`, all prompts of one length.
        """
        if not self.causal:
            return {}
        scalars = ("int32", "float32", "int32")
        signature = [keras.InputSpec(shape=(None, None), dtype="int32")]
        signature += [keras.InputSpec(shape=(), dtype=x) for x in scalars]
        return {"generate": (self._generate_endpoint, signature)}

    def _generate_endpoint(self, ids, num_tokens, temperature, seed):
        import tensorflow as tf

        batch, length = ops.shape(ids)
        checks = [
            tf.debugging.assert_positive(length, "The prompt is empty."),
            tf.debugging.assert_positive(num_tokens, "num_tokens > 0."),
            tf.debugging.assert_non_negative(temperature, "temperature >= 0."),
            tf.debugging.assert_greater_equal(
                ids, int(self.mask_zero), f"ids >= {int(self.mask_zero)}."
            ),
            tf.debugging.assert_less(
                ids,
                self.vocabulary_size,
                f"ids < vocabulary_size = {self.vocabulary_size}.",
            ),
        ]
        if self.position == "learned":
            checks.append(
                tf.debugging.assert_less_equal(
                    length + num_tokens - 1,
                    self.sequence_length,
                    "Prompt and new tokens exceed the learned positions.",
                )
            )
        with tf.control_dependencies(checks):
            ids = tf.identity(ids)
        options = draw_options(seed=0)  # replaced, as it is a tensor here
        options |= {"temperature": temperature, "seed": seed}
        arguments = (num_tokens, num_tokens, None, options)
        if isinstance(self.feature_map, feature_maps.Exact):
            room = tf.pad(ids, [(0, 0), (0, num_tokens)])
            lengths = tf.fill([batch], length)
            return continue_ids(self, room, lengths, *arguments)
        state = self.get_initial_state(batch)
        x, state = self._advance(ids, state)
        last = ops.cast(x[:, -1:], _precise(self.compute_dtype))
        return continue_state(self, last, state, *arguments)


def draw_options(
    temperature=1.0, top_p=None, end_id=None, seed=None, far_half_life=None
):
    """What the compiled loops are handed, from arguments of `generate`."""
    _check_number("temperature", temperature, 0.0, float("inf"))
    if top_p is not None:
        _check_number("top_p", top_p, 0.0, 1.0, above=True)
    if end_id is not None:
        arguments.check_integer("end_id", end_id, least=0)
    if seed is None:
        seed = random.randint(0, 2**31 - 1)
    arguments.check_integer("seed", seed, least=0)
    if far_half_life is not None:
        _check_number("far_half_life", far_half_life, 1e-3, float("inf"))
        far_half_life = np.float32(far_half_life)
    return {
        "temperature": np.float32(temperature),
        "top_p": None if top_p is None else np.float32(top_p),
        "end_id": np.int32(-1 if end_id is None else end_id),
        "seed": np.int32(seed % 2**31),
        "far_half_life": far_half_life,
    }


def fading_segment(half_life, most):
    """Tokens of the segments in which a text is read that fades.

    At most a half-life, within which nothing fades; a power of two, for few
    sizes to trace.
    """
    return min(most, 2 ** int(math.log2(max(1, half_life))))


def prefill(model, ids, mask, last, state, half_life):
    """Takes in a segment of the prompts.

    Args:
        model: `PerformerLM`.
        ids: `[B, L]`.
        mask: `[B, L]`; padding stands at the end of a row.
        last: `[B, 1, hidden_dim]`, of the last token before.
        state: State of all tokens before.
        half_life: Scalar tensor, or `None`: see `generate`.

    Returns:
        The last block's output for the last token of each row so far, and
        the state after it.
    """
    count = ops.sum(ops.cast(mask, "int32"), axis=1)  # [B]
    state = model.fade(state, count, half_life)
    x, state = model._advance(ids, state, mask)
    count = count[:, None, None]
    new = ops.take_along_axis(x, ops.maximum(count - 1, 0), axis=1)
    new = ops.cast(new, last.dtype)
    return ops.where(count > 0, new, last), state


def continue_state(model, last, state, count, size, top_k, options):
    """New tokens `[B, size]`, of which the first `count` are drawn.

    Args:
        model: `PerformerLM`.
        last: The last block's output for the last token, `[B, 1, width]`.
        state: The state after it.
        count: Scalar integer tensor.
        size: Integer, or scalar tensor, of at least `count`.
        top_k: Integer or `None`.
        options: Dict of tensors: `temperature`, `top_p` or `None`, `end_id`
            (-1 for none), `seed`, and `far_half_life` or `None`.
    """
    names = sorted(state)

    def advance(token, x, *values):
        state = dict(zip(names, values))
        state = model.fade(state, 1, options["far_half_life"])
        x, new = model._advance(token, state)
        return ops.cast(x, last.dtype), *(new[name] for name in names)

    def logits(x, *_):
        return _drawable(model, model._predict(x)[:, 0])

    start = (last, *(state[name] for name in names))
    return _loop(start, logits, advance, count, size, top_k, options)


def continue_ids(model, ids, lengths, count, size, top_k, options):
    """As `continue_state`, from the tokens `[B, L]` themselves.

    Args:
        model: `PerformerLM`.
        ids: `[B, L]`, filled up at the end of each row with anything. Where
            a row is full, its oldest token makes room.
        lengths: `[B]`, tokens of each row.
        count: As for `continue_state`, and so the rest.
        size: See there.
        top_k: See there.
        options: See there.
    """

    def logits(ids, lengths):
        # What stands behind the last token changes nothing before it.
        index = (lengths - 1)[:, None, None]
        predicted = model(ids, training=False)
        last = ops.take_along_axis(predicted, index, axis=1)[:, 0]
        return _drawable(model, last)

    def advance(token, ids, lengths):
        room = ops.shape(ids)[1]
        full = (lengths == room)[:, None]
        ids = ops.where(full, ops.roll(ids, -1, axis=1), ids)
        lengths = ops.minimum(lengths + 1, room)
        own = ops.arange(room, dtype="int32")[None, :] == lengths[:, None] - 1
        return ops.where(own, token, ids), lengths

    return _loop((ids, lengths), logits, advance, count, size, top_k, options)


def _drawable(model, logits):
    """Logits `[B, V]`; those of padding, which is no token, are -inf."""
    if not model.mask_zero:
        return logits
    padding = ops.arange(model.vocabulary_size)[None, :] == 0
    return ops.where(padding, -float("inf"), logits)


def _loop(start, logits, advance, count, size, top_k, options):
    """Draws token after token, until all rows have ended.

    Args:
        start: Tuple of tensors, what the loop carries.
        logits: Function of them that gives logits `[B, V]`.
        advance: Function of a token `[B, 1]` and them that gives new ones.
        count: As for `continue_state`, and so the rest.
        size: See there.
        top_k: See there.
        options: See there.
    """
    batch = ops.shape(start[0])[0]
    end_id = options["end_id"]
    fill = ops.maximum(end_id, 0)
    shapes = [x.shape for x in start]

    def body(index, ended, tokens, *carry):
        token = sample(
            logits(*carry),
            ops.stack([options["seed"], index]),
            options["temperature"],
            top_k,
            options["top_p"],
        )
        token = ops.where(ended, fill, token)[:, None]
        tokens = ops.slice_update(tokens, [0, index], token)
        ended = ops.logical_or(ended, token[:, 0] == end_id)
        carry = advance(token, *carry)
        if keras.backend.backend() == "tensorflow":
            # A loop insists on the static shapes that it began with.
            for x, shape in zip(carry, shapes):
                x.set_shape(shape)
        return index + 1, ended, tokens, *carry

    def going(index, ended, *_):
        return ops.logical_and(
            index < count, ops.logical_not(ops.all(ended))
        )

    tokens = ops.zeros((batch, size), dtype="int32") + fill
    ended = ops.zeros((batch,), dtype="bool")
    index = ops.cast(0, "int32")
    return ops.while_loop(going, body, (index, ended, tokens, *start))[2]


def _compile(model, function, use_xla):
    """`function(model, ...)` compiled, by XLA on TensorFlow if `use_xla`.

    Integers and `None` among its arguments are constants.
    """
    function = functools.partial(function, model)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=use_xla, autograph=False)
    import jax

    def static(x):
        return x is None or isinstance(x, int)

    @functools.lru_cache
    def compiled(constants):
        def run(weights, tensors):
            values = iter(tensors)
            arguments = [
                next(values) if is_tensor else constant
                for is_tensor, constant in constants
            ]
            mapping = list(zip(model.variables, weights))
            with keras.StatelessScope(state_mapping=mapping):
                return function(*arguments)

        return jax.jit(run)

    def call(*arguments):
        constants = tuple(
            (False, x) if static(x) else (True, None) for x in arguments
        )
        tensors = [x for x in arguments if not static(x)]
        weights = [variable.value for variable in model.variables]
        return compiled(constants)(weights, tensors)

    return call


def _prompts(prompt_ids, mask, mask_zero):
    """The prompts as a list of integer arrays without padding."""
    if hasattr(prompt_ids, "to_list"):  # a ragged tensor
        prompt_ids = prompt_ids.to_list()
    try:
        if isinstance(prompt_ids, (list, tuple)) and mask is None:
            rows = [np.asarray(row) for row in prompt_ids]
        else:
            rows = list(np.asarray(prompt_ids))
    except ValueError:  # rows of several lengths beside a mask, or deeper
        rows = []
    if not rows or any(row.ndim != 1 for row in rows):
        raise ValueError(
            "Received an invalid value for argument `prompt_ids`, expected "
            "tokens of shape (batch, length), or, without a mask, a list of "
            f"lists. Received: prompt_ids={prompt_ids!r}"
        )
    if mask is not None:
        mask = np.asarray(mask)
        shape = (len(rows), len(rows[0]))
        if mask.shape != shape:
            raise ValueError(
                "Received an invalid value for argument `mask`, expected the "
                f"shape of the prompts, {shape}. Received: "
                f"mask.shape={mask.shape}"
            )
        rows = [row[keep != 0] for row, keep in zip(rows, mask)]
    if mask_zero:
        rows = [row[row != 0] for row in rows]
    for index, row in enumerate(rows):
        if not row.size:
            raise ValueError(
                "Received an invalid value for argument `prompt_ids`, "
                "expected at least one token in each prompt. Received: none "
                f"in row {index}"
            )
        if not np.issubdtype(row.dtype, np.integer):
            raise TypeError(
                "Received an invalid value for argument `prompt_ids`, "
                f"expected integers. Received: dtype {row.dtype}"
            )
    return rows


def _padded(prompts, size):
    """Prompts `[B, size]` int32, filled up with 0, and their mask."""
    ids = np.zeros((len(prompts), size), "int32")
    mask = np.zeros(ids.shape, "bool")
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = True
    return ids, mask


def _precise(dtype):
    return "float64" if dtype == "float64" else "float32"


def _round_up(number, step):
    return -(-number // step) * step


def _check_number(name, value, least, most, above=False):
    """Raises unless a number is in [least, most], or above `least`."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # What float32 holds, as the compiled loops do.
    finite = good and abs(value) <= float(np.finfo("float32").max)
    if not finite or not least <= value <= most or (above and value == least):
        expected = f"a finite number of at least {least:g}"
        if most == 1:
            expected = "a number in (0, 1]"
        raise arguments.invalid(name, expected, value)
