"""UCI Online Retail: will the same customer buy the same item again within 60 days?

The set has purchases and no impressions; this label needs no sampled negatives, and becomes known only 60 days later.
D. Chen, S. L. Sain, K. Guo, "Data mining for the online retail industry", 2012, doi 10.1057/dbm.2012.17.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gem_train.data.arguments import check_directory
from gem_train.data.log import EventLog, build_event_log
from gem_train.data.parquet import Array, StringLists, Table, read_table
from gem_train.data.ranges import lengths_to_offsets
from gem_train.data.schema import (
    CONTEXT_DENSE,
    EVENT_DENSE,
    BucketFeature,
    CategoricalFeature,
    Column,
    DatasetSchema,
    DenseColumn,
    Label,
    TimeSplit,
)

HORIZON_SECONDS = 60 * 86_400

RAW_EVENT_COLUMNS = (
    Column(name="customer_id", kind="int", minimum=0, maximum=2**31 - 1),
    Column(name="item_id", kind="string"),
    Column(name="timestamp", kind="int", minimum=0),
    Column(name="invoice", kind="string"),
    Column(name="quantity", kind="int"),
    Column(name="unit_price", kind="float"),
)
RAW_ITEM_COLUMNS = (Column(name="item_id", kind="string"), Column(name="description", kind="string"))

ONLINE_RETAIL = DatasetSchema(
    name="online-retail",
    user="customer_id",
    event_columns=(
        Column(name="customer_id", kind="int"),
        Column(name="item_id", kind="string"),
        Column(name="timestamp", kind="int"),
        Column(name="quantity", kind="int", minimum=1),
        Column(name="unit_price", kind="float", minimum=0),
        Column(name="bought_again", kind="int", minimum=0, maximum=1),
        Column(name="label_complete", kind="int", minimum=0, maximum=1),
    ),
    item_columns=(Column(name="item_id", kind="string"), Column(name="words", kind="strings")),
    labels=(Label(task="repurchase", column="bought_again", op="eq", value=1, delay_seconds=HORIZON_SECONDS),),
    labelled="label_complete",
    features=(
        CategoricalFeature(name="item", column="item_id", min_count=2),
        CategoricalFeature(name="words", column="words", source="items", min_count=20),
        BucketFeature(name="price", column="unit_price", num_buckets=20),
        BucketFeature(name="quantity", column="quantity", num_buckets=20),
        CategoricalFeature(name="bought_again", column="bought_again", values=(0, 1)),
    ),
    candidate_features=("item", "words", "price"),
    history_features=("item", "price", "quantity", "bought_again"),
    context_dense=(*CONTEXT_DENSE, DenseColumn(column="unit_price", transform="log1p")),
    event_dense=(
        *EVENT_DENSE,
        DenseColumn(column="unit_price", transform="log1p"),
        DenseColumn(column="quantity", transform="log1p"),
    ),
    split=TimeSplit(gap_seconds=HORIZON_SECONDS),
)
"""Columns are those after the derivation of `load_online_retail`. The item table's median price is left alone: it is a
statistic of the whole period, test included."""


def load_online_retail(directory: str | os.PathLike[str], schema: DatasetSchema = ONLINE_RETAIL) -> EventLog:
    """Reads events.parquet and items.parquet, keeps the usable lines and derives the label.

    A line is usable when its customer is known, quantity and price are positive, and the stock code begins with five
    digits; of several lines of one customer, invoice and item the first counts. Its label is complete when 60 days of
    data follow it.

    Args:
        directory: The directory.
        schema: The schema, or a variant of it.

    Returns:
        The log; `row` counts the lines of events.parquet.

    Raises:
        DataError: if a file breaks a rule.
        TypeError: if an argument has another type.
    """
    check_directory("load_online_retail", directory)
    events = read_table(Path(directory) / "events.parquet", RAW_EVENT_COLUMNS)
    items = read_table(Path(directory) / "items.parquet", RAW_ITEM_COLUMNS)
    return build_event_log(schema, derive_events(events), derive_items(items))


def derive_events(raw: Table) -> Table:
    """Keeps the usable lines and adds the columns bought_again and label_complete.

    Args:
        raw: Columns RAW_EVENT_COLUMNS.

    Returns:
        The usable lines, in file order.
    """
    columns = raw.columns
    usable = (
        (columns["customer_id"] > 0)
        & (columns["quantity"] > 0)
        & (columns["unit_price"] > 0)
        & _begins_with_digits(columns["item_id"], 5)
    )
    rows = np.flatnonzero(usable)
    customer = columns["customer_id"][rows].astype(np.int64)
    item = np.unique(columns["item_id"][rows], return_inverse=True)[1].astype(np.int64)
    invoice = np.unique(columns["invoice"][rows], return_inverse=True)[1].astype(np.int64)
    order = np.lexsort((rows, item, invoice, customer))
    first = np.ones(len(rows), dtype=np.bool_)
    first[1:] = (np.diff(customer[order]) != 0) | (np.diff(invoice[order]) != 0) | (np.diff(item[order]) != 0)
    keep = np.sort(order[first])
    rows, customer, item = rows[keep], customer[keep], item[keep]
    timestamp = columns["timestamp"][rows].astype(np.int64)
    next_purchase = _next_time(customer, item, timestamp)
    derived: dict[str, Array] = {name: values[rows] for name, values in columns.items() if name != "invoice"}
    derived["bought_again"] = (next_purchase - timestamp <= HORIZON_SECONDS).astype(np.int64)
    derived["label_complete"] = (timestamp + HORIZON_SECONDS <= columns["timestamp"].max()).astype(np.int64)
    return Table(raw.file, len(rows), derived, {}, rows)


def derive_items(raw: Table) -> Table:
    """Splits the descriptions into words of letters and digits, in lower case.

    Args:
        raw: Columns RAW_ITEM_COLUMNS.

    Returns:
        Columns item_id and words.
    """
    words = [
        "".join(c if c.isalnum() else " " for c in description.lower()).split()
        for description in raw.columns["description"].tolist()
    ]
    lengths = np.fromiter((len(w) for w in words), dtype=np.int64, count=len(words))
    flat = np.asarray([word for entry in words for word in entry], dtype=np.str_)
    lists = {"words": StringLists(flat, lengths_to_offsets(lengths))}
    return Table(raw.file, raw.num_rows, {"item_id": raw.columns["item_id"]}, lists)


def _begins_with_digits(codes: Array, count: int) -> npt.NDArray[np.bool_]:
    distinct, inverse = np.unique(codes, return_inverse=True)
    good = np.asarray([len(c) >= count and c[:count].isdecimal() for c in distinct.tolist()], dtype=np.bool_)
    return good[inverse]


def _next_time(
    customer: npt.NDArray[np.int64], item: npt.NDArray[np.int64], timestamp: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Time of the next strictly later purchase of the same item by the same customer; far away if there is none."""
    order = np.lexsort((timestamp, item, customer))
    c, i, t = customer[order], item[order], timestamp[order]
    same_pair = (c[1:] == c[:-1]) & (i[1:] == i[:-1])
    # Position of the first row of the next (customer, item, timestamp) group, for every row.
    new_group = np.ones(len(order) + 1, dtype=np.bool_)
    new_group[1:-1] = ~same_pair | (t[1:] != t[:-1])
    starts = np.flatnonzero(new_group)
    group = np.cumsum(new_group[:-1]) - 1
    following = starts[group + 1]
    inside = np.minimum(following, len(order) - 1)
    same = (following < len(order)) & (c[inside] == c) & (i[inside] == i)
    result = np.empty(len(order), dtype=np.int64)
    result[order] = np.where(same, t[inside], np.iinfo(np.int64).max)
    return result
