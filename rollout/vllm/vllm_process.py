"""Runs vLLM: one ``AsyncLLM`` on an event loop in a thread of its own, and its processes.

vLLM's front end is in this process; its engine core and its workers (one per tensor-parallel rank)
are processes of their own. The front end has its own thread and loop, so that starting it, which
blocks for half a minute, holds up nobody, and its users can run in any loop.

Everything that depends on vLLM's version is in the files named ``vllm_…``. Where the versions allowed
by :mod:`.vllm_version` differ, the code tests for features, not for version numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import gc
import inspect
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
from pydantic import ValidationError

from ...common.config import VLLM_RANKS, VLLM_SETTINGS
from ...common.errors import ConfigError, DeadlineError, TandemError
from ...common.waiting import Wait
from ...common.weights.shared_memory import remove_left_behind
from . import vllm_version
from .vllm_extension import OWNER

log = logging.getLogger("tandem.rollout")

T = TypeVar("T")

EXTENSION = "tandem.rollout.vllm.vllm_extension.WorkerExtension"
"""Import path of the extension for vLLM's workers."""
CPU_CACHE_MB = 1024
"""Memory for keys and values if there is no GPU and nothing is set."""
SHUTDOWN_SECONDS = 10.0
"""How long vLLM's processes may take to end before vLLM kills them; ranks take five seconds."""
END_SECONDS = 15.0
"""How long their end may take in all before this process kills them."""


@dataclass(slots=True)
class Counters:
    """What vLLM has done since it was started; written by its front end's thread."""

    steps: int = 0
    """Number of batched steps in which a token was sampled."""
    sampled: int = 0
    """Number of sampled tokens."""
    prefilled: int = 0
    """Number of prompt tokens of started requests, including those found in the prefix cache."""


class VllmProcess:
    """vLLM, started once and stopped once."""

    def __init__(self, arguments: Mapping[str, Any], *, start_seconds: float = 600.0) -> None:
        """Imports nothing before :meth:`start`.

        Args:
            arguments: fields of vLLM's ``AsyncEngineArgs``; those that Tandem relies on are added.
            start_seconds: deadline for :meth:`start`.
        """
        self._arguments = dict(arguments)
        self._start_seconds = start_seconds
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._strangers: set[psutil.Process] = set()
        self._family: list[psutil.Process] = []
        self.counters = Counters()
        self.llm: Any = None
        """vLLM's ``AsyncLLM``; only to be used inside :meth:`run`."""

    @property
    def started(self) -> bool:
        """Whether vLLM is running."""
        return self.llm is not None

    @property
    def family(self) -> list[psutil.Process]:
        """vLLM's processes, once it has been started."""
        return list(self._family)

    async def start(self) -> None:
        """Starts vLLM with the model's weights from disk. Call it only once.

        Raises:
            DeadlineError: vLLM didn't start in time.
            TandemError: vLLM failed to start; its own messages are in the log.
        """
        vllm_version.require()
        remove_left_behind()
        ready: Future[None] = Future()
        since = time.monotonic()
        self._strangers = set(psutil.Process().children(recursive=True))
        self._thread = threading.Thread(target=self._main, args=(ready,), name="vllm", daemon=True)
        self._thread.start()
        wait = Wait("vLLM", "start", self._start_seconds)
        started = asyncio.wrap_future(ready)
        try:
            while not (await asyncio.wait([started], timeout=wait.pause))[0]:
                if wait.expired(log.warning):
                    await asyncio.to_thread(self._kill)
                    raise DeadlineError(
                        f"{wait}: its messages are above; a large model on a slow disk may need a "
                        f"longer rollout.vllm.start_seconds"
                    )
        except asyncio.CancelledError:
            self._kill(0.0)
            raise
        started.result()
        log.info(f"vLLM started in {time.monotonic() - since:.1f} s")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits a coroutine in the front end's loop, from any other loop."""
        return await asyncio.wrap_future(self.post(work))

    def post(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine in the front end's loop."""
        if self._loop is None or not self.started:
            work.close()
            raise TandemError("the engine isn't running: start() it first")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def stop(self) -> None:
        """Ends vLLM's processes; none is left on return."""
        loop, stop, thread = self._loop, self._stop, self._thread
        if thread is None:
            return
        self._thread = None
        if loop is not None and stop is not None and thread.is_alive():
            try:
                loop.call_soon_threadsafe(stop.set)
            except RuntimeError:
                pass  # It has ended in the meantime.
        await asyncio.to_thread(thread.join, END_SECONDS)
        if thread.is_alive():
            log.warning(f"vLLM's front end has not ended in {END_SECONDS:.0f} s; left behind")
        await asyncio.to_thread(self._kill)

    def _main(self, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except ConfigError as error:
            ready.set_exception(error)
        except Exception as error:
            if ready.done():
                log.exception("vLLM's front end ended")
            else:
                log.exception("vLLM did not start")
                ready.set_exception(
                    TandemError(f"vLLM did not start: {type(error).__name__}: {error}")
                )
        finally:
            self.llm = None

    async def _serve(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        llm = make_llm(self._arguments, self.counters)
        try:
            if hasattr(llm, "get_supported_tasks"):
                # The result is cached, so that registering a request never has to wait for it.
                await llm.get_supported_tasks()
            self._family = self._relatives()
            self.llm = llm
            ready.set_result(None)
            await self._stop.wait()
        finally:
            self.llm = None
            timed = "timeout" in inspect.signature(llm.shutdown).parameters
            llm.shutdown(**({"timeout": SHUTDOWN_SECONDS} if timed else {}))
            # At the interpreter's exit its finaliser would fail and print a traceback.
            del llm
            gc.collect()

    def _relatives(self) -> list[psutil.Process]:
        """vLLM's processes: the children that this process has gained since :meth:`start`."""
        children = psutil.Process().children(recursive=True)
        return [c for c in children if c not in self._strangers and not _is_helper(c)]

    def _kill(self, patience: float = END_SECONDS) -> None:
        """Kills vLLM's processes that are still alive after ``patience`` seconds."""
        family = {*self._family, *(self._relatives() if not self._family else ())}
        _, left = psutil.wait_procs(list(family), timeout=patience)
        for process in left:
            if patience:
                log.warning(f"process {process.pid} of vLLM has not ended and is killed")
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=END_SECONDS)


def _is_helper(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's resource tracker, which belongs to this process, not to vLLM."""
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def make_llm(arguments: Mapping[str, Any], counters: Counters) -> Any:
    """Makes an ``AsyncLLM`` in the loop that will use it; blocks until its processes are up.

    Raises:
        ConfigError: vLLM doesn't know an argument or refuses its value; nothing was started.
    """
    _prepare_environment()
    from vllm import AsyncEngineArgs

    check_arguments(arguments, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {
        # Importance ratios need the log-probs of the distribution that was sampled from.
        "logprobs_mode": "processed_logprobs",
        # Prompts come as token ids, and texts are decoded here.
        "skip_tokenizer_init": True,
        # A model folder's own temperature or top_p must not replace the requested ones.
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        # A check of new weights mustn't wait behind the groups that wait for it.
        "scheduling_policy": "priority",
        # Scoring at a temperature other than 1 takes a position's whole distribution.
        "max_logprobs": -1,
        "disable_log_stats": True,
        # Two workers with one seed would draw the same numbers.
        "seed": secrets.randbelow(2**31),
        "worker_extension_cls": EXTENSION,
    }
    if current_platform.is_cpu():
        settings |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_MB << 20}
        if not shared_out(arguments):
            # Runs the model in the engine core's own process, which saves a process with its copy
            # of vLLM, and a queue on which both would spin.
            settings["distributed_executor_backend"] = "uni"
            # Otherwise vLLM insists on a separate process for the model to bind its threads to cores.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # Compiling needs a C++ compiler and half a minute in the middle of the first step: one of
        # the sampler's functions is compiled whatever enforce_eager says.
        if arguments.get("enforce_eager") is not False:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    settings |= {name: value for name, value in arguments.items() if value is not None}
    try:
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**settings), stat_loggers=[_counter(counters)]
        )
    except ValidationError as error:
        # The configuration is read before anything starts, so trying again won't help.
        complaints = "; ".join(refused(each) for each in error.errors(include_url=False))
        raise ConfigError(f"vLLM refuses its settings (rollout.vllm): {complaints}") from None


def check_arguments(arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ``ConfigError`` with the nearest name if vLLM doesn't know an argument."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}?" if near else "see AsyncEngineArgs in vLLM's manual"
            if near and near[0] in VLLM_SETTINGS:
                meant = f"did you mean {VLLM_SETTINGS[near[0]]}?"
            raise ConfigError(
                f"rollout.vllm.args.{name}: the vLLM that is installed has no engine argument of "
                f"this name; {meant}"
            )


def refused(error: Mapping[str, Any]) -> str:
    """One of pydantic's complaints, with the value if it says little without it."""
    where = ".".join(map(str, error["loc"]))
    setting = f"{where}={error['input']!r}: " if where else ""
    return setting + str(error["msg"]).removeprefix("Value error, ")


def shared_out(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments ask for several ranks, each of which is a process."""
    return any((arguments.get(name) or 1) != 1 for name in VLLM_RANKS)


def _counter(counters: Counters) -> Any:
    """A stat logger for vLLM that counts."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
            del vllm_config, engine_index

        def record(
            self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any
        ) -> None:
            if iteration_stats is not None and iteration_stats.num_generation_tokens:
                counters.steps += 1
                counters.sampled += iteration_stats.num_generation_tokens
                counters.prefilled += iteration_stats.num_prompt_tokens

        def log_engine_initialized(self) -> None:
            pass

    return Counter


def _prepare_environment() -> None:
    """Sets variables of vLLM's environment that the user hasn't set."""
    os.environ[OWNER] = str(os.getpid())
    for name, value in {
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM's warnings are of no use to readers of a run's log.
        "VLLM_LOGGING_LEVEL": "ERROR",
        # A forked child would hold this process's sockets and locks.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # All ranks of an engine are on this host, so only a local address is bound.
        "VLLM_HOST_IP": "127.0.0.1",
        # On CPUs the ranks talk over gloo, which would listen on the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo",
        # Several workers share the host, so each has as many threads as it was given, on any core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # On GPUs float32 models have Triton's attention, whose products would have TF32's ten bits.
        "TRITON_F32_DEFAULT": "ieee",
    }.items():
        os.environ.setdefault(name, value)
