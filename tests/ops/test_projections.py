"""Projections: uniform directions, chi norms, orthogonal blocks."""

import keras
import numpy as np
import pytest

from keras_performer import ops
from keras_performer.feature_maps import FavorPlus
from tests.testing import assert_mean
from tests.testing import to_numpy


@pytest.mark.parametrize("dim", [8, 16, 64])
def test_every_coordinate_has_mean_zero(dim):
    # Rows of one block depend on each other, so a draw is one sample; the
    # published draws (a QR without its signs) are off by 10 to 30 of these
    # standard errors.
    draws = [
        to_numpy(ops.orthogonal_gaussian(dim, dim, seed=s)) for s in range(200)
    ]
    draws = np.stack(draws).reshape(200, -1)
    error = np.std(draws, axis=0, ddof=1) / np.sqrt(200)
    # The largest of up to 4,096 entries that are right lies within 5
    # standard errors with probability 0.998; the mean of their squares is 1
    # within 4 of its own.
    z = np.mean(draws, axis=0) / error
    assert np.max(np.abs(z)) < 5.5
    assert np.mean(np.square(z)) < 1 + 4 * np.sqrt(2 / z.size) + 0.02


def test_first_rows_of_many_blocks_are_gaussian():
    rows = to_numpy(ops.orthogonal_gaussian(65_536, 8, seed=1))
    assert_mean(rows, 0.0)  # each coordinate
    assert_mean(np.square(rows), 1.0)
    assert_mean(rows[:, 0] * rows[:, 1], 0.0)


def test_norms_are_those_of_gaussian_vectors():
    norms = np.linalg.norm(
        to_numpy(ops.orthogonal_gaussian(8_000, 5, seed=2)), axis=-1
    )
    assert_mean(np.square(norms), 5.0)
    # The fourth moment tells a chi variable from a constant norm.
    assert_mean(norms**4, 5.0 * 7.0)


@pytest.mark.parametrize(("rows", "dim"), [(3, 7), (7, 7), (19, 7)])
def test_blocks_are_orthogonal(rows, dim):
    projection = to_numpy(ops.orthogonal_gaussian(rows, dim, seed=3))
    assert projection.shape == (rows, dim)
    assert projection.dtype == "float32"
    unit = projection / np.linalg.norm(projection, axis=-1, keepdims=True)
    for start in range(0, rows, dim):
        block = unit[start : start + dim]
        np.testing.assert_allclose(
            block @ block.T, np.eye(len(block)), atol=1e-5
        )


def test_a_seed_repeats_its_draw():
    first = to_numpy(ops.orthogonal_gaussian(9, 4, seed=7))
    np.testing.assert_array_equal(
        first, to_numpy(ops.orthogonal_gaussian(9, 4, seed=7))
    )
    other = to_numpy(ops.orthogonal_gaussian(9, 4, seed=8))
    assert np.max(np.abs(first - other)) > 0.1
    generators = [keras.random.SeedGenerator(7) for _ in range(2)]
    draws = [to_numpy(ops.orthogonal_gaussian(9, 4, g)) for g in generators]
    np.testing.assert_array_equal(*draws)


def test_directions_and_norms_are_drawn_apart():
    # One integer seed for two draws would repeat its numbers.
    rows = to_numpy(ops.orthogonal_gaussian(4_000, 4, seed=4))
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    signed = np.sign(rows) * (norms - np.mean(norms))
    assert_mean(signed, 0.0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 4), "num_features"), ((2.5, 4), "num_features"), ((4, -1), "dim")],
)
def test_wrong_sizes_are_named(arguments, name):
    with pytest.raises(ValueError, match=f"argument `{name}`, expected a pos"):
        ops.orthogonal_gaussian(*arguments)


def test_favor_plus_pairs_its_rows():
    projection = to_numpy(FavorPlus().draw_projection(7, 3, seed=1))
    np.testing.assert_array_equal(projection[4:], -projection[:3])
    iid = to_numpy(
        FavorPlus(antithetic=False, orthogonal=False).draw_projection(6, 3, 1)
    )
    unit = iid / np.linalg.norm(iid, axis=-1, keepdims=True)
    assert np.max(np.abs((unit @ unit.T)[:3, :3] - np.eye(3))) > 0.05
    regularized = FavorPlus(regularized=True).draw_projection(7, 3, seed=1)
    np.testing.assert_allclose(
        np.linalg.norm(to_numpy(regularized), axis=-1), np.sqrt(3), rtol=1e-5
    )
