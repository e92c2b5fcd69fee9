"""What the instructions in a listing of machine code for sm_90 read and write, and which may follow each.

A set of places is an int, a place one bit of it: general and uniform registers, the predicates of both, and the words
of the stack at an offset from R1, to which registers go where there are too few.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

_FIRST = {"R": 0, "UR": 256, "P": 320, "UP": 328, "stack": 336}
PREDICATES = ((1 << 16) - 1) << _FIRST["P"]

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?)(U?P)(\d|T)\s+)?(\S[^;]*?)\s*;")
_LABEL = re.compile(r"(\S+):\s*$")
_REGISTER = re.compile(r"(?<![\w.])(U?[RP])(\d+)\b(\.U?64)?")
_SOURCE = re.compile(r"-?(U?R\d+)(?:\.reuse)?")
_PREDICATE = re.compile(r"U?P(\d|T)")
_TARGET = re.compile(r"`\((\S+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
_SLOT = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_MOVE = re.compile(r"(?:U?MOV|R2UR|IMAD(?:\.MOV)?\.U32) (U?R\d+), (?:RZ, RZ, )?(U?R\d+)(?:\.reuse)?")

_COMPARISONS = {"DSETP", "FSETP", "HSETP2", "ISETP", "PLOP3", "UISETP", "UPLOP3"}  # two results, both predicates
_WITHOUT_RESULT = {
    "ACQBULK", "BAR", "BRA", "BREAK", "BRX", "BSSY", "BSYNC", "CALL", "CCTL", "CGAERRBAR", "DEPBAR", "ENDCOLLECTIVE",
    "ERRBAR", "EXIT", "FENCE", "LDGDEPBAR", "LDGSTS", "MEMBAR", "NANOSLEEP", "NOP", "PREEXIT", "RED", "REDG", "RET",
    "ST", "STG", "STL", "STS", "STSM", "UBLKCP", "UTMACCTL", "UTMACMDFLUSH", "UTMALDG", "UTMAPF", "UTMAREDG",
    "UTMASTG", "WARPGROUP", "WARPSYNC", "YIELD",
}  # fmt: skip
_UNKNOWN_JUMPS = {"BPT", "BRXU", "JMP", "JMX", "JMXU", "KILL", "RTT"}
# Words that the copy engine takes ahead of the coordinates: the place in shared memory, and a load's barrier.
_TILE_WORDS = {"UTMALDG": 2, "UTMASTG": 1, "UTMAREDG": 1}


class Instruction(NamedTuple):
    address: str
    text: str
    """Without the guard."""
    opcode: str
    modifiers: list[str]
    operands: list[str]
    reads: int
    writes: int
    moves: tuple[tuple[int, int], ...]
    """(to, from): places that are moved and not used, in ``writes`` and not in ``reads``; from 0 comes a zero."""
    sources: tuple[int, ...]
    """Places of the operands behind the results that are a register alone."""
    following: tuple[int, ...]
    """Indices of the instructions that may be next."""


def place(name: str) -> int:
    """The place of a register or predicate; 0 for those that hold a constant."""
    found = _REGISTER.match(name)
    return _places(found[1], int(found[2])) if found else 0


def place_names(places: int) -> list[str]:
    """The names of a set of places, words of the stack by their address."""
    names = []
    for kind, first, end in (("R", 0, 256), ("UR", 256, 320), ("P", 320, 328), ("UP", 328, 336)):
        names += [f"{kind}{index - first}" for index in range(first, end) if places >> index & 1]
    stack = places >> _FIRST["stack"]
    return names + [f"[R1+{4 * word:#x}]" for word in range(stack.bit_length()) if stack >> word & 1]


def descriptor(instruction: Instruction) -> list[str]:
    """The registers that a matrix product takes as descriptors: of both operands, or of the right one alone.

    Four in a row are named. The first two are not used where the left operand lies in registers.
    """
    first = int(re.search(r"gdesc\[UR(\d+)\]", instruction.text)[1])
    in_registers = instruction.operands[1].startswith("R")
    return [f"UR{first + word}" for word in range(2 if in_registers else 0, 4)]


def block_starts(code: list[Instruction]) -> set[int]:
    """Indices of the instructions to which not just the one ahead leads."""
    return {0, *(i for index, each in enumerate(code) if each.following != (index + 1,) for i in each.following)}


def instructions(listing: str) -> list[Instruction]:
    """The instructions of a listing by ``nvdisasm -c``. One that this module does not know is an error."""
    lines = []
    labels = {}
    for line in listing.splitlines():
        found = _LINE.match(line)
        label = None if found else _LABEL.match(line)
        if found:
            lines.append(found)
        elif label:
            labels[label[1]] = len(lines)
    # Where threads that have parted meet again: just behind a BSYNC.
    meetings = {labels[label] for line in lines if line[5].startswith("BSSY") for label in _TARGET.findall(line[5])}
    code = []
    for index, line in enumerate(lines):
        parsed = _parsed(line[5])
        guard = _places(line[3], int(line[4])) if line[3] and line[4] != "T" else 0
        following = _following(index, parsed, line[3] is not None, labels, meetings)
        code.append(parsed._replace(address=line[1], reads=parsed.reads | guard, following=following))
    for index, each in enumerate(code):
        if each.opcode == "CALL":
            code[index] = each._replace(writes=_written_from(labels[_TARGET.findall(each.text)[0]], code))
    return code


def _written_from(start: int, code: list[Instruction]) -> int:
    """What a function writes. A call counts as one instruction that writes it; what it reads is not looked at."""
    places, pending, seen = 0, [start], set()
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            places |= code[index].writes
            pending += code[index].following
    return places


def _following(
    index: int, instruction: Instruction, is_guarded: bool, labels: dict[str, int], meetings: set[int]
) -> tuple[int, ...]:
    text, opcode = instruction.text, instruction.opcode
    after = (index + 1,)
    if opcode in ("EXIT", "RET"):
        return after if is_guarded else ()
    if opcode == "BRA":
        is_conditional = is_guarded or _PREDICATE.search(_TARGET.sub("", text))
        return (*(labels[label] for label in _TARGET.findall(text)), *(after if is_conditional else ()))
    if opcode == "BRX":
        return tuple(labels[label] for label in _TARGETS.findall(text)[0].split(","))
    is_lost = (opcode == "BSYNC" and index + 1 not in meetings) or (opcode == "CALL" and not _TARGET.search(text))
    if opcode in _UNKNOWN_JUMPS or is_lost:
        raise ValueError(f"sass.py does not know what follows {text}")
    return after


@functools.lru_cache(maxsize=16384)
def _parsed(text: str) -> Instruction:
    """An instruction that stands nowhere yet."""
    name, _, rest = text.partition(" ")
    opcode, *modifiers = name.split(".")
    operands = [operand.strip() for operand in _TARGET.sub("", rest).split(",")] if rest.strip() else []
    num_results, words = _num_results(opcode, operands), _words(opcode, modifiers)
    moves = _moves(opcode, text, operands, words)
    reads = writes = 0
    for position, operand in enumerate(operands):
        if position >= num_results:
            reads |= _read_for(opcode, modifiers, operands, position, num_results)
        else:
            for kind, digits, _ in _REGISTER.findall(operand):
                writes |= _places(kind, int(digits), words if kind in ("R", "UR") else 1)
            if operand == "PR":
                writes |= _places("P", 0, 7)
    for to, source in moves:
        writes |= to
        reads &= ~source
    sources = tuple(place(found[1]) for found in map(_SOURCE.fullmatch, operands[num_results:]) if found)
    return Instruction("", text, opcode, modifiers, operands, reads, writes, moves, sources, ())


def _places(kind: str, index: int, count: int = 1) -> int:
    return ((1 << count) - 1) << (_FIRST[kind] + index)


def _num_results(opcode: str, operands: list[str]) -> int:
    """How many of the first operands are written: predicates, then a register, or a register, then its carries."""
    if opcode in _COMPARISONS:
        return 2
    if opcode in _WITHOUT_RESULT:
        return 0
    if opcode == "USETMAXREG":  # whether TRY_ALLOC could
        return sum(operand.startswith("UP") for operand in operands)
    if opcode in ("R2P", "VOTEU"):
        return 1
    num = 0
    while num < len(operands) and _PREDICATE.fullmatch(operands[num]):
        num += 1
    begins_with_predicate = num > 0
    if num < len(operands) and operands[num].startswith(("R", "UR")):
        num += 1
    while not begins_with_predicate and num < len(operands) and _PREDICATE.fullmatch(operands[num]):
        num += 1
    if num == 0:
        raise ValueError(f"sass.py does not know what {opcode} writes: {', '.join(operands)}")
    return num


def _words(opcode: str, modifiers: list[str]) -> int:
    """Registers in a row that an instruction writes, or stores."""
    if opcode == "HGMMA":
        return int(modifiers[0].split("x")[1]) // 2
    if opcode in ("LDSM", "STSM"):
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    if opcode == "HMMA":
        return 4 if "F32" in modifiers else 2
    if opcode == "CS2R":
        return 1 if "32" in modifiers else 2
    if "128" in modifiers:
        return 4
    return 2 if "64" in modifiers or "WIDE" in modifiers else 1


def _read_for(opcode: str, modifiers: list[str], operands: list[str], position: int, num_results: int) -> int:
    """The places that an instruction reads for one operand. What is not known to be wider is one register."""
    operand = operands[position]
    words = _words(opcode, modifiers)
    places = 0
    for kind, digits, is_address in _REGISTER.findall(operand):
        first, count = int(digits), 1
        if "gdesc[" in operand:
            in_registers = operands[1].startswith("R")
            first, count = (first + 2, 2) if in_registers else (first, 4)
        elif opcode in _TILE_WORDS:
            count = _TILE_WORDS[opcode] + int(modifiers[0][0]) if position == 0 else 2
        elif is_address or ("desc[" in operand and kind == "UR") or opcode == "BRX":
            count = 2
        elif opcode == "HGMMA" and kind == "R":
            # A predicate says whether the sums are read at all.
            count = 4 if position == 1 else 0 if _PREDICATE.search(operands[-1]) else words
        elif kind == "R" and position >= num_results and _replaces_part(opcode, operands, operand):
            count = 0
        elif "WIDE" in modifiers:
            count = 2 if position == num_results + 2 else 1
        elif "[" not in operand and kind in ("R", "UR"):
            count = words if opcode in ("ST", "STG", "STL", "STS", "STSM", "SYNCS", "UIADD3") else 1
        places |= _places(kind, first, count)
    return places


def _replaces_part(opcode: str, operands: list[str], operand: str) -> bool:
    """Whether an instruction replaces bits of this operand in place, of which the others may mean nothing yet."""
    if operand.removesuffix(".reuse") != operands[0]:
        return False
    return opcode == "PRMT" or (opcode == "LOP3" and operands[2].startswith("0x") and operands[-2] in ("0xc0", "0xfc"))


def _moves(opcode: str, text: str, operands: list[str], words: int) -> tuple[tuple[int, int], ...]:
    """``moves`` of an instruction."""
    move = _MOVE.fullmatch(text)
    if move:
        return ((place(move[1]), place(move[2])),)
    slot = _SLOT.search(text) if opcode in ("LDL", "STL") else None
    if slot is None:
        return ()
    on_stack = _places("stack", int(slot[1] or "0", 16) // 4)
    register = place(operands[opcode == "STL"])
    pairs = [(register << word, on_stack << word) for word in range(words)]
    return tuple(pairs if opcode == "LDL" else [(to, source) for source, to in pairs])
