"""Which file system a directory lies on, and what that means for checkpoints. Parsing is pure."""

import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.doctor.facts import StorageKind

_LOCAL = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "bcachefs",
    "jfs",
    "reiserfs",
    "vfat",
    "exfat",
    "ntfs3",
}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "virtiofs"}
_NETWORK |= {"afs", "orangefs", "ocfs2", "gfs2", "wekafs", "panfs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph"}
_NETWORK |= {"fuse.juicefs", "fuse.moosefs", "fuse.mfs", "fuse.ceph-fuse", "fuse.lizardfs"}
_OBJECT = {"s3fs", "gcsfuse", "goofys", "mount-s3", "mountpoint-s3", "blobfuse", "blobfuse2", "rclone", "geesefs"}
_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_OVERLAY = {"overlay", "aufs", "fuse.fuse-overlayfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo; `options` are the mount's and the file system's own."""

    point: str
    file_system: str
    source: str
    options: tuple[str, ...]

    @property
    def kind(self) -> StorageKind:
        """ "object": a bucket shown as a file system, where a rename is a copy. "overlay": a container's own layer."""
        name = self.file_system
        if name in _OBJECT or name.removeprefix("fuse.") in _OBJECT or self.source.partition("#")[0] in _OBJECT:
            return "object"
        for kind, names in _KINDS:
            if name in names:
                return kind
        return "unknown"


_KINDS: tuple[tuple[StorageKind, set[str]], ...] = (
    ("local", _LOCAL),
    ("network", _NETWORK),
    ("memory", _MEMORY),
    ("overlay", _OVERLAY),
)


def mount_of(directory: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """The mount that `directory` lies on; None if the kernel does not tell."""
    try:
        return find_mount(mountinfo.read_text(encoding="utf-8", errors="surrogateescape"), os.path.realpath(directory))
    except OSError:
        return None


def find_mount(mountinfo: str, path: str) -> Mount | None:
    """The one with the longest mount point above `path`; of several at one point the last, which hides the others."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        fields, separator, rest = line.partition(" - ")
        words, own = fields.split(), rest.split()
        if not separator or len(words) < 6 or len(own) < 3:
            continue
        point = _unescape(words[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best.point)):
            options = dict.fromkeys((*words[5].split(","), *own[2].split(",")))
            best = Mount(point=point, file_system=own[0], source=_unescape(own[1]), options=tuple(options))
    return best


def _unescape(text: str) -> str:
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        text = text.replace(f"\\{code}", character)
    return text
