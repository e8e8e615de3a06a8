"""Safetensors files, one tensor at a time: a model is never in memory as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.errors import ConvertError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_INDEX = "model.safetensors.index.json"


class SafetensorsWriter:
    """Writes a file whose tensors (name -> shape, all of one dtype) are known before, each when it is there, in any order.

    The format: 8 bytes length of the header; the header, JSON with dtype, shape and place of each tensor; the tensors.
    """

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype):
        self.path, self.shapes, self.dtype = path, shapes, dtype
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets, place = {}, 0
        for name, shape in shapes.items():
            size = torch.Size(shape).numel() * dtype.itemsize
            self._offsets[name] = place
            header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start, self._missing = 8 + len(text), set(shapes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, rounded to the file's dtype."""
        assert tuple(tensor.shape) == self.shapes[name], f"{name}: {list(tensor.shape)}, announced as {self.shapes[name]}"
        self._missing.remove(name)
        self._file.seek(self._start + self._offsets[name])
        data = tensor.detach().to(self.dtype).contiguous().flatten()
        self._file.write(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        assert kind is not None or not self._missing, f"{self.path}: never written: {sorted(self._missing)[:5]}"


class SafetensorsFolder:
    """The tensors of an HF model's folder: one file, or several with their index. Raises ConvertError."""

    def __init__(self, folder: Path):
        self.folder = folder
        index, single = folder / _INDEX, folder / "model.safetensors"
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConvertError(f"{index} can't be read: {error!r}") from None
        elif single.is_file():
            names = [single.name]
        else:
            pickles = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {pickles[0]} is a pickle, which is never opened here: save it as safetensors first" if pickles else ""
            raise ConvertError(f"{folder} has neither model.safetensors nor {_INDEX}{hint}")
        self._file_of: dict[str, str] = {}
        for name in names:
            try:
                with safe_open(folder / name, "pt") as file:
                    self._file_of |= dict.fromkeys(file.keys(), name)
            except (OSError, SafetensorError) as error:
                raise ConvertError(f"{folder / name} can't be read: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> Tensor:
        """One tensor, as it is in the file."""
        with safe_open(self.folder / self._file_of[name], "pt") as file:
            return file.get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        with safe_open(self.folder / self._file_of[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Its dtype as safetensors writes it: F32, BF16, …"""
        with safe_open(self.folder / self._file_of[name], "pt") as file:
            return str(file.get_slice(name).get_dtype())
