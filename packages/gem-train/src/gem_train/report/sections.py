"""The sections of the report, each a function from runs to HTML; one without data is empty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gem_train.report import figures
from gem_train.report.figures import COLOURS, Curve, Level, si
from gem_train.report.html import Raw, bar, card, folded, number, percent, table, text
from gem_train.report.run import Bar, Line, Run
from gem_train.run_dir import CHANGEABLE, Setting, differing


def header(run: Run) -> Raw:
    """Name, verdict and the main numbers."""
    config = run.config
    facts = [
        config.get("recipe") and f"recipe {config['recipe']}",
        config.get("dataset") and f"data {config['dataset']}",
        config.get("precision"),
        _devices(run),
        config.get("seed") is not None and f"seed {config['seed']}",
        run.begun and _minute(run.begun[0]),
    ]
    out = [f"<h1>{text(run.name)}</h1>", f"<p class=sub>{text(' · '.join(str(f) for f in facts if f))}</p>"]
    warning = _ending(run)
    if warning:
        out.append(f'<p class="verdict warn">{text(warning)}</p>')
    task = run.reference_task
    result = run.result(task) if task else {}
    if result.get("ne") is not None:
        error = run.reference_standard_error
        out.append(f"<p class=verdict>{text(verdict(result['ne'], run.reference, run.result_split or '', error))}</p>")
    account = run.account()
    where = f"{run.result_split}, {task}" if result else ""
    mfu = _mfu(run)
    cards = [
        card("normalised entropy", number(result.get("ne")), where),
        card("AUC", number(result.get("auc"))),
        card("calibration", number(result.get("calibration"), 3)),
        card("samples trained", "–" if run.samples is None else si(run.samples), f"{run.step or 0:,} steps"),
        card("samples per second", "–" if account.samples_per_second is None else si(account.samples_per_second)),
        *([] if mfu is None else [card("MFU, end to end", percent(mfu))]),
    ]
    out.append(f"<div class=cards>{''.join(cards)}</div>")
    return Raw("".join(out))


def verdict(ne: float, bars: Sequence[Bar], split: str, standard_error: float | None = None) -> str:
    """Where a score stands among the bars, in one sentence.

    Args:
        ne: The score.
        bars: Best NE first.
        split: What was evaluated.
        standard_error: Of an NE on this split; within two of it a difference is no difference. None where unknown.
    """
    start = f"{split.capitalize()} NE {ne:.4f}"
    if bars and standard_error is not None:
        return _verdict_with_error(start, ne, bars, standard_error)
    beaten = next((b for b in bars if b.ne > ne), None)
    ahead = next((b for b in reversed(bars) if b.ne <= ne), None)
    if not bars:
        side = "below" if ne <= 1.0 else "above"
        return f"{start}: {percent(abs(1 - ne))} {side} the entropy of the base rate."
    if ahead is None and beaten is not None:
        best = f"{beaten.predictor} ({beaten.ne:g})"
        return f"{start} beats all {len(bars)} reference predictors; the best of them is {best}."
    assert ahead is not None
    behind = f"{percent(ne / ahead.ne - 1)} behind {ahead.predictor} ({ahead.ne:g})"
    if beaten is None:
        return f"{start} is worse than all {len(bars)} reference predictors: {behind}."
    return f"{start} is better than {beaten.predictor} ({beaten.ne:g}) and {behind}."


def _verdict_with_error(start: str, ne: float, bars: Sequence[Bar], standard_error: float) -> str:
    margin = 2.0 * standard_error
    ahead = [b for b in bars if ne - b.ne > margin]
    level = [b for b in bars if abs(ne - b.ne) <= margin]
    beaten = [b for b in bars if b.ne - ne > margin]
    parts = []
    if ahead:
        parts.append(f"{percent(ne / ahead[-1].ne - 1)} behind {_bar_name(ahead[-1])}")
    if level:
        best = _bar_name(level[0])
        parts.append(f"level with {best}" + (f" and {len(level) - 1} more" if len(level) > 1 else ""))
    if beaten:
        parts.append(
            f"better than {len(beaten)} of {len(bars)} reference predictors, the best of them {_bar_name(beaten[0])}"
        )
    return (
        f"{start} with a standard error of {standard_error:g}: {'; '.join(parts)}. "
        "Level is a difference within two standard errors."
    )


def _bar_name(entry: Bar) -> str:
    return f"{entry.predictor} ({entry.ne:g})"


def results(run: Run) -> Raw:
    """Metrics per task and split, and the reference table."""
    rows, alike = [], []
    for split, lines in run.evaluations.items():
        for task in run.tasks:
            m = run.result(task, split) if lines else {}
            if m:
                if m.get("ne") is None and m.get("base_rate") in (0.0, 1.0):
                    alike.append(f"{split}, {task}")
                step = lines[-1].get("step")
                rows.append([split, task, f"{m.get('count', 0):,}", percent(m.get("base_rate"), 2), number(m.get("ne")),
                             number(m.get("auc")), number(m.get("calibration"), 3), number(m.get("logloss")),
                             "–" if step is None else f"{step:,}"])  # fmt: skip
    head = ["split", "task", "samples", "positive", "NE", "AUC", "calibration", "log loss", "at step"]
    out = [
        "<h2>Result</h2>",
        table(head, rows, numeric=range(2, 9)) if rows else "<p>No evaluation has been done yet.</p>",
    ]
    out.append(
        "<p>NE is the log loss divided by the entropy of the evaluated samples' own mean label: 1 is no better than "
        "that mean, lower is better. Calibration is the mean prediction divided by the mean label.</p>"
        "<p>The splits follow each other in time, with partly other users and other mean labels, and the history of a "
        "sample holds all events before it, those of its own split included: compare an NE with that of another model "
        "on the same split, not with that of another split.</p>"
    )
    if alike:
        out.append(
            f"<p>Without NE, AUC and calibration, which do not exist where all labels are alike: "
            f"{text('; '.join(alike))}.</p>"
        )
    if run.config.get("reference_note"):
        out.append(f"<p>{text(run.config['reference_note'])}</p>")
    main = run.reference_task
    mine = run.result(main) if main else {}
    if run.reference and mine.get("ne") is not None:
        entries = [(b.predictor, b.ne, b.auc, False) for b in run.reference]
        entries.append((run.name, mine["ne"], mine.get("auc"), True))
        entries.sort(key=lambda entry: entry[1])
        gain = max(0.02, max(1 - e[1] for e in entries))
        body = [
            [name, number(ne), number(auc, 3), f"{100 * (ne / mine['ne'] - 1):+.1f} %" if not own else "",
             bar((1 - ne) / gain, other=not own)]
            for name, ne, auc, own in entries
        ]  # fmt: skip
        own_row = next(k for k, entry in enumerate(entries) if entry[3])
        out.append(f"<h3>Against reference predictors (task {text(main)}, {text(run.result_split)})</h3>")
        error = run.reference_standard_error
        if error is not None:
            out.append(
                f"<p>The standard error of an NE on this split is {error:g}: a predictor within {2 * error:g} of this "
                "run is level with it. It is how far an NE would typically move with other users of the same kind.</p>"
            )
        columns = ["predictor", "NE", "AUC", "NE against this run", "entropy explained, 1 − NE"]
        out.append(table(columns, body, numeric=(1, 2, 3), this=(own_row,)))
    return Raw("".join(out))


def learning(runs: Sequence[Run]) -> Raw:
    """Loss, NE and AUC against samples, of one run or several."""
    plots = []
    several = len(runs) > 1
    task = runs[0].reference_task
    losses: list[Curve] = []
    for k, run in enumerate(runs):
        prefix = f"{run.name} " if several else ""
        losses += _curve(f"{prefix}training", run.windows, ("loss",), COLOURS[k % 6], marked=False)
        if not several:
            losses += _curve("validation", run.evaluations["validation"], ("loss",), COLOURS[1], marked=True)
    if losses:
        plots.append(figures.curves("Loss", losses, ylabel="loss per sample", alt=_describe("loss", losses)))
    for metric, title in (("ne", "Normalised entropy"), ("auc", "AUC")):
        lines: list[Curve] = []
        for k, run in enumerate(runs):
            prefix = f"{run.name} " if several else ""
            path = ("tasks", task, metric)
            if not several:
                lines += _curve("training windows", run.windows, path, COLOURS[0], marked=False)
            colour = COLOURS[k % 6] if several else COLOURS[1]
            lines += _curve(f"{prefix}validation", run.evaluations["validation"], path, colour, marked=True)
            if not several:
                lines += _curve("test", run.evaluations["test"], path, COLOURS[2], marked=True)
        values = [(f"{b.predictor} (test)", b.ne if metric == "ne" else b.auc) for b in _neighbours(runs[0])]
        levels = [Level(label, value) for label, value in values if value is not None]
        if lines:
            plots.append(
                figures.curves(
                    f"{title}, {task}", lines, ylabel=metric.upper(), levels=levels, alt=_describe(title, lines)
                )
            )
    if not plots:
        return Raw("")
    left_out = any(len(run.windows) < len(run.train) for run in runs)
    note = "<p>Windows of fewer steps than most, as the last one may be, are left out.</p>" if left_out else ""
    return Raw(f"<h2>Learning</h2>{note}<div class=plots>{''.join(plots)}</div>")


def calibration(run: Run) -> Raw:
    """A calibration plot per task of the last evaluation."""
    plots = []
    for task in run.tasks:
        result = run.result(task)
        points = [p for p in result.get("curve") or () if p.get("count")]
        if points:
            alt = f"calibration of {task}: " + "; ".join(
                f"{p['prediction']:.3g} observed {p['label']:.3g}" for p in points
            )
            plots.append(figures.calibration(f"{task}, {run.result_split}", points, alt=alt))
    if not plots:
        return Raw("")
    return Raw(
        f"<h2>Calibration</h2><p>Samples in order of their prediction, in groups of equal size. Bars are 95 % "
        f"intervals of the observed rate. Label and prediction are equal on the dashed "
        f"line, and each has its own scale.</p><div class=plots>{''.join(plots)}</div>"
    )


def throughput(run: Run) -> Raw:
    """Rates, MFU and where the time went."""
    account = run.account()
    if not account.seconds:
        return Raw("")
    peak = run.config.get("device_peak_flops")
    devices = int(run.config.get("num_devices") or run.config.get("world_size") or 1)
    rows: list[list[Any]] = [
        ["time in training, evaluation and checkpoints", f"{account.seconds:,.1f} s"],
        ["samples per second, median", number(account.samples_per_second, 0)],
    ]
    if account.flops_per_sample is not None:
        rows.append(["model FLOPs per sample, forward and backward", si(account.flops_per_sample, "FLOP")])
    if account.flops is not None:
        rows.append(["model FLOPs per second, end to end", si(account.flops / account.seconds, "FLOP/s")])
        compute = account.phases.get("forward", 0.0) + account.phases.get("backward", 0.0)
        if compute:
            rows.append(["model FLOPs per second, within forward and backward", si(account.flops / compute, "FLOP/s")])
            rows.append(["share of time in forward and backward", percent(compute / account.seconds)])
        if peak:
            rows.append(["peak of one device, dense bf16", f"{si(peak, 'FLOP/s')} × {devices}"])
            rows.append(["MFU, end to end", percent(account.flops / account.seconds / devices / peak, 2)])
            if compute:
                rows.append(["MFU within forward and backward", percent(account.flops / compute / devices / peak, 2)])
    memory = [line["memory_bytes"] for line in run.train if line.get("memory_bytes")]
    if memory:
        rows.append(["peak device memory", f"{max(memory) / 2**30:,.2f} GiB"])
    out = ["<h2>Throughput</h2>", table(["", ""], rows, numeric=(1,))]
    if not peak:
        out.append(f"<p>{text(run.config.get('mfu_reason') or 'No MFU: the peak of the device is not known.')}</p>")
    else:
        out.append(
            "<p>MFU counts the model's own products at true lengths: no recomputation, padding or optimizer.</p>"
        )
    if account.phases:
        total = sum(account.phases.values())
        body = [[cause, number(s, 1), percent(s / total), bar(s / total)] for cause, s in account.phases.items()]
        out += ["<h3>Where the time went</h3>", table(["cause", "seconds", "share", ""], body, numeric=(1, 2))]
    modules = run.flops_by_module()
    if modules:
        total = sum(modules.values()) or 1.0
        body = [[module, percent(f / total), bar(f / total)] for module, f in list(modules.items())[:15]]
        out += ["<h3>Where the model's FLOPs are</h3>", table(["module", "share", ""], body, numeric=(1,))]
    return Raw("".join(out))


def settings(run: Run) -> Raw:
    """What was changed in the recipe, and all settings."""
    values: Line = run.config.get("settings") or {}
    if not values:
        return Raw("")
    recipe: Line = run.config.get("changed") or {}
    changed = [[_code(name), _value(values.get(name)), _value(theirs)] for name, theirs in recipe.items()]
    rows = [[_code(name), _value(value)] for name, value in values.items()]
    head = ["setting", "this run", "recipe"]
    return Raw(
        "<h2>Settings</h2>"
        + (table(head, changed) if changed else "<p>All settings are the recipe's.</p>")
        + folded(f"All {len(rows)} settings", table(head[:2], rows))
    )


def layout(run: Run) -> Raw:
    """Parallel axes, parameters and the precision report."""
    out = []
    parallel = run.config.get("parallel") or {}
    parameters = run.config.get("parameters") or {}
    if parallel or parameters:
        rows = [[f"parameters, {kind}", f"{count:,}"] for kind, count in parameters.items()]
        rows += [[f"axis {axis}", f"{degree:,}"] for axis, degree in parallel.items()]
        if run.config.get("dense_wire"):
            rows.append(["dense parameters on the wire", run.config["dense_wire"]])
        if run.config.get("cuda_graphs"):
            rows.append(["CUDA graphs", run.config["cuda_graphs"]])
        out += ["<h2>Model and layout</h2>", table(["", ""], rows, numeric=(1,))]
    layers = run.config.get("layers") or ()
    if layers:
        keys = ("fqn", "kind", "precision", "backend", "reason")
        body = [[_code(row.get("fqn")), *(row.get(key) for key in keys[1:])] for row in layers]
        out += ["<h2>Precision</h2>", table(["module", "kind", "precision", "backend", "reason"], body)]
    return Raw("".join(out))


def balance(run: Run) -> Raw:
    """How even the ranks' work was, and what made the heaviest rank heavy."""
    lines = [line for line in run.train if line.get("balance")]
    if not lines:
        return Raw("")
    names = {
        "reader": "dealt by length where they are read",
        "exchange": "moved between the ranks by what they cost",
        "none": "as they come",
    }
    ratios = [float(line["balance"]["ratio"]) for line in lines]
    worst = max(lines, key=lambda line: float(line["balance"]["ratio"]))
    last = worst["balance"]
    rows = [
        ["samples", names[last["mode"]]],
        ["heaviest rank / mean, all records", number(sum(ratios) / len(ratios), 3)],
    ]
    if last["mode"] == "exchange":
        as_read = [float(line["balance"]["ratio_as_read"]) for line in lines]
        rows.append(["the same without moving", number(sum(as_read) / len(as_read), 3)])
    dearest = "; ".join(
        ", ".join(f"{name} of {length:,} events" for name, length in sample["lengths"].items())
        + f": {percent(sample['share'])}"
        for sample in last["dearest"]
    )
    rows += [
        ["worst record", f"step {worst['step']:,}: {number(last['ratio'], 3)}"],
        ["its heaviest rank", f"rank {last['heaviest_rank']} with {last['heaviest_samples']:,} samples"],
        ["why: its dearest samples, share of the rank's work", dearest or "none"],
    ]
    note = "Work is the model's FLOPs as a function of a sample's lengths; every step waits for the heaviest rank."
    return Raw(f"<h2>Balance of the ranks</h2>{table(['', ''], rows)}<p class=note>{text(note)}</p>")


def comparison(runs: Sequence[Run]) -> Raw:
    """This run beside others."""
    if len(runs) < 2:
        return Raw("")
    task = runs[0].reference_task
    own = runs[0].result(task).get("ne") if task else None
    rows = []
    for run in runs:
        result = run.result(task, runs[0].result_split) if task else {}
        ne, rate = result.get("ne"), run.account().samples_per_second
        change = f"{100 * (ne / own - 1):+.2f} %" if ne and own and run is not runs[0] else ""
        rows.append([run.name, run.config.get("precision"), run.config.get("seed"),
                     None if run.step is None else f"{run.step:,}", number(ne), change, number(result.get("auc")),
                     number(result.get("calibration"), 3), number(rate, 0), percent(_mfu(run), 2)])  # fmt: skip
    head = ["run", "precision", "seed", "steps", "NE", "against this run", "AUC", "calibration", "samples/s", "MFU"]
    return Raw(
        f"<h2>Comparison</h2><p>Task {text(task)}, {text(runs[0].result_split)}. One run each: a difference within the "
        "spread of seeds says nothing.</p>"
        + table(head, rows, numeric=range(2, 10), this=(0,))
        + "".join(_settings_beside(runs[0], other) for other in runs[1:])
    )


def _settings_beside(run: Run, other: Run) -> str:
    """In what the settings of another run differ, of those that weights depend on."""
    theirs, ours = other.config.get("settings"), run.config.get("settings")
    if not theirs or not ours:
        return f"<p>Whether {text(other.name)} has other settings was not recorded.</p>"
    different: list[Setting] = differing(theirs, ours, except_for=CHANGEABLE)
    if not different:
        return f"<p>{text(other.name)} has the same settings, length, layout and intervals aside.</p>"
    rows = [[_code(name), _value(there), _value(here)] for name, there, here in different]
    return table(["settings that differ", other.name, "this run"], rows)


def details(run: Run) -> Raw:
    """Dates, resumes, checkpoints, commit and versions."""
    rows: list[list[Any]] = []
    if run.begun:
        rows.append(["begun", _minute(run.begun[0])])
    resumes = [f"{step:,}" for step in run.starts if step]
    if resumes:
        when = f", last {_minute(run.begun[-1])}" if len(run.begun) > 1 else ""
        rows.append(["resumed at step", ", ".join(resumes) + when])
    if run.checkpoints:
        size = run.checkpoints[-1].get("bytes")
        seconds = [c["seconds"] for c in run.checkpoints if c.get("seconds") is not None]
        slowest = f", slowest {max(seconds):.2f} s" if seconds else ""
        rows.append(["checkpoints", f"{len(run.checkpoints)}{slowest}" + (f", last {si(size, 'B')}" if size else "")])
    if run.config.get("commit"):
        rows.append(["commit", run.config["commit"]])
    rows += [[name, version] for name, version in (run.config.get("versions") or {}).items()]
    return Raw("<h2>Details</h2>" + table(["", ""], rows)) if rows else Raw("")


def _code(name: object) -> Raw:
    return Raw(f"<code>{text(name)}</code>")


def _value(value: object) -> str:
    """A setting as --set takes it."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _minute(time: str) -> str:
    """2026-11-30T07:30:12+00:00 -> 2026-11-30 07:30 UTC."""
    return f"{time[:16].replace('T', ' ')} UTC"


def _devices(run: Run) -> str | None:
    name, count = run.config.get("device"), run.config.get("num_devices") or run.config.get("world_size")
    if name is None:
        return None
    return f"{count} × {name}" if count and count > 1 else str(name)


def _ending(run: Run) -> str | None:
    if run.end is None:
        return "This run has not ended: the numbers are those so far."
    reason = run.end.get("reason")
    return None if reason in (None, "finished") else f"This run was ended early: {reason}."


def _mfu(run: Run) -> float | None:
    account, peak = run.account(), run.config.get("device_peak_flops")
    if not peak or account.flops is None or not account.seconds:
        return None
    devices = int(run.config.get("num_devices") or run.config.get("world_size") or 1)
    return account.flops / (account.seconds * devices * float(peak))


def _curve(
    label: str, lines: Sequence[Line], path: tuple[str | None, ...], colour: str, *, marked: bool
) -> list[Curve]:
    points = []
    for line in lines:
        value: Any = line
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float) and math.isfinite(value) and line.get("samples") is not None:
            points.append((float(line["samples"]), float(value)))
    if not points:
        return []
    return [Curve(label, [x for x, _ in points], [y for _, y in points], colour, marked)]


def _neighbours(run: Run) -> list[Bar]:
    """The bars next to the run's test NE, on either side."""
    task = run.reference_task
    ne = run.result(task, "test").get("ne") if task else None
    if ne is None:
        return []
    return [*[b for b in run.reference if b.ne <= ne][-1:], *[b for b in run.reference if b.ne > ne][:1]]


def _describe(what: str, lines: Sequence[Curve]) -> str:
    return f"{what} against samples trained: " + "; ".join(
        f"{c.label} from {c.y[0]:.4g} to {c.y[-1]:.4g}" for c in lines
    )
