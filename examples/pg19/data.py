"""Books as windows of token ids, read and tokenised inside tf.data.

A window is a pair (x, y) of ids `[sequence_length]`, int32, and weights.
y holds the tokens to predict and x the same tokens one place later, after
id 0: `x[0] == 0` and `x[t + 1] == y[t]`. Id 0 starts every window and ends
every document; it also pads, where a weight of 0 says so.
"""

import csv
import os

import tensorflow as tf

from examples import common
from examples import records

SPLITS = ("train", "validation", "test")
METADATA = "metadata.csv"
SIDE_FILES = (METADATA,)
BOOKS = 64  # in memory, to draw the next one from

# WordPiece drops white space, so it is spelled out before: a space as a mark
# at the start of its word, as SentencePiece does, the others as words.
_SPACE = "\u2581"
_MARKS = {" ": _SPACE, "\n": "\u23ce", "\t": "\u2409", "\r": "\u240d"}
# It drops what cannot be seen as well. A word longer than those that it
# learns (50 letters) or takes apart (100 bytes) is always one [UNK].
_UNKNOWN = " " + "x" * 101 + " "
_RESERVED = ["[DOC]", "[UNK]"]
_WORDS = {"lower_case": False}


class Document:
    """One text: a file, a string in memory, or a record among others.

    Args:
        name: string, the book's id.
        title: string, for people.
        data: bytes, UTF-8. They are kept only where the text stands neither
            in a file nor in records.
        path: file of the text, or None.
        records: tuple of the paths of TFRecord files in which the documents
            of a split stand in their order, or None.

    Attributes:
        num_bytes: int, length of the text.
        num_words: int, words by white space: the unit of PG-19's perplexity.

    Raises:
        examples.common.UserError: the text is not UTF-8.
    """

    def __init__(self, name, title, data, path=None, records=None):
        self.name = name
        self.title = title
        self.path = path
        self.data = None if path or records else data
        self.records = records
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise common.UserError(
                f"{path or name} is not UTF-8 text: byte "
                f"{data[error.start]:#04x} at offset {error.start}. Convert "
                "it first, for instance with iconv."
            ) from None
        self.num_bytes = len(data)
        self.num_words = len(text.split())


def load(data_dir, split):
    """The documents of one split.

    Args:
        data_dir: folder in PG-19's layout, `<split>/<id>.txt` and (if there
            is one) `metadata.csv` without a header: id, title, year, url; or
            a folder of TFRecord files, as `tools.prepare_data` writes them;
            or "tfds:pg19", which is read into memory. None: Python's own
            documentation.
        split: "train", "validation" or "test".

    Returns:
        List of `Document`, in the order of their names, or as they come in
        records and data sets. What else a folder holds is left out, and its
        name printed.

    Raises:
        examples.common.UserError: the folder or the split is missing or
            empty, a text is not UTF-8, or metadata.csv has another shape.
    """
    return [document for document, _ in _read(data_dir, split)]


def raw_examples(data_dir, split):
    """Yields `(name, data)`, a string and bytes, of each document.

    One text at a time is in memory.

    Args:
        data_dir: see `load`.
        split: "train", "validation" or "test".
    """
    for document, text in _read(data_dir, split):
        yield document.name, text


def _read(data_dir, split):
    """Yields `(document, text)`, a `Document` and bytes; see `load`."""
    if data_dir is None:
        found = ((one, one.data) for one in _python_documentation(split))
    elif data_dir.startswith(records.TFDS):
        found = _read_tensorflow_dataset(data_dir, split)
    elif not os.path.isdir(data_dir):
        raise common.UserError(f"--data_dir: there is no folder {data_dir}")
    else:
        titles = _titles(os.path.join(data_dir, METADATA))
        files = tuple(records.files(data_dir, split))
        if files:
            found = _read_records(files, titles)
        else:
            found = _read_folder(os.path.join(data_dir, split), titles)
    size = 0
    for document, text in found:
        size += document.num_bytes
        yield document, text
    if not size:
        raise common.UserError(
            f"--data_dir: there is no text in {os.path.join(data_dir, split)}."
            " Expected files <id>.txt, or records."
        )


def _read_tensorflow_dataset(source, split):
    for book in records.tensorflow_dataset(source, split):
        name, text = str(int(book["book_id"])), book["book_text"]
        yield Document(name, book["book_title"].decode("utf-8"), text), text


def _read_records(files, titles):
    for name, text in records.read(files, text=True):
        title = titles.get(name, name)
        yield Document(name, title, text, records=files), text


def _read_folder(folder, titles):
    """The files `<id>.txt` of a folder; prints what else there is."""
    if not os.path.isdir(folder):
        raise common.UserError(
            f"--data_dir: there is no folder {folder}. Expected the folders "
            f"{', '.join(SPLITS)} with one <id>.txt a book."
        )
    files, skipped = sorted(os.listdir(folder)), []
    for file in files:
        path, file = os.path.join(folder, file), common.printable(file)
        name, extension = os.path.splitext(file)
        if os.path.isdir(path):
            skipped.append(file + os.sep)
        elif extension.lower() != ".txt":
            skipped.append(file)
        else:
            with open(path, "rb") as opened:
                text = opened.read()
            yield Document(name, titles.get(name, name), text, path), text
    if skipped:
        more = ", ..." if len(skipped) > 10 else ""
        print(
            f"{common.printable(folder)}: left out {len(skipped)} of "
            f"{len(files)} entries, which are no files <id>.txt: "
            f"{', '.join(skipped[:10])}{more}"
        )


def _titles(path):
    """Book id -> title, from metadata.csv; empty without the file."""
    if not os.path.exists(path):
        return {}
    titles, line = {}, 0
    with open(path, newline="", encoding="utf-8") as file:
        try:
            for line, row in enumerate(csv.reader(file), start=1):
                if len(row) != 4:
                    raise common.UserError(
                        f"{path}, line {line}: expected id, title, year, url. "
                        f"Received: {len(row)} fields"
                    )
                titles[row[0]] = row[1]
        except UnicodeDecodeError:
            raise common.UserError(f"{path} is not UTF-8 text.") from None
        except csv.Error as error:
            # As where a quote is not closed, which takes in all that follows.
            raise common.UserError(
                f"{path}, line {line + 1}: expected id, title, year, url. "
                f"Received: {error}"
            ) from None
    return titles


def _python_documentation(split):
    """The topics of Python's `help()`, split 8 : 1 : 1 by topic.

    Some topics repeat others word for word. They are left out: otherwise the
    validation text would stand in the training text.
    """
    from pydoc_data import topics

    seen = set()
    kept = []
    for name, text in sorted(
        topics.topics.items(), key=lambda topic: (-len(topic[1]), topic[0])
    ):
        # Short lines (rules, blank lines) recur everywhere.
        lines = [line for line in text.split("\n") if len(line) > 20]
        new = sum(line not in seen for line in lines)
        seen.update(lines)
        if 2 * new > len(lines):
            kept.append(Document(name, name, data=text.encode("utf-8")))
    # By length, so that each split has long and short topics.
    place = {"validation": 4, "test": 8}
    chosen = [
        document
        for rank, document in enumerate(kept)
        if (rank % 10 == place[split] if split in place
            else rank % 10 not in place.values())
    ]
    return sorted(chosen, key=lambda document: document.name)


class ByteTokenizer:
    """Id = byte + 1; nothing is unknown and nothing is lost.

    It needs no tensorflow-text, which does not go with TensorFlow's TPU build.
    """

    vocabulary_size = 257
    unknown_id = None
    bytes_per_token = None

    def tokenize(self, texts):
        """Strings `[N]` -> ragged int32 ids `[N, (length)]`."""
        data = tf.io.decode_raw(tf.strings.reduce_join(texts), tf.uint8)
        return tf.RaggedTensor.from_row_lengths(
            tf.cast(data, tf.int32) + 1, tf.strings.length(texts)
        )

    def detokenize(self, ids):
        """Sequence of ids -> string; id 0 is nothing."""
        data = bytes(int(i) - 1 for i in ids if i > 0)
        return data.decode("utf-8", errors="replace")


class WordPieceTokenizer:
    """WordPiece over words that carry their own white space.

    Lossless for text of known letters, spaces, line breaks and tabs. A word
    with unknown letters becomes `[UNK]`, and so does each other character
    that cannot be seen: control characters, zero-width spaces, soft hyphens.

    Args:
        pieces: list of strings, the vocabulary in the order of its ids.

    Attributes:
        bytes_per_token: list of int, the UTF-8 bytes that each id stands for;
            0 for `[UNK]`, whose text is not known.
    """

    def __init__(self, pieces):
        import tensorflow_text as tf_text

        self._pieces = list(pieces)
        self.vocabulary_size = len(self._pieces)
        self.unknown_id = 1
        self.bytes_per_token = [
            len(self._spell(piece).encode("utf-8")) for piece in self._pieces
        ]
        table = tf.lookup.StaticVocabularyTable(
            tf.lookup.KeyValueTensorInitializer(
                self._pieces, tf.range(len(self._pieces), dtype=tf.int64)
            ),
            num_oov_buckets=1,
        )
        self._tokenizer = tf_text.BertTokenizer(
            table,
            token_out_type=tf.int32,
            unknown_token=_RESERVED[1],
            **_WORDS,
        )

    def tokenize(self, texts):
        """Strings `[N]` -> ragged int32 ids `[N, (length)]`."""
        ids = self._tokenizer.tokenize(_spelled_out(texts))
        return ids.merge_dims(1, 2)

    def detokenize(self, ids):
        """Sequence of ids -> string; reserved ids are nothing."""
        return "".join(self._spell(self._pieces[int(i)]) for i in ids)

    def _spell(self, piece):
        if piece in _RESERVED:
            return ""
        text = piece.removeprefix("##")
        for character, mark in _MARKS.items():
            text = text.replace(mark, character)
        return text

    @classmethod
    def read(cls, path, vocabulary_size):
        """Reads a vocabulary file: one piece a line, in the order of ids.

        Raises:
            examples.common.UserError: no such file, not one of `write`, or
                more than `vocabulary_size` pieces.
        """
        try:
            with open(path, encoding="utf-8") as file:
                pieces = file.read().split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise common.UserError(
                f"--vocabulary: cannot read {path}: {error}"
            ) from None
        if pieces[-1] == "":
            pieces.pop()
        if pieces[:2] != _RESERVED or len(set(pieces)) != len(pieces):
            raise common.UserError(
                f"--vocabulary: {path} is not a vocabulary of this example. "
                f"Expected one piece a line, each once, the first two "
                f"{' and '.join(_RESERVED)}."
            )
        if len(pieces) > vocabulary_size:
            raise common.UserError(
                f"--vocabulary: {path} holds {len(pieces)} pieces, more than "
                f"--vocabulary_size={vocabulary_size}."
            )
        return cls(pieces)

    @classmethod
    def learn(cls, documents, vocabulary_size, max_bytes=20_000_000):
        """Learns a vocabulary with TensorFlow Text's own tool.

        Args:
            documents: list of `Document`.
            vocabulary_size: int, the most pieces, the reserved ones included.
            max_bytes: int. The tool counts words in Python, so no document is
                begun after this many bytes.
        """
        from tensorflow_text.tools.wordpiece_vocab import (
            bert_vocab_from_dataset,
        )

        sample, total = [], 0
        for document in documents:
            if total >= max_bytes:
                break
            sample.append(document)
            total += document.num_bytes
        pieces = bert_vocab_from_dataset.bert_vocab_from_dataset(
            texts(sample).map(lambda text: _spelled_out([text])),
            vocab_size=vocabulary_size,
            reserved_tokens=_RESERVED,
            bert_tokenizer_params=_WORDS,
        )
        return cls(pieces[:vocabulary_size])

    def write(self, path):
        """Writes the vocabulary as plain text, one piece a line, at once."""
        new = path + ".new"
        with open(new, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(piece + "\n" for piece in self._pieces)
        os.replace(new, path)


def _spelled_out(texts):
    """Strings in which white space is words; the rest that vanishes, too."""
    # A mark that stands in the text itself would be read as white space: it
    # becomes a control character, one of those that are unknown below.
    own = f"[{''.join(_MARKS.values())}]"
    texts = tf.strings.regex_replace(texts, own, "\x7f")
    for character, mark in _MARKS.items():
        after = "" if mark == _SPACE else " "
        texts = tf.strings.regex_replace(texts, character, f" {mark}{after}")
    return tf.strings.regex_replace(texts, r"[\p{Cc}\p{Cf}]", _UNKNOWN)


def texts_to_ids(texts, tokenizer, length):
    """Strings of any length as one dense block; longer ones are cut.

    Args:
        texts: string tensor `[N]`.
        tokenizer: one of the tokenizers above.
        length: int, ids in a row.

    Returns:
        `(ids, mask)`, both int32 `[N, length]`; the mask is 1 on tokens and
        0 on the padding, whose id is 0. Works in graph mode.
    """
    ids = tokenizer.tokenize(texts)
    mask = tf.sequence_mask(ids.row_lengths(), length, tf.int32)
    return ids.to_tensor(0, shape=[None, length]), mask


def texts(documents, seed=None, sources=None):
    """Dataset of scalar strings, one a document, read when it is needed.

    With a seed, each pass has another order.

    Args:
        documents: list of `Document` of one kind; if they are records, the
            first ones of their files.
        seed: int, or None.
        sources: `sources_of(documents)`, where this is called while a graph
            is made, of which gigabytes of text must not become a constant.
    """
    first = documents[0]
    if first.records:
        return _recorded_texts(first.records, len(documents), seed)
    if sources is None:
        sources = sources_of(documents)
    dataset = tf.data.Dataset.from_tensor_slices(sources)
    if seed is not None:
        dataset = dataset.shuffle(len(documents), seed=seed)
    return dataset if first.path is None else dataset.map(tf.io.read_file)


def sources_of(documents):
    """Texts or paths of documents, a string tensor; None for records."""
    if documents[0].records:
        return None
    with tf.device("CPU:0"):
        return tf.constant(
            [
                one.data if one.path is None else os.fsencode(one.path)
                for one in documents
            ]
        )


def _recorded_texts(files, count, seed):
    """Files in a new order, and their texts in one of a small buffer."""
    if seed is None:
        return records.dataset(list(files)).take(count).map(_data)
    paths = tf.data.Dataset.from_tensor_slices(list(files))
    paths = paths.shuffle(len(files), seed=seed)
    texts = paths.interleave(records.dataset, cycle_length=4).map(_data)
    return texts.shuffle(BOOKS, seed=seed + 1)


def _data(record):
    return record["data"]


def _tokens(text, tokenizer):
    """The ids of one document `[n + 1]`, its end mark last."""
    ids = tokenizer.tokenize(text[tf.newaxis]).values
    return tf.concat([ids, [0]], axis=0)


def _inputs(targets):
    """Targets `[..., L]` -> inputs: one place later, 0 first."""
    start = tf.zeros_like(targets[..., :1])
    return tf.concat([start, targets[..., :-1]], axis=-1)


def training_dataset(documents, tokenizer, config, skip=0, shard=(0, 1)):
    """Endless batches of shuffled windows, the same for the same seed.

    Each pass takes the documents in a new order. A document is cut at a new
    offset below `sequence_length` in each pass, so the windows are others;
    its last window is filled up with padding. With `mix_documents` the
    documents follow each other in windows without padding, and only the
    first is cut at a new offset.

    Args:
        documents: list of `Document`.
        tokenizer: one of the tokenizers above.
        config: `config.Config`: `sequence_length`, `batch_size`,
            `shuffle_windows`, `mix_documents`, `seed`.
        skip: int, batches to leave out at the start.
        shard: `(index, count)`: every `count`-th window from the `index`-th
            on, for one of several workers.

    Returns:
        `tf.data.Dataset` of `(x, y, weight)`, int32, int32 and float32
        `[batch_size, sequence_length]`, all static; the weight is 0 on
        padding.

    Raises:
        examples.common.UserError: the text is shorter than two windows.
    """
    length, seed = config.sequence_length, config.seed
    total = sum(document.num_bytes for document in documents)
    # Counting tokens means tokenising; no piece has 50 bytes on average.
    if total < 100 * length:
        total = sum(int(tf.size(_tokens(t, tokenizer))) for t in
                    texts(documents))
        if total < 2 * length:
            raise common.UserError(
                f"The training text ({total} tokens in {len(documents)} "
                "documents) is shorter than two windows of "
                f"--sequence_length={length}."
            )

    def mixed(index, drawn_text):
        drawn, text = drawn_text
        tokens = _tokens(text, tokenizer)
        offset = tf.cast(drawn % length, tf.int32)
        return tokens[tf.where(index == 0, offset, 0) :]

    def alone(drawn, text):
        tokens = _tokens(text, tokenizer)
        # What stands before the offset is a window of its own.
        offset = tf.cast(drawn % length, tf.int32)
        offset = tf.where(tf.size(tokens) > length, offset, 0)
        first, rest = (
            tf.data.Dataset.from_tensors(_windows(part, length))
            for part in (tokens[:offset], tokens[offset:])
        )
        return first.concatenate(rest).unbatch()

    sources = sources_of(documents)

    def batches(_):
        draws = tf.data.Dataset.random(
            seed=seed, rerandomize_each_iteration=True
        )
        drawn = tf.data.Dataset.zip(draws, texts(documents, seed, sources))
        if config.mix_documents:
            windows = drawn.enumerate().map(mixed)
            windows = windows.rebatch(length, drop_remainder=True)
            windows = windows.map(lambda y: (y, tf.ones([length])))
        else:
            windows = drawn.flat_map(alone)
        index, count = shard
        return (
            windows.shard(count, index)
            .shuffle(config.shuffle_windows, seed=seed)
            .repeat()
            .batch(config.batch_size, drop_remainder=True)
            .skip(skip)
            .map(lambda targets, weight: (_inputs(targets), targets, weight))
        )

    return common.same_each_time(batches).prefetch(2)


def _windows(tokens, length):
    """Tokens `[n]` as targets and weights `[ceil(n / length), length]`."""
    size = tf.size(tokens)
    count = -(-size // length)
    padding = [[0, count * length - size]]
    targets = tf.reshape(tf.pad(tokens, padding), [count, length])
    weight = tf.reshape(tf.pad(tf.ones([size]), padding), [count, length])
    return targets, weight


def evaluation_dataset(documents, tokenizer, config, shard=(0, 1)):
    """Every token of every document exactly once, in order.

    Args:
        documents: list of `Document`.
        tokenizer: one of the tokenizers above.
        config: `config.Config`: `sequence_length`, `batch_size`.
        shard: as in `training_dataset`.

    Returns:
        `tf.data.Dataset` of `(x, y, weight, document)`. x and y are int32
        and weight float32, `[batch_size, sequence_length]`; weight is 1 on
        the document's tokens and its end mark and 0 on padding. `document`
        is int32 `[batch_size]`, the index in `documents` (0 in rows that are
        padding throughout). All shapes are static.
    """
    length, batch_size = config.sequence_length, config.batch_size
    worker, workers = shard

    def windows(index, text):
        targets, weight = _windows(_tokens(text, tokenizer), length)
        document = tf.fill(
            tf.shape(targets)[:1], tf.cast(index, tf.int32)
        )
        return _inputs(targets), targets, weight, document

    def fill(*arrays):
        missing = batch_size - tf.shape(arrays[0])[0]
        filled = []
        for array in arrays:
            sides = [[0, missing]] + [[0, 0]] * (array.shape.rank - 1)
            shape = [batch_size] + array.shape[1:].as_list()
            filled.append(tf.ensure_shape(tf.pad(array, sides), shape))
        return tuple(filled)

    return (
        texts(documents)
        .enumerate()
        .map(windows)
        .unbatch()
        .shard(workers, worker)
        .batch(batch_size)
        .map(fill)
        .prefetch(2)
    )


def validation_dataset(documents, tokenizer, config):
    """`evaluation_dataset` as `model.fit` takes it: `(x, y, weight)`.

    Its cardinality is known: Keras warns of a data set that ends unforeseen.
    """
    dataset = evaluation_dataset(documents, tokenizer, config)
    dataset = dataset.map(lambda x, y, weight, _: (x, y, weight))
    if config.validation_batches is not None:
        dataset = dataset.take(config.validation_batches)
    batches = sum(1 for _ in dataset)
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))


def segments(text, tokenizer, length):
    """A whole document in segments that continue each other.

    Args:
        text: scalar string tensor.
        tokenizer: one of the tokenizers above.
        length: int, tokens in a segment.

    Returns:
        `(x, y, weight)`, int32, int32 and float32 `[count, length]`. Only the
        first x starts with id 0: the others start with the last token before.
    """
    targets, weight = _windows(_tokens(text, tokenizer), length)
    inputs = _inputs(tf.reshape(targets, [-1]))
    return tf.reshape(inputs, tf.shape(targets)), targets, weight
