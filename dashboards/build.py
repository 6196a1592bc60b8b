"""Writes the dashboards as Grafana has them: `python -m dashboards.build`. Needs grafana-foundation-sdk."""

from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models

from dashboards.deep_dive import DEEP_DIVE
from dashboards.overview import OVERVIEW
from dashboards.panels import Board, Panel, Query

BOARDS = {"grafana/lastgood-overview.json": OVERVIEW, "grafana/lastgood-deep-dive.json": DEEP_DIVE}

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS = 24


def to_json(board: Board) -> str:
    """The dashboard's file."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["lastgood", "training"])
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_run_variable())
        .link(
            dashboard.DashboardLink("lastgood")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["lastgood"])
            .include_vars(True)
            .keep_time(True)
        )
        .annotation(
            dashboard.AnnotationQuery()
            .name("restarts")
            .datasource(_SOURCE)
            .enable(True)
            .icon_color("red")
            .expr('changes(lastgood_generation{run=~"$run"}[$__interval]) > 0')
        )
    )
    y = 0
    for row in board.rows:
        made = made.with_row(dashboard.Row(row.title).grid_pos(models.GridPos(h=1, w=_COLUMNS, x=0, y=y)))
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                y, x, height = y + height, 0, 0
            made = made.with_panel(_panel(panel).grid_pos(models.GridPos(h=panel.height, w=panel.width, x=x, y=y)))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return JSONEncoder(sort_keys=True, indent=2).encode(made.build()) + "\n"


def _run_variable() -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable("run")
        .label("Run")
        .datasource(_SOURCE)
        .query({"query": "label_values(lastgood_run_info, run)", "refId": "run"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> Any:
    match panel.kind:
        case "stat":
            made: Any = (
                stat.Panel()
                .graph_mode(kinds.BigValueGraphMode.NONE)
                .color_mode(kinds.BigValueColorMode.VALUE)
                .text_mode(kinds.BigValueTextMode.NAME if panel.named else kinds.BigValueTextMode.AUTO)
                .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            )
        case "bars":
            made = (
                bargauge.Panel()
                .display_mode(kinds.BarGaugeDisplayMode.BASIC)
                .orientation(kinds.VizOrientation.HORIZONTAL)
                .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
                .min(0)
            )
        case "timeseries":
            made = _timeseries(panel)
    made = made.title(panel.title).description(panel.description).datasource(_SOURCE).unit(panel.unit)
    if panel.kind != "bars" and panel.minimum is not None:
        made = made.min(panel.minimum)
    if panel.maximum is not None:
        made = made.max(panel.maximum)
    if panel.steps:
        steps = [models.Threshold(value=value, color=color) for value, color in panel.steps]
        thresholds = dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
        made = made.thresholds(thresholds).color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    if panel.words:
        options = {value: models.ValueMappingResult(text=text) for value, text in panel.words}
        made = made.mappings([models.ValueMap(options=options)])
    if panel.may_be_empty:
        made = made.no_value("none")
    for number, query in enumerate(panel.queries):
        made = made.with_target(_target(query, chr(ord("A") + number), instant=panel.kind != "timeseries"))
    return made


def _timeseries(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .show_points(kinds.VisibilityMode.AUTO)
        .span_nulls(False)
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .placement(kinds.LegendPlacement.BOTTOM)
            .display_mode(kinds.LegendDisplayMode.LIST)
        )
    )
    if panel.stacked:
        made = made.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL)).fill_opacity(60).line_width(0)
    return made


def _target(query: Query, ref: str, *, instant: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref)
    return made.instant() if instant else made.range()


def main() -> None:
    for name, board in BOARDS.items():
        Path(__file__).parent.joinpath(name).write_text(to_json(board), encoding="utf-8")


if __name__ == "__main__":
    main()
