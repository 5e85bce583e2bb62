"""The ways into a sandbox, for the tests of what each of them holds."""

from __future__ import annotations

import pytest

from tandem.reward.sandbox import sandbox


@pytest.fixture(scope="module", params=sandbox.WAYS, ids=lambda way: way.how)
def box(request: pytest.FixtureRequest) -> sandbox.Box:
    """Each way that works on this machine."""
    problem = sandbox.probe(request.param)
    if problem:
        pytest.skip(problem)
    return request.param
