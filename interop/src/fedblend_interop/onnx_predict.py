# Copyright The fedblend authors
# SPDX-License-Identifier: Apache-2.0
"""Predictions of an exported ONNX file for the rows of a raw table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.data.dataset import DataError
from fedblend.data.preprocess.values import is_missing, word
from fedblend.errors import RunError
from fedblend.extras import require
from fedblend.runs.export.portable import Portable, read_metadata
from fedblend.runs.predict import (
    TablePredictions,
    encode_rows,
    predictions_of,
    table_of,
)


def predict_onnx(path: Path, source: Any, *, imports: bool = False) -> TablePredictions:
    """Predict the rows of a table by an exported ONNX file, with onnxruntime.

    Args:
        path: the file.
        source: see ``fedblend.runs.predict.predict_file``.
        imports: whether code that the file names by import path may be imported.

    Raises:
        RunError: the file is no such model.
        DataError: the table does not fit the model.
    """
    runtime = require("onnxruntime", "an .onnx file", "onnxruntime", "onnx")
    try:
        session = runtime.InferenceSession(
            path.read_bytes(), providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        text = " ".join(str(error).split())
        raise RunError(
            f"{path}: is not an ONNX file that can be run: {text:.120}"
        ) from None
    metadata = dict(session.get_modelmeta().custom_metadata_map)
    if "config" not in metadata:
        raise RunError(f"{path}: is not a model that fedblend export wrote")
    of = read_metadata(metadata, path, imports=imports)
    wanted = [one.name for one in session.get_inputs()]
    inputs = _file_inputs(of, source, wanted)
    try:
        (outputs,) = session.run(["outputs"], inputs)
    except Exception as error:
        text = " ".join(str(error).split())
        raise RunError(f"{path}: cannot be run on this table: {text:.120}") from None
    return predictions_of(of, outputs)


def _file_inputs(
    of: Portable, source: Any, wanted: list[str]
) -> Mapping[str, np.ndarray]:
    """What an exported ONNX file takes, of the rows of a table.

    Args:
        of: what the file says about the model.
        source: the table.
        wanted: the names of the file's inputs.
    """
    dtype = np.int32 if of.takes_numbers else np.float32
    if of.preprocessing is None:
        rows = encode_rows(of, source, ()).astype(dtype)
        if wanted == ["inputs"]:
            return {"inputs": rows}
        flat = rows.reshape(len(rows), -1)
        return {name: flat[:, [at]] for at, name in enumerate(wanted)}
    table = table_of(source)
    if table is None:
        raise DataError(f"{source}: a table with columns is needed")
    fitted = of.preprocessing
    encoded = fitted.schema.encode(table.columns)
    found = {}
    for column, numbers in zip(fitted.schema.kept, encoded.T, strict=True):
        if column.encoding in ("one_hot", "ordinal"):
            texts = table.columns[column.name].astype(object)
            words = ["" if is_missing(one) else word(one) for one in texts.tolist()]
            found[column.name] = np.array(words, object)[:, None]
        else:
            found[column.name] = numbers[:, None]
    return found
