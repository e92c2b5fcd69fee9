"""What a recipe is, and the resolved settings of one run of it."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gem_model import RankingConfig, RankingModel
from gem_parallel import SparseOptimizerConfig, TableConfig
from gem_train.checks import check_fields, default_of
from gem_train.config import TrainerConfig
from gem_train.data import DatasetSchema, EventLog, Scoreboard
from gem_train.errors import ConfigError
from gem_train.overrides import apply_overrides
from gem_train.recipes.parallel import ParallelConfig

MAX_DIM = 1024
"""Of gem_parallel's tables."""

MAX_SHOWN_LAYERS = 32
"""Of a model whose layers an error lists."""

__all__ = ["DataConfig", "Recipe", "RunConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """How the reader serves the log."""

    global_batch_size: int = 256
    """Samples of a training step, over all ranks."""
    eval_batch_size: int = 1024
    """Samples of an evaluation batch, over all ranks; scores do not depend on it."""
    epochs: int = 1
    """Passes over the training split."""
    max_history: int = 200
    """Latest events kept of a history. A recipe's own value does not exceed the `max_history` of the data's schema; one
    that is set is taken as it is."""
    balance: Literal["reader", "exchange", "none"] = "reader"
    """How the samples of a step are spread over the ranks: dealt by length where they are read; moved between the ranks
    after reading, by what they cost the model; or as they come."""
    prefetch_batches: int = 2
    """Batches that a background thread prepares ahead; 0 for none."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("global_batch_size", "eval_batch_size", "epochs", "max_history"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"DataConfig: `{name}` must be >= 1, got {getattr(self, name)}; {default_of(self, name)}"
                )
        if self.prefetch_batches < 0:
            raise ConfigError(
                f"DataConfig: `prefetch_batches` must be >= 0, got {self.prefetch_batches}; "
                f"{default_of(self, 'prefetch_batches')}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole run that is known to work: data, model, and how to train it."""

    name: str
    """Name on the command line."""
    summary: str
    """One sentence."""
    schema: DatasetSchema
    """What its data holds, before any is read."""
    load: Callable[[Path | None], EventLog]
    """Reads the log from a data directory, or generates it."""
    data_dir: str | None
    """Where the data lies by default, relative to the working directory; None for generated data."""
    model: Callable[[EventLog | DatasetSchema], RankingConfig]
    """The model for a log; for a schema, all but what the data alone can say."""
    trainer: TrainerConfig
    """The loop."""
    data: DataConfig
    """The reader."""
    sparse: SparseOptimizerConfig
    """The optimizer of the tables."""
    reference_task: str
    """Task that the reference scores are for."""
    files: tuple[str, ...] = ()
    """Files that the data directory must hold."""
    reference: Scoreboard | None = None
    """Test scores of other predictors, and the split that they were measured on."""

    def reference_for(self, log: EventLog) -> Scoreboard | str | None:
        """The scores of other predictors, if they were measured on the test split of a log.

        Args:
            log: The data.

        Returns:
            The scores; a sentence that says why they are left out; or None if the recipe has none.
        """
        if self.reference is None:
            return None
        labels = log.labels[self.reference_task][log.samples("test")]
        theirs = (self.reference.num_samples, self.reference.num_positives)
        ours = (len(labels), int(labels.sum()))
        if ours == theirs:
            return self.reference
        return (
            f"The scores of other predictors are left out: they were measured on a test split of {theirs[0]:,} samples "
            f"with {theirs[1]:,} positives ({self.reference_task}), this one has {ours[0]:,} with {ours[1]:,}."
        )

    def directory(self, given: str | None) -> Path | None:
        """The data directory of a run.

        Args:
            given: What the user named, if anything.

        Returns:
            The directory, or None for generated data.

        Raises:
            ConfigError: if data is needed and the directory or one of its files is missing.
        """
        if self.data_dir is None:
            if given is not None:
                raise ConfigError(f"--data: recipe {self.name} generates its data, got {given!r}; leave it out")
            return None
        path = Path(given if given is not None else self.data_dir)
        if not path.is_dir():
            remedy = f"name the directory with its {' and '.join(self.files)}" if given else "name it with --data DIR"
            raise ConfigError(f"--data: the directory of {self.name} must exist, got {str(path)!r}; {remedy}")
        missing = [name for name in self.files if not (path / name).is_file()]
        if missing:
            raise ConfigError(
                f"--data: the directory of {self.name} must hold {' and '.join(self.files)}, got {str(path)!r} without "
                f"{' and '.join(missing)}; name the directory that holds them with --data DIR"
            )
        return path


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All settings of one run, overrides applied."""

    trainer: TrainerConfig
    data: DataConfig
    sparse: SparseOptimizerConfig
    model: RankingConfig
    parallel: ParallelConfig

    @classmethod
    def resolve(
        cls,
        recipe: Recipe,
        log: EventLog | DatasetSchema,
        assignments: Mapping[str, object],
        *,
        flags: Mapping[str, str] | None = None,
    ) -> "RunConfig":
        """The settings of a recipe on a log, with fields changed by the user.

        Args:
            recipe: The recipe.
            log: Its data, from which the model's features and priors follow; or `recipe.schema`, which finds the same
                mistakes before any data is read.
            assignments: Dotted field name -> value, or its text, such as trainer.learning_rate -> 1e-3.
            flags: Dotted field name -> the option that it was set with, where that is not --set.

        Returns:
            The settings.

        Raises:
            ConfigError: if a name is unknown, or a value does not fit its field, the other values or the data.
            TypeError: if an argument has another type.
        """
        _check_kind("recipe", recipe, (Recipe,), "name one in gem_train.recipes.get")
        _check_kind("log", log, (EventLog, DatasetSchema), "make one with load_events, or give the schema")
        _check_kind("assignments", assignments, (Mapping,), "for example {'trainer.max_steps': 5}, or {}")
        schema = log if isinstance(log, DatasetSchema) else log.schema
        plain = cls(
            trainer=recipe.trainer,
            # No more than either says; a value that a user gives is taken as it is.
            data=dataclasses.replace(recipe.data, max_history=min(recipe.data.max_history, schema.max_history)),
            sparse=recipe.sparse,
            model=recipe.model(log),
            parallel=ParallelConfig(),
        )
        _check_layers(plain.model, assignments)
        config = apply_overrides(plain, assignments, flags=flags)
        _check_reads(config.model, log)
        _check_sizes(config.model, assignments)
        return config

    def to_dict(self) -> dict[str, Any]:
        """JSON values of all fields."""
        return {field.name: dataclasses.asdict(getattr(self, field.name)) for field in dataclasses.fields(self)}


def _check_kind(name: str, value: object, kinds: tuple[type, ...], remedy: str) -> None:
    if not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"RunConfig.resolve: `{name}` must be of type {words}, got {value!r}; {remedy}")


def _check_layers(model: RankingConfig, assignments: Mapping[str, object]) -> None:
    """Refuses another number of layers without the self-attention of each, and names the field and values that fit."""
    text = str(assignments.get("model.num_layers", ""))
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SHOWN_LAYERS:
        return
    missing = []
    for index, tower in enumerate(model.sequences):
        fields = {f"model.sequences.{name}.self_attention" for name in (index, tower.name)}
        if len(tower.self_attention) != int(text) and not fields & assignments.keys():
            kinds = [tower.self_attention[min(layer, len(tower.self_attention) - 1)] for layer in range(int(text))]
            missing.append(f"--set model.sequences.{tower.name}.self_attention={','.join(kinds)}")
    if missing:
        raise ConfigError(
            f"--set model.num_layers={text}: a sequence names the self-attention of each layer: window, block or none; "
            f"add {' '.join(missing)}"
        )


def _check_reads(model: RankingConfig, log: EventLog | DatasetSchema) -> None:
    """Refuses a model that reads what the log does not have; only fields that a user set can differ."""
    schema = log if isinstance(log, DatasetSchema) else log.schema
    _check_names("tasks", model.tasks, log.tasks)
    _check_names("context_features", model.context_features, log.context_features)
    _check_count("num_dense", model.num_dense, log.num_dense)
    for index, tower in enumerate(model.sequences):
        _check_names(f"sequences.{index}.name", (tower.name,), (schema.history,))
        _check_names(f"sequences.{tower.name}.event_features", tower.event_features, log.event_features)
        _check_count(f"sequences.{tower.name}.num_event_dense", tower.num_event_dense, log.num_event_dense)


def _check_names(field: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(
            f"--set model.{field}={','.join(names)}: the data has no {', '.join(unknown)}; it has {', '.join(known)}"
        )


def _check_count(field: str, count: int, known: int) -> None:
    if count != known:
        raise ConfigError(f"--set model.{field}={count}: the data has {known} columns; leave it at {known}")


def _check_sizes(model: RankingConfig, assignments: Mapping[str, object]) -> None:
    """Refuses widths that no table and no model can have, or that this machine cannot hold."""
    given = [f"--set {name}={text}" for name, text in assignments.items() if name.startswith("model.")]
    if not given:
        return
    try:
        TableConfig(name="any", num_rows=1, dim=model.embedding_dim)
    except ValueError as error:
        raise ConfigError(
            f"--set model.embedding_dim={model.embedding_dim}: `embedding_dim` must be a multiple of 4 from 4 to "
            f"{MAX_DIM}, as the rows of a table have this width, got {model.embedding_dim}; for example 32"
        ) from error
    try:
        # Experts are alike, so that two tell the size of any number of them.
        one, two = (_num_parameters(dataclasses.replace(model, num_experts=count)) for count in (1, 2))
        num_parameters = one + (model.num_experts - 1) * (two - one)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{' '.join(given)}: such a model cannot be built: {reason}; use smaller sizes") from error
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * num_parameters > memory:
        raise ConfigError(
            f"{' '.join(given)}: the model's weights must fit in the {memory / 1e9:,.0f} GB of memory here, got "
            f"{num_parameters:,} parameters of 4 bytes; use smaller sizes"
        )


def _num_parameters(model: RankingConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RankingModel(model).parameters())
