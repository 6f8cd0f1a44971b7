"""Adapters are trained, whole weights are served."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_roles import ENOUGH_S
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from penstock.config import Config, ConfigError, TrainerConfig
from penstock.groups.role import Rank
from penstock.model.load_policy import load_policy
from penstock.processes.trainer_rank import Actor
from penstock.samples import Sample
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare
from penstock.trainer.reference import Reference
from penstock.weights.publication import await_handle

pytest.importorskip("peft")

MakeModel = Callable[[], PreTrainedModel]


def learner(model: PreTrainedModel, **lora: object) -> Learner:
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, "lora": {"rank": 4, **lora}})
    return Learner(model, config, max_staleness=9)


def train(learner: Learner, samples: list[Sample], steps: int) -> None:
    for _ in range(steps):
        learner.accumulate(prepare(samples)[0])
        learner.step()


def test_the_served_weights_are_those_of_the_trained_policy(make_model: MakeModel, samples: list[Sample]) -> None:
    plain, adapted = make_model(), make_model()
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    trained = learner(adapted)
    assert set(trained.named_weights()) == set(before)
    assert all(torch.equal(before[name], weight) for name, weight in trained.named_weights().items())
    train(trained, samples, 2)
    served = trained.named_weights()
    changed = {name for name, weight in served.items() if not torch.equal(before[name], weight)}
    assert changed and all("proj" in name for name in changed), "linear layers only"
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(served[name])
        ids = torch.tensor([[5, 6, 7, 8]])
        torch.testing.assert_close(plain(input_ids=ids).logits, adapted(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_a_snapshot_is_the_policy_at_its_last_renewal(make_model: MakeModel, samples: list[Sample]) -> None:
    objective = {"name": "decoupled", "proximal": "snapshot", "proximal_every": 2}
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, "lora": {"rank": 4}, "objective": objective})
    trained = Learner(make_model(), config, max_staleness=10)
    ids = torch.tensor([[5, 6, 7, 8]])
    train(trained, samples, 2)
    then = trained.model(input_ids=ids).logits
    train(trained, samples, 1)
    now = trained.model(input_ids=ids).logits
    snapshot = trained._criterion._proximal
    assert snapshot is not None and not torch.allclose(then, now, atol=1e-3)
    with torch.no_grad():
        with snapshot.placed() as model:
            assert torch.equal(model(input_ids=ids).logits, then)
        assert torch.equal(trained.model(input_ids=ids).logits, now)
    saved = trained.state_dict()["criterion"]["proximal"]
    assert saved and all(".lora_" in name for name in saved)


def test_passes_of_copies_leave_the_gradient_as_it_is(make_model: MakeModel, samples: list[Sample]) -> None:
    """They come between the forward and the backward pass of the policy, on the same weights."""
    found = []
    for every in (None, 1):
        settings = {"learning_rate": 1e-2, "lora": {"rank": 4}, "canaries": {"parity_every": every}}
        torch.manual_seed(0)  # adapters begin at random
        trained = Learner(make_model(), TrainerConfig.model_validate(settings), max_staleness=9, policy_version=1)
        compared = []
        for _ in range(3):
            train(trained, samples, 1)
            compared.append(trained._criterion._parity.copy is not None)
        assert compared == [every is not None] * 3
        found.append(trained.named_weights())
    assert all(torch.equal(found[0][name], weight) for name, weight in found[1].items())


def test_the_reference_is_the_policy_without_adapters(make_model: MakeModel, samples: list[Sample]) -> None:
    settings = {"learning_rate": 1e-2, "objective": {"kl_coef": 0.5}}
    adapted = TrainerConfig.model_validate(settings | {"lora": {"rank": 4}})
    assert adapted.roles == ["actor"]
    with pytest.raises(ValueError, match=r"there is none: with trainer\.lora it is the policy without its adapters"):
        Config.model_validate({"trainer": settings | {"lora": {"rank": 4}, "split": ["reference"]}})
    trained = Learner(make_model(), adapted, max_staleness=9)
    batch = prepare(samples)[0]
    train(trained, samples, 2)
    whole = TrainerConfig.model_validate(settings)
    references = [Reference(model, whole, max_staleness=9) for model in (make_model(), trained.model)]
    old, new = (reference.logprobs(batch, 2)["reference"] for reference in references)
    for parameter in trained._parameters:
        parameter.requires_grad_(True)  # as a reference, the model was frozen
    differences = np.concatenate([before - after for before, after in zip(old, new, strict=True)])
    in_loss = np.concatenate(batch["loss_mask"]).astype(bool)
    k3 = np.expm1(differences[in_loss]) - differences[in_loss]
    trained.accumulate(batch)
    gradient = [parameter.grad.clone() for parameter in trained._parameters if parameter.grad is not None]
    assert len(gradient) == len(trained._parameters) and any(each.any() for each in gradient)
    assert trained.step().metrics["kl_reference"] == pytest.approx(float(k3.mean()), rel=1e-4)
    assert k3.mean() > 1e-5


def test_the_base_has_the_dtype_of_the_passes(make_model: MakeModel, samples: list[Sample]) -> None:
    """It is served with the adapters added in float32, and rounded once."""
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, "lora": {"rank": 4}})
    trained = Learner(make_model(), config, max_staleness=9, compute_dtype=torch.bfloat16)
    train(trained, samples, 2)
    dtypes = {(".lora_" in name, each.dtype) for name, each in trained.model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    states = [value for state in trained._optimizer.state.values() for value in state.values() if value.dim()]
    assert len(states) == 2 * len(trained._parameters) and {each.dtype for each in states} == {torch.float32}
    name = "model.layers.0.self_attn.q_proj"
    layer = trained.model.get_submodule(name)
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    assert torch.equal(trained.named_weights()[f"{name}.weight"], exact.bfloat16())


def test_only_adapters_have_gradients(make_model: MakeModel, samples: list[Sample]) -> None:
    model = make_model()
    trained = learner(model)
    trained.accumulate(prepare(samples)[0])
    moved = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert moved and all(".lora_" in name for name in moved)


def test_a_checkpoint_is_a_whole_model_and_goes_on_exactly(
    make_model: MakeModel, samples: list[Sample], tmp_path: Path
) -> None:
    steady = learner(make_model())
    train(steady, samples, 2)
    steady.write(tmp_path)
    assert steady.is_written(ENOUGH_S)
    whole = type(make_model()).from_pretrained(tmp_path)
    assert all(torch.equal(whole.state_dict()[name], weight) for name, weight in steady.named_weights().items())
    resumed = learner(make_model())
    resumed.read(tmp_path)
    train(steady, samples, 2)
    train(resumed, samples, 2)
    found = resumed.named_weights()
    assert all(torch.equal(weight, found[name]) for name, weight in steady.named_weights().items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_a_checkpoint_has_the_adapters_for_peft(make_model: MakeModel, samples: list[Sample], tmp_path: Path) -> None:
    """On the base that they name they are the trained policy."""
    from peft import PeftModel

    base, saved = tmp_path / "base", tmp_path / "saved"
    make_model().save_pretrained(base)
    saved.mkdir()
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 16}})
    trained = Learner(make_model(), config, max_staleness=9, base=str(base))
    train(trained, samples, 2)
    trained.write(saved)
    assert trained.is_written(ENOUGH_S)
    settings = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base) and settings["r"] == 4
    loaded = PeftModel.from_pretrained(load_policy(base, weights=True), saved / "adapter")
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = trained.model(input_ids=ids).logits
        assert not torch.allclose(make_model()(input_ids=ids).logits, expected, atol=1e-3)
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_layers_that_do_not_exist_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"trainer.lora.targets \['q_prj'\]"):
        learner(make_model(), targets=["q_prj"])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_layers_that_share_their_weights_are_refused(make_model: MakeModel, target: str) -> None:
    with pytest.raises(ConfigError, match=f"{target} shares its weights with another layer"):
        learner(make_model(), targets=[target])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("engine", "urls"), [("penstock", []), ("vllm", []), ("vllm", ["http://127.0.0.1:1"])])
def test_what_is_published_depends_on_who_adds_the_adapters(
    model_dir: Path, make_model: MakeModel, tmp_path: Path, engine: str, urls: list[str]
) -> None:
    """Our own servers get a base, engines that the run starts have one, and others get whole weights."""
    from peft import PeftModel

    directory, weights_dir = tmp_path / "model", tmp_path / "weights"
    make_model().save_pretrained(directory)
    config = Config.model_validate(
        {
            "model": {"path": str(directory), "max_context": 64, "device": "cpu"},
            "data": {"source": "seeds"},
            "env": {"name": "guess_number", "max_new_tokens": 8},
            "rollout": {"engine": engine, "urls": urls},
            "trainer": {"lora": {"rank": 2, "targets": ["q_proj"]}},
        }
    )
    actor = Actor(Rank(0, 1), {}, config=config, place=0, model_dir=directory, weights_dir=weights_dir)
    opened = actor.open_weights()
    assert opened is not None
    actor.publish(opened)
    handle = await_handle(opened.folder, waiter="the test")
    assert (handle.adapters is None) is bool(urls)
    assert (weights_dir / "base").exists() is (engine == "penstock")
    if handle.adapters is None:
        assert set(load_file(handle.path)) > set(dict(make_model().named_parameters()))
        return
    assert (handle.adapters.base is None) is (engine == "vllm")
    adapted = PeftModel.from_pretrained(load_policy(directory, weights=True), Path(handle.path).parent)
    assert len(handle.adapters.targets) == 2
    found = {name: each for name, each in adapted.named_parameters() if ".lora_" in name}
    for name, tensor in load_file(handle.path).items():
        assert torch.equal(found[name.replace(".weight", ".default.weight")], tensor)
    assert len(found) == len(load_file(handle.path)) == 4


def test_foreign_engines_get_adapters_of_linear_layers_only(tmp_path: Path) -> None:
    gpt2 = GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(gpt2).save_pretrained(tmp_path)
    tree = {
        "model": {"path": str(tmp_path), "max_context": 64, "device": "cpu"},
        "data": {"source": "seeds"},
        "env": {"name": "guess_number", "max_new_tokens": 8},
        "trainer": {"lora": {"rank": 2}},
    }
    arguments: dict[str, Any] = {"place": 0, "model_dir": tmp_path, "weights_dir": tmp_path / "weights"}
    config = Config.model_validate(tree | {"rollout": {"engine": "vllm"}})
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets: vllm serves adapters of linear layers only"):
        Actor(Rank(0, 1), {}, config=config, **arguments).open_weights()
    actor = Actor(Rank(0, 1), {}, config=Config.model_validate(tree), **arguments)
    opened = actor.open_weights()
    assert opened is not None
    actor.publish(opened)
    assert await_handle(opened.folder, waiter="the test").adapters is None, "our own servers get whole weights"
