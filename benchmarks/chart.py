"""The picture for the README: CPU and memory of a save and a load, by contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import CONTENDERS
from benchmarks.rows import OURS, Row

_SAVE = "#1f6feb"
_LOAD = "#e8833a"
_MUTED = "#57606a"
_BAR = 0.38
_DPI = 160
_PANELS = (
    ("CPU", "CPU seconds of the client per GiB"),
    ("extra memory", "Extra peak memory, MiB"),
)


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Draws the `plain` rows as grouped bars; returns False if there are none or no matplotlib."""
    plain = [row for row in rows if row.scenario == "plain" and row.value is not None]
    if not plain:
        return False
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    present = {row.contender for row in plain}
    contenders = [name for name in CONTENDERS if name in present][::-1]
    figure, panels = pyplot.subplots(
        1, len(_PANELS), figsize=(11, 0.75 * len(contenders) + 1.4), sharey=True
    )
    for panel, (metric, title) in zip(panels, _PANELS, strict=True):
        _fill(panel, [row for row in plain if row.metric == metric], contenders)
        panel.set_title(title, fontsize=11, loc="left", pad=10)
    panels[0].set_yticks(range(len(contenders)), [CONTENDERS[name].title for name in contenders])
    for label, name in zip(panels[0].get_yticklabels(), contenders, strict=True):
        label.set_fontweight("bold" if name == OURS else "normal")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower right", ncols=2, frameon=False, fontsize=10)
    size = plain[0].case.partition(" ")[2]
    figure.text(
        0.01,
        0.02,
        f"{size} state dict, one process, loopback S3 server; less is better",
        color=_MUTED,
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1), w_pad=3)
    figure.savefig(path, dpi=_DPI, facecolor="white")
    pyplot.close(figure)
    return True


def _fill(panel: object, rows: Sequence[Row], contenders: Sequence[str]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(panel, Axes)
    for action, colour, shift in (("save", _SAVE, _BAR / 2), ("load", _LOAD, -_BAR / 2)):
        found = {row.contender: row for row in rows if row.case.startswith(action)}
        shown = [(place, found[name]) for place, name in enumerate(contenders) if name in found]
        bars = panel.barh(
            [place + shift for place, _ in shown],
            [row.value or 0.0 for _, row in shown],
            height=_BAR,
            color=colour,
            label=action,
        )
        panel.bar_label(bars, labels=[_label(row) for _, row in shown], padding=3, fontsize=9)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0, labelsize=10)
    panel.tick_params(axis="x", labelsize=9, colors=_MUTED)
    panel.grid(axis="x", alpha=0.25)
    panel.set_axisbelow(True)
    panel.margins(x=0.12)


def _label(row: Row) -> str:
    value = row.value or 0.0
    if row.metric == "CPU":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
