"""Losses and gradients of TRL's preference trainers on a few pairs and a tiny model, for test_trl.py.

python tests/benchmarks/trl_preferences.py

in an environment with ``trl==1.16.0`` (and torch, transformers 5.x; Tandem isn't needed) writes them to
``tests/learner/objectives/trl_preferences.json``. Weights and tokens are drawn by NumPy's Philox, so that every
environment has the same ones.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

FROZEN = Path(__file__).parents[1] / "learner" / "objectives" / "trl_preferences.json"
NAMES = ("dpo", "kto", "orpo", "cpo")
BETA = 0.3
POLICY, REFERENCE = 2, 1
"""Seeds of the weights, with which z₀ of kto is above 0."""
VOCABULARY = 32
Pair = tuple[list[int], list[int], list[int]]
"""Prompt, chosen and rejected response."""


def pairs_for(name: str) -> list[Pair]:
    """Pairs of tokens.

    All chosen responses have one length, since TRL's cpo and orpo average their cross entropy over the tokens of
    a batch and Tandem's over each response. For orpo prompts have one token: TRL's cross entropy goes over the
    prompt too, all but its first token.
    """
    numbers = np.random.Generator(np.random.Philox(key=7))
    prompts = (1, 1, 1) if name == "orpo" else (3, 5, 2)
    return [
        tuple(numbers.integers(2, VOCABULARY, size).tolist() for size in (prompt, 6, rejected))
        for prompt, rejected in zip(prompts, (4, 7, 6), strict=True)
    ]


def tiny_model(seed: int) -> Any:
    """A Qwen2 of some thousand parameters in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).float()
    numbers = np.random.Generator(np.random.Philox(key=seed))
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            drawn = numbers.normal(0.0, 0.25, tuple(parameter.shape))
            drawn += parameter.ndim == 1
            parameter.copy_(torch.from_numpy(drawn))
    return model


def figures(loss: torch.Tensor, model: Any) -> dict[str, Any]:
    """The loss, and of each parameter's gradient its norm and its product with a fixed vector."""
    gradients = {}
    for name, parameter in sorted(model.named_parameters()):
        gradient = parameter.grad.double().reshape(-1)
        along = torch.cos(torch.arange(len(gradient), dtype=torch.float64))
        gradients[name] = [float(gradient.norm()), float(gradient @ along)]
    return {"loss": float(loss.detach()), "gradients": gradients}


# TRL's side.


def padded(rows: list[tuple[list[int], list[int]]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Prompts and responses as TRL's collators of dpo and kto have them."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    ids, there, completion = [], [], []
    for prompt, response in rows:
        rest = width - len(prompt) - len(response)
        ids.append([*prompt, *response] + [0] * rest)
        there.append([1] * (width - rest) + [0] * rest)
        completion.append([0] * len(prompt) + [1] * len(response) + [0] * rest)
    return {
        f"{prefix}input_ids": torch.tensor(ids),
        f"{prefix}attention_mask": torch.tensor(there),
        f"{prefix}completion_mask": torch.tensor(completion),
    }


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, **{f"t{n}": n for n in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="t2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def loss_of(name: str, folder: str) -> dict[str, Any]:
    """What TRL's trainer computes of the pairs."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    pairs = pairs_for(name)
    chosen = [(prompt, won) for prompt, won, _ in pairs]
    rejected = [(prompt, lost) for prompt, _, lost in pairs]
    policy = tiny_model(POLICY)
    # The trainers want data of their own to begin with; the tokens are given to their losses below.
    data: dict[str, Any] = {"prompt": ["t2 t3"] * 4, "chosen": ["t4"] * 4, "rejected": ["t5"] * 4}
    common: dict[str, Any] = {
        "output_dir": folder,
        "beta": BETA,
        "per_device_train_batch_size": 4,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    rest: dict[str, Any] = {"processing_class": tokenizer()}
    if name == "dpo":
        trainer: Any = DPOTrainer(
            model=policy,
            ref_model=tiny_model(REFERENCE),
            args=DPOConfig(**common),
            train_dataset=Dataset.from_dict(data),
            **rest,
        )
        inputs = padded([*chosen, *rejected])
    elif name == "kto":
        kto_data = {
            "prompt": data["prompt"],
            "completion": data["chosen"],
            "label": [True, False] * 2,
        }
        trainer = KTOTrainer(
            model=policy,
            ref_model=tiny_model(REFERENCE),
            args=KTOConfig(**common, train_sampling_strategy="sequential"),
            train_dataset=Dataset.from_dict(kto_data),
            **rest,
        )
        rows = [*chosen, *rejected]
        shifted = [rows[-1][1], *(response for _, response in rows[:-1])]
        kl = [(prompt, response) for (prompt, _), response in zip(rows, shifted, strict=True)]
        inputs = padded(rows) | padded(kl, "KL_")
        inputs["label"] = torch.tensor([True] * len(chosen) + [False] * len(rejected))
    else:
        kind, settings = {"orpo": (ORPOTrainer, ORPOConfig), "cpo": (CPOTrainer, CPOConfig)}[name]
        trainer = kind(
            model=policy,
            args=settings(**common),
            train_dataset=Dataset.from_dict(data),
            **rest,
        )
        inputs = {}
        for which, these in (("chosen", chosen), ("rejected", rejected)):
            one = padded(these)
            inputs[f"{which}_input_ids"] = one["input_ids"]
            inputs[f"{which}_attention_mask"] = one["attention_mask"]
            inputs[f"{which}_labels"] = one["input_ids"].masked_fill(
                one["completion_mask"] == 0, -100
            )
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    found = figures(loss, trainer.model)
    if name == "kto":
        found["z0"] = trainer._metrics["eval"]["kl"][-1]
    return found


def from_trl() -> dict[str, Any]:
    """What TRL computes, by objective."""
    with tempfile.TemporaryDirectory() as folder:
        return {name: loss_of(name, folder) for name in NAMES}


def main() -> None:
    import transformers
    import trl

    made = {
        "made_with": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **from_trl(),
    }
    FROZEN.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FROZEN}")


if __name__ == "__main__":
    main()
