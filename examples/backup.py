"""Training that was killed goes on where it was, to the same weights."""

import json
import os

import keras
import numpy as np

from examples.errors import UserError

_META = "meta"


class Backup(keras.callbacks.Callback):
    """Keeps all that training needs to go on, as of the last whole epoch.

    `keras.callbacks.BackupAndRestore` does most of this. It writes two files,
    one after the other, so that a process killed between them repeats an
    epoch with its result; and it leaves out the state of dropout's random
    numbers. Here one file is replaced at once, and holds every variable.

    Args:
        path: file, `.npz`. It is read without unpickling.
        settings: dict of JSON values, what the run was started with. A file
            with others is refused.
    """

    def __init__(self, path, settings):
        super().__init__()
        self.path = path
        self.settings = settings

    def restore(self, model):
        """Sets the variables of a compiled model.

        Args:
            model: the model, with its optimizer.

        Returns:
            int, the epochs that are done; 0 without a file.

        Raises:
            examples.common.UserError: the file is of another run, or none
                of these.
        """
        model.optimizer.build(model.trainable_variables)
        if not os.path.exists(self.path):
            return 0
        epochs = self.check()
        arrays = self._read(lambda file: dict(file))
        del arrays[_META]
        variables = _variables(model)
        if _shapes(variables) != _shapes(arrays):
            raise self._of_another("model")
        for name, variable in variables.items():
            variable.assign(arrays[name])
        return epochs

    def check(self):
        """Sees that the file is of a run with these settings.

        Returns:
            int, the epochs that are done.

        Raises:
            examples.common.UserError: as `restore`.
        """

        def compare(file):
            meta = json.loads(str(file[_META]))
            return differing(self.settings, meta["settings"]), meta["epochs"]

        changed, epochs = self._read(compare)
        if changed:
            raise self._of_another(changed)
        return epochs

    def _read(self, function):
        """`function` of the opened file."""
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return function(file)
        except Exception as error:  # zipfile, numpy, json: each has its own
            raise UserError(
                f"{self.path} cannot be read ({error}). Delete it to start "
                "anew."
            ) from error

    def _of_another(self, what):
        return UserError(
            f"{self.path} is of an unfinished run with another {what}. Give "
            "this run another --output_dir, or delete that folder."
        )

    def on_epoch_end(self, epoch, logs=None):
        arrays = {
            name: keras.ops.convert_to_numpy(variable)
            for name, variable in _variables(self.model).items()
        }
        meta = {"epochs": epoch + 1, "settings": self.settings}
        unfinished = self.path + ".new"
        with open(unfinished, "wb") as file:
            np.savez(file, **arrays, **{_META: json.dumps(meta)})
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self.path)


def differing(settings, others):
    """Names of what differs in two dicts: "a, b"."""
    return ", ".join(
        sorted(
            name
            for name in {**settings, **others}
            if settings.get(name) != others.get(name)
        )
    )


def _shapes(arrays):
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _variables(model):
    """Names to variables: weights, random states and the optimizer's."""
    passing = {id(variable) for variable in model.metrics_variables}
    own = [v for v in model.variables if id(v) not in passing]
    optimizer = model.optimizer
    found = own + list(optimizer.variables)
    # Under mixed_float16 the optimizer wraps another.
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        known = {id(variable) for variable in found}
        found += [v for v in inner.variables if id(v) not in known]
    # Not by path: that of a layer without a name counts those before.
    return {
        f"{index:04d} {variable.name}": variable
        for index, variable in enumerate(found)
    }
