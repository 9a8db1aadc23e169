"""Zip archives of ``torch.save``, looked through before anything in them is unpacked.

torch writes each member as it is, one after the other, and the directory last. An archive of any
other form is refused: compressed members, members that share bytes, and sizes that disagree are how
a few kilobytes ask for gigabytes; bytes around the archive let two readers see two archives.
"""

from __future__ import annotations

import zipfile
from typing import IO

from pt214_dcp.errors import ChunkCorrupt

_END = b"PK\x05\x06"
_END_BYTES = 22
_LOCAL_BYTES = 30
_ENCRYPTED = 1


def check_archive(stream: IO[bytes], where: str) -> dict[str, int]:
    """Name -> size of each member of an archive that takes no more memory than it is long.

    Args:
        stream: the archive and nothing else; it can seek.
        where: the file and what it stands for, for messages.

    Raises:
        ChunkCorrupt: no archive as torch writes it; the message has the file and the member.
    """
    directory = _end(stream, where)
    try:
        with zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            begins = archive.start_dir
    except Exception as error:  # damaged archives raise many kinds
        raise ChunkCorrupt(f"{where}: {error}") from error
    if directory is not None and begins != directory:
        raise ChunkCorrupt(f"{where}: bytes before the archive's first member")
    sizes: dict[str, int] = {}
    at = 0
    for member in sorted(members, key=lambda each: each.header_offset):
        name = f"{where}: entry {member.filename!r}"
        _check_member(member, name)
        if member.filename in sizes:
            raise ChunkCorrupt(f"{name} is there twice")
        if member.header_offset < at or (not sizes and member.header_offset):
            raise ChunkCorrupt(f"{name} at offset {member.header_offset}: {at} bytes precede it")
        at = member.header_offset + _LOCAL_BYTES + member.file_size
        if at > begins:
            raise ChunkCorrupt(f"{name} ends at {at}, the archive's members at {begins}")
        sizes[member.filename] = member.file_size
    return sizes


def check_contents(stream: IO[bytes], where: str) -> None:
    """Hold each member against the crc32 that was written; torch does not look.

    Raises:
        ChunkCorrupt: one differs; the message has the file and the member.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except Exception as error:  # damaged archives raise many kinds
        raise ChunkCorrupt(f"{where}: {error}") from error
    if damaged is not None:
        raise ChunkCorrupt(f"{where}: entry {damaged!r} has another crc32 than was written")


def _end(stream: IO[bytes], where: str) -> int | None:
    """Where the directory begins, if the last record tells; archives of 4 GiB tell elsewhere."""
    length = stream.seek(0, 2)
    stream.seek(max(0, length - _END_BYTES))
    end = stream.read(_END_BYTES)
    if len(end) < _END_BYTES or not end.startswith(_END) or end[-2:] != b"\0\0":
        raise ChunkCorrupt(f"{where}: not an archive of torch.save: damaged, or cut at {length}")
    if int.from_bytes(end[10:12], "little") * 46 > length:
        raise ChunkCorrupt(f"{where}: an archive with more entries than it has room for")
    begins = int.from_bytes(end[16:20], "little")
    return None if begins == 0xFFFFFFFF else begins


def _check_member(member: zipfile.ZipInfo, name: str) -> None:
    if member.compress_type != zipfile.ZIP_STORED:
        raise ChunkCorrupt(
            f"{name} is compressed (method {member.compress_type}); torch.save stores without "
            "compression: unpack it, and zip it anew with zip -0"
        )
    if member.compress_size != member.file_size:
        raise ChunkCorrupt(
            f"{name} is stored in {member.compress_size} bytes and claims {member.file_size}"
        )
    if member.flag_bits & _ENCRYPTED:
        raise ChunkCorrupt(f"{name} is encrypted")
