"""Edits of a safetensors file without the libraries that would mend it, by the layout of the format."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any


def _read(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def drop_tensor(file: Path, name: str) -> None:
    """Takes a tensor away; the others keep their bytes."""
    header, data = _read(file)
    header.pop(name)
    kept, start = bytearray(), 0
    for entry in sorted((e for key, e in header.items() if key != "__metadata__"), key=lambda e: e["data_offsets"]):
        first, last = entry["data_offsets"]
        kept += data[first:last]
        entry["data_offsets"] = [start, start + last - first]
        start += last - first
    _write(file, header, bytes(kept))


def scale_tensor(file: Path, name: str, factor: float) -> None:
    """Multiplies a bf16 tensor: bf16 is the upper half of a float's bytes."""
    header, data = _read(file)
    first, last = header[name]["data_offsets"]
    assert header[name]["dtype"] == "BF16"
    scaled = bytearray()
    for position in range(first, last, 2):
        (value,) = struct.unpack("<f", b"\0\0" + data[position : position + 2])
        scaled += struct.pack("<f", value * factor)[2:]
    _write(file, header, data[:first] + bytes(scaled) + data[last:])


def _write(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
