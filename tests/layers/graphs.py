"""What a compiled function consists of: its nodes and their shapes."""

import re

import numpy as np

from tests.testing import ON_TENSORFLOW

if ON_TENSORFLOW:
    import tensorflow as tf
else:
    import jax

# An array in the text of a compiled module: a type and its sizes.
ARRAY = re.compile(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]")


def node_count(function, *arrays):
    """Number of operations of the traced function, in all its bodies."""
    if ON_TENSORFLOW:
        traced = tf.function(function, autograph=False)
        graph = traced.get_concrete_function(*arrays).graph.as_graph_def()
        bodies = [body.node_def for body in graph.library.function]
        return len(graph.node) + sum(map(len, bodies))
    # Each equation is written as `results = operation operands`.
    return str(jax.make_jaxpr(function)(*arrays)).count(" = ")


def graph_shapes(function, *arrays):
    """Static shapes of all tensors in the graph, before any compilation."""
    if not ON_TENSORFLOW:
        text = jax.jit(function).lower(*arrays).as_text("hlo")
        return shapes_in(text)
    traced = tf.function(function, autograph=False)
    graph = traced.get_concrete_function(*arrays).graph
    graph = graph.as_graph_def(add_shapes=True)
    bodies = [body.node_def for body in graph.library.function]
    shapes = set()
    for node in [*graph.node, *(node for body in bodies for node in body)]:
        for shape in node.attr["_output_shapes"].list.shape:
            if not shape.unknown_rank:
                shapes.add(tuple(axis.size for axis in shape.dim))
    return shapes


def compiled_shapes(function, *arrays):
    """Shapes of all arrays in what XLA makes of the function."""
    if ON_TENSORFLOW:
        traced = tf.function(function, jit_compile=True, autograph=False)
        text = traced.experimental_get_compiler_ir(*arrays)("optimized_hlo")
    else:
        text = jax.jit(function).lower(*arrays).compile().as_text()
    return shapes_in(text)


def shapes_in(text):
    return {
        tuple(int(size) for size in sizes.split(","))
        for sizes in ARRAY.findall(text)
    }


def quadratic(shapes, length):
    """The shapes with two axes of the length, or as many elements."""
    return [
        shape
        for shape in shapes
        if sum(size >= length for size in shape) > 1
        or np.prod(shape, dtype=float) >= length**2
    ]


def larger_than(shapes, elements):
    """The shapes with more elements than that."""
    return [s for s in shapes if np.prod(s, dtype=float) > elements]
