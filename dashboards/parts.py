"""What every dashboard is made of: queries, four sorts of panel, and the variables at the top."""

from typing import NamedTuple, TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

PROMETHEUS = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
GRAFANA = common.DataSourceRef(type_val="grafana", uid="-- Grafana --")

SCHEMA_VERSION = 42
WIDTH_UNITS = 24  # of Grafana's grid
LINES_UNITS = 8  # height of a panel with lines
STAT_UNITS = 4  # height and width of a number
STACKED_PERCENT = 70  # how opaque a stacked area is

RANKS = '{run_id="$run_id", rank=~"$rank"}'
RUN = '{run_id="$run_id"}'
MACHINE = '{instance=~"$instance"}'

Panel: TypeAlias = Builder[models.Panel]


class Query(NamedTuple):
    """One expression and how its series are called in the legend."""

    expr: str
    legend: str = "rank {{rank}}"


class Look(NamedTuple):
    """How lines are drawn; the units are Grafana's names."""

    unit: str = "short"
    log_base: float | None = None  # of a logarithmic axis
    stacked: bool = False
    least: float | None = None  # where the axis starts
    whole: bool = False  # the axis has no fractions


PLAIN = Look()
COUNT = Look(least=0, whole=True)
COUNTS = Look(stacked=True, least=0, whole=True)  # that add up to something
EXACT = "locale"  # Grafana's name of a number with all its digits: 1,400, where "short" says 1.40 K


class Verdict(NamedTuple):
    """The colours of a number: below `limit`, and from there on."""

    below: str
    limit: float
    above: str


ANY_IS_BAD = Verdict("green", 1, "red")
ANY_IS_GOOD = Verdict("text", 1, "green")
NONE_IS_BAD = Verdict("red", 1, "green")


def lines(title: str, text: str, queries: list[Query], look: Look = PLAIN) -> Panel:
    """Values over time. A gap stays a gap: a value that was not finite is absent."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(PROMETHEUS)
        .unit(look.unit)
        .height(LINES_UNITS)
        .span(WIDTH_UNITS // 2)
        .span_nulls(False)
        # A stacked series that is 0 lies on the one below it: its line would hide that one's colour.
        .line_width(0 if look.stacked else 1)
        .fill_opacity(STACKED_PERCENT if look.stacked else 0)
        .show_points(common.VisibilityMode.AUTO)
        .legend(common_builders.VizLegendOptions().show_legend(True).display_mode(common.LegendDisplayMode.LIST))
    )
    if look.log_base is not None:
        scale = common_builders.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(look.log_base)
        panel.scale_distribution(scale)
    if look.stacked:
        panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if look.least is not None:
        panel.min(look.least)
    if look.whole:
        panel.decimals(0)
    for number, query in enumerate(queries):
        panel.with_target(_target(query, number))
    return panel


def number(title: str, text: str, query: Query, verdict: Verdict | None = None) -> stat.Panel:
    """The latest value, large; without a verdict in the colour of text."""
    steps = [models.Threshold(None, "text")]
    if verdict is not None:
        steps = [models.Threshold(None, verdict.below), models.Threshold(verdict.limit, verdict.above)]
    return (
        stat.Panel()
        .title(title)
        .description(text)
        .datasource(PROMETHEUS)
        .unit("short")
        .height(STAT_UNITS)
        .span(STAT_UNITS)
        .thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common.BigValueGraphMode.NONE)
        .with_target(_target(query, 0))
    )


def buckets(title: str, text: str, expr: str, unit: str) -> Panel:
    """A heat map of a histogram's buckets: `expr` sums by `le`."""
    target = _target(Query(expr, "{{le}}"), 0).format(PromQueryFormat.HEATMAP)
    return _heat(title, text).y_axis(heatmap.YAxisConfig().unit(unit)).with_target(target)


def rows(title: str, text: str, query: Query, unit: str) -> Panel:
    """A heat map with a row per series, in the colour of its value."""
    cells = heatmap.CellValues().unit(unit)
    # As time series: the other format would take the rows for buckets that add up.
    return _heat(title, text).cell_values(cells).with_target(_target(query, 0).format(PromQueryFormat.TIME_SERIES))


def _heat(title: str, text: str) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .title(title)
        .description(text)
        .datasource(PROMETHEUS)
        .height(LINES_UNITS)
        .span(WIDTH_UNITS // 2)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(32))
    )


class Section(NamedTuple):
    """A row of the dashboard with what stands below it."""

    title: str
    panels: list[Panel]


def page(
    title: str, uid: str, text: str, sections: list[Section], variables: list[builders.QueryVariable] | None = None
) -> builders.Dashboard:
    """A dashboard that asks for its data source and its variables at the top: without any, for a run and ranks."""
    built = (
        builders.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags(["sentinel"])
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("10s")
        .link(_to_other_pages())
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for variable in _of_run() if variables is None else variables:
        built.with_variable(variable)
    for section in sections:
        built.with_row(builders.Row(section.title))
        for panel in section.panels:
            built.with_panel(panel)
    return built


def of_machines() -> list[builders.QueryVariable]:
    """The variable of a page about machines: any of the daemons that answer."""
    return [_any_of(_variable("instance", "Machine", "label_values(sentinel_build_info, instance)"))]


def finished(built: builders.Dashboard) -> models.Dashboard:
    """The dashboard with what Grafana would add by itself: numbers of panels and the schema's version."""
    result = built.build()
    result.schema_version = SCHEMA_VERSION
    for identifier, panel in enumerate(result.panels or [], 1):
        panel.id_val = identifier
    for variable in result.templating.list_val or []:
        # The SDK says them of every variable; they belong to those of the type "interval".
        variable.auto = variable.auto_count = variable.auto_min = None
    return result


def _of_run() -> list[builders.QueryVariable]:
    ranks = _variable("rank", "Rank", 'label_values(sentinel_rank_up{run_id="$run_id"}, rank)')
    return [_variable("run_id", "Run", "label_values(sentinel_rank_up, run_id)"), _any_of(ranks)]


def _any_of(variable: builders.QueryVariable) -> builders.QueryVariable:
    """One, several, or all, which is what a fresh page shows."""
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return variable.multi(True).include_all(True).all_value(".*").current(everything)


def _to_other_pages() -> builders.DashboardLink:
    link = builders.DashboardLink("Sentinel").type(models.DashboardLinkType.DASHBOARDS).tags(["sentinel"])
    return link.icon("external link").include_vars(True).keep_time(True)


def _variable(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(PROMETHEUS)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC if name == "rank" else models.VariableSort.ALPHABETICAL_ASC)
    )


def _target(query: Query, number: int) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .datasource(PROMETHEUS)
        .expr(query.expr)
        .legend_format(query.legend)
        .ref_id(chr(ord("A") + number))
    )
