"""Shared by all tests: one thread (the machines are small), quiet libraries, a fixed seed."""

from __future__ import annotations

import logging
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)
for name in ("transformers", "lightning.pytorch", "pytorch_lightning", "diffusers"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=".*isinstance\\(treespec, LeafSpec\\).*")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
