"""The file system that Ray Train keeps its books on: the run directory's, but errors there never reach Ray.

Ray writes its list of checkpoints after each one that is reported, and ends the run if that fails, for instance on a
disk that is full or read-only for a minute. lastgood never reads that list. So what Ray writes is written as far as the
storage takes it, and nothing is created where the run directory has vanished.
"""

import logging
import os
from typing import Any

import pyarrow
from pyarrow import fs

logger = logging.getLogger("lastgood")


def ray_storage() -> fs.PyFileSystem:
    """What Ray is to use as its storage; all are equal, as Ray asks of a checkpoint's and its own."""
    return fs.PyFileSystem(TolerantStorage())


class TolerantStorage(fs.FileSystemHandler):  # type: ignore[misc]
    """The local file system; creating and writing raise no OSError. Pickled, and so made anew, on every node."""

    def __init__(self) -> None:
        self._local = fs.LocalFileSystem()

    def __reduce__(self) -> tuple[type["TolerantStorage"], tuple[()]]:
        return TolerantStorage, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TolerantStorage)

    def __hash__(self) -> int:
        return hash(TolerantStorage)

    # Writing

    def create_dir(self, path: str, recursive: bool) -> None:
        try:
            # Never with its parents: the driver has made the run directory.
            self._local.create_dir(path, recursive=False)
        except OSError as error:
            if not os.path.isdir(path):
                _ignored(path, error)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return self._stream(path, self._local.open_output_stream, metadata)

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        return self._stream(path, self._local.open_append_stream, metadata)

    def _stream(self, path: str, opened: Any, metadata: Any) -> Any:
        try:
            stream = opened(path, metadata=metadata)
        except OSError as error:
            _ignored(path, error)
            return pyarrow.BufferOutputStream()
        return pyarrow.PythonFile(_TolerantFile(path, stream), mode="w")

    # Everything else as it is

    def get_type_name(self) -> str:
        return "local"

    def normalize_path(self, path: str) -> str:
        return str(self._local.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> Any:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: Any) -> Any:
        return self._local.get_file_info(selector)

    def delete_dir(self, path: str) -> None:
        self._local.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self._local.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError("the root directory is not Ray's to delete")

    def delete_file(self, path: str) -> None:
        self._local.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._local.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self._local.copy_file(source, target)

    def open_input_stream(self, path: str) -> Any:
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> Any:
        return self._local.open_input_file(path)


class _TolerantFile:
    """What pyarrow needs of a file that is written."""

    def __init__(self, path: str, stream: Any) -> None:
        self._path = path
        self._stream = stream

    def write(self, data: Any) -> int:
        try:
            self._stream.write(data)
        except OSError as error:
            _ignored(self._path, error)
        return len(data)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            _ignored(self._path, error)

    def close(self) -> None:
        try:
            self._stream.close()
        except OSError as error:
            _ignored(self._path, error)

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)


def _ignored(path: str, error: OSError) -> None:
    logger.warning("lastgood: Ray's own file %s could not be written, which changes nothing: %s", path, error)
