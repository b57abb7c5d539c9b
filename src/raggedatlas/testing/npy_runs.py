"""Result folders as public releases left them, of all three generations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = 'x = 1\n\n[general]\ndata_dir = "d"\n'


def npy_run(folder: Path, batches: Sequence[tuple[Any, Any]], generation: str = "0.6") -> Path:
    """Write ``.npy`` results.

    Parameters
    ----------
    folder : pathlib.Path
        Where to; made if it is missing.
    batches : sequence of (ids, values)
        Ids, ``(n,)``, and values, ``(n, ...)``, of each.
    generation : str
        ``"0.2"`` has integer ids and neither configuration nor insertion order, ``"0.3"`` adds the configuration, ``"0.6"`` the order.

    Returns
    -------
    pathlib.Path
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = (
        np.dtype(np.int64) if generation in {"0.2", "0.3"} else np.array([i for ids, _ in batches for i in ids]).dtype
    )
    index = []
    for number, (ids, given) in enumerate(batches):
        values = np.asarray(given)
        batch = np.zeros(len(ids), [("id", dtype), ("tensor", values.dtype, values.shape[1:])])
        batch["id"], batch["tensor"] = ids, values
        np.save(folder / f"batch_{number}.npy", batch, allow_pickle=False)
        index += [(each, number) for each in batch["id"]]
    written = np.array(index, [("id", dtype), ("batch_num", np.int64)])
    if generation == "0.6":
        np.save(folder / "batch_index_insertion_order.npy", written)
    written.sort(order="id")
    np.save(folder / "batch_index.npy", written)
    if generation != "0.2":
        (folder / "original_dataset_config.toml").write_text(CONFIG)
    (folder / "inference_weights.pth").write_bytes(b"weights")
    return folder
