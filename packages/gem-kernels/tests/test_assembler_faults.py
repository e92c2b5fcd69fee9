"""What the compile test looks for in machine code is found where it is planted, and nowhere else."""

import pytest
from assembler_faults import stray_descriptors, undefined_reads
from sass import instructions, place, place_names


def code(text):
    """Instructions of a listing that is written without addresses."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return instructions(
        "\n".join(line if line.endswith(":") else f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines))
    )


def addresses(faults):
    return [fault.split(" ")[0] for fault in faults]


# A product in a loop and one behind it with the same left operand, whose descriptor lies in UR4 and UR5.
LOOP = """
    S2UR UR4, SR_CTAID.X
    S2UR UR5, SR_CgaCtaId
    UMOV UR6, 0x400
    {ahead}
    UISETP.GE.AND UP0, UPT, UR4, 0x1, UPT
    PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0
    @!P0 BRA `(.L_x_2)
    {inside}
    .L_x_1:
    UMOV UR10, UR4
    UIADD3 UR8, UP1, UR4, 0x2, URZ
    UIADD3.X UR9, UR5, URZ, URZ, UP1, !UPT
    UMOV UR11, UR5
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT
    ISETP.NE.AND P0, PT, R24, RZ, PT
    @P0 BRA `(.L_x_1)
    .L_x_2:
    UIADD3 UR8, UP1, UR4, 0x4, URZ
    UIADD3.X UR9, UR5, URZ, URZ, UP1, !UPT
    UMOV UR10, UR4
    UMOV UR11, UR5
    HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT
    EXIT
"""
DESCRIPTOR = """USHF.R.U32.HI UR6, URZ, 0x4, UR6
    USGXT.U32 UR4, UR6, 0xe
    UMOV UR5, 0x40000040"""


def test_a_descriptor_left_out_with_a_loop_is_found():
    faults = stray_descriptors(code(LOOP.format(ahead="NOP", inside=DESCRIPTOR)))
    assert len(faults) == 4, faults  # both halves of both operands, behind the loop alone
    assert all("HGMMA.64x64x16" in fault and "differ between the paths" in fault for fault in faults)
    assert [fault.split(": ")[1].split(",")[0] for fault in faults] == ["UR8", "UR9", "UR10", "UR11"]


def test_a_descriptor_ahead_of_a_loop_is_right():
    right = code(LOOP.format(ahead=DESCRIPTOR, inside="NOP"))
    assert stray_descriptors(right) == []
    assert undefined_reads(right) == []


def test_the_same_without_other_values_in_the_registers_is_an_undefined_read():
    text = LOOP.format(ahead="NOP", inside=DESCRIPTOR).replace("S2UR UR5, SR_CgaCtaId", "NOP")
    faults = undefined_reads(code(text))
    assert [fault.rpartition(": ")[2] for fault in faults] == ["UR5", "UR11"]
    assert "UIADD3.X UR9, UR5" in faults[0]


ADDITION = """
    ULDC.64 UR12, c[0x0][0x208]
    UMOV UR6, 0x400
    USHF.R.U32.HI UR6, URZ, 0x4, UR6
    USGXT.U32 UR4, UR6, 0xe
    UIADD3 UR6, UP0, {low}, 0x2, URZ
    UIADD3.X UR7, {high}, -0x7fffffe0, URZ, UP0, !UPT
    HGMMA.64x32x16.F32.BF16 R24, R44, gdesc[UR4].tnspB, RZ, !UPT
    EXIT
"""


def test_another_register_as_the_upper_half_of_an_addition_is_found():
    assert stray_descriptors(code(ADDITION.format(low="UR4", high="URZ"))) == []
    for low, high, number in (("UR4", "UR4", 1), ("UR12", "UR12", 2), ("UR4", "UR12", 1)):
        assert len(stray_descriptors(code(ADDITION.format(low=low, high=high)))) == number, (low, high)


def test_a_sum_of_addresses_is_no_address():
    text = ADDITION.format(low="UR4", high="URZ").replace("UR4, 0x2, URZ", "UR4, UR4, URZ")
    (fault,) = stray_descriptors(code(text))
    assert fault.endswith("UR6, made by 0040 UIADD3 UR6, UP0, UR4, UR4, URZ")


def test_descriptors_that_are_exchanged_or_saved_are_right():
    exchanged = ADDITION.format(low="UR4", high="URZ").replace(
        "HGMMA",
        """UMOV UR14, UR7
    UMOV UR15, UR6
    ULOP3.LUT UR14, UR15, UR14, URZ, 0x3c, !UPT
    ULOP3.LUT UR15, UR15, UR14, URZ, 0x3c, !UPT
    ULOP3.LUT UR14, UR15, UR14, URZ, 0x3c, !UPT
    IMAD.U32 R2, RZ, RZ, UR14
    STL [R1+0x8], R2
    LDL.LU R3, [R1+0x8]
    R2UR UR6, R3
    UMOV UR7, UR15
    HGMMA""",
    )
    assert stray_descriptors(code(exchanged)) == []
    # One of the three exclusive ors too few.
    assert stray_descriptors(code(exchanged.replace("ULOP3.LUT UR15, UR15, UR14, URZ, 0x3c, !UPT", "NOP", 1)))


BRANCH = """
    ISETP.GE.AND P0, PT, {condition}, RZ, PT
    @P0 BRA `(.L_x_0)
    {written}
    .L_x_0:
    {read}
    EXIT
"""


@pytest.mark.parametrize(
    ("written", "read", "undefined"),
    [
        ("MOV R4, 0x1", "STG.E desc[UR4][R2.64], R4", "R2, R3, R4, UR4, UR5"),
        ("ULDC.64 UR4, c[0x0][0x208]", "UIADD3 UR6, UR4, UR5, URZ", "UR4, UR5"),
        ("UIMAD.WIDE UR4, URZ, 0x4, URZ", "LDS R0, [UR5+0x10]", "UR5"),
        ("UMOV UR6, 0x1", "UTMALDG.2D [UR4], [UR8]", "UR4, UR5, UR6, UR7, UR8, UR9"),
        ("UMOV UR6, 0x1", "UTMASTG.2D [UR4], [UR8]", "UR4, UR5, UR6, UR8, UR9"),
        ("UMOV UR6, 0x1", "HGMMA.64x8x16.F32 R0, R4, gdesc[UR4], RZ, !UPT", "R4, R5, R6, R7, UR6, UR7"),
        ("UMOV UR6, 0x1", "HGMMA.64x8x16.F32 R0, gdesc[UR4], R0", "R0, R1, R2, R3, UR4, UR5, UR6, UR7"),
        ("LDS.128 R4, [RZ]", "STS.64 [RZ], R6", "R6, R7"),
        ("CS2R R4, SRZ", "FADD R0, R4, R5", "R4, R5"),
        ("UISETP.EQ.AND UP1, UPT, URZ, 0x1, UPT", "@UP1 UMOV UR4, URZ", "UP1"),
        ("LOP3.LUT P2, RZ, RZ, 0x1, RZ, 0xc0, !PT", "SEL R0, RZ, 0x1, P2", "P2"),
    ],
)
def test_widths_of_what_is_written_and_read(written, read, undefined):
    faults = undefined_reads(code(BRANCH.format(condition="RZ", written=written, read=read)))
    assert [fault.rpartition(": ")[2] for fault in faults] == [undefined]


@pytest.mark.parametrize(
    ("written", "last"),
    [
        ("UIMAD.WIDE UR4, URZ, 0x4, URZ", "UR5"),
        ("ULDC.64 UR4, c[0x0][0x208]", "UR5"),
        ("CS2R R4, SRZ", "R5"),
        ("LDS.128 R4, [RZ]", "R7"),
        ("LDSM.16.M88.4 R4, [RZ]", "R7"),
        ("HGMMA.64x16x16.F32 R4, R20, gdesc[UR8], R4, UP1", "R11"),
    ],
)
def test_registers_in_a_row_are_written(written, last):
    following = place_names(2 * place(last))[0]
    given = "LDS.128 R20, [RZ]\nULDC.64 UR10, c[0x0][0x208]\nUSETMAXREG.TRY_ALLOC.CTAPOOL UP1, 0x8"
    text = f"{given}\n{written}\nVIADD R0, {{}}, 0x1\nEXIT"
    assert undefined_reads(code(text.format(last))) == []
    assert len(undefined_reads(code(text.format(following)))) == 1


def test_a_write_on_both_paths_or_under_a_guard_is_one():
    both = BRANCH.format(condition="RZ", written="MOV R4, 0x1", read="FADD R5, R4, R4")
    assert addresses(undefined_reads(code(both))) == ["0040"]
    assert undefined_reads(code("MOV R4, 0x2\n" + both)) == []
    # And where the other path, or both, come first.
    late = """
    ISETP.GE.AND P0, PT, RZ, RZ, PT
    @P0 BRA `(.L_x_0)
    {straight}
    BRA `(.L_x_1)
    .L_x_0:
    {far}
    .L_x_1:
    FADD R5, R4, R4
    EXIT
    """
    writes = "MOV R4, 0x1"
    assert undefined_reads(code(late.format(straight=writes, far=writes))) == []
    assert len(undefined_reads(code(late.format(straight=writes, far="NOP")))) == 1
    assert len(undefined_reads(code(late.format(straight="NOP", far=writes)))) == 1
    guarded = """
    UISETP.EQ.AND UP0, UPT, URZ, 0x1, UPT
    @UP0 UMOV UR4, 0x2
    VIADD R0, RZ, UR4
    EXIT
    """
    assert undefined_reads(code(guarded)) == []


def test_what_is_moved_is_read_where_it_is_used():
    saved = """
    LDC R1, c[0x0][0x28]
    MOV R187, UR12
    STL.64 [R1+0x10], R186
    LDL.64 R6, [R1+0x10]
    R2UR UR12, R7
    {use}
    EXIT
    """
    assert undefined_reads(code(saved.format(use="UMOV UR12, URZ"))) == []
    (fault,) = undefined_reads(code(saved.format(use="UIADD3 UR8, UR12, 0x2, URZ")))
    assert fault == "0050 UIADD3 UR8, UR12, 0x2, URZ: UR12"


def test_half_of_a_register_is_replaced_without_reading_the_other():
    assert undefined_reads(code("MOV R9, 0x1\nPRMT R14, R9, 0x7632, R14\nEXIT")) == []
    assert undefined_reads(code("LOP3.LUT R14, R14, 0xffefffff, RZ, 0xc0, !PT\nEXIT")) == []
    assert addresses(undefined_reads(code("MOV R9, 0x1\nPRMT R14, R9, 0x7632, R15\nEXIT"))) == ["0010"]


def test_paths_through_a_table_of_branches_and_past_an_exit():
    text = """
    LDC R2, c[0x2][RZ]
    SHF.R.S32.HI R3, RZ, 0x1f, R2
    BRX R2 -0x20 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)
    .L_x_0:
    MOV R4, 0x1
    BRA `(.L_x_2)
    .L_x_1:
    {other}
    .L_x_2:
    FADD R5, R4, R4
    EXIT
    """
    assert len(undefined_reads(code(text.format(other="NOP")))) == 1
    assert undefined_reads(code(text.format(other="EXIT"))) == []
    assert undefined_reads(code(text.format(other="MOV R4, 0x2"))) == []
    # A predicate of the branch itself, and a guard, leave both ways open.
    assert len(undefined_reads(code(text.format(other="@P0 EXIT")))) == 2
    assert len(undefined_reads(code(text.format(other="BRA P0, `(.L_x_2)\nEXIT")))) == 2
    assert len(undefined_reads(code(text.format(other="BRA P0, `(.L_x_0)\nNOP")))) == 2


def test_a_call_writes_what_the_function_writes():
    text = """
    MOV R8, 0x40
    CALL.REL.NOINC `($__internal_0_$div)
    FADD R5, R4, {read}
    EXIT
    $__internal_0_$div:
    ISETP.GE.AND P0, PT, R6, RZ, PT
    @P0 BRA `(.L_x_0)
    MOV R4, 0x1
    .L_x_0:
    RET.REL.NODEC R8 `(kernel)
    MOV R7, 0x1
    """
    assert undefined_reads(code(text.format(read="R8"))) == []
    (fault,) = undefined_reads(code(text.format(read="R7")))
    assert fault == "0020 FADD R5, R4, R7: R7"


@pytest.mark.parametrize("text", ["CALL.ABS.NOINC R2", "JMP `(.L_x_0)", "UNHEARDOF [UR4]", "BSYNC B0"])
def test_what_is_not_known_is_an_error(text):
    with pytest.raises(ValueError, match=r"sass\.py does not know what"):
        code(f".L_x_0:\n{text}\nEXIT")


def test_names_of_places():
    stored = code("STL.64 [R1+0x1c], R254")[0]
    assert place_names(stored.writes) == ["[R1+0x1c]", "[R1+0x20]"]
    assert place_names(code("IADD3 R4, P0, P1, R5, UR6, RZ")[0].writes) == ["R4", "P0", "P1"]
    assert place_names(code("VOTEU.ANY UP0, P3")[0].writes) == ["UP0"]
