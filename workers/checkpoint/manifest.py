"""The manifest: which bytes make up one checkpoint. Its presence IS the commit.

Invariants:
- A manifest lists every shard, every tensor in it, where it lies, and a digest of each; reading needs nothing else.
- Its own digest covers all of that. A manifest that cannot be read whole is damage, never an older format or a guess.
- File names are derived from rank and world size, never taken from the content, so that no manifest points elsewhere.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from workers.checkpoint.sealed import seal, unseal
from workers.errors import CheckpointDamaged

if TYPE_CHECKING:
    from workers.checkpoint.store import Store

FORMAT_VERSION = 2
CHECKPOINTS_DIR = "checkpoints"
MANIFEST_FILE = "manifest.json"

ReadFrom = Literal["device", "cache", "memory"]
"""Where the bytes came from when they were read: past this machine's page cache; through it, after asking the kernel to
drop it; or a file system that lives in memory."""

VerifiedFrom = ReadFrom | Literal["nothing"]
"""Where a shard was read back from before the commit; nothing if it was not read back."""
_VERIFIED_FROM = ("device", "cache", "memory", "nothing")

_T = TypeVar("_T")
_NAME = re.compile(r"step-(\d{9,})-g(\d{4,})-a(\d{2,})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One rank's part of a tensor: elements from `offsets` on, `shape` of them, of a whole of `global_shape`.

    `dtype` is safetensors' name for it ("BF16"). The bytes, row-major and little-endian, are file[start:stop].
    `digest` is their xxh3_128 in hexadecimal, or "" where it is not known yet.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One rank's file, as its keeper wrote it and, unless told otherwise, read it back; also the receipt's content.

    `digest` is that of all bytes, `header_digest` of those before the tensors, "" where it is not known.
    """

    file: str
    rank: int
    bytes: int
    digest: str
    header_digest: str = ""
    verified_from: VerifiedFrom
    tensors: tuple[TensorRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed checkpoint. `created_at` is in seconds since the epoch; identity and progress are JSON objects."""

    run: str
    generation: int
    step: int
    attempt: int
    world_size: int
    shards: tuple[ShardRecord, ...]
    identity: dict[str, Any]
    progress: dict[str, Any]
    created_at: float
    format_version: int = FORMAT_VERSION

    @property
    def name(self) -> str:
        """The checkpoint's directory name."""
        return checkpoint_name(self.step, self.generation, self.attempt)

    @property
    def total_bytes(self) -> int:
        """Bytes in all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_bytes(self) -> bytes:
        """The file's content; ValueError if the shards are not exactly those of ranks 0 to world_size - 1."""
        problem = _shards_problem(self.shards, self.world_size)
        if problem:
            raise ValueError(f"no manifest can be written for {self.name}: {problem}")
        # asdict copies in depth, which for a manifest of many tensors takes longer than all the rest.
        shards = [_fields(shard) | {"tensors": [_fields(tensor) for tensor in shard.tensors]} for shard in self.shards]
        return seal(_fields(self) | {"shards": shards})

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "the manifest") -> "Manifest":
        """Read a manifest; `what` names it in the CheckpointDamaged that is raised if anything is not as written."""
        content = unseal(data, what)
        version = _take(content, "format_version", int, what)
        if version != FORMAT_VERSION:
            raise CheckpointDamaged(f"{what} has format version {version}; this release reads {FORMAT_VERSION}")
        world_size = _take(content, "world_size", int, what)
        shards = tuple(_shard(item, what) for item in _take(content, "shards", list, what))
        problem = _shards_problem(shards, world_size)
        if problem:
            raise CheckpointDamaged(f"{what} is wrong: {problem}")
        return cls(
            format_version=version,
            run=_take(content, "run", str, what),
            generation=_take(content, "generation", int, what),
            step=_take(content, "step", int, what),
            attempt=_take(content, "attempt", int, what),
            world_size=world_size,
            shards=shards,
            identity=_take(content, "identity", dict, what),
            progress=_take(content, "progress", dict, what),
            created_at=_take(content, "created_at", float, what),
        )


def checkpoint_name(step: int, generation: int, attempt: int) -> str:
    """Directory name of one save attempt; names of one run sort by step."""
    return f"step-{step:09d}-g{generation:04d}-a{attempt:02d}"


def parse_checkpoint_name(name: str) -> tuple[int, int, int] | None:
    """(step, generation, attempt), or None if lastgood did not give this name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, generation, attempt = (int(group) for group in match.groups())
    return (step, generation, attempt) if checkpoint_name(step, generation, attempt) == name else None


def checkpoint_dir(name: str) -> str:
    """Path of a checkpoint below the run directory."""
    return f"{CHECKPOINTS_DIR}/{name}"


def shard_file(rank: int, world_size: int) -> str:
    """File name of one rank's shard."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def read_manifest(store: "Store", name: str) -> Manifest:
    """The manifest of checkpoint `name`; CheckpointDamaged if it is missing, unreadable or another checkpoint's."""
    path = f"{checkpoint_dir(name)}/{MANIFEST_FILE}"
    try:
        data = store.read_bytes(path)
    except FileNotFoundError:
        raise CheckpointDamaged(f"checkpoint {name} has no {MANIFEST_FILE}, so it was never committed") from None
    manifest = Manifest.from_bytes(data, what=path)
    if manifest.name != name:
        raise CheckpointDamaged(f"{path} belongs to checkpoint {manifest.name}")
    return manifest


def _fields(record: "Manifest | ShardRecord | TensorRecord") -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def pack_shard(record: ShardRecord) -> bytes:
    """A record as one keeper sends it to another."""
    return seal(asdict(record))


def unpack_shard(data: bytes, what: str) -> ShardRecord:
    """Read it; CheckpointDamaged, in which `what` names it, if it is not as it was sent."""
    return _shard(unseal(data, what), what)


def _shards_problem(shards: Iterable[ShardRecord], world_size: int) -> str:
    ranks = [shard.rank for shard in shards]
    if world_size < 1 or ranks != list(range(world_size)):
        return f"it lists shards of ranks {ranks}, and the world size is {world_size}"
    for shard in shards:
        if shard.file != shard_file(shard.rank, world_size):
            return f"rank {shard.rank}'s shard is called {shard.file!r}"
        names = [tensor.name for tensor in shard.tensors]
        if len(set(names)) != len(names):
            return f"{shard.file} lists a tensor twice"
        for tensor in shard.tensors:
            if not 0 <= tensor.start <= tensor.stop <= shard.bytes:
                return f"{shard.file}: tensor {tensor.name!r} lies outside of the file"
            if not len(tensor.shape) == len(tensor.offsets) == len(tensor.global_shape):
                return f"{shard.file}: tensor {tensor.name!r} has shape, offsets and global shape of unequal lengths"
    return ""


def _shard(content: Any, what: str) -> ShardRecord:
    verified_from = _take(content, "verified_from", str, what)
    if verified_from not in _VERIFIED_FROM:
        raise CheckpointDamaged(f"{what}: 'verified_from' is {verified_from!r}")
    return ShardRecord(
        file=_take(content, "file", str, what),
        rank=_take(content, "rank", int, what),
        bytes=_take(content, "bytes", int, what),
        digest=_take(content, "digest", str, what),
        header_digest=_take(content, "header_digest", str, what),
        verified_from=verified_from,  # type: ignore[arg-type]  # one of these, see above
        tensors=tuple(_tensor(item, what) for item in _take(content, "tensors", list, what)),
    )


def _tensor(content: Any, what: str) -> TensorRecord:
    return TensorRecord(
        name=_take(content, "name", str, what),
        dtype=_take(content, "dtype", str, what),
        shape=_numbers(content, "shape", what),
        offsets=_numbers(content, "offsets", what),
        global_shape=_numbers(content, "global_shape", what),
        start=_take(content, "start", int, what),
        stop=_take(content, "stop", int, what),
        digest=_take(content, "digest", str, what),
    )


def _take(content: Any, key: str, kind: type[_T], what: str) -> _T:
    value = content.get(key) if isinstance(content, dict) else None
    if kind is float and type(value) is int:
        return kind(value)  # type: ignore[call-arg]  # JSON writes 5.0 and 5 alike in other languages
    if type(value) is not kind:
        raise CheckpointDamaged(f"{what}: field {key!r} is {value!r}, not {kind.__name__}")
    return value


def _numbers(content: Any, key: str, what: str) -> tuple[int, ...]:
    values = _take(content, key, list, what)
    for value in values:
        if type(value) is not int or value < 0:
            raise CheckpointDamaged(f"{what}: field {key!r} is {values!r}, not a list of sizes")
    return tuple(values)
