"""A bounded reader of the pickles inside torch checkpoints: opcodes in, inert values out.

No object of the pickle is built and no function in it is called. Tensors become `PickledTensor`,
the metadata that locate their values; of all other values only strings, numbers and the structure
of containers remain. The reader accepts the opcodes that `torch.save` writes and the globals that
`torch.load(weights_only=True)` accepts, and rejects the rest. Bytes, opcodes, nesting and
dimensions are bounded.

References:
    - `pickletools` of the standard library, for the opcodes.
    - `torch._weights_only_unpickler`, for the subset of them that checkpoints need.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from regauge.checkpoints.files import format_bytes
from regauge.errors import CheckpointError

MAX_BYTES = 1 << 25  # of one pickle
MAX_OPCODES = 2_000_000  # of one pickle: about 60,000 tensors
MAX_DEPTH = 512  # of nested marks
MAX_DIMENSIONS = 32
MAX_NUMBER = 1 << 60  # sizes, strides and offsets
_MAX_GLOBAL = 256  # characters of a module or of a name

# Storage class -> dtype and bytes per element, by torch's names.
_STORAGES = {
    "UntypedStorage": ("uint8", 1),
    "ByteStorage": ("uint8", 1),
    "CharStorage": ("int8", 1),
    "BoolStorage": ("bool", 1),
    "QUInt8Storage": ("quint8", 1),
    "QInt8Storage": ("qint8", 1),
    "QUInt4x2Storage": ("quint4x2", 1),
    "QUInt2x4Storage": ("quint2x4", 1),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "ShortStorage": ("int16", 2),
    "FloatStorage": ("float32", 4),
    "IntStorage": ("int32", 4),
    "QInt32Storage": ("qint32", 4),
    "DoubleStorage": ("float64", 8),
    "LongStorage": ("int64", 8),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
}
_SIZES = {
    **dict.fromkeys(
        (
            "bool",
            "uint8",
            "int8",
            "quint8",
            "qint8",
            "quint4x2",
            "quint2x4",
            "bits8",
            "bits1x8",
            "bits2x4",
            "bits4x2",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        ),
        1,
    ),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
_QSCHEMES = (
    "per_tensor_affine",
    "per_tensor_symmetric",
    "per_channel_affine",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
# Tensors that safetensors cannot hold, by the function that rebuilds them.
_UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch._utils._rebuild_nested_tensor": "nested",
    "torch._utils._rebuild_qtensor": "quantized",
    "torch._utils._rebuild_meta_tensor_no_storage": "on the meta device, without data",
    "torch._utils._rebuild_wrapper_subclass": "a wrapper subclass, without data",
    "torch._utils._rebuild_device_tensor_from_numpy": "a numpy array on another device",
}
_GLOBALS = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "builtins.set",
        "builtins.bytearray",
        "builtins.complex",
        "_codecs.encode",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.nn.parameter.Parameter",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        "torch.storage.UntypedStorage",
        *_UNSUPPORTED,
        *(
            f"torch.{place}{name}"
            for place in ("", "cuda.")
            for name in _STORAGES
            if name != "UntypedStorage"
        ),
        *(f"torch.{name}" for name in (*_SIZES, *_QSCHEMES)),
    }
)


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory that tensors view.

    Attributes:
        key: Key of its bytes in the file.
        dtype: Its dtype.
        itemsize: Bytes per element.
        full_numel: Its declared number of elements.
        offset: First element of the selected part (files of the format before torch 1.6).
        numel: Number of elements of the selected part.
    """

    key: str
    dtype: str
    itemsize: int
    full_numel: int
    offset: int
    numel: int

    @property
    def nbytes(self) -> int:
        return self.full_numel * self.itemsize


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A strided tensor whose elements all lie within its storage.

    Offset and strides are numbers of elements.
    """

    storage: Storage
    dtype: str
    itemsize: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class UnsupportedTensor:
    """A tensor that is not dense and strided. `kind` completes "the tensor is ..."."""

    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """Any other value. `name` is its type, its repr, or the global that would build it."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


_SET, _NUMBER = Opaque("set"), (int, float)


def read_pickle(
    data: bytes | mmap.mmap, label: str, start: int = 0
) -> tuple[Any, int, dict[str, Storage]]:
    """Read one pickle.

    Args:
        data: The bytes that hold it.
        label: The name of the file in errors.
        start: The position of its first byte.

    Returns:
        The value, the position after the pickle, and every storage that it refers to, by key.

    Raises:
        CheckpointError: The pickle is damaged, exceeds a bound, or uses features that checkpoints
            do not need.
    """
    machine = _Machine(data, label, start)
    try:
        return machine.run(), machine.at, machine.storages
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise CheckpointError(
            f"{label} is damaged: its pickle is invalid at byte {machine.at} "
            f"({type(error).__name__})",
            hint="fetch the file again",
        ) from error


class _Machine:
    """The stack machine of a pickle. Opcodes and copied items share one budget."""

    def __init__(self, data: bytes | mmap.mmap, label: str, start: int) -> None:
        self.data, self.label, self.at = data, label, start
        self.end = min(len(data), start + MAX_BYTES)
        self.budget = MAX_OPCODES
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def run(self) -> Any:
        """Execute opcodes up to STOP and return the value on top of the stack."""
        table = _OPCODES
        while True:
            code = self.take(1)[0]
            self.spend(1)
            if code == 0x2E:  # STOP
                return self.stack.pop()
            step = table.get(code)
            if step is None:
                raise self.rejection(
                    f"opcode 0x{code:02x} at byte {self.at - 1} is not one that torch.save writes"
                )
            step(self)

    # reading

    def take(self, n: int) -> bytes:
        """Return the next n bytes."""
        at = self.at
        if at + n > self.end:
            if self.end < len(self.data):
                raise self.rejection(f"its pickle must have at most {format_bytes(MAX_BYTES)}")
            raise CheckpointError(
                f"{self.label} is damaged: its pickle is truncated", hint="fetch the file again"
            )
        self.at = at + n
        return self.data[at : at + n]

    def number(self, code: str) -> int:
        """Read an integer by its `struct` format."""
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def line(self) -> str:
        """Read a line, without its end."""
        stop = self.data.find(b"\n", self.at, min(self.end, self.at + _MAX_GLOBAL + 1))
        if stop < 0:
            raise self.rejection(f"a name in its pickle must have at most {_MAX_GLOBAL} characters")
        return self.take(stop + 1 - self.at)[:-1].decode("utf-8")

    def spend(self, n: int) -> None:
        """Deduct n steps from the budget."""
        self.budget -= n
        if self.budget < 0:
            raise self.rejection(
                f"its pickle must have at most {MAX_OPCODES:,} opcodes", "save the model in shards"
            )

    def rejection(
        self, reason: str, hint: str = "save model.state_dict() alone, where you trust the file"
    ) -> CheckpointError:
        """Return the error for a pickle that is not a checkpoint."""
        return CheckpointError(
            f"{self.label} holds more than tensors, or is damaged: {reason}", hint=hint
        )

    # the stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        """Open a container."""
        if len(self.marks) >= MAX_DEPTH:
            raise self.rejection(f"its pickle must nest at most {MAX_DEPTH} levels")
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Close a container and return its items."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def put(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        if index > MAX_OPCODES:  # picklers count from zero
            raise self.rejection(f"memo index must be <= {MAX_OPCODES:,}, got {index:,}")
        self.memo[index] = self.stack[-1]

    def tuple_of(self, n: int) -> None:
        """Replace the top n values by a tuple of them."""
        if len(self.stack) < n:
            raise IndexError
        items = tuple(self.stack[-n:])
        del self.stack[-n:]
        self.push(items)

    def set_items(self, items: list[Any]) -> None:
        """Add alternating keys and values to the dictionary on top of the stack."""
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise self.rejection(f"cannot set items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_sanitize_key(key)] = value

    def append_items(self, items: list[Any]) -> None:
        """Extend the list on top of the stack."""
        target = self.stack[-1]
        if type(target) is not list:
            raise self.rejection(f"cannot append to a {type(target).__name__}")
        target.extend(items)

    def protocol(self) -> None:
        """Skip the protocol number."""
        self.take(1)

    def text(self, n: int) -> None:
        """Push a string of n bytes."""
        self.push(self.take(n).decode("utf-8", "surrogatepass"))

    # globals and calls

    def find_global(self) -> None:
        """Push a global of the allow-list; it is never imported."""
        module, name = self.line(), self.line()
        module = {"__builtin__": "builtins", "torch.tensor": "torch._tensor"}.get(module, module)
        if f"{module}.{name}" not in _GLOBALS:
            raise self.rejection(
                f"it names {module[:80]!r}.{name[:80]!r}, which no checkpoint needs"
            )
        self.push(_Global(f"{module}.{name}"))

    def reduce(self) -> None:
        """Replace a global and its arguments by the inert value of the call."""
        args = self.stack.pop()
        function = self.stack.pop()
        if type(function) is not _Global or type(args) is not tuple:
            raise self.rejection(f"cannot call a {type(function).__name__}")
        self.push(self.call(function.name, args))

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the inert value of a call, without calling anything."""
        if name in _UNSUPPORTED:
            return UnsupportedTensor(_UNSUPPORTED[name])
        match name.rpartition(".")[2], args:
            case "OrderedDict", ():
                return {}
            case "OrderedDict", (list() as pairs,):  # Python 2 wrote the items as arguments
                self.spend(4 * len(pairs))  # a key and an entry for each
                return {_sanitize_key(key): value for key, value in pairs}
            case "Size", (tuple() as size,):
                return size
            case "_rebuild_tensor", (storage, offset, size, stride):
                return self.tensor(storage, offset, size, stride)
            case "_rebuild_tensor_v2", (storage, offset, size, stride, _, _, *metadata):
                return self.tensor(storage, offset, size, stride, metadata=metadata)
            case "_rebuild_tensor_v3", (
                storage,
                offset,
                size,
                stride,
                _,
                _,
                _Global() as dtype,
                *metadata,
            ):
                return self.tensor(
                    storage, offset, size, stride, dtype.name.rpartition(".")[2], metadata
                )
            case (
                "_rebuild_parameter" | "_rebuild_parameter_with_state" | "Parameter",
                (tensor, *_),
            ):
                return tensor
            case "_rebuild_from_type_v2", (_Global() as function, _, tuple() as inner, _):
                if "_rebuild_from_type" in function.name:  # one level, so that nothing recurses
                    raise self.rejection("tensor types must not be nested")
                return self.call(function.name, inner)
            case "_rebuild_device_tensor_from_cpu_tensor", (
                PickledTensor() as tensor,
                _Global() as dtype,
                *_,
            ):
                same = dtype.name == f"torch.{tensor.dtype}"
                return (
                    tensor
                    if same
                    else UnsupportedTensor(
                        f"stored as {tensor.dtype}, but declared as {dtype.name}"
                    )
                )
            case last, _ if last.startswith(("_rebuild", "OrderedDict", "Size", "Parameter")):
                raise self.rejection(f"the arguments of {name} are invalid")
        return Opaque(name)

    def build(self) -> None:
        """Ignore the attributes of dictionaries, which carry no weights.

        Attributes of a tensor are rejected: they could change it.
        """
        self.stack.pop()
        if isinstance(self.stack[-1], PickledTensor | UnsupportedTensor):
            raise self.rejection("cannot set the state of a tensor")

    def storage(self) -> None:
        """Replace a persistent id by the storage that it describes."""
        pid = self.stack.pop()
        match pid:
            case ("storage", _Global(name), str() as key, str(), int() as numel):
                view = None
            case ("storage", _Global(name), str() as key, str(), int() as numel, view):
                pass
            case _:
                raise self.rejection("a persistent id must describe a storage")
        known = _STORAGES.get(name.rpartition(".")[2])
        if known is None:
            raise self.rejection(f"{name} is not a storage class")
        offset, size = (0, numel) if view is None else (view[1], view[2])
        full_numel = _check_number(numel)
        storage = Storage(key, *known, full_numel, _check_number(offset), _check_number(size))
        if storage.offset + storage.numel > full_numel:
            raise self.rejection(
                f'a view of storage "{key}" must end at element {full_numel} at most, got '
                f"{storage.offset + storage.numel}"
            )
        first = self.storages.setdefault(key, storage)
        if (first.nbytes, first.itemsize) != (storage.nbytes, storage.itemsize):
            raise self.rejection(
                f'storage "{key}" is declared twice, with {first.nbytes} and with '
                f"{storage.nbytes} bytes"
            )
        self.push(storage)

    def tensor(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        dtype: str | None = None,
        metadata: Any = (),
    ) -> Any:
        """Return the tensor with these arguments of torch's rebuild functions."""
        if type(storage) is not Storage or type(size) is not tuple or type(stride) is not tuple:
            raise self.rejection("a tensor must have a storage, a shape and strides")
        if len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
            raise self.rejection(
                f"a tensor must have at most {MAX_DIMENSIONS} dimensions and as many strides, "
                f"got {len(size)} and {len(stride)}"
            )
        if any(metadata):
            return UnsupportedTensor("a lazily conjugated or negated view")
        itemsize = storage.itemsize
        if dtype is not None:
            itemsize = _SIZES.get(dtype, 0)
            if not itemsize:
                raise self.rejection(f"{dtype} is not a dtype")
        shape, steps, first = (
            tuple(map(_check_number, size)),
            tuple(map(_check_number, stride)),
            _check_number(offset),
        )
        last = first + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
        if 0 not in shape and (last + 1) * itemsize > storage.numel * storage.itemsize:
            raise self.rejection(
                f'a tensor of shape {list(shape)} must lie within its storage "{storage.key}" '
                f"of {storage.numel * storage.itemsize} bytes, "
                f"got {(last + 1) * itemsize}"
            )
        return PickledTensor(storage, dtype or storage.dtype, itemsize, first, shape, steps)


def _check_number(value: Any) -> int:
    """Return a size, stride or offset; raise ValueError unless it is a bounded integer >= 0."""
    if type(value) is not int or not 0 <= value < MAX_NUMBER:
        raise ValueError
    return value


def _sanitize_key(key: Any) -> Any:
    """Replace every key that is not a string.

    Python hashes strings with a secret seed. Numbers can be chosen with equal hashes, which stalls
    a dictionary, and hashing a deep tuple overflows the stack of the interpreter.
    """
    return (
        key
        if type(key) is str
        else Opaque(repr(key) if isinstance(key, _NUMBER) else type(key).__name__)
    )


_OPCODES: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    ord("("): _Machine.mark,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.take(1)[0]),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    0x8A: lambda m: m.push(int.from_bytes(m.take(m.take(1)[0]), "little", signed=True)),  # LONG1
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("X"): lambda m: m.text(m.number("<I")),
    ord("U"): lambda m: m.text(m.take(1)[0]),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(tuple(m.pop_mark())),
    ord("]"): lambda m: m.push([]),
    ord("a"): lambda m: m.append_items([m.stack.pop()]),
    ord("e"): lambda m: m.append_items(m.pop_mark()),
    ord("}"): lambda m: m.push({}),
    0x8F: lambda m: m.push(_SET),  # EMPTY_SET
    ord("s"): lambda m: m.set_items([m.stack.pop(), m.stack.pop()][::-1]),
    ord("u"): lambda m: m.set_items(m.pop_mark()),
    ord("h"): lambda m: m.push(m.memo[m.take(1)[0]]),
    ord("j"): lambda m: m.push(m.memo[m.number("<I")]),
    ord("q"): lambda m: m.put(m.take(1)[0]),
    ord("r"): lambda m: m.put(m.number("<I")),
    ord("c"): _Machine.find_global,
    ord("R"): _Machine.reduce,
    0x81: _Machine.reduce,  # NEWOBJ
    ord("b"): _Machine.build,
    ord("Q"): _Machine.storage,
}
