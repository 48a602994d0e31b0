"""A model, data and a Trainer small enough to train in milliseconds; shared by the tests of the callback."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCAB, WIDTH, HEADS, LENGTH = 17, 16, 2, 8


class Attention(nn.Module):
    """Causal self-attention; ``eager`` writes the softmax out."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.dropout = kind, dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        rate = self.dropout if self.training else 0.0
        if self.kind == "eager":
            logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            weights = F.dropout(logits.masked_fill(hidden, -torch.inf).softmax(-1), rate)
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, kind: str = "sdpa", dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn: nn.Module = (
            nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)
            if kind == "mha"
            else Attention(kind, dropout)
        )
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if isinstance(self.attn, nn.MultiheadAttention):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        else:
            x = x + self.attn(h)
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, kind: str = "sdpa", dropout: float = 0.0, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def sharpen(net: nn.Module, by: float = 400.0) -> None:
    """Make every query so long that the attention is saturated from the start."""
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, Attention):
                module.q_proj.weight.mul_(by)
            elif isinstance(module, nn.MultiheadAttention):
                module.in_proj_weight[:WIDTH].mul_(by)


class Tiny(L.LightningModule):
    """Options are kept as hyperparameters, so that load_from_checkpoint needs none."""

    def __init__(
        self, kind: str = "sdpa", dropout: float = 0.0, lr: float = 1e-2, sharp: bool = False, opt: str = "adamw"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = Net(kind, dropout)
        if sharp:
            sharpen(self.net)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = loss_of(self.net, batch[0])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", loss_of(self.net, batch[0]))

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.1)


def data(count: int = 32, batch_size: int = 4) -> DataLoader[Any]:
    ids = torch.randint(0, VOCAB, (count, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids), batch_size=batch_size)


def trainer(*callbacks: Any, package: Any = L, **options: Any) -> Any:
    """A quiet Trainer on one CPU."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    if any("Checkpoint" in type(c).__name__ for c in callbacks):
        quiet["enable_checkpointing"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return package.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal to the bit, whatever is nested in what."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), where
        assert a.dtype == b.dtype and torch.equal(a, b), f"{where}: {(a - b).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {a.keys() ^ b.keys()}"
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), f"{where}: {a!r} != {b!r}"
