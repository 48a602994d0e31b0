"""A project that is under way meets qkwatch: each stage is a process of its own, with nothing but a checkpoint between.

    python examples/midproject.py            # all four stages, about a minute on two CPU cores
    python examples/midproject.py train      # or one of them: train, patch, resume, infer

1. train   an ordinary run at a learning rate that is too high; qkwatch isn't imported
2. patch   the run goes on from its checkpoint with one more callback, which patches the attention at the first batch
3. resume  the patched run goes on from its own checkpoint, optimizer state and all
4. infer   the weights are loaded without a Trainer and write some Python

The data is the source text of Python's own standard library, byte by byte.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16
STOPS = {"train": 150, "patch": 300, "resume": 400}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, D/H)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Bytes(L.LightningModule):
    """A small language model over bytes. It knows nothing of qkwatch."""

    def __init__(self, lr: float = 3e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids) + self.place.weight[: ids.shape[1]]))

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=STOPS["resume"] + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Windows of the library's source, the last of them for validation."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 2**21]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    train = TensorDataset(windows[order[: 50 * BATCH]])  # an epoch is 50 steps
    return DataLoader(train, batch_size=BATCH), DataLoader(
        TensorDataset(windows[order[-8 * BATCH :]]), batch_size=BATCH
    )


def fit(stage: str, folder: Path, resume: str | None, *callbacks: L.Callback) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_steps=STOPS[stage],
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Bytes(), *loaders(), ckpt_path=folder / f"{resume}.ckpt" if resume else None)
    trainer.save_checkpoint(folder / f"{stage}.ckpt")
    state = trainer.optimizers[0].state.values()
    steps = sorted({int(entry["step"]) for entry in state})
    print(f"   steps {trainer.global_step}, validation loss {trainer.callback_metrics['val_loss']:.3f} nats a byte")
    print(f"   optimizer: {len(state)} parameters, which have made {' or '.join(map(str, steps))} steps")
    return trainer


def train(folder: Path) -> None:
    """an ordinary run at a learning rate that is too high"""
    fit("train", folder, None)


def patch(folder: Path) -> None:
    """its checkpoint goes on with QKWatch(retrofit="now")"""
    from qkwatch import QKWatch

    watch = QKWatch(retrofit="now", every_n_steps=10, console=False)
    fit("patch", folder, "train", watch)
    [entry] = watch.retrofits
    step, first = watch.history[0]
    last, latest = watch.history[-1]
    loss = f"{entry.loss_before:.3f} before, {entry.loss_after:.3f} after"
    print(f"   patched {', '.join(entry.report.applied)} after step {entry.step}: training loss {loss}")
    print(f"   largest logit: {largest(first):.1f} at step {step}, {largest(latest):.1f} at step {last}")


def resume(folder: Path) -> None:
    """the patched checkpoint goes on"""
    from qkwatch import QKWatch

    watch = QKWatch(retrofit="now", every_n_steps=10, console=False)  # it sees that the checkpoint is patched
    fit("resume", folder, "patch", watch)
    print(f"   patched once more: {len(watch.retrofits)} times; largest logit {largest(watch.readings):.1f}")


def infer(folder: Path) -> None:
    """qkwatch.load_from_checkpoint, without a Trainer"""
    import qkwatch

    model = qkwatch.load_from_checkpoint(Bytes, folder / "resume.ckpt").eval()
    with torch.no_grad():
        losses = [model.loss(ids) for (ids,) in loaders()[1]]
        print(f"   without a Trainer: validation loss {torch.stack(losses).mean():.3f} nats a byte")
        ids = torch.tensor([list(b"def ")])
        for _ in range(LENGTH - 4):
            ids = torch.cat([ids, model(ids)[:, -1:].softmax(-1)[0].multinomial(1)], 1)
    print("   " + bytes(ids[0].tolist()).decode(errors="replace").replace("\n", "\n   "))


def largest(readings: list) -> float:  # type: ignore[type-arg]
    return max(float(reading.max_logit.max()) for reading in readings)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the model is too small for more
    stages = {"train": train, "patch": patch, "resume": resume, "infer": infer}
    if len(sys.argv) > 1:
        name, folder = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "midproject")
        stages[name](folder)
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder_name:
        for number, (name, stage) in enumerate(stages.items(), 1):
            print(f"{number}. {name}: {stage.__doc__}", flush=True)
            subprocess.run([sys.executable, __file__, name, folder_name], check=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
