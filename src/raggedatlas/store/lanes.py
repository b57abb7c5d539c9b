"""Vector instructions for blocks of 256 values in eight lanes, written as LLVM IR, and a few bit operations.

Value i of a block lies in lane ``i % 8`` at position ``i // 8``; a lane is a stream of bits, lowest first, cut into
little-endian words of 32 bits, and word k of lane l is word ``8 * k + l`` of the block. Eight lanes side by side are one
vector register, so that one shift and one mask unpack eight neighbours.

This module imports numba at the top, so it is imported inside functions only.
"""

# ruff: noqa: ANN401, TID253 - numba's code generators are called with objects of no public type

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

LANES = 8
POSITIONS = 32
BLOCK = LANES * POSITIONS
"""Values of a full block."""

SIXTEEN = 16
"""Values that `first_not_below` and `mark_sixteen` look at."""

WORD_BITS = 64
"""Values that `above` looks at."""

_WORD = ir.IntType(32)
_LONG = ir.IntType(64)
_BYTE = ir.IntType(8)
_VECTOR = ir.VectorType(_WORD, LANES)
_VECTOR_BYTES = 4 * LANES


def _splat(value: int) -> Any:
    """Return a constant vector."""
    return ir.Constant(_VECTOR, [value & 0xFFFFFFFF] * LANES)


def _spread(builder: Any, value: Any, n: int) -> Any:
    """Return a vector of `n` times a word."""
    kind = ir.VectorType(_WORD, n)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_WORD, n), [0] * n))


def _words_at(builder: Any, address: Any, n: int) -> Any:
    """Load `n` neighbouring words from an address."""
    return builder.load(builder.inttoptr(address, ir.VectorType(_WORD, n).as_pointer()), align=4)


def _vector_at(builder: Any, address: Any, number: int) -> Any:
    """Return the pointer to vector `number` behind an address."""
    shifted = builder.add(address, ir.Constant(_LONG, _VECTOR_BYTES * number))
    return builder.inttoptr(shifted, _VECTOR.as_pointer())


def _emit_unpack(builder: Any, width: int, source: Any, target: Any) -> None:
    """Emit the code that unpacks 256 values of a known width."""
    words: dict[int, Any] = {}

    def word(number: int) -> Any:
        if number not in words:
            words[number] = builder.load(_vector_at(builder, source, number), align=1)
        return words[number]

    mask = (1 << width) - 1
    for position in range(POSITIONS):
        if width == 0:
            value = _splat(0)
        else:
            number, shift = divmod(position * width, 32)
            value = word(number)
            if shift:
                value = builder.lshr(value, _splat(shift))
            if shift + width > 32:
                value = builder.or_(value, builder.shl(word(number + 1), _splat(32 - shift)))
            if shift + width != 32:
                value = builder.and_(value, _splat(mask))
        builder.store(value, _vector_at(builder, target, position), align=4)


def _emit_pack(builder: Any, width: int, source: Any, target: Any) -> None:
    """Emit the code that packs 256 values that fit a known width."""
    held: Any = None
    for position in range(POSITIONS if width else 0):
        number, shift = divmod(position * width, 32)
        value = builder.load(_vector_at(builder, source, position), align=4)
        moved = builder.shl(value, _splat(shift)) if shift else value
        held = moved if held is None else builder.or_(held, moved)
        if shift + width >= 32:
            builder.store(held, _vector_at(builder, target, number), align=1)
            held = builder.lshr(value, _splat(32 - shift)) if shift + width > 32 else None


def _make_pack_full(typing_context: Any, width: Any, source: Any, target: Any) -> Any:
    """Pack 256 uint32 below ``1 << width``, width 0 to 32, from one address to another; the inverse of `unpack_full`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width, source, target = arguments
        done = builder.append_basic_block("packed")
        choice = builder.switch(width, done)
        for known in range(33):
            case = builder.append_basic_block(f"width{known}")
            choice.add_case(ir.Constant(width.type, known), case)
            builder.position_at_end(case)
            _emit_pack(builder, known, source, target)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64, types.uint64), generate


def _make_unpack_full(typing_context: Any, width: Any, source: Any, target: Any) -> Any:
    """Unpack 256 values of `width` bits, 0 to 32, from one address to 256 uint32 at another; other widths do nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width, source, target = arguments
        done = builder.append_basic_block("unpacked")
        choice = builder.switch(width, done)
        for known in range(33):
            case = builder.append_basic_block(f"width{known}")
            choice.add_case(ir.Constant(width.type, known), case)
            builder.position_at_end(case)
            _emit_unpack(builder, known, source, target)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64, types.uint64), generate


def _make_unpack_position(typing_context: Any, source: Any, shift: Any, crosses: Any, mask: Any, target: Any) -> Any:
    """Unpack the eight values of one position; `crosses` says that they reach into the next word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, shift, crosses, mask, target = arguments

        low = builder.lshr(builder.load(_vector_at(builder, source, 0), align=1), _spread(builder, shift, LANES))
        start = builder.block
        more = builder.append_basic_block("crosses")
        join = builder.append_basic_block("joined")
        builder.cbranch(builder.icmp_unsigned("!=", crosses, ir.Constant(crosses.type, 0)), more, join)
        builder.position_at_end(more)
        left = builder.sub(ir.Constant(_WORD, 32), shift)
        both = builder.or_(
            low, builder.shl(builder.load(_vector_at(builder, source, 1), align=1), _spread(builder, left, LANES))
        )
        builder.branch(join)
        builder.position_at_end(join)
        value = builder.phi(_VECTOR)
        value.add_incoming(low, start)
        value.add_incoming(both, more)
        builder.store(builder.and_(value, _spread(builder, mask, LANES)), _vector_at(builder, target, 0), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32, types.uint8, types.uint32, types.uint64), generate


def _emit_shifted(builder: Any, value: Any, places: int) -> Any:
    """Move the elements of a vector up, zeros coming in from below."""
    picks = [*range(places), *(LANES + i for i in range(LANES - places))]
    return builder.shuffle_vector(_splat(0), value, ir.Constant(ir.VectorType(_WORD, LANES), picks))


def _make_add_up(typing_context: Any, values: Any, base: Any, n: Any) -> Any:
    """Turn the gaps less one of an ascending block into its values, in place, eight at a time.

    Entry i becomes ``base + i + sum(values[: i + 1])``; `n` is rounded up to a multiple of eight.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, base, n = arguments
        before = builder.block
        again = builder.append_basic_block("again")
        done = builder.append_basic_block("added")
        first = _spread(builder, base, LANES)
        last = ir.Constant(ir.VectorType(_WORD, LANES), [LANES - 1] * LANES)
        builder.branch(again)
        builder.position_at_end(again)
        at, carry = builder.phi(_LONG), builder.phi(_VECTOR)
        pointer = builder.inttoptr(builder.add(address, builder.mul(at, ir.Constant(_LONG, 4))), _VECTOR.as_pointer())
        total = builder.load(pointer, align=4)
        for places_up in (1, 2, 4):
            total = builder.add(total, _emit_shifted(builder, total, places_up))
        total = builder.add(total, carry)
        builder.store(builder.add(total, ir.Constant(_VECTOR, list(range(LANES)))), pointer, align=4)
        next_carry = builder.add(builder.shuffle_vector(total, total, last), _splat(LANES))
        next_at = builder.add(at, ir.Constant(_LONG, LANES))
        at.add_incoming(ir.Constant(_LONG, 0), before)
        at.add_incoming(next_at, again)
        carry.add_incoming(first, before)
        carry.add_incoming(next_carry, again)
        builder.cbranch(builder.icmp_signed("<", next_at, n), again, done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32, types.int64), generate


def _make_spread_byte(typing_context: Any, places: Any, first: Any, target: Any) -> Any:
    """Add a number to eight neighbouring uint32 at one address and write the sums to another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places, first, target = arguments
        found = builder.load(_vector_at(builder, places, 0), align=4)
        builder.store(builder.add(found, _spread(builder, first, LANES)), _vector_at(builder, target, 0), align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32, types.uint64), generate


def _make_first_not_below(typing_context: Any, address: Any, value: Any) -> Any:
    """Return the first of 16 uint32 at an address that is not below a value; 16 if all are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, value = arguments
        mask = ir.IntType(SIXTEEN)
        words = _words_at(builder, address, SIXTEEN)
        reached = builder.bitcast(builder.icmp_unsigned(">=", words, _spread(builder, value, SIXTEEN)), mask)
        found = builder.cttz(builder.zext(reached, _WORD), ir.Constant(ir.IntType(1), 0))
        none = builder.icmp_unsigned("==", reached, ir.Constant(mask, 0))
        return builder.zext(builder.select(none, ir.Constant(_WORD, SIXTEEN), found), _LONG)

    return types.int64(types.uint64, types.uint32), generate


def _make_above(typing_context: Any, address: Any, limit: Any) -> Any:
    """Return which of 64 uint32 at an address are above a limit, as bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, limit = arguments
        words = _words_at(builder, address, WORD_BITS)
        return builder.bitcast(builder.icmp_unsigned(">", words, _spread(builder, limit, WORD_BITS)), _LONG)

    return types.uint64(types.uint64, types.uint32), generate


def _make_mark_sixteen(typing_context: Any, address: Any, first: Any, target: Any) -> Any:
    """Set the bits of 16 uint32, none of them below `first` or 128 beyond it, in two uint64 at an address; bit 0 is `first`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, first, target = arguments
        kind = ir.VectorType(_LONG, SIXTEEN)

        def every(value: int) -> Any:
            return ir.Constant(kind, [value] * SIXTEEN)

        words = _words_at(builder, address, SIXTEEN)
        places = builder.zext(builder.sub(words, _spread(builder, first, SIXTEEN)), kind)
        bits = builder.shl(every(1), builder.and_(places, every(63)))
        low = builder.icmp_unsigned("<", places, every(64))
        parts = builder.select(low, bits, every(0)), builder.select(low, every(0), bits)
        for number, part in enumerate(parts):
            pointer = builder.inttoptr(builder.add(target, ir.Constant(_LONG, 8 * number)), _LONG.as_pointer())
            builder.store(builder.or_(builder.load(pointer, align=8), _any_of(builder, part)), pointer, align=8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32, types.uint64), generate


def _any_of(builder: Any, value: Any) -> Any:
    """Combine the elements of a vector by OR."""
    n = value.type.count
    while n > 1:
        n //= 2
        halves = [ir.Constant(ir.VectorType(_WORD, n), list(range(first, first + n))) for first in (0, n)]
        value = builder.or_(*(builder.shuffle_vector(value, value, half) for half in halves))
    return builder.extract_element(value, ir.Constant(_WORD, 0))


def _make_call(n: int) -> Any:
    """Make the intrinsic that calls a function of n int64, which returns an int64, at an address.

    What is called so is compiled once and not copied into every caller, which keeps compiling short.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_LONG, [_LONG] * n)
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        values = [builder.extract_value(arguments[1], i) for i in range(n)]
        return builder.call(function, values)

    def typed(typing_context: Any, function: Any, values: Any) -> Any:
        values = types.UniTuple(types.int64, n)  # type: ignore[no-untyped-call]
        return types.int64(types.int64, values), generate

    return intrinsic(typed)


def _make_load(typing_context: Any, address: Any, n_bytes: Any) -> Any:
    """Load a little-endian number of 1, 2, 4 or 8 bytes from any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, n_bytes = arguments
        done = builder.append_basic_block("loaded")
        cases = []
        choice = builder.switch(n_bytes, done)
        start = builder.block
        for size in (1, 2, 4, 8):
            case = builder.append_basic_block(f"bytes{size}")
            choice.add_case(ir.Constant(n_bytes.type, size), case)
            builder.position_at_end(case)
            kind = ir.IntType(8 * size)
            value = builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
            cases.append((builder.zext(value, _LONG) if size < 8 else value, case))
            builder.branch(done)
        builder.position_at_end(done)
        found = builder.phi(_LONG)
        found.add_incoming(ir.Constant(_LONG, 0), start)
        for value, case in cases:
            found.add_incoming(value, case)
        return found

    return types.uint64(types.uint64, types.int64), generate


def _make_store(typing_context: Any, address: Any, n_bytes: Any, value: Any) -> Any:
    """Store the low 1, 2, 4 or 8 bytes of a number at any address, little endian."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, n_bytes, value = arguments
        done = builder.append_basic_block("stored")
        choice = builder.switch(n_bytes, done)
        for size in (1, 2, 4, 8):
            case = builder.append_basic_block(f"bytes{size}")
            choice.add_case(ir.Constant(n_bytes.type, size), case)
            builder.position_at_end(case)
            kind = ir.IntType(8 * size)
            narrow = builder.trunc(value, kind) if size < 8 else value
            builder.store(narrow, builder.inttoptr(address, kind.as_pointer()), align=1)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, types.uint64), generate


def _make_byte(typing_context: Any, address: Any) -> Any:
    """Load one byte as an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer())), _LONG)

    return types.int64(types.uint64), generate


def _make_prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; any address is harmless."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], _prefetch_type())
        builder.call(fetch, [pointer, ir.Constant(_WORD, 0), ir.Constant(_WORD, 3), ir.Constant(_WORD, 1)])
        return context.get_dummy_value()

    return types.void(types.uint64), generate


def _prefetch_type() -> Any:
    """Return the type of ``llvm.prefetch``."""
    return ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _WORD, _WORD, _WORD])


def _make_trailing(typing_context: Any, value: Any) -> Any:
    """Count the zero bits below the lowest set bit of 64; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def _make_leading(typing_context: Any, value: Any) -> Any:
    """Count the zero bits above the highest set bit of 64; 64 for zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


def _make_popcount(typing_context: Any, value: Any) -> Any:
    """Count the set bits of 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


pack_full: Any = intrinsic(_make_pack_full)
unpack_full: Any = intrinsic(_make_unpack_full)
unpack_position: Any = intrinsic(_make_unpack_position)
call3: Any = _make_call(3)
"""Call a function of three int64 at an address with a tuple of them."""

call5: Any = _make_call(5)
call7: Any = _make_call(7)
add_up: Any = intrinsic(_make_add_up)
spread_byte: Any = intrinsic(_make_spread_byte)
load: Any = intrinsic(_make_load)
store: Any = intrinsic(_make_store)
byte_at: Any = intrinsic(_make_byte)
first_not_below: Any = intrinsic(_make_first_not_below)
above: Any = intrinsic(_make_above)
mark_sixteen: Any = intrinsic(_make_mark_sixteen)
prefetch: Any = intrinsic(_make_prefetch)
trailing_zeros: Any = intrinsic(_make_trailing)
leading_zeros: Any = intrinsic(_make_leading)
popcount: Any = intrinsic(_make_popcount)
