"""Ray's own files are written if that is possible, and Ray never hears of it if not."""

import pickle
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, FileType, LocalFileSystem, PyFileSystem

from workers.ray_storage import ray_storage


@pytest.fixture
def storage() -> PyFileSystem:
    return pickle.loads(pickle.dumps(ray_storage()))


def write(storage: PyFileSystem, path: Path, content: bytes) -> None:
    with storage.open_output_stream(str(path)) as stream:
        stream.write(content)


def test_what_ray_writes_can_be_read_again(storage: PyFileSystem, tmp_path: Path) -> None:
    write(storage, tmp_path / "list.json", b"{}")
    assert (tmp_path / "list.json").read_bytes() == b"{}"
    with storage.open_input_stream(str(tmp_path / "list.json")) as stream:
        assert stream.read() == b"{}"
    (info,) = storage.get_file_info(FileSelector(str(tmp_path)))
    assert (info.base_name, info.type, info.size) == ("list.json", FileType.File, 2)
    storage.create_dir(str(tmp_path / "new"))
    assert (tmp_path / "new").is_dir()


def test_two_of_them_are_equal_or_ray_would_take_no_checkpoint_for_one_of_its_own(storage: PyFileSystem) -> None:
    assert storage == ray_storage()
    assert storage != LocalFileSystem()


def test_a_full_disk_is_not_told(storage: PyFileSystem) -> None:
    write(storage, Path("/dev/full"), b"x" * 100_000)


def test_where_the_run_directory_has_vanished_nothing_is_made(storage: PyFileSystem, tmp_path: Path) -> None:
    storage.create_dir(str(tmp_path / "gone" / "run"))
    write(storage, tmp_path / "gone" / "run" / "list.json", b"{}")
    assert not (tmp_path / "gone").exists()
