"""Faults that ptxas puts into kernels for sm_90, found in the machine code.

ptxas 12.8, which Triton 3.6 brings, is known to take other registers than those that hold the descriptor of a matrix
product's operand:

* where two products find operands at one place in shared memory in different swizzles, the upper half of the second
  descriptor, which is 0, becomes whatever a register holds;
* where a loop and a product behind it have the same operand, its descriptor is made ahead of the loop, and left out
  together with it where the loop has no turn. The product takes what the registers held before.
"""

from __future__ import annotations

import heapq
import re

from sass import PREDICATES, Instruction, block_starts, descriptor, place, place_names

# What a place holds: the exclusive or of these, none for 0. An atom says where a word comes from: ("constant", text),
# ("made", index of the instruction, word of its result), ("met", index, place): what paths differ in that meet ahead
# of this instruction, or ("entry",): nothing.
Atom = tuple[str | int, ...]
Value = frozenset[Atom]
ZERO: Value = frozenset()
ENTRY: Value = frozenset({("entry",)})


def undefined_reads(code: list[Instruction]) -> list[str]:
    """Instructions that on some path from the entry read a register or predicate which nothing on it has written.

    A write under a guard counts as a write: the compiler knows which guards agree, and reads under the same one. What
    is moved, also to the stack and back, is not read, and remains undefined: registers are saved that hold something
    on some paths only.
    """
    starts = block_starts(code)
    undefined = {0: _named(code)}  # what may be, ahead of a block's first instruction
    found: dict[int, int] = {}
    pending = [0]
    while pending:
        index = pending.pop()
        places = undefined[index]
        while True:
            instruction = code[index]
            if places & instruction.reads:
                found[index] = found.get(index, 0) | places & instruction.reads
            arrived = 0
            for to, source in instruction.moves:
                if places & source:
                    arrived |= to
            places = places & ~instruction.writes | arrived
            if instruction.following != (index + 1,) or index + 1 in starts:
                break
            index += 1
        for following in instruction.following:
            if following not in undefined or places & ~undefined[following]:
                undefined[following] = undefined.get(following, 0) | places
                pending.append(following)
    return [f"{code[i].address} {code[i].text}: {', '.join(place_names(found[i]))}" for i in sorted(found)]


def stray_descriptors(code: list[Instruction]) -> list[str]:
    """Products that take a descriptor which was not made as one, or not by the same instructions on all paths.

    The lower half is an address in shared memory, cut to the bits that it has there, plus constants; the upper half is
    made of constants. So each is followed back through moves, additions and exchanges (three exclusive ors), to what
    cuts the address and to constants. Where paths meet with different values on the way, one of them is stray.
    """
    tracked = _sources_of_descriptors(code)
    if not tracked:
        return []
    terms: dict[Atom, list[Value]] = {}  # of the sums, by what they make
    taken: dict[int, list[Value]] = {}  # by the products, by index
    starts = block_starts(code)
    held = {0: dict.fromkeys(_bits(tracked), ENTRY)}  # ahead of a block's first instruction
    pending = [0]
    while pending:
        index = heapq.heappop(pending)
        values = dict(held[index])
        while True:
            instruction = code[index]
            if instruction.opcode == "HGMMA":
                taken[index] = [values[place(name)] for name in descriptor(instruction)]
            if instruction.writes & tracked:
                _execute(index, instruction, values, terms)
            if instruction.following != (index + 1,) or index + 1 in starts:
                break
            index += 1
        for following in instruction.following:
            if _meet(following, values, held) and following not in pending:
                heapq.heappush(pending, following)
    stray = []
    for index in sorted(taken):
        natures = [_nature(value, code, terms) for value in taken[index]]
        for name, nature, expected in zip(descriptor(code[index]), natures, ("address", "constant") * 2, strict=False):
            if nature != expected:
                stray.append(f"{code[index].address} {code[index].text}: {name}, {nature}")
    return stray


def _sources_of_descriptors(code: list[Instruction]) -> int:
    """The places of descriptors and all from which they are moved, summed or exchanged."""
    tracked = 0
    for instruction in code:
        if instruction.opcode == "HGMMA":
            for name in descriptor(instruction):
                tracked |= place(name)
    makers = [each for each in code if each.moves or _is_sum(each) or _is_exchange(each)]
    known = 0
    while tracked != known:
        known = tracked
        for instruction in makers:
            for word, result in enumerate(_bits(instruction.writes & ~PREDICATES)):
                if not result & tracked:
                    continue
                if instruction.moves:
                    tracked |= dict(instruction.moves)[result]
                else:
                    for source in instruction.sources:
                        tracked |= source << word
    return tracked


def _execute(index: int, instruction: Instruction, values: dict[int, Value], terms: dict[Atom, list[Value]]) -> None:
    """What tracked places hold after an instruction, in place of before."""
    if instruction.moves:
        values |= {to: values[source] if source else ZERO for to, source in instruction.moves if to in values}
        return
    sources = instruction.sources
    for word, result in enumerate(_bits(instruction.writes & ~PREDICATES)):
        if result not in values:
            continue
        if _is_constant(instruction):
            text = instruction.operands[-1]
            value = ZERO if text in ("0x0", "RZ", "SRZ", "URZ") else frozenset({("constant", text)})
        elif _is_exchange(instruction):
            value = values[sources[0]] ^ values[sources[1]]
        else:
            atom: Atom = ("made", index, word)
            value = frozenset({atom})
            if _is_sum(instruction):
                terms[atom] = [values[source << word] for source in sources]
        values[result] = value


def _meet(index: int, values: dict[int, Value], held: dict[int, dict[int, Value]]) -> bool:
    """Whether places hold anything else than known ahead of an instruction, where now a path comes with these."""
    if index not in held:
        held[index] = dict(values)
        return True
    known = held[index]
    has_changed = False
    for each, value in values.items():
        met = frozenset({("met", index, each)})
        if known[each] != value and known[each] != met:
            known[each] = met
            has_changed = True
    return has_changed


def _nature(value: Value, code: list[Instruction], terms: dict[Atom, list[Value]]) -> str:
    """ "address", "constant", or in words what else it is."""
    if not value:
        return "constant"
    if len(value) > 1:
        return "the exclusive or of two values"
    (atom,) = value
    if atom[0] == "constant":
        return "constant"
    if atom[0] == "entry":
        return "which nothing has written"
    instruction = code[int(atom[1])]
    if atom[0] == "met":
        return f"whose values differ between the paths to {instruction.address} ({place_names(int(atom[2]))[0]})"
    if _is_cut(instruction):
        return "address"
    if atom in terms:
        natures = [_nature(term, code, terms) for term in terms[atom]]
        others = [nature for nature in natures if nature not in ("address", "constant")]
        if others:
            return others[0]
        if natures.count("address") < 2:
            return "address" if "address" in natures else "constant"
    return f"made by {instruction.address} {instruction.text}"


def _is_constant(instruction: Instruction) -> bool:
    if instruction.opcode == "IMAD" and instruction.operands[1:3] != ["RZ", "RZ"]:
        return False
    is_move = instruction.opcode in ("CS2R", "IMAD", "MOV", "UMOV")
    return is_move and re.fullmatch(r"-?0x[0-9a-f]+|U?RZ|SRZ", instruction.operands[-1]) is not None


def _is_exchange(instruction: Instruction) -> bool:
    is_xor = instruction.opcode in ("LOP3", "ULOP3") and instruction.operands[-2] == "0x3c"
    return is_xor and len(instruction.sources) == 2


def _is_cut(instruction: Instruction) -> bool:
    """Whether an instruction keeps the low 14 bits, or 15, as Triton has it."""
    if instruction.opcode in ("SGXT", "USGXT"):
        return instruction.operands[2] in ("0xe", "0xf")
    if instruction.opcode in ("LOP3", "ULOP3"):
        return instruction.operands[2] in ("0x3fff", "0x7fff") and instruction.operands[-2] == "0xc0"
    return False


def _is_sum(instruction: Instruction) -> bool:
    """Whether an instruction adds, or joins bits; a product with 1 or 0 is a sum as well."""
    if "c[" in instruction.text:
        return False
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "IMAD":
        return operands[1:3] == ["RZ", "RZ"] or operands[2] == "0x1"
    return opcode in ("IADD3", "UIADD3", "VIADD") or (opcode in ("LOP3", "ULOP3") and operands[-2] in ("0xfc", "0xfe"))


def _named(code: list[Instruction]) -> int:
    """All places that a kernel reads, writes or moves."""
    places = 0
    for instruction in code:
        places |= instruction.reads | instruction.writes
        for _to, source in instruction.moves:
            places |= source
    return places


def _bits(places: int) -> list[int]:
    found = []
    while places:
        found.append(places & -places)
        places &= places - 1
    return found
