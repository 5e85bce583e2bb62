"""Forward passes over a key-value cache whose slot is the token's position.

Row b's token at position p has its keys and values in slot p. So a prefill is plain causal
attention over right-padded rows (whatever is past a row's end is overwritten before it is ever
read), rows of different lengths can be side by side, and a row can be dropped or can join without
moving another. A row's results don't depend on the rows beside it.

There are two decoders:

- :class:`DirectDecoder` multiplies with the matrices of Llama-like models itself. At small sizes most
  of a step is Python: for 64 rows of the miniature on one thread, transformers' own forward took
  3.4 ms per step, this one 1.5 ms.
- :class:`~.generic_decoder.GenericDecoder` calls transformers' forward, for other causal models.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import adapters
from .products import linear

DIRECT_MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` with pre-norm RMS layers, rotary attention and a gated MLP."""
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers that keep keys and values, by their names in transformers' ``layer_types``."""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies don't depend on the length of the sequence."""


class KeyValues:
    """Keys and values of some rows.

    ``layers[i]`` is ``[2, B, KV heads, capacity, head size]``: keys, then values.
    """

    def __init__(self, layers: list[Tensor]) -> None:
        self.layers = layers

    @property
    def rows(self) -> int:
        """B: number of rows."""
        return self.layers[0].shape[1]

    @property
    def capacity(self) -> int:
        """Number of slots per row."""
        return self.layers[0].shape[3]

    def resize(self, rows: int, capacity: int) -> None:
        """Makes room for at least this many rows and slots; contents stay."""
        # Zeros rather than uninitialised memory: a masked slot still enters a product with 0.
        extra = max(capacity - self.capacity, 0), max(rows - self.rows, 0)
        if any(extra):
            for i, layer in enumerate(self.layers):
                self.layers[i] = F.pad(layer, (0, 0, 0, extra[0], 0, 0, 0, extra[1]))

    def first(self, rows: int) -> KeyValues:
        """The first rows, in the same memory."""
        return KeyValues([layer[:, :rows] for layer in self.layers])

    def write(self, rows: Tensor, other: KeyValues, source: Tensor) -> None:
        """Replaces rows by rows of another cache that has no greater capacity.

        Args:
            rows: ``[N]`` int64: destination rows.
            other: the other cache, of which no reference is kept.
            source: ``[N]`` int64: rows of ``other``; one may come several times.
        """
        width = other.capacity
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine[:, :, :, :width].index_copy_(1, rows, theirs.index_select(1, source))
            # What the previous row left past its end would enter a product with 0.
            mine[:, :, :, width:].index_fill_(1, rows, 0.0)

    def move(self, rows: Tensor, source: Tensor) -> None:
        """Copies rows over others: ``rows[i]`` becomes what ``source[i]`` was."""
        for layer in self.layers:
            layer.index_copy_(1, rows, layer.index_select(1, source))


class Decoder(Protocol):
    """The passes that an engine needs."""

    def prefill(self, tokens: Tensor, lengths: Tensor) -> KeyValues:
        """Computes keys and values of right-padded rows.

        Args:
            tokens: ``[B, S]`` int64, S >= 1.
            lengths: ``[B]`` int64 true lengths.
        """
        ...

    def step(self, tokens: Tensor, positions: np.ndarray, cache: KeyValues) -> Tensor:
        """Logits after one more token of every row; its keys and values enter the cache.

        Args:
            tokens: ``[B]`` int64.
            positions: ``[B]`` int64 on the host: the tokens' positions, below the capacity.
            cache: cache of the same rows.

        Returns:
            ``[B, V]`` in the model's dtype.
        """
        ...

    def logits(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """``[B, S, V]`` logits after every token of right-padded rows, without a cache."""
        ...


def visible(
    positions: np.ndarray, device: torch.device, dtype: torch.dtype, end: int | None = None
) -> Tensor:
    """``[B, end]`` additive mask: 0 for slots up to a row's position, -inf past it; None = up to the last one."""
    end = int(positions.max()) + 1 if end is None else end
    hidden = torch.arange(end, device=device) > torch.from_numpy(positions).to(device)[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    if x.is_cuda or x.dtype == torch.float64:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # On CPUs F.rms_norm is slower: 22 us for [64, 256], where this takes 14, and in bfloat16 several times that.
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = torch.addcmul(norm.new_full((), eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
    return wide.mul(scale).mul_(weight).to(x.dtype)


class _Layer:
    """The tensors of one decoder layer, some of them fused, all of them shared with the model."""

    __slots__ = (
        "act",
        "attention_eps",
        "attention_norm",
        "down",
        "down_term",
        "gate_up",
        "gate_up_term",
        "head_norms",
        "mlp_eps",
        "mlp_norm",
        "out",
        "out_bias",
        "out_term",
        "qkv",
        "qkv_bias",
        "qkv_term",
    )

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention_norm, self.attention_eps = _norm(layer.input_layernorm)
        self.mlp_norm, self.mlp_eps = _norm(layer.post_attention_layernorm)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv, self.qkv_bias = _fuse(qkv)
        self.qkv_term = adapters.fuse(qkv)
        self.out = attention.o_proj.weight
        self.out_bias = attention.o_proj.bias
        self.out_term = adapters.fuse([attention.o_proj])
        self.head_norms = (
            (_norm(attention.q_norm), _norm(attention.k_norm))
            if hasattr(attention, "q_norm")
            else None
        )
        self.gate_up, _ = _fuse([mlp.gate_proj, mlp.up_proj])
        self.gate_up_term = adapters.fuse([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj.weight
        self.down_term = adapters.fuse([mlp.down_proj])
        self.act = mlp.act_fn


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, float(module.variance_epsilon)


def _fuse(modules: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Fuses the matrices of several modules into one, of which their own parameters become views.

    So new weights only have to be loaded into the model's parameters.
    """
    fused: list[Tensor | None] = []
    for name in ("weight", "bias"):
        parts = [getattr(module, name) for module in modules]
        if parts[0] is None:
            fused.append(None)
            continue
        whole = torch.cat([part.detach() for part in parts])
        start = 0
        for part in parts:
            part.data = whole[start : start + len(part)]
            start += len(part)
        fused.append(whole)
    weight = fused[0]
    if weight is None:
        raise TypeError("a linear layer without a weight")
    return weight, fused[1]


def layer_kinds(config: Any) -> set[str]:
    """Kinds of attention in a model's layers, by transformers' names."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return kinds or {SLIDING if getattr(config, "sliding_window", None) else FULL}


def attention_limit(config: Any, longest: int) -> str | None:
    """What prevents tokens from seeing all earlier tokens in rows of this length; None if nothing does."""
    kinds = layer_kinds(config) - {FULL}
    if kinds - {SLIDING}:
        return f"layers of {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    # The last token of a row is never fed, so in a row of window + 1 tokens nothing is out of sight.
    if kinds and window is not None and window + 1 < longest:
        return f"a sliding window of {window} tokens"
    return None


def why_not_direct(model: Any, longest: int) -> str | None:
    """Why :class:`DirectDecoder` can't run rows of this length; None if it can."""
    config = model.config
    if config.model_type not in DIRECT_MODELS:
        return f"model type {config.model_type}"
    limit = attention_limit(config, longest)
    if limit is not None:
        return limit
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in FIXED_ROPE:
        return f"rope type {rope}"
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        return "pretraining_tp"
    for layer in model.model.layers:
        linears = (
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
            layer.mlp.down_proj,
        )
        for module in linears:
            if type(module) is not nn.Linear:
                return f"a {type(module).__name__} in place of a plain linear layer"
        if any(m.bias is not None for m in linears[4:]):
            return "an MLP with biases"
        if len({m.bias is None for m in linears[:3]}) > 1:
            return "biases on some of q, k and v only"
    return None


class DirectDecoder:
    """Runs Llama, Mistral (full attention), Qwen2 and Qwen3 directly on their parameters."""

    def __init__(self, model: Any) -> None:
        base = model.model
        first = base.layers[0].self_attn
        self._model = model
        self._size = int(first.head_dim)
        self._heads = first.q_proj.out_features // self._size
        self._kv_heads = first.k_proj.out_features // self._size
        self._scale = float(first.scaling)
        self._layers = [_Layer(layer) for layer in base.layers]
        self._norm, self._eps = _norm(base.norm)
        self._embed = model.get_input_embeddings().weight
        self._head = model.get_output_embeddings().weight
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def _rotation(self, length: int) -> None:
        """``[length, 1, head size]`` tables; the sine's first half is negated (see _rotate)."""
        if len(self._cos) >= length:
            return
        length = max(length, 256, 2 * len(self._cos))
        positions = torch.arange(length, device=self._embed.device)[None]
        cos, sin = self._model.model.rotary_emb(self._embed, positions)
        half = self._size // 2
        self._cos = cos[0].unsqueeze(1)
        self._sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).unsqueeze(1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # rotate_half(x) * sin == roll(x) * sin with its first half negated, which saves one pass.
        return torch.addcmul(x * cos, x.roll(self._size // 2, -1), sin)

    def _project(
        self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[N, heads, size]``, keys and values ``[N, KV heads, size]`` of N tokens."""
        h = rms_norm(x, layer.attention_norm, layer.attention_eps)
        qkv = linear(h, layer.qkv, layer.qkv_bias)
        if layer.qkv_term is not None:
            layer.qkv_term.add_to(qkv, h)
        heads = qkv.view(len(x), -1, self._size)
        turning = self._heads + self._kv_heads
        rotary = heads[:, :turning]
        if layer.head_norms is not None:
            (q_weight, q_eps), (k_weight, k_eps) = layer.head_norms
            rotary = torch.cat(
                [
                    rms_norm(rotary[:, : self._heads], q_weight, q_eps),
                    rms_norm(rotary[:, self._heads :], k_weight, k_eps),
                ],
                dim=1,
            )
        rotary = self._rotate(rotary, cos, sin)
        return rotary[:, : self._heads], rotary[:, self._heads :], heads[:, turning:]

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, MLP and the two residual sums; changes ``x`` in place."""
        x.addmm_(attended, layer.out.t())
        if layer.out_bias is not None:
            x.add_(layer.out_bias)
        if layer.out_term is not None:
            layer.out_term.add_to(x, attended)
        h = rms_norm(x, layer.mlp_norm, layer.mlp_eps)
        both = linear(h, layer.gate_up)
        if layer.gate_up_term is not None:
            layer.gate_up_term.add_to(both, h)
        gate, up = both.chunk(2, -1)
        inner = layer.act(gate).mul_(up)
        x.addmm_(inner, layer.down.t())
        return x if layer.down_term is None else layer.down_term.add_to(x, inner)

    def prefill(self, tokens: Tensor, lengths: Tensor) -> KeyValues:
        caches: list[Tensor] = []
        self._run(tokens, caches)
        return KeyValues(caches)

    def logits(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        hidden = rms_norm(self._run(tokens), self._norm, self._eps)
        return linear(hidden, self._head).view(*tokens.shape, -1)

    def _run(self, tokens: Tensor, caches: list[Tensor] | None = None) -> Tensor:
        """``[B * S, H]`` hidden states before the final norm of right-padded rows. With ``caches``, stores
        keys and values there instead, and stops after those of the last layer."""
        batch, width = tokens.shape
        self._rotation(width)
        cos = self._cos[:width].repeat(batch, 1, 1)
        sin = self._sin[:width].repeat(batch, 1, 1)
        x = F.embedding(tokens.reshape(-1), self._embed)
        repeat = self._heads // self._kv_heads
        last = len(self._layers) - 1
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(layer, x, cos, sin)
            q, k, v = (t.view(batch, width, -1, self._size).transpose(1, 2) for t in (q, k, v))
            if caches is not None:
                caches.append(torch.stack([k, v]))
                if number == last:
                    break  # The rest would only serve logits, and a step computes those.
            if repeat > 1:
                k = k.repeat_interleave(repeat, dim=1)
                v = v.repeat_interleave(repeat, dim=1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale)
            x = self._finish(layer, x, attended.transpose(1, 2).reshape(batch * width, -1))
        return x

    def step(self, tokens: Tensor, positions: np.ndarray, cache: KeyValues) -> Tensor:
        batch = len(tokens)
        end = int(positions.max()) + 1
        self._rotation(end)
        x = F.embedding(tokens, self._embed)
        same = int(positions.min()) == end - 1
        queries = batch * self._kv_heads, self._heads // self._kv_heads, self._size
        # oneDNN's products, which bfloat16 has on CPUs, copy what isn't contiguous: all keys and values of every step.
        whole = x.dtype == torch.bfloat16 and not x.is_cuda
        seen_slots = cache.capacity if whole else end
        if same:
            cos, sin = self._cos[end - 1], self._sin[end - 1]
            if whole:
                mask = visible(positions[:1], x.device, x.dtype, seen_slots)
            else:
                mask = torch.zeros((), dtype=x.dtype, device=x.device)
        else:
            at = torch.from_numpy(positions).to(x.device)
            # [B, KV heads, capacity] as one dimension: an index_copy takes half as long as an
            # index_put.
            heads = torch.arange(batch * self._kv_heads, device=x.device).view(batch, -1)
            slots = (heads * cache.capacity + at[:, None]).flatten()
            cos, sin = self._cos[at], self._sin[at]
            mask = visible(positions, x.device, x.dtype, seen_slots)
            mask = mask.repeat_interleave(self._kv_heads, 0)
            mask = mask.unsqueeze(1)
        low = x.dtype in (torch.bfloat16, torch.float16)
        for layer, store in zip(self._layers, cache.layers, strict=True):
            q, k, v = self._project(layer, x, cos, sin)
            if same:
                store[0, :, :, end - 1] = k
                store[1, :, :, end - 1] = v
            else:
                store[0].view(-1, self._size).index_copy_(0, slots, k.reshape(-1, self._size))
                store[1].view(-1, self._size).index_copy_(0, slots, v.reshape(-1, self._size))
            seen = store[:, :, :, :seen_slots].flatten(1, 2)
            scores = torch.baddbmm(
                mask,
                q.reshape(queries),
                seen[0].transpose(1, 2),
                beta=1 if whole or not same else 0,
                alpha=self._scale,
            )
            if low:
                weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
            else:
                weights = scores.softmax(-1)
            x = self._finish(layer, x, torch.bmm(weights, seen[1]).view(batch, -1))
        x = rms_norm(x, self._norm, self._eps)
        return linear(x, self._head)
