"""What a model's dtype costs on this CPU."""

from __future__ import annotations

import pytest

from tandem.common import models


@pytest.mark.parametrize(
    ("dtype", "device", "machine", "fast", "warned"),
    [
        ("bfloat16", "cpu", "x86_64", False, True),
        ("bfloat16", "cpu", "x86_64", True, False),
        ("float32", "cpu", "x86_64", False, False),
        ("bfloat16", "cuda", "x86_64", False, False),
        ("bfloat16", "cpu", "aarch64", False, False),
    ],
)
def test_a_cpu_that_is_slow_in_bfloat16_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    device: str,
    machine: str,
    fast: bool,
    warned: bool,
):
    monkeypatch.setattr(models.platform, "machine", lambda: machine)
    monkeypatch.setattr(models, "has_fast_bfloat16", lambda: fast)
    models.warn_of_slow_bfloat16("rollout.dtype", dtype, device)
    assert ("set rollout.dtype=float32" in caplog.text) is warned
