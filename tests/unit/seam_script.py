"""Run under strace by test_storage_seam.py: one real save through a store that notes what it is asked.

Usage: seam_script.py RUN_DIR IMAGE LOG [rogue]. The last one makes it touch the run directory beside the store.
"""

import mmap
import sys
from pathlib import Path
from typing import Any

import orchestrator.observe.ledger as ledger_module
from orchestrator.archive import RunArchive
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.observe.ledger import Ledger
from workers.checkpoint.digests import image_digests
from workers.checkpoint.files import LocalFile, StoreFile
from workers.checkpoint.header import PAGE_BYTES, parse_header
from workers.checkpoint.manifest import Manifest, checkpoint_name
from workers.checkpoint.persist import ReadBack, write_shard
from workers.checkpoint.store import LocalStore

CHANGING = ("make_dir", "append", "remove_tree", "link", "move", "unlink", "sync_dir")
LOOKING = ("list_dir", "exists", "is_dir", "size", "read_bytes")


def main() -> None:
    run_dir, image_file, log = map(Path, sys.argv[1:4])
    notes = log.open("w", buffering=1)

    def note(operation: str, *paths: str) -> None:
        notes.write(" ".join([operation, *paths]) + "\n")

    class NotingFile(LocalFile):
        path = ""

        def write_at(self, data: memoryview, position: int) -> None:
            note("write_at", self.path)
            super().write_at(data, position)

        def truncate(self, size_bytes: int) -> None:
            note("truncate", self.path)
            super().truncate(size_bytes)

        def sync(self) -> None:
            note("sync", self.path)
            super().sync()

    def noted(file: StoreFile, path: str) -> StoreFile:
        assert isinstance(file, LocalFile)
        file.__class__ = NotingFile
        file.path = path  # type: ignore[attr-defined]
        return file

    class NotingStore(LocalStore):
        def open_new(self, path: str, *, direct: bool = False) -> StoreFile:
            note("open_new", path)
            return noted(super().open_new(path, direct=direct), path)

        def open_existing(self, path: str, *, direct: bool = False) -> StoreFile:
            note("open_existing", path)
            return noted(super().open_existing(path, direct=direct), path)

    def noting(name: str) -> Any:
        def method(self: LocalStore, *arguments: Any, **options: Any) -> Any:
            note(name, *(value for value in arguments if isinstance(value, str)))
            return getattr(super(NotingStore, self), name)(*arguments, **options)

        return method

    for name in (*CHANGING, *LOOKING):
        setattr(NotingStore, name, noting(name))
    ledger_module.LocalStore = NotingStore  # type: ignore[misc]
    if sys.argv[4:] == ["rogue"]:
        (run_dir / "rogue").write_bytes(b"x")
    save(NotingStore(run_dir), run_dir, image_file.read_bytes())


def save(store: LocalStore, run_dir: Path, content: bytes) -> None:
    """Two generations, two checkpoints, one of them set aside, one deleted; all of it in the ledger."""
    ledger = Ledger(run_dir / "ledger.jsonl")
    archive = RunArchive(store)
    image = mmap.mmap(-1, -(-len(content) // PAGE_BYTES) * PAGE_BYTES)
    image[: len(content)] = content
    view = memoryview(image)
    digests = image_digests(view[: len(content)], parse_header(view[: len(content)], "image").tensors.values())
    record = GenerationRecord(
        number=1,
        driver="d",
        parent=None,
        parent_generation=None,
        restored_step=0,
        source="fresh",
        reason="start",
        created_at=0.0,
        world_size=1,
    )
    archive.create_generation(record, seen=archive.scan())
    for step in (10, 20):
        name = checkpoint_name(step, 1, 1)
        written = write_shard(store, name, 0, 1, view, len(content), {"rank": 0}, digests=digests, read_back=ReadBack())
        archive.commit(
            Manifest(
                run="r",
                generation=1,
                step=step,
                attempt=1,
                world_size=1,
                shards=(written.shard,),
                identity={},
                progress={},
                created_at=0.0,
            )
        )
        ledger.append("commit", step=step, checkpoint=name)
    archive.quarantine(checkpoint_name(20, 1, 1), "for the test")
    assert archive.delete(checkpoint_name(10, 1, 1), my_generation=1)


if __name__ == "__main__":
    main()
