"""An environment server: plays episodes in processes of its own, and answers over ZeroMQ.

One asyncio loop: the ROUTER, the processes, and a beat once a second that goes to Redis in a thread. An
episode that has no place yet waits in order; its first delta says that it has begun. Whoever asked for it
may cancel it. A server that is asked to end plays what it is playing to its end, within the run's deadline,
and hands everything else back to be played elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shlex
import shutil
import signal
import socket as sockets_of_the_system
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ...common import disk
from ...common.config import Config
from ...common.config.environments import (
    AnyEnvironment,
    AppWorldEnvironment,
    VerifiersEnvironment,
    file_name,
)
from ...common.confinement import adopt_orphans, hide_memory
from ...common.errors import ConfigError, TandemError, WireError
from ...common.records import Verdict
from ...common.run_folder import JoinInfo, RunFolder
from ...common.sockets import (
    Authenticator,
    bind_router,
    is_loopback,
    new_keys,
    own_address,
    reachable,
)
from ...replay.connection import Store, connect
from ...replay.members import Members
from ...replay.store import RunStore
from .client import ROLE
from .hosts import Hosts
from .process import Bounds
from .requests import (
    CancelRequest,
    RunRequest,
    read_id,
    read_request,
)
from .verifiers import VerifiersWorld
from .wire import (
    Played,
    done_reply,
    failed,
    lost_reply,
    opened,
    played_delta,
    played_reply,
    refused_reply,
)
from .worlds import HostWorld, Lost, World

log = logging.getLogger("tandem.environments")

APPWORLD = "tandem.rollout.environments.appworld:AppWorld"
"""Import path of the class that plays AppWorld."""
BEAT_SECONDS = 1.0
"""Between heartbeats, which carry the figures."""
MOST_WAITING = 10_000
"""Episodes that may wait for a place."""
TELL_SECONDS = 60.0
"""Between two warnings of failures of one kind."""
SLACK_SECONDS = 75.0
"""Time beyond an episode's deadline in which its environment must have ended it, its process's start included."""
END_SECONDS = 10.0
"""Time that the processes of cancelled episodes have to be gone, when the server leaves."""
LINGER_MS = 2_000
"""Time for the last answers to leave when the server does."""

Route = tuple[bytes, str]
"""(identity, request id) of whom to answer."""


class Server:
    """The loop; :func:`main` gives it its connections.

    Args:
        router: the bound socket.
        worlds: what plays each environment.
        places: greatest number of episodes at a time.
        episode_seconds: deadline of an episode.
        drain_seconds: time that episodes have to end once the server is asked to.
    """

    def __init__(
        self,
        router: zmq.asyncio.Socket,
        worlds: Mapping[str, World],
        *,
        places: int,
        episode_seconds: float,
        drain_seconds: float,
    ) -> None:
        self._router = router
        self._worlds = worlds
        self._free = asyncio.Semaphore(places)
        self._places = places
        self._episode_seconds = episode_seconds
        self._drain_seconds = drain_seconds
        self._runs: dict[Route, asyncio.Task[None]] = {}
        self._waiting: set[Route] = set()
        self._leaving = asyncio.Event()
        self._untold: Counter[str] = Counter()
        self._told: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.seconds = 0.0
        """Time that episodes have spent in their environments."""
        self.busy = 0
        """Number of episodes that are being played."""
        self._held, self._since = 0.0, time.monotonic()

    @property
    def slots(self) -> int:
        """Places that it offers."""
        return 0 if self._leaving.is_set() else self._places

    @property
    def held_seconds(self) -> float:
        """Time for which places were held by episodes since the start, added up, waiting for the model included."""
        self._hold(0)
        return self._held

    def _hold(self, change: int) -> None:
        """So many more episodes are being played from now on."""
        now = time.monotonic()
        self._held += self.busy * (now - self._since)
        self.busy, self._since = self.busy + change, now

    def stop(self) -> None:
        """Begins no more episodes, lets those that are being played end, then ends :meth:`run`."""
        self._leaving.set()

    async def run(self) -> None:
        """Serves until :meth:`stop`."""
        receiving = asyncio.create_task(self._receive())
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            await asyncio.wait((receiving, leaving), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()
            if self.busy:
                log.info(f"{self.busy} episodes have {self._drain_seconds:.0f} s to end")
            for route in self._waiting:
                self._runs[route].cancel()  # Handed back at once.
            for seconds in (self._drain_seconds, END_SECONDS):
                if not self._runs:
                    break
                _, left = await asyncio.wait(list(self._runs.values()), timeout=seconds)
                for task in left:
                    task.cancel()
        finally:
            receiving.cancel()
            leaving.cancel()
            await asyncio.gather(receiving, leaving, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            identity, *frames = await self._router.recv_multipart()
            try:
                request_id, request = read_request(frames)
            except WireError as error:
                self.counts["refused"] += 1
                log.warning(f"from {identity[:80]!r}: {error}")
                await self._refuse(identity, frames, str(error))
                continue
            route = (identity, request_id)
            match request:
                case RunRequest():
                    await self._begin(route, request)
                case CancelRequest():
                    task = self._runs.get((identity, request.request_id))
                    if task is not None:
                        task.cancel()
                    await self._answer(route, b"reply", done_reply(cancelled=task is not None))
                case _:
                    await self._answer(route, b"reply", done_reply())

    async def _refuse(self, identity: bytes, frames: list[bytes], why: str) -> None:
        try:
            request_id = read_id(frames[0]) if frames else ""
        except WireError:
            return
        await self._answer((identity, request_id), b"reply", refused_reply(why))

    async def _begin(self, route: Route, run: RunRequest) -> None:
        name = run.task_data.environment
        if self._leaving.is_set():
            await self._answer(route, b"reply", lost_reply())
        elif name not in self._worlds:
            there = ", ".join(self._worlds)
            why = f"this server has no environment {name[:80]!r}; it has {there}"
            await self._answer(route, b"reply", refused_reply(why))
        elif route in self._runs or len(self._runs) >= self._places + MOST_WAITING:
            await self._answer(route, b"reply", refused_reply("too many episodes wait for a place"))
        else:
            self._runs[route] = task = asyncio.create_task(self._run(route, run))
            task.add_done_callback(lambda _: self._runs.pop(route, None))

    async def _run(self, route: Route, run: RunRequest) -> None:
        name, trace = run.task_data.environment, route[1]
        try:
            self._waiting.add(route)
            async with self._free:
                self._waiting.discard(route)
                self._hold(1)
                try:
                    await self._answer(route, b"delta", opened(trace, name))
                    played = await self._play(self._worlds[name], run)
                finally:
                    self._hold(-1)
        except Lost as lost:
            self.counts["lost"] += 1
            log.warning(f"an episode of {name} is handed back: {lost}")
            why = "" if self._leaving.is_set() else str(lost)
            await self._answer(route, b"reply", lost_reply(why))
            return
        except asyncio.CancelledError:
            self._waiting.discard(route)
            self.counts["cancelled"] += 1
            gone = self._leaving.is_set()
            answer = lost_reply() if gone else refused_reply("Cancelled: the episode was ended")
            await self._answer(route, b"reply", answer)
            return
        self.counts["played" if played.failure is None else f"failed/{played.failure.value}"] += 1
        self.seconds += played.seconds
        if played.failure is not None:
            self._tell(f"{name}: {played.failure.value}", played.detail)
        await self._answer(route, b"delta", played_delta(trace, played))
        await self._answer(route, b"reply", played_reply(trace, name, played))

    def _tell(self, kind: str, detail: str) -> None:
        """Warns of failures of one kind at most once a minute, with their number."""
        now = time.monotonic()
        self._untold[kind] += 1
        if now - self._told.get(kind, -TELL_SECONDS) >= TELL_SECONDS:
            count = self._untold.pop(kind)
            self._told[kind] = now
            log.warning(f"{count} failed episode(s) of {kind}, the last one because: {detail}")

    async def _play(self, world: World, run: RunRequest) -> Played:
        try:
            async with asyncio.timeout(self._episode_seconds + SLACK_SECONDS):
                return await world.play(run, self._episode_seconds)
        except TimeoutError:
            return failed(
                Verdict.ENV_TIMEOUT,
                f"the episode took longer than environments.episode_seconds={self._episode_seconds:g}",
            )
        except Lost:
            raise
        except Exception as error:
            # A fault in one episode is no reason to lose the others.
            log.exception(f"an unexpected error while playing {run.task_data.environment}")
            return failed(Verdict.ENV_FAILED, f"{type(error).__name__}: {error}")

    async def _answer(self, route: Route, kind: bytes, data: bytes) -> None:
        identity, request_id = route
        await self._router.send_multipart([identity, request_id.encode(), kind, data])


def worlds_of(config: Config, hosts: Hosts, logs: Path) -> dict[str, World]:
    """What plays each environment of the config; what foreign servers print goes into the folder ``logs``."""
    worlds: dict[str, World] = {}
    for name, spec in config.environments.use.items():
        if isinstance(spec, VerifiersEnvironment):
            worlds[name] = VerifiersWorld(name, spec, hosts.family, logs / f"{file_name(name)}.log")
        else:
            worlds[name] = HostWorld(name, hosts)
    return worlds


def hosted(spec: AnyEnvironment) -> dict[str, Any] | None:
    """What a process of ours loads for an environment; None if it isn't played in one."""
    if isinstance(spec, VerifiersEnvironment):
        return None
    settings = spec.model_dump(mode="json")
    if isinstance(spec, AppWorldEnvironment):
        del settings["form"]
        root = Path(spec.root or ".").absolute()
        program, *rest = shlex.split(spec.command)
        reads = [root / word.rpartition("=")[2] for word in rest if "/" in word]
        if (found := shutil.which(program)) is not None:
            # Not resolved: the Python of a virtual environment is a link, and its neighbours aren't those of its target.
            path = Path(found).absolute()
            reads += [path, path.with_name("python")]
            # Its processes have working folders of their own.
            settings["command"] = shlex.join([str(path), *rest])
        loaded = {"form": "text", "target": APPWORLD, "params": settings}
        # A command may say itself where AppWorld's root is, and then AppWorld has nothing to do with the working directory.
        if spec.root is not None or os.path.exists(root / "data/tasks"):
            settings["root"] = str(root)
            loaded["outputs"] = str(root / "experiments/outputs")
            reads += [root, root / "data"]
        loaded["reads"] = [str(path) for path in reads if os.path.exists(path)]
        return loaded
    return settings


def check_folders(name: str, loaded: Mapping[str, Any]) -> None:
    """Looks whether the root of AppWorld is there, and whether its servers' folders can be made below it.

    Args:
        name: the environment's name.
        loaded: what a process loads for it (:func:`hosted`).

    Raises:
        TandemError: one of them isn't; a ``ConfigError`` where another attempt would end alike.
    """
    if loaded.get("target") != APPWORLD:
        return
    key, root = f"environments.use.{name}.root", loaded["params"]["root"]
    if root is None:
        return
    try:
        os.stat(root)
    except OSError as error:
        raise ConfigError(
            f"{key}: {root} can't be found ({error.strerror}): set it to the folder with AppWorld's data"
        ) from None
    outputs = loaded["outputs"]
    try:
        os.makedirs(outputs, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=outputs))
    except OSError as error:
        why = f"{key}: no folder can be made in {outputs} ({error.strerror})"
        if error.errno in disk.FULL:
            raise TandemError(why) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            why += ": let the user who starts Tandem write there"
        raise ConfigError(why) from None


def hosts_of(config: Config) -> Hosts:
    """The processes for the environments of the config that are played in ours.

    Raises:
        TandemError: as :func:`check_folders`.
    """
    settings = config.environments
    use = {name: loaded for name, spec in settings.use.items() if (loaded := hosted(spec))}
    for name, loaded in use.items():
        check_folders(name, loaded)
    return Hosts(
        use,
        Bounds(
            reset_seconds=settings.reset_seconds,
            step_seconds=settings.step_seconds,
            episode_seconds=settings.episode_seconds,
            memory_mb=settings.memory_mb,
        ),
        settings.episodes,
        # At the end, so that nothing there hides an installed module.
        [os.getcwd()],
    )


def main(join: JoinInfo, config: Config, *, name: str, folder: RunFolder | None) -> int:
    """Runs one environment server until SIGTERM, or until the run has ended.

    Args:
        join: the run.
        config: as Redis has it.
        name: member id.
        folder: the run's, where the logs of foreign servers go; without one they are kept until the end.

    Returns:
        0 after a drain.

    Raises:
        ConfigError: there are no environments, or one of them can't be loaded here.
        TandemError: one of them doesn't start, or Redis is gone.
    """
    if not config.environments.use:
        raise ConfigError(
            "this run has no environments, so there is nothing to serve: name one in environments.use"
        )
    adopt_orphans()
    if os.geteuid() != 0:
        # Processes of the same user could otherwise read the password of Redis out of this one.
        hide_memory()
    store = connect(join, name=name)
    try:
        with contextlib.ExitStack() as stack:
            if folder is not None:
                logs = folder.logs / name
                logs.mkdir(parents=True, exist_ok=True)
            else:
                logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-logs-")))
            asyncio.run(_serve(join, config, store, name, logs))
    finally:
        store.close()
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A server that may be asked."""

    server: Server
    hosts: Hosts
    endpoint: str
    """``tcp://host:port`` where it is bound."""
    public_key: str
    """Its CURVE key."""


@contextlib.asynccontextmanager
async def ready(
    config: Config, client_public: str, bind: str, logs: Path, drain_seconds: float
) -> AsyncIterator[Ready]:
    """A server with all environments of the config; SIGTERM stops it.

    Args:
        config: the run's config.
        client_public: CURVE key of the only clients that are let in.
        bind: address that is listened on.
        logs: folder for what foreign servers print.
        drain_seconds: time that episodes have to end once it is stopped.

    Raises:
        TandemError: an environment can't be made ready; a ``ConfigError`` where another attempt would end alike.
    """
    settings = config.environments
    hosts = hosts_of(config)
    worlds = worlds_of(config, hosts, logs)
    keys = new_keys()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(context, client_public)
    bound_socket, bound = bind_router(context, bind, keys, config.launch.port_range)
    bound_socket.setsockopt(zmq.LINGER, LINGER_MS)
    router = zmq.asyncio.Socket(bound_socket)
    server = Server(
        router,
        worlds,
        places=settings.episodes,
        episode_seconds=settings.episode_seconds,
        drain_seconds=drain_seconds,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _stop, server)
    try:
        for world in worlds.values():
            await world.start()
        yield Ready(server=server, hosts=hosts, endpoint=bound, public_key=keys.public)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        for world in worlds.values():
            await world.close()
        await hosts.close()
        router.close()
        authenticator.stop()
        context.term()


async def _serve(join: JoinInfo, config: Config, store: Store, name: str, logs: Path) -> None:
    settings = config.environments
    run, members = RunStore(store), Members(store)
    public, drain_seconds = run.curve_client().public, config.launch.drain_seconds / 2
    own = own_address(config.launch.bind, config.facing(join.host))
    async with ready(config, public, own, logs, drain_seconds) as found:
        server, hosts = found.server, found.hosts
        endpoint = reachable(found.endpoint, join.host, join.port)
        info = {
            "endpoint": endpoint,
            "public_key": found.public_key,
            "environments": list(settings.use),
            "slots": server.slots,
            "busy": 0,
            "pid": os.getpid(),
            "host": sockets_of_the_system.gethostname(),
        }
        await asyncio.to_thread(members.register, ROLE, name, info)
        log.info(f"plays {', '.join(settings.use)}, {settings.episodes} episodes at a time")
        if not is_loopback(config.launch.bind):
            log.info(f"bound beyond loopback at {endpoint}, with CURVE keys")
        beating = asyncio.create_task(_beat(server, hosts, run, members, name))
        serving = asyncio.create_task(server.run())
        await asyncio.wait((beating, serving), return_when=asyncio.FIRST_COMPLETED)
        if beating.done():
            server.stop()
            beating.result()
        await serving
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await asyncio.to_thread(members.leave, name)


def _stop(server: Server) -> None:
    disk.stop_waiting()
    server.stop()


async def _beat(server: Server, hosts: Hosts, run: RunStore, members: Members, name: str) -> None:
    """Tells Redis once a second how the server is, and ends it with the run."""
    host, ended = sockets_of_the_system.gethostname(), 0

    def tell() -> bool:
        members.beat(name, {"slots": server.slots, "busy": server.busy})
        figures = figures_of(server, hosts)
        about = {"role": ROLE, "pid": os.getpid(), "host": host, "time": time.time()}
        run.report(name, {**about, **figures})
        return run.state() in ("finished", "failed")

    while True:
        # A server that was started by hand has no supervisor to tell it.
        ended = ended + 1 if await asyncio.to_thread(tell) else 0
        if ended > 2:
            server.stop()
        await asyncio.to_thread(hosts.family.sweep)
        await asyncio.sleep(BEAT_SECONDS)


def figures_of(server: Server, hosts: Hosts) -> dict[str, Any]:
    """What a server reports about itself."""
    return {
        **{f"environments/{name}": count for name, count in server.counts.items()},
        "environments/seconds": server.seconds,
        "environments/held_seconds": server.held_seconds,
        "environments/busy": server.busy,
        "environments/slots": server.slots,
        "environments/processes": hosts.count,
        "environments/started": hosts.figures.started,
        "environments/killed": sum(hosts.figures.killed.values()),
    }
