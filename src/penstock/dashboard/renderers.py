"""Custom views of trajectories: a file per environment in the folder `renderers`, named by the tag of the environment.

* `TAG.js` exports `render(episode, {h, svg, run})`, which returns a node;
* `TAG.py` has `render(episode)`, which returns text. It runs in a process of its own, and its text is shown as text.

The tag is the name that the run's tables have: `Shop` for `shop.py:Shop`, `CartPole-v1` for `gym:CartPole-v1`, the key
of an entry of `env.mixture`. A `/` of a tag is written as `-`. The folder lies in the directory where the dashboard was
started. So the user who looks at a run chooses its renderers, and a run from elsewhere brings no program with it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.imports import import_named
from penstock.own_files import check_own_directory, is_ours
from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess
from penstock.runtime.frames import Frames

FOLDER = Path("renderers")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
KINDS = ("js", "py")
RENDER_S = 20.0
"""Time limit for a Python renderer, its imports included."""
MAX_TEXT_BYTES = 1 << 20
"""Most bytes that a Python renderer may return."""
ANSWERER = "penstock.dashboard.renderers:RendererProcess"


class RendererError(RuntimeError):
    """A renderer cannot be used, or failed. The message names its file."""


class Renderers:
    """The renderers of one folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder.absolute()

    def find(self, tag: str) -> Path | None:
        """Return the file that renders the trajectories of an environment; None if there is none of ours."""
        name = tag.replace("/", "-")
        if not NAME.fullmatch(name):
            return None
        return next((path for kind in KINDS if (path := self._path(f"{name}.{kind}")) is not None), None)

    def script(self, name: str) -> Path | None:
        """Return the JavaScript file of this name; None if there is none of ours."""
        return self._path(name) if name.endswith(".js") and NAME.fullmatch(name) else None

    def _path(self, name: str) -> Path | None:
        path = self._folder / name
        with suppress(OSError):
            check_own_directory(self._folder)
            return path if path.is_file() and not path.is_symlink() and is_ours(path) else None
        return None


def rendered(path: Path, episode: Mapping[str, Any]) -> str:
    """Return the text of a Python renderer. Blocks up to `RENDER_S`. Raises `RendererError`."""
    child = ChildProcess(ANSWERER)
    try:
        with closing(child.pipe):
            child.pipe.settimeout(RENDER_S)
            frames.send(child.pipe, [str(path).encode(), msgspec.msgpack.encode(episode)])
            outcome, text = frames.receive(child.pipe, max_bytes=MAX_TEXT_BYTES)
    except TimeoutError:
        raise RendererError(f"{path} has taken more than {RENDER_S:g} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise RendererError(f"{path} has returned no text of at most {MAX_TEXT_BYTES} bytes: {error!r}") from None
    finally:
        child.kill()
        child.wait()
    said = bytes(text).decode(errors="replace")
    if bytes(outcome) != b"text":
        raise RendererError(f"{path} failed: {said}")
    return said


class RendererProcess:
    """The object in the child process that calls a renderer."""

    def answer(self, request: Frames) -> Frames:
        path, data = request
        try:
            render = import_named("renderer", f"{bytes(path).decode()}:render", wanted="a function")
            text = render(msgspec.msgpack.decode(data))
            if not isinstance(text, str):
                raise TypeError(f"render returned {type(text).__name__} instead of str")
        except BaseException:  # the user's own code may raise anything
            return [b"error", traceback.format_exc(limit=-4).encode(errors="replace")]
        return [b"text", text.encode(errors="replace")]
