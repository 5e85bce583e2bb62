"""A real Slurm on this machine: one controller and two nodes, unpacked from Debian's packages and never installed.

Needs root, apt-get, and Debian's package lists. Everything is below one folder; :meth:`Slurm.close` ends what was
started, nodes first, since their end kills the jobs that are left.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("libmunge2", "libpmix2", "libhwloc15", "libhwloc-plugins"),
)
NODES = ("n1", "n2")
LIB = "usr/lib/x86_64-linux-gnu"
DEADLINE = 60.0

CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CryptoType=crypto/none
CredType=cred/none
StateSaveLocation={here}/ctld
SlurmctldPidFile={here}/slurmctld.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdSpoolDir={here}/%n
SlurmdPidFile={here}/%n.pid
SlurmdLogFile={here}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={here}/prolog
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PluginDir={tree}/{lib}/slurm-wlm
ReturnToService=2
SlurmdTimeout=10
KillWait={kill_wait}
MailProg=/bin/true
SchedulerParameters=sched_interval=2
{nodes}
PartitionName=main Nodes=n1,n2 Default=YES State=UP MaxTime=INFINITE
"""


def unpacked(folder: Path) -> Path:
    """The tree of the packages, made below a folder if it isn't there.

    Raises:
        RuntimeError: apt-get can't fetch them.
    """
    tree = folder / "tree"
    if (tree / "usr/sbin/slurmctld").exists():
        return tree
    folder.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(
        ["apt-get", "download", *PACKAGES], cwd=folder, capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        raise RuntimeError(f"apt-get download: {fetched.stderr.strip()}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(tree)], check=True)
    # Installing would make these links.
    for name in ("slurmctld", "slurmd", "slurmstepd"):
        (tree / "usr/sbin" / name).symlink_to(f"{name}-wlm")
    return tree


class Slurm:
    """A controller, and its nodes."""

    def __init__(self, tree: Path, here: Path, *, kill_wait: int = 30) -> None:
        self.here = here
        here.mkdir(parents=True, exist_ok=True)
        (here / "ctld").mkdir()
        ports = _free_ports(3)
        nodes = [
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=32000"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        conf = here / "slurm.conf"
        conf.write_text(
            CONF.format(
                host=socket.gethostname(),
                here=here,
                tree=tree,
                lib=LIB,
                controller=ports[0],
                kill_wait=kill_wait,
                nodes="\n".join(nodes),
            )
        )
        path = f"{tree}/usr/bin:{tree}/usr/sbin:/usr/local/bin:/usr/bin:/bin"
        libraries = f"{tree}/{LIB}:{tree}/{LIB}/slurm-wlm"
        self.environment = {
            "PATH": path,
            "HOME": os.environ.get("HOME", "/root"),
            "SLURM_CONF": str(conf),
            "LD_LIBRARY_PATH": libraries,
        }
        # A site has these programs on everybody's path; jobs get nothing of their submitter's environment.
        prolog = here / "prolog"
        prolog.write_text(
            f"#!/bin/sh\necho 'export PATH={path}'\necho 'export SLURM_CONF={conf}'\n"
            f"echo 'export LD_LIBRARY_PATH={libraries}'\n"
        )
        prolog.chmod(0o755)
        self._sbin = tree / "usr/sbin"
        self._controller = self._daemon("slurmctld", "-D", "-f", str(conf))
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        for name in NODES:
            self.start_node(name)
        self.wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2", "two idle nodes")

    def _daemon(self, program: str, *words: str) -> subprocess.Popen[bytes]:
        log = open(self.here / f"{program}.out", "ab")  # noqa: SIM115
        with log:
            return subprocess.Popen(
                [str(self._sbin / program), *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_node(self, name: str) -> None:
        """Starts a node's daemon, which ends what an earlier one has left running."""
        (self.here / name).mkdir(exist_ok=True)
        step = str(self._sbin / "slurmstepd")
        self._nodes[name] = self._daemon("slurmd", "-D", "-N", name, "-d", step)

    def kill_node(self, name: str) -> None:
        """``kill -9`` of a node's daemon; its jobs go on running."""
        self._nodes[name].send_signal(signal.SIGKILL)
        self._nodes[name].wait()

    def run(self, *words: str) -> str:
        """What a command of Slurm's prints; it must succeed."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str) -> str:
        """Submits a script, and returns the job's number."""
        return self.run("sbatch", "--parsable", *words)

    def jobs(self) -> dict[str, str]:
        """Job or ``JOB_TASK`` to its state, of all that aren't over."""
        lines = self.run("squeue", "-h", "-r", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines)

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        shown = self.run("scontrol", "-o", "show", "job", job)
        return next(w.partition("=")[2] for w in shown.split() if w.startswith(f"{name}="))

    def start_now(self, job: str) -> None:
        """Starts a job at once that was requeued, which waits two minutes by default."""
        self.wait_for(lambda: self.jobs().get(job) == "PENDING", f"{job} pending")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait_for(
        self, condition: Callable[[], bool], what: str, deadline: float = DEADLINE
    ) -> float:
        """Waits until it holds; returns the seconds that it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < deadline, f"no {what} in {deadline:.0f} s"
            time.sleep(0.2)
        return time.monotonic() - began

    def close(self) -> None:
        """Ends the jobs, the nodes and the controller."""
        try:
            ids = list(self.jobs())
            if ids:
                self.run("scancel", *ids)
                self.wait_for(lambda: not self.jobs(), "end of the jobs")
        except (AssertionError, subprocess.SubprocessError):
            pass
        for process in (*self._nodes.values(), self._controller):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.here / "ctld", ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports
