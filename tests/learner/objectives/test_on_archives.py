"""Every objective on an archive: its parameters move, or it is refused before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.common.config import Config, to_yaml
from tandem.common.errors import DataError
from tandem.common.objectives import OBJECTIVES
from tandem.common.records import Episode, FinishReason, Source, Verdict
from tandem.common.run_folder import RunFolder
from tandem.common.telemetry import Clock
from tandem.launch.cli import main
from tandem.launch.host.archive_check import check_archive
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.learner.engine.critic import load_critic
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.loop.reporter import Reporter
from tandem.learner.metrics.reports import describe, text_of
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.rows.sources import ArchiveSource
from tandem.learner.updates.updates import Updates
from tandem.replay import archive
from tandem.replay.archive_columns import ArchivedGroup
from tandem.replay.inspecting.rows import of_record
from tandem.replay.ledger_records import Waiting

STEPS = 2

# Rewards of a group's four own samples, and whether it has a trace, whose reward is 1.
ARCHIVES: dict[str, tuple[Sequence[float], bool]] = {
    "failed with traces": ((0, 0, 0, 0), True),
    "solved with traces": ((1, 1, 1, 1), True),
    "some right": ((1, 0, 1, 0), False),
    "failed": ((0, 0, 0, 0), False),
    "solved": ((1, 1, 1, 1), False),
}


@pytest.fixture(scope="module")
def model(made_up: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made_up.tiny_model().save_pretrained(folder)
    made_up.tiny_teacher().save_pretrained(folder / "teacher")
    return folder


def scored(model: Any, prompt: Any, tokens: Any) -> Any:
    """Log-probs of a response's tokens, ``[T]`` float32: a clip would stop those that are made up."""
    ids = torch.tensor([*prompt, *tokens])
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    places = torch.arange(len(prompt) - 1, len(ids) - 1)
    return logprobs[places, ids[len(prompt) :]].numpy()


def write(folder: Path, made_up: ModuleType, paid: Sequence[float], *, traces: bool) -> Path:
    """An archive of two steps of two groups."""
    folder.mkdir()
    model = made_up.tiny_model()
    for step in range(1, STEPS + 1):
        groups = []
        for place, mixed in enumerate(made_up.groups_of(2, step=step - 1)):
            samples = tuple(
                replace(
                    sample,
                    reward=float(reward),
                    logprobs=scored(model, mixed.group.prompt_tokens, sample.tokens),
                )
                for sample, reward in zip(mixed.group.samples, paid, strict=True)
            )
            groups.append(
                ArchivedGroup(
                    step=step,
                    place=place,
                    group=replace(mixed.group, samples=samples),
                    traces=(made_up.trace(place),) if traces else (),
                    replaced=(),
                    row=None,
                )
            )
        archive.write(folder / archive.file_name(step), groups)
    return folder


@pytest.fixture(scope="module")
def archives(made_up: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each of :data:`ARCHIVES`, to read."""
    folder = tmp_path_factory.mktemp("archives")
    return {
        kind: write(folder / kind, made_up, paid, traces=traces)
        for kind, (paid, traces) in ARCHIVES.items()
    }


def config_of(made_up: ModuleType, folder: Path, model: Path, objective: dict[str, Any]) -> Any:
    steps = islice(archive.steps(folder), STEPS)
    _, most = map(max, zip(*map(archive.sizes, steps), strict=True))
    return made_up.config_of(
        model={"path": str(model)},
        data={"archive": str(folder)},
        rollout={"group_size": most},
        learner={
            "source": "offline",
            "objective": objective,
            "teacher": str(model / "teacher") if objective["name"] == "distill" else None,
        },
        run={"steps": STEPS},
    )


def moves(made_up: ModuleType, config: Any) -> bool:
    """Whether training on the archive changes a parameter of the model, and by more than rounding errors,
    which Adam turns into steps of their own: those of a loss that is 0 where the policy is its reference."""
    device, tiny = torch.device("cpu"), made_up.tiny_model()
    critic = load_critic(config, device, tiny.config.vocab_size)
    engine = DeepSpeedEngine(tiny, config, device, critic)
    updates = Updates(engine, config)
    before = {name: tensor.clone() for name, tensor in engine.parameters()}
    source = ArchiveSource(config, Path(config.data.archive))
    steepest = 0.0
    for step in range(1, source.total_steps + 1):
        fetch = source.take(step, 1)
        assert not isinstance(fetch, Waiting)
        groups: list[MixedGroup] = fetch().groups
        outcome = updates.train(step, groups, lr=1e-3)
        assert outcome.applied
        steepest = max(steepest, outcome.metrics.get("train/grad_norm", 0.0) if step == 1 else 0.0)
    return steepest > 1e-5 and any(
        not torch.equal(tensor, before[name]) for name, tensor in engine.parameters()
    )


def is_refused(config: Any) -> bool:
    try:
        check_archive(config)
    except DataError as error:
        return "learns nothing from data.archive" in str(error)
    return False


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_is_not_refused_moves_the_parameters(
    name: str, kind: str, made_up: ModuleType, model: Path, archives: dict[str, Path]
) -> None:
    config = config_of(made_up, archives[kind], model, {"name": name})
    assert moves(made_up, config) is not is_refused(config)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("kind", ARCHIVES)
@pytest.mark.parametrize(
    "settings",
    [
        {"name": "grpo", "advantage": "own_mean"},
        {"name": "grpo", "advantage": "none"},
        {"name": "grpo", "advantage": "max_rl"},
        {"name": "grpo", "advantage": "reinforce_pp"},
        {"name": "grpo", "entropy_coefficient": 0.1},
        # Where the policy is the reference, only this estimator has a gradient.
        {"name": "grpo", "kl_coefficient": 0.1, "kl_form": "k3"},
        {"name": "grpo", "kl_coefficient": 0.1, "kl_form": "kl"},
        {"name": "luffy", "advantage": "own_mean_std"},
        {"name": "luffy", "advantage": "none"},
        {"name": "kto", "advantage": "own_mean"},
        {"name": "kto", "advantage": "none"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_keys_of_an_objective_count(
    settings: dict[str, Any],
    kind: str,
    made_up: ModuleType,
    model: Path,
    archives: dict[str, Path],
) -> None:
    config = config_of(made_up, archives[kind], model, settings)
    assert moves(made_up, config) is not is_refused(config)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("paid", [(1, -1, 1, -1), (0, 0, -1, 0), (0.1, 0.2, -0.3, 0)])
def test_max_rl_learns_nothing_where_the_mean_reward_is_not_above_0(
    paid: Sequence[float], made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "archive", made_up, paid, traces=False)
    for name, refused in (("grpo", False), ("max_rl", True)):
        config = config_of(made_up, folder, model, {"name": name})
        assert moves(made_up, config) is not refused
        assert is_refused(config) is refused


def changed(folder: Path, **values: Any) -> None:
    """Changes all own samples of an archive."""
    for path in folder.iterdir():
        groups = [
            ArchivedGroup(
                step=one.step,
                place=one.place,
                group=replace(
                    one.group, samples=tuple(replace(s, **values) for s in one.group.samples)
                ),
                traces=one.traces,
                replaced=one.replaced,
                row=one.row,
            )
            for one in archive.read(path)
        ]
        archive.write(path, groups)


def test_samples_that_are_masked_or_without_a_verdict_teach_nothing(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    changed(folder, finish_reason=FinishReason.LENGTH)
    for name in ("grpo", "dpo"):
        for truncation, refused in (("wrong", False), ("mask", True)):
            settings = {"name": name, "truncation": truncation}
            assert is_refused(config_of(made_up, folder, model, settings)) is refused
    changed(folder, finish_reason=FinishReason.DEADLINE)
    assert is_refused(config_of(made_up, folder, model, {"name": "grpo"}))
    changed(folder, finish_reason=FinishReason.STOP, verdict=None)
    assert is_refused(config_of(made_up, folder, model, {"name": "grpo"}))


def test_samples_that_begin_with_a_trace_are_left_to_the_learner(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "archive", made_up, (0, 0, 0, 0), traces=False)
    assert is_refused(config_of(made_up, folder, model, {"name": "sft"}))
    (path,) = (folder / archive.file_name(1),)
    one, *rest = archive.read(path)
    first, *others = one.group.samples
    source = first.source.copy()
    source[0] = Source.EXPERT
    group = replace(one.group, samples=(replace(first, source=source), *others))
    begun = ArchivedGroup(step=1, place=0, group=group, traces=(), replaced=(), row=None)
    archive.write(path, [begun, *rest])
    assert not is_refused(config_of(made_up, folder, model, {"name": "sft"}))


def test_no_more_steps_are_looked_at_than_a_run_may_be_idle(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Only the second step has a signal; a damaged third one isn't read."""
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    failed = write(tmp_path / "failed", made_up, (0, 0, 0, 0), traces=False)
    (failed / archive.file_name(1)).replace(folder / archive.file_name(1))
    (folder / archive.file_name(3)).write_bytes(b"damaged")
    config = config_of(made_up, folder, model, {"name": "grpo"})
    check_archive(config)
    short = config.learner.model_copy(update={"max_idle": 1})
    with pytest.raises(
        DataError, match=r"in its first 1 steps \(2 groups, 8 own samples, 0 expert"
    ):
        check_archive(config.model_copy(update={"learner": short}))


def with_sections(config: Config, **sections: dict[str, Any]) -> Config:
    """The config with other settings in some of its sections, unchecked."""
    made = {name: getattr(config, name).model_copy(update=new) for name, new in sections.items()}
    return config.model_copy(update=made)


def with_limits(config: Config, prompts: int, responses: int, steps: int = STEPS) -> Config:
    return with_sections(
        config,
        data={"max_prompt_tokens": prompts},
        rollout={"max_new_tokens": responses},
        run={"steps": steps},
    )


def test_an_episode_must_fit_with_its_prompt(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    """As in the run that made it, where a turn is bounded and then the whole of them."""
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    path = folder / archive.file_name(1)
    one, other = archive.read(path)
    episode = Episode(environment="sums", reward=1.0, failure=None, detail="", turns=(), metrics={})
    first, *rest = one.group.samples
    longer = {
        name: np.resize(getattr(first, name), 40) for name in ("tokens", "source", "logprobs")
    }
    played = replace(first, **longer, spans=(), token_rewards=None, episode=episode)
    whole = replace(one.group, samples=(played, *rest), prompt_tokens=np.zeros(30, np.int32))
    archive.write(path, [dataclasses.replace(one, group=whole), other])
    config = config_of(made_up, folder, model, {"name": "grpo"})
    for fitting in (with_limits(config, 50, 20, 1), with_limits(config, 29, 41, 1)):
        check_archive(fitting)
        fetch = ArchiveSource(fitting, folder).take(1, 1)
        assert not isinstance(fetch, Waiting)
        fetch()
    short = with_limits(config, 49, 20, 1)
    with pytest.raises(
        DataError, match=r"episodes of up to 70 .*max_new_tokens=20 to at least 21$"
    ):
        check_archive(short)
    fetch = ArchiveSource(short, folder).take(1, 1)
    assert not isinstance(fetch, Waiting)
    with pytest.raises(DataError, match="has a prompt of 30 tokens and responses of up to 40"):
        fetch()


def test_the_longest_rows_of_all_steps_of_the_run_must_fit(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Only the second step is too long, in the prompt of one group and in the trace of another."""
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=True)
    path = folder / archive.file_name(2)
    one, other = archive.read(path)
    long = np.zeros(30, np.int32)
    prompt = replace(one.group, prompt_tokens=long)
    longest = max(len(sample.tokens) for sample in one.group.samples + other.group.samples)
    assert longest < 20
    trace = replace(other.traces[0], tokens=long[:20], logprobs=None)
    archive.write(
        path,
        [
            dataclasses.replace(one, group=prompt),
            dataclasses.replace(other, traces=(trace,)),
        ],
    )
    config = config_of(made_up, folder, model, {"name": "grpo"})

    def limited(prompts: int, responses: int, steps: int = STEPS) -> Config:
        return with_limits(config, prompts, responses, steps)

    check_archive(limited(30, 20))
    check_archive(limited(29, 19, steps=1))
    with pytest.raises(DataError, match=r": raise data\.max_prompt_tokens=29 to at least 30$"):
        check_archive(limited(29, 20))
    both = r"30 tokens and responses of up to 20: .*=29 to at least 30 and rollout.*=19 to at least 20$"
    with pytest.raises(DataError, match=both):
        check_archive(limited(29, 19))
    with pytest.raises(DataError, match=r"raise rollout\.max_new_tokens=1 to at least"):
        check_archive(limited(30, 1, steps=1))


def sized(config: Config, size: int, steps: int = STEPS) -> Config:
    return with_sections(config, rollout={"group_size": size}, run={"steps": steps})


def test_the_group_size_is_that_of_the_archives_largest_groups(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Only the second step has groups of five rows."""
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    traced = write(tmp_path / "traced", made_up, (1, 0, 1, 0), traces=True)
    (traced / archive.file_name(2)).replace(folder / archive.file_name(2))
    config = config_of(made_up, folder, model, {"name": "dpo"})
    check_archive(sized(config, 5))
    check_archive(sized(config, 4, steps=1))
    for size in (2, 4, 6, 8):
        with pytest.raises(
            DataError, match=rf"groups of up to 5 .*={size}: set rollout\.group_size=5$"
        ):
            check_archive(sized(config, size))


def test_rows_that_a_group_lacks_are_of_its_size(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Samples without a verdict, those that a trace replaced, and traces that a new reward leaves out."""
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    path = folder / archive.file_name(1)
    one, _ = archive.read(path)
    config = sized(config_of(made_up, folder, model, {"name": "grpo"}), 4, steps=1)
    silent, replaced, *rest = one.group.samples
    silent = replace(silent, verdict=Verdict.JUDGE_FAILED)
    trace = made_up.trace(0)
    kinds = {
        "replaced": ((silent, *rest), (trace,), (replaced,), ()),
        "instead of the one without a verdict": ((silent, replaced, *rest), (trace,), (), ()),
        "left out": ((silent, *rest), (), (), (trace.trace_id,)),
    }
    for samples, traces, gone, names in kinds.values():
        group = replace(one.group, samples=samples, trace_ids=names)
        made = dataclasses.replace(one, group=group, traces=traces, replaced=gone)
        archive.write(path, [made, dataclasses.replace(made, place=1)])
        check_archive(config)


def test_a_run_that_began_with_another_size_goes_on_with_it(
    made_up: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed run can't change its group size. This one is refused for its objective, which is looked at later."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    words = ["learner.source=offline", "data.archive=archive", "learner.objective.name=sft"]
    assert main(["offline", "miniature", *words]) == DataError.exit_code
    assert "set rollout.group_size=4" in capsys.readouterr().err
    opening = open_folder(load("miniature"), words, fresh=False)
    opening.folder.make()
    opening.folder.config.write_text(to_yaml(opening.config))
    opening.folder.write_run({**opening.run, "overrides": words, "state": "stopped"})
    assert main(["offline", "miniature", *words]) == DataError.exit_code
    assert "learner.objective.name=sft learns nothing" in capsys.readouterr().err


def test_groups_of_nothing_have_no_size(made_up: ModuleType, model: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    config = config_of(made_up, folder, model, {"name": "grpo"})
    for path in sorted(folder.iterdir()):
        one, _ = archive.read(path)
        archive.write(path, [dataclasses.replace(one, group=replace(one.group, samples=()))])
    check_archive(config)


@pytest.mark.parametrize("traces", [1, 2])
def test_an_archive_of_an_offline_run_takes_the_size_that_the_refusal_names(
    made_up: ModuleType, tmp_path: Path, traces: int
) -> None:
    """Its groups have traces alone: of a pair two, and one otherwise."""
    folder = tmp_path / "archive"
    folder.mkdir()
    (mixed,) = made_up.groups_of(1, step=0)
    group = replace(mixed.group, samples=())
    named = tuple(made_up.trace(number) for number in range(traces))
    one = ArchivedGroup(step=1, place=0, group=group, traces=named, replaced=(), row=None)
    archive.write(folder / archive.file_name(1), [one])
    preset, words = load("miniature-sft"), [f"data.archive={folder}"]
    with pytest.raises(DataError, match=r"set rollout\.group_size=") as refusal:
        check_archive(preset.resolve(words))
    check_archive(preset.resolve([*words, str(refusal.value).rpartition("set ")[2]]))


def test_the_refusal_names_those_that_would_learn_and_nothing_is_started(
    made_up: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "archive", made_up, (1, 0, 1, 0), traces=False)
    words = ("miniature", "learner.source=offline", "data.archive=archive", "rollout.group_size=4")
    assert main(["offline", *words, "learner.objective.name=sft"]) == DataError.exit_code
    said = capsys.readouterr().err
    assert "learner.objective.name=sft learns nothing from data.archive=archive" in said
    assert "no group has an expert trace: choose one of grpo, dr_grpo, " in said
    assert "sft," not in said.partition("choose one of")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["archive"]


def test_tokens_of_an_archive_keep_their_lag_whatever_step_takes_them(
    made_up: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Step 101 had been sampled by the version before its own, and is the first one now; so it is in what this run
    tells of its samples, and where this run's own archive is trained on."""
    folder, again = tmp_path / "archive", RunFolder(tmp_path / "again")
    folder.mkdir()
    again.make()
    groups = [
        ArchivedGroup(
            step=101,
            place=place,
            group=replace(mixed.group, samples=mixed.group.samples[1:]),
            traces=(made_up.trace(place),),
            replaced=mixed.group.samples[:1],
            row=None,
        )
        for place, mixed in enumerate(made_up.groups_of(2, step=99))
    ]
    archive.write(folder / archive.file_name(101), groups)
    for source in (folder, again.archive):
        config = config_of(made_up, source, model, {"name": "grpo"})
        for step in (1, 2):
            fetch = ArchiveSource(config, source).take(step, 1)
            assert not isinstance(fetch, Waiting)
            batch = fetch()
            lag = rows_of(batch.groups, step=step, temperature=1.0, baseline="group_mean").lag
            assert set(lag.tolist()) == {-1, 1}
            assert describe(step, batch.groups)["replay/staleness_mean"] == 1
            told = [row.metadata for row in of_record(text_of(step, batch.groups[0]))]
            assert [one["staleness"] for one in told if one["source"] == "own"] == [1] * 4
            Reporter(None, config, again, "learner-0", Clock(), 9).archive(batch)  # type: ignore[arg-type]
