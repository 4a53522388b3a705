"""Ways to save a checkpoint, and how each is loaded: eleven that break under some death, and two that don't. A way has
`save(disk, number)`, called for the saves 1, 2, 3, and `load(files)`. `load` returns the number of the save from which
a resume would continue; None: it would start from scratch; Broken: it would die, or load a torn file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from saves import Disk

Files = Mapping[str, bytes]
SIZE = 10_000


class Broken(Exception):
    pass


@dataclass(frozen=True)
class Protocol:
    save: Callable[[Disk, int], None]
    load: Callable[[Files], int | None]
    breaks: tuple[str, ...]  # the models under which it breaks: process death, and the three models of a loss of power
    first: int = 1  # the number of the first save; if 2, the complete and synced file `last` of save 1 exists


def data(number: int) -> bytes:
    return b"%d" % number * SIZE


def whole(content: bytes) -> int:
    """The number of the save that wrote these bytes. Raises Broken if they are not those of one complete save."""
    if len(content) != SIZE or content.strip(content[:1]) or not content[:1].isdigit() or content[:1] == b"0":
        raise Broken("torn")
    return int(content[:1])


def _last(files: Files) -> int | None:
    return whole(files["last"]) if "last" in files else None


def _newest(files: Files) -> int | None:
    """Chooses by name: the newest `step-N`, which must be complete."""
    names = [name for name in files if name.startswith("step-") and "/" not in name]
    return whole(files[max(names)]) if names else None


def _pointer(files: Files) -> int | None:
    """Chooses by a file that holds the name of the newest checkpoint."""
    if "latest" not in files:
        return None
    name = files["latest"].decode()
    if name not in files:
        raise Broken(f"latest says {name!r}")
    return whole(files[name])


def _marked(files: Files) -> int | None:
    """Chooses the newest folder with a marker. All its files must be complete."""
    marked = [name for name in files if name.startswith("step-") and name.endswith("/done")]
    return whole(files.get(max(marked).replace("done", "data"), b"")) if marked else None


def _sharded(files: Files) -> int | None:
    """Like `_marked`, with two shards."""
    number = _marked(files)
    return number and whole(files.get(f"step-{number}/data-1", b""))


def _write(disk: Disk, path: str, content: bytes, sync: bool) -> None:
    disk.rank(0).save(path, content[: SIZE // 2], content[SIZE // 2 :], sync=sync)


def atomic(disk: Disk, number: int) -> None:
    """Right: writes a new file, syncs it, renames it, and syncs its folder."""
    _write(disk, "tmp", data(number), sync=True)
    disk.rank(0).rename("tmp", "last")
    disk.rank(0).fsync_folder()


def folders(disk: Disk, number: int) -> None:
    """Right: makes a new folder for each save, syncs everything in it, renames and syncs it, and then removes older
    folders."""
    hand = disk.rank(0)
    hand.mkdir("tmp")
    hand.save("tmp/data", data(number), sync=True)
    hand.save("tmp/done", b"1", sync=True)
    hand.fsync_folder("tmp")
    hand.rename("tmp", f"step-{number}")
    hand.fsync_folder()
    if number > 2:
        hand.unlink(f"step-{number - 2}/done")
        hand.fsync_folder(f"step-{number - 2}")
        hand.unlink(f"step-{number - 2}/data")
        hand.rmdir(f"step-{number - 2}")


def in_place(disk: Disk, number: int) -> None:
    _write(disk, "last", data(number), sync=True)


def no_sync_new_name(disk: Disk, number: int) -> None:
    _write(disk, "tmp", data(number), sync=False)
    disk.rank(0).rename("tmp", f"step-{number}")
    disk.rank(0).fsync_folder()


def no_sync_same_name(disk: Disk, number: int) -> None:
    _write(disk, "tmp", data(number), sync=False)
    disk.rank(0).rename("tmp", "last")


def marker_first(disk: Disk, number: int) -> None:
    hand = disk.rank(0)
    hand.mkdir(f"step-{number}")
    hand.save(f"step-{number}/done", b"1", sync=True)
    hand.save(f"step-{number}/data", data(number), sync=True)
    hand.fsync_folder(f"step-{number}")
    hand.fsync_folder()


def no_folder_sync(disk: Disk, number: int) -> None:
    _write(disk, "tmp", data(number), sync=True)
    disk.rank(0).rename("tmp", f"step-{number}")
    if number > 1:
        disk.rank(0).unlink(f"step-{number - 1}")


def unlink_first(disk: Disk, number: int) -> None:
    _write(disk, "tmp", data(number), sync=True)
    if number > 1:
        disk.rank(0).unlink("last")
    disk.rank(0).rename("tmp", "last")
    disk.rank(0).fsync_folder()


def folder_twice(disk: Disk, number: int) -> None:
    hand = disk.rank(0)
    if number == 1:
        hand.mkdir("step-1")
    else:
        hand.unlink("step-1/done")
    hand.save("step-1/data", data(number), sync=True)
    hand.save("step-1/done", b"1", sync=True)
    hand.fsync_folder("step-1")
    hand.fsync_folder()


def early_rename(disk: Disk, number: int) -> None:
    """Wrong: renames the file before it is written to its end; syncs everything at the end."""
    file = disk.rank(0).open("tmp")
    file.write(data(number)[: SIZE // 2])
    file.fsync()
    disk.rank(0).rename("tmp", "last")
    file.write(data(number)[SIZE // 2 :])
    file.fsync()
    file.close()
    disk.rank(0).fsync_folder()


def no_barrier(disk: Disk, number: int) -> None:
    """Wrong: rank 0 does not wait for the shard of rank 1 before it writes the marker."""
    disk.barrier(0, 1)
    disk.rank(0).mkdir(f"step-{number}")
    for rank, name in ((1, "data-1"), (0, "data")):
        disk.rank(rank).save(f"step-{number}/{name}", data(number), sync=True)
    disk.rank(0).fsync_folder(f"step-{number}")
    disk.rank(0).fsync_folder()
    disk.rank(0).save(f"step-{number}/done", b"1", sync=True)
    disk.rank(0).fsync_folder(f"step-{number}")


def pointer_in_place(disk: Disk, number: int) -> None:
    """Wrong: the checkpoint is right, but the file that names it is overwritten in place."""
    _write(disk, f"step-{number}", data(number), sync=True)
    disk.rank(0).fsync_folder()
    disk.rank(0).save("latest", f"step-{number}".encode(), sync=True)
    disk.rank(0).fsync_folder()


def never_closed(disk: Disk, number: int) -> None:
    """Wrong: renames a file onto the last checkpoint while it is still open."""
    file = disk.rank(0).open("tmp")
    file.write(data(number))
    disk.rank(0).rename("tmp", "last")


PROCESS, STRICT, EXT4, NFS = "process", "strict", "ext4-ordered", "nfs-close-to-open"
ALL = (PROCESS, STRICT, EXT4, NFS)
PROTOCOLS = {
    "atomic": Protocol(atomic, _last, ()),
    "folders": Protocol(folders, _marked, ()),
    "in place": Protocol(in_place, _last, ALL),
    "no fsync before a rename to a new name": Protocol(no_sync_new_name, _newest, (STRICT, EXT4)),
    "no fsync before a rename onto the last": Protocol(no_sync_same_name, _last, (STRICT,), first=2),
    "marker before data": Protocol(marker_first, _marked, ALL),
    "no fsync of the folder": Protocol(no_folder_sync, _newest, (STRICT,)),
    "unlink before rename": Protocol(unlink_first, _last, ALL),
    "a folder used twice": Protocol(folder_twice, _marked, ALL),
    "rename before the last write": Protocol(early_rename, _last, ALL),
    "no barrier before the marker": Protocol(no_barrier, _sharded, ALL),
    "a pointer overwritten in place": Protocol(pointer_in_place, _pointer, ALL),
    "a file that is never closed": Protocol(never_closed, _last, (STRICT, NFS), first=2),
}
