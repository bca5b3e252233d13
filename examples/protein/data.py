"""Proteins as rows of token ids, read from FASTA and made inside tf.data.

A row is a triple `(x, y, weight)` of `[sequence_length]`: ids to read, ids to
predict (both int32), and what each prediction counts (float32). Id 0 pads;
`MARK` (id 1) stands before, between and after proteins. Where the task is
unidirectional, x is y one place later: `x[0] == MARK` and `x[t + 1] == y[t]`.
Where it is masked, x is y with some residues hidden, and those weigh 1.

An unknown residue, X, is read and never predicted: there is no right answer.
"""

import array
import collections
import dataclasses
import gzip
import os
import zlib

import numpy as np
import tensorflow as tf

from examples import common
from examples import records

SPLITS = ("train", "validation", "test")
EXTENSIONS = (".fasta", ".fasta.gz")
# 200 proteins; see the README there.
EMBEDDED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")

STANDARD = "ACDEFGHIKLMNPQRSTVWY"
# Asx, Leu or Ile, pyrrolysine, selenocysteine, Glx. X comes last: all ids from
# FIRST up to UNKNOWN are residues that can be right or wrong.
LETTERS = STANDARD + "BJOUZ" + "X"
PAD, MARK, FIRST = 0, 1, 2
UNKNOWN = FIRST + LETTERS.index("X")
MASK = UNKNOWN + 1
VOCABULARY_SIZE = MASK + 1

# As the article, and BERT before it: so many residues are to be predicted, and
# of those so many are hidden, and replaced by another; the rest stay.
CHOSEN, HIDDEN, REPLACED = 0.15, 0.8, 0.1
_EVALUATION_SEED = 0
# Tokens of a split that are looked at together.
_BLOCK = 2**22

# For `bytes.translate`: letter -> id.
_IDS = bytearray([UNKNOWN] * 256)
for _index, _letter in enumerate(LETTERS):
    _IDS[ord(_letter)] = _IDS[ord(_letter.lower())] = FIRST + _index
_TEXT = bytes(range(32, 127)) + b"\t"


def encode(sequence, length):
    """A protein as ids of one length.

    Args:
        sequence: string of letters, upper or lower case. B, J, O, U, Z and X
            have ids of their own; whatever is no letter of an amino acid
            (`*`, `-` and the rest) becomes X.
        length: int. A longer sequence is cut off there, a shorter one is
            padded with id 0.

    Returns:
        `(ids, mask)`, int32 arrays `[length]`; the mask is 1 on the letters
        and 0 on the padding.
    """
    ids = np.zeros(length, "int32")
    letters = sequence.encode("ascii", "replace").translate(_IDS)[:length]
    ids[: len(letters)] = list(letters)
    return ids, (np.arange(length) < len(letters)).astype("int32")


def decode(ids):
    """Ids -> string; padding and marks are nothing, `MASK` is a `?`."""
    symbols = ["", ""] + list(LETTERS) + ["?"]
    return "".join(symbols[int(i)] for i in ids)


def read_fasta(path):
    """Yields the records of a FASTA file, compressed by gzip or not.

    Args:
        path: file. A record is a line `>name ...` and lines of letters.

    Yields:
        `(name, letters)`: a string and bytes, without white space.

    Raises:
        examples.common.UserError: the file is missing, damaged or no FASTA.
    """
    number, name, parts = 0, None, []
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                line = line.strip()
                if line.startswith(b">"):
                    if name is not None:
                        yield name, b"".join(parts)
                    words = line[1:].split(maxsplit=1) or [b"unnamed"]
                    name, parts = words[0].decode("utf-8", "replace"), []
                elif line:
                    _check_line(path, number, line, name)
                    parts.extend(line.split())
    except (OSError, EOFError, zlib.error) as error:
        raise common.UserError(
            f"{path} cannot be read after line {number}: {error}"
        ) from error
    if name is None:
        raise common.UserError(
            f"{path} holds no sequences. Expected FASTA: lines >name, each "
            "with lines of letters after it."
        )
    yield name, b"".join(parts)


def _open(path):
    """A file of bytes; gzip is known by its first two, not by its name."""
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if compressed else open(path, "rb")


def _check_line(path, number, line, name):
    strange = line.translate(None, _TEXT)
    if strange:
        raise common.UserError(
            f"{path}, line {number}: expected letters. Received: byte "
            f"{strange[0]:#04x}"
        )
    if name is None:
        raise common.UserError(
            f"{path}, line {number}: expected a line >name before the first "
            f"letters. Received: {line[:30].decode()!r}"
        )


def raw_examples(data_dir, split):
    """The proteins of a split as they are stored.

    Args:
        data_dir: folder with `<split>.fasta` or `<split>.fasta.gz`, or with
            TFRecord files of `examples.records`; one FASTA file, whatever
            the split; "tfds:NAME", a TensorFlow Dataset with the feature
            "sequence"; or None: the 200 proteins in this folder.
        split: "train", "validation" or "test".

    Returns:
        Iterator of `(name, letters)`: a string and bytes.

    Raises:
        examples.common.UserError: the split is not there, or damaged.
    """
    if data_dir is None:
        data_dir = EMBEDDED
    if data_dir.startswith(records.TFDS):
        return _from_tensorflow_datasets(data_dir, split)
    if os.path.isfile(data_dir):
        return read_fasta(data_dir)
    if not os.path.isdir(data_dir):
        raise common.UserError(f"--data_dir: there is no {data_dir}")
    paths = [os.path.join(data_dir, split + end) for end in EXTENSIONS]
    paths = [path for path in paths if os.path.isfile(path)]
    record_files = records.files(data_dir, split)
    if len(paths) + bool(record_files) != 1:
        found = paths + record_files[:1]
        raise common.UserError(
            f"--data_dir: expected in {data_dir} one of {split}.fasta, "
            f"{split}.fasta.gz and files {split}-00000-of-....tfrecord. "
            f"Received: {', '.join(found) or 'none of them'}"
        )
    return read_fasta(paths[0]) if paths else records.read(record_files)


def _from_tensorflow_datasets(source, split):
    examples = records.tensorflow_dataset(source, split)
    for index, example in enumerate(examples):
        if not isinstance(example.get("sequence"), bytes):
            raise common.UserError(
                f"{source}: expected a feature 'sequence' of letters. "
                f"Received: {', '.join(sorted(example))}"
            )
        yield f"{split} {index}", example["sequence"]


@dataclasses.dataclass(frozen=True)
class Proteins:
    """The proteins of a split, all in memory: a byte for each residue.

    Args:
        tokens: uint8 array: `MARK`, then each protein and a `MARK`.
        starts: int64 array: the place of each protein's first residue, and
            of what would follow the last protein.
        empty: int, records that were skipped: they have no letters.
        unknown: dict, characters -> how many of each became X; X itself is
            among them.
    """

    tokens: np.ndarray
    starts: np.ndarray
    empty: int
    unknown: dict

    def __len__(self):
        return len(self.starts) - 1

    @property
    def num_residues(self):
        """Int; unknown residues included."""
        return len(self.tokens) - 1 - len(self)

    def counts(self):
        """How often each id occurs, int64 `[VOCABULARY_SIZE]`."""
        # `bincount` makes integers of eight bytes of what it is given.
        return sum(
            np.bincount(self.tokens[start : start + _BLOCK], None, MASK + 1)
            for start in range(0, len(self.tokens), _BLOCK)
        )

    def report(self):
        """One line for people: sizes, and what is not as it should be."""
        text = f"{len(self):>9,} sequences {self.num_residues:>13,} residues"
        if self.unknown:
            each = ", ".join(f"{k} {n:,}" for k, n in self.unknown.items())
            text += f"; unknown, never predicted: {each}"
        if self.empty:
            text += f"; skipped: {self.empty:,} empty records"
        return text


def load(data_dir, split):
    """The proteins of one split.

    Args:
        data_dir: see `raw_examples`.
        split: "train", "validation" or "test".

    Returns:
        `Proteins`.

    Raises:
        examples.common.UserError: as `raw_examples`, or there is no residue.
    """
    tokens, starts, empty = bytearray([MARK]), array.array("q", [1]), 0
    characters = np.zeros(256, "int64")
    for _, letters in raw_examples(data_dir, split):
        if not letters:
            empty += 1
            continue
        tokens += letters.translate(_IDS)
        tokens.append(MARK)
        starts.append(len(tokens))
        characters += np.bincount(np.frombuffer(letters, "uint8"), None, 256)
    if len(tokens) == 1:
        raise common.UserError(
            f"--data_dir: {data_dir}, split {split!r}: there are no residues "
            f"({empty} empty records)."
        )
    unknown = collections.Counter()
    for code in np.nonzero(characters)[0]:
        if _IDS[code] == UNKNOWN:
            unknown[chr(code).upper()] += int(characters[code])
    return Proteins(
        np.frombuffer(tokens, "uint8"),
        np.array(starts, "int64"),
        empty,
        dict(unknown),
    )


def is_residue(ids):
    """Ids -> booleans: a residue that is known, the only ones that score."""
    return tf.logical_and(ids >= FIRST, ids < UNKNOWN)


def mask_residues(ids, seed):
    """Hides residues for a model to find, as BERT does.

    Each known residue is chosen with probability 0.15. Of the chosen ones
    80 % become `MASK`, 10 % a random standard residue, and 10 % stay.

    Args:
        ids: int32 `[N]`.
        seed: two integers, which settle the result on every machine.

    Returns:
        `(x, chosen)`: ids `[N]`, int32, and booleans `[N]`.
    """
    draw, other = tf.unstack(
        tf.random.stateless_uniform([2, *ids.shape], seed, alg="philox")
    )
    chosen = tf.logical_and(draw < CHOSEN, is_residue(ids))
    other = FIRST + tf.cast(other * len(STANDARD), tf.int32)
    x = tf.where(draw < CHOSEN * (HIDDEN + REPLACED), other, ids)
    x = tf.where(draw < CHOSEN * HIDDEN, MASK, x)
    return tf.where(chosen, x, ids), chosen


def _cut(proteins, config):
    """The rows of a split, each token in one of them.

    Returns:
        int64 arrays `(begin, end)` of places in `proteins.tokens`.
    """
    starts, length = proteins.starts, config.sequence_length
    if config.concatenate:
        starts = starts[[0, -1]]
    # A masked row reads the mark before the protein too; in a unidirectional
    # one it is x[0] in any case.
    first = starts[:-1] - (not config.causal)
    counts = -(-(starts[1:] - first) // length)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.repeat(first, counts)
    begin += length * (np.arange(len(begin)) - before)
    end = np.minimum(begin + length, np.repeat(starts[1:], counts))
    # An end mark that is left alone has nothing to follow.
    kept = (end - begin > 1) | (proteins.tokens[begin] != MARK)
    return begin[kept], end[kept]


def _on_host(*arrays):
    """Arrays as tensors that stay in the memory that tf.data reads."""
    with tf.device("CPU:0"):
        return [tf.constant(array) for array in arrays]


def _read(tokens, places, valid):
    """Ids `[L]`, int32, of places `[L]`; `PAD` where not valid."""
    ids = tf.cast(tf.gather(tokens, tf.where(valid, places, 0)), tf.int32)
    return tf.where(valid, ids, PAD)


def _shifted(targets):
    """Targets `[L]` -> inputs: one place later, `MARK` first."""
    return tf.concat([[MARK], targets[:-1]], axis=0)


def _separate_rows(proteins, config):
    """Rows of one protein each, in another order in each pass."""
    begin, end = _on_host(*_cut(proteins, config))
    (tokens,) = _on_host(proteins.tokens)
    count, length = begin.shape[0], config.sequence_length

    def rows(seed):
        def row(index):
            index = tf.random.experimental.index_shuffle(
                index, seed, count - 1
            )
            places = begin[index] + tf.range(length, dtype=tf.int64)
            return _read(tokens, places, places < end[index])

        return row

    return rows, count


def _concatenated_rows(proteins, config):
    """Full rows of proteins in another order in each pass."""
    tokens, starts = _on_host(proteins.tokens, proteins.starts)
    length, total = config.sequence_length, len(proteins.tokens) - 1
    if total < length:
        raise common.UserError(
            f"The training split ({total:,} tokens in {len(proteins):,} "
            "sequences) is shorter than a row of --sequence_length="
            f"{length}. Lower it, or leave out --concatenate."
        )

    def rows(seed):
        order = tf.random.experimental.index_shuffle(
            tf.range(len(proteins), dtype=tf.int64), seed, len(proteins) - 1
        )
        first = tf.gather(starts, order)
        sizes = tf.gather(starts, order + 1) - first
        before = tf.cumsum(sizes, exclusive=True)
        shift = first - before

        def row(index):
            places = index * length + tf.range(length, dtype=tf.int64)
            which = tf.searchsorted(before, places, side="right") - 1
            places += tf.gather(shift, which)
            return tf.cast(tf.gather(tokens, places), tf.int32)

        return row

    return rows, total // length


def training_dataset(proteins, config, skip=0, shard=(0, 1)):
    """Endless batches of shuffled rows, the same for the same seed.

    Each pass takes every row once. Without `config.concatenate` the rows are
    those of the evaluation: a protein longer than a row is cut at the same
    places in each pass. With it, the proteins are strung together in a new
    order and cut anew; what is left over at the end of a pass is left out.
    Residues are masked anew in each pass. In the unidirectional task the end
    mark of a protein is predicted too.

    Args:
        proteins: `Proteins`.
        config: `config.Config`.
        skip: int, batches to leave out at the start; costs nothing.
        shard: `(index, count)`: every `count`-th row from the `index`-th on,
            for one of several workers, each with batches of its own.

    Returns:
        `tf.data.Dataset` of `(x, y, weight)`, `[batch_size,
        sequence_length]`, all static.

    Raises:
        examples.common.UserError: the proteins do not fill one row.
    """
    worker, count = shard
    make = _concatenated_rows if config.concatenate else _separate_rows
    rows, size = make(proteins, config)
    first = skip * config.batch_size * count
    begin = tf.constant(first % size, tf.int64)

    def one_pass(number):
        row = rows([config.seed, number])

        def mine(index):
            return (number * size + index) % count == worker

        def finish(index):
            y = row(index)
            if config.causal:
                counts = tf.logical_or(is_residue(y), y == MARK)
                return _shifted(y), y, tf.cast(counts, tf.float32)
            seed = [config.seed, number * size + index]
            x, chosen = mask_residues(y, seed)
            return x, y, tf.cast(chosen, tf.float32)

        # The first pass may begin in its midst.
        done = tf.where(number == first // size, begin, 0)
        return tf.data.Dataset.range(done, size).filter(mine).map(finish)

    return (
        tf.data.Dataset.range(first // size, tf.int64.max)
        .flat_map(one_pass)
        .batch(config.batch_size, drop_remainder=True)
        .prefetch(2)
    )


def evaluation_dataset(proteins, config, shard=(0, 1)):
    """Every residue exactly once, in order; the same in every run.

    The masked residues depend on the split alone: not on the seed, nor on
    how it is cut into rows and batches. Those that became `MASK` count. The
    other chosen ones are replaced as in training, but half of them can be
    read off, which would flatter the score.

    Args:
        proteins: `Proteins`.
        config: `config.Config`.
        shard: as in `training_dataset`.

    Returns:
        `tf.data.Dataset` of `(x, y, weight)`,
        `[batch_size, sequence_length]`, all static. The weight is 1 on the
        residues that count (in the masked task: the hidden ones) and 0 on
        all else. Its cardinality is known.
    """
    worker, workers = shard
    begin, end = (x[worker::workers] for x in _cut(proteins, config))
    # Rows of padding fill the last batch.
    missing = [(0, -len(begin) % config.batch_size)]
    begin, end, tokens = _on_host(
        np.pad(begin, missing), np.pad(end, missing), proteins.tokens
    )
    hidden = None if config.causal else _hidden(tokens)

    def row(begin, end):
        places = begin + tf.range(config.sequence_length, dtype=tf.int64)
        valid = places < end
        y = _read(tokens, places, valid)
        if config.causal:
            return _shifted(y), y, tf.cast(is_residue(y), tf.float32)
        x = _read(hidden, places, valid)
        return x, y, tf.cast(x == MASK, tf.float32)

    return (
        tf.data.Dataset.from_tensor_slices((begin, end))
        .map(row)
        .batch(config.batch_size, drop_remainder=True)
        .prefetch(2)
    )


def _hidden(tokens):
    """Tokens of a split, uint8 `[N]`, with those residues that are hidden."""
    with tf.device("CPU:0"):
        parts = []
        for start in range(0, len(tokens), _BLOCK):
            ids = tf.cast(tokens[start : start + _BLOCK], tf.int32)
            hidden, _ = mask_residues(ids, (_EVALUATION_SEED, start))
            parts.append(tf.cast(hidden, tf.uint8))
        return tf.concat(parts, axis=0)


def validation_dataset(proteins, config):
    """`evaluation_dataset`, or its first `config.validation_batches`."""
    dataset = evaluation_dataset(proteins, config)
    if config.validation_batches is not None:
        dataset = dataset.take(config.validation_batches)
    return dataset
