"""New adapters for a running vLLM: its base model stays as it is, and each request names its adapter.

vLLM reads an adapter from a folder. It compares adapters by their names and caches them by their numbers, so
that a name or number that comes a second time would silently mean the adapter of the first time. So every
load gets a name, a number and a folder that are never used again::

    check names and shapes -> write the folder -> load it in every rank -> is it there?
      -> requests from now on use it -> running requests end between two tokens, and go on with it

Up to the last line but one a failure leaves everything as it was, and nothing is ever half loaded: an adapter
that isn't wholly there is used by no request. With ``rollout.recompute_kv`` the tokens of a running
request become part of the prompt of a new one, whose keys and values are computed with the new adapter;
without, running requests end with the adapter with which they began. Keys and values in the prefix cache
belong to an adapter's name. Once no request uses an old adapter any more, vLLM forgets it and its folder
is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...common.config.learner import LoraConfig
from ...common.errors import ConfigError, TandemError, WeightsError
from ...common.records import FinishReason, Float32Array, SamplingParams, Version
from ...common.run_folder import try_lock
from ...common.seeds import keyed_seed
from ..contract import Response
from ..engine import Likeliest, ParameterSpec
from . import vllm_requests
from .vllm_process import VllmProcess
from .vllm_weights import RPC_SECONDS, UNNAMED, VllmWeights, complaint

log = logging.getLogger("tandem.rollout")

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's ``max_lora_rank`` may have (``vllm/config/lora.py``)."""
PREFIX = "tandem-adapters-"
"""Beginning of the names of folders with adapters, among the system's temporary files."""
LOCK = "lock"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""PEFT's names for the files of an adapter."""
LOOK_SECONDS = 0.01

# Shared by all engines of the process, since several may use the same vLLM one after the other.
FUSED = {"qkv_proj": {"q_proj", "k_proj", "v_proj"}, "gate_up_proj": {"gate_proj", "up_proj"}}
"""Layers that vLLM fuses, with their parts."""
_numbers = itertools.count(1)


def arguments(lora: LoraConfig, versions: int, specs: Sequence[ParameterSpec]) -> dict[str, Any]:
    """vLLM's engine arguments for adapters.

    Args:
        lora: ``learner.lora``.
        versions: number of versions whose adapters samples may use at the same time.
        specs: the adapters' tensors.
    """
    layers = {spec.name.rpartition(".lora_")[0].rpartition(".")[2] for spec in specs}
    # Older versions know layers that they have fused by their own names alone.
    layers |= {fused for fused, parts in FUSED.items() if layers & parts}
    return {
        "enable_lora": True,
        # Else vLLM prepares the output head for adapters, too, if the model's family lists it (Llama, Qwen3), and
        # on CPUs then ends at the first request that asks for a prompt's log-probs (seen in 0.32).
        "lora_target_modules": sorted(layers),
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "max_loras": versions,
        # A new one is loaded before an old one is forgotten.
        "max_cpu_loras": versions + 1,
    }


class AdapterFolders:
    """This process's temporary folder with one folder for each adapter, which PEFT can read, too."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock: Any = None

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], lora: LoraConfig) -> Path:
        """Writes an adapter; it has its final name only once it is complete.

        Args:
            name: name of the folder.
            tensors: A and B of every layer, by the names by which they travel.
            lora: ``learner.lora``.

        Raises:
            WeightsError: there is no room for it, or it can't be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            root = self._root or self._make()
            beside, target = root / f".{name}", root / name
            beside.mkdir()
            layers = sorted({key.rpartition(".lora_")[0] for key in tensors})
            (beside / CONFIG).write_text(json.dumps(peft_config(layers, lora), indent=1))
            save_file(
                {f"base_model.model.{key}": tensor for key, tensor in tensors.items()},
                beside / TENSORS,
                {"format": "pt"},
            )
            beside.rename(target)
        except (OSError, SafetensorError) as error:
            place = self._root or tempfile.gettempdir()
            if self._root is not None:
                shutil.rmtree(self._root / f".{name}", ignore_errors=True)
            raise WeightsError(
                f"adapter {name} can't be written to {place}: {error}; free some space there, or set "
                f"TMPDIR to another folder"
            ) from None
        return target

    def _make(self) -> Path:
        remove_left_behind()
        while True:
            root = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = open(root / LOCK, "w")  # noqa: SIM115 - held until the folder is removed
            # Else another process took it for one that was left behind.
            if try_lock(self._lock.fileno()) and (root / LOCK).exists():
                self._root = root
                return root
            self._lock.close()

    def close(self) -> None:
        """Removes all of them."""
        root, self._root = self._root, None
        if root is not None:
            shutil.rmtree(root, ignore_errors=True)
            self._lock.close()


def remove_left_behind() -> int:
    """Removes this user's folders whose processes have died; returns how many."""
    removed = 0
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if root.stat().st_uid != os.getuid():
                continue
            with open(root / LOCK, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
                removed += 1
    return removed


def peft_config(layers: Sequence[str], lora: LoraConfig) -> dict[str, Any]:
    """An adapter's ``adapter_config.json``, as PEFT and vLLM read it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(layers),
        "inference_mode": True,
    }


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter in vLLM."""

    name: str
    number: int
    folder: Path
    users: set[_Use] = field(default_factory=set)
    """Requests that use it."""

    def request(self) -> Any:
        """It in the form that vLLM's requests name it in."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, self.number, str(self.folder))


@dataclass(slots=True, eq=False)
class _Use:
    """A running request."""

    name: str
    """vLLM's id of it."""
    may_move: bool
    """Whether it may go on with another adapter."""
    moves: bool = False
    """Whether it was ended so that it goes on with another adapter."""


class VllmAdapters(VllmWeights):
    """Which adapter vLLM samples with. Coroutines run in the front end's loop."""

    def __init__(
        self,
        process: VllmProcess,
        lora: LoraConfig,
        specs: Sequence[ParameterSpec],
        *,
        versions: int,
        recompute_kv: bool,
        version: Version | None,
    ) -> None:
        """Doesn't call vLLM yet; the other arguments are those of :class:`.vllm_engine.VllmEngine`.

        Args:
            process: a vLLM that was started with :func:`arguments`.
            lora: ``learner.lora``.
            specs: the adapters' tensors.
            versions: number of adapters that may be in use at the same time.
        """
        super().__init__(process, recompute_kv=recompute_kv, version=version)
        self._lora = lora
        self._specs = specs
        self._versions = versions
        self._folders = AdapterFolders()
        self._current: _Adapter | None = None
        # Those of which vLLM knows, the oldest first.
        self._adapters: list[_Adapter] = []
        # Requests that began before the first adapter.
        self._plain: set[_Use] = set()
        self._removals: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Has vLLM load adapters that are zero, to see that it can.

        Raises:
            ConfigError: it can't.
        """
        self._order = asyncio.Lock()
        zero = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in self._specs
        }
        try:
            tried = await self._write(zero, None)
            await self._add(tried)
        except WeightsError as error:
            raise ConfigError(
                f"rollout.engine=vllm can't load the adapters of learner.lora: {error}: choose other "
                f"learner.lora.targets, or set rollout.engine=torch"
            ) from None
        self._adapters.append(tried)
        self._retire()

    async def end(self) -> None:
        """Has vLLM forget all adapters."""
        self._current = None
        self._retire()
        if self._removals:
            await asyncio.wait(self._removals, timeout=RPC_SECONDS)

    def close(self) -> None:
        """Removes the adapters' folders, once vLLM reads them no more."""
        self._folders.close()

    async def _name(self, version: Version | None, seconds: float = RPC_SECONDS) -> None:
        """Renames the adapter in use. Requests that run keep the name with which they began."""
        self.version = version

    # Loading.

    async def take(self, tensors: Mapping[str, torch.Tensor], version: Version) -> None:
        """Loads an adapter, which all requests from now on use.

        Args:
            tensors: A and B of every layer, which were checked.
            version: version of the adapter.

        Raises:
            WeightsError: it couldn't be loaded; nothing was changed.
            TandemError: vLLM has died.
        """
        async with self._in_order():
            new = await self._write(tensors, version)
            since = time.perf_counter()
            await self._add(new)
            # From here to the abort nothing is awaited, so no request begins in between.
            self._adapters.append(new)
            self._current, self.version = new, version
            self.loads += 1
            moving = self._to_move()
            for use in moving:
                use.moves = True
            if moving:
                await self._answer(self._process.llm.abort([use.name for use in moving]))
            self.load_seconds += time.perf_counter() - since
            self._retire()

    def _to_move(self) -> list[_Use]:
        """Running requests that go on with the current adapter: all, or, without ``recompute_kv``, as many
        of the oldest adapters' as there are adapters too many for one batch of vLLM's."""
        old = [adapter for adapter in self._adapters if adapter is not self._current]
        if not self._recompute:
            used = [adapter for adapter in old if adapter.users]
            old = used[: max(0, len(used) + 1 - self._versions)]
        users = [use for adapter in old for use in adapter.users]
        if self._recompute:
            users += self._plain
        return [use for use in users if use.may_move]

    async def _write(
        self, tensors: Mapping[str, torch.Tensor], version: Version | None
    ) -> _Adapter:
        """Writes an adapter, while vLLM goes on sampling.

        Raises:
            WeightsError: it can't be written.
        """
        number = next(_numbers)
        name = f"{version or UNNAMED}-{number}-{secrets.token_hex(4)}"
        folder = await asyncio.to_thread(self._folders.write, name, tensors, self._lora)
        return _Adapter(name, number, folder)

    async def _add(self, adapter: _Adapter) -> None:
        """Has every rank of vLLM load an adapter.

        Raises:
            WeightsError: one of them couldn't; it isn't used by any request.
        """
        name, number = adapter.name, adapter.number
        try:
            llm = self._process.llm
            replies = await self._answer(
                llm.collective_rpc("tandem_add_adapter", args=(name, number, str(adapter.folder)))
            )
            problem = complaint(replies, name, 1)
            if not problem and number not in await self._answer(llm.list_loras()):
                problem = "vLLM doesn't list it afterwards"
        except TandemError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM wraps a rank's exception in one of its own
            problem = f"{type(error).__name__}: {error}"
        if not problem:
            return
        if self._process.llm is None or self._process.llm.errored:
            raise TandemError(f"vLLM has died: {problem}")
        await self._remove(adapter)
        raise WeightsError(f"adapter {name} can't be loaded by vLLM: {problem}")

    def _retire(self) -> None:
        """Begins to remove the adapters that no request uses any more."""
        for adapter in [one for one in self._adapters if one is not self._current]:
            if not adapter.users:
                self._adapters.remove(adapter)
                task = asyncio.create_task(self._remove(adapter))
                self._removals.add(task)
                task.add_done_callback(self._removals.discard)

    async def _remove(self, adapter: _Adapter) -> None:
        """Has vLLM forget an adapter, which then reads its folder no more, and removes the folder."""
        llm = self._process.llm
        try:
            if llm is not None and not llm.errored:
                await self._answer(llm.remove_lora(adapter.number))
        except Exception as error:  # noqa: BLE001 - it is used no more, and is dropped in time
            log.warning(f"vLLM couldn't forget adapter {adapter.name}: {error}")
        await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    # Requests.

    @contextlib.contextmanager
    def _used(self, name: str, *, may_move: bool) -> Iterator[tuple[_Use, _Adapter | None]]:
        """Records a request as a user of the adapter in use, which stays until it has ended."""
        use, adapter = _Use(name, may_move), self._current
        users = self._plain if adapter is None else adapter.users
        users.add(use)
        try:
            yield use, adapter
        finally:
            users.discard(use)
            self._retire()

    async def sample(
        self,
        names: list[str],
        gone: Callable[[], bool],
        context: list[int],
        sampling: SamplingParams,
        *,
        count: int,
        room: int,
        least: int = 0,
        before: tuple[int, ...] = (),
        seed: int | None = None,
        **how: Any,
    ) -> list[Response]:
        """Draws samples of one prompt; see :meth:`.VllmWeights.sample`.

        Args:
            before: the last tokens of the context, if an earlier request sampled them.
            seed: see :func:`.vllm_requests.sample`; a request that goes on has another one.
        """
        name = names[-1]
        # Of its beginning: while it runs, the adapter may be re-stamped.
        version = self.version
        with self._used(name, may_move=True) as (use, adapter):
            ended = await vllm_requests.sample(
                self._process.llm,
                name,
                context,
                sampling,
                count=count,
                room=room,
                least=least,
                salt=adapter.name if adapter is not None else UNNAMED,
                versions={},
                adapter=adapter.request() if adapter is not None else None,
                before=before,
                seed=seed,
                **how,
            )
        found = [_of(version, response) for response in ended]
        while use.moves and not (self.admits or gone()):
            await asyncio.sleep(LOOK_SECONDS)
        if not use.moves or gone():
            return found

        async def go_on(first: Response, count: int, index: int = 0) -> list[Response]:
            # Others may have had their turn since, and have aborted the group.
            if first.reason is not FinishReason.ABORT or gone():
                return [first] * count
            tokens = tuple(first.tokens.tolist())
            names.append(f"{names[0]}+{len(names)}")
            rest = await self.sample(
                names,
                gone,
                [*context, *tokens],
                sampling,
                count=count,
                room=min(room, sampling.max_new_tokens) - len(tokens),
                least=least - len(tokens),
                before=(*before, *tokens),
                # With the same one its generators would begin again with the noise of the first tokens.
                seed=None if seed is None else keyed_seed(seed, len(tokens), index) >> 1,
                **how,
            )
            return [_joined(first, one) for one in rest]

        if not any(len(one.tokens) for one in found):
            # It hadn't begun, so its samples still have one context.
            return await go_on(found[0], count)
        going_on = (go_on(each, 1, index) for index, each in enumerate(found))
        return [one for (one,) in await asyncio.gather(*going_on)]

    async def score(self, name: str, row: Sequence[int], temperature: float) -> Float32Array:
        """Log-probs of a row's tokens under the adapter in use; see :func:`.vllm_requests.score`."""
        with self._used(name, may_move=False) as (_, adapter):
            return await vllm_requests.score(
                self._process.llm,
                name,
                row,
                temperature,
                salt=name,
                adapter=adapter.request() if adapter is not None else None,
            )

    async def rank(self, name: str, row: Sequence[int], count: int) -> Likeliest:
        """The same with the most likely tokens; see :func:`.vllm_requests.rank`."""
        with self._used(name, may_move=False) as (_, adapter):
            return await vllm_requests.rank(
                self._process.llm,
                name,
                row,
                count,
                salt=name,
                adapter=adapter.request() if adapter is not None else None,
            )


def _of(version: Version | None, response: Response) -> Response:
    """A response whose tokens are all of one version."""
    length = len(response.tokens)
    return replace(response, spans=((version, 0, length),) if version and length else ())


def _joined(first: Response, rest: Response) -> Response:
    """A sample that one request began and others went on with."""
    start = len(first.tokens)
    spans = [*first.spans]
    for version, begin, end in rest.spans:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], start + end)
        else:
            spans.append((version, start + begin, start + end))
    return Response(
        tokens=np.concatenate([first.tokens, rest.tokens]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        spans=tuple(spans),
        reason=rest.reason,
    )
