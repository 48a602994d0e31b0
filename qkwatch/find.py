"""Find the attention sites of a model by running it once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from qkwatch.errors import QKWatchError
from qkwatch.modules import unwrap
from qkwatch.probe import Call, isolated
from qkwatch.scout import Scout
from qkwatch.sites import Site


def find_sites(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[Site]:
    """Run ``model`` once on the given inputs and return its attention sites, in the order in which they ran.

    The model (weights, buffers, attributes, hooks) and the random state are left as they were. Each site keeps the
    inputs of its module (`Site.call`) for `retrofit_`: drop the list when it is done with.

    Args:
        model: any module; in training or evaluation mode as it is.
        inputs, kwargs: what ``model`` is called with; a batch of one does, of the length that is trained on.

    Returns:
        The sites, each with a `Reading` of this forward pass; an empty list for a model without softmax attention.

    Raises:
        QKWatchError: model or inputs are on the meta device. Whatever the model itself raises comes through.

    >>> layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 7, 32)
    >>> [(site.name, site.q_heads, site.head_dim, site.retrofittable) for site in find_sites(layer, x, x, x)]
    [('', 4, 8, True)]
    """
    _check_values(model, inputs, kwargs)
    scout = Scout(model)
    autocast = Call.of(inputs, kwargs).autocast
    with isolated(unwrap(model), autocast, inputs, kwargs, weights=False), torch.no_grad(), scout:
        model(*inputs, **kwargs)
    if scout.fault is not None:
        raise scout.fault
    return scout.sites()


def _check_values(model: nn.Module, *inputs: Any) -> None:
    parameters, given = list(model.parameters()), [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
    # some parameters may be: they are loaded when they are needed
    if any(t.is_meta for t in given) or (parameters and all(p.is_meta for p in parameters)):
        raise QKWatchError(
            "find_sites runs the model and looks at values, but there are none on the meta device: give it a model and "
            "inputs with values (model.to_empty(device=...), then weights)"
        )
