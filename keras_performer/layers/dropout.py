"""Dropout whose masks are those of the whole batch, however it is split.

Replicas hold the same seeds, so that each of them would draw the mask of the
first rows for its own: the noise of a step would be one mask repeated, and
another one than a single device draws. TensorFlow's generator counts its
numbers, so a replica begins to count where its rows begin.
"""

import keras
from keras import ops


def drop(x, rate, generator):
    """`keras.random.dropout`, aware of `tf.distribute`.

    Args:
        x: Tensor `(batch, ...)`; on a replica its rows of the batch.
        rate: Share of the entries that become zero, a float below 1.
        generator: `keras.random.SeedGenerator`, the same on all replicas.

    Returns:
        A tensor like `x`. Where all replicas hold equally many rows, theirs
        one after the other equal what one device gives for the whole batch
        (on TPUs, whose generator promises no order, they are independent).
    """
    first = _rows_before(x)
    if first is None:
        return keras.random.dropout(x, rate, seed=generator)
    keep = _uniform(x, generator.next(), first) >= rate
    return ops.where(keep, x * (1 / (1 - rate)), ops.zeros_like(x))


def _rows_before(x):
    """Rows of the replicas before this one; `None` where there is just one."""
    if keras.config.backend() != "tensorflow":
        return None  # JAX draws for the batch, whatever holds its parts.
    import tensorflow as tf

    replica = tf.distribute.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return None
    index = tf.cast(replica.replica_id_in_sync_group, tf.int64)
    return index * tf.shape(x, tf.int64)[0]


def _uniform(x, seed, first):
    """Rows from `first` on of what `tf.random.stateless_uniform` draws.

    Args:
        x: Tensor of the shape and dtype of these rows.
        seed: Integer tensor (2,).
        first: Scalar int64 tensor.
    """
    import tensorflow as tf

    shape = tf.shape(x, tf.int64)
    count = tf.reduce_prod(shape)
    before = first * tf.reduce_prod(shape[1:])
    # One step of the counter gives 128 bits: four numbers, or two of 64 bits.
    # Half types are made of 32 bits each.
    step = 2 if x.dtype == tf.float64 else 4
    start = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.cast(seed, "int32"))
    # Its lower word begins at 0, so nothing is carried.
    counter = start.counter + tf.cast(tf.stack([before // step, 0]), "uint64")
    numbers = tf.raw_ops.StatelessRandomUniformV2(
        shape=tf.reshape(count + step - 1, (1,)),
        key=start.key,
        counter=counter,
        alg=tf.random.Algorithm.AUTO_SELECT.value,
        dtype=x.dtype,
    )
    numbers = tf.slice(numbers, [before % step], [count])
    return tf.reshape(numbers, shape)
