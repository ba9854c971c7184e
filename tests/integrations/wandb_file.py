"""Reads the file of an offline Weights & Biases run: a log of LevelDB's kind, of protobuf records.

After seven bytes come blocks of 32 KiB; each holds chunks of a checksum, a length and a type (1: a
whole record; 2, 3, 4: its first, middle and last part).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, CHUNK_HEAD = 1 << 15, 7


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + CHUNK_HEAD <= len(data):
        if BLOCK - at % BLOCK < CHUNK_HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + CHUNK_HEAD : at + CHUNK_HEAD + length]
        at += CHUNK_HEAD + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        for record in records(path)
        if (items := record.history.item)
    ]
