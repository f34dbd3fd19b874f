"""Rows of a table in the files of each format, as the formats' own libraries lay them out."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_CHUNK = 7
"""Rows of a row group or record batch."""


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows in the format of the path's suffix; without one the layout of `Dataset.save_to_disk`."""
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows), indent=1))
    elif path.suffix == ".npz":
        np.savez(path, **{name: np.array([row[name] for row in rows]) for name in rows[0]})
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=_CHUNK)
    elif path.suffix in (".arrow", ".arrows"):
        table = pa.Table.from_pylist(list(rows))
        new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=_CHUNK)
    else:
        path.mkdir(exist_ok=True)
        count = min(len(rows), 2)
        cuts = [len(rows) * n // count for n in range(count + 1)]
        parts = {f"data-{n:05}-of-{count:05}.arrow": rows[cuts[n] : cuts[n + 1]] for n in range(count)}
        schema = pa.Table.from_pylist(list(rows)).schema
        for name, part in parts.items():
            with pa.ipc.new_stream(path / name, schema) as writer:
                writer.write_table(pa.Table.from_pylist(list(part), schema), max_chunksize=_CHUNK)
        files = [{"filename": name} for name in parts]
        state = {"_data_files": files, "_fingerprint": "0", "_split": None}
        (path / "state.json").write_text(json.dumps(state))
        (path / "dataset_info.json").write_text('{\n  "features": {}\n}\n')
    return path
