"""Which processes a server ends: its orphans, and nobody's children of before."""

from __future__ import annotations

import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent(
    """
    import subprocess, sys
    from tandem.common.confinement import adopt_orphans
    from tandem.rollout.environments.descendants import Family

    adopt_orphans()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    before = subprocess.Popen(sleep)
    family = Family()
    own = family.start(lambda: subprocess.Popen(sleep))
    orphaning = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2).pid)"
    subprocess.run([sys.executable, "-c", orphaning, *sleep], check=True, stdout=subprocess.DEVNULL)
    ended = family.sweep()
    print(ended, before.poll(), own.poll())
    family.end(own, 5.0)
    print(before.poll(), own.returncode)
    before.kill()
    before.wait()
    """
)


def test_orphans_are_ended_and_what_was_there_before_is_not() -> None:
    # In a process of its own: the kernel is told to give it all orphans.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["1 None None", "None -9"], done.stderr
