"""See every softmax(QK^T) of a forward pass, whoever wrote it.

A `TorchDispatchMode` looks at the operations themselves. An attention core is either one fused
``scaled_dot_product*`` call, or a softmax whose input descends from a product of two activations. No class
names, no layout tables; an eager, an SDPA and an ``nn.MultiheadAttention`` core look alike from here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qkwatch.axes import axes_of, spread
from qkwatch.core import Bias, Core
from qkwatch.descent import Info, filled, is_per_row, products_after, products_of_base, tensors
from qkwatch.modules import in_backward
from qkwatch.operations import ADDS, FILLS, FRESH, FUSED, PRODUCTS, SOFTMAX, SUBTRACTS, VIEWS, aten
from qkwatch.placement import place
from qkwatch.products import Product

_ALONE: list[CoreCapture] = []


def _is_composite(func: Any, args: Any) -> bool:
    """Made of other operations only. Autograd takes these apart before they get here; inference mode does not."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    first = next(iter(tensors(args)), None)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if first is None or not has_kernel(func.name(), "CompositeImplicitAutograd"):
        return False
    # a kernel of the device's own would be passed over, and the outputs might differ in the last bit
    return not has_kernel(func.name(), first.device.type.upper())


@contextlib.contextmanager
def _flex_attention_let_through(on_call: Callable[[], None]) -> Iterator[None]:
    """`flex_attention` compiles itself, which PyTorch refuses under any dispatch mode: take ours off for its calls."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    original = getattr(flex, "setup_compilation_env", None)
    if original is None:
        yield
        return

    @contextlib.contextmanager
    def without_modes() -> Iterator[Any]:
        on_call()
        with _disable_current_modes(), original() as backend:
            yield backend

    flex.setup_compilation_env = without_modes  # type: ignore[union-attr]
    try:
        yield
    finally:
        flex.setup_compilation_env = original  # type: ignore[union-attr]


def _argument(args: Any, kwargs: Any, place: int | str, default: Any) -> Any:
    if isinstance(place, int):
        return args[place] if len(args) > place else default
    return kwargs.get(place, default)


class CoreCapture(TorchDispatchMode):
    """While entered, calls back for each core of the forward passes run under it.

    Args:
        on_core: called with each `Core` right after it ran; its return value is a token for ``on_confirm``.
        on_confirm: called with the token when the probabilities enter a matrix product, as attention's do.
        on_unseen: called with the name of an operation that is attention but cannot be looked into.
        on_fault: called with any exception of ours; the model's own pass through untouched.
        fast_path: called with the fused encoder operations of ``nn.MultiheadAttention``'s inference fast path.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        on_core: Callable[[Core], object],
        *,
        on_confirm: Callable[[object], None] = lambda token: None,
        on_unseen: Callable[[str], None] = lambda name: None,
        on_fault: Callable[[Exception], None],
        fast_path: Callable[[Any, tuple[Any, ...]], None] = lambda op, args: None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_core, self._on_confirm, self._on_unseen = on_core, on_confirm, on_unseen
        self._on_fault, self._fast_path = on_fault, fast_path
        self._infos: dict[int, tuple[weakref.ref[Tensor], Info]] = {}
        self._count = 0
        self.paused = False

    def __enter__(self) -> CoreCapture:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._aside = contextlib.ExitStack()
        self._aside.enter_context(_flex_attention_let_through(lambda: self._on_unseen("flex_attention")))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._aside.close()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """What runs now is a probe of ours: no other capture may take it for a forward pass of the model."""
        _ALONE.append(self)
        try:
            yield
        finally:
            _ALONE.pop()

    def redirect(self, other: CoreCapture) -> None:
        """From now on call back whom ``other`` would."""
        self._on_core, self._on_confirm, self._on_unseen = other._on_core, other._on_confirm, other._on_unseen
        self._on_fault, self._fast_path = other._on_fault, other._fast_path
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or (_ALONE and _ALONE[-1] is not self):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and _is_composite(func, args):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if not in_backward():
            try:
                self._note(func, args, kwargs, out)
            except Exception as fault:
                self._on_fault(fault)
        return out

    # -- one operation ------------------------------------------------------------------------------------

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        op = getattr(func, "overloadpacket", func)
        if op in FUSED:
            self._fused(op, args, kwargs)
        elif op in PRODUCTS:
            first, second = PRODUCTS[op]
            added = op is aten.baddbmm and args[0].numel() > 1 and kwargs.get("beta", 1) != 0
            biases = (Bias(args[0], out.shape),) if added else ()
            self._product(args[first], args[second], out, biases, abs(float(kwargs.get("alpha", 1))))
        elif op in SOFTMAX:
            self._softmax(args[0], args[1], out)
        elif op is aten._native_multi_head_attention or op is aten._transformer_encoder_layer_fwd:
            self._fast_path(op, args)
        elif op in FRESH:
            return
        elif _is_opaque(func):
            self._on_unseen(str(getattr(func, "_name", func)))
        else:
            self._descend(func, op, args, out)

    def _fused(self, op: Any, args: Any, kwargs: Any) -> None:
        q, k = args[0], args[1]
        if q.is_nested or k.is_nested or q.is_meta:
            self._on_unseen("attention " + ("on the meta device" if q.is_meta else "over nested tensors"))
            return
        mask_at, causal_at = FUSED[op]
        scale = kwargs.get("scale")
        mask = _argument(args, kwargs, mask_at, None)
        self._on_core(
            Core(
                q=q,
                k=k,
                mask=mask,
                biases=(Bias(mask, mask.shape),) if mask is not None and mask.is_floating_point() else (),
                is_causal=bool(_argument(args, kwargs, causal_at, False)),
                scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            )
        )

    def _product(self, a: Tensor, b: Tensor, out: Tensor, biases: tuple[Bias, ...], gain: float) -> None:
        info_a, info_b = self._info(a), self._info(b)
        for info in (info_a, info_b):
            if info is not None and info.probs:
                for token in info.probs:
                    self._on_confirm(token)
                return  # probabilities times values: an output of attention, not logits
        weight_a, weight_b = self._is_weight(a, info_a), self._is_weight(b, info_b)
        if not weight_a and not weight_b:
            self._count += 1
            factor = (info_a.factor if info_a else None) if (info_b and info_b.factor) else None
            product = Product(self._count, a, b, out.shape, factor or 1.0, gain, axes_of(out.shape))
            self._tag(out, Info(products=(product,), biases=biases))
        elif out.numel() == (b if weight_a else a).numel():
            # a weight that mixes heads (talking heads) leaves logits logits
            other = info_b if weight_a else info_a
            if other is not None and other.products:
                mixed = tuple(replace(p, axes=p.axes and spread(p.axes, out.shape)) for p in other.products)
                self._tag(out, Info(products=mixed, biases=other.biases))

    def _softmax(self, x: Tensor, dim: int, out: Tensor) -> None:
        if x.is_nested:
            if x.dim() == 4:  # (B, H, T*, T*): what fused attention over nested tensors is made of
                self._on_unseen("attention over nested tensors")
            return
        info = self._info(x)
        if info is None or not info.products:
            return
        if x.is_meta:
            self._on_unseen("attention on the meta device")
            return
        if info.unshifted is not None:
            x = info.unshifted
        # of several (relative positions, an index that selects keys) the one that is laid out as the logits are
        product = min(info.products, key=lambda p: (place(p, x, dim) is None, p.misfit(x, dim), p.order))
        biases = tuple(bias for bias in info.biases if product.order not in bias.products)
        core = Core(
            product.a,
            product.b,
            logits=x,
            dim=dim,
            factor=product.factor,
            biases=biases,
            products=(product, *(p for p in info.products if p is not product)),
        )
        token = self._on_core(core)
        self._tag(out, Info(probs=(token,)))

    def _descend(self, func: Any, op: Any, args: Any, out: Any) -> None:
        """Pass on what is known of the inputs to the outputs of any other operation."""
        found = [(tensor, info) for tensor in tensors(args) if (info := self._info(tensor)) is not None]
        known = [info for _, info in found]
        first = args[0] if args and isinstance(args[0], Tensor) else None
        is_view = op in VIEWS and first is not None
        if not known:
            if is_view and isinstance(first, nn.Parameter):
                self._tag_all(out, Info(weight=True))
            elif func is aten.mul.Scalar:
                self._tag(out, Info(factor=float(args[1])))
            return
        logits = [tensor for tensor, info in found if info.products]
        products = products_after(func, args, found, out)
        biases = tuple(bias for info in known for bias in info.biases)
        if products and isinstance(out, Tensor):
            biases += self._added(op, args, logits, out.shape)
        info = Info(
            biases=biases,
            weight=is_view and known[0].weight,
            products=products,
            unshifted=first if products and op is aten.sub and len(known) == 2 and is_per_row(args[1]) else None,
            probs=tuple({id(token): token for info in known for token in info.probs}.values()),
            factor=known[0].factor if is_view else float(args[1]) if func is aten.mul.Scalar else None,
        )
        if info.weight or info.products or info.probs or info.factor:
            self._tag_all(out, info)
            if first is not None and out is first and first._base is not None:  # written in place through a view
                self._tag(first._base, replace(info, products=products_of_base(info, self._info(first._base))))

    def _added(self, op: Any, args: Any, logits: list[Tensor], shape: torch.Size) -> tuple[Bias, ...]:
        """The terms of a sum, and what takes the place of logits where it is no product.

        Which term is the product of queries and keys is known at the softmax only.
        """
        if op in FILLS:
            return filled(args[1], args[2], shape)
        if op is aten.where and len(args) == 3:
            mask, kept, value = args
            if any(value is tensor for tensor in logits):
                return filled(mask, kept, shape)
            return filled(mask.logical_not(), value, shape)
        if op not in ADDS and (op not in SUBTRACTS or is_per_row(args[1])):
            return ()
        biases = []
        for i, tensor in enumerate(args[:2]):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                info = self._info(tensor)
                orders = frozenset(p.order for p in info.products) if info else frozenset()
                # a difference of two products is looked at as it is: only its terms' descent is asked for
                term = -tensor.detach() if i == 1 and op in SUBTRACTS and not orders else tensor
                biases.append(Bias(term, shape, orders))
        return tuple(biases)

    def descends(self, tensor: Any) -> bool:
        """Whether a tensor holds logits: it descends from a product, and no softmax came between."""
        info = self._info(tensor) if isinstance(tensor, Tensor) else None
        return info is not None and bool(info.products) and not info.probs

    # -- the table ----------------------------------------------------------------------------------------

    def _info(self, tensor: Tensor) -> Info | None:
        entry = self._infos.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    @staticmethod
    def _is_weight(tensor: Tensor, info: Info | None) -> bool:
        if info is not None and info.weight:
            return True
        return isinstance(tensor, nn.Parameter) or (tensor.requires_grad and tensor.is_leaf)

    def _tag(self, tensor: Tensor, info: Info) -> None:
        key, table = id(tensor), self._infos
        # the entry, and with it q and k, goes as soon as the tensor does: nothing is kept alive for us
        table[key] = (weakref.ref(tensor, lambda _: table.pop(key, None)), info)

    def _tag_all(self, out: Any, info: Info) -> None:
        for tensor in tensors(out if isinstance(out, (tuple, list)) else (out,)):
            self._tag(tensor, info)


@functools.cache
def _is_opaque(func: Any) -> bool:
    """Attention by its name, in an operation that is not PyTorch's own: a custom kernel."""
    name = func.name() if isinstance(func, torch._ops.OpOverload) else getattr(func, "_name", "")
    if name.startswith("aten::") and not name.startswith("aten::_flash") and "efficient" not in name:
        return False
    return ("attention" in name or "attn" in name) and "backward" not in name
