"""Dropout whose masks are those of the whole batch, however it is split.

Replicas hold the same seeds, so that each of them would draw the mask of the
first rows for its own: the noise of a step would be one mask repeated, and
another one than a single device draws. TensorFlow's generator counts its
numbers, so a replica begins to count where its rows begin.
"""

import keras
from keras import ops

from keras_performer.layers.steps import draw_seed
from keras_performer.ops.projections import StepSeed


def drop(x, rate, generator):
    """`keras.random.dropout`, aware of `tf.distribute` and of recomputation.

    Where all replicas hold equally many rows, their masks one after the other
    are what one device draws for the whole batch (one of the same kind: XLA
    draws other numbers, and so does Keras on a TPU). Where they do not, some
    rows of two replicas share a mask.

    Args:
        x: Tensor `(batch, ...)`; on a replica its rows of the batch.
        rate: Share of the entries that become zero, a float below 1.
        generator: `keras.random.SeedGenerator`, made in the strategy's scope.

    Returns:
        A tensor like `x`.
    """
    seed = draw_seed(generator)
    replica = _replica()
    if replica is None:
        return keras.random.dropout(x, rate, seed=StepSeed(seed))
    keep = _uniform(x, seed, replica) >= rate
    return ops.where(keep, x * (1 / (1 - rate)), ops.zeros_like(x))


def _replica():
    """The index of this replica; `None` where there is just one."""
    if keras.config.backend() != "tensorflow":
        return None  # JAX draws for the batch, whatever holds its parts.
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return None
    return context.replica_id_in_sync_group


def _uniform(x, seed, replica):
    """What `keras.random.uniform` draws, from this replica's rows on.

    Args:
        x: Tensor of the shape and dtype to draw.
        seed: Integer tensor (2,), as a `SeedGenerator` gives it.
        replica: How many replicas of as many rows come before.
    """
    import tensorflow as tf

    shape = tf.shape(x)
    count = tf.reduce_prod(shape)
    before = tf.cast(count, tf.int64) * tf.cast(replica, tf.int64)
    # One step of the counter gives 128 bits: four numbers, or two of 64 bits.
    # Half types are made of 32 bits each.
    step = 2 if x.dtype == tf.float64 else 4
    # The range in which Keras takes seeds.
    seed = tf.math.floormod(tf.cast(seed, tf.int64), tf.int32.max - 1)
    start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    # Its lower word begins at 0, so nothing is carried.
    counter = start.counter + tf.cast(tf.stack([before // step, 0]), "uint64")
    numbers = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.reshape(count + step - 1, (1,)),
        key=start.key,
        counter=counter,
        # The one that counts so, on every device.
        alg=tf.random.Algorithm.PHILOX.value,
        dtype=x.dtype,
    )
    skipped = tf.cast(before % step, tf.int32)
    return tf.reshape(tf.slice(numbers, [skipped], [count]), shape)
