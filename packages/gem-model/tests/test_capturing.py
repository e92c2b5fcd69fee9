"""Segments of the model: on the CPU run as they are, on a GPU from CUDA graphs."""

import copy
import pickle
from unittest.mock import MagicMock

import pytest
import torch

from gem_model import RankingModel, capture_segments, random_batch
from gem_model import capturing as module
from gem_model._src import graphs, segments

LENGTHS = (0, 1, 2, 31, 33, 65, 0)


def make(config, seed=0):
    torch.manual_seed(0)
    lengths = {tower.name: LENGTHS for tower in config.sequences}
    return RankingModel(config), *random_batch(config, len(LENGTHS), lengths=lengths, seed=seed)


def gradients(model, batch, embeddings):
    """Logits, and gradients of parameters and embeddings, which are left on the parameters until the next step."""
    model.zero_grad()
    outputs = model(batch, embeddings)
    for x in embeddings.values():
        x.grad = None
    model.loss(outputs, batch).total.backward()
    leaves = [*model.parameters(), *embeddings.values()]
    return [x.detach().clone() for x in outputs.values()] + [x.grad.clone() for x in leaves]


def assert_same(actual, expected, **tolerance):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.fixture
def uncaptured(monkeypatch):
    """The functions themselves in place of graphs, on the CPU; the names of those that are called."""
    monkeypatch.setattr(module, "_DEVICES", ("cpu",))
    seen = []

    def run_plainly(functions, inputs, parameters):
        assert functions.keys() == inputs.keys() == parameters.keys()
        return {name: lambda *x, name=name, f=f: seen.append(name) or f(*x) for name, f in functions.items()}

    monkeypatch.setattr(module, "capture_graphs", run_plainly)
    return seen


@pytest.mark.parametrize("config", ["tiny", "two_towers", "experts"])
def test_the_model_in_segments_is_the_model(request, config, uncaptured):
    config = request.getfixturevalue(config)
    model, batch, embeddings = make(config)
    expected = gradients(model, batch, embeddings)
    model.zero_grad()
    assert capture_segments(model, batch, embeddings) is model
    assert list(model.state_dict()) == list(RankingModel(config).state_dict())
    assert not uncaptured
    assert_same(gradients(model, batch, embeddings), expected)
    assert uncaptured == list(segments.functions(model))
    # A second step, of other lengths.
    _, batch, embeddings = make(config, seed=1)
    plain, count = copy.deepcopy(model), len(uncaptured)
    assert_same(gradients(model, batch, embeddings), gradients(plain, batch, embeddings))
    assert len(uncaptured) == 2 * count


def test_what_does_not_fit_runs_as_before(tiny, uncaptured):
    model, batch, embeddings = make(tiny)
    capture_segments(model, batch, embeddings)
    with torch.no_grad():
        model(batch, embeddings)
    model.eval()
    model(batch, embeddings)
    model.train()
    fewer = random_batch(tiny, 3, lengths={tower.name: (1, 2, 3) for tower in tiny.sequences})
    model(*fewer)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(batch, embeddings)
    assert not uncaptured


def test_gradients_are_added_and_two_passes_do_not_share_buffers(tiny, uncaptured):
    model, batch, embeddings = make(tiny)
    capture_segments(model, batch, embeddings)
    first = model(batch, embeddings)
    calls = len(uncaptured)
    assert calls
    # The first pass still needs its buffers.
    second = model(batch, embeddings)
    assert len(uncaptured) == calls
    model.loss(first, batch).total.backward()
    once = [p.grad.clone() for p in model.parameters()]
    # Its gradients wait to be added to.
    third = model(batch, embeddings)
    assert len(uncaptured) == calls
    for outputs in (second, third):
        model.loss(outputs, batch).total.backward()
    assert_same([p.grad for p in model.parameters()], [3 * x for x in once], rtol=1e-5, atol=1e-6)
    model.zero_grad()
    del first
    # A pass whose results nobody has kept needs no buffers.
    model(batch, embeddings)
    assert len(uncaptured) == 2 * calls
    model(batch, embeddings)
    assert len(uncaptured) == 3 * calls


def test_models_that_cannot_be_captured(tiny, uncaptured):
    model, batch, embeddings = make(tiny)
    with pytest.raises(TypeError, match="`model` must be a RankingModel, got Linear"):
        capture_segments(torch.nn.Linear(1, 1), batch, embeddings)
    with pytest.raises(ValueError, match="`model` must be in training mode"):
        capture_segments(copy.deepcopy(model).eval(), batch, embeddings)
    empty = random_batch(tiny, 0, lengths={tower.name: () for tower in tiny.sequences})
    with pytest.raises(ValueError, match="`batch` must have samples, got none"):
        capture_segments(model, *empty)
    model.heads.forward = model.heads.forward
    with pytest.raises(ValueError, match="units that run their class's forward"):
        capture_segments(model, batch, embeddings)


def test_only_on_cuda(tiny):
    model, batch, embeddings = make(tiny)
    with pytest.raises(ValueError, match="on one CUDA device, none of them sharded"):
        capture_segments(model, batch, embeddings)


class Recorded:
    """In place of a CUDA graph: replays what it is told, on the CPU."""

    def replay(self):
        self.what()


def replay_on_the_cpu(captured, function):
    """What a device would do with the memory of the graphs."""

    def forward():
        with torch.enable_grad():
            captured.live = function(*captured.inputs)
        for mine, value in zip(captured.outputs, captured.live, strict=True):
            mine.copy_(value)

    def backward():
        leaves = [x for x in (*captured.inputs, *captured.parameters) if x.requires_grad]
        found = torch.autograd.grad(captured.live, leaves, captured.output_gradients)
        memory = [x for x in captured.input_gradients if x is not None]
        for mine, value in zip(memory, found, strict=True):
            mine.copy_(value)

    captured.forward.what, captured.backward.what = forward, backward


def test_graphs_read_and_write_memory_of_their_own(monkeypatch):
    stream = MagicMock()
    stream.__exit__.return_value = False
    for name in ("graph", "stream", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    weight = torch.nn.Parameter(torch.randn(3, 2))

    def function(x, y):
        return x @ weight, (x * y).sum(1)

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 3, generator=generator).requires_grad_(), torch.randn(4, 3, generator=generator)

    captured = graphs.capture_graphs({"f": function}, {"f": make(0)}, {"f": [weight]})["f"]
    assert all(x.grad_fn is None for x in captured.outputs), "the capture's autograd graph is gone"
    replay_on_the_cpu(captured, function)
    results = []
    for seed in (1, 2):
        for f in (function, captured):
            x, y = make(seed)
            weight.grad = None
            outputs = f(x, y)
            (outputs[0].square().sum() + outputs[1].sum()).backward()
            results.append([*(z.detach().clone() for z in outputs), x.grad.clone(), weight.grad.clone()])
        assert_same(results[-1], results[-2])
        with torch.no_grad():
            weight.add_(1.0)


@pytest.fixture
def each_warning():
    """Warnings that torch gives once in a process, every time."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("each_warning")
@pytest.mark.parametrize("config", ["tiny", "two_towers", "experts"])
def test_graphs_on_cuda_are_the_model(request, config):
    config = request.getfixturevalue(config)
    model, batch, embeddings = make(config)
    model = model.cuda()
    plain = copy.deepcopy(model)

    def on_gpu(batch, embeddings):
        moved = {name: x.detach().cuda().requires_grad_() for name, x in embeddings.items()}
        return batch.to("cuda"), moved

    capture_segments(model, *on_gpu(batch, embeddings))
    for seed in range(3):
        _, batch, embeddings = make(config, seed=seed)
        batch, embeddings = on_gpu(batch, embeddings)
        expected = gradients(plain, batch, embeddings)
        assert_same(gradients(model, batch, embeddings), expected, rtol=1e-4, atol=1e-5)
        # Graphs read parameters where they are updated.
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                q.add_(q.grad, alpha=-0.01)
                p.copy_(q)
