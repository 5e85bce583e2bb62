"""Writes docs/models.md from the list of model families in tests/families.py.

.venv/bin/python docs/models.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("models.md")
LIST = PAGE.parent.parent / "tests" / "families.py"

HEAD = """# Models

These decoder-only models of transformers train and sample correctly. `.venv/bin/python docs/models.py` writes this page
from the list in [tests/families.py](../tests/families.py); every entry is tested with a small model of the family's config
and random weights (`tests/learner/forward/test_families.py`, `tests/rollout/test_families.py`).

## What is checked when a run starts

The learner, the reference model of KL and preference losses, and the torch engine each compute log-probs in their own
way. Before anything is trained or sampled, each compares its log-probs and entropies with the model's own
`forward(...).logits` in evaluation mode, through everything that it uses later (padded rows, shared prompts, packed
rows, DeepSpeed with its ZeRO stage and ranks, the key-value cache). If they differ, the process ends with the figures:

> model type 'phi3' in float32: the learner's log-probs are off the model's own by up to 0.73 nats, …

- The rows are random tokens: short ones of different lengths, some with a common prompt, and rows up to twice as long
  as each window, chunk or length in the config at which the model computes differently. Lengths that the run's
  rows can't reach (`data.max_prompt_tokens` + `rollout.max_new_tokens`) aren't tried.
- The bound is 1e-4 nats in float32 and grows with log-probs beyond 5 nats, as rounding does: a trained model gives
  random tokens -35. In bfloat16 it is 0.3 and in float16 0.1, or four times the difference between two of the
  model's own attention implementations, if that is more. In half precision a small fault can't be told from
  rounding, so try a new model in float32 once.
- Short rows are compared with transformers' plain attention (`eager`), since the faster ones leave out what they don't
  support. `model.attention=auto` takes `eager` for models known to need it (capped scores, attention sinks).
- Only the responses' logits are computed, so that long rows need no more memory than in training.
- A mixture's own auxiliary loss (`router_aux_loss_coef`) isn't added to any objective: the learner calls the model's body alone,
  and transformers computes that loss in the model around it.

On the miniature all this takes less than a tenth of a second.

## Attention

`model.attention` says what computes the learner's attention, and with it how the rows of a micro-batch are laid out:

| `model.attention` | where | layout of a micro-batch |
|---|---|---|
| `flash_attention_2` | CUDA, bfloat16, with the package flash-attn | packed: rows one after the other on a line without padding |
| `varlen` | torch's kernel for variable lengths on CUDA in bfloat16; elsewhere sdpa, row by row | packed |
| `flex` | CUDA, also in float32 and with attention sinks | packed |
| `sdpa` | everywhere; rows of up to 192 tokens in bfloat16 on a CPU by whole matrices of scores, which is faster there | on CPUs a line with every prompt of a group once; on CUDA padded rows |
| `eager` | everywhere, also for capped scores and sinks | padded rows |

`auto` takes the first of these that the host and the model allow: `flash_attention_2` where it is installed, `varlen` on
CUDA in bfloat16 without it, `eager` for models known to need it, else `sdpa`. The learner's log has one line about it,
with the reason where a faster one isn't taken:

> the learner's attention is varlen, rows packed on a line without padding (not flash_attention_2: flash-attn isn't
> installed)

- A layout without padding is tried on the rows of the check above. If its log-probs differ from the model's own by
  more than rounding, which the log says, rows are padded: so it is with models whose layers mix neighbouring tokens
  outside of attention (Mamba, convolutions), with biases by distance (ALiBi), and with attention in chunks.
- No row sees another one: its log-probs, entropies and gradient stay the same to the last bit when its neighbours' tokens
  change, and to rounding (3e-5 in float32) when their number, order or lengths do
  (`tests/learner/forward/test_packed.py`, for each attention that runs on a CPU; with `-m gpu` for varlen and flex on a
  GPU, which passed on an H200, and for flash-attention, which has not run yet).
- `learner.micro_batch_tokens` counts padding where there is some, also that of a critic, teacher or reference which pads what the policy
  packs; of packed rows it counts their own tokens.
- Adapters, gradient checkpointing, every ZeRO stage and the critic use the same layout.
- A name that this host can't run is refused before anything is started.
- Packed rows don't share prompts: the gradients of a shared prompt's keys and values would be added up in another
  order each time on a GPU, so that a run could not be repeated bit for bit.

## Kernels

On a GPU the learner's norms, rotary positions and gated MLPs are computed by
[Liger's](https://github.com/linkedin/Liger-Kernel) fused kernels (Hsu et al. 2024, arXiv 2410.10989), if liger-kernel is
installed, as `launch/setup.sh` does on a GPU host, and has some for the model. They read and write a layer's activations once,
and keep fewer for the backward pass; the experts of a mixture stay transformers'. [On an H200](benchmarks.md#on-one-gpu-nvidia-h200) an update took 14 to 17% less time and
up to a fifth less memory. They are tried on the rows of the check above like an attention; a model whose log-probs they
change beyond rounding keeps transformers' operations, and the learner's log says so. `model.kernels=plain` leaves them out,
and `model.kernels=liger` ends the run where they can't be had.

## The list

{count} entries; {agree} agree in learner, reference model and torch engine to 1e-4 in float32. “Shared
prompts” says whether a learner on a CPU computes a group's prompt only once; the same families can be packed by
`varlen`, and the rest use padded rows. vLLM takes new
weights under the checkpoint's names; families marked † have other names in transformers, and `rollout.engine=vllm`
refuses them. vLLM's log-probs are compared with the learner's after every update ([weights](weights.md)).

| family | `model_type` | what a learner or an engine could get wrong | learner, reference | torch engine | shared prompts |
|---|---|---|---|---|---|
"""

TAIL = """
A model that isn't listed is checked in the same way when a run starts, and a refusal costs a few seconds. To list it,
add its config to `tests/families.py`.
"""


def families() -> list[Any]:
    """The list of tests/families.py."""
    spec = importlib.util.spec_from_file_location("families", LIST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    spec.loader.exec_module(module)
    found: list[Any] = module.FAMILIES
    return found


def page() -> str:
    """The whole page."""
    known = families()
    agree = sum(not family.learner and not family.engine for family in known)
    rows = [
        f"| {family.name}{' †' if family.renamed else ''} | `{family.kind}` | {family.shows} "
        f"| {outcome(family.learner)} | {outcome(family.engine)} | {'yes' if family.shares else 'no'} |"
        for family in known
    ]
    return HEAD.format(count=len(known), agree=agree) + "\n".join(rows) + "\n" + TAIL


def outcome(refusal: str) -> str:
    """A cell of the table."""
    return f"refused: {refusal}" if refusal else "agrees"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
