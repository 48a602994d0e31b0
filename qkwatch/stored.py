"""Which weights does a file or a folder hold, and which patches? Torch files, safetensors, sharded checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkwatch.errors import QKWatchError

_PLAN = "qk_norm.plan"  # how the keys end that say what is patched


def stored_keys(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The keys of the stored weights; of folders and safetensors only the ``...qk_norm.plan`` entries are read.

    Raises:
        QKWatchError: a folder without a checkpoint in it.
    """
    path = Path(path)
    if (path / ".metadata").is_file():
        return _sharded(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.suffix == ".safetensors" else []
    if files:
        return {key: value for file in files for key, value in _safetensors(file).items()}
    if path.is_dir():
        raise QKWatchError(
            f"{path} holds neither a sharded checkpoint nor *.safetensors; pass the file or a state_dict"
        )
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint.get("state_dict", checkpoint)  # type: ignore[no-any-return]


def _safetensors(file: Path) -> dict[str, Tensor | None]:
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        return {key: stored.get_tensor(key) if key.endswith(_PLAN) else None for key in stored.keys()}  # noqa: SIM118


def _sharded(folder: Path) -> dict[str, Tensor | None]:
    """What `torch.distributed.checkpoint` wrote."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    root, reader = "state_dict.", FileSystemReader(folder)
    kept = {k: v for k, v in reader.read_metadata().state_dict_metadata.items() if k.startswith(root)}
    plans: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=torch.uint8)
        for key, entry in kept.items()
        if key.endswith(_PLAN) and isinstance(entry, TensorStorageMetadata)
    }
    if plans:
        load(plans, storage_reader=reader, no_dist=True)
    return {key.removeprefix(root): plans.get(key) for key in kept}
