"""How programs of the one-kernel backward share work, in Gluon: units that they claim, and turns to add to a sum.

Roles of a program read its units from a ring in shared memory that the producer fills. A turn is a counter in memory,
how many key tiles have been added to a tile of dq.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

NUM_WORKS = 4
"""Units of work that the producer may be ahead of a role."""
_NUM_WORKS = gl.constexpr(NUM_WORKS)

# ---------------------------------------------------------------- units of work


@gluon.jit
def claim(ptr):
    """The number of the next unit, for a role of one warp."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        mov.u32 t, %laneid;
        setp.eq.u32 p, t, 0;
        mov.u32 t, 0;
        @p atom.relaxed.gpu.global.add.u32 t, [$1], 1;
        shfl.sync.idx.b32 $0, t, 0, 0x1f, 0xffffffff;
        }""",
        "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def announce(works, work_ready, work_empty, index, work):
    """Tell the other roles the program's ``index``-th unit."""
    s = index % _NUM_WORKS
    mbarrier.wait(work_empty.index(s), ((index // _NUM_WORKS) & 1) ^ 1)
    works.index(s).store(gl.full([1], work, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(work_ready.index(s), count=1)


@gluon.jit
def await_work(works, work_ready, work_empty, index, NUM_WARPS: gl.constexpr):
    """The program's ``index``-th unit; each role asks once for each."""
    s = index % _NUM_WORKS
    mbarrier.wait(work_ready.index(s), (index // _NUM_WORKS) & 1)
    work = gl.max(works.index(s).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)
    mbarrier.arrive(work_empty.index(s), count=1)
    return work


# ---------------------------------------------------------------- turns


@gluon.jit
def turn_of(ptr):
    """Key tiles that have been added, and what they have added is there."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_turn(turn):
    """Between a turn that was read and copies by the engine."""
    gl.inline_asm_elementwise(
        "{ fence.proxy.async; mov.u32 $0, $1; }", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_turn(ptr):
    """Count one more key tile when everything that this warp has sent has arrived."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 t;
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        mov.u32 t, %laneid;
        setp.eq.u32 p, t, 0;
        @p red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l", [ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
