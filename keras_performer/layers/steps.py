"""What a layer does once at the start of each training step.

Redrawing the projection, adopting new statistics and drawing the seeds of
dropout must happen outside whatever is recomputed in the backward pass
(`keras.RematScope`), or the gradient would be that of other features and masks
than the output's.
"""

import contextlib
import threading
import weakref

import keras
from keras import ops
from keras.src.backend.common import global_state
from keras.src.backend.common.remat import get_current_remat_mode

from keras_performer.ops.projections import StepSeed


class _Thread(threading.local):
    """Replicas of a distributed run trace in threads of their own."""

    def __init__(self):
        self.held = []
        self.seeds = []
        self.steps = weakref.WeakKeyDictionary()


_thread = _Thread()


class TrainingSteps:
    """Mixin: calls `_begin_step` once for each training step.

    A step is a call of the outermost layer or model, so that a layer that
    the model uses twice has one step, not two. Comes before
    `keras.layers.Layer` among the bases. `call` opens with
    `self._step(training)`.
    """

    def _step(self, training, state=None):
        if not training or any(layer is self for layer in _thread.held):
            return
        # What Keras keeps for the time of a call of the outermost layer.
        # There is no public name for it; without it, every call is a step.
        call = global_state.get_global_attribute("current_call_ctx")
        last = _thread.steps.get(self, lambda: None)()
        if call is None or call is not last:
            if call is not None:
                _thread.steps[self] = weakref.ref(call)
            fresh = None
            if state is not None:
                fresh = ops.all(ops.equal(state["position"], 0))
            self._begin_step(fresh)

    def _begin_step(self, fresh=None):
        """Begins a step, unless the tensor `fresh` is false.

        What continues a sequence must read its state by the features that
        wrote it: no step begins there.
        """
        raise NotImplementedError

    def _dropout_generators(self):
        """The generators whose seeds a training call draws, in that order."""
        raise NotImplementedError

    def _recomputes_on_jax(self):
        """Whether `call` changes weights, which JAX cannot do twice."""
        return True

    @contextlib.contextmanager
    def _hold_step(self):
        """Within, a step has begun already."""
        _thread.held.append(self)
        try:
            yield
        finally:
            _thread.held.pop()

    def rematerialized_call(self, layer_call, *args, **kwargs):
        """Keras's hook: `call` with its activations computed again."""
        if keras.backend.backend() == "jax" and not self._recomputes_on_jax():
            raise NotImplementedError(
                f"{self.name} cannot be recomputed (`keras.RematScope`) on "
                "JAX with a feature map that adapts to its inputs, as its "
                "statistics would change in what is recomputed."
            )
        # TensorFlow recomputes functions of tensors, all positional, and
        # gives no gradient to others: a state's tensors must be among them.
        # It adds to each of them, which it cannot to booleans.
        leaves = keras.tree.flatten((args, kwargs))
        index = [i for i, leaf in enumerate(leaves) if ops.is_tensor(leaf)]
        dtypes = [_dtype(leaves[i]) for i in index]
        tensors = [_numeric(leaves[i]) for i in index]
        training = kwargs.get("training")
        generators = self._dropout_generators() if training else []
        tensors += [draw_seed(generator) for generator in generators]

        def after_step(*tensors):
            values = list(leaves)
            for i, tensor, dtype in zip(index, tensors, dtypes):
                values[i] = ops.cast(tensor, dtype)
            filled = keras.tree.pack_sequence_as((args, kwargs), values)
            seeds = zip(generators, tensors[len(index) :])
            with self._hold_step(), _hold_seeds(seeds):
                return layer_call(*filled[0], **filled[1])

        # Keras asks by the arguments how large the output will be.
        recomputed = super().rematerialized_call(after_step, *args, **kwargs)

        def call(*args, **kwargs):
            self._step(training, kwargs.get("initial_state"))
            return recomputed(*tensors)

        return call


def _dtype(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def _numeric(tensor):
    return ops.cast(tensor, "int32") if _dtype(tensor) == "bool" else tensor


def parts_scope():
    """A scope for the sublayers of a layer that recomputes as a whole.

    Where all layers recompute, or all large ones, these would do so within
    what is recomputed, and Keras's own cannot in a graph (keras#21207).
    """
    mode = get_current_remat_mode()
    if mode is None or mode.mode not in ("full", "larger_than"):
        return contextlib.nullcontext()
    return keras.RematScope(mode=None)


@contextlib.contextmanager
def _hold_seeds(seeds):
    """Within, `draw_seed` gives these: pairs of a generator and a seed."""
    _thread.seeds.append([(id(generator), seed) for generator, seed in seeds])
    try:
        yield
    finally:
        _thread.seeds.pop()


def draw_seed(generator):
    """The next seed of a layer's dropout: a tensor of two integers.

    In what is recomputed, it is one that was drawn before.

    Args:
        generator: `keras.random.SeedGenerator`.
    """
    if not _thread.seeds:
        return generator.next()
    held = _thread.seeds[-1]
    for i, (owner, seed) in enumerate(held):
        if owner == id(generator):
            del held[i]
            return seed
    raise RuntimeError(
        "What is recomputed (`keras.RematScope`) draws more dropout masks than "
        "its layer knows of. A subclass overrides `_dropout_generators` to "
        "name the generators, as often as a call draws from each."
    )


def redraw_if_due(state, projection, interval, draw, fresh=None):
    """Counts a training step, and redraws at every `interval`-th.

    Args:
        state: Variable of the integers (seed, steps so far).
        projection: Variable.
        interval: Steps between redraws.
        draw: Function from a seed to a new projection.
        fresh: Boolean tensor, whether a step begins; `None`: yes.
    """
    words = ops.convert_to_tensor(state)
    step = words[1]
    due = ops.logical_and(step > 0, step % interval == 0)
    one = 1
    if fresh is not None:
        due = ops.logical_and(due, fresh)
        one = ops.cast(fresh, words.dtype)
    # The step is the second word of the seed, so that replicas agree and a
    # run that is resumed continues the same sequence.
    new = ops.cond(
        due,
        lambda: ops.cast(draw(StepSeed(words)), "float32"),
        lambda: ops.convert_to_tensor(projection),
    )
    # Assigned outside of the condition, in which replicas may not.
    projection.assign(new)
    state.assign(ops.stack([words[0], step + one]))
