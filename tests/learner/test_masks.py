"""A rank on a GPU that CUDA_VISIBLE_DEVICES names by its UUID."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator

from tandem.learner.engine.zero import deepspeed_for

UUID = "GPU-7f57f032-34ab-a064-c37c-7a4f75601cc5"


@pytest.mark.parametrize(("mask", "asks_nvml"), [(UUID, False), ("3", True), ("3,4", True)])
def test_deepspeed_asks_torch_for_the_memory_of_a_gpu_without_a_number(
    monkeypatch: pytest.MonkeyPatch, mask: str, asks_nvml: bool
) -> None:
    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=handle),
    )
    monkeypatch.setattr(cuda_accelerator, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80)
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 30)
    for name, value in (("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    deepspeed_for(torch.device("cuda"))
    accelerator = object.__new__(cuda_accelerator.CUDA_Accelerator)
    assert accelerator.available_memory(0) == (3 if asks_nvml else 50)
