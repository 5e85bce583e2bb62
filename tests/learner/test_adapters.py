"""Adapters: the update by the formula, what stays as it is, what is kept, and what is written at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from tandem.common.adapters import adapted_layers, adapter_tensors
from tandem.common.errors import ConfigError, DataError
from tandem.learner.adapters import identity, require_same
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.engine.model_folder import adapter_folder
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import make
from tandem.learner.resume.state_files import POLICY, StateFiles
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.rows.packing import plan
from tandem.learner.scored import fixed_rows, score
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")
CONSTANT = 12.0 * 16
CLIP = 0.1
LORA = {"rank": 3, "alpha": 12.0}
SCALE = 4.0
Make = Callable[..., DeepSpeedEngine]


@pytest.fixture
def engines(made_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes engines with adapters on equal tiny models."""

    def make_engine(
        stage: int = 0, *, dtype: str = "float32", seed: int = 3, **learner: Any
    ) -> DeepSpeedEngine:
        monkeypatch.setattr(
            "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
        )
        learner = {"zero_stage": stage, "lora": LORA, **learner}
        config = made_up.config_of(learner=learner, model={"dtype": dtype}, run={"seed": seed})
        model = made_up.tiny_model(dtype=getattr(torch, dtype))
        return DeepSpeedEngine(model, config, CPU)

    return make_engine


def micro_batches(rows: Any, budget: int = 4096) -> tuple[list[Any], dict[str, float]]:
    objective = make("luffy")
    scalars = {k: float(v) for k, v in objective.statistics(rows).items()} | {"constant": CONSTANT}
    parts = plan(rows.forward_lengths.numpy(), np.arange(rows.count), budget=budget)[0]
    return [micro_batch(rows.select(torch.from_numpy(part))) for part in parts], scalars


def trained(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.parameters()}


def base(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.base_tensors()}


def train(engine: DeepSpeedEngine, made_up: ModuleType, steps: int = 1, lr: float = 0.01) -> None:
    micros, scalars = micro_batches(made_up.random_rows())
    for _ in range(steps):
        assert engine.update(micros, make("luffy"), scalars, lr=lr).applied


def by_hand(
    made_up: ModuleType, start: dict[str, Tensor], steps: int, lr: float
) -> tuple[dict[str, Tensor], list[float]]:
    """The adapters after AdamW's steps in float64, from W + s·B·A in the plain model, and each gradient's norm."""
    model = made_up.tiny_model().double()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    policy = Policy(model)
    adapters = {name: t.double().requires_grad_() for name, t in start.items()}
    moments = {name: (torch.zeros_like(t), torch.zeros_like(t)) for name, t in adapters.items()}
    (micro,), scalars = micro_batches(made_up.random_rows())
    norms = []
    for step in range(1, steps + 1):
        merged = dict(weights)
        for name in adapters:
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                product = adapters[f"{layer}.lora_B.weight"] @ adapters[name]
                merged[f"{layer}.weight"] = weights[f"{layer}.weight"] + SCALE * product
        logprobs, entropy = functional_call(
            policy,
            {f"model.{name}": tensor for name, tensor in merged.items()},
            (micro.input_ids, micro.index, micro.targets, micro.temperature),
        )
        rows = micro.rows.with_columns(logprobs=logprobs, entropy=entropy)
        loss, _ = make("luffy").loss(rows, scalars)
        gradients = torch.autograd.grad(loss, list(adapters.values()))
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        norms.append(norm)
        for (name, value), gradient in zip(list(adapters.items()), gradients, strict=True):
            gradient = gradient * min(1.0, CLIP / (norm + 1e-6))
            first, second = moments[name]
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            moments[name] = first, second
            root = (second / (1 - 0.95**step)).sqrt() + 1e-3
            moved = value.detach() - lr * first / (1 - 0.9**step) / root
            adapters[name] = moved.requires_grad_()
    return {name: tensor.detach() for name, tensor in adapters.items()}, norms


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_updates_are_those_of_the_formula(
    stage: int, checkpointing: bool, engines: Make, made_up: ModuleType
) -> None:
    optimizer = {"grad_clip": CLIP, "eps": 1e-3}
    engine = engines(stage, optimizer=optimizer, gradient_checkpointing=checkpointing)
    expected, norms = by_hand(made_up, trained(engine), 3, 1e-2)
    assert min(norms) > CLIP  # or the clip would go untested
    before = base(engine)
    micros, scalars = micro_batches(made_up.random_rows())
    for norm in norms:
        result = engine.update(micros, make("luffy"), scalars, lr=1e-2)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    found = trained(engine)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], atol=1e-6, rtol=0, msg=name)
        assert float(tensor.abs().max()) > 1e-3, name
    after = base(engine)
    assert after.keys() == before.keys() == made_up.tiny_model().state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "mlp.down_proj"]])
def test_what_is_published_has_the_names_shapes_and_order_of_the_contract(
    targets: Any, engines: Make, made_up: ModuleType
) -> None:
    engine = engines(lora={**LORA, "targets": targets})
    lora = engine.config.learner.lora
    assert lora is not None
    layers = adapted_layers(made_up.tiny_model(), lora)
    expected = adapter_tensors(layers, 3)
    assert [(name, tuple(t.shape)) for name, t in engine.parameters()] == expected
    assert len(expected) == 2 * 2 * (7 if targets == "all-linear" else 2)
    assert engine.trained_count() == sum(math.prod(shape) for _, shape in expected)
    plain = made_up.tiny_model()
    assert engine.parameter_count() == sum(p.numel() for p in plain.parameters())


def test_the_start_is_the_base_and_comes_from_the_seed(engines: Make) -> None:
    torch.manual_seed(1)
    first = trained(engines())
    torch.manual_seed(2)
    again, other = trained(engines()), trained(engines(seed=4))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if "lora_B" in name:
            assert not tensor.any()
        else:
            assert not torch.equal(tensor, other[name])
            # PEFT's own: uniform up to 1/√inputs.
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < float(tensor.abs().max()) <= bound
    assert len({tuple(t.flatten().tolist()) for n, t in first.items() if "lora_A" in n}) == 14


@pytest.mark.parametrize("stage", [0, 1])
def test_bf16_adapters_have_float32_masters(stage: int, engines: Make, made_up: ModuleType) -> None:
    """A hundred steps of 2e-6 move A by 2e-4, although each is less than half the distance of bf16 numbers."""
    engine = engines(stage, dtype="bfloat16", optimizer={"grad_clip": 0.0, "eps": 1e-12})
    before = trained(engine)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    train(engine, made_up, steps=1, lr=0.01)
    begun = trained(engine)
    train(engine, made_up, steps=100, lr=2e-6)
    moved = [
        int(((tensor != begun[name]) & (begun[name].abs() > 0.02)).sum())
        for name, tensor in engine.parameters()
    ]
    assert sum(moved) > 10


@pytest.mark.parametrize("stage", [0, 3])
def test_with_adapters_off_it_is_the_base(stage: int, engines: Make, made_up: ModuleType) -> None:
    engine = engines(stage, gradient_checkpointing=True)
    micros, _ = micro_batches(made_up.random_rows())
    expected = [Policy(made_up.tiny_model()).score(micro)[0] for micro in micros]
    train(engine, made_up, steps=3)
    found = [logprobs for logprobs, _ in engine.score(micros, base=True)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    adapted = [logprobs for logprobs, _ in engine.score(micros)]
    assert float((adapted[0] - expected[0]).abs().max()) > 0.1
    assert engine.trained_count() > 0
    train(engine, made_up)


def test_dropout_is_only_in_training_passes(engines: Make, made_up: ModuleType) -> None:
    engine = engines(lora={**LORA, "dropout": 0.5}, gradient_checkpointing=True)
    train(engine, made_up, steps=3)
    micros, scalars = micro_batches(made_up.random_rows())
    scored = [engine.score(micros)[0][0] for _ in range(2)]
    assert torch.equal(*scored)
    torch.manual_seed(5)
    results = [engine.update(micros, make("luffy"), scalars, lr=0.0) for _ in range(2)]
    torch.manual_seed(5)
    again = engine.update(micros, make("luffy"), scalars, lr=0.0)
    assert not torch.equal(results[0].logprobs[0], scored[0])
    assert not torch.equal(results[0].logprobs[0], results[1].logprobs[0])
    assert torch.equal(results[0].logprobs[0], again.logprobs[0])
    # The recomputed activations drop what the first pass dropped.
    assert results[0].grad_norm == again.grad_norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_has_only_adapters_and_goes_on_to_the_bit(
    stage: int, dtype: str, engines: Make, made_up: ModuleType, tmp_path: Path
) -> None:
    engine = engines(stage, dtype=dtype)
    train(engine, made_up, steps=2)
    engine.save(tmp_path, {"number": 2.5})
    train(engine, made_up, steps=3)
    expected = trained(engine)
    # Masters and two moments of four bytes, the state of the random numbers, and the files' headers.
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 12 * engine.trained_count() + torch.get_rng_state().nbytes + 15_000
    files = StateFiles(tmp_path / POLICY)
    assert set(files.names) == set(trained(engine))
    other = engines(stage, dtype=dtype)
    assert other.load(tmp_path) == {"number": 2.5}
    train(other, made_up, steps=3)
    for name, tensor in other.parameters():
        assert torch.equal(tensor, expected[name]), name


def test_adapters_of_other_layers_are_not_loaded(engines: Make, tmp_path: Path) -> None:
    engines(lora={**LORA, "targets": ["q_proj"]}).save(tmp_path)
    with pytest.raises(DataError, match=r"aren't those that these settings train"):
        engines().load(tmp_path)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_export_is_base_and_adapter_together(
    stage: int, rslora: bool, engines: Make, made_up: ModuleType, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    made_up.tiny_model().save_pretrained(tmp_path / "base")
    engine = engines(stage, lora={**LORA, "rslora": rslora})
    train(engine, made_up, steps=5)
    before, adapters = base(engine), trained(engine)
    place = tmp_path / "run" / "model"
    engine.export(place, tmp_path / "base")
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.base_tensors())
    assert sorted(path.name for path in place.parent.iterdir()) == ["adapter", "model"]

    # In double precision: the two passes round differently, and what counts is what was stored.
    double = {"dtype": torch.float64}
    loaded = AutoModelForCausalLM.from_pretrained(place, **double)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is True
    settings = json.loads((adapter_folder(place) / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert settings["r"] == 3
    assert settings["lora_alpha"] == 12
    assert "lm_head" not in settings["target_modules"]
    plain = AutoModelForCausalLM.from_pretrained(settings["base_model_name_or_path"], **double)
    both = PeftModel.from_pretrained(plain, adapter_folder(place))
    ids = torch.arange(40).reshape(2, 20) % 32
    with torch.no_grad():
        merged, apart = loaded(ids).logits, both(ids).logits
        with both.disable_adapter():
            alone = both(ids).logits
    torch.testing.assert_close(merged, apart, atol=1e-5, rtol=0)
    assert float((merged - alone).abs().max()) > 0.1
    scale = 12 / math.sqrt(3) if rslora else SCALE
    name = "model.layers.1.mlp.down_proj"
    product = (
        adapters[f"{name}.lora_B.weight"].double() @ adapters[f"{name}.lora_A.weight"].double()
    )
    torch.testing.assert_close(
        loaded.state_dict()[f"{name}.weight"].double(),
        before[f"{name}.weight"].double() + scale * product,
        atol=1e-6,
        rtol=0,
    )


def test_a_bf16_model_is_merged_in_float32_and_rounded_once(
    engines: Make, made_up: ModuleType, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    engine = engines(1, dtype="bfloat16")
    train(engine, made_up, steps=5)
    engine.export(tmp_path / "best", None)
    assert (tmp_path / "best-adapter").is_dir()
    found = load_file(tmp_path / "best" / "model.safetensors")
    adapters, before = trained(engine), base(engine)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapters[f"{name}.lora_{one}.weight"].float() for one in "AB")
    exact = before[f"{name}.weight"].float() + SCALE * (b @ a)
    assert found[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(found[f"{name}.weight"], exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_scored_rows_are_the_merged_models(
    dtype: torch.dtype, engines: Make, made_up: ModuleType, tmp_path: Path
) -> None:
    """In another dtype on the wire, base and adapters are rounded to it, as an engine's are."""
    engine = engines()
    train(engine, made_up, steps=5)
    rows = fixed_rows(32, 24, 1)
    found = score(engine, rows, dtype)
    adapters = {name: t.to(dtype).float() for name, t in engine.parameters()}
    model = made_up.tiny_model()
    state = {n: t.to(dtype).float() for n, t in engine.base_tensors()}
    assert engine.adapters is not None
    model.load_state_dict({n: engine.adapters.merged(n, t, adapters) for n, t in state.items()})
    ids = torch.from_numpy(rows)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1)
    expected = logprobs.gather(2, ids[:, 1:, None]).squeeze(2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_a_layer_that_is_never_called_is_refused(made_up: ModuleType, engines: Make) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    def product_alone(self: Any, x: Tensor) -> Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return torch.nn.functional.linear(inner, self.down_proj.weight)

    plain = Qwen2MLP.forward
    Qwen2MLP.forward = product_alone
    try:
        with pytest.raises(ConfigError, match=r"without calling 2 .* model\.layers\.0\.mlp\.down"):
            engines()
        engines(lora={**LORA, "targets": ["q_proj", "up_proj"]})
    finally:
        Qwen2MLP.forward = plain


def test_a_checkpoint_of_other_adapters_is_refused_before_it_is_read(
    made_up: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    made_up.tiny_model().save_pretrained(folder)

    def kept(**lora: Any) -> dict[str, Any]:
        learner = {"lora": {**LORA, **lora}} if lora.get("rank", 1) else {}
        config = made_up.config_of(model={"path": str(folder)}, learner=learner)
        return {"seed": 3, **identity(config)}

    begun, place = kept(), tmp_path / "checkpoint"
    require_same(begun, kept(dropout=0.1), place)
    for changed, said in (
        ({"rank": 4}, r"learner\.lora\.rank=3, and it is 4"),
        ({"alpha": 6.0}, r"learner\.lora\.alpha=12\.0, and it is 6\.0"),
        ({"rslora": True}, r"learner\.lora\.rslora=False, and it is True"),
        ({"targets": ["q_proj"]}, r"learner\.lora\.targets=all-linear, and it is \['q_proj'\]"),
        ({"rank": 0}, r"has adapters alone, and learner\.lora=null"),
    ):
        with pytest.raises(DataError, match=said):
            require_same(begun, kept(**changed), place)
    with pytest.raises(DataError, match=r"has all of the model's parameters"):
        require_same(kept(rank=0), begun, place)
    made_up.tiny_model(seed=1).save_pretrained(folder)
    with pytest.raises(DataError, match=r"adapters of a base model with the digest"):
        require_same(begun, kept(), place)


def test_the_first_line_and_the_metrics_say_what_travels(engines: Make) -> None:
    engine = engines(1, dtype="bfloat16")
    count = engine.trained_count()
    share = count / engine.parameter_count()
    assert engine.sizes == {
        "train/parameters": count,
        "weights/bytes": 2 * count,
        "weights/bytes_share": share,
    }
    assert (
        f"rank 3 on 14 layers are trained ({count:,} parameters; a version has {2 * count:,}"
        in (engine.described)
    )
    assert f"{share:.1%} of the model's" in engine.described
    assert engines(lora=None).sizes == {}


def test_the_ratio_check_does_not_see_what_dropout_drops(
    made_up: ModuleType, plain: ModuleType
) -> None:
    """Samples of the very weights: without dropout log π/μ is rounding, whatever the training pass drops."""
    lora = {**LORA, "dropout": 0.5}
    config = made_up.config_of(learner={"objective": {"name": "grpo"}, "lora": lora})
    engine = DeepSpeedEngine(made_up.tiny_model(), config, CPU)
    train(engine, made_up, steps=3)
    assert engine.adapters is not None
    adapters, merged = trained(engine), made_up.tiny_model()
    weights = {n: engine.adapters.merged(n, t, adapters) for n, t in engine.base_tensors()}
    merged.load_state_dict(weights)
    groups = plain.sampled_by(merged, made_up.groups_of(3), noise=0.0)
    found = Updates(engine, config).train(1, groups, lr=1e-3).metrics
    assert found["ratio/log_ratio"] < 2e-5
    assert found["train/log_ratio_max_lag0"] > 0.01
