"""Files and directories of our own user (standard library only, because the janitor uses this module).

Another user of the machine can prepare a directory, a link or a pipe where a command looks for a run. So what a command
acts upon must belong to the user of this process, and no link is followed. What is only shown may belong to another
user, but it must be a plain file. For root, its own user is root: the files of other users are foreign to it too.

A directory of data from elsewhere belongs to our user, but its links may lead to any file: `link_outside` finds them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MAX_DOCUMENT_BYTES = 64 * 2**20
"""Limit for a document that is read as a whole."""
MAX_FOREIGN_BYTES = 2**20
"""The same for a document of another user, who decides what it holds. No content of this size takes long to parse."""
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a file that may turn out to be a link or a pipe."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Foreign(PermissionError):
    """A file or directory belongs to another user, or other users may write to it."""

    self_explanatory = True

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path} {problem}: penstock acts only upon files of the user who calls it")


def is_ours(path: Path) -> bool:
    """Return whether the file or directory exists and belongs to our user. A link belongs to the user who made it."""
    with suppress(OSError):
        return path.lstat().st_uid == os.geteuid()
    return False


def link_outside(directory: Path, *, but: str | None = None) -> Path | None:
    """Return a link anywhere in `directory` that leads out of it (see `lies_inside`); None if there is none. Links with
    names that end with `but` may lead anywhere. Raises OSError if a directory in it cannot be listed."""
    for path in _links(Path(os.path.realpath(directory))):
        if path.suffix != but and not lies_inside(Path(os.path.realpath(path)), directory):
            return path
    return None


def lies_inside(target: Path, directory: Path) -> bool:
    """Return whether the real path `target` lies in `directory`. To a directory of a Hugging Face hub cache
    (`snapshots/...`) also belong the `blobs` beside its `snapshots`."""
    real = Path(os.path.realpath(directory))
    blobs = [each.parent / "blobs" for each in real.parents if each.name == "snapshots"]
    return any(target.is_relative_to(allowed) for allowed in (real, *blobs[:1]))


def _raise(error: OSError) -> None:
    raise error


def _links(directory: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(directory, onerror=_raise):
        yield from (path for name in (*folders, *files) if (path := Path(folder, name)).is_symlink())


@contextmanager
def plain_directory(path: Path) -> Iterator[Path]:
    """Yield a path that means this very directory during the body, even if another user replaces it. Raises `Foreign`
    if it is a link or no directory."""
    try:
        number = os.open(path, _DIRECTORY)
    except NotADirectoryError:
        raise Foreign(path, "is a link or no directory") from None
    with closing(_Descriptor(number)):
        pinned = Path(f"/proc/self/fd/{number}")
        yield pinned if pinned.exists() else path


@contextmanager
def own_directory(path: Path) -> Iterator[Path]:
    """Yield what `plain_directory` does. Raises `Foreign` also if the directory belongs to another user, or can be
    written to by every user."""
    with plain_directory(path) as directory:
        _check_owner(path, found := directory.stat())
        if found.st_mode & stat.S_IWOTH:
            raise Foreign(path, "can be written to by every user")
        yield directory


def check_own_directory(path: Path) -> None:
    """Raise `Foreign` if another user could have put files into a directory, as `own_directory` does."""
    with own_directory(path):
        pass


def open_plain(path: Path, *, ours: bool = False) -> BinaryIO:
    """Open a file for reading. Raises `Foreign` if it is a link, a pipe or anything else than a plain file, and if it
    must be `ours` and is not. Opening never waits."""
    return os.fdopen(_open(path, os.O_RDONLY, ours=ours), "rb")


def open_lock(path: Path, *, create: bool) -> int:
    """Return a descriptor of a lock file of ours. Raises as `open_plain` does."""
    return _open(path, os.O_RDWR | (os.O_CREAT if create else 0), ours=create)


def read_document(path: Path, *, ours: bool = False) -> bytes:
    """Return the content of a document. Raises OSError, also if it is too large to be one."""
    with open_plain(path, ours=ours) as file:
        limit = max_bytes(file)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content


def max_bytes(file: BinaryIO) -> int:
    """Return how many bytes of an open document are read at most. It depends on the owner of the file."""
    return MAX_DOCUMENT_BYTES if os.fstat(file.fileno()).st_uid == os.geteuid() else MAX_FOREIGN_BYTES


def write_all(fd: int, data: bytes | memoryview, start: int) -> None:
    """Write all of `data` at the byte `start` of an open file. Raises OSError on a full disk."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count


def remove_tree(path: Path) -> bool:
    """Remove a directory of ours with everything in it, whatever its depth. Follow no link, and leave mounts alone.
    Return whether it is gone."""
    try:
        with own_directory(path) as directory:
            _empty(directory)
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


class _Descriptor:
    """An open file descriptor."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        os.close(self.number)


def _open(path: Path, flags: int, *, ours: bool) -> int:
    try:
        number = os.open(path, flags | _PLAIN, 0o600)
    except OSError as error:
        raise (Foreign(path, "is a link") if error.errno == errno.ELOOP else error) from None
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode):
            raise Foreign(path, "is no plain file")
        if ours:
            _check_owner(path, found)
    except OSError:
        os.close(number)
        raise
    return number


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise Foreign(path, f"belongs to user {found.st_uid}, and this process to user {os.geteuid()}")


def _empty(directory: Path) -> None:
    """Remove everything in a directory. Each directory in it is first moved to the top, so that neither the depth of
    the tree nor the length of its paths matters."""
    device = directory.stat().st_dev
    while entries := list(os.scandir(directory)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                Path(entry.path).unlink()
                continue
            inner = Path(entry.path)
            if inner.lstat().st_dev != device:
                raise OSError(f"{inner} is mounted")
            _open_up(inner)
            for child in list(os.scandir(inner)):
                if child.is_dir(follow_symlinks=False):
                    _move(Path(child.path), directory / f".{secrets.token_hex(8)}")
                else:
                    Path(child.path).unlink()
            inner.rmdir()


def _move(source: Path, target: Path) -> None:
    try:
        source.rename(target)
    except PermissionError:  # a directory that is moved must be writable to its owner
        _open_up(source)
        source.rename(target)


def _open_up(directory: Path) -> None:
    """Give the owner of a directory full access to it."""
    with closing(_Descriptor(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))) as found:
        Path(f"/proc/self/fd/{found.number}").chmod(0o700)


def is_open_to_others(path: Path) -> bool:
    """Return whether users besides us and root could reach a file or directory: neither it nor a directory above it is
    closed to them. Raises OSError."""
    real = path.resolve(strict=True)
    closed = 0o077 if real.is_file() else 0o011
    return all(
        found.st_mode & (closed if each == real else 0o011) or found.st_uid not in (0, os.geteuid())
        for each in (real, *real.parents)
        if (found := each.stat())
    )
