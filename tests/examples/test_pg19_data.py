"""The text pipeline of examples/pg19: tokens, windows, splits, errors."""

import dataclasses
import os
import sys
import types

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="the examples use tf.data")
pytest.importorskip("tensorflow_text", reason="the examples tokenise by it")

from examples import common
from examples import records
from examples.pg19 import config as configs
from examples.pg19 import data

pytestmark = pytest.mark.tensorflow_only("the examples use tf.data")

CONFIG = configs.Config(
    sequence_length=7, batch_size=3, shuffle_windows=50, seed=5
)
TEXT = (
    "She had been forced into prudence in her youth,\n"
    "she learned romance as she grew older:\n\n"
    "  the natural sequel of an unnatural beginning.\n"
)


def document(text, name="a"):
    return data.Document(name, name, data=text.encode("utf-8"))


def write_books(folder, **splits):
    for split, books in splits.items():
        (folder / split).mkdir(parents=True)
        for name, text in books.items():
            path = folder / split / f"{name}.txt"
            path.write_bytes(
                text if isinstance(text, bytes) else text.encode("utf-8")
            )
    return str(folder)


def learned(size=120):
    return data.WordPieceTokenizer.learn([document(TEXT * 20)], size)


# --- tokens ----------------------------------------------------------------


def test_bytes_round_trip():
    tokenizer = data.ByteTokenizer()
    text = "A na\u00efve caf\u00e9,\tand\x00 more\r\n"
    ids = tokenizer.tokenize([text]).numpy()[0]
    assert list(ids) == [byte + 1 for byte in text.encode("utf-8")]
    assert tokenizer.detokenize([0, *ids, 0]) == text


def test_o62_texts_of_any_length_become_dense_in_graph_mode():
    tokenizer = data.ByteTokenizer()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def encode(texts):
        return data.texts_to_ids(texts, tokenizer, 128)

    ids, mask = encode(tf.constant(["", "abcde", "x" * 300]))
    assert ids.shape == (3, 128) and ids.dtype == tf.int32
    assert mask.shape == (3, 128) and mask.dtype == tf.int32
    assert list(mask.numpy().sum(axis=1)) == [0, 5, 128]
    assert list(ids.numpy()[1, :6]) == [98, 99, 100, 101, 102, 0]
    traced = encode.get_concrete_function().structured_outputs[0]
    assert traced.shape.as_list() == [None, 128]


def test_word_pieces_keep_white_space_and_count_bytes():
    tokenizer = learned()
    assert 20 < tokenizer.vocabulary_size <= 120
    ids = tokenizer.tokenize([TEXT]).numpy()[0]
    assert tokenizer.detokenize(ids) == TEXT
    sizes = np.array(tokenizer.bytes_per_token)
    assert sizes[ids].sum() == len(TEXT)
    assert len(ids) < len(TEXT) / 2  # it did learn words
    assert tokenizer.tokenize(["z\u00fc"]).numpy()[0][0] == 1


# Tabs, ends of lines, spaces of many kinds, marks of what is unknown, letters
# of two parts: each comes back.
KEPT = ("\t", "\r", "\r\n", "  ", " \t \n", "\u00a0", "\u2009", "\u3000")
KEPT += ("\u2028", "\ufffd", "e\u0301", "\ue000")
# Control characters, what has no width, and the marks of white space
# themselves: each is unknown, though the vocabulary was learned from it.
UNSEEN = ("\0", "\x0b", "\f", "\x1b", "\x7f", "\x85", "\u00ad", "\u200b")
UNSEEN += ("\u200d", "\u202e", "\ufeff", "\u2581", "\u23ce", "\u2409")


def around(character):
    """Text with four times a character, within, beside and between words."""
    return f"She{character}had {character} her{character}{character}youth\n"


@pytest.fixture(scope="module")
def well_read(tmp_path_factory):
    """A tokenizer that has seen all characters, read from its file."""
    text = "".join(around(character) for character in KEPT + UNSEEN)
    tokenizer = data.WordPieceTokenizer.learn([document(text * 20)], 300)
    path = str(tmp_path_factory.mktemp("pieces") / "vocabulary.txt")
    tokenizer.write(path)
    return data.WordPieceTokenizer.read(path, 300)


@pytest.mark.parametrize("character", KEPT, ids=ascii)
def test_word_pieces_keep_every_byte(well_read, character):
    text = around(character)
    ids = well_read.tokenize([text]).numpy()[0]
    assert well_read.detokenize(ids) == text
    sizes = np.array(well_read.bytes_per_token)[ids]
    assert sizes.sum() == len(text.encode()) and sizes.min() > 0


@pytest.mark.parametrize("character", UNSEEN, ids=ascii)
def test_what_word_pieces_cannot_keep_is_unknown(well_read, character):
    text = around(character)
    ids = well_read.tokenize([text]).numpy()[0]
    assert (ids == well_read.unknown_id).sum() == 4
    assert well_read.detokenize(ids) == text.replace(character, "")
    size = np.array(well_read.bytes_per_token)[ids].sum()
    assert size + 4 * len(character.encode()) == len(text.encode())


def test_an_older_vocabulary_counts_tabs_as_unknown():
    ids = learned().tokenize(["she\tlearned\r\n"]).numpy()[0]
    assert (ids == 1).sum() == 2


def test_a_vocabulary_file_brings_back_the_same_ids(tmp_path):
    tokenizer = learned()
    path = str(tmp_path / "vocabulary.txt")
    tokenizer.write(path)
    again = data.WordPieceTokenizer.read(path, 120)
    np.testing.assert_array_equal(
        again.tokenize([TEXT]).numpy(), tokenizer.tokenize([TEXT]).numpy()
    )
    assert again.bytes_per_token == tokenizer.bytes_per_token
    with pytest.raises(common.UserError, match="more than --vocabulary_siz"):
        data.WordPieceTokenizer.read(path, 20)


@pytest.mark.parametrize(
    "content", [b"", b"[PAD]\n[UNK]\na\n", b"[DOC]\n[UNK]\na\na\n", b"\xff"]
)
def test_another_file_as_vocabulary_is_refused(tmp_path, content):
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(common.UserError, match="other.txt"):
        data.WordPieceTokenizer.read(str(path), 120)


def test_a_missing_vocabulary_is_named(tmp_path):
    with pytest.raises(common.UserError, match="nowhere.txt"):
        data.WordPieceTokenizer.read(str(tmp_path / "nowhere.txt"), 120)


# --- windows ---------------------------------------------------------------


def both_datasets(documents, config=CONFIG, make=data.ByteTokenizer):
    tokenizer = make()
    return (
        data.training_dataset(documents, tokenizer, config),
        data.validation_dataset(documents, tokenizer, config),
    )


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


@pytest.mark.parametrize("make", [data.ByteTokenizer, learned])
@pytest.mark.parametrize("mix_documents", [False, True])
def test_o63_shapes_are_static_without_strings_or_python(
    tmp_path, make, mix_documents
):
    folder = write_books(tmp_path, train={"1": TEXT * 9, "2": TEXT * 9})
    documents = data.load(folder, "train")
    config = dataclasses.replace(CONFIG, mix_documents=mix_documents)
    for dataset in both_datasets(documents, config, make):
        for spec in dataset.element_spec:
            assert spec.shape == (3, 7)
            assert spec.dtype in (tf.int32, tf.float32)
        found = operations(dataset)
        assert "ReadFile" in found  # the look inside works
        assert not any("PyFunc" in name for name in found)


def test_o64_targets_are_the_inputs_one_place_earlier():
    for dataset in both_datasets([document(TEXT), document(TEXT[:30])]):
        for x, y, *_ in dataset.take(4):
            np.testing.assert_array_equal(x[:, 0], 0)
            np.testing.assert_array_equal(y[:, :-1], x[:, 1:])


@pytest.mark.parametrize("sizes", [[0], [6], [7], [8], [0, 1, 13, 14, 100]])
def test_evaluation_sees_every_token_once(sizes):
    documents = [document(("abcdefg" * 20)[:size]) for size in sizes]
    dataset = data.evaluation_dataset(
        documents, data.ByteTokenizer(), CONFIG
    )
    found = {index: [] for index in range(len(sizes))}
    for _, y, weight, index in dataset:
        assert set(np.unique(weight)) <= {0.0, 1.0}
        for row in range(3):
            kept = y[row].numpy()[weight[row].numpy() > 0]
            found[int(index[row])].extend(kept)
    for index, one in enumerate(documents):
        assert found[index] == [byte + 1 for byte in one.data] + [0]


@pytest.mark.parametrize("workers", [2, 3, 40])
def test_workers_share_the_evaluation(workers):
    documents = [document(TEXT[:size]) for size in (5, 0, 100, 30)]

    def rows(shard):
        dataset = data.evaluation_dataset(
            documents, data.ByteTokenizer(), CONFIG, shard
        )
        found = [
            tuple(array[row].numpy().tolist() for array in batch)
            for batch in dataset
            for row in range(3)
        ]
        return [row for row in found if any(row[2])]

    # 1, 1, 15 and 5 windows; the last of 40 workers have none.
    whole = rows((0, 1))
    assert len(whole) == 22
    for index in range(workers):
        assert rows((index, workers)) == whole[index::workers]


def test_validation_tells_its_length_and_can_be_cut():
    documents = [document(TEXT)]
    tokenizer = data.ByteTokenizer()
    whole = data.validation_dataset(documents, tokenizer, CONFIG)
    windows = -(-(len(TEXT) + 1) // 7)
    assert int(whole.cardinality()) == -(-windows // 3)
    config = dataclasses.replace(CONFIG, validation_batches=2)
    cut = data.validation_dataset(documents, tokenizer, config)
    assert len(list(cut)) == int(cut.cardinality()) == 2


def training_windows(documents, count, skip=0, shard=(0, 1), **changes):
    """The first windows, each as the list of its tokens."""
    config = dataclasses.replace(CONFIG, **{"batch_size": 1, **changes})
    dataset = data.training_dataset(
        documents, data.ByteTokenizer(), config, skip, shard
    )
    return [
        [int(token) for token in y[0][weight[0] > 0]]
        for _, y, weight in dataset.take(count)
    ]


@pytest.mark.parametrize("mix_documents", [False, True])
def test_training_is_the_same_for_the_same_seed_only(mix_documents):
    documents = [document(TEXT, "a"), document(TEXT.upper(), "b")]
    change = {"mix_documents": mix_documents}
    first = training_windows(documents, 80, **change)
    assert first == training_windows(documents, 80, **change)
    assert first != training_windows(documents, 80, seed=6, **change)
    # A second iterator over one data set gives the same once more.
    config = dataclasses.replace(CONFIG, **change)
    dataset = data.training_dataset(documents, data.ByteTokenizer(), config)
    for one, other in zip(dataset.take(20), dataset.take(20)):
        np.testing.assert_array_equal(one[1], other[1])
    # What is left out at the start changes nothing of the rest.
    assert first[30:] == training_windows(documents, 50, skip=30, **change)


@pytest.mark.parametrize("mix_documents", [False, True])
def test_workers_share_the_windows(mix_documents):
    # 132 tokens: 18 or 19 windows at each offset, no two of them alike.
    text = " ".join(str(number) for number in range(100, 133))
    change = {"mix_documents": mix_documents, "shuffle_windows": 1}
    whole = training_windows([document(text)], 18, **change)
    parts = [
        training_windows([document(text)], 9, shard=(index, 2), **change)
        for index in range(2)
    ]
    assert whole[0::2] == parts[0] and whole[1::2] == parts[1]


def test_each_pass_covers_the_text_at_a_new_offset():
    # Every window of this text tells its own place. With 18 * 7 + 6 tokens
    # a pass has 18 whole windows at each of the offsets 0 to 6.
    text = " ".join(str(number) for number in range(100, 133))
    stream = [byte + 1 for byte in text.encode()] + [0]
    places = {tuple(stream[i : i + 7]): i for i in range(len(stream) - 6)}
    assert len(stream) == 132 and len(places) == 126
    windows = training_windows([document(text)], 4 * 18, mix_documents=True)
    starts = np.array([places[tuple(window)] for window in windows])
    offsets = set()
    for one in starts.reshape([4, 18]):
        offset = one.min()
        offsets.add(offset)
        np.testing.assert_array_equal(np.sort(one), offset + 7 * np.arange(18))
        assert not np.array_equal(one, np.sort(one))
    assert len(offsets) > 1 and max(offsets) < 7


def test_each_pass_sees_every_token_of_every_document_once():
    texts = {"a": "abc", "b": "0123456789" * 3, "c": "ABCDEFG"}
    documents = [document(text, name) for name, text in texts.items()]
    streams = {
        tuple(byte + 1 for byte in text.encode()) + (0,)
        for text in texts.values()
    }
    # Without a shuffle of windows a pass is a row of whole documents. The
    # long one has 5 windows, and 6 where its offset leaves both ends short.
    windows = training_windows(documents, 60, shuffle_windows=1)
    found, stream = [], []
    for window in windows:
        assert 0 not in window[:-1]  # an end mark is the end of its window
        stream += window
        if window[-1] == 0:
            found.append(tuple(stream))
            stream = []
    assert len(found) > 15 and set(found) == streams
    for pass_ in range(len(found) // 3):
        assert set(found[3 * pass_ : 3 * pass_ + 3]) == streams
    lengths = {len(w) for w in windows if w[0] in range(49, 59)}
    assert len(lengths) > 3  # cut at new offsets


def test_documents_follow_each_other_with_an_end_mark():
    documents = [document("aaa", "a"), document("bbbb" * 10, "b")]
    windows = np.array(training_windows(documents, 60, mix_documents=True))
    assert (windows == 0).any()
    for window in windows:
        (ends,) = np.nonzero(window == 0)
        for end in ends[ends < 6]:
            # After an end mark the other text begins.
            assert window[end + 1] != window[end - 1] or end == 0


def test_segments_of_a_document_continue_each_other():
    x, y, weight = data.segments(
        tf.constant(TEXT), data.ByteTokenizer(), 7
    )
    tokens = [byte + 1 for byte in TEXT.encode()] + [0]
    assert list(y[weight > 0]) == tokens
    assert list(x[weight > 0]) == [0] + tokens[:-1]
    assert x.shape == y.shape == weight.shape == (-(-len(tokens) // 7), 7)


def test_too_little_training_text_is_an_error():
    with pytest.raises(common.UserError, match=r"\(11 tokens.*length=7"):
        data.training_dataset(
            [document("0123456789")], data.ByteTokenizer(), CONFIG
        )


# --- records ---------------------------------------------------------------


def test_records_are_read_as_the_books_they_are_made_of(tmp_path):
    folder = write_books(
        tmp_path, train={"1": TEXT, "2": TEXT.upper(), "3": "caf\u00e9"}
    )
    books = data.load(folder, "train")
    assert list(data.raw_examples(folder, "train")) == [
        (book.name, (tmp_path / "train" / f"{book.name}.txt").read_bytes())
        for book in books
    ]
    # The third book stands in a file of its own.
    paths = [str(tmp_path / f"train-0000{i}-of-00002.tfrecord") for i in (0, 1)]
    for path, part in zip(paths, (books[:2], books[2:])):
        with tf.io.TFRecordWriter(path) as file:
            for book in part:
                text = tf.io.read_file(book.path).numpy()
                file.write(records.serialize(book.name, text))
    again = data.load(folder, "train")
    for book, other in zip(books, again, strict=True):
        assert (book.name, book.num_bytes, book.num_words) == (
            other.name, other.num_bytes, other.num_words
        )
    tokenizer = data.ByteTokenizer()
    for one, other in zip(
        data.evaluation_dataset(books, tokenizer, CONFIG),
        data.evaluation_dataset(again, tokenizer, CONFIG),
        strict=True,
    ):
        for array, expected in zip(one, other, strict=True):
            np.testing.assert_array_equal(array, expected)
    first = training_windows(again, 60)
    assert first == training_windows(again, 60)
    # More than a pass, in another order: the same bytes, those of the third
    # book among them.
    found, expected = (
        {token for window in training_windows(some, 120) for token in window}
        for some in (again, books)
    )
    assert found == expected and 0xC3 + 1 in found


def test_tensorflow_datasets_are_read(monkeypatch):
    def load(name, split, data_dir):
        assert (name, split, data_dir) == ("pg19", "test", None)
        return [
            {"book_text": b"some text", "book_id": 7, "book_title": b"Title"}
        ]

    module = types.SimpleNamespace(load=load, as_numpy=lambda x: x)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    (book,) = data.load("tfds:pg19", "test")
    assert (book.name, book.title, book.data) == ("7", "Title", b"some text")
    assert book.num_words == 2
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(common.UserError, match=r"keras-performer\[tfds\]"):
        data.load("tfds:pg19", "test")


def test_raw_examples_come_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "sources_of", lambda _: pytest.fail("all"))
    drawn = []

    def load(name, split, data_dir):
        for number in range(3):
            drawn.append(number)
            yield {
                "book_text": b"text",
                "book_id": number,
                "book_title": b"Title",
            }

    module = types.SimpleNamespace(load=load, as_numpy=iter)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", module)
    examples = data.raw_examples("tfds:pg19", "train")
    assert next(examples) == ("0", b"text") and drawn == [0]
    assert [name for name, _ in examples] == ["1", "2"]
    # The second book cannot be read yet when the first one is there.
    folder = write_books(tmp_path, train={"1": "one", "2": b"\xff"})
    examples = data.raw_examples(folder, "train")
    assert next(examples) == ("1", b"one")
    with pytest.raises(common.UserError, match=r"2\.txt is not UTF-8"):
        next(examples)
    (tmp_path / "train" / "1.txt").write_text("")
    (tmp_path / "train" / "2.txt").unlink()
    with pytest.raises(common.UserError, match="no text in .*train"):
        list(data.raw_examples(folder, "train"))


# --- splits ----------------------------------------------------------------


def test_a_folder_in_the_layout_of_pg19(tmp_path):
    folder = write_books(
        tmp_path,
        train={"20": "two words", "100": "caf\u00e9"},
        test={"3": "x"},
    )
    (tmp_path / "metadata.csv").write_text(
        '20,"Title, with comma",1815,url\n3,Other,1900,url\n'
    )
    (tmp_path / "train" / "notes.md").write_text("no book")
    books = data.load(folder, "train")
    assert [(b.name, b.title, b.num_bytes) for b in books] == [
        ("100", "100", 5),
        ("20", "Title, with comma", 9),
    ]
    assert books[1].num_words == 2
    assert [b.title for b in data.load(folder, "test")] == ["Other"]


def test_what_is_no_book_is_left_out_and_named(tmp_path, capsys):
    folder = write_books(tmp_path, train={"1": "one"})
    (tmp_path / "train" / "2.TXT").write_text("two")
    (tmp_path / "train" / "3.txt.gz").write_text("three")
    (tmp_path / "train" / "4.txt").mkdir()
    assert [b.name for b in data.load(folder, "train")] == ["1", "2"]
    printed = capsys.readouterr().out
    assert "train: left out 2 of 4 entries" in printed
    assert printed.endswith("3.txt.gz, 4.txt/\n")
    for number in range(10, 30):
        (tmp_path / "train" / f"{number}.md").touch()
    assert len(list(data.raw_examples(folder, "train"))) == 2
    printed = capsys.readouterr().out
    assert "left out 22 of 24" in printed and printed.endswith("19.md, ...\n")
    for name in ("3.txt.gz", *(f"{number}.md" for number in range(10, 30))):
        (tmp_path / "train" / name).unlink()
    (tmp_path / "train" / "4.txt").rmdir()
    data.load(folder, "train")
    assert not capsys.readouterr().out


def test_a_name_in_another_encoding_is_read(tmp_path, capsys):
    folder = write_books(tmp_path, train={"1": "one"})
    path = os.path.join(os.fsencode(folder), b"train", b"caf\xe9")
    for end, content in ((b".txt", "caf\u00e9"), (b".md", "no book")):
        with open(path + end, "wb") as file:
            file.write(content.encode("utf-8"))
    books = data.load(folder, "train")
    assert [book.name for book in books] == ["1", r"caf\xe9"]
    assert r"left out 1 of 3 entries" in capsys.readouterr().out
    texts = [text.numpy() for text in data.texts(books)]
    assert texts == [b"one", b"caf\xc3\xa9"]
    for name, text in data.raw_examples(folder, "train"):
        assert records.serialize(name, text)


def test_a_missing_folder_or_split_or_text_is_named(tmp_path):
    with pytest.raises(common.UserError, match="no folder .*absent"):
        data.load(str(tmp_path / "absent"), "train")
    with pytest.raises(common.UserError, match="no folder .*validation"):
        data.load(str(tmp_path), "validation")
    folder = write_books(tmp_path, train={"1": ""}, test={})
    for split in ("train", "test"):
        with pytest.raises(common.UserError, match=f"no text in .*{split}"):
            data.load(folder, split)


def test_a_file_that_is_not_utf8_is_named_with_its_place(tmp_path):
    folder = write_books(tmp_path, train={"1": "fine", "2": b"caf\xe9 noir"})
    with pytest.raises(common.UserError, match=r"2\.txt is not .*0xe9.* 3"):
        data.load(folder, "train")


def test_metadata_of_another_shape_is_named(tmp_path):
    folder = write_books(tmp_path, train={"1": "fine"})
    (tmp_path / "metadata.csv").write_text("1,Title,1815,url\n2,Title\n")
    with pytest.raises(common.UserError, match="metadata.csv, line 2.*: 2 f"):
        data.load(folder, "train")


def test_a_quote_that_is_not_closed_in_metadata_is_named(tmp_path):
    folder = write_books(tmp_path, train={"1": "fine"})
    rows = "".join(f"{number},Title,1815,url\n" for number in range(2, 9999))
    (tmp_path / "metadata.csv").write_text(f'0,T,1,u\n1,"T,1,u\n{rows}')
    with pytest.raises(common.UserError, match="csv, line 2: .*field larger"):
        data.load(folder, "train")


def test_o65_the_text_inside_python_splits_without_overlap():
    splits = {name: data.load(None, name) for name in data.SPLITS}
    names = [one.name for split in splits.values() for one in split]
    assert len(set(names)) == len(names)
    assert sum(one.num_bytes for one in splits["train"]) > 200_000
    lines = {
        name: {
            line
            for one in split
            for line in one.data.decode().split("\n")
            if len(line) > 20
        }
        for name, split in splits.items()
    }
    for name in ("validation", "test"):
        # Some topics quote the same note; whole topics that repeat others
        # (a quarter of them do) would bring this near 1.
        shared = len(lines[name] & lines["train"]) / len(lines[name])
        assert shared < 0.1, name
