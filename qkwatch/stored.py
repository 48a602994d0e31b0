"""Which weights does a file or a folder hold, and which patches? Torch files, safetensors, sharded checkpoints."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkwatch.errors import QKWatchError
from qkwatch.norms import CHILD

_OURS = ("plan", "q.gain", "q.bias", "k.gain", "k.bias")  # what a patch brings


def stored_keys(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The keys of the stored weights; of folders and safetensors only what patches brought is read, the rest is None.

    Raises:
        QKWatchError: a folder without a checkpoint in it; a file as in `load` and `weights_of`.
    """
    path = Path(path)
    if not path.exists():
        raise QKWatchError(f"no file or folder {path}")
    if (path / ".metadata").is_file():
        return _sharded(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.suffix == ".safetensors" else []
    if files:
        return {key: value for file in files for key, value in _safetensors(file).items()}
    if path.is_dir():
        raise QKWatchError(
            f"{path} holds neither a sharded checkpoint nor *.safetensors; pass the file or a state_dict"
        )
    return weights_of(load(path))


def load(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """A checkpoint or state_dict, read with ``weights_only=True`` onto the CPU.

    Raises:
        QKWatchError: no such file, not one of torch's, or one that would run code of its own.
    """
    file = Path(path)
    if not file.exists():
        raise QKWatchError(f"no file {path}")
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()[0]
        raise QKWatchError(f"{path} is not a checkpoint that can be read with weights_only=True: {what}") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise QKWatchError(f"{path} is not a checkpoint saved by torch: {what}") from error
    if not isinstance(loaded, Mapping):
        raise QKWatchError(f"{path} holds a {type(loaded).__name__}, not a checkpoint or a state_dict")
    return loaded


def weights_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state_dict in a checkpoint: under "state_dict", or the only one in it, or the mapping itself.

    Raises:
        QKWatchError: it holds several, or something else and none.

    >>> sorted(weights_of({"model": {"weight": torch.ones(2)}, "epoch": 3}))
    ['weight']
    """
    if isinstance(checkpoint.get("state_dict"), Mapping):
        return checkpoint["state_dict"]  # type: ignore[no-any-return]
    inner = {k: v for k, v in checkpoint.items() if isinstance(v, Mapping) and not k.endswith("_extra_state")}
    found = [key for key, value in inner.items() if any(isinstance(x, Tensor) for x in value.values())]
    if len(found) > 1:
        raise QKWatchError(
            f"the checkpoint holds several sets of weights, {', '.join(map(repr, found))}: pass one of them"
        )
    if found:
        return inner[found[0]]
    if checkpoint and not any(value is None or isinstance(value, Tensor) for value in checkpoint.values()):
        raise QKWatchError(f"the checkpoint holds no weights, but {', '.join(map(repr, list(checkpoint)[:6]))}")
    return checkpoint


def _safetensors(file: Path) -> dict[str, Tensor | None]:
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        return {key: stored.get_tensor(key) if _is_ours(key) else None for key in stored.keys()}  # noqa: SIM118


def _sharded(folder: Path) -> dict[str, Tensor | None]:
    """What `torch.distributed.checkpoint` wrote: Lightning under "state_dict.", a loop of one's own without."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    root, reader = "state_dict.", FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    kept = {key: entry for key, entry in entries.items() if key.startswith(root)} or entries
    ours: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in kept.items()
        if _is_ours(key) and isinstance(entry, TensorStorageMetadata)
    }
    if ours:
        load(ours, storage_reader=reader, no_dist=True)
    return {key.removeprefix(root): ours.get(key) for key in kept}


def _is_ours(key: str) -> bool:
    return f".{key}".endswith(tuple(f".{CHILD}.{name}" for name in _OURS))
