"""Log-probs in chunks are those of the plain path, with the same gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.learner.forward import logprobs as module
from tandem.learner.forward.logprobs import token_logprobs

N, H, V = 37, 8, 11


def case(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng, dtype=dtype)
    weight = torch.randn(V, H, generator=rng, dtype=dtype)
    tokens = torch.randint(0, V, (N,), generator=rng)
    temperature = torch.rand(N, generator=rng) + 0.5
    return hidden.requires_grad_(), weight.requires_grad_(), tokens, temperature


@pytest.mark.parametrize("chunked", [False, True])
def test_log_probs_and_entropy_are_those_of_the_tempered_softmax(
    chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_SLICE", 3)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * N * 3)
    hidden, weight, tokens, temperature = case(torch.float64)
    found, entropy = token_logprobs(hidden, weight, tokens, temperature, chunked=chunked)
    share = torch.softmax(hidden @ weight.T / temperature[:, None], -1)
    torch.testing.assert_close(found, share[torch.arange(N), tokens].log())
    torch.testing.assert_close(entropy, -(share * share.log()).sum(-1))
    assert not entropy.requires_grad


@pytest.mark.parametrize("heat", [True, False])
@pytest.mark.parametrize("kept", [0, 2, 99])
def test_chunked_gradients_are_the_plain_ones(
    heat: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether logits are kept for the backward pass or made again."""
    monkeypatch.setitem(module.KEPT_BYTES, "cpu", 4 * N * 3 * kept)
    monkeypatch.setattr(module, "LEAST_SLICE", 3)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * N * 3)
    gradients = []
    for chunked in (False, True):
        hidden, weight, tokens, temperature = case(torch.float64)
        found, entropy = token_logprobs(
            hidden,
            weight,
            tokens,
            temperature if heat else None,
            entropy_gradient=True,
            chunked=chunked,
        )
        ramp = torch.linspace(-1, 1, N, dtype=torch.float64)
        ((found * ramp).sum() + (entropy * ramp.flip(0)).sum()).backward()
        gradients.append((hidden.grad, weight.grad))
    for plain, pieces in zip(*gradients, strict=True):
        torch.testing.assert_close(pieces, plain)


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("heat", [True, False])
@pytest.mark.parametrize(
    ("scale", "cap", "biased"),
    [(0.25, None, False), (1.0, 2.0, False), (3.0, 1.0, True), (1.0, None, True)],
)
def test_bias_scale_and_cap_are_those_of_the_formula(
    scale: float,
    cap: float | None,
    biased: bool,
    heat: bool,
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Values and all gradients, plain and chunked, against autograd of cap · tanh(scale z / cap)."""
    monkeypatch.setitem(module.KEPT_BYTES, "cpu", 4 * N * 3 * kept)
    monkeypatch.setattr(module, "LEAST_SLICE", 3)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * N * 3)
    ramp = torch.linspace(-1, 1, N, dtype=torch.float64)
    results = []
    for kind in ("formula", "plain", "chunked"):
        hidden, weight, tokens, temperature = case(torch.float64)
        bias = torch.linspace(-2, 1, V, dtype=torch.float64).requires_grad_() if biased else None
        if kind == "formula":
            logits = hidden @ weight.T
            if bias is not None:
                logits = logits + bias
            logits = scale * logits if cap is None else cap * torch.tanh(scale * logits / cap)
            every = torch.log_softmax(logits / temperature[:, None] if heat else logits, -1)
            found = every[torch.arange(N), tokens]
            entropy = -(every.exp() * every).sum(-1)
        else:
            found, entropy = token_logprobs(
                hidden,
                weight,
                tokens,
                temperature if heat else None,
                bias=bias,
                scale=scale,
                cap=cap,
                entropy_gradient=True,
                chunked=kind == "chunked",
            )
        ((found * ramp).sum() + (entropy * ramp.flip(0)).sum()).backward()
        gradients = [t.grad for t in (hidden, weight, bias) if t is not None]
        results.append([found.detach(), entropy.detach(), *gradients])
    for ours in results[1:]:
        for one, formula in zip(ours, results[0], strict=True):
            torch.testing.assert_close(one, formula)


def test_the_kernels_of_a_gpu_compute_the_same() -> None:
    """Triton's interpreter runs them here, on slices of which the last is smaller, against the plain path in float64."""
    pytest.importorskip("triton")
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted.py")],
        # Triton's own functions, too, are interpreted only if this is set before it is imported.
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    errors = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(errors) == 16
    for one in errors:
        bound = {"torch.float32": 3e-6, "torch.bfloat16": 2e-2}[one["dtype"]]
        assert max(one["errors"]) < bound, one


def test_a_bf16_matrix_gets_a_bf16_gradient_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LEAST_SLICE", 1)
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * N)
    hidden, weight, tokens, _ = case(torch.float64)
    exact, _ = token_logprobs(hidden, weight, tokens, None, chunked=False)
    exact.sum().backward()
    narrow = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    found, _ = token_logprobs(*narrow, tokens, None, chunked=True)  # type: ignore[arg-type]
    found.sum().backward()
    assert found.dtype == torch.float32
    assert narrow[1].grad is not None
    assert narrow[1].grad.dtype == torch.bfloat16
    torch.testing.assert_close(narrow[1].grad.double(), weight.grad, atol=0.15, rtol=0.05)


def test_the_size_of_the_vocabulary_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, tokens, _ = case(torch.float32)
    plain, _ = token_logprobs(hidden, weight, tokens, None)
    assert plain.grad_fn is not None
    assert "Sliced" not in type(plain.grad_fn).__name__
    monkeypatch.setattr(module, "CHUNKED_FROM", V)
    pieces, _ = token_logprobs(hidden, weight, tokens, None)
    assert "Sliced" in type(pieces.grad_fn).__name__


def test_where_kernels_do_not_work_the_slower_way_is_taken_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They can't run on a CPU, as they can't where Triton finds no compiler."""
    module._tried.cache_clear()
    assert module._tried(torch.device("cpu")) is None
    module._tried.cache_clear()
    assert "their kernels can't be compiled here" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heat", "cap"), [(True, None), (False, None), (True, 5.0)])
def test_a_gpu_computes_in_slices_what_float64_gives(
    dtype: torch.dtype, heat: bool, cap: float | None
) -> None:
    """With a vocabulary of several slices whose number no slice divides, and as many tokens as a micro-batch has."""
    rng = torch.Generator(device="cuda").manual_seed(0)
    count, width, vocabulary = 4099, 128, 32_001

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(*shape, generator=rng, device="cuda") * shape[-1] ** -0.25
        return made.to(dtype).requires_grad_()

    hidden, weight = normal(count, width), normal(vocabulary, width)
    tokens = torch.randint(0, vocabulary, (count,), generator=rng, device="cuda")
    temperature = torch.rand(count, generator=rng, device="cuda") + 0.5 if heat else None
    ramp = torch.linspace(-1, 1, count, device="cuda")
    results = []
    for of in (torch.float64, dtype):
        inputs = [one.detach().to(of).requires_grad_() for one in (hidden, weight)]
        found, entropy = token_logprobs(
            *inputs, tokens, temperature, cap=cap, entropy_gradient=True, chunked=of == dtype
        )
        ((found * ramp).sum() + (entropy * ramp.flip(0)).sum()).backward()
        results.append([found.detach(), entropy.detach(), *(one.grad for one in inputs)])
    assert module._tried(hidden.device) is not None
    bound = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for ours, exact in zip(results[1], results[0], strict=True):
        assert ours is not None
        assert exact is not None
        error = (ours.double() - exact).norm() / exact.norm()
        assert error < bound
