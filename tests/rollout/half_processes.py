"""The two processes of :mod:`update_processes` with an engine in bfloat16.

    python half_processes.py LEARNER_FD WORKER_FD

Weights are told by digests of their bytes: two that are equal are so bit for bit.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import update_processes
from update_processes import Learner, Worker

from tandem.common.records import Version
from tandem.common.weights.shared_memory import StagedTensors


def digest(tensor: torch.Tensor) -> str:
    """Of dtype, shape and bytes."""
    plain = tensor.detach().contiguous().cpu()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    told = f"{plain.dtype} {list(plain.shape)} ".encode()
    return hashlib.sha256(told + content).hexdigest()


class HalfLearner(Learner):
    """Says what its weights are in bfloat16, and what they then say."""

    def half(self, step: int, prompts: list[list[int]], new: int) -> tuple[Any, Any, Any]:
        """Takes on the weights of a step.

        Returns the digests of their casts by name, what ``generate`` makes of the casts, and by
        how much the better of the two best logits is the better, token by token.
        """
        if update_processes.config(self._folder, self._engine, "auto").model.dtype == "bfloat16":
            self._model = self._model.to(torch.bfloat16)
        self._take_on(Version(term=self._term, step=step), 0)
        cast = copy.deepcopy(self._model).to(torch.bfloat16)
        rows = torch.tensor(prompts)
        with torch.no_grad():
            made = cast.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                do_sample=False,
                max_new_tokens=new,
                eos_token_id=self._end,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(made.logits, dim=1).float().topk(2, dim=-1).values
        margins = (best[..., 0] - best[..., 1]).tolist()
        digests = {name: digest(p) for name, p in fused(dict(cast.named_parameters())).items()}
        return digests, made.sequences[:, rows.shape[1] :].tolist(), margins

    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [parameter.numel() for parameter in self._model.parameters()]


class HalfWorker(Worker):
    """Says which bytes came, and which its engine holds."""

    def _commit(self, staged: StagedTensors | None, version: Version) -> float:
        tensors = dict(staged.tensors()) if staged is not None else {}
        self._came = {name: digest(tensor) for name, tensor in fused(tensors).items()}
        self._nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return super()._commit(staged, version)

    async def held(self) -> tuple[dict[str, str], int, dict[str, str]]:
        """Digests of what came with the last version, its bytes, and digests of what is held.

        Of vLLM those alone that its kernels don't pack.
        """
        parameters = getattr(self._engine, "_parameters", None)
        if parameters is not None:
            held = {name: digest(p) for name, p in fused(parameters).items()}
        else:
            process = self._engine._process
            [held] = await process.run(process.llm.collective_rpc("tandem_digests"))
        return self._came, self._nbytes, held


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the biases of queries, keys and values beside each other as vLLM has them."""
    whole = dict(tensors)
    for name in tensors:
        if name.endswith("q_proj.bias"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            whole[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return whole


if __name__ == "__main__":
    update_processes.main(HalfLearner, HalfWorker)
