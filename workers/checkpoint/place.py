"""Where a run's checkpoints lie: in its directory, or on object storage, at a URL below the run's name.

A URL is s3://bucket/prefix, and the same with gs, az or abfs. Options of the client follow a question mark, as in
s3://bucket/prefix?endpoint=http://10.0.0.1:9000&region=eu-central-1; their names are obstore's. Secrets are none of
them: each node has its own, in its environment or its role, and a URL is logged.
"""

import errno
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from workers.checkpoint.object_store import ObjectStore, Version
from workers.checkpoint.store import LocalStore, Store

SCHEMES = ("s3", "gs", "az", "abfs")
_SECRET = ("secret", "token", "password", "access_key", "account_key", "sas", "credential", "service_account")


def open_store(run_dir: Path, url: str | None) -> Store:
    """`url`: where the runs' checkpoints are; the run's are below its name. None: in its directory."""
    if url is None:
        return LocalStore(run_dir)
    return open_bucket(url, run_dir.name)


def url_problem(url: object) -> str:
    """What would be right in place of this URL; "" if it can be one of object storage."""
    split = urlsplit(url) if isinstance(url, str) else None
    if split is None or split.scheme not in SCHEMES or not split.netloc:
        return f"a URL of object storage, such as s3://bucket/prefix; it begins with {', '.join(SCHEMES)}"
    for name, _ in parse_qsl(split.query, keep_blank_values=True):
        if any(part in name.lower() for part in _SECRET):
            return f"a URL without {name}: secrets come from the environment of each node, since URLs are logged"
    return ""


def open_bucket(url: str, below: str = "") -> ObjectStore:
    """Object storage at a URL, or below it. ValueError, saying what would be right, if it is none."""
    from obstore import exceptions
    from obstore.store import from_url

    if problem := url_problem(url):
        raise ValueError(problem)
    split = urlsplit(url)
    options: dict[str, Any] = dict(parse_qsl(split.query, keep_blank_values=True))
    prefix = "/".join(part for part in (split.path.strip("/"), below) if part)
    place = f"{split.scheme}://{split.netloc}/{prefix}".rstrip("/")
    client_options: dict[str, Any] = {"allow_http": options.get("endpoint", "").startswith("http://")}
    try:
        client = from_url(place, config=options, client_options=client_options)  # type: ignore[call-overload]
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise ValueError(f"a URL that obstore takes; it says: {str(error).partition(chr(10))[0]}") from None
    return ObjectStore(client, place)


def prove_conditions(store: ObjectStore) -> None:
    """Raise an OSError if nothing can be written, or if conditions are not kept: then drivers could not exclude each
    other."""
    key = f".probe-{uuid.uuid4().hex}"
    older = store.put_object(key, b"one")
    try:
        version = store.put_object(key, b"two", replaces=older)
        conditions: tuple[tuple[str, Version | None], ...] = (("If-None-Match", None), ("If-Match", older))
        for what, replaces in conditions:
            try:
                store.put_object(key, b"three", replaces=replaces)
            except FileExistsError:
                continue
            raise OSError(errno.EOPNOTSUPP, f"this storage does not keep the condition {what}", store.place("."))
        store.put_object(key, b"four", replaces=version)
    finally:
        store.delete_objects([key])
