"""The protein pipeline of examples/protein: letters, rows, masks, files."""

import collections
import dataclasses
import gzip
import sys
import types

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")

from examples import common
from examples import records
from examples.protein import config as configs
from examples.protein import data

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

CONFIG = configs.Config(sequence_length=7, batch_size=3, seed=5)
# Lengths around those of a row of 7: with marks, a protein of 6 fills it in
# the unidirectional task, one of 5 in the masked one.
SEQUENCES = ("M", "MKVLA", "ACDEFG", "HIKLMNP", "QRSTVWYACDEFGHI", "MKWXXC")
every_task = pytest.mark.parametrize("task", configs.TASKS)
every_layout = pytest.mark.parametrize("concatenate", [False, True])


def proteins(sequences=SEQUENCES):
    """`Proteins` of strings, without a file."""
    tokens, starts = [data.MARK], [1]
    for sequence in sequences:
        tokens += [*data.encode(sequence, len(sequence))[0], data.MARK]
        starts.append(len(tokens))
    return data.Proteins(
        np.array(tokens, "uint8"), np.array(starts, "int64"), 0, {}
    )


def fasta(sequences=SEQUENCES):
    return "".join(
        f">sp|P{i}|NAME some protein\n{sequence}\n"
        for i, sequence in enumerate(sequences)
    ).encode()


def write(folder, content, name="train.fasta"):
    path = folder / name
    path.write_bytes(content)
    return path


def change(**changes):
    return dataclasses.replace(CONFIG, **changes)


def batches(dataset, count):
    return [tuple(map(np.array, batch)) for batch in dataset.take(count)]


def equal(first, second):
    return all(
        np.array_equal(a, b)
        for one, other in zip(first, second, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def both_datasets(config, sequences=SEQUENCES):
    one = proteins(sequences)
    return (
        data.training_dataset(one, config),
        data.validation_dataset(one, config),
    )


# --- letters ---------------------------------------------------------------


def test_o66_encode_pads_and_masks():
    ids, mask = data.encode("MKV", 8)
    assert ids.shape == mask.shape == (8,)
    assert ids.dtype == mask.dtype == np.int32
    assert mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert ids[3:].tolist() == [data.PAD] * 5 and min(ids[:3]) >= data.FIRST
    np.testing.assert_array_equal(data.encode("mkv", 8)[0], ids)
    empty, mask = data.encode("", 8)
    assert not empty.any() and not mask.any()


def test_o66_odd_letters():
    ids = dict(zip("ABXZUOJ*-", data.encode("ABXZUOJ*-", 9)[0].tolist()))
    assert ids["*"] == ids["-"] == ids["X"] == data.UNKNOWN
    assert len({ids[letter] for letter in "ABZUOJX"}) == 7
    assert max(ids.values()) < data.MASK == data.VOCABULARY_SIZE - 1
    others = data.encode("x 1.\u00e9\u20ac", 6)[0]
    assert others.tolist() == [data.UNKNOWN] * 6


def test_o66_a_long_protein_is_cut_off():
    ids, mask = data.encode("ACDEFGHIK", 8)
    assert data.decode(ids) == "ACDEFGHI" and mask.tolist() == [1] * 8


def test_o66_decode_undoes_encode():
    for text in (data.STANDARD, "BJOUZX"):
        ids, _ = data.encode(text, 30)
        assert data.decode(ids) == text
    assert data.decode([data.MARK, data.FIRST, data.MASK, data.PAD]) == "A?"


# --- rows ------------------------------------------------------------------


def operations(dataset):
    """Names of all operations in the dataset's graph and its functions."""
    graph = tf.compat.v1.GraphDef()
    variant = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor
    )
    graph.ParseFromString(variant.numpy())
    nodes = list(graph.node)
    for function in graph.library.function:
        nodes.extend(function.node_def)
    return {node.op for node in nodes}


@every_task
@every_layout
def test_o63_shapes_are_static_without_strings_or_python(task, concatenate):
    config = change(task=task, concatenate=concatenate)
    for dataset in both_datasets(config):
        specs = dataset.element_spec
        assert [spec.shape.as_list() for spec in specs] == [[3, 7]] * 3
        assert [spec.dtype for spec in specs] == [
            tf.int32, tf.int32, tf.float32,
        ]
        found = operations(dataset)
        assert "GatherV2" in found  # the look inside works
        assert not any("PyFunc" in name for name in found)


@every_layout
def test_o64_targets_are_the_inputs_one_place_earlier(concatenate):
    for dataset in both_datasets(change(concatenate=concatenate)):
        for x, y, _ in batches(dataset, 4):
            filled = y[:, 0] != data.PAD
            np.testing.assert_array_equal(x[filled, 0], data.MARK)
            np.testing.assert_array_equal(y[:, :-1], x[:, 1:])


@every_layout
@every_task
@pytest.mark.parametrize("length", [2, 5, 7, 8, 64])
def test_evaluation_sees_every_residue_once(task, concatenate, length):
    config = change(
        task=task, concatenate=concatenate, sequence_length=length
    )
    dataset = data.evaluation_dataset(proteins(), config)
    rows = [row for batch in batches(dataset, -1) for row in zip(*batch)]
    assert len(rows) == 3 * int(dataset.cardinality())
    text = "".join(data.decode(y) for _, y, _ in rows)
    assert text == "".join(SEQUENCES)
    for x, y, weight in rows:
        known = (y >= data.FIRST) & (y < data.UNKNOWN)
        if task == "unidirectional":
            np.testing.assert_array_equal(weight, known)
        else:
            # What stayed or was replaced could be read off half the time.
            np.testing.assert_array_equal(weight, x == data.MASK)
            assert known[weight > 0].all()
            np.testing.assert_array_equal(x[~known], y[~known])


def test_rows_by_hand():
    mark, pad = data.MARK, data.PAD
    a, c, d, e = data.encode("ACDE", 4)[0]

    def rows(sequences, **changes):
        config = change(sequence_length=4, batch_size=1, **changes)
        dataset = data.evaluation_dataset(proteins(sequences), config)
        return [y[0].tolist() for _, y, _ in batches(dataset, -1)]

    # The end mark of ACDE would stand alone in a second row.
    assert rows(["AC", "ACDE"]) == [[a, c, mark, pad], [a, c, d, e]]
    assert rows(["AC", "ACD"], task="masked") == [
        [mark, a, c, mark],
        [mark, a, c, d],
    ]
    assert rows(["AC", "DE"], concatenate=True) == [
        [a, c, mark, d],
        [e, mark, pad, pad],
    ]


@every_layout
@every_task
@pytest.mark.parametrize("workers", [2, 3, 40])
def test_workers_share_the_evaluation(task, concatenate, workers):
    config = change(task=task, concatenate=concatenate)

    def rows(shard):
        dataset = data.evaluation_dataset(proteins(), config, shard)
        found = batches(dataset, -1)
        assert len(found) == int(dataset.cardinality())
        found = [np.stack(row).tolist() for one in found for row in zip(*one)]
        return [row for row in found if any(row[1])]

    # The last of 40 workers have none.
    whole = rows((0, 1))
    assert 3 < len(whole) < 40
    for index in range(workers):
        assert rows((index, workers)) == whole[index::workers]


def test_validation_can_be_cut():
    config = change(validation_batches=2)
    cut = data.validation_dataset(proteins(), config)
    assert len(list(cut)) == int(cut.cardinality()) == 2


# --- training --------------------------------------------------------------


@every_task
@every_layout
def test_training_is_the_same_for_the_same_seed_only(task, concatenate):
    config = change(task=task, concatenate=concatenate)
    first = batches(data.training_dataset(proteins(), config), 20)
    again = batches(data.training_dataset(proteins(), config), 20)
    assert equal(first, again)
    other = dataclasses.replace(config, seed=6)
    other = batches(data.training_dataset(proteins(), other), 20)
    assert not equal(first, other)


@every_task
@every_layout
@pytest.mark.parametrize("skip", [1, 5, 17])
def test_skipping_gives_the_batches_that_follow(task, concatenate, skip):
    config = change(task=task, concatenate=concatenate)
    whole = batches(data.training_dataset(proteins(), config), skip + 9)
    rest = batches(data.training_dataset(proteins(), config, skip), 9)
    assert equal(whole[skip:], rest)


@every_task
@every_layout
def test_workers_share_the_rows(task, concatenate):
    config = change(task=task, concatenate=concatenate, batch_size=4)
    # Two workers with batches of 4 see what one with batches of 8 sees.
    wide = dataclasses.replace(config, batch_size=8)
    whole = batches(data.training_dataset(proteins(), wide, 3), 12)
    shards = [
        batches(data.training_dataset(proteins(), config, 3, (i, 2)), 12)
        for i in range(2)
    ]
    for batch, even, odd in zip(whole, *shards, strict=True):
        for one, a, b in zip(batch, even, odd, strict=True):
            np.testing.assert_array_equal(one[0::2], a)
            np.testing.assert_array_equal(one[1::2], b)


@every_task
def test_each_pass_takes_every_row_once_in_another_order(task):
    config = change(task=task, batch_size=1)
    dataset = data.evaluation_dataset(proteins(), config)
    rows = collections.Counter(tuple(y[0]) for _, y, _ in batches(dataset, -1))
    count = int(dataset.cardinality())
    orders = []
    training = batches(data.training_dataset(proteins(), config), 4 * count)
    for start in range(0, len(training), count):
        one = [tuple(y[0]) for _, y, _ in training[start : start + count]]
        assert collections.Counter(one) == rows
        orders.append(one)
    assert any(one != orders[0] for one in orders[1:])


@every_task
def test_concatenated_passes_string_all_proteins_together(task):
    # Rows of 4 from 20 tokens: nothing is left over.
    sequences = ["ACD", "EFGH", "IKLMN", "PQRS"]
    config = change(
        task=task, batch_size=1, sequence_length=4, concatenate=True
    )
    dataset = data.training_dataset(proteins(sequences), config)
    rows = [y[0] for _, y, _ in batches(dataset, 15)]
    orders = []
    for start in (0, 5, 10):
        stream = np.concatenate(rows[start : start + 5])
        text = "".join(
            "|" if i == data.MARK else data.decode([i]) for i in stream
        )
        assert text.endswith("|")
        orders.append(text[:-1].split("|"))
        assert sorted(orders[-1]) == sequences
    assert len({tuple(order) for order in orders}) > 1


def test_end_marks_are_learned_and_unknown_residues_are_not():
    config = change(sequence_length=9, batch_size=1)
    dataset = data.training_dataset(proteins(["MXK"]), config)
    (x, y, weight), = batches(dataset, 1)
    assert weight[0].tolist() == [1, 0, 1, 1, 0, 0, 0, 0, 0]
    assert y[0, 3] == data.MARK and x[0, 4] == data.MARK


def test_too_few_proteins_for_a_row_are_an_error():
    config = change(concatenate=True, sequence_length=50)
    with pytest.raises(common.UserError, match="46 tokens in 6 .*length=50"):
        data.training_dataset(proteins(), config)
    # Without, a row is padded.
    config = change(sequence_length=50)
    assert batches(data.training_dataset(proteins(), config), 1)


# --- masked residues -------------------------------------------------------


def test_one_residue_in_seven_is_hidden_as_in_bert():
    ids = np.resize(np.arange(data.VOCABULARY_SIZE), 200_000).astype("int32")
    x, chosen = map(np.array, data.mask_residues(tf.constant(ids), (3, 4)))
    assert x.dtype == np.int32 and chosen.dtype == bool
    residue = (ids >= data.FIRST) & (ids < data.UNKNOWN)
    assert not chosen[~residue].any()
    np.testing.assert_array_equal(x[~chosen], ids[~chosen])
    n = residue.sum()
    # Five standard deviations of a binomial share.
    share = chosen[residue].mean()
    assert share == pytest.approx(0.15, abs=5 * (0.15 * 0.85 / n) ** 0.5)
    hidden = (x[chosen] == data.MASK).mean()
    assert hidden == pytest.approx(0.8, abs=5 * (0.16 / chosen.sum()) ** 0.5)
    # A replacement is the old residue once in 20, or it was a rare letter.
    other = (x[chosen] != data.MASK) & (x[chosen] != ids[chosen])
    expected = 0.1 * (1 - 20 / 25 / 20)
    assert other.mean() == pytest.approx(
        expected, abs=5 * (0.09 / chosen.sum()) ** 0.5
    )
    replaced = x[chosen][other]
    counts = np.bincount(replaced)[data.FIRST :]
    assert len(counts) == len(data.STANDARD)
    assert counts.min() > 0.7 * counts.mean()


def test_evaluation_masks_depend_on_the_split_alone():
    def hidden(**changes):
        config = change(task="masked", **changes)
        dataset = data.evaluation_dataset(proteins(SEQUENCES * 9), config)
        x, y, weight = (
            np.concatenate(parts).ravel()
            for parts in zip(*batches(dataset, -1))
        )
        kept = y >= data.FIRST
        return np.stack([x[kept], y[kept], weight[kept]])

    first = hidden()
    assert 0.05 < first[2].mean() < 0.25
    for changes in (
        {"seed": 9},
        {"sequence_length": 30, "batch_size": 2},
        {"concatenate": True},
    ):
        np.testing.assert_array_equal(hidden(**changes), first)


def test_training_masks_change_from_pass_to_pass():
    config = change(task="masked", batch_size=1, sequence_length=40)
    dataset = data.training_dataset(proteins(["ACDEFGHIKLMN" * 3]), config)
    rows = {tuple(weight[0]) for _, _, weight in batches(dataset, 9)}
    assert len(rows) == 9


# --- files -----------------------------------------------------------------


def test_a_fasta_file_is_read_whatever_its_lines(tmp_path):
    content = b">a first\r\nMKV\r\nla  cd\r\n\r\n>b\n\n>\nW*-1\n"
    path = write(tmp_path, content)
    expected = [("a", b"MKVlacd"), ("b", b""), ("unnamed", b"W*-1")]
    assert list(data.read_fasta(str(path))) == expected
    packed = write(tmp_path, gzip.compress(content), "packed")
    assert list(data.read_fasta(str(packed))) == expected


def test_empty_records_and_unknown_letters_are_counted_and_told(tmp_path):
    write(tmp_path, b">a\nMKV\n>b\n>c\nxXW*-1*\n>d\n")
    one = data.load(str(tmp_path), "train")
    assert len(one) == 2 and one.num_residues == 10 and one.empty == 2
    assert one.unknown == {"X": 2, "*": 2, "-": 1, "1": 1}
    report = one.report()
    assert "2 sequences" in report and "10 residues" in report
    assert "X 2" in report and "* 2" in report
    assert "skipped: 2 empty records" in report
    assert one.starts.tolist() == [1, 5, 13]
    assert data.decode(one.tokens) == "MKVXXWXXXX"
    assert one.counts()[data.encode("K", 1)[0][0]] == 1


def sources(tmp_path, monkeypatch):
    """The same proteins in every form: folders and a name."""
    letters = [sequence.encode() for sequence in SEQUENCES]
    found = []
    for kind in ("fasta", "fasta.gz", "tfrecord"):
        folder = tmp_path / kind
        folder.mkdir()
        found.append(str(folder))
    write(tmp_path / "fasta", fasta(), "test.fasta")
    write(tmp_path / "fasta.gz", gzip.compress(fasta()), "test.fasta.gz")
    for index in range(2):
        path = tmp_path / "tfrecord" / f"test-0000{index}-of-00002.tfrecord"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for one in letters[3 * index : 3 * index + 3]:
                writer.write(records.serialize("name", one))
    module = types.ModuleType("tensorflow_datasets")
    module.load = lambda name, split, data_dir: {
        ("mine", "test"): [{"sequence": one} for one in letters],
        ("images", "test"): [{"image": np.zeros(3)}],
    }[name, split]
    module.as_numpy = iter
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    return [*found, str(write(tmp_path, fasta(), "any.fa")), "tfds:mine"]


def test_every_source_gives_the_same_proteins(tmp_path, monkeypatch):
    expected = proteins()
    for source in sources(tmp_path, monkeypatch):
        raw = [letters for _, letters in data.raw_examples(source, "test")]
        assert raw == [sequence.encode() for sequence in SEQUENCES]
        one = data.load(source, "test")
        np.testing.assert_array_equal(one.tokens, expected.tokens)
        np.testing.assert_array_equal(one.starts, expected.starts)
        assert one.unknown == {"X": 2}
    with pytest.raises(common.UserError, match="'sequence'.*image"):
        data.load("tfds:images", "test")
    with pytest.raises(common.UserError, match="tfds:other.*'test'"):
        data.load("tfds:other", "test")


def test_o65_the_embedded_proteins_are_200_and_each_stands_once():
    names = set()
    for split, count in (("train", 160), ("validation", 20), ("test", 20)):
        found = list(data.raw_examples(None, split))
        assert len(found) == count
        assert all(50 <= len(letters) <= 400 for _, letters in found)
        names |= {letters for _, letters in found}
    assert len(names) == 200


def test_missing_and_ambiguous_sources_are_named(tmp_path):
    def expect(source, message):
        with pytest.raises(common.UserError, match=message):
            data.load(str(source), "train")

    expect(tmp_path / "absent", "there is no .*absent")
    expect(tmp_path, "train.fasta.*Received: none of them")
    write(tmp_path, fasta())
    write(tmp_path, gzip.compress(fasta()), "train.fasta.gz")
    expect(tmp_path, "Received: .*train.fasta, .*train.fasta.gz")
    records_only = tmp_path / "records"
    records_only.mkdir()
    write(records_only, b"", "train-00001-of-00002.tfrecord")
    expect(records_only, "number 0 is missing")


DAMAGED = {
    "truncated": (gzip.compress(fasta() * 99)[:-20], "after line "),
    "corrupt": (
        gzip.compress(fasta() * 9)[:10] + b"\xff" * 50, "after line 0"
    ),
    "no header": (b"\nMKVLA\n>a\nMKV\n", "line 2: .*>name.*'MKVLA'"),
    "an image": (b"\x89PNG\r\n\x1a\n\x00", "line 1: .*0x89"),
    "binary": (b">a\nMKV\nM\x00K\n", "line 3: .*0x00"),
    "not ASCII": (">a\nMK\u00c9\n".encode(), "line 2: .*0xc3"),
    "nothing": (b"", "holds no sequences"),
    "blank": (b"\n \n", "holds no sequences"),
    "empty records": (b">a\n>b\n", r"no residues \(2 empty"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_named_with_its_line(tmp_path, kind):
    content, message = DAMAGED[kind]
    path = write(tmp_path, content)
    with pytest.raises(common.UserError, match=message) as caught:
        data.load(str(tmp_path), "train")
    folder = kind == "empty records"
    assert str(tmp_path if folder else path) in str(caught.value)
