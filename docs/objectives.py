"""Writes docs/objectives.md from the table of objectives.

.venv/bin/python docs/objectives.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.common.objectives import (
    DEFAULT,
    FAMILIES,
    KEYS,
    OBJECTIVES,
    ObjectiveConfig,
    distillation,
    experts,
    own,
    plain,
    preferences,
    reads,
    sets,
    stale,
)
from tandem.common.objectives import keys as key_groups

PAGE = Path(__file__).with_name("objectives.md")
EXAMPLE = PAGE.parent.parent / "tests" / "learner" / "own_objective.py"

HEAD = """# Objectives

`learner.objective.name` says what a run trains with. This page is made of the classes in
[common/objectives/](../common/objectives/) by `.venv/bin/python docs/objectives.py`, and a test compares the two.

Letters: π_θ the policy that is trained, μ the policy that sampled a token (log-probs as recorded),
π_prox the weights at the step's start, π_ref a reference, π_φ an expert's policy; ρ = π_θ/μ; A the
advantage of a row, R its reward; sg(x) is x without a gradient; H the entropy of π_θ. *Own* tokens
were sampled in the run, *expert* tokens stand in traces; `agg` is the sum over tokens with the
denominator of `aggregation`, which is counted over the whole update, so that micro-batches, ranks
and padding don't change it. Text of an environment is in no loss.

An objective has the keys of `learner.objective` that it reads (“reads”) and no others; the [end of the page](#keys) explains them.
Two sets of keys have names, since many objectives read them:

@GROUPS@

An objective has defaults of its own for some keys (“sets”); what a preset or an override says wins. If an override names
another objective than the preset's, the preset's keys that the new one doesn't read are left out, and the run says so. An override of
a key that the objective doesn't read is refused.

Objectives marked *fresh* don't correct for stale samples, and need `replay.max_staleness=0`. Those of them without a ratio
(`reinforce`, `reinforce_baseline`, `srft`) also need `learner.minibatches=1` and `learner.update_epochs=1`.

“offline” says whether `tandem offline` trains with an objective on stored responses, where each response is a group of its own,
or each pair of a better and a worse one. “No” means that the run is refused, because a trace alone in its group teaches such an
objective nothing. All objectives, the *fresh* ones too, train on the groups of an [archive](data.md#archives). An objective for which
the archive's first steps contain nothing to learn is refused at the start. Replayed with the settings of the run that made it, an
archive's samples are as fresh as they were in that run. With other settings the policy soon differs from the one that sampled them;
then choose an objective with a ratio.

Advantages of `group_mean` and its like compare the rows of a group, which then needs two own samples with a
verdict; with `none` and `reinforce_pp` one is enough, so that `rollout.group_size` may be 1. The same holds for
an objective of your own.
"""

OWN = """## One of your own

`learner.objective.name=package.module:function` trains with your function; its module may be
installed, on `PYTHONPATH`, or in the folder where you start Tandem. A path that leads nowhere, and a function that doesn't take these
three arguments, are refused before anything is started.

```python
@EXAMPLE@```

`rows` is a [`Rows`](../learner/rows/rows.py): flat tokens with their rows. `scalars` has the sums of
`statistics(rows)` over the update (an attribute of the function, beside `own_tokens`,
`expert_tokens` and `sequences`), `constant`, `width` and `step`. Return the part of the update's loss
that these rows make, and if you like a dict of sums for `metrics.jsonl`, where a metric of the same name takes a sum's
place. Dividing by anything but
`scalars` makes the loss depend on the size of micro-batches. `columns`, as an attribute, asks for
more log-probs: `proximal`, `reference`, or `current` (then `statistics` sees `rows.logprobs`). `settings` has what the
updates read of any objective (`advantage`, `aggregation`, `truncation`, `stragglers`, and the keys of entropy
and KL) and, in `settings.params`, your own `learner.objective.params`. A class may derive from
`tandem.learner.objectives.Objective` or from one of the built-in ones instead: then keys of the built-in one
may stand in `params` (`learner.objective.params.clip_high=0.28`), and `settings` has them all.
A class that derives from a *fresh* objective is refused at the start of a run that may get stale samples, as that objective
is, unless it has a `loss` or `own_losses` of its own.
A key that isn't given has the built-in one's default. So has a key outside of `params` that is set to what it is in an objective of
your own by default (such as `aggregation=constant`): name it in `params` too, if you mean it.
The ledger doesn't know your class: an advantage that compares no rows (`none`, `reinforce_pp`) belongs in
`learner.objective.advantage`, also where it is the built-in one's default, or the ledger rejects groups with a single verdict.
The learner's log says so.

A function adds the KL penalty and the entropy bonus to its loss itself, from `rows.reference` and `rows.entropy`, by the
coefficients in `scalars`. With `kl_coefficient` its `columns` must have `reference`, or a new run is refused.

Offline, your objective gets only the responses that are right. Set `learner.objective.rejected=true` if it learns from worse
and unwanted ones as well, as a class that derives from `Dpo`, `Cpo`, `Orpo` or `Kto` does.

A bug in it ends the run at once: an exception, a loss that isn't a tensor of one number or has no gradient, or a sum that
isn't one number. The message names the objective, the step and the line of your file. Out of memory, or with an error of the
GPU, the learner is started again as ever.
"""


SCALE = """## The scale of LUFFY's published runs

LUFFY's code sums `ℓ` over all tokens of a mini-batch and divides by the longest response T alone; each
of its D ranks does so for its share of the N rows, sums that up over its micro-batches, and FSDP averages
over the ranks. The gradient that is clipped at norm 1 and that AdamW (ε = 1e-8) sees is therefore

```text
g_published = (1/D) Σ over N rows of Σ over tokens of ∇ℓ / T
g_constant  =       Σ over N rows of Σ over tokens of ∇ℓ / (T N)   = g_published · D/N
g_width     =       Σ over N rows of Σ over tokens of ∇ℓ / T       = g_published · D
```

with `aggregation: constant` and `width` (`luffy_code`) here. The published runs have N = 64 prompts × 8 =
512 rows and D = 8 ranks, so a gradient of `constant` is 64 times smaller than theirs. AdamW's step is the
same for g and c·g where its ε is multiplied by c too; a clip is the same where its bound is. For
`constant` that is `grad_clip: 0.015625` and `eps: 1.5625e-10`, for `width` `grad_clip: 8` and
`eps: 8e-8`: with `grad_clip: 1`, `constant` would never be clipped. The learning rate stays.

The entropy bonus of their code is one mean over tokens for each micro-batch, and these are summed:
0.001 · m mean(H) beside g_published, m micro-batches of a rank. Beside g_constant that is
`entropy_coefficient: 0.001 m D/N`; with dynamic micro-batches of 32,768 tokens and about 3,500 tokens a
row m is about 7, hence 1.1e-4. Its mean is over own and expert tokens (`entropy_over: all`). The preset
`qwen2.5-math-7b-luffy-8gpu` and `qwen2.5-math-7b-luffy-published` have these numbers.
"""


REPLAYED = """## ExGRPO's successes

With `exgrpo` and `expert.per_group=1` a run brings its own past successes back as rows of groups, in the places of expert traces;
the data need none. Of the first group of a problem in which some but not all samples were right, the right one of least
perplexity is kept, with the log-probs that it was sampled with. When the problem's turn comes again, the success is a row of
its group, beside G - 1 fresh samples, with the chance N(k; G/2, 1)/N(G/2; G/2, 1), where k of its samples were right the last time
that any was. A problem of which all samples were right gives its success up for good. Nothing comes back before a step's share of
right samples has reached `replay_from`. The paper draws half of each batch from its buffer by these weights, and picks among
several successes the one of least entropy under the current policy; here a problem comes in its turn, once a pass, so `exgrpo`
wants runs of several passes.
"""


TAUGHT = """## A teacher

`distill` learns from the next-token distribution of another model, `learner.teacher`: a Hugging Face folder or hub name
with the policy's tokenizer, of any size. No reward is needed, and rows that are paid alike take part like any others:

- on traces: `tandem offline PRESET learner.source=offline learner.objective.name=distill learner.teacher=DIR`
- on the policy's own samples: `tandem start PRESET learner.objective.name=distill learner.teacher=DIR`; with `divergence_mix` of 0.5 or 1 this is on-policy distillation
  (GKD). A sample that is some steps old is a context like another one, so that any `replay.max_staleness` will do.
- on both: with `expert.per_group` of 1 or more. `sft_coefficient` adds the cross entropy of the traces' tokens.

The divergence is over the token ids that both output matrices have, each softmax over these alone: matrices of one family are
padded to several widths beyond the tokenizer's ids. A tokenizer with other ids is refused at the start. Tokens are drawn and their
log-probs checked at `rollout.temperature`; `divergence_temperature` is that of the loss alone.

Every rank holds the whole teacher in `model.dtype`, at each ZeRO stage, and reads each micro-batch before the policy does. Its
logits and the policy's exist for one slice of a large vocabulary at a time, forward and backward, and nothing of the teacher is kept
on the disk. The teacher has no dropout and isn't trained. A folder of adapters is no teacher: merge them into their model first.
The preset `miniature-distill` trains a miniature by rewards and then teaches an untrained one on its own samples (held-out
accuracy from 0.0% to 78.6% in 20 steps; the teacher, after 60, has 81.2%).
"""


ALONE = """## Functions without a key

[`tandem.learner.recipes`](../learner/recipes/) has functions for scripts and notebooks which no run calls:
padded batches and each step of a plain GRPO or SFT loop, LUFFY's loss as its code computes it, and ExGRPO's
draws of whole buckets.
"""


GROUPS = {
    "shared": reads(key_groups.OwnTokens),
    "clip": tuple(
        key for key in reads(key_groups.Clipped) if key not in reads(key_groups.OwnTokens)
    ),
}
"""Sets of keys that many objectives read."""
OFFLINE = {
    "nothing": "no",
    "pairs": "on pairs (`chosen` and `rejected`)",
    "by advantage": "with `advantage=none`, or `reinforce_pp` where the traces' rewards differ",
    "always": "yes",
}


def keys() -> dict[str, tuple[str, str]]:
    """Every key of ``learner.objective`` with its default, as Python writes it, and its docstring."""
    found: dict[str, tuple[str, str]] = {}
    for module in (key_groups, plain, stale, experts, distillation, preferences, own):
        for kind in ast.parse(inspect.getsource(module)).body:
            body = kind.body if isinstance(kind, ast.ClassDef) else []
            for node, after in itertools.pairwise(body):
                if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                    continue
                key = node.target.id
                if key in found or key not in ("name", *KEYS):
                    continue
                assert isinstance(after, ast.Expr), f"{key} has no docstring"
                assert isinstance(after.value, ast.Constant)
                assert node.value is not None
                text = " ".join(str(after.value.value).split())
                found[key] = (ast.unparse(node.value), text)
    found["name"] = (repr(DEFAULT), found["name"][1])
    found["params"] = ("{}", found["params"][1])
    return found


def shown(value: Any) -> str:
    """A default as a person would write it in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def summary(kind: type[ObjectiveConfig]) -> str:
    """What an objective is, in a line."""
    return (kind.__doc__ or "").strip()


def named(keys: Sequence[str]) -> str:
    """An objective's keys, in which a set that has a name is one word."""
    words, rest = [], list(keys)
    for name, group in GROUPS.items():
        if set(group) <= set(rest):
            words.append(f"*{name}*")
            rest = [key for key in rest if key not in group]
    return ", ".join([*words, *(f"`{key}`" for key in rest)])


def told(name: str, entry: type[ObjectiveConfig]) -> str:
    """The part of the page about one objective."""
    lines = [f"### {name}", "", summary(entry) + (" *fresh*" if entry.fresh else ""), ""]
    lines += ["```text", entry.equation, "```", ""]
    lines.append(f"- **when**: {entry.use}")
    lines.append(f"- **source**: {entry.source}")
    if entry.trl:
        lines.append(f"- **TRL**: {entry.trl}")
    if own_defaults := sets(entry):
        listed = ", ".join(f"`{key}={shown(value)}`" for key, value in own_defaults.items())
        lines.append(f"- **sets**: {listed}")
    lines.append(f"- **reads**: {named(reads(entry))}")
    alone = "pairs" if issubclass(entry, preferences.Pairs) else entry.alone
    lines.append(f"- **offline**: {OFFLINE[alone]}")
    more = [column for column in entry.needs if column != "behaviour"]
    if more:
        lines.append(f"- **needs**: {', '.join(more)}")
    return "\n".join([*lines, ""])


def page() -> str:
    """The whole page."""
    groups = (
        f"- *{name}*: {', '.join(f'`{key}`' for key in group)}" for name, group in GROUPS.items()
    )
    parts = [HEAD.replace("@GROUPS@", "\n".join(groups))]
    overview = ["| name | what it is |", "|---|---|"]
    for name, entry in OBJECTIVES.items():
        overview.append(f"| [{name}](#{name}) | {summary(entry)} |")
    parts.append("\n".join([*overview, ""]))
    for family, kinds in FAMILIES.items():
        parts.append(f"## {family}\n")
        parts += [told(name, kind) for name, kind in OBJECTIVES.items() if kind in kinds]
    _, _, code = EXAMPLE.read_text(encoding="utf-8").partition('"""\n\n')
    parts.append(OWN.replace("@EXAMPLE@", code))
    parts.append(SCALE)
    parts.append(REPLAYED)
    parts.append(TAUGHT)
    parts.append(ALONE)
    rows = ["## Keys", "", "| key | default | meaning |", "|---|---|---|"]
    for key, (default, meaning) in keys().items():
        text = meaning.replace("``", "`").replace("|", "\\|")
        rows.append(f"| `{key}` | {shown(ast.literal_eval(default))} | {text} |")
    parts.append("\n".join([*rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
