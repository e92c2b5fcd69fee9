"""What the model says of a batch, embeddings, logits and labels that do not fit."""

import dataclasses

import pytest
import torch

from gem_model import RankingModel, random_batch


@pytest.fixture
def parts(tiny):
    torch.manual_seed(0)
    return RankingModel(tiny), *random_batch(tiny, 3, lengths={"history": (3, 0, 2)})


def test_a_config_of_another_type():
    with pytest.raises(TypeError, match=r"^RankingModel: `config` must be a RankingConfig, got dict; make one"):
        RankingModel({})


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize("value", [7.0, -1.0, 1.001, float("nan"), float("inf")])
def test_a_label_outside_of_0_and_1(parts, value):
    model, batch, embeddings = parts
    outputs = model(batch, embeddings)
    wrong = batch.labels["like"].clone()
    wrong[1] = value
    labels = batch.labels | {"like": wrong}
    with pytest.raises(ValueError, match=r"`batch.labels\['like'\]` must be 0 or 1, .*, got \S+ at sample 1; encode"):
        model.loss(outputs, dataclasses.replace(batch, labels=labels))
    # On another device than the CPU the values are read when asked for.
    meta = {task: x.to("meta") for task, x in outputs.items()}
    model.loss(meta, dataclasses.replace(batch, labels={task: x.to("meta") for task, x in labels.items()}))
    with pytest.raises(ValueError, match="at sample 1"):
        model.loss(outputs, dataclasses.replace(batch, labels=labels), validate=True)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int8, torch.bfloat16, torch.float64])
def test_labels_of_any_real_dtype(parts, dtype):
    model, batch, embeddings = parts
    outputs = model(batch, embeddings)
    cast = {task: x.to(dtype) for task, x in batch.labels.items()}
    assert model.loss(outputs, dataclasses.replace(batch, labels=cast)).total == model.loss(outputs, batch).total


def test_a_probability_is_a_label(parts):
    model, batch, embeddings = parts
    soft = {task: torch.full((3,), 0.25) for task in batch.labels}
    assert model.loss(model(batch, embeddings), dataclasses.replace(batch, labels=soft)).total.isfinite()


def test_logits_and_labels_of_another_type(parts):
    model, batch, embeddings = parts
    outputs = model(batch, embeddings)
    with pytest.raises(TypeError, match=r"^RankingModel.loss: `outputs` must map tasks to logits, got RandomBatch"):
        model.loss(batch, outputs)
    with pytest.raises(
        ValueError, match=r"^RankingModel.loss: `outputs` must hold every task of the config, got none for 'like'; pass"
    ):
        model.loss({task: x for task, x in outputs.items() if task != "like"}, batch)
    lists = {task: x.tolist() for task, x in batch.labels.items()}
    with pytest.raises(TypeError, match=r"`batch.labels\['\w+'\]` must be a Tensor, got list"):
        model.loss(outputs, dataclasses.replace(batch, labels=lists))


# ---------------------------------------------------------------- batch and embeddings


def test_arguments_that_changed_places_or_are_no_batch(parts):
    model, batch, embeddings = parts
    words = (
        "^RankingModel: `batch` must have num_samples, dense, sequences, labels, got dict without num_samples; forward"
    )
    with pytest.raises(TypeError, match=words):
        model(embeddings, batch)
    with pytest.raises(TypeError, match=words):
        model.loss(model(batch, embeddings), {})
    with pytest.raises(TypeError, match=words):
        model.flops({})
    with pytest.raises(TypeError, match=r"^RankingModel: `embeddings` must map features to tensors, got list"):
        model(batch, list(embeddings.values()))
    with pytest.raises(
        TypeError, match=r"`batch.sequences\['history'\]` must have offsets, .*, got tuple without offsets"
    ):
        model(dataclasses.replace(batch, sequences={"history": (1, 2)}), embeddings)
    with pytest.raises(ValueError, match=r"`batch.sequences` must hold 'history', got \[\]"):
        model.flops(dataclasses.replace(batch, sequences={}))


def test_what_is_no_tensor(parts):
    model, batch, embeddings = parts
    with pytest.raises(TypeError, match=r"`embeddings\['year'\]` must be a Tensor, got list"):
        model(batch, embeddings | {"year": embeddings["year"].tolist()})
    sequence = batch.sequences["history"]
    for field in ("age", "dense", "offsets"):
        wrong = {"history": sequence._replace(**{field: getattr(sequence, field).tolist()})}
        with pytest.raises(TypeError, match=rf"`batch.sequences\['history'\].{field}` must be a Tensor, got list"):
            model(dataclasses.replace(batch, sequences=wrong), embeddings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_dtype_that_the_first_layer_does_not_read(parts, dtype):
    model, batch, embeddings = parts
    low = {name: x.detach().to(dtype) for name, x in embeddings.items()}
    words = rf"`embeddings\['[\w.]+'\]` must be torch.float32 like the layer that reads it, got {dtype}; cast it, or"
    with pytest.raises(TypeError, match=words):
        model(batch, low)
    with pytest.raises(
        TypeError, match=rf"`batch.dense` must be torch.float32 like the layer that reads it, got {dtype}"
    ):
        model(dataclasses.replace(batch, dense=batch.dense.to(dtype)), embeddings)
    with torch.autocast("cpu", torch.bfloat16):
        if dtype == torch.bfloat16:
            model(batch, low)
        else:
            with pytest.raises(TypeError, match=words):
                model(batch, low)


def test_events_in_half_precision_are_widened_by_their_ages(parts):
    model, batch, embeddings = parts
    item = embeddings["history.item"].detach()
    half = model(batch, embeddings | {"history.item": item.half()})
    exact = model(batch, embeddings | {"history.item": item.half().float()})
    assert all(torch.equal(half[task], exact[task]) for task in exact)
    with pytest.raises(TypeError, match=r"`embeddings\['history.item'\]` must be torch.float32 .*, got torch.float64"):
        model(batch, embeddings | {"history.item": item.double()})


def test_parameters_in_half_precision(parts):
    model, batch, embeddings = parts
    model.bfloat16()
    low = {name: x.bfloat16() for name, x in embeddings.items()}
    with pytest.raises(
        TypeError, match=r"the parameters must be float32 where there are sequences, got torch.bfloat16"
    ):
        model(batch, low)


def test_ids_are_no_embeddings(parts):
    model, batch, embeddings = parts
    for name in ("year", "history.item"):
        with pytest.raises(
            TypeError, match=rf"`embeddings\['{name}'\]` must be floating point, got torch.int64; look the"
        ):
            model(batch, embeddings | {name: embeddings[name].long()})


def test_a_model_in_double_takes_double(parts):
    model, batch, embeddings = parts
    double = {name: x.double() for name, x in embeddings.items()}
    model.double()(dataclasses.replace(batch, dense=batch.dense.double()), double)
