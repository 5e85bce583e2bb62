"""Log-probs and entropies from hidden states, forward and backward: in slices against plain.

    .venv/bin/python tests/benchmarks/logprobs.py
    .venv/bin/python tests/benchmarks/logprobs.py --device cuda --dtype bfloat16

Prints one JSON line a variant: seconds (the best of the repeats; on a CPU those of the processor,
which other processes disturb least, and ``wall`` beside them) and the greatest memory beyond the inputs
and their gradients; then one with the quotients, and whether they are within bounds (at most
1/8 of the memory at no more than 1.3 times the time). Each variant runs in a process of its own, one
after the other, by turns. ``plain`` is log_softmax, gather and −Σ p log p; ``sliced`` is
``tandem.learner.forward.logprobs``; ``liger`` is Liger's fused linear cross entropy, which has no entropy, and
runs where its package and a GPU are.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

import torch

from tandem.learner.forward.logprobs import token_logprobs

VARIANTS = ("plain", "sliced", "liger")
MEMORY_BOUND, TIME_BOUND = 1 / 8, 1.3


def peak_bytes(device: str) -> int:
    """The greatest memory so far: of the GPU's allocator, or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def once(
    variant: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    tokens: torch.Tensor,
    ramp: torch.Tensor,
) -> tuple[float, float]:
    """Seconds and wall seconds of one forward and backward pass; the gradients stay."""
    if hidden.is_cuda:
        torch.cuda.synchronize()
    started, used = time.perf_counter(), time.process_time()
    if variant == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, tokens).backward()
    else:
        logprobs, entropy = token_logprobs(
            hidden, weight, tokens, None, entropy_gradient=True, chunked=variant == "sliced"
        )
        ((logprobs * ramp).sum() + 0.01 * (entropy * ramp.flip(0)).sum()).backward()
    if hidden.is_cuda:
        torch.cuda.synchronize()
    wall = time.perf_counter() - started
    return (wall if hidden.is_cuda else time.process_time() - used), wall


def measure(variant: str, given: argparse.Namespace) -> dict[str, Any]:
    """One variant in this process."""
    torch.set_num_threads(given.threads)
    rng = torch.Generator(device=given.device).manual_seed(0)
    dtype = getattr(torch, given.dtype)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        made = torch.randn(*shape, generator=rng, device=given.device, dtype=dtype)
        return made.mul_(scale).requires_grad_()

    hidden = normal(given.tokens, given.hidden, scale=1.0)
    weight = normal(given.vocabulary, given.hidden, scale=given.hidden**-0.5)
    tokens = torch.randint(0, given.vocabulary, (given.tokens,), generator=rng, device=given.device)
    ramp = torch.linspace(-1, 1, given.tokens, device=given.device)
    # What the libraries themselves allocate at their first use isn't the variant's.
    small = [t.detach()[:16].clone().requires_grad_() for t in (hidden, weight)]
    once(variant, small[0], small[1], tokens[:16] % 16, ramp[:16])
    before = peak_bytes(given.device)
    took = [once(variant, hidden, weight, tokens, ramp)]
    gradients = sum(t.grad.nbytes for t in (hidden, weight) if t.grad is not None)
    extra = peak_bytes(given.device) - before - gradients
    for _ in range(given.repeats - 1):
        hidden.grad = weight.grad = None
        took.append(once(variant, hidden, weight, tokens, ramp))
    seconds, wall = (min(one) for one in zip(*took, strict=True))
    return {"variant": variant, "seconds": seconds, "wall": wall, "extra_bytes": extra}


def apart(variant: str, arguments: list[str]) -> dict[str, Any] | None:
    """One variant in a process of its own; None where it can't run here."""
    command = [sys.executable, __file__, *arguments, "--only", variant]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:]
        print(json.dumps({"variant": variant, "not run": last[0] if last else "?"}), flush=True)
        return None
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Measures all variants by turns; 1 where a bound is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="passes in one process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each variant, by turns")
    parser.add_argument("--only", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given)), flush=True)
        return 0
    best: dict[str, dict[str, Any]] = {}
    variants = list(VARIANTS)
    for _ in range(given.rounds):
        for variant in list(variants):
            found = apart(variant, sys.argv[1:])
            if found is None:
                variants.remove(variant)
                continue
            print(json.dumps(found), flush=True)
            known = best.setdefault(variant, found)
            for name in ("seconds", "wall"):
                known[name] = min(known[name], found[name])
            known["extra_bytes"] = max(known["extra_bytes"], found["extra_bytes"])
    plain, sliced = best["plain"], best["sliced"]
    memory = sliced["extra_bytes"] / plain["extra_bytes"]
    slower = sliced["seconds"] / plain["seconds"]
    within = memory <= MEMORY_BOUND and slower <= TIME_BOUND
    print(json.dumps({"memory": memory, "time": slower, "within_bounds": within}), flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
