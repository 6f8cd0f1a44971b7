"""An engine of others: started with the words and the file that start SGLang, behind which is a server of ours, which
speaks its protocol, and asks for the key in the file."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import tempfile
from pathlib import Path

import yaml

from penstock.config import default_config
from penstock.model.load_policy import load_policy
from penstock.observe.jsonl import write_json
from penstock.processes.slot_server import serve_alone
from penstock.rollout.runner import EngineRunner
from penstock.trainer.checkpoint import STATE
from penstock.types import NO_VERSION

parser = argparse.ArgumentParser()
parser.add_argument("--load-format", default="auto")
parser.add_argument("--enable-memory-saver", action="store_true")
parser.add_argument("--turns", type=int, default=0, help="the time that the memory is released at which it dies")
parser.add_argument("--died", type=Path, help="where it says so; it dies only once")
for word in ("--host", "--port", "--model-path", "--served-model-name", "--context-length", "--config"):
    parser.add_argument(word, required=True)
words, _ = parser.parse_known_args()
assert Path(words.config).stat().st_mode & 0o077 == 0, "others can read the key"
release, num_released = EngineRunner.release, 0


async def count(runner: EngineRunner, *tags: object) -> None:
    global num_released
    assert words.enable_memory_saver
    await release(runner, *tags)  # type: ignore[arg-type]
    num_released += 1
    if num_released == words.turns and not words.died.exists():
        words.died.touch()
        asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGKILL)  # it has answered by then


EngineRunner.release = count  # type: ignore[assignment, method-assign]
own_key = yaml.safe_load(Path(words.config).read_text())["api-key"]
os.environ.update(dict.fromkeys(("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_API_KEY"), own_key))
with tempfile.TemporaryDirectory() as scratch:
    model = Path(shutil.copytree(words.model_path, scratch, dirs_exist_ok=True))
    if words.load_format == "dummy":
        load_policy(model, weights=False, seed=0).save_pretrained(model)
    # SGLang knows nothing of a checkpoint's version.
    write_json(model / STATE, {"policy_version": NO_VERSION if words.load_format == "dummy" else 0})
    place = [f"rollout.host={words.host}", f"rollout.port={words.port}"]
    size = [f"model.max_context={words.context_length}", "env.max_new_tokens=1"]
    serve_alone(default_config([*place, *size]), model, model_name=words.served_model_name)
