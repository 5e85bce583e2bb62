"""The errors of the log-probs' Triton kernels under Triton's interpreter (``TRITON_INTERPRET=1``); a JSON line a case.

Run by test_logprobs.py in a process of its own.
"""

from __future__ import annotations

import itertools
import json

import torch

from tandem.learner.forward import kernels, logprobs

N, H, V = 7, 8, 45
kernels.BLOCK = 16
logprobs.LEAST_SLICE = 5
logprobs.CHUNK_BYTES["cpu"] = 4 * N * 20
logprobs._kernels = lambda hidden: kernels if hidden.dtype != torch.float64 else None

ramp = torch.linspace(-1, 1, N)
for cap, heat, biased, dtype in itertools.product(
    (None, 2.0), (True, False), (True, False), (torch.float32, torch.bfloat16)
):
    results = []
    for of in (torch.float64, dtype):
        rng = torch.Generator().manual_seed(0)
        hidden, weight = (torch.randn(rows, H, generator=rng).to(dtype).to(of) for rows in (N, V))
        bias = torch.linspace(-2, 1, V).to(dtype).to(of)
        inputs = [one.requires_grad_() for one in (hidden, weight, bias)[: 2 + biased]]
        tokens = torch.randint(0, V, (N,), generator=rng)
        found, entropy = logprobs.token_logprobs(
            *(hidden, weight, tokens, torch.rand(N, generator=rng) + 0.5 if heat else None),
            bias=bias if biased else None,
            scale=1.5,
            cap=cap,
            entropy_gradient=True,
            chunked=of == dtype,
        )
        # The gradient of a bare sum is one number for all rows.
        ((found * ramp).sum() + entropy.sum()).backward()
        results.append([found.detach(), entropy.detach(), *(one.grad for one in inputs)])
    errors = []
    for exact, ours in zip(*results, strict=True):
        assert exact is not None
        assert ours is not None
        errors.append(float((ours.double() - exact).norm() / exact.norm()))
    print(json.dumps({"cap": cap, "heat": heat, "dtype": str(dtype), "errors": errors}))
