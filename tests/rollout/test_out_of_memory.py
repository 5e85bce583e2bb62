"""A token step that has too little memory, in a real process with a limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, re, resource, sys
import numpy as np
from tandem.common.config import ModelConfig, RolloutConfig
from tandem.common.records import SamplingParams
from tandem.rollout.engine import GroupRequest
from tandem.rollout.engines import make_engine

async def main():
    rollout = RolloutConfig(engine="torch", max_new_tokens=400, group_size=2)
    engine = make_engine(ModelConfig(path="miniature"), rollout, max_rows=int(sys.argv[1]))
    await engine.start()
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=int(sys.argv[2]))
    prompt = np.full(20, 5, np.int32)
    async def generate(name, count):
        request = GroupRequest(group_id=name, prompt_tokens=prompt, count=count, sampling=sampling, seed=1)
        return [group async for group in engine.generate([request])]
    await generate("first", 2)
    assert engine.exhausted is None
    held = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + (64 << 20), limits[1]))
    found = await generate("second", int(sys.argv[1]))
    print(found[0].error)
    async with asyncio.timeout(20):
        while engine.exhausted is None:  # The group is given up a moment before.
            await asyncio.sleep(0.01)
    print(type(engine.exhausted).__name__, sorted(engine.exhausted.parts), engine.exhausted)
    # A thread that has found no memory may end the process by a signal at the interpreter's end.
    sys.stdout.flush()
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts all memory on Linux alone")
def test_the_engine_says_that_it_is_exhausted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "4000", "60"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    error, told = done.stdout.strip().splitlines()[-2:]
    assert error != "None"
    assert told.startswith("OutOfMemoryError ['keys and values', 'weights'] no memory is left for")
