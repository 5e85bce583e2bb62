"""TRL's side of :mod:`race`: ``GRPOTrainer`` on the same work. Runs in an environment that has TRL and no Tandem.

    python tests/benchmarks/race_trl.py '{"race": "sums", "model": ..., "problems": ..., "steps": 20, ...}'

Prints one JSON line: the clock's time at the end of each step, mean lengths and rewards of the steps, and for chains
the accuracy on held-out problems with the time that each evaluation took.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import race_work as work


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Trains as ``given`` says."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(given["threads"])
    tokenizer = AutoTokenizer.from_pretrained(given["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        given["model"], dtype=getattr(torch, given["dtype"])
    )
    chains = given["race"] == "chains"
    rows = json.loads(Path(given["problems"]).read_text(encoding="utf-8"))
    reward = work.chain if chains else work.digits
    most = work.CHAINS_TOKENS if chains else work.SUMS_TOKENS

    def paid(completions: list[str], gold: list[str], **_: Any) -> list[float]:
        return reward([text.removesuffix(tokenizer.eos_token) for text in completions], gold)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="race-"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        seed=given["seed"],
        per_device_train_batch_size=work.GROUPS * work.SAMPLES,
        gradient_accumulation_steps=1,
        num_generations=work.SAMPLES,
        max_completion_length=most,
        temperature=1.0,
        learning_rate=given["rate"],
        lr_scheduler_type="linear" if chains else "constant",
        warmup_steps=5 if chains else 0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="dr_grpo",
        scale_rewards="none",
        gradient_checkpointing=False,
        max_steps=given["steps"],
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_transformers_continuous_batching=given["continuous"],
    )
    held = rows["heldout"]
    ends: list[float] = []
    scores: list[tuple[int, float, float]] = []

    def evaluate(step: int) -> None:
        began = time.time()
        model.eval()
        accuracy = work.accuracy(model, tokenizer, held)
        model.train()
        scores.append((step, accuracy, time.time() - began))

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.time())

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            ends.append(time.time())
            if held and state.global_step % given["every"] == 0:
                evaluate(state.global_step)

    data = [{"prompt": row["question"], "gold": row["answer"]} for row in rows["train"]]
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        reward_funcs=paid,
        callbacks=[Ends()],
    )
    trainer.train()
    history = trainer.state.log_history
    return {
        "ends": ends,
        "scores": scores,
        "lengths": [
            h["completions/mean_length"] for h in history if "completions/mean_length" in h
        ],
        "rewards": [h["reward"] for h in history if "reward" in h],
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
