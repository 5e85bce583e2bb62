"""A model's sizes: from its config.json if that is at hand, else from a table of well-known models."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError, DataError
from ...common.models import context_of, read_model_config, resolve
from ...common.plain import damaged, read_object

if TYPE_CHECKING:
    from ...common.config import Config, LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs, or mixtures of them, and grouped-query attention.

    >>> known("Qwen/Qwen2.5-0.5B").parameters
    494032768
    """

    name: str
    """The name that the config gives it."""
    layers: int
    """L: number of layers."""
    hidden: int
    """H: width of the hidden states."""
    heads: int
    """a: number of query heads."""
    kv_heads: int
    """Number of key and value heads."""
    head_dim: int
    """d: width of a head."""
    intermediate: int
    """I: width of the MLP that every token passes; of a mixture that of its shared experts, or 0."""
    vocabulary: int
    """V: number of tokens in the vocabulary."""
    tied: bool
    """Whether input embedding and output matrix are one."""
    experts: int = 0
    """E: number of experts in a layer of which a router chooses some for each token; 0 without a mixture."""
    chosen: int = 0
    """k: number of these experts that a token passes."""
    expert: int = 0
    """M: width of one of these experts."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    context: int | None = None
    """Most tokens of prompt and response together; None = not known."""
    counted: int | None = None
    """Number of parameters according to the weight files, if they are at hand."""
    source: str = "table"
    """Where the sizes are from: ``config.json`` or ``table``."""

    @property
    def query_width(self) -> int:
        """Width of the queries: a · d."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Width of all MLPs that a token passes in a layer: I + k·M."""
        return self.intermediate + self.chosen * self.expert

    @property
    def parameters(self) -> int:
        """N, with tied ones counted once: V·H (twice if untied) + L · (attention + 3·H·(I + E·M) + router + 2·H) + H.

        A router has E·H, and H more for the share of shared experts.
        """
        if self.counted is not None:
            return self.counted
        attention = 2 * self.hidden * self.query_width + 2 * self.hidden * self.kv_width
        if self.qkv_bias:
            attention += self.query_width + 2 * self.kv_width
        width = self.intermediate + self.experts * self.expert
        layer = attention + 3 * self.hidden * width + 2 * self.hidden
        if self.experts:
            layer += self.hidden * (self.experts + (self.intermediate > 0))
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    @property
    def multiplied(self) -> int:
        """Number of parameters that a token is multiplied with: none of the experts that it doesn't pass; and looking
        up the input costs nothing."""
        passed_by = (self.experts - self.chosen) * self.expert
        idle = self.layers * 3 * self.hidden * passed_by
        return self.parameters - idle - (0 if self.tied else self.vocabulary * self.hidden)

    def adapters(self, lora: LoraConfig) -> int:
        """Number of parameters of adapters: rank · (inputs + outputs) of each linear layer that has one.

        Layers of other names than Llama's and Qwen's are left out. So are a mixture's experts, since transformers has
        their matrices in one tensor, which gets no adapter.
        """
        h, q, kv, i = self.hidden, self.query_width, self.kv_width, self.intermediate
        widths = {
            "q_proj": h + q,
            "k_proj": h + kv,
            "v_proj": h + kv,
            "o_proj": q + h,
            "gate_proj": h + i,
            "up_proj": h + i,
            "down_proj": i + h,
        }
        if i == 0:
            widths = {name: width for name, width in widths.items() if name not in _OF_MLP}
        named = {target.rpartition(".")[2] for target in lora.targets}
        everything = lora.targets == "all-linear"
        chosen = (width for name, width in widths.items() if everything or name in named)
        return lora.rank * self.layers * sum(chosen)

    def kv_bytes(self, element: int, ranks: int = 1) -> int:
        """Bytes per token in the KV cache of each tensor-parallel rank: 2 · L · kv heads · d · element, of the heads that
        are its own. No rank has less than one head: vLLM copies them where there are more ranks."""
        heads = math.ceil(self.kv_heads / ranks)
        return 2 * self.layers * heads * self.head_dim * element


_OF_MLP = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a config.json with the number of experts."""
_BIASED = ("qwen2", "qwen2_moe")
"""Model types whose queries, keys and values have biases unless their config says otherwise."""
_TIED = (
    *("biogpt", "cohere", "cohere2", "cohere_compass_text", "ernie4_5", "granite_swa", "lfm2"),
    *("minicpm3", "modernbert-decoder", "smollm3", "starcoder2", "youtu", "zamba", "zamba2"),
    *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text"),
    *("recurrent_gemma", "vaultgemma"),
)
"""Model types whose output matrix is the input embedding unless their config says otherwise."""
_MIXTURES = ("granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Model types with experts in place of the MLP, and nothing else of their own: neither latent keys and values nor
layers of several kinds."""

_QWEN = ModelShape(
    name="",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=18944,
    vocabulary=152064,
    tied=False,
    qkv_bias=True,
)
_HALF = replace(
    _QWEN,
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    intermediate=4864,
    vocabulary=151936,
    tied=True,
)
_ONE_AND_A_HALF = replace(
    _QWEN,
    hidden=1536,
    heads=12,
    kv_heads=2,
    intermediate=8960,
    vocabulary=151936,
    tied=True,
)
TABLE: dict[str, ModelShape] = {
    "Qwen/Qwen2.5-0.5B": replace(_HALF, context=32768),
    "Qwen/Qwen2.5-1.5B": replace(_ONE_AND_A_HALF, context=32768),
    "Qwen/Qwen2.5-7B": replace(_QWEN, context=32768),
    "Qwen/Qwen2.5-Math-1.5B": replace(_ONE_AND_A_HALF, context=4096),
    "Qwen/Qwen2.5-Math-7B": replace(_QWEN, context=4096),
    "Elliott/Qwen2.5-Math-7B-16k-think": replace(_QWEN, context=16384),
    "Elliott/Qwen2.5-Math-7B-SFT": replace(_QWEN, context=16384),
    "Qwen/Qwen3-0.6B": ModelShape(
        name="",
        layers=28,
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocabulary=151936,
        tied=True,
        context=40960,
        counted=596_049_920,  # With the norms of queries and keys.
    ),
    "meta-llama/Meta-Llama-3-8B": ModelShape(
        name="",
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocabulary=128256,
        tied=False,
        context=8192,
    ),
    "allenai/OLMo-2-0425-1B": ModelShape(
        name="",
        layers=16,
        hidden=2048,
        heads=16,
        kv_heads=16,
        head_dim=128,
        intermediate=8192,
        vocabulary=100352,
        tied=False,
        context=4096,
        counted=1_484_916_736,  # With the norms of queries and keys.
    ),
    "EleutherAI/pythia-14m": ModelShape(
        name="",
        layers=6,
        hidden=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        intermediate=512,
        vocabulary=50304,
        tied=False,
        context=2048,
        counted=14_067_712,  # Its MLPs have no gate, and every matrix has a bias.
    ),
}
"""Qwen2.5 (arXiv 2412.15115), Qwen2.5-Math (arXiv 2409.12122), Qwen3 (arXiv 2505.09388), Llama 3 (arXiv
2407.21783), OLMo 2 (arXiv 2501.00656) and Pythia (arXiv 2304.01373), with the sizes in their config.json. Each model's
``-Instruct`` variant has the same sizes."""


def shape_of(path: str, key: str = "model.path") -> ModelShape | None:
    """The sizes of a setting's model; None for a model that is neither at hand nor in the table.

    Nothing is downloaded. A hub name is first looked up in the local download cache.

    Raises:
        DataError: the path is neither a model folder nor a hub name.
    """
    folder = local_folder(path, key)
    if folder is None:
        return known(path)
    config = read_model_config(str(folder))
    shape = from_config(path, config)
    return None if shape is None else replace(shape, counted=count_parameters(folder, shape.tied))


def known(name: str) -> ModelShape | None:
    """Looks a model up in the table by its hub name."""
    found = TABLE.get(name.removesuffix("-Instruct"))
    return None if found is None else replace(found, name=name)


def local_folder(path: str, key: str = "model.path") -> Path | None:
    """The folder of a model that is on this machine, the download cache included."""
    place = Path(resolve(path, key))
    if place.is_dir():
        return place
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{path.replace('/', '--')}" / "snapshots"
    folders = [entry.parent for entry in snapshots.glob("*/config.json")]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def from_config(name: str, config: Mapping[str, Any]) -> ModelShape | None:
    """Sizes from a ``config.json``; None if it isn't of the kind that can be estimated, as mixtures are of which
    only some layers have experts."""
    inner = config.get("text_config")
    tree = inner if isinstance(inner, Mapping) else config
    try:
        heads, hidden = int(tree["num_attention_heads"]), int(tree["hidden_size"])
        mlp, kind = _mlp(tree), tree.get("model_type")
        if mlp is None:
            return None
        return ModelShape(
            name=name,
            layers=int(tree["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(tree.get("num_key_value_heads") or heads),
            head_dim=int(tree.get("head_dim") or hidden // heads),
            **mlp,
            vocabulary=int(tree["vocab_size"]),
            tied=bool(
                tree.get("tie_word_embeddings", config.get("tie_word_embeddings", kind in _TIED))
            ),
            qkv_bias=bool(tree.get("attention_bias", tree.get("qkv_bias", kind in _BIASED))),
            context=context_of(config),
            source="config.json",
        )
    except (KeyError, TypeError, ValueError):
        return None


def _mlp(tree: Mapping[str, Any]) -> dict[str, int] | None:
    """The widths of a layer's MLP and experts, as :class:`ModelShape` has them; None for a mixture that it can't describe."""
    experts = next((int(tree[key]) for key in _EXPERTS if tree.get(key)), 0)
    if not experts:
        return {"intermediate": int(tree["intermediate_size"])}
    mixed = tree.get("decoder_sparse_step", 1) != 1 or tree.get("mlp_only_layers")
    if tree.get("model_type") not in _MIXTURES or mixed:
        return None
    return {
        "intermediate": int(tree.get("shared_expert_intermediate_size") or 0),
        "experts": experts,
        "chosen": int(tree["num_experts_per_tok"]),
        "expert": int(tree.get("moe_intermediate_size") or tree["intermediate_size"]),
    }


def trained(config: Config, shape: ModelShape) -> int:
    """Number of parameters that are trained, kept in checkpoints and sent to the engines."""
    lora = config.learner.lora
    return shape.parameters if lora is None else shape.adapters(lora)


def too_long(config: Config, shape: ModelShape | None) -> str | None:
    """Why prompts and responses don't fit into the model's context; None if they do, or if it isn't known."""
    return None if shape is None else over_context(config, shape.context, "the model's")


def over_context(config: Config, context: int | None, whose: str) -> str | None:
    """As :func:`too_long`, for a context of this many tokens."""
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if context is None or longest <= context:
        return None
    return (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} and "
        f"rollout.max_new_tokens={config.rollout.max_new_tokens} together are over "
        f"{whose} context of {context} tokens: lower one of them"
    )


def unlike_ranks(config: Config, shape: ModelShape | None, *, gpus: bool) -> str | None:
    """Why vLLM's ranks don't get as many GPUs or as many of the model's attention heads each; None if they do."""
    from ...rollout.engines import ranks

    try:
        count = ranks(config.rollout, gpus=gpus)["tensor_parallel_size"]
    except ConfigError as error:
        return str(error)
    if shape is None:
        return None
    # Where there are fewer heads of keys and values than ranks, vLLM copies them.
    possible = [
        number
        for number in range(1, shape.heads + 1)
        if not shape.heads % number
        and not max(number, shape.kv_heads) % min(number, shape.kv_heads)
    ]
    if count in possible:
        return None
    args = config.rollout.vllm.args if config.rollout.vllm is not None else {}
    given = "tensor_parallel_size" in args
    key = "rollout.vllm.args.tensor_parallel_size" if given else "rollout.gpus_per_worker"
    return (
        f"{key}: {count} ranks of vLLM can't share {config.model.path}, which has {shape.heads} attention heads and "
        f"{shape.kv_heads} of keys and values: make it one of {', '.join(map(str, possible))}"
    )


WAY_OUT = "get the model's files again"


def _is_extent(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40


def safetensors_of(folder: Path) -> list[Path] | None:
    """The files of a folder that hold its model: those of its index, else ``model*.safetensors``, else all.

    Others beside them hold the same weights again, as Mistral's ``consolidated.safetensors`` does. None if the index
    lists one that isn't there.

    Raises:
        DataError: the index can't be read.
    """
    files = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    own = [name for name in files if name.startswith("model")]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = read_object(index.read_bytes(), str(index), DataError, WAY_OUT).get("weight_map")
        wanted = set(map(str, listed.values())) if isinstance(listed, dict) else set()
        if not wanted <= files.keys():
            return None
        own = sorted(wanted) or own
    return [files[name] for name in own or files]


def count_parameters(folder: Path, tied: bool = False) -> int | None:
    """Number of elements of all tensors of a folder's model, read from the headers of its safetensors files.

    Some files hold the output matrix although it is ``tied`` to the input embedding, as Qwen3-0.6B's do; it isn't counted
    again. None if there are no files, or if a download is incomplete.

    Raises:
        DataError: a file isn't safetensors.
    """
    files = safetensors_of(folder)
    if not files:
        return None
    shapes: list[list[int]] = []
    output: list[int] | None = None
    for file in files:
        with open(file, "rb") as content:
            start = content.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 < length <= min(100 << 20, file.stat().st_size - 8):
                raise DataError(f"{file} is not a safetensors file: get the model's files again")
            header = read_object(content.read(length), f"{file}, its header,", DataError, WAY_OUT)
        for name, entry in header.items():
            if name != "__metadata__":
                shape = entry.get("shape") if isinstance(entry, dict) else None
                if not isinstance(shape, list) or not all(_is_extent(one) for one in shape):
                    raise damaged(
                        f"{file}, its header,",
                        f"has no shape for {name[:80]!r}",
                        DataError,
                        WAY_OUT,
                    )
                shapes.append(shape)
                if name == "lm_head.weight":
                    output = shape
    if tied and output is not None and shapes.count(output) > 1:
        shapes.remove(output)
    return sum(map(math.prod, shapes))
