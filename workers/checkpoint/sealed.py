"""Small JSON files that carry their own digest: manifests and generation files.

Invariants: the bytes are a function of the content alone (keys sorted, no spaces), so one content has exactly one
encoding, and every change of any bit is noticed, also in a place that a JSON parser would overlook.

Faults survived: truncation, bit rot, a file that is not ours. All raise CheckpointDamaged, which says what and where.
"""

import json
from typing import Any

import xxhash

from workers.errors import CheckpointDamaged


def canonical_json(value: Any) -> bytes:
    """The one encoding of a JSON value; ValueError or TypeError if it is not one (inf and nan are not)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal(content: dict[str, Any]) -> bytes:
    """The file for this content: canonical JSON of content and digest, and a newline."""
    return _sealed(canonical_json(content))


def _sealed(encoded: bytes) -> bytes:
    """The file for a content that is encoded already: a manifest may be large, and encoding it is what takes time."""
    digest = xxhash.xxh3_128(encoded).hexdigest().encode()
    return b'{"content":' + encoded + b',"digest":"' + digest + b'"}\n'


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The content of a sealed file; `what` names it in the CheckpointDamaged that is raised for any other bytes."""
    try:
        envelope = json.loads(data)
        content, digest = envelope["content"], envelope["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"{what} is not a sealed JSON file ({len(data)} bytes): {error!r}") from None
    if not isinstance(content, dict):
        raise CheckpointDamaged(f"{what} has a content that is not an object")
    try:
        encoded = canonical_json(content)
    except ValueError as error:
        raise CheckpointDamaged(f"{what} has a content that is not canonical JSON: {error}") from None
    expected = xxhash.xxh3_128(encoded).hexdigest()
    if digest != expected:
        raise CheckpointDamaged(f"{what} has another digest ({expected}) than the one it was written with ({digest})")
    if data != _sealed(encoded):
        raise CheckpointDamaged(f"{what} was changed outside of its content: the bytes are not in canonical form")
    return content
