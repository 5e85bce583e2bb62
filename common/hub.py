"""Fetches models and data sets from a Hugging Face hub, or a mirror of one (``HF_ENDPOINT``), and verifies them.

Downloads go on where they were interrupted. Afterwards every file is compared with the digest that the
hub has for it, so that a damaged or truncated file is found before anything is trained with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from .errors import DataError
from .plain import one_line
from .run_folder import try_lock

log = logging.getLogger("tandem")

Kind = Literal["model", "dataset"]
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?"
)
CONVERTED = "refs/convert/parquet"
"""Branch on which the hub keeps a data set as parquet, whatever its own files are."""
DATA_ENDINGS = (".parquet", ".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
"""Endings of files that rows are read from, in a folder here or on a hub."""
MODEL_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.py",
    "LICENSE*",
    "README*",
)
"""Files of a model that are fetched. Weights in other formats are pickles, or copies of these."""
RETRIES = 5
"""Broken connections in a row after which a download is given up."""
READ_SECONDS = 60.0
"""Longest silence of the hub."""
PIECE_BYTES = 1 << 20
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
"""Of a model: a folder without any of these files has no tokenizer."""
SILENT_SECONDS = 600.0
"""Longest time for which a process that waits for another one's download sees nothing arrive. A connection is given up
before that, and the digests of some large files are compared."""
LOOK_SECONDS = 0.2
"""Time between two looks at another process's download."""
_INFORMATION = ("dataset_infos.json", "dataset_info.json", "state.json", "config.json")
"""JSON files that describe a data set and hold none of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubData:
    """A data set on a hub: ``org/set``, ``org/set:split`` or ``org/set/config:split``."""

    repo: str
    config: str | None
    split: str | None

    @classmethod
    def parse(cls, name: str) -> HubData | None:
        """What a name means; None if it can't be one.

        >>> HubData.parse("openai/gsm8k/main:train")
        HubData(repo='openai/gsm8k', config='main', split='train')
        >>> HubData.parse("data/train.parquet") is None
        True
        """
        match = _NAME.fullmatch(name)
        if match is None or name.endswith((*DATA_ENDINGS, ".csv")):
            return None
        return cls(**match.groupdict())

    def chosen(self, files: Iterable[str]) -> list[str]:
        """Those of a repository's files that have rows of this config and split.

        A file of a split lies in a folder of its name, or its own name begins so (``train-00000-of-00002``). Only where
        there is none, the split may be any word of a name: ``main_train``, but also ``train_1M``.
        """
        found = [file for file in files if self._has_rows(file)]
        if self.split is None:
            return found
        exact = [file for file in found if self._is_of_split(PurePosixPath(file))]
        return exact or [file for file in found if self.split in re.split(r"[/_.\-]", file)]

    def _has_rows(self, file: str) -> bool:
        path = PurePosixPath(file)
        if not file.endswith(DATA_ENDINGS) or path.name in _INFORMATION:
            return False
        return self.config is None or self.config in path.parts[:-1]

    def _is_of_split(self, path: PurePosixPath) -> bool:
        begun = f"{self.split}-", f"{self.split}."
        return self.split in path.parts[:-1] or path.name.startswith(begun)


def fetch(
    kind: Kind,
    repo: str,
    files: Sequence[Any],
    to: Path,
    *,
    revision: str,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Fetches files into a folder; those that are there already stay, and interrupted downloads are continued.

    Args:
        kind: what the repository holds.
        repo: ``org/name``.
        files: the hub's descriptions, as in :func:`listed`.
        to: the folder.
        revision: the commit.
        tell: called with what is being done.

    Raises:
        DataError: a file can't be fetched, or what came isn't the hub's file.
    """
    for one in files:
        name = PurePosixPath(one.rfilename)
        if (
            name.is_absolute()
            or ".." in name.parts
            or "\\" in one.rfilename
            or "\0" in one.rfilename
        ):
            raise DataError(
                f"{repo} names a file outside of its folder: {one.rfilename!r}; nothing was fetched"
            )
    hub = _library()
    for number, one in enumerate(files, 1):
        path = to / one.rfilename
        doing = f"{one.rfilename} ({number} of {len(files)})"
        if path.is_file() and _is(path, one):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        url = hub.hf_hub_url(
            repo, one.rfilename, repo_type=kind, revision=revision, endpoint=endpoint()
        )
        try:
            _download(url, part, one.size, doing, tell)
        except Exception as error:  # noqa: BLE001 - the transport's errors, and the disk's
            raise _problem(kind, repo, error) from None
        if not _is(part, one):
            part.unlink()
            raise DataError(
                f"{one.rfilename} of {repo} arrived damaged: its digest isn't the hub's; it was removed, so "
                f"run the command again"
            )
        part.replace(path)


def _download(
    url: str, part: Path, size: int | None, doing: str, tell: Callable[[str], None]
) -> None:
    """Appends what is missing of a file; after a broken connection it asks for the rest."""
    from huggingface_hub.utils import build_hf_headers, get_session

    failures = 0
    while size is None or not part.exists() or part.stat().st_size < size:
        start = part.stat().st_size if part.exists() else 0
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=READ_SECONDS, follow_redirects=True
            ) as answer:
                answer.raise_for_status()
                # A server without ranges sends the whole file.
                with open(part, "ab" if answer.status_code == 206 else "wb") as file:
                    for piece in answer.iter_bytes(PIECE_BYTES):
                        file.write(piece)
                        failures = 0
                        tell(f"{doing}: {file.tell() / (size or file.tell()):.0%}")
            return
        except OSError:
            raise  # Of the disk; the transport has errors of its own.
        except Exception as error:
            failures += 1
            if failures > RETRIES or getattr(error, "response", None) is not None:
                raise
            time.sleep(failures)


def listed(kind: Kind, repo: str, revision: str | None = None) -> Any:
    """The hub's description of a repository, with the sizes and digests of its files.

    Raises:
        DataError: there is no such repository, or the hub can't be reached.
    """
    hub = _library()
    try:
        return hub.HfApi(endpoint=endpoint()).repo_info(
            repo, repo_type=kind, revision=revision, files_metadata=True, timeout=30
        )
    except Exception as error:  # noqa: BLE001 - as above
        raise _problem(kind, repo, error) from None


def get_model(
    repo: str,
    to: Path,
    revision: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Fetches a model's weights, configuration and tokenizer into a folder that transformers loads."""
    about = listed("model", repo, revision)
    chosen = [
        one
        for one in about.siblings or ()
        if any(PurePosixPath(one.rfilename).match(pattern) for pattern in MODEL_PATTERNS)
    ]
    if not any(one.rfilename.endswith(".safetensors") for one in chosen):
        raise DataError(
            f"model {repo} has no safetensors: name a repository that has, since other formats of "
            f"weights can run code when they are loaded"
        )
    fetch("model", repo, chosen, to, revision=about.sha, tell=tell)


def get_data(
    name: str,
    to: Path,
    revision: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Fetches a data set's files with rows of a split.

    Raises:
        DataError: the name isn't one, or the data set has no such files.
    """
    wanted = HubData.parse(name)
    if wanted is None:
        raise DataError(f"{name} isn't the name of a data set: write org/set or org/set:split")
    about = listed("dataset", wanted.repo, revision)
    chosen = _chosen(wanted, about)
    if not chosen and revision is None:
        with contextlib.suppress(DataError):  # Not every data set has been converted.
            converted = listed("dataset", wanted.repo, CONVERTED)
            chosen = _chosen(wanted, converted)
            about = converted if chosen else about
    if not chosen:
        there = ", ".join(sorted(one.rfilename for one in about.siblings or ())[:8]) or "no files"
        raise DataError(f"data set {name} has no data files of that name (it has {there} …)")
    fetch("dataset", wanted.repo, chosen, to, revision=about.sha, tell=tell)


def _chosen(wanted: HubData, about: Any) -> list[Any]:
    names = set(wanted.chosen(one.rfilename for one in about.siblings or ()))
    return [one for one in about.siblings or () if one.rfilename in names]


def local(path: str, place: Path, revision: str | None = None) -> Path:
    """Where a data set is: at its place on this machine, or in the hub's cache, into which it is fetched.

    Args:
        path: as the user wrote it.
        place: where it would be on this machine.
        revision: branch, tag or commit on the hub; None = the newest.

    Raises:
        DataError: as :func:`cached_data` does.
    """
    return cached_data(path, revision) if is_hub_name(path, place) else place


def is_hub_name(path: str, place: Path) -> bool:
    """Whether a data set's path is a name on the hub rather than a file or folder here.

    Args:
        path: as the user wrote it.
        place: where it would be on this machine.
    """
    return not place.exists() and not place.parent.exists() and HubData.parse(path) is not None


def cached_data(name: str, revision: str | None = None) -> Path:
    """The folder of a data set in the hub's cache, fetched if it isn't there yet.

    Raises:
        DataError: as :func:`get_data` does; with ``HF_HUB_OFFLINE`` also if it isn't there; or another process
            fetches it, and doesn't get on.
    """
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    at = "" if revision is None else f"@{revision}"
    folder = home / "tandem" / f"{name}{at}".replace("/", "--").replace(":", "--")
    complete = folder / ".complete"
    if complete.exists():
        return folder
    if is_offline():
        raise DataError(
            f"data set {name} isn't on this machine, and HF_HUB_OFFLINE is set: fetch it elsewhere with "
            f"`tandem get data {name}`, and name the folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder, name):
        # Another process may have fetched it in the meantime.
        if not complete.exists():
            get_data(name, folder, revision)
            complete.touch()
    return folder


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """Holds the lock of a folder, since two processes would write into one another's parts of files.

    Raises:
        DataError: another process holds it, and nothing arrives.
    """
    place = folder / ".lock"
    with open(place, "ab") as lock:
        seen, end = -1, 0.0
        while not try_lock(lock.fileno()):
            if seen < 0:
                log.warning(f"waiting for another process that fetches {name}")
            if (arrived := _bytes_in(folder)) != seen:
                seen, end = arrived, time.monotonic() + SILENT_SECONDS
            if time.monotonic() > end:
                raise DataError(
                    f"another process fetches data set {name}, and nothing has arrived for {SILENT_SECONDS:.0f} s: "
                    f"`fuser {place}` names it; end that one, then start again"
                )
            time.sleep(LOOK_SECONDS)
        yield


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # It has got its name just now.
            total += file.stat().st_size
    return total


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder has a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _is(path: Path, one: Any) -> bool:
    """Whether a file is the one that the hub describes, by its SHA-256 or its digest in git."""
    lfs = one.lfs
    expected = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    git = expected is None
    if one.size is not None and path.stat().st_size != one.size:
        return False
    digest = hashlib.sha1(usedforsecurity=False) if git else hashlib.sha256()
    if git:
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest() == (one.blob_id if git else expected)


def is_offline() -> bool:
    """Whether ``HF_HUB_OFFLINE`` forbids to ask a hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def endpoint() -> str | None:
    """The mirror of ``HF_ENDPOINT``; None = the hub itself."""
    return os.environ.get("HF_ENDPOINT") or None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(
            "huggingface_hub isn't installed: pip install huggingface_hub, or name a local folder"
        ) from None
    return huggingface_hub


def _problem(kind: str, repo: str, error: Exception) -> DataError:
    where = endpoint() or "the Hugging Face hub"
    return DataError(
        f"{kind} {repo} can't be fetched from {where}: {one_line(error, kind=True)}. If this machine "
        f"has no connection, fetch it elsewhere with `tandem get` and name the folder"
    )
