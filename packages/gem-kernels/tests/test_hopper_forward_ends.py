"""Ends of sequences in Hopper's forwards: half a key tile left out, and a consumer without rows."""

import pytest
import torch

from gem_kernels import gdpa, jagged_attention, reference
from gem_kernels._src.gdpa import hopper_launch as gdpa_hopper
from gem_kernels._src.jagged_attention import hopper_launch as jagged_hopper
from gem_kernels.testing import assert_matches_oracle, attention_inputs, random_lengths, summation_floor

LENGTHS = {
    # More units of work than programs. Several query tiles meet keys that stay in shared memory; the last key tile is
    # the first or second, whole or half.
    "few-keys": ((1100, 200, 130, 64, 300) * 8, (129, 192, 193, 64, 65) * 8),
    # Each unit of work is one query tile.
    "many-keys": ((64, 192, 65, 1, 200, 449) * 5, (513, 576, 577, 640, 320, 257) * 5),
    # The second consumer has rows in one sequence only.
    "no-second-rows": ((64, 5, 63) * 15 + (128,), (600, 100, 300) * 15 + (1,)),
    "random": (random_lengths(30, 700, seed=1), random_lengths(30, 700, seed=2)),
}


@pytest.mark.parametrize(
    ("rows", "keys", "ends", "rests"),
    [
        (4 * 1024, 4 * 1024, False, False),
        (4 * 1024, 4 * 192, True, False),
        (2000, 4 * 256, False, True),
        (2000, 2000, True, True),
        (2000, 4 * 128, False, False),
        (2000, 4 * 100, False, False),
    ],
)
def test_batches_of_whole_tiles_or_of_few_keys_do_without_code_for_ends(rows, keys, ends, rests):
    q, k, offsets = torch.empty(rows, 1, 128), torch.empty(keys, 1, 128), torch.zeros(5)
    assert gdpa_hopper.leaves_out_ends(k, offsets) == ends
    assert jagged_hopper.rests(q, k, offsets) == rests


def attend_gdpa(x, op=gdpa, **sizes):
    options = {"activation": "fast_gelu", "pre_scale": x.q.shape[2] ** -0.5}
    return (op(x.q, x.k, x.v, offsets_q=x.offsets_q, offsets_k=x.offsets_k, **options, **sizes),)


def attend_jagged(x, op=jagged_attention, **sizes):
    return op(x.q, x.k, x.v, offsets_q=x.offsets_q, offsets_k=x.offsets_k, **sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    ("op", "dtype", "head_dim", "num_heads"),
    [
        ("gdpa", torch.bfloat16, 128, 4),
        ("gdpa", torch.float16, 128, 4),
        ("gdpa", torch.bfloat16, 64, 4),
        ("jagged_attention", torch.bfloat16, 128, 4),
        ("jagged_attention", torch.float16, 128, 4),
        # Of 132 programs, a program's next unit of work is of another head.
        ("jagged_attention", torch.bfloat16, 128, 10),
    ],
)
def test_gpu_ends_of_sequences_match_oracle(op, dtype, head_dim, num_heads, name, monkeypatch, poisoned_empty):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    module, attend, loop, sizes = (
        (gdpa_hopper, attend_gdpa, reference.gdpa, {})
        if op == "gdpa"
        else (jagged_hopper, attend_jagged, reference.jagged_attention, {"return_lse": True})
    )
    launches = []
    launch = module.launch_hopper_forward

    def counted(*args, **options):
        launches.append(op)
        return launch(*args, **options)

    monkeypatch.setattr(module, "launch_hopper_forward", counted)
    heads = {"num_heads": num_heads, "num_heads_kv": num_heads // 2}
    x = attention_inputs(*LENGTHS[name], **heads, head_dim=head_dim, dtype=dtype, device="cuda")
    sizes |= {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}
    results = attend(x, **sizes)
    expected, eager = attend(x.to(torch.float64), loop), attend(x, loop)
    for what, actual, oracle, plain in zip(("out", "lse"), results, expected, eager, strict=False):
        floor = summation_floor(oracle, actual.dtype)
        assert_matches_oracle(what, actual, oracle, plain, offsets=x.offsets_q, floor=floor)
    for _ in range(3):
        for first, again in zip(results, attend(x, **sizes), strict=True):
            assert torch.equal(first, again)
    assert len(launches) == 4
