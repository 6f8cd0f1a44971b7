"""A model directory is data: no code that it holds or names is ever run, and no file outside of it is read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config.run_settings import TinyModelConfig
from penstock.model.chat import ChatTokenizer
from penstock.model.files import ModelError, check_no_code, copy_companions
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model

CODE = """
from pathlib import Path
Path({trace!r}).touch()
from transformers import Qwen3Config, Qwen3ForCausalLM
class Config(Qwen3Config):
    model_type = "mine"
class Model(Qwen3ForCausalLM):
    config_class = Config
"""
AUTO_MAP = {"AutoConfig": "modeling_mine.Config", "AutoModelForCausalLM": "modeling_mine.Model"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    drawn, saved = tmp_path / "drawn", tmp_path / "model"
    write_tiny_model(drawn, TinyModelConfig(num_layers=1, hidden_size=16), max_context=64)
    load_policy(drawn, weights=False, seed=0).save_pretrained(saved)
    copy_companions(drawn, saved)
    (saved / "modeling_mine.py").write_text(CODE.format(trace=str(tmp_path / "ran")))
    return saved


def change(directory: Path, **settings: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("weights", [True, False])
def test_code_of_a_model_directory_is_never_run(model_dir: Path, tmp_path: Path, weights: bool) -> None:
    change(model_dir, model_type="mine", auto_map=AUTO_MAP)
    with pytest.raises(ModelError, match=r"needs Python code of its own \(modeling_mine.py\)"):
        load_policy(model_dir, weights=weights, seed=0)
    assert not (tmp_path / "ran").exists()


def test_an_architecture_that_transformers_knows_is_loaded_with_its_code(model_dir: Path, tmp_path: Path) -> None:
    change(model_dir, auto_map=AUTO_MAP)
    assert type(load_policy(model_dir, weights=True)).__module__.startswith("transformers.")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "settings",
    [{"attn_implementation": "mine/kernel"}, {"text_config": {"_attn_implementation": {"": "flash|mine/kernel"}}}],
)
def test_a_model_directory_names_no_code_to_download(model_dir: Path, settings: dict[str, Any]) -> None:
    change(model_dir, **settings)
    with pytest.raises(ModelError, match="names code to download"):
        load_policy(model_dir, weights=True)


def test_an_adapter_does_not_lead_to_another_model(model_dir: Path) -> None:
    (model_dir / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/etc"}))
    with pytest.raises(ModelError, match="holds an adapter"):
        check_no_code(model_dir)


@pytest.mark.integration
@pytest.mark.long
def test_the_command_refuses_the_directory_before_it_makes_a_run(model_dir: Path, tmp_path: Path) -> None:
    change(model_dir, model_type="mine", auto_map=AUTO_MAP)
    (tmp_path / "run.yaml").write_text(f"runs_dir: {tmp_path / 'runs'}\nmodel: {{path: {model_dir}}}\n")
    words = [sys.executable, "-m", "penstock.cli.main", "train", str(tmp_path / "run.yaml")]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, input="y\ny\n")
    assert refused.returncode == 1 and "modeling_mine.py" in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr and not (tmp_path / "runs").exists() and not (tmp_path / "ran").exists()


def test_weights_that_are_a_pickle_run_nothing(model_dir: Path, tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (model_dir / "model.safetensors").unlink()
    (model_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(Exception, match=r"(?i)weights.only|cannot be loaded|unpickl"):
        load_policy(model_dir, weights=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["merges.txt", "chat_template.jinja", "original"])
def test_a_link_in_a_model_directory_leads_to_no_file_outside(model_dir: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("the secret")
    (model_dir / name).unlink(missing_ok=True)
    (model_dir / name).symlink_to(tmp_path / ("secret" if "." in name else ""))
    target = tmp_path / "target"
    target.mkdir()
    uses = (check_no_code, ChatTokenizer.load, lambda directory: copy_companions(directory, target))
    for use in uses:
        with pytest.raises(ModelError, match=rf"{name} leads out of the model directory .*: replace the link"):
            use(model_dir)
    assert not list(target.iterdir())


def test_weights_may_be_links(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (model_dir / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    policy = load_policy(model_dir, weights=True)
    assert sum(each.numel() for each in policy.parameters()) > 0


def test_a_model_directory_may_lie_in_a_hub_cache(model_dir: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    shutil.copytree(model_dir, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert sum(each.numel() for each in load_policy(snapshot, weights=True).parameters()) > 0
    assert ChatTokenizer.load(snapshot).encode("a")


def test_a_data_set_is_never_a_script(tmp_path: Path) -> None:
    from penstock.config import ConfigError
    from penstock.data.table_files import HuggingFace

    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "mine.py").write_text(CODE.format(trace=str(tmp_path / "ran")))
    with pytest.raises(ConfigError, match="cannot be read"):
        HuggingFace(directory, "train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "path", ["http://127.0.0.1:9/rows.jsonl", "/etc/passwd", "../rows.jsonl", "zip://a::rows.zip", "~/rows.jsonl"]
)
def test_a_data_set_names_no_other_files(tmp_path: Path, path: str) -> None:
    from penstock.config import ConfigError
    from penstock.data.table_files import HuggingFace

    configs = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: '{path}'"
    card = f"---\nlicense: a---b\n{configs}\n---\nRows.\n"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(ConfigError, match=r"the dataset card of .* names .*, which is not in the directory"):
        HuggingFace(tmp_path, "train")


@pytest.mark.parametrize(
    "text", ["{{ 10 ** (10 ** 9) }}", "{{ 10 ** (messages|length * 10000) }}", "{{ 'a' * 10000000 }}"]
)
def test_a_template_computes_nothing_large(text: str) -> None:
    from penstock.model.chat_template import ChatTemplate

    with pytest.raises(ModelError, match="are too large"):
        ChatTemplate(text).render({"messages": [{"role": "user", "content": "x"}]})


def test_a_tokenizer_that_panics_ends_no_process(model_dir: Path) -> None:
    file = model_dir / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["decoder"] = {"type": "Strip", "content": "a", "start": 1000, "stop": 1000}
    file.write_text(json.dumps(tokenizer))
    chat = ChatTokenizer.load(model_dir)
    with pytest.raises(ValueError, match="the tokenizer failed"):
        for token in range(chat.vocab_size):
            chat.decode([token])
