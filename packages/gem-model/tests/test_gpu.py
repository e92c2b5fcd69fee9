"""The model on a GPU against the same model on the CPU."""

import copy

import pytest
import torch

from gem_model import RankingModel, random_batch
from gem_model._src import blocks

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 300, 7)


@pytest.fixture(params=["tiny", "two_towers"])
def config(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True, params=["small", "as-large"])
def sizes(request, monkeypatch):
    """Norms and transposes as in small batches, and by the kernels that large ones take."""
    if request.param == "as-large":
        monkeypatch.setattr(blocks, "_MIN_NORM", 0)
        monkeypatch.setattr(blocks, "_MIN_TRANSPOSE", 0)


def make(config):
    torch.manual_seed(0)
    batch, embeddings = random_batch(config, len(LENGTHS), lengths={t.name: LENGTHS for t in config.sequences})
    return RankingModel(config), batch, embeddings


def on_gpu(model, batch, embeddings):
    moved = {name: x.detach().cuda().requires_grad_() for name, x in embeddings.items()}
    return copy.deepcopy(model).cuda(), batch.to("cuda"), moved


def test_float32_outputs_and_gradients_match_the_cpu(config):
    model, batch, embeddings = make(config)
    model_gpu, batch_gpu, embeddings_gpu = on_gpu(model, batch, embeddings)
    outputs, outputs_gpu = model(batch, embeddings), model_gpu(batch_gpu, embeddings_gpu)
    model.loss(outputs, batch).total.backward()
    model_gpu.loss(outputs_gpu, batch_gpu).total.backward()
    for task in config.tasks:
        torch.testing.assert_close(outputs_gpu[task].cpu(), outputs[task], rtol=1e-3, atol=1e-4)
    for (name, p), p_gpu in zip(model.named_parameters(), model_gpu.parameters(), strict=True):
        # Float32 sums over a few hundred rows in another order, relative to the gradient's own size.
        error = (p_gpu.grad.cpu() - p.grad).norm()
        assert error <= 1e-3 * p.grad.norm() + 1e-5, f"{name}: {error}"


def test_bfloat16_autocast_runs_and_stays_close(config):
    model, batch, embeddings = make(config)
    exact = model(batch, embeddings)
    model_gpu, batch_gpu, embeddings_gpu = on_gpu(model, batch, embeddings)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        outputs = model_gpu(batch_gpu, embeddings_gpu)
        loss = model_gpu.loss(outputs, batch_gpu)
    loss.total.backward()
    for task in config.tasks:
        assert outputs[task].dtype == torch.float32
        torch.testing.assert_close(outputs[task].cpu(), exact[task], rtol=0.1, atol=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model_gpu.parameters())


def test_no_sample_changes_another_bitwise(config):
    model, batch, embeddings = on_gpu(*make(config))
    with torch.no_grad():
        before = model(batch, embeddings)
        for name in config.context_features:
            embeddings[name][4] = float("nan")
        after = model(batch, embeddings)
    others = torch.arange(len(LENGTHS), device="cuda") != 4
    for task in config.tasks:
        assert after[task][4].isnan()
        assert torch.equal(after[task][others], before[task][others])


@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=["no-samples", "all-empty"])
def test_empty_input(config, lengths):
    torch.manual_seed(0)
    model = RankingModel(config).cuda()
    batch, embeddings = random_batch(config, len(lengths), lengths={t.name: lengths for t in config.sequences})
    embeddings = {name: x.detach().cuda().requires_grad_() for name, x in embeddings.items()}
    batch = batch.to("cuda")
    model.loss(model(batch, embeddings), batch).total.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


# torch warns that the mode does not see every synchronisation.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_forward_does_not_wait_for_the_device(config):
    model, batch, embeddings = on_gpu(*make(config))
    model(batch, embeddings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = model(batch, embeddings)
        model.loss(outputs, batch).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_gradients_match_eager(tiny):
    model, batch, embeddings = on_gpu(*make(tiny))
    torch.compiler.reset()
    results = []
    for forward in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        outputs = forward(batch, embeddings)
        model.loss(outputs, batch).total.backward()
        results.append((outputs, [p.grad.clone() for p in model.parameters()]))
    (eager, eager_grads), (compiled, compiled_grads) = results
    for task in tiny.tasks:
        torch.testing.assert_close(compiled[task], eager[task], rtol=1e-3, atol=1e-4)
    for (name, _), a, b in zip(model.named_parameters(), compiled_grads, eager_grads, strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm() + 1e-5, name
