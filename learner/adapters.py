"""Low-rank adapters in the learner's model, by PEFT's own layers (LoRA, arXiv 2106.09685).

The base model is frozen. Each adapted layer computes ``x Wᵀ + s (x Aᵀ) Bᵀ``; which layers those are, and the
names that A and B have outside of PEFT, are those of :mod:`tandem.common.adapters`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..common.adapters import adapted_layers, base_of, scale_of
from ..common.errors import ConfigError, DataError
from ..common.plain import one_line
from ..common.seeds import keyed_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..common.config import Config, LoraConfig

NAME = "default"
"""PEFT's name of the one adapter that a layer has."""
_BASE = ".base_layer."
"""PEFT keeps the adapted layer itself under this name."""


class Adapters:
    """The adapters of a model, which this puts into it. Afterwards only they want a gradient.

    B begins at zero, so that the model is still the base. A is drawn uniformly as PEFT does it
    (``kaiming_uniform_`` with a = √5), by a key of the run's seed and the layer's name: it is the same on every
    rank and after every start. Both have the dtype of the layer's weight, as they do on the way to the engines;
    DeepSpeed keeps float32 copies of bf16 ones, as of any trained parameter.

    Args:
        model: a model whose parameters are whole.
        lora: ``learner.lora``.
        seed: ``run.seed``.

    Raises:
        ConfigError: a target matches no linear layer, or PEFT can't adapt one of them.
    """

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self.lora = lora
        self.layers = adapted_layers(model, lora)
        """The adapted layers, in the order in which their tensors travel."""
        self.scale = scale_of(lora)
        self._targets = _targets(model, [layer.name for layer in self.layers])
        # An expression, since PEFT takes a list of names as the ends of names.
        names = "|".join(re.escape(layer.name) for layer in self.layers)
        try:
            inject_adapter_in_model(self._settings(target_modules=names), model, NAME)
        except ValueError as error:
            raise ConfigError(
                f"learner.lora: PEFT can't adapt this model: {one_line(error, 300)}"
            ) from None
        self._modules: dict[str, Any] = {
            name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)
        }
        if self._modules.keys() != {layer.name for layer in self.layers}:
            found = ", ".join(sorted(self._modules.keys() ^ {one.name for one in self.layers})[:3])
            raise ConfigError(
                f"learner.lora: PEFT takes some of the named layers for others, as it does in mixtures of experts "
                f"({found}): leave these names out of learner.lora.targets, for instance by naming only the layers "
                f"of attention"
            )
        for layer in self.layers:
            module = self._modules[layer.name]
            dtype = module.get_base_layer().weight.dtype
            module.lora_A[NAME].to(dtype)
            module.lora_B[NAME].to(dtype)
            noise = torch.Generator().manual_seed(keyed_seed(seed, "lora_A", layer.name) >> 1)
            drawn = torch.empty(lora.rank, layer.inputs)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=noise)
            with torch.no_grad():
                module.lora_A[NAME].weight.copy_(drawn)
                module.lora_B[NAME].weight.zero_()

    # Tensors.

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of all tensors that travel, in the order of :func:`adapter_tensors`."""
        for layer in self.layers:
            module, (first, second) = self._modules[layer.name], layer.names
            yield first, module.lora_A[NAME].weight
            yield second, module.lora_B[NAME].weight

    def base_name(self, name: str) -> str | None:
        """The base model's own name for an entry of the adapted model's state dict; None for an adapter's."""
        layer, found, rest = name.partition(_BASE)
        if found and layer in self._modules:
            return f"{layer}.{rest}"
        layer, found, _ = name.rpartition(f".{NAME}.")
        owner = layer.rpartition(".lora_")[0]
        return None if found and owner in self._modules else name

    def of_base(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of the adapted model's state dict that the base model has, by its own names."""
        named = ((self.base_name(name), tensor) for name, tensor in state.items())
        return {name: tensor for name, tensor in named if name is not None}

    def merged(self, name: str, weight: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """W + s · B A of an adapted layer's weight, in float32 and rounded once; any other tensor unchanged.

        Args:
            name: the base model's name of the tensor.
            weight: the base model's tensor.
            tensors: the adapters by name, on any device.
        """
        layer = name.removesuffix(".weight")
        if layer not in self._modules or layer == name:
            return weight
        a, b = (tensors[f"{layer}.lora_{one}.weight"].to(weight.device).float() for one in "AB")
        return (weight.float() + self.scale * (b @ a)).to(weight.dtype)

    # Passes.

    def drop(self, training: bool) -> None:
        """Turns the adapters' dropout on or off; nothing else of a layer depends on its mode."""
        for module in self._modules.values():
            module.lora_dropout.train(training)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it, the model is the base."""
        # PEFT's method for this would also change which parameters want a gradient, which DeepSpeed relies on.
        for module in self._modules.values():
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in self._modules.values():
                module._disable_adapters = False

    @contextmanager
    def require_calls(self) -> Iterator[None]:
        """Within it, a forward pass of the model must call every adapted layer.

        Raises:
            ConfigError: one isn't called, so that its adapter would have no effect.
        """
        called: set[str] = set()
        hooks = [
            module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if idle := [layer.name for layer in self.layers if layer.name not in called]:
            raise ConfigError(
                f"learner.lora: the model computes without calling {len(idle)} of its linear layers, such as "
                f"{idle[0]}, so that an adapter there has no effect: name the others in learner.lora.targets"
            )

    # PEFT's folder.

    def write(self, folder: Path, tensors: Mapping[str, Tensor], base: str) -> None:
        """Writes the adapters into an existing folder, in the form that PEFT and engines load.

        Args:
            folder: an existing folder.
            tensors: the adapters by name.
            base: the base model's folder or hub name.
        """
        from safetensors.torch import save_file

        settings = self._settings(
            target_modules=self._targets, base_model_name_or_path=base, inference_mode=True
        )
        settings.save_pretrained(str(folder))
        described = folder / "adapter_config.json"
        content = json.loads(described.read_text(encoding="utf-8"))
        # PEFT keeps a set of names: sorted, the same adapters are the same bytes.
        content["target_modules"] = sorted(content["target_modules"])
        described.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(
            {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
            metadata={"format": "pt"},
        )

    def _settings(self, **further: Any) -> Any:
        from peft import LoraConfig as PeftLora

        alpha: Any = self.lora.alpha
        return PeftLora(
            task_type="CAUSAL_LM",
            r=self.lora.rank,
            # Some loaders take only whole numbers.
            lora_alpha=int(alpha) if float(alpha).is_integer() else alpha,
            use_rslora=self.lora.rslora,
            lora_dropout=self.lora.dropout,
            bias="none",
            **further,
        )


def identity(config: Config) -> dict[str, Any]:
    """What a checkpoint says of the adapters in it: ``{"lora": …}``; empty if every parameter is trained.

    Raises:
        DataError: the base model's weights can't be read.
    """
    lora = config.learner.lora
    if lora is None:
        return {}
    kept = lora.model_dump(mode="json", include={"rank", "alpha", "rslora", "targets"})
    return {"lora": {**kept, "base": base_of(config.model, lora)}}


def require_same(kept: Mapping[str, Any], now: Mapping[str, Any], place: Path) -> None:
    """Refuses a checkpoint whose adapters can't go on under these settings, before anything of it is read.

    Args:
        kept: what the checkpoint says (:func:`identity`), beside other keys.
        now: the same of this run.
        place: the checkpoint, for the error.

    Raises:
        DataError: it has no adapters, or only adapters, or those of other settings or of another base.
    """
    before, here = kept.get("lora"), now.get("lora")
    if before == here:
        return
    if before is None:
        raise DataError(
            f"{place} has all of the model's parameters, and learner.lora trains adapters: set "
            f"learner.lora=null, or start a new run whose model.path is that run's model/"
        )
    if not isinstance(before, Mapping) or here is None:
        raise DataError(
            f"{place} has adapters alone, and learner.lora=null trains every parameter: set learner.lora as it "
            f"was ({before})"
        )
    for key, value in here.items():
        if key != "base" and before.get(key) != value:
            raise DataError(
                f"{place} was written with learner.lora.{key}={before.get(key)}, and it is {value}: set it as it "
                f"was, or start over with --fresh"
            )
    raise DataError(
        f"{place} has adapters of a base model with the digest {before.get('base')}, and the weights in "
        f"model.path have {here['base']}: put back the weights that the run was started with, or start over "
        f"with --fresh"
    )


def _targets(model: nn.Module, names: list[str]) -> list[str]:
    """The layers' last names if no other linear layer has one of them, else their whole names."""
    last = sorted({name.rpartition(".")[2] for name in names})
    matched = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in last
    }
    return last if matched == set(names) else names
