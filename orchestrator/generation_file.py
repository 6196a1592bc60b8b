"""The content of a generation's file: sealed JSON with the fields of GenerationRecord (docs/format.md).

Invariant: one record has one encoding, so a driver recognises its own file by its bytes.
"""

from dataclasses import asdict, fields
from typing import Any, get_args

from orchestrator.decide.lineage import GenerationRecord, Source
from workers.checkpoint.sealed import seal, unseal
from workers.errors import CheckpointDamaged

_FORMAT_VERSION = 1


def generation_bytes(record: GenerationRecord) -> bytes:
    """The file's content."""
    return seal({"format_version": _FORMAT_VERSION, **asdict(record)})


def parse_generation(data: bytes, number: int, path: str) -> GenerationRecord:
    """The record of generation `number`; CheckpointDamaged, naming `path`, if the file is not as it was written."""
    content = unseal(data, path)
    if content.pop("format_version", None) != _FORMAT_VERSION:
        raise CheckpointDamaged(f"{path} has another format version than {_FORMAT_VERSION}")
    if content.keys() != {field.name for field in fields(GenerationRecord)}:
        raise CheckpointDamaged(f"{path} has other fields than a generation: {', '.join(sorted(content))}")
    skip, unfinished = _batches(content["skip"], path), _names(content["unfinished"], path)
    record = GenerationRecord(**{**content, "skip": skip, "unfinished": unfinished})
    counts = (record.number, record.restored_step, record.world_size)
    if record.number != number or any(type(count) is not int or count < 0 for count in counts):
        raise CheckpointDamaged(f"{path} does not describe generation {number}")
    if not isinstance(record.parent_generation, int | None) or record.source not in get_args(Source):
        raise CheckpointDamaged(f"{path} does not say what generation {number} restored")
    return record


def _batches(value: object, path: str) -> tuple[tuple[int, int], ...]:
    pairs: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(pair, list) and [type(count) for count in pair] == [int, int] for pair in pairs):
        raise CheckpointDamaged(f"{path} has a skip that is no list of [epoch, batch]")
    return tuple((epoch, batch) for epoch, batch in pairs)


def _names(value: object, path: str) -> tuple[str, ...]:
    names: list[Any] = value if isinstance(value, list) else [None]
    if not all(isinstance(name, str) for name in names):
        raise CheckpointDamaged(f"{path} has unfinished attempts that are no list of names")
    return tuple(names)


def unknown_generation(number: int, problem: str) -> GenerationRecord:
    """Stands for a file that cannot be read: the generation existed, and nothing is known of where it came from."""
    return GenerationRecord(
        number=number,
        driver="",
        parent=None,
        parent_generation=None,
        restored_step=0,
        source="unknown",
        reason=problem,
        created_at=0.0,
        world_size=0,
    )
