"""The image model of examples/imagenet64 from its flags to its pictures."""

import csv
import json
import math

import keras
import numpy as np
import pytest
from absl import flags

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("skimage", reason="the examples use its photographs")

from examples import common
from examples import records
from examples.imagenet64 import config as configs
from examples.imagenet64 import data
from examples.imagenet64 import evaluate
from examples.imagenet64 import generate
from examples.imagenet64 import train
from keras_performer import PerformerLM

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

TINY = [
    "--image_size=4",
    "--batch_size=4",
    "--num_layers=1",
    "--num_heads=2",
    "--hidden_dim=16",
    "--intermediate_dim=32",
    "--num_features=8",
    "--local_window=8",
    "--warmup_steps=2",
    "--learning_rate=0.03",
    "--sample_images=2",
]
LENGTH = 4 * 4 * 3


def parse(*arguments):
    flag_values = flags.FlagValues()
    train.define_flags(flag_values)
    flag_values(["train", *arguments])
    return flag_values


def tiny_config(*arguments):
    flag_values = parse(*TINY, *arguments)
    return common.config_from_flags(configs.PRESETS, flag_values)


@pytest.fixture
def folder(tmp_path):
    """Ten dark images, of which a few steps teach that they are dark."""
    images = np.random.default_rng(0).integers(0, 12, [10, 12288], "uint8")
    np.savez(tmp_path / "train_data_batch_1.npz", data=images[:7])
    np.savez(tmp_path / "val_data.npz", data=images[7:])
    return str(tmp_path)


# --- scores ----------------------------------------------------------------


def test_bits_per_dimension_by_hand():
    # Probabilities of 1/4 and 1/8 cost 2 and 3 bits; the padding is nothing.
    probabilities = [[0.5, 0.25, 0.25], [0.125, 0.4, 0.475], [0.8, 0.1, 0.1]]
    y, weight = np.array([[1, 0, 2]]), np.array([[1.0, 1.0, 0.0]])
    metric = evaluate.BitsPerDimension()
    metric.update_state(y, np.log([probabilities]), weight)
    assert float(metric.result()) == pytest.approx((2 + 3) / 2, rel=1e-6)
    metric.update_state(np.array([[0]]), np.log([[[0.0625, 0.9375]]]))
    assert float(metric.result()) == pytest.approx((2 + 3 + 4) / 3, rel=1e-6)
    metric.reset_state()
    assert float(metric.result()) == 0.0
    metric.update_state(
        np.zeros([1, 2], int), np.zeros([1, 2, 4]), np.array([[1.0, 0.0]])
    )
    assert float(metric.result()) == pytest.approx(2.0)


def knows_green(x):
    """Certain that green is 0, and of nothing else."""
    logits = np.zeros([*x.shape, 256], "float32")
    logits[:, 1::3, 0] = 1e4
    return tf.constant(logits)


def test_scores_by_channel_count_each_image_once():
    images = np.full([5, 12288], 7, "uint8")
    images.reshape(5, -1, 3)[..., 1] = 0
    split = data._in_memory(bytearray(images), list("abcde"))
    scores, everything = evaluate.score(
        knows_green, split, tiny_config(), verbose=0
    )
    for one, bits in zip(scores, (8, 0, 8), strict=True):
        assert one.images == 5 and one.dimensions == 5 * 16
        assert one.bits_per_dimension == pytest.approx(bits, abs=1e-4)
    assert everything.dimensions == 5 * LENGTH
    assert everything.bits_per_dimension == pytest.approx(16 / 3, rel=1e-5)
    lines = evaluate.table(scores + [everything]).split("\n")
    assert len(lines) == 5 and lines[-1].startswith("all")
    assert "5.3333" in lines[-1] and "240" in lines[-1]


# --- the model -------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--feature_map=exact", "--local_window=none"],
        ["--local_window=0", "--dtype_policy=mixed_bfloat16"],
    ],
    ids=" ".join,
)
def test_o64_loss_at_initialisation_is_near_log_vocabulary(arguments):
    config = tiny_config(*arguments)
    model = train.build_model(config)
    images = np.random.default_rng(0).integers(0, 256, [4, 12288], "uint8")
    split = data._in_memory(bytearray(images), list("abcd"))
    ((x, y),) = data.training_dataset(split, config).take(1)
    logits = model(x)
    assert logits.shape == (4, LENGTH, 256) and logits.dtype == "float32"
    nats = float(np.mean(common.token_nats(y, logits)))
    assert abs(nats - math.log(256)) < 0.5


def test_positions_are_of_rows_columns_and_channels():
    model = train.build_model(tiny_config())
    assert model.grid == (4, 4, 3) and model.position == "learned"
    assert model.sequence_length == LENGTH
    assert model.vocabulary_size == 256


@pytest.mark.slow
@pytest.mark.parametrize("preset", configs.PRESETS)
def test_presets_build(preset):
    config = configs.PRESETS[preset]()
    model = train.build_model(config)
    shape = (config.batch_size, config.sequence_length)
    logits = model.compute_output_spec(keras.KerasTensor(shape, "int32"))
    assert logits.shape == (*shape, 256)
    if preset == "paper":
        assert shape[1] == 12288
        # Six blocks of 12 d^2 weights.
        expected = 6 * 12 * 512**2
        assert model.count_params() == pytest.approx(expected, rel=0.02)


def test_config_errors_name_the_field():
    for arguments, named in (
        (["--image_size=12"], "4, 8, 16, 32 or 64. Received: image_size=12"),
        (["--image_size=128"], "image_size=128"),
        (["--sample_images=-1"], "at least 0. Received: sample_images=-1"),
        (["--num_heads=3"], "multiple of num_heads=3.*hidden_dim=16"),
    ):
        with pytest.raises(common.UserError, match=named):
            tiny_config(*arguments)


def test_a_value_that_a_layer_refuses_is_a_user_error():
    with pytest.raises(common.UserError, match="cannot be built.*softmaxx"):
        train.build_model(tiny_config("--feature_map=softmaxx"))


def test_what_cannot_draw_does_not():
    assert train.draws_samples(tiny_config())
    for argument in ("--sample_images=0", "--feature_map=exact"):
        config = tiny_config(argument, "--local_window=none")
        assert not train.draws_samples(config)


# --- pictures --------------------------------------------------------------


@pytest.mark.parametrize("known", [0, 24, LENGTH - 1])
def test_completion_is_what_the_whole_model_finds_likeliest(known):
    model = train.build_model(tiny_config())
    given = np.random.default_rng(0).integers(0, 256, [2, known])
    found = generate.complete(model, given, LENGTH, temperature=0.0)
    assert found.shape == (2, LENGTH)
    np.testing.assert_array_equal(found[:, :known], given)
    x = np.pad(found, [(0, 0), (1, 0)])[:, :-1]
    likeliest = np.argmax(model(x), axis=-1)
    np.testing.assert_array_equal(found[:, known:], likeliest[:, known:])


def test_completion_is_fast_where_a_state_serves(monkeypatch):
    # One token more than the positions, and `generate` runs on the whole
    # image again for each sub-pixel: hours for a large one.
    def refuse(*arguments):
        pytest.fail("the model ran on the whole image for each sub-pixel")

    monkeypatch.setattr(PerformerLM, "_repeat", refuse)
    model = train.build_model(tiny_config())
    images = generate.draw(model, tiny_config(), 2)
    assert images.shape == (2, 4, 4, 3) and images.dtype == "uint8"
    again, other = (
        generate.draw(model, tiny_config(), 2, seed=seed) for seed in (0, 1)
    )
    np.testing.assert_array_equal(images, again)
    assert (images != other).any() and (images[0] != images[1]).any()


def test_the_upper_half_stays_and_each_completion_differs():
    config = tiny_config()
    model = train.build_model(config)
    images = np.random.default_rng(0).integers(0, 256, [2, 4, 4, 3], "uint8")
    rows = generate.complete_lower_half(model, config, images, 3)
    assert rows.shape == (2, 5, 4, 4, 3)
    np.testing.assert_array_equal(rows[:, 0], images)
    assert (rows[:, 1, 2:] == 127).all()
    for column in range(1, 5):
        np.testing.assert_array_equal(rows[:, column, :2], images[:, :2])
    lower = {rows[0, column, 2:].tobytes() for column in range(5)}
    assert len(lower) == 5


def test_a_grid_keeps_rows_and_columns():
    images = np.arange(5, dtype="uint8")[:, None, None, None]
    images = np.broadcast_to(images, [5, 2, 2, 3])
    picture = generate.grid(images)
    # Three in a row, the sixth is white.
    assert picture.shape == (2 * 4, 3 * 4, 3)
    assert picture[1:7:4, 1::4, 0].tolist() == [[0, 1, 2], [3, 4, 255]]
    assert (picture[0] == 255).all() and (picture[:, 3:5] == 255).all()


def test_a_picture_is_enlarged_by_whole_pixels(tmp_path):
    picture = np.arange(18, dtype="uint8").reshape(2, 3, 3)
    path = str(tmp_path / "a.png")
    generate.write_png(path, picture, least=10)
    found = tf.io.decode_png(tf.io.read_file(path)).numpy()
    assert found.shape == (8, 12, 3)
    np.testing.assert_array_equal(found[::4, ::4], picture)


# --- from the command line to the pictures ---------------------------------


def generating(*arguments):
    flag_values = flags.FlagValues()
    generate.define_flags(flag_values)
    flag_values(["generate", *arguments])
    return flag_values


def image_tags(folder):
    """Tags of the images in TensorBoard's files below a folder."""
    return {
        value.tag
        for path in folder.rglob("events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "images"
    }


@pytest.mark.slow
def test_a_run_from_flags_to_pictures(folder, tmp_path, capsys, no_network):
    run = tmp_path / "run"
    train.main(
        parse(
            *TINY,
            # The kernel that compiles fastest; others draw in other tests.
            "--feature_map=relu",
            "--local_window=none",
            "--steps=20",
            "--validation_every=10",
            f"--data_dir={folder}",
            f"--output_dir={run}",
        )
    )
    printed = capsys.readouterr().out
    assert "train               7" in printed
    difference = printed.split("difference of a logit: ")[1].split()[0]
    assert float(difference) < 1e-4
    assert "samples" in image_tags(run / "tensorboard")
    samples = tf.io.decode_png(tf.io.read_file(str(run / "samples.png")))
    assert max(samples.shape) >= 512
    assert (run / "curve.png").exists()
    assert not (run / common.BACKUP).exists()

    with open(run / "curve.csv", newline="") as file:
        curve = list(csv.DictReader(file))
    best = min(float(row["val_bits_per_dimension"]) for row in curve)
    assert best < 6.5  # 8 is a random model's
    for model in ("best.keras", "saved_model"):
        _, everything = evaluate.evaluate(
            str(run / model), folder, "validation", verbose=0
        )
        assert everything.images == 3
        assert everything.bits_per_dimension == pytest.approx(best, rel=1e-5)
    assert f"{everything.bits_per_dimension:.4f}" in printed


@pytest.mark.parametrize("command", [train, evaluate, generate])
def test_flags_go_together_with_those_of_absl(command):
    flag_values = flags.FlagValues()
    for own in flags.FLAGS.get_flags_for_module("absl.logging"):
        flags.DEFINE_flag(own, flag_values)
    assert "log_dir" in flag_values
    command.define_flags(flag_values)
    arguments = ["--model=a"] if command is not train else []
    if command is generate:
        arguments.append("--log_dir=b")
    flag_values(["command", *arguments])
    assert flag_values["log_dir"].value == ("b" * (command is generate))


@pytest.fixture
def untrained(tmp_path):
    config = tiny_config()
    path = str(tmp_path / "best.keras")
    common.claim_folder(config, None, str(tmp_path))
    train.build_model(config).save(path)
    return path


def test_o65_train_without_any_data(tmp_path, capsys, no_network):
    # main() with no --data_dir: what the command does in an empty checkout.
    arguments = ["--steps=1", "--validation_every=1"]
    arguments.append(f"--output_dir={tmp_path}")
    everything = train.main(parse(*TINY, *arguments))
    assert everything.images == data.load(None, "validation").num_images
    printed = capsys.readouterr().out
    assert "images: photographs inside scikit-image" in printed
    assert "drawn by the model" in printed
    assert (tmp_path / "samples.png").exists()


def test_images_to_complete_come_from_all_over(folder, tmp_path):
    config = tiny_config()
    (tmp_path / "mine").mkdir()
    pixels = np.full([64, 64, 3], 9, "uint8")
    keras.utils.save_img(tmp_path / "mine" / "a.png", pixels, scale=False)
    found = generate.find_images(str(tmp_path / "mine"), None, config, 4)
    assert found.shape == (1, 4, 4, 3) and (found == 9).all()
    found = generate.find_images("validation", folder, config, 2)
    assert found.shape == (2, 4, 4, 3)
    assert len(generate.find_images("validation", None, config, 5)) == 5
    with pytest.raises(common.UserError, match="--complete.*absent"):
        generate.find_images(str(tmp_path / "absent"), None, config, 2)


def test_images_to_complete_come_from_every_part(tmp_path):
    # Parts of 1 and of 7 images, each of one value.
    for part, values in enumerate(([10], range(20, 27))):
        path = tmp_path / f"validation-{part:05d}-of-00002.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as file:
            for value in values:
                data = bytes([value]) * (64 * 64 * 3)
                file.write(records.serialize(str(value), data))
    for count, expected in (
        (4, [10, 21, 23, 25]),
        (99, [10, *range(20, 27)]),
        (1, [10]),
    ):
        found = generate.find_images(
            "validation", str(tmp_path), tiny_config(), count
        )
        assert list(found[:, 0, 0, 0]) == expected


def test_drawn_images_lie_beside_the_model(untrained, tmp_path, capsys):
    generate.main(generating(f"--model={untrained}", "--num_images=1"))
    assert capsys.readouterr().out == f"{tmp_path / 'drawn.png'}\n"
    assert (tmp_path / "drawn.png").exists()


def test_completions_are_rows_of_a_picture(
    untrained, folder, tmp_path, capsys
):
    path = str(tmp_path / "new.png")
    generate.main(
        generating(
            f"--model={untrained}",
            f"--complete={folder}/val_data.npz",
            "--num_images=9",
            "--completions=1",
            f"--output={path}",
            f"--log_dir={tmp_path}/log",
        )
    )
    assert capsys.readouterr().out == f"{path}\n"
    assert image_tags(tmp_path / "log") == {"completed"}
    # Three rows, as there are, of an image, its half and a completion.
    picture = tf.io.decode_png(tf.io.read_file(path)).numpy()
    assert picture.shape[0] == picture.shape[1] >= 512


def test_what_cannot_draw_is_named(tmp_path):
    config = tiny_config("--feature_map=exact", "--local_window=none")
    path = str(tmp_path / "exact.keras")
    train.build_model(config).save(path)
    for arguments, named in (
        ([f"--model={path}"], "exact attention.*exact.keras"),
        ([f"--model={tmp_path}/none.keras"], "no file or folder.*none.keras"),
        (["--top_p=0"], "top_p"),
        (["--completions=2"], "--completions needs --complete"),
        (["--data_dir=d"], "--data_dir needs --complete"),
        (["--complete=d", "--data_dir=d"], "only --complete=validation"),
    ):
        with pytest.raises(common.UserError, match=named):
            generate.main(generating(*arguments))


def test_models_that_cannot_be_evaluated_are_named(untrained, tmp_path):
    def expect(path, message):
        with pytest.raises(common.UserError, match=message):
            evaluate.evaluate(str(path), None, "validation", verbose=0)

    broken = tmp_path / "broken.keras"
    broken.write_text("no archive")
    expect(broken, "cannot load .*broken.keras")
    with open(untrained, "rb") as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 255
    broken.write_bytes(content)
    expect(broken, "cannot load .*broken.keras")
    (tmp_path / "config.json").write_text(json.dumps({"depth": 3}))
    expect(untrained, "config.json was not written")
    (tmp_path / "config.json").unlink()
    expect(untrained, "none at .*config.json")


def test_evaluate_prints_a_table(untrained, folder, capsys, monkeypatch):
    flag_values = flags.FlagValues()
    evaluate.define_flags(flag_values)
    with pytest.raises(flags.IllegalFlagValueError, match="model"):
        flag_values(["evaluate"])
    arguments = [f"--model={untrained}", f"--data_dir={folder}"]
    flag_values(["evaluate", *arguments, "--split=train"])
    monkeypatch.setattr(flags, "FLAGS", flag_values)
    evaluate.main()
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[-1].split()[:3] == ["all", "7", str(7 * LENGTH)]


@pytest.mark.slow
def test_two_replicas_train_and_draw(
    folder, tmp_path, two_replicas, monkeypatch
):
    config = tiny_config(
        "--distribution=mirrored", "--steps=4", "--validation_every=2"
    )
    monkeypatch.setattr(common, "make_strategy", lambda _: two_replicas)
    train.train(config, folder, str(tmp_path / "run"), verbose=0)
    assert "samples" in image_tags(tmp_path / "run")
