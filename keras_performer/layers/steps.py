"""What a layer does once at the start of each training step.

Redrawing the projection and adopting new statistics must happen outside
whatever is recomputed in the backward pass (`keras.RematScope`), or the
gradient would be that of other features than the output's.
"""

import contextlib

from keras import ops

from keras_performer.ops.projections import StepSeed


class TrainingSteps:
    """Mixin: calls `_begin_step` once for each training step.

    Comes before `keras.layers.Layer` among the bases. `call` opens with
    `self._step(training)`.
    """

    _step_has_begun = False

    def _step(self, training):
        if training and not self._step_has_begun:
            self._begin_step()

    def _begin_step(self):
        raise NotImplementedError

    @contextlib.contextmanager
    def _hold_step(self):
        """Within, a step has begun already."""
        before = self._step_has_begun
        self._step_has_begun = True
        try:
            yield
        finally:
            self._step_has_begun = before

    def rematerialized_call(self, layer_call, *args, **kwargs):
        """Keras's hook: `call` with its activations computed again."""
        given = {**dict(enumerate(args)), **kwargs}
        # TensorFlow recomputes functions of tensors, all positional.
        names = [name for name in given if ops.is_tensor(given[name])]

        def after_step(*tensors):
            values = {**given, **dict(zip(names, tensors))}
            positional = [values.pop(index) for index in range(len(args))]
            with self._hold_step():
                return layer_call(*positional, **values)

        tensors = [given[name] for name in names]
        recomputed = super().rematerialized_call(after_step, *tensors)

        def call(*args, **kwargs):
            self._step(kwargs.get("training"))
            return recomputed(*tensors)

        return call


def redraw_if_due(state, projection, interval, draw):
    """Counts a training step, and redraws at every `interval`-th.

    Args:
        state: Variable of the integers (seed, steps so far).
        projection: Variable.
        interval: Steps between redraws.
        draw: Function from a seed to a new projection.
    """
    words = ops.convert_to_tensor(state)
    step = words[1]
    due = ops.logical_and(step > 0, step % interval == 0)
    # The step is the second word of the seed, so that replicas agree and a
    # run that is resumed continues the same sequence.
    new = ops.cond(
        due,
        lambda: ops.cast(draw(StepSeed(words)), "float32"),
        lambda: ops.convert_to_tensor(projection),
    )
    # Assigned outside of the condition, in which replicas may not.
    projection.assign(new)
    state.assign(ops.stack([words[0], step + 1]))
