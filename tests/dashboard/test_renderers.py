"""Custom renderers: a file per environment, of the user who looks; what they return is text."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_with_groups import MARKUP

from penstock.dashboard import renderers
from penstock.dashboard.renderers import RendererError, Renderers, rendered


def test_a_renderer_is_named_by_the_tag(tmp_path: Path) -> None:
    folder = tmp_path / "renderers"
    folder.mkdir()
    for name in ("Shop.py", "Maze.js", "Maze.py", "ALE-Pong-v5.js"):
        (folder / name).touch()
    found = Renderers(folder)
    assert found.find("Shop") == folder / "Shop.py" and found.find("Maze") == folder / "Maze.js"
    assert found.find("ALE/Pong-v5") == folder / "ALE-Pong-v5.js"
    assert found.script("Maze.js") == folder / "Maze.js"
    assert found.find("Other") is None and found.script("Shop.py") is None


@pytest.mark.parametrize("tag", ["..", "../Shop", ".hidden", "", "a\0b", "Shop.js\n", "x" * 300, "/etc/passwd"])
def test_a_tag_reaches_no_other_folder(tmp_path: Path, tag: str) -> None:
    folder = tmp_path / "renderers"
    folder.mkdir()
    (tmp_path / "Shop.js").touch()
    (folder / ".hidden.js").touch()
    found = Renderers(folder)
    assert found.find(tag) is None and found.script(tag) is None and found.script(f"{tag}.js") is None


def test_links_and_folders_that_others_can_write_to_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "renderers"
    folder.mkdir()
    (tmp_path / "Else.js").touch()
    (folder / "Shop.js").symlink_to(tmp_path / "Else.js")
    (folder / "Maze.js").touch()
    found = Renderers(folder)
    assert found.find("Shop") is None and found.find("Maze") is not None
    os.chmod(folder, 0o777)  # noqa: PTH101
    assert found.find("Maze") is None
    assert Renderers(tmp_path / "missing").find("Maze") is None


@pytest.mark.integration
def test_a_python_renderer_returns_text(tmp_path: Path) -> None:
    path = tmp_path / "Shop.py"
    path.write_text(
        "def render(episode):\n    print('noise')\n    return '; '.join(m['content'] for m in episode['messages'])\n"
    )
    episode = {"messages": [{"content": MARKUP}, {"content": "水"}], "turns": []}
    assert rendered(path, episode) == f"{MARKUP}; 水"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def render(episode):\n    return 1 / 0\n", "ZeroDivisionError"),
        ("def render(episode):\n    return 7\n", "returned int instead of str"),
        ("import missing_module\n", "missing_module"),
        ("x = 1\n", "render"),
        ("def render(episode):\n    import os; os._exit(3)\n", "has returned no text"),
        ("def render(episode):\n    return 'x' * (2 << 20)\n", "has returned no text"),
        ("def render(episode):\n    raise SystemExit\n", "SystemExit"),
    ],
)
def test_a_renderer_that_fails_is_named(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "Shop.py"
    path.write_text(source)
    with pytest.raises(RendererError, match=message) as failure:
        rendered(path, {})
    assert str(path) in str(failure.value)


@pytest.mark.integration
def test_a_renderer_that_never_returns_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "Shop.py"
    path.write_text("import threading\n\ndef render(episode):\n    threading.Event().wait()\n")
    monkeypatch.setattr(renderers, "RENDER_S", 0.5)
    with pytest.raises(RendererError, match=r"more than 0\.5 s"):
        rendered(path, {})
