"""The state of a module: everything that a forward pass may change.

It consists of parameters, buffers, and the attributes of all submodules. Attributes are followed
into lists, dictionaries and plain objects. They count as far as they are numbers, texts, tensors,
arrays or generators of random numbers; functions and objects of other kinds do not count.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 4  # containers in containers that are followed
LONGEST = 1000  # entries of a container that are followed; of a longer one only their number counts
# Attributes of `nn.Module` itself that hold its parts, which count under their own names.
PARTS = ("_parameters", "_buffers", "_modules")


class ModuleState:
    """The state of a module at one time. The values of parameters are compared, and not kept."""

    def __init__(self, module: nn.Module, checksum: Callable[[Tensor], int] | None) -> None:
        """checksum: a number that tells the values of a tensor; None: what tensors and arrays hold
        is neither compared nor kept."""
        self.checksum = checksum
        self.values: dict[str, Any] = {}
        """Path of a value -> the value, or a checksum of it."""
        self.restorations: list[Callable[[], Any]] = []
        """Functions that give what they are about its values at this time."""
        self._seen: set[int] = set()
        named = dict((*module.named_parameters(), *module.named_buffers()))
        self.saved = frozenset(named)
        """Paths of parameters and buffers, which a checkpoint of the module has."""
        for path, tensor in named.items():
            self._note(path, tensor, 0)
        for path, submodule in module.named_modules():
            attributes = vars(submodule)
            self._keep(attributes)
            for part in PARTS:
                self._keep(attributes[part])
            for name, value in attributes.items():
                if name not in PARTS:
                    self._note(f"{path}.{name}".lstrip("."), value, 0)

    def first_change(self, later: "ModuleState", *, saved: bool = False) -> str | None:
        """The path of the first value that differs in a later state; None where there is none. A
        value that only one of the states has does not count: it may be a cache.

        saved: look at parameters and buffers alone.
        """
        for path, value in self.values.items():
            counts = path in self.saved or not saved
            if counts and path in later.values and later.values[path] != value:
                return path
        return None

    def restore(self) -> None:
        """Give everything the values that it had at this time."""
        for restore in self.restorations:
            restore()

    def _note(self, path: str, value: Any, depth: int) -> None:
        """Note a value and what it contains."""
        if isinstance(value, (bool, int, float, complex, str)):
            # not `nan != nan`, which would be a change
            self.values[path] = repr(value)
            return
        if id(value) in self._seen or isinstance(value, (nn.Module, type)):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._note_tensor(path, value)
        elif isinstance(value, np.ndarray):
            if self.checksum is not None:
                self.values[path] = value.tobytes() if value.dtype != object else len(value)
        elif isinstance(value, torch.Generator):
            if self.checksum is not None:
                self.values[path] = self.checksum(value.get_state())
        elif isinstance(value, np.random.Generator):
            self.values[path] = repr(value.bit_generator.state)
        elif depth < DEPTH:
            self._note_container(path, value, depth)

    def _note_tensor(self, path: str, tensor: Tensor) -> None:
        """Note a tensor and, unless it is a parameter, how to give it its values again."""
        if self.checksum is None or tensor.is_meta or tensor.layout != torch.strided:
            return
        self.values[path] = self.checksum(tensor)
        if isinstance(tensor, nn.Parameter):
            return
        kept, data = tensor.detach().clone(), tensor.data

        def restore() -> None:
            with torch.no_grad():
                tensor.data = data.copy_(kept)

        self.restorations.append(restore)

    def _note_container(self, path: str, value: Any, depth: int) -> None:
        """Note a list, a dictionary or a plain object, and its entries."""
        if isinstance(value, dict):
            entries: Iterator[tuple[Any, Any]] = iter(value.items())
        elif isinstance(value, (list, tuple, deque)):
            entries = iter(enumerate(value))
        elif type(value).__module__.partition(".")[0] not in ("torch", "builtins"):
            value = getattr(value, "__dict__", {})
            entries = iter(value.items())
        else:
            return
        self.values[f"{path} (entries)"] = len(value)
        if len(value) > LONGEST:
            return
        self._keep(value)
        for key, entry in list(entries):
            self._note(f"{path}.{key}", entry, depth + 1)

    def _keep(self, container: Any) -> None:
        """Note how to give a container its entries again."""
        if isinstance(container, dict):
            kept = dict(container)

            def restore() -> None:
                container.clear()
                container.update(kept)

            self.restorations.append(restore)
        elif isinstance(container, (list, deque)):
            entries = list(container)

            def restore_entries() -> None:
                container.clear()
                container.extend(entries)

            self.restorations.append(restore_entries)
