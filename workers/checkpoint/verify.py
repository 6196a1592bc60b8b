"""Reading every byte of a checkpoint, to say what is wrong with it: file, tensor, reason. Without torch.

What lies where is taken from the manifest alone, so that a damaged header does not hide which tensors are good.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.checkpoint.digests import file_digests
from workers.checkpoint.manifest import MANIFEST_FILE, ShardRecord, checkpoint_dir, read_manifest
from workers.checkpoint.store import Store
from workers.errors import CheckpointDamaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as it was committed. `tensor` is None where it is the file as a whole, or its header."""

    file: str
    tensor: str | None
    reason: str


def verify_checkpoint(store: Store, name: str, told: Callable[[int], None] = lambda _: None) -> list[Problem]:
    """All problems of checkpoint `name`, in the order of the manifest; empty if every byte is as committed.

    Reads past the page cache where the file system allows. Errors of the storage itself become problems too: what
    cannot be read cannot be restored. `told(n)` is called when n more bytes have been looked at.
    """
    try:
        manifest = read_manifest(store, name)
    except (CheckpointDamaged, OSError) as error:
        return [Problem(file=MANIFEST_FILE, tensor=None, reason=str(error))]
    problems = []
    for shard in manifest.shards:
        problems += _verify_shard(store, checkpoint_dir(name), shard)
        told(shard.bytes)
    return problems


def _verify_shard(store: Store, directory: str, shard: ShardRecord) -> list[Problem]:
    def problem(reason: str, tensor: str | None = None) -> Problem:
        return Problem(file=shard.file, tensor=tensor, reason=reason)

    try:
        found = file_digests(store, f"{directory}/{shard.file}", shard.tensors)
    except FileNotFoundError:
        return [problem("the file is missing")]
    except OSError as error:
        return [problem(f"the file cannot be read: {error}")]
    problems = []
    if found.bytes != shard.bytes:
        problems.append(problem(f"the file has {found.bytes} bytes, and {shard.bytes} were committed"))
    for record in shard.tensors:
        if record.stop > found.bytes:
            problems.append(problem("the file ends before the tensor does", record.name))
        elif found.tensors[record.name] != record.digest:
            problems.append(problem("its bytes are not the committed ones", record.name))
    if not problems and found.digest != shard.digest:
        problems.append(problem("the header's bytes are not the committed ones"))
    return problems
