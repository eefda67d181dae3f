# SPDX-License-Identifier: Apache-2.0
"""Find and read all files of a checkpoint from any one of them."""

import re
from dataclasses import dataclass
from pathlib import Path

from .header import GgufError, Header, Tensor, Value, read_header

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<index>\d{1,5})-of-(?P<count>\d{1,5})\.gguf")
_MAX_SHARDS = 1000


@dataclass(frozen=True)
class Checkpoint:
    """All files of one model.

    Attributes:
        headers: one a shard, in order.
        metadata: of the first shard; later ones hold little more than their number.
        tensors: of all shards by name; the first shard often has none.
    """

    headers: tuple[Header, ...]
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(header.size for header in self.headers)


def shard_paths(path: Path) -> list[Path]:
    """The paths of all shards, of which `path` names one; `path` alone if unsplit.

    Goes by the name only; the files need not exist.

    Raises:
        GgufError: the name makes no sense.
    """
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    index, count = int(match["index"]), int(match["count"])
    if not 1 <= index <= count <= _MAX_SHARDS:
        raise GgufError(f"{path}: shard {index} of {count} makes no sense")
    width = len(match["index"])
    return [
        path.with_name(f"{match['stem']}-{i:0{width}}-of-{match['count']}.gguf")
        for i in range(1, count + 1)
    ]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of all files of the model that `path` belongs to.

    Raises:
        GgufError: a file is missing or unusable, or the files do not fit together.
    """
    paths = shard_paths(path)
    missing = [shard.name for shard in paths if not shard.exists()]
    if missing and len(paths) > 1:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise GgufError(
            f"{path.parent}: {len(missing)} of {len(paths)} files are missing: "
            f"{', '.join(missing[:3])}{more}"
        )
    headers = tuple(map(read_header, paths))
    tensors: dict[str, Tensor] = {}
    owners: dict[tuple[int, int], Path] = {}
    for position, header in enumerate(headers):
        _check_split(header, position, len(headers))
        if other := owners.get(header.identity):
            raise GgufError(f"{header.path}: the same file as {other.name}")
        owners[header.identity] = header.path
        for tensor in header.tensors:
            if other_tensor := tensors.get(tensor.name):
                raise GgufError(
                    f"{header.path}: tensor {tensor.name} is also in "
                    f"{other_tensor.path.name}"
                )
            tensors[tensor.name] = tensor
    expected = headers[0].metadata.get("split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise GgufError(
            f"{headers[0].path}: the set should hold {expected} tensors, but its "
            f"{len(headers)} files hold {len(tensors)}"
        )
    return Checkpoint(headers, headers[0].metadata, tensors)


def _check_split(header: Header, position: int, count: int) -> None:
    """What the file says of its place in the set agrees with its name."""
    said_count = header.metadata.get("split.count", 1)
    said_position = header.metadata.get("split.no", 0)
    # One file alone may say that it is a split of none.
    if count == 1 and said_count in (0, 1):
        return
    if (said_position, said_count) != (position, count):
        place = f"shard {said_position!r} (from 0) of {said_count!r}"
        raise GgufError(
            f"{header.path}: says that it is {place}, but its name makes it shard "
            f"{position} of {count}; give the files the names they were published with"
        )
