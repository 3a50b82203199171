"""Structures that compiled functions receive as one pointer, and nothing else.

A named tuple of arrays is handed over array by array at every call, which made a loop over
twenty arrays twenty times slower and minutes long to compile. Numba's own structures
(``structref``) are one argument, but count references to themselves and to each array
whenever a field is read, and that took two thirds of a simulation's time. A `Passed` is
the bare address of a block of memory with the arrays' descriptions in it. Nothing is
counted: the arrays and the block live as long as the Python object does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np
from numba import config, typeof, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, intrinsic, register_model, typeof_impl, unbox

from splitwise.sim.compiled import compiled

Fields = TypeVar("Fields", bound=NamedTuple)

_BYTES_PER_FIELD = 1024  # more than the description of any array or tuple of arrays here


class _Block(types.Type):  # type: ignore[misc]
    """What lies at the address: values of these kinds."""

    def __init__(self, kinds: tuple[Any, ...]) -> None:
        self.kinds = tuple(types.unliteral(kind) for kind in kinds)
        super().__init__(name=f"Block{self.kinds}")


class _PassedType(types.Type):  # type: ignore[misc]
    """Numba's view of a `Passed`."""

    def __init__(self, names: tuple[str, ...], block: _Block) -> None:
        self.names, self.dtype = names, block
        super().__init__(name=f"Passed({names}, {block})")


@register_model(_Block)
class _BlockModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Block) -> None:
        super().__init__(manager, kind, [(f"field{n}", part) for n, part in enumerate(kind.kinds)])


register_model(_PassedType)(models.PointerModel)


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = _PassedType

    def generic_resolve(self, passed: _PassedType, name: str) -> Any:
        return passed.dtype.kinds[passed.names.index(name)] if name in passed.names else None


@lower_getattr_generic(_PassedType)  # type: ignore[untyped-decorator]
def _read_field(context: Any, builder: Any, passed: _PassedType, address: Any, name: str) -> Any:
    block = cgutils.create_struct_proxy(passed.dtype)(context, builder, ref=address)
    return getattr(block, f"field{passed.names.index(name)}")


def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """Emit code for `value` with the owner of every array in it taken out."""
    if isinstance(kind, types.BaseTuple):
        parts = zip(kind, cgutils.unpack_tuple(builder, value), strict=True)
        return context.make_tuple(
            builder, kind, [_without_owner(context, builder, part, got) for part, got in parts]
        )
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()  # noqa: SLF001 - numba's own way to read such a view
    return value


@intrinsic  # type: ignore[untyped-decorator]
def _write(_typing: Any, address: Any, values: Any) -> Any:
    kind = _Block(tuple(values))

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if context.get_abi_sizeof(context.get_value_type(kind)) > _BYTES_PER_FIELD * len(kind.kinds):
            raise TypeError(f"{kind} needs more than {_BYTES_PER_FIELD} bytes per field")
        pointer = builder.inttoptr(arguments[0], context.get_value_type(kind).as_pointer())
        block = cgutils.create_struct_proxy(kind)(context, builder, ref=pointer)
        for number, value in enumerate(cgutils.unpack_tuple(builder, arguments[1])):
            setattr(block, f"field{number}", _without_owner(context, builder, kind.kinds[number], value))
        return context.get_dummy_value()

    return types.none(address, values), emit


@compiled
def _fill(address: int, values: tuple[Any, ...]) -> None:
    _write(address, values)


class Passed:
    """Base of the structures as Python sees them; make them with `make`.

    A subclass's annotations name the fields. In compiled code they can be read, and arrays
    in them written to.
    """

    @classmethod
    def make(cls, *values: Any) -> Self:
        """Return a structure of `values`, in the order of the class's annotations."""
        made = cls()
        made.hold(tuple(cls.__annotations__), values)
        return made

    def hold(self, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        """Take the fields' values in; once, since compiled code reads a copy of what describes them."""
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)
        if config.DISABLE_JIT:
            return
        self._block = np.zeros(_BYTES_PER_FIELD * len(values), np.uint8)
        self.address = int(self._block.ctypes.data)
        self.numba_type = _PassedType(names, _Block(tuple(typeof(value) for value in values)))
        _fill(self.address, values)


def passed_as_one(fields: Fields) -> Fields:
    """Return what has the fields of a named tuple, but is handed to compiled code as one pointer."""
    made = Passed()
    made.hold(fields._fields, fields)
    return cast("Fields", made)


@typeof_impl.register(Passed)  # type: ignore[untyped-decorator]
def _type_of(passed: Passed, _context: Any) -> _PassedType:
    return passed.numba_type


@unbox(_PassedType)  # type: ignore[untyped-decorator]
def _address_of(kind: _PassedType, passed: Any, c: Any) -> NativeValue:
    number = c.pyapi.object_getattr_string(passed, "address")
    pointer = c.pyapi.long_as_voidptr(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.bitcast(pointer, c.context.get_value_type(kind)))
